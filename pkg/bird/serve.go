package bird

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/tick"
)

const (
	startTimeout = 10 * time.Second // for the first answer of a new BIRD
	// starved is the maximum delay of a timer. A longer delay indicates that this process was
	// starved of CPU time, so that a missing answer is no evidence that BIRD hangs.
	starved       = 500 * time.Millisecond
	retryInterval = 50 * time.Millisecond // between attempts of a failed command
	// Bounds of the time without an answer after which BIRD is killed.
	minHang, maxHang = 4 * time.Second, 10 * time.Second
)

// serve polls and configures one BIRD process. It returns when the process must be replaced.
func (s *Supervisor) serve(ctx context.Context, p *process) error {
	if err := s.connect(ctx, p); err != nil {
		return err
	}
	_, resolved := s.resolver.result.Get()
	_, expected := s.expect.Get()
	_, leased := s.lease.State().Get()
	s.unansweredSince, s.holds, s.imports = time.Time{}, holdTimers{}, imports{}
	s.fast.start(time.Now())
	s.pulse.Next(0)
	due, timer := time.Now(), time.After(0)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.exited:
			return nil
		case <-resolved:
			_, resolved = s.resolver.result.Get()
		case err := <-s.apply.written:
			s.applyStaged(ctx, err)
		case <-expected:
			_, expected = s.expect.Get()
			s.fast.start(time.Now())
		case <-leased:
			_, leased = s.lease.State().Get()
			s.fast.start(time.Now())
		case <-s.hint:
		case <-s.export:
			reload := "reload out"
			if s.state.Load().Version >= "3" {
				reload = "reload filters out"
			}
			for _, protocol := range []string{"KERNEL4", "KERNEL6"} {
				if _, err := s.command(ctx, reload+` "`+protocol+`"`); err != nil {
					s.options.Log.Warn("failed to re-export routes to the kernel", "protocol", protocol, "error", err)
				}
			}
		case <-timer:
			if time.Since(due) > starved { // restart the wait for an answer
				s.unansweredSince = time.Time{}
			}
		}
		s.observe(ctx, p)
		s.stage()
		if s.hung() {
			return fmt.Errorf("%w: no answer for %v", errHung, time.Since(s.unansweredSince).Round(time.Millisecond))
		}
		now := time.Now()
		wait := s.wait(now)
		due, timer = now.Add(wait), time.After(wait)
		s.pulse.Next(wait)
	}
}

func (s *Supervisor) wait(now time.Time) time.Duration {
	switch {
	case !s.unansweredSince.IsZero():
		return retryInterval
	case s.fast.active(now), s.confirming.Load() > 0:
		return fastInterval
	}
	if wait := s.holds.wait(now); wait < pollInterval {
		return wait
	}
	return tick.Until(now, pollInterval)
}

// connect dials the control socket of a new BIRD until it answers with its greeting.
func (s *Supervisor) connect(ctx context.Context, p *process) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	retry := time.NewTicker(fastInterval)
	defer retry.Stop()
	for {
		client, err := s.dial(ctx, s.options.Socket)
		if err == nil && client.PID != p.pid() {
			// Another BIRD has taken over the socket: do not report its sessions as sessions of this one.
			err = fmt.Errorf("process %d serves the control socket %s", client.PID, s.options.Socket)
			err = errors.Join(err, client.Close())
		}
		if err == nil {
			s.client = client
			return nil
		}
		select {
		case <-retry.C:
		case <-p.exited:
			return p.ended()
		case <-ctx.Done():
			return fmt.Errorf("BIRD did not open its control socket: %w", err)
		}
	}
}

func (s *Supervisor) disconnect() {
	if s.client != nil {
		_ = s.client.Close() // the error is irrelevant: every reply was read completely
		s.client = nil
	}
}

// errStarved reports that this process was starved of CPU time while BIRD should have answered.
var errStarved = errors.New("no answer while the frontend was starved of CPU time")

// command sends a command and updates unansweredSince. It waits at most until BIRD counts as
// hung.
func (s *Supervisor) command(ctx context.Context, command string) (Reply, error) {
	begin := time.Now()
	if s.unansweredSince.IsZero() {
		s.unansweredSince = begin
	}
	deadline := begin.Add(min(commandTimeout, s.unansweredSince.Add(s.hangLimit()).Sub(begin)))
	bounded, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	reply, err := s.exchange(bounded, command)
	if reply == nil {
		if time.Since(deadline) > starved && ctx.Err() == nil {
			s.unansweredSince = time.Now()
			return nil, fmt.Errorf("%w: %w", errStarved, err)
		}
		return nil, err
	}
	s.unansweredSince = time.Time{}
	if s.options.OnAnswer != nil {
		s.options.OnAnswer(time.Since(begin))
	}
	return reply, err
}

// exchange sends a command. It connects first if the connection is closed.
func (s *Supervisor) exchange(ctx context.Context, command string) (Reply, error) {
	if s.client == nil {
		client, err := s.dial(ctx, s.options.Socket)
		if err != nil {
			return nil, err
		}
		s.client = client
	}
	reply, err := s.client.Command(ctx, command)
	if reply == nil {
		s.disconnect() // a late answer would be read as the answer to the next command
	}
	return reply, err
}

// hung reports whether BIRD was silent for longer than its shortest hold time, after which its
// sessions are lost.
func (s *Supervisor) hung() bool {
	return !s.unansweredSince.IsZero() && time.Since(s.unansweredSince) >= s.hangLimit()
}

func (s *Supervisor) hangLimit() time.Duration {
	// Static gateways have no hold time.
	sessions := slices.DeleteFunc(slices.Clone(s.apply.current.input.Sessions), Session.IsStatic)
	if len(sessions) == 0 {
		return minHang
	}
	shortest := slices.MinFunc(sessions, func(a, b Session) int { return cmp.Compare(a.HoldTime, b.HoldTime) })
	return min(max(shortest.HoldTime+time.Second, minHang), maxHang)
}

func (s *Supervisor) observe(ctx context.Context, p *process) {
	at := time.Now()
	reply, err := s.command(ctx, "show protocols all")
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		s.observeFailed(err)
		return
	}
	if time.Since(at) > starved {
		s.trigger() // the reply is outdated: poll again
	}
	version := s.client.Version
	protocols := map[string]protocolState{}
	for _, x := range parseProtocols(reply) {
		protocols[x.Name] = x
	}
	s.enable(ctx, protocols)
	s.restore(at, protocols)
	s.watchImports(ctx, at, protocols, version)
	s.holds.observe(at, protocols)
	bfd := s.bfd(ctx)
	before, lease := s.state.Load(), s.lease.State().Load()
	gateways := s.resolver.result.Load().states(at, protocols, bfd, lease, before)
	s.noDelay.Load().describe(gateways)
	s.imports.describe(gateways)
	s.checkExports(ctx, at, gateways, before.Gateways)
	s.errors.describe(at, gateways, protocols, s.apply.current.input.Sessions)
	if s.logTransitions(before.Gateways, gateways) {
		s.fast.start(at) // BIRD before 2.14 may sleep before it feeds the session
		s.sessionCame()  // the log line may be missing: an operator can disable it
	}
	if exports(gateways, s.expect.Load()) {
		s.fast.converged()
	}
	s.state.Update(func(st State) State {
		st.At, st.Alive, st.Err, st.Gateways = at, true, nil, gateways
		st.Version, st.PID, st.Since, st.LeaseErr = version, p.pid(), p.since, lease.Err
		st.Loopback = loopback(protocols[LoopbackName])
		return st
	})
}

// observeFailed records a failed poll. It ignores a broken connection until commandTimeout: that
// alone is no evidence that BIRD hangs.
func (s *Supervisor) observeFailed(err error) {
	switch {
	case errors.Is(err, errStarved):
		return
	case s.unansweredSince.IsZero(): // BIRD answered with an error: refused or shutting down
	case time.Since(s.unansweredSince) < commandTimeout:
		return
	default:
		err = fmt.Errorf("%w: %w", errHung, err)
	}
	s.state.Update(func(st State) State { st.Alive, st.Err = false, err; return st })
}

// noSocket is BIRD's error for a protocol without a listening socket. BIRD up to 3.4.0 never
// retries.
const noSocket = "No listening socket"

// enable re-enables the protocols that BIRD disabled because it could not open a listening
// socket.
func (s *Supervisor) enable(ctx context.Context, protocols map[string]protocolState) {
	now := time.Now()
	if now.Before(s.sockets.notBefore) {
		return
	}
	failed := false
	for name, p := range protocols {
		if p.State != "down" || !strings.Contains(p.Info, noSocket) {
			continue
		}
		failed = true
		_, err := s.command(ctx, `enable "`+name+`"`)
		s.options.Log.Warn("BIRD could not open a listening socket, retrying",
			"protocol", name, "attempts", s.sockets.failures+1, "error", err)
	}
	if failed {
		s.sockets.failed(now)
	} else {
		s.sockets = retries{}
	}
}

// bfd returns the states of the BFD sessions.
func (s *Supervisor) bfd(ctx context.Context) map[netip.Addr]string {
	withBFD := func(x Session) bool { return x.BFD != nil }
	if !slices.ContainsFunc(s.apply.current.input.Sessions, withBFD) {
		return nil
	}
	// The command omits the protocol's name: BIRD 2.0.12 refuses a name in double quotes here.
	reply, err := s.command(ctx, "show bfd sessions")
	if err != nil {
		return nil // the next poll retries
	}
	return parseBFD(reply)
}
