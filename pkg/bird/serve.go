package bird

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// pollInterval is how often BIRD is asked when nothing hints at a change.
	pollInterval = time.Second
	// eagerInterval is how often it is asked while something is expected: every
	// command wakes a BIRD before 2.14 that sleeps over scheduled work.
	eagerInterval = 5 * time.Millisecond
	// eagerTime bounds that.
	eagerTime = 5 * time.Second
	// eagerMore is how often it is asked again after all was as expected.
	eagerMore = 2
	// startTimeout is how long a new BIRD may take to answer.
	startTimeout = 10 * time.Second
	// starved: a timer that fires so much later than asked tells that we did
	// not run, and that BIRD's silence proves nothing.
	starved = 500 * time.Millisecond
	// Bounds of the silence after which BIRD is killed.
	minHang, maxHang = 4 * time.Second, 10 * time.Second
)

// eagerness tells how closely BIRD is watched.
type eagerness struct {
	until time.Time
	more  int
}

func (e *eagerness) begin(now time.Time) { *e = eagerness{now.Add(eagerTime), eagerMore} }

func (e *eagerness) on(now time.Time) bool { return now.Before(e.until) }

// satisfied counts down once all is as expected.
func (e *eagerness) satisfied() {
	if e.more--; e.more < 0 {
		e.until = time.Time{}
	}
}

// holdTimers tells when a hold timer of an established session runs out. BIRD
// before 2.14 may sleep over the work that the timer scheduled, so it is asked
// right then.
type holdTimers struct {
	next    time.Time // the first to run out; zero: there is none
	overdue time.Time // since when one has run out without consequence
}

// saw takes over what BIRD said at a time.
func (h *holdTimers) saw(at time.Time, protocols map[string]Protocol) {
	h.next = time.Time{}
	for _, p := range protocols {
		if end := at.Add(p.HoldTimer); p.Up() && p.HasHoldTimer && (h.next.IsZero() || end.Before(h.next)) {
			h.next = end
		}
	}
	if h.next.IsZero() || h.next.After(at) {
		h.overdue = time.Time{}
	} else if h.overdue.IsZero() {
		h.overdue = at
	}
}

// wait is how long the next look may wait.
func (h *holdTimers) wait(now time.Time) time.Duration {
	if h.next.IsZero() || !h.overdue.IsZero() && now.Sub(h.overdue) > eagerTime {
		return pollInterval
	}
	return min(max(h.next.Sub(now)+time.Millisecond, eagerInterval), pollInterval)
}

// serve watches one BIRD. It returns when it should be replaced.
func (s *Supervisor) serve(ctx context.Context, p *process) error {
	if err := s.connect(ctx, p); err != nil {
		return err
	}
	_, reconfigured := s.wanted.Get()
	_, expected := s.expect.Get()
	s.silent, s.holds = time.Time{}, holdTimers{}
	s.eager.begin(time.Now())
	timer := time.NewTimer(0)
	defer timer.Stop()
	due := time.Now()
	var applied time.Time
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.exited:
			return nil
		case <-reconfigured:
			_, reconfigured = s.wanted.Get()
			applied = time.Time{}
		case <-expected:
			_, expected = s.expect.Get()
			s.eager.begin(time.Now())
		case <-s.hint:
		case <-timer.C:
			if time.Since(due) > starved {
				s.silent = time.Time{}
			}
		}
		s.look(ctx, p)
		if time.Since(applied) >= pollInterval { // addresses come and go, passwords appear
			applied = time.Now()
			if s.reapply(ctx) {
				s.look(ctx, p)
			}
		}
		if s.hung() {
			return fmt.Errorf("%w: no answer for %v", ErrHung, time.Since(s.silent).Round(time.Millisecond))
		}
		now := time.Now()
		wait := s.holds.wait(now)
		if s.eager.on(now) || now.UnixNano() < s.asked.Load() {
			wait = eagerInterval
		}
		due = now.Add(wait)
		timer.Reset(wait)
	}
}

// connect waits for the control socket of a new BIRD and its greeting.
func (s *Supervisor) connect(ctx context.Context, p *process) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	retry := time.NewTicker(eagerInterval)
	defer retry.Stop()
	for {
		client, err := Dial(ctx, s.options.Socket)
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

// command asks BIRD, over a new connection if need be. silent tells since when
// it owes an answer.
func (s *Supervisor) command(ctx context.Context, command string) (Reply, error) {
	begin := time.Now()
	if s.silent.IsZero() {
		s.silent = begin
	}
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	reply, err := s.exchange(ctx, command)
	if reply == nil && err != nil {
		s.hangUp()
		if time.Since(begin) > commandTimeout+starved {
			s.silent = time.Now()
			s.poke()
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

func (s *Supervisor) exchange(ctx context.Context, command string) (Reply, error) {
	if s.client == nil {
		client, err := Dial(ctx, s.options.Socket)
		if err != nil {
			return nil, err
		}
		s.client = client
	}
	return s.client.Command(ctx, command)
}

// hung tells whether BIRD has been silent for so long that its sessions are
// lost anyway: longer than the smallest hold time.
func (s *Supervisor) hung() bool {
	if s.silent.IsZero() {
		return false
	}
	limit := minHang
	for i, session := range s.desired.input.Sessions {
		if hold := session.HoldTime + time.Second; i == 0 || hold < limit {
			limit = hold
		}
	}
	return time.Since(s.silent) >= min(max(limit, minHang), maxHang)
}

// look asks BIRD for its sessions and publishes them.
func (s *Supervisor) look(ctx context.Context, p *process) {
	at := time.Now()
	reply, err := s.command(ctx, `show protocols all "`+gatewayPrefix+`*"`)
	switch {
	case ctx.Err() != nil, errors.Is(err, errStarved):
		return
	case err != nil && !noneMatches(err):
		var timeout net.Error
		if errors.As(err, &timeout) && timeout.Timeout() {
			err = fmt.Errorf("%w: %w", ErrHung, err)
		}
		s.state.Update(func(st State) State {
			st.Alive, st.Err = false, err
			return st
		})
		return
	}
	version := s.client.Version
	protocols := map[string]Protocol{}
	for _, x := range ParseProtocols(reply) {
		protocols[x.Name] = x
	}
	s.holds.saw(at, protocols)
	bfd := s.bfd(ctx)
	before := s.state.Load()
	gateways := s.gateways(at, protocols, bfd, before.Gateways)
	s.tell(before.Gateways, gateways)
	for i, g := range gateways {
		if g.Up && (i >= len(before.Gateways) || !before.Gateways[i].Up) {
			s.eager.begin(at) // its feed may be stuck
		}
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

// tell logs which sessions came and went.
func (s *Supervisor) tell(before, after []GatewayState) {
	was := map[string]bool{}
	for _, g := range before {
		was[g.Name] = g.Up
	}
	for _, g := range after {
		switch {
		case g.Up && !was[g.Name]:
			s.options.Log.Info("gateway session up", "gateway", g.Name, "address", g.Address)
		case !g.Up && was[g.Name]:
			s.options.Log.Warn("gateway session lost", "gateway", g.Name, "address", g.Address, "state", g.Words, "last_error", g.LastError, "problem", g.Problem)
		}
	}
}

// noneMatches tells whether BIRD only said that there is no such protocol.
func noneMatches(err error) bool {
	var refused *RefusedError
	return errors.As(err, &refused) && refused.Code == 8003
}

// bfd returns the states of the BFD sessions, if there are any. BIRD 2.0.12 takes
// no quoted name here; there is only one BFD protocol.
func (s *Supervisor) bfd(ctx context.Context) map[string]string {
	for _, session := range s.desired.input.Sessions {
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

// gateways joins configuration and sessions.
func (s *Supervisor) gateways(at time.Time, protocols map[string]Protocol, bfd map[string]string, before []GatewayState) []GatewayState {
	was := map[string]GatewayState{}
	for _, g := range before {
		was[g.Name] = g
	}
	var list []GatewayState
	for _, c := range s.wanted.Load().gateways {
		g := GatewayState{Name: c.Name, Address: c.Address, Family: vip.FamilyOf(c.Address), Since: at}
		p, ok := protocols[gatewayPrefix+c.Name]
		switch {
		case s.problems[c.Name] != "":
			g.Problem = s.problems[c.Name]
		case !ok:
			g.Problem = "BIRD has no such session yet"
		default:
			g.Up, g.Words, g.Imported, g.Exported, g.LastError = p.Up(), words(p), p.Imported, p.Exported, p.LastError
		}
		if c.BFD != nil && ok {
			g.BFD = bfd[c.Address.String()]
		}
		if old, known := was[c.Name]; known && old.Up == g.Up {
			g.Since = old.Since
		}
		list = append(list, g)
	}
	return list
}

func words(p Protocol) string {
	if p.BGPState != "" {
		return p.BGPState
	}
	return p.State
}

// applyBackoff spaces attempts at what failed for another reason than that BIRD
// refuses it, such as a full disk.
type applyBackoff struct {
	failures  int
	notBefore time.Time
}

func (b *applyBackoff) failed(now time.Time) {
	b.failures++
	b.notBefore = now.Add(min(time.Second<<min(b.failures-1, 5), 30*time.Second))
}

// reapply gives BIRD another configuration if it changed, and tells whether it
// did. A refused one leaves the old one in force.
func (s *Supervisor) reapply(ctx context.Context) bool {
	content, err := s.render()
	switch {
	case err == nil && bytes.Equal(content, s.current):
		if s.refused != nil || s.apply.failures > 0 { // wanted and old are the same again
			s.refused, s.apply = nil, applyBackoff{}
			s.state.Update(func(st State) State { st.ConfigErr = nil; return st })
		}
		return false
	case err == nil && bytes.Equal(content, s.refused), time.Now().Before(s.apply.notBefore):
		return false
	}
	if err == nil {
		err = s.reconfigure(ctx, content)
	}
	if ctx.Err() != nil {
		return false
	}
	if err != nil {
		var refused *RefusedError
		if errors.As(err, &refused) {
			s.refused = content
		} else {
			s.apply.failed(time.Now())
		}
		s.configFailed(err)
		return false
	}
	s.current, s.refused, s.apply = content, nil, applyBackoff{}
	s.options.Log.Info("BIRD has another configuration", "gateways", len(s.desired.input.Sessions), "without_session", len(s.problems))
	s.eager.begin(time.Now())
	s.state.Update(func(st State) State { st.Configures++; st.ConfigErr = nil; return st })
	return true
}

func (s *Supervisor) configFailed(err error) {
	s.options.Log.Error("BIRD keeps its old configuration", "error", err)
	s.state.Update(func(st State) State { st.ConfigErr = err; return st })
}

// reconfigure checks the new file first: after a refused `configure` the file on
// disk would not be the one in force.
func (s *Supervisor) reconfigure(ctx context.Context, content []byte) error {
	path := s.configPath() + ".new"
	if err := replaceFile(path, content, 0o600); err != nil {
		return err
	}
	defer os.Remove(path) // gone already if all went well
	if _, err := s.command(ctx, `configure check "`+path+`"`); err != nil {
		return fmt.Errorf("BIRD refuses the new configuration: %w", err)
	}
	if err := os.Rename(path, s.configPath()); err != nil {
		return fmt.Errorf("configuration of BIRD: %w", err)
	}
	if _, err := s.command(ctx, `configure "`+s.configPath()+`"`); err != nil {
		return fmt.Errorf("BIRD did not take the new configuration: %w", err)
	}
	return nil
}

// publishDead says that there is no BIRD.
func (s *Supervisor) publishDead(err error, restarts int) {
	s.state.Update(func(st State) State {
		st.Alive, st.PID, st.Err, st.Restarts = false, 0, err, restarts
		gateways := append([]GatewayState(nil), st.Gateways...)
		for i := range gateways {
			if gateways[i].Up {
				gateways[i].Up, gateways[i].Since = false, time.Now()
			}
			gateways[i].Words, gateways[i].Exported, gateways[i].Imported = "BIRD is not running", 0, 0
		}
		st.Gateways = gateways
		return st
	})
}
