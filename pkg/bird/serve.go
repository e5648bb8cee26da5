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

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/task"
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
	minHoldTime      = 3 * time.Second // of BGP (RFC 4271)
)

// serve polls and configures one BIRD process. It returns when the process must be replaced.
func (supervisor *Supervisor) serve(ctx context.Context, process *process) error {
	supervisor.process = process
	if err := supervisor.connect(ctx); err != nil {
		return err
	}
	// Get the channels before the first poll, so that no change between the two is missed.
	_, resolved := supervisor.resolver.result.Get()
	_, expected := supervisor.expect.Get()
	_, leased := supervisor.lease.State().Get()
	supervisor.unansweredSince, supervisor.holds, supervisor.imports = time.Time{}, holdTimers{}, imports{}
	supervisor.bfdStates = nil
	supervisor.fast.start(time.Now())
	supervisor.pulse.Next(0)
	due, timer := time.Now(), time.After(0)
	for {
		then := func() {}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-process.exited:
			// runOnce returns the reason of the exit.
			return nil
		case <-resolved:
			_, resolved = supervisor.resolver.result.Get()
		case err := <-supervisor.apply.written:
			then = func() { supervisor.applyStaged(ctx, err) }
		case <-expected:
			// Poll fast until the gateways have the routes: callers wait for the export.
			_, expected = supervisor.expect.Get()
			supervisor.fast.start(time.Now())
		case <-leased:
			_, leased = supervisor.lease.State().Get()
			supervisor.fast.start(time.Now())
		case <-supervisor.hint:
		case <-supervisor.export:
			then = func() {
				// The command has another name in BIRD 3.
				reload := "reload out"
				if supervisor.state.Load().Version >= "3" {
					reload = "reload filters out"
				}
				for _, protocol := range []string{"KERNEL4", "KERNEL6"} {
					if _, err := supervisor.command(ctx, reload+` "`+protocol+`"`); err != nil {
						supervisor.options.Log.Warn("failed to re-export routes to the kernel", "protocol", protocol, "error", err)
					}
				}
			}
		case <-timer:
		}
		// After a stall several channels are ready, and one of them is chosen.
		if late := time.Since(due); late > starved && !supervisor.unansweredSince.IsZero() {
			supervisor.unansweredSince = supervisor.unansweredSince.Add(late)
		}
		then()
		// Observe first: if BIRD lacks protocols, stage loads the configuration again.
		supervisor.observe(ctx)
		supervisor.stage()
		if supervisor.hung() {
			return fmt.Errorf("%w: no answer for %v", errHung, time.Since(supervisor.unansweredSince).Round(time.Millisecond))
		}
		now := time.Now()
		wait := supervisor.wait(now)
		due, timer = now.Add(wait), time.After(wait)
		supervisor.pulse.Next(wait)
	}
}

func (supervisor *Supervisor) wait(now time.Time) time.Duration {
	switch {
	case !supervisor.unansweredSince.IsZero():
		return retryInterval
	case now.Before(supervisor.fast.until), supervisor.confirming.Load() > 0:
		return fastInterval
	}
	if wait := supervisor.holds.wait(now); wait < pollInterval {
		return wait
	}
	return tick.Until(now, pollInterval)
}

// connect dials the control socket of a new BIRD until it answers with its greeting.
func (supervisor *Supervisor) connect(ctx context.Context) error {
	ctx, cancel := task.WithAwakeTimeout(ctx, startTimeout)
	defer cancel()
	retry := time.NewTicker(fastInterval)
	defer retry.Stop()
	for {
		err := supervisor.open(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-retry.C:
		case <-supervisor.process.exited:
			return supervisor.process.ended()
		case <-ctx.Done():
			return fmt.Errorf("BIRD did not open its control socket: %w", err)
		}
	}
}

// open dials the control socket of this BIRD. Another one may have taken it over, whose sessions
// are not reported as those of this one, and which gets no configuration.
func (supervisor *Supervisor) open(ctx context.Context) error {
	client, err := supervisor.dial(ctx, supervisor.options.Socket)
	if err != nil {
		return err
	}
	if client.PID != supervisor.process.pid() {
		err := fmt.Errorf("process %d serves the control socket %s", client.PID, supervisor.options.Socket)
		return errors.Join(err, client.Close())
	}
	supervisor.client = client
	return nil
}

func (supervisor *Supervisor) disconnect() {
	if supervisor.client != nil {
		_ = supervisor.client.Close() // the error is irrelevant: every reply was read completely
		supervisor.client = nil
	}
}

// errStarved reports that this process was starved of CPU time while BIRD should have answered.
var errStarved = errors.New("no answer while the frontend was starved of CPU time")

// command sends a command and updates unansweredSince. It waits at most until BIRD counts as hung.
func (supervisor *Supervisor) command(ctx context.Context, command string) (Reply, error) {
	begin := time.Now()
	if supervisor.unansweredSince.IsZero() {
		supervisor.unansweredSince = begin
	}
	limit := supervisor.apply.current.input.hangLimit()
	timeout := max(0, min(commandTimeout, supervisor.unansweredSince.Add(limit).Sub(begin)))
	bounded, cancel := task.WithAwakeTimeout(ctx, timeout)
	defer cancel()
	reply, err := supervisor.exchange(bounded, command)
	if reply == nil {
		if late := time.Since(begin) - timeout; late > starved && ctx.Err() == nil {
			// Starvation is no evidence against BIRD: its time to answer does not count it.
			supervisor.unansweredSince = supervisor.unansweredSince.Add(late)
			return nil, fmt.Errorf("%w: %w", errStarved, err)
		}
		return nil, err
	}
	supervisor.unansweredSince = time.Time{}
	// Several slow answers may delay a poll until the sessions' state is too old.
	now, state := time.Now(), supervisor.state.Load()
	if min(now.Sub(state.At), now.Sub(state.Answered)) >= pollInterval*11/10 {
		supervisor.state.Update(func(state State) State { state.Answered = now; return state })
	}
	if supervisor.options.OnAnswer != nil {
		supervisor.options.OnAnswer(time.Since(begin))
	}
	return reply, err
}

// exchange sends a command. It connects first if the connection is closed.
func (supervisor *Supervisor) exchange(ctx context.Context, command string) (Reply, error) {
	if supervisor.client == nil {
		if err := supervisor.open(ctx); err != nil {
			return nil, err
		}
	}
	reply, err := supervisor.client.Command(ctx, command)
	if reply == nil {
		supervisor.disconnect() // a late answer would be read as the answer to the next command
	}
	return reply, err
}

// hung reports whether BIRD was silent for longer than its shortest hold time: a session is lost.
func (supervisor *Supervisor) hung() bool {
	limit := supervisor.apply.current.input.hangLimit()
	return !supervisor.unansweredSince.IsZero() && time.Since(supervisor.unansweredSince) >= limit
}

// hangLimit returns the time without an answer after which BIRD is killed.
func (input renderInput) hangLimit() time.Duration {
	// Static gateways have no hold time.
	sessions := slices.DeleteFunc(slices.Clone(input.Sessions), Session.IsStatic)
	if len(sessions) == 0 {
		return minHang
	}
	shortest := slices.MinFunc(sessions, func(a, b Session) int { return cmp.Compare(a.HoldTime, b.HoldTime) })
	return min(max(shortest.HoldTime+time.Second, minHang), maxHang)
}

func (supervisor *Supervisor) observe(ctx context.Context) {
	at := time.Now()
	reply, err := supervisor.command(ctx, "show protocols all")
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		supervisor.observeFailed(err)
		return
	}
	if time.Since(at) > starved {
		supervisor.trigger() // the reply is outdated: poll again
	}
	version := supervisor.client.Version
	protocols := map[string]Protocol{}
	for _, x := range ParseProtocols(reply) {
		protocols[x.Name] = x
	}
	supervisor.enable(ctx, protocols)
	supervisor.restore(at, protocols)
	supervisor.watchImports(ctx, at, protocols, version)
	supervisor.holds.observe(at, protocols)
	bfd := supervisor.bfd(ctx)
	before, lease := supervisor.state.Load(), supervisor.lease.State().Load()
	gateways := supervisor.resolver.result.Load().states(at, protocols, bfd, lease, before)
	supervisor.noDelay.Load().describe(gateways)
	supervisor.imports.describe(gateways)
	supervisor.checkExports(ctx, at, gateways, before.Gateways)
	supervisor.errors.describe(at, gateways, protocols, supervisor.apply.current.input.Sessions)
	if supervisor.logTransitions(before.Gateways, gateways) {
		supervisor.fast.start(at)         // BIRD before 2.14 may sleep before it feeds the session
		latest.Wake(supervisor.sessionUp) // the log line may be missing: an operator can disable it
	}
	// BIRD before 2.14 may sleep over the export after a change of a filter, which keeps the counts.
	if exports(gateways, supervisor.expect.Load()) && !slices.ContainsFunc(gateways, GatewayState.changing) {
		supervisor.fast.converged()
	}
	process := supervisor.process
	supervisor.state.Update(func(state State) State {
		state.At, state.Alive, state.Err, state.Gateways = at, true, nil, gateways
		state.Version, state.PID, state.Since, state.LeaseErr = version, process.pid(), process.since, lease.Err
		state.Loaded = supervisor.apply.current.sequence
		state.Loopback = loopback(protocols[LoopbackName])
		return state
	})
}

// observeFailed records a failed poll. It ignores a broken connection until BIRD was silent for too
// long: that alone is no evidence that BIRD hangs.
func (supervisor *Supervisor) observeFailed(err error) {
	switch {
	case errors.Is(err, errStarved) && !supervisor.hung():
		return
	case supervisor.unansweredSince.IsZero(): // BIRD answered with an error: refused or shutting down
	case time.Since(supervisor.unansweredSince) < supervisor.options.Silence():
		return
	default:
		err = fmt.Errorf("%w: %w", errHung, err)
	}
	supervisor.state.Update(func(st State) State { st.Alive, st.Err = false, err; return st })
}

// noSocket is BIRD's error for a protocol without a listening socket. Up to 3.4.0 it never retries.
const noSocket = "No listening socket"

// enable re-enables the protocols that BIRD disabled because it could not open a listening socket.
func (supervisor *Supervisor) enable(ctx context.Context, protocols map[string]Protocol) {
	now := time.Now()
	if now.Before(supervisor.sockets.notBefore) {
		return
	}
	failed := false
	for name, p := range protocols {
		if p.State != "down" || !strings.Contains(p.Info, noSocket) {
			continue
		}
		failed = true
		_, err := supervisor.command(ctx, `enable "`+name+`"`)
		supervisor.options.Log.Warn("BIRD could not open a listening socket, retrying",
			"protocol", name, "attempts", supervisor.sockets.failures+1, "error", err)
	}
	if failed {
		supervisor.sockets.failed(now)
	} else {
		supervisor.sockets = retries{}
	}
}

func (supervisor *Supervisor) bfd(ctx context.Context) map[netip.Addr]string {
	withBFD := func(x Session) bool { return x.BFD != nil }
	if !slices.ContainsFunc(supervisor.apply.current.input.Sessions, withBFD) {
		return nil
	}
	// The command omits the protocol's name: BIRD 2.0.12 refuses a name in double quotes here.
	reply, err := supervisor.command(ctx, "show bfd sessions")
	switch {
	case err == nil:
		supervisor.bfdStates, supervisor.bfdAt = parseBFD(reply), time.Now()
	// A late answer is not the loss of the sessions; the next poll retries.
	case reply != nil || time.Since(supervisor.bfdAt) >= maxHang:
		supervisor.bfdStates = nil
	}
	return supervisor.bfdStates
}
