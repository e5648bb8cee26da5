package bird

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"
)

const (
	// startTimeout is how long a new BIRD may take to answer.
	startTimeout = 10 * time.Second
	// starved: what comes so much later than asked for tells that we did not
	// run, and that BIRD's silence proves nothing.
	starved = 500 * time.Millisecond
	// retryInterval is how often a BIRD that owes an answer is asked again, when
	// it does not just keep us waiting.
	retryInterval = 50 * time.Millisecond
	// Bounds of the silence after which BIRD is killed.
	minHang, maxHang = 4 * time.Second, 10 * time.Second
)

// serve watches one BIRD. It returns when it should be replaced.
func (s *Supervisor) serve(ctx context.Context, p *process) error {
	if err := s.connect(ctx, p); err != nil {
		return err
	}
	_, surveyed := s.surveyor.result.Get()
	_, expected := s.expect.Get()
	s.silent, s.holds = time.Time{}, holdTimers{}
	s.eager.begin(time.Now())
	timer := time.NewTimer(0)
	defer timer.Stop()
	due := time.Now()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.exited:
			return nil
		case <-surveyed:
			_, surveyed = s.surveyor.result.Get()
		case err := <-s.apply.written:
			s.staged(ctx, err)
		case <-expected:
			_, expected = s.expect.Get()
			s.eager.begin(time.Now())
		case <-s.hint:
		case <-s.export:
			reload := "reload out"
			if s.state.Load().Version >= "3" {
				reload = "reload filters out"
			}
			for _, protocol := range []string{"KERNEL4", "KERNEL6"} {
				if _, err := s.command(ctx, reload+` "`+protocol+`"`); err != nil {
					s.options.Log.Warn("failed to export routes to the kernel again", "protocol", protocol, "error", err)
				}
			}
		case <-timer.C:
			if time.Since(due) > starved {
				s.silent = time.Time{}
			}
		}
		s.look(ctx, p)
		s.stage()
		if s.hung() {
			return fmt.Errorf("%w: no answer for %v", ErrHung, time.Since(s.silent).Round(time.Millisecond))
		}
		now := time.Now()
		wait := s.wait(now)
		due = now.Add(wait)
		timer.Reset(wait)
	}
}

// wait is how long the next look may wait.
func (s *Supervisor) wait(now time.Time) time.Duration {
	switch {
	case !s.silent.IsZero():
		return retryInterval
	case s.eager.on(now), s.confirming.Load() > 0:
		return eagerInterval
	}
	return s.holds.wait(now)
}

// connect waits for the control socket of a new BIRD and its greeting.
func (s *Supervisor) connect(ctx context.Context, p *process) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	retry := time.NewTicker(eagerInterval)
	defer retry.Stop()
	for {
		client, err := s.dial(ctx, s.options.Socket)
		if err == nil && client.PID != p.pid() {
			err = errors.Join(fmt.Errorf("process %d serves the control socket %s", client.PID, s.options.Socket), client.Close())
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

func (s *Supervisor) hangUp() {
	if s.client != nil {
		// Nothing is lost with this connection that an error could tell of.
		_ = s.client.Close()
		s.client = nil
	}
}

// errStarved tells that we did not run ourselves while BIRD should have answered.
var errStarved = errors.New("no answer, but we did not run either")

// command asks BIRD. silent tells since when it owes an answer; none is waited
// for beyond the time at which BIRD counts as hung for good.
func (s *Supervisor) command(ctx context.Context, command string) (Reply, error) {
	begin := time.Now()
	if s.silent.IsZero() {
		s.silent = begin
	}
	deadline := begin.Add(commandTimeout)
	if end := s.silent.Add(s.hangLimit()); end.Before(deadline) {
		deadline = end
	}
	bounded, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	reply, err := s.exchange(bounded, command)
	if reply == nil {
		if time.Since(deadline) > starved && ctx.Err() == nil {
			s.silent = time.Now()
			return nil, fmt.Errorf("%w: %w", errStarved, err)
		}
		return nil, err
	}
	s.silent = time.Time{}
	if s.options.OnAnswer != nil {
		s.options.OnAnswer(time.Since(begin))
	}
	return reply, err
}

// exchange asks BIRD, over a new connection if need be. A connection that failed
// is not used again: an answer may still be under way.
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
		s.hangUp()
	}
	return reply, err
}

// hung tells whether BIRD has been silent for so long that its sessions are
// lost anyway: longer than the smallest hold time.
func (s *Supervisor) hung() bool {
	return !s.silent.IsZero() && time.Since(s.silent) >= s.hangLimit()
}

// hangLimit is how long BIRD may be silent before it is killed.
func (s *Supervisor) hangLimit() time.Duration {
	limit := minHang
	for i, session := range s.apply.current.input.Sessions {
		if hold := session.HoldTime + time.Second; i == 0 || hold < limit {
			limit = hold
		}
	}
	return min(max(limit, minHang), maxHang)
}

// look asks BIRD for its sessions and publishes them.
func (s *Supervisor) look(ctx context.Context, p *process) {
	at := time.Now()
	reply, err := s.command(ctx, `show protocols all "`+gatewayPrefix+`*"`)
	if ctx.Err() != nil {
		return
	}
	if err != nil && !noneMatches(err) {
		s.missed(err)
		return
	}
	if time.Since(at) > starved {
		s.poke() // what was learned is old by now
	}
	version := s.client.Version
	protocols := map[string]Protocol{}
	for _, x := range ParseProtocols(reply) {
		protocols[x.Name] = x
	}
	s.holds.saw(at, protocols)
	bfd := s.bfd(ctx)
	before := s.state.Load()
	gateways := s.surveyor.result.Load().states(at, protocols, bfd, before)
	if s.tell(before.Gateways, gateways) {
		s.eager.begin(at) // its feed may be stuck
	}
	if exports(gateways, s.expect.Load()) {
		s.eager.satisfied()
	}
	s.state.Update(func(st State) State {
		st.At, st.Alive, st.Err, st.Version, st.PID, st.Since, st.Gateways = at, true, nil, version, p.pid(), p.since, gateways
		return st
	})
	if !s.announced {
		s.announced = true
		close(s.ready)
	}
}

// missed notes that a look was not answered. Only a silence of commandTimeout
// says something about BIRD: a connection that was dropped or garbled does not,
// as long as the next one works.
func (s *Supervisor) missed(err error) {
	switch {
	case errors.Is(err, errStarved):
		return
	case s.silent.IsZero(): // it answered, that it refuses or is shutting down
	case time.Since(s.silent) < commandTimeout:
		return
	default:
		err = fmt.Errorf("%w: %w", ErrHung, err)
	}
	s.state.Update(func(st State) State {
		st.Alive, st.Err = false, err
		return st
	})
}

// noneMatches tells whether BIRD only said that there is no such protocol.
func noneMatches(err error) bool {
	var refused *RefusedError
	return errors.As(err, &refused) && refused.Code == codeNoMatch
}

// bfd returns the states of the BFD sessions, if there are any. BIRD 2.0.12 takes
// no name in double quotes here; there is only one BFD protocol.
func (s *Supervisor) bfd(ctx context.Context) map[netip.Addr]string {
	for _, session := range s.apply.current.input.Sessions {
		if session.BFD == nil {
			continue
		}
		reply, err := s.command(ctx, "show bfd sessions")
		if err != nil {
			return nil // the next look tells more
		}
		return ParseBFD(reply)
	}
	return nil
}
