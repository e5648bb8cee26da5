package main

import (
	"context"
	"errors"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// Further methods of rows 1 and 2.
const (
	// decided is vipgate without lb: this process commits the decision to the table that lb serves.
	decided = "vipgate, decision committed"
	// communities is vipgate, also in row 7, with three communities for each VIP: policyVIPs VIPs that
	// one policy lists.
	communities = "vipgate, three communities"
	policyVIPs  = 10_000
	policyGoal  = "ratio ≤ 1.1" // to the median without communities
)

// The measurements of row 2.
const (
	allDown = "all go down → last UPDATE"
	allUp   = "all come up → last UPDATE"
)

// turns configures how often all VIPs go down and come up.
type turns struct {
	repeats int
	// pause returns the time before each change, in which the work of the previous one ends.
	pause func() time.Duration
}

// always returns the same duration.
func always(d time.Duration) func() time.Duration { return func() time.Duration { return d } }

// bulkMethod is a method of row 2.
type bulkMethod struct {
	name  string
	goals map[int]string // by the number of VIPs
	// repeats are the repetitions with at most 1 000, 10 000 and 50 000 VIPs.
	repeats [3]int
	least   int // the smallest number of VIPs to measure
	most    int // the largest; 0 for no limit
	against string
	quick   bool // measured in a quick run, too
	// start starts all processes, waits for all VIPs, and returns a function that changes all of
	// them and returns the time of the change.
	start func(*fixture) (change func(up bool) (time.Time, error), err error)
}

// bulkMethods returns the methods of row 2.
func bulkMethods() []bulkMethod {
	return []bulkMethod{
		{
			name: vipgate, repeats: [3]int{100, 100, 20}, quick: true, start: (*fixture).startCheckedPod,
			goals: map[int]string{1000: "median ≤ 5", 10_000: "median ≤ 30, p99 ≤ 60", 50_000: "median ≤ 200"},
		},
		{
			name: communities, repeats: [3]int{100, 100, 20}, least: policyVIPs, most: policyVIPs,
			goals: map[int]string{policyVIPs: policyGoal}, against: vipgate, start: (*fixture).startCheckedPod,
		},
		{
			name: decided, repeats: [3]int{50, 30, 10}, least: 1000,
			goals: map[int]string{10_000: "max ≤ 100", 50_000: "max ≤ 400"},
			start: func(fx *fixture) (func(bool) (time.Time, error), error) {
				lb, err := fx.startScriptedPod()
				if err != nil {
					return nil, err
				}
				return atOnce(fx.scriptedSwitch(lb)), nil
			},
		},
		{
			name: reference, repeats: [3]int{50, 30, 10}, quick: true,
			start: func(fx *fixture) (func(bool) (time.Time, error), error) {
				r, err := fx.startReference()
				if err != nil {
					return nil, err
				}
				return atOnce(func(up bool) error { return r.set(up, r.all()...) }), nil
			},
		},
	}
}

// atOnce returns a change whose time is the time of its call.
func atOnce(set func(up bool) error) func(up bool) (time.Time, error) {
	return func(up bool) (time.Time, error) { start := time.Now(); return start, set(up) }
}

// startCheckedPod starts lb, the frontend and a target whose health check determines all VIPs,
// and waits until they are at the gateway.
func (fx *fixture) startCheckedPod() (change func(up bool) (time.Time, error), err error) {
	a, err := fx.startApplication()
	if err != nil {
		return nil, err
	}
	if err := errors.Join(fx.pod.WriteTrench(fx.httpTrench()), fx.pod.StartLB(), fx.startFrontend()); err != nil {
		return nil, err
	}
	fx.guard(fx.pod.LB)
	return a.turn, fx.waitAll()
}

// measureBulkFlips is row 2: all VIPs change simultaneously.
func measureBulkFlips(ctx context.Context, s *session) error {
	for _, n := range s.vipCounts() {
		if s.quick && n == 1 {
			continue
		}
		for _, method := range bulkMethods() {
			size, pause := 0, between
			switch {
			case n > 10_000:
				size, pause = 2, always(500*time.Millisecond)
			case n > 1000:
				size, pause = 1, always(200*time.Millisecond)
			}
			if n < method.least || method.most > 0 && n > method.most || s.quick && !method.quick {
				continue
			}
			err := on(ctx, s, n, oneFamily, func(fx *fixture) error {
				if err := fx.withPolicy(method.name); err != nil {
					return err
				}
				change, err := method.start(fx)
				if err != nil {
					return err
				}
				m := Measurement{Row: 2, Method: method.name, Goal: method.goals[n], Against: method.against}
				err = flipAll(s, fx, m, turns{s.repeats(method.repeats[size], 1), pause}, change)
				if err != nil || method.name != vipgate || n != 1000 && n != 10_000 {
					return err
				}
				return fx.frontendShare(s, pause, change)
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// flipAll has all VIPs of a fixture go down and come up in turn, and records how long the last
// UPDATE took.
func flipAll(s *session, fx *fixture, m Measurement, t turns, change func(up bool) (time.Time, error)) error {
	m.N, m.Unit = len(fx.vips), "ms"
	down, up := m, m
	down.What, up.What = allDown, allUp
	early := 0
	for range t.repeats {
		for _, to := range []struct {
			m         *Measurement
			up        bool
			was, want int
		}{{&down, false, m.N, 0}, {&up, true, 0, m.N}} {
			if err := fx.pause(t.pause()); err != nil {
				return err
			}
			if _, err := fx.waitCount(to.was); err != nil {
				return err
			}
			fx.receiver.Forget()
			start, err := change(to.up)
			if err != nil {
				return err
			}
			at, err := fx.waitCount(to.want)
			if err != nil {
				return err
			}
			// A health check that timed out changed the VIPs before the measured change did.
			if at.Before(start) {
				early++
				continue
			}
			to.m.Samples = append(to.m.Samples, milliseconds(at.Sub(start)))
		}
	}
	s.record(down)
	s.record(up)
	if early > 0 {
		s.note(m.Row, "%s, N=%d: %d changes do not count: a health check had timed out before", m.Method, m.N, early)
	}
	return nil
}

// Series of the frontend: from the receipt of the last part of a message to the end of the write of
// the UPDATEs to BIRD, in seconds.
const (
	decisionLatencySum   = "vipgate_frontend_decision_latency_seconds_sum"
	decisionLatencyCount = "vipgate_frontend_decision_latency_seconds_count"
)

// frontendShare records the frontend's own decision latency for changes of all VIPs: the sum over
// the revisions of the decision.
func (fx *fixture) frontendShare(s *session, pause func() time.Duration,
	change func(up bool) (time.Time, error),
) error {
	m := Measurement{Row: 2, Method: vipgate, N: len(fx.vips), Unit: "ms"}
	if m.N == 10_000 {
		m.Goal = "median ≤ 5"
	}
	down, up := m, m
	const part = ": readiness received → UPDATEs written to BIRD"
	down.What, up.What = "all go down"+part, "all come up"+part
	for range s.repeats(20, 1) {
		for _, to := range []struct {
			m    *Measurement
			up   bool
			want int
		}{{&down, false, 0}, {&up, true, m.N}} {
			before, err := fx.metrics(lab.FrontendMetrics, decisionLatencySum, decisionLatencyCount)
			if err != nil {
				return err
			}
			if err := fx.pause(pause()); err != nil {
				return err
			}
			if _, err := change(to.up); err != nil {
				return err
			}
			if _, err := fx.waitCount(to.want); err != nil {
				return err
			}
			after, err := fx.metrics(lab.FrontendMetrics, decisionLatencySum, decisionLatencyCount)
			if err != nil {
				return err
			}
			if after[1] > before[1] {
				to.m.Samples = append(to.m.Samples, 1000*(after[0]-before[0]))
			}
		}
	}
	if len(down.Samples) == 0 || len(up.Samples) == 0 {
		return errors.New("the frontend wrote no change of all VIPs")
	}
	s.record(down)
	s.record(up)
	return nil
}
