package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

var (
	oneFamily    = []vip.Family{vip.IPv4}
	bothFamilies = []vip.Family{vip.IPv4, vip.IPv6}
)

// between returns the pause between two single changes. It is above the 40 ms for which Linux
// may delay an ACK: BIRD uses Nagle's algorithm and holds a second UPDATE back for as long. It
// is random, so that the changes are spread over all phases of periodic work.
func between() time.Duration { return 50*time.Millisecond + rand.N(50*time.Millisecond) }

// singleGoal returns the goal of row 1.
func singleGoal(n int) string {
	switch n {
	case 10_000:
		return "median ≤ 0.7, p99 ≤ 3; ≥ 50 × the reference"
	case 50_000:
		return "median ≤ 0.7, p99 ≤ 3; ≤ 2 × the median at N=1"
	default:
		return "median ≤ 0.7, p99 ≤ 3"
	}
}

// oneFlips is the measurement of row 1.
const oneFlips = "one VIP flips → UPDATE"

// measureSingleFlips is row 1: one VIP flips among N.
func measureSingleFlips(ctx context.Context, s *session) error {
	for _, n := range s.vipCounts() {
		for _, method := range []string{vipgate, communities} {
			if method == communities && n != policyVIPs {
				continue
			}
			if err := flipSingly(ctx, s, oneFlips, method, n, oneFamily); err != nil {
				return err
			}
		}
		if s.quick && n > 1 {
			continue
		}
		repeats := s.repeats(200, 2)
		if n >= 50_000 {
			repeats = s.repeats(50, 0)
			s.note(1, "the reference's repeats are fewer at N=%d: each takes a large part of a second", n)
		}
		err := on(ctx, s, n, oneFamily, func(fx *fixture) error {
			r, err := fx.startReference()
			if err != nil {
				return err
			}
			return flipEach(s, fx, Measurement{Row: 1, What: oneFlips, Method: reference}, repeats,
				func(i int, up bool) (func() error, error) { return func() error { return r.set(up, i) }, nil })
		})
		if err != nil {
			return err
		}
	}
	const dualStack = 1000
	if s.quick || !slices.Contains(s.vipCounts(), dualStack) {
		return nil
	}
	return flipSingly(ctx, s, oneFlips+", dual stack", vipgate, dualStack, bothFamilies)
}

// flipSingly measures single flips with vipgate.
func flipSingly(ctx context.Context, s *session, what, method string, n int, families []vip.Family) error {
	return on(ctx, s, n, families, func(fx *fixture) error {
		if err := fx.withPolicy(method); err != nil {
			return err
		}
		lb, err := fx.startScriptedPod()
		if err != nil {
			return err
		}
		m := Measurement{Row: 1, What: what, Method: vipgate, Goal: singleGoal(n)}
		if method == communities {
			m.Method, m.Goal, m.Against = communities, policyGoal, vipgate
		}
		return flipEach(s, fx, m, s.repeats(200, 4), func(i int, up bool) (func() error, error) {
			d := decision(up, fx.vips[i])
			return func() error { lb.Table.Commit(d); return nil }, nil
		})
	})
}

// flipEach has single VIPs go down and come up in turn, and records how long the UPDATE took.
// prepare returns a function that causes the change; only its effect is measured.
func flipEach(s *session, fx *fixture, m Measurement, repeats int,
	prepare func(i int, up bool) (cause func() error, err error),
) error {
	m.N, m.Unit = len(fx.vips), "ms"
	for k := range repeats {
		i, up := flipped(k, m.N)
		cause, err := prepare(i, up)
		if err != nil {
			return err
		}
		if err := fx.pause(between()); err != nil {
			return err
		}
		mark, start := fx.receiver.Mark(), time.Now()
		if err := cause(); err != nil {
			return err
		}
		at, err := fx.waitState(mark, fx.vips[i], up)
		if err != nil {
			return err
		}
		m.Samples = append(m.Samples, milliseconds(at.Sub(start)))
	}
	s.record(m)
	if m.Method == vipgate && m.N == 50_000 {
		s.noteGrowth(m)
	}
	return nil
}

// noteGrowth notes the median relative to the median with one VIP.
func (s *session) noteGrowth(m Measurement) {
	for _, one := range s.report.Results {
		if one.Row == m.Row && one.What == m.What && one.Method == m.Method && one.N == 1 && one.Median > 0 {
			s.note(m.Row, "the median at N=%d is %.2f × that at N=1", m.N, summarize(m.Samples).Median/one.Median)
		}
	}
}

// flipped returns the k-th flip: VIPs spread over all n go down and come up in turn.
func flipped(k, n int) (index int, up bool) { return k / 2 * 7919 % n, k%2 == 1 }

// flapPattern is a burst of changes of the first VIPs of a fixture.
type flapPattern struct {
	what  string
	vips  int
	every time.Duration
	turns int
}

// measureFlapPatterns is row 9: more changes than a router can follow.
func measureFlapPatterns(ctx context.Context, s *session) error {
	const n, every = 1000, 20 * time.Millisecond
	lasts := s.lasts(20*time.Second, 200*time.Millisecond)
	flips := s.sizes([]int{1000}, []int{200})[0]
	type repeated struct {
		flapPattern
		repeats int
	}
	storms := []repeated{
		{
			flapPattern{grouped(flips) + " flips of one VIP, 1 ms apart → right state", 1, time.Millisecond, flips},
			s.repeats(10, 1),
		},
		{
			flapPattern{fmt.Sprintf("all flip every 20 ms for %v → right state", lasts), n, every, int(lasts / every)},
			s.repeats(3, 1),
		},
	}
	err := on(ctx, s, n, oneFamily, func(fx *fixture) error {
		lb, err := fx.startScriptedPod()
		if err != nil {
			return err
		}
		for _, c := range storms {
			ready, not := decision(true, fx.vips[:c.vips]...), decision(false, fx.vips[:c.vips]...)
			err := runFlaps(s, fx, c.flapPattern, vipgate, c.repeats, "max ≤ 100", func(up bool) error {
				if up {
					lb.Table.Commit(ready)
				} else {
					lb.Table.Commit(not)
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if s.quick {
		storms = storms[:1]
	}
	return on(ctx, s, n, oneFamily, func(fx *fixture) error {
		r, err := fx.startReference()
		if err != nil {
			return err
		}
		for _, c := range storms {
			if err := runFlaps(s, fx, c.flapPattern, reference, min(3, c.repeats), "",
				r.follow(fx, r.all()[:c.vips])); err != nil {
				return err
			}
		}
		return nil
	})
}

// quietTime is how long no update may arrive before a storm counts as over.
const quietTime = 500 * time.Millisecond

// runFlaps runs a flap pattern on a fixture and measures from the last change until the gateway
// permanently holds the right state.
func runFlaps(s *session, fx *fixture, c flapPattern, method string, repeats int, goal string,
	set func(up bool) error,
) error {
	m := Measurement{Row: 9, What: c.what, Method: method, N: len(fx.vips), Unit: "ms", Goal: goal}
	var heard, changes int
	for k := range repeats {
		if err := fx.pause(quietTime); err != nil {
			return err
		}
		fx.receiver.Forget()
		mark := fx.receiver.Mark()
		lastUp := k%2 == 1 || k == repeats-1 // after the last one all VIPs are up again
		tick := time.NewTicker(c.every)
		var last time.Time
		for i := range c.turns {
			last = time.Now()
			if err := set((c.turns-1-i)%2 == 0 == lastUp); err != nil {
				tick.Stop()
				return err
			}
			if i == c.turns-1 {
				break
			}
			select {
			case <-tick.C:
			case <-fx.ctx.Done():
				tick.Stop()
				return context.Cause(fx.ctx)
			}
		}
		tick.Stop()
		want := len(fx.vips)
		if !lastUp {
			want -= c.vips
		}
		if err := fx.waitQuiet(want); err != nil {
			return err
		}
		table := fx.receiver.Table()
		for i, v := range fx.vips {
			if held := table[v.Prefix()] != nil; held != (lastUp || i >= c.vips) {
				return fmt.Errorf("after %s the gateway holds %s: %t", c.what, v, held)
			}
		}
		var end time.Duration
		for _, r := range fx.receiver.Since(mark) {
			end = max(end, r.At.Sub(last))
			heard++
		}
		changes += c.turns * c.vips
		m.Samples = append(m.Samples, milliseconds(end))
	}
	// The pattern passes only if no session ended.
	for _, e := range fx.receiver.Sessions() {
		if !e.Up {
			return fmt.Errorf("during %s the session ended: %w", c.what, e.Reason)
		}
	}
	s.record(m)
	s.note(9, "%s, %s: the gateway received %d of %d changes", c.what, method, heard, changes)
	return nil
}

// waitQuiet waits until the gateway holds n prefixes and has received no update for a while.
func (fx *fixture) waitQuiet(n int) error {
	for {
		if _, err := fx.waitCount(n); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(fx.ctx, quietTime)
		_, err := fx.receiver.WaitFor(ctx, fx.receiver.Mark(), func(lab.PrefixUpdate) bool { return true })
		quiet := err != nil && ctx.Err() != nil
		cancel()
		if err := fx.ctx.Err(); err != nil {
			return context.Cause(fx.ctx)
		}
		if quiet {
			return nil
		}
	}
}
