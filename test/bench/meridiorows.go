package main

import (
	"context"
	"errors"
	"slices"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// meridioSizes returns the numbers of VIPs of the rows about Meridio.
func (s *session) meridioSizes() []int { return s.sizes([]int{1, 100, 1000, 10_000}, []int{100}) }

// meridioPaths returns the methods of the rows about Meridio. In a quick run other rows use the
// trench file.
func (s *session) meridioPaths() []path {
	if s.quick {
		return paths[:1]
	}
	return paths
}

// eachPath measures with each number of VIPs and each method in turn, on a separate fixture
// each.
func eachPath(ctx context.Context, s *session, row int, do func(*fixture, path, Measurement) error) error {
	for _, n := range s.meridioSizes() {
		for _, p := range s.meridioPaths() {
			err := on(ctx, s, n, oneFamily, func(fx *fixture) error {
				return do(fx, p, Measurement{Row: row, Method: p.method, Against: p.against, N: n})
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// measureMeridioReadiness is row 22: the load balancer becomes available, and unavailable.
func measureMeridioReadiness(ctx context.Context, s *session) error {
	return eachPath(ctx, s, 22, func(fx *fixture, p path, m Measurement) error {
		set, err := p.script(fx)
		if err != nil {
			return err
		}
		pause := s.lasts(500*time.Millisecond, 100*time.Millisecond)
		return flipAll(s, fx, m, turns{s.repeats(20, 1), always(pause)}, atOnce(set))
	})
}

// measureMeridioLBLoss is row 23: the load balancer is killed or stopped.
func measureMeridioLBLoss(ctx context.Context, s *session) error {
	return eachPath(ctx, s, 23, func(fx *fixture, p path, m Measurement) error {
		fx.expectExit()
		start := func() error { return p.startLB(fx) }
		if err := errors.Join(p.prepare(fx), start(), p.startFrontend(fx)); err != nil {
			return err
		}
		kill := loss{name: "LB kill -9", signal: syscall.SIGKILL}
		err := loseLBs(s, fx, m, kill, s.repeats(20, 1), s.lasts(time.Second, time.Millisecond), fx.waitAll, start)
		if err != nil || s.quick {
			return err
		}
		stop := loss{name: "LB SIGSTOP", signal: syscall.SIGSTOP}
		return loseLBs(s, fx, m, stop, s.repeats(5, 0), time.Second, fx.waitAll, start)
	})
}

// measureMeridioSessionLoss is row 24: the gateway resets the session.
func measureMeridioSessionLoss(ctx context.Context, s *session) error {
	return eachPath(ctx, s, 24, func(fx *fixture, p path, m Measurement) error {
		if _, err := p.script(fx); err != nil {
			return err
		}
		egress, err := fx.watchEgress()
		if err != nil {
			return err
		}
		if fx.nsp == nil {
			return resetSessions(s, fx, m, s.repeats(10, 1), egress, nil)
		}
		gone := m
		gone.What, gone.Unit = "gateway resets the session → the NSP receives Unregister", "ms"
		err = resetSessions(s, fx, m, s.repeats(10, 1), egress, func(reset time.Time) error {
			at, err := fx.waitRequest("Unregister", reset)
			gone.Samples = append(gone.Samples, milliseconds(at.Sub(reset)))
			return err
		})
		if err == nil {
			s.record(gone)
		}
		return err
	})
}

// meridioMilestones are the milestones of a start with the NSP.
var meridioMilestones = slices.Insert(slices.Clone(milestones[2:]), 1,
	milestone{"configuration of the NSP in force", frontendOf, []string{`msg="new configuration in force"`}})

// measureMeridioStart is row 25: the process start with the NSP.
func measureMeridioStart(ctx context.Context, s *session) error {
	for _, n := range s.meridioSizes() {
		for _, p := range s.meridioPaths() {
			m := Measurement{Row: 25, Method: p.method, Against: p.against, N: n}
			registered := m
			registered.What, registered.Unit = "start → the NSP receives Register", "s"
			err := measureStarts(ctx, s, m, s.repeats(10, 1), meridioMilestones,
				func(fx *fixture) (began, at time.Time, err error) {
					if err := p.prepare(fx); err != nil {
						return began, at, err
					}
					began = time.Now()
					if err := errors.Join(p.startLB(fx), p.startFrontend(fx)); err != nil {
						return began, at, err
					}
					if at, err = fx.waitCount(n); err != nil || fx.nsp == nil {
						return began, at, err
					}
					first, err := fx.waitRequest("Register", began)
					registered.Samples = append(registered.Samples, first.Sub(began).Seconds())
					return began, at, err
				})
			if err != nil {
				return err
			}
			if len(registered.Samples) > 0 {
				s.record(registered)
			}
		}
	}
	return nil
}

// measureMeridioLists is row 26: the list changes, or is repeated.
func measureMeridioLists(ctx context.Context, s *session) error {
	return eachPath(ctx, s, 26, func(fx *fixture, p path, m Measurement) error {
		// Each measurement adds a VIP that is ready before it is in the list.
		all := numberedVIPs(len(fx.vips)+1, fx.families)
		before := fx.vips
		fx.vips = all
		fewer, more := p.list(fx, before), p.list(fx, all)
		if err := fx.pod.WriteTrench(fx.trench()); err != nil {
			return err
		}
		if _, err := p.script(fx); err != nil {
			return err
		}
		added, force, same := m, m, m
		added.What, added.Unit = "the list has one VIP more → UPDATE", "ms"
		force.What, force.Unit = "the list has one VIP more → in force", "ms"
		same.Against = "" // the ratio would be noise
		same.What, same.Unit = "the same list again: processor time of the frontend", "ms"
		for range s.repeats(5, 1) {
			// Without the VIP the count would be reached before the list has arrived.
			if _, err := fx.waitCount(len(all)); err != nil {
				return err
			}
			if err := fewer(); err != nil {
				return err
			}
			if _, err := fx.waitCount(len(before)); err != nil {
				return err
			}
			if err := fx.pause(s.lasts(leaveTime, 0) + between()); err != nil {
				return err
			}
			logged := len(fx.pod.Frontend.Output())
			start := time.Now()
			if err := more(); err != nil {
				return err
			}
			at, err := fx.waitCount(len(all))
			if err != nil {
				return err
			}
			added.Samples = append(added.Samples, milliseconds(at.Sub(start)))
			if at, ok := logTime(fx.pod.Frontend.Output()[logged:], `msg="new configuration in force"`); ok {
				// The log has a resolution of a millisecond.
				force.Samples = append(force.Samples, max(0, milliseconds(at.Sub(start))))
			}
		}
		s.record(added)
		s.record(force)
		return fx.repeatLists(s, same, more)
	})
}

const (
	// leaveTime is longer than the time for which the frontend keeps a withdrawn VIP that left the
	// NSP's list.
	leaveTime = time.Second
	// listInterval is the time between two lists, longer than the quiet time of a trench file.
	listInterval = 150 * time.Millisecond
	// afterLists is the time for which the frontend may poll BIRD at short intervals after a
	// change.
	afterLists = 6 * time.Second
)

// repeatLists records the processor time that the frontend takes for a list that equals the one
// in force: the time of an interval with such lists minus the time of an equally long one
// without, divided by the number of lists.
func (fx *fixture) repeatLists(s *session, m Measurement, list func() error) error {
	lists := s.sizes([]int{10}, []int{1})[0]
	used := func(do func() error) (time.Duration, error) {
		before, err := cpuTime(fx.pod.Frontend.PID())
		if err != nil {
			return 0, err
		}
		for range lists {
			if err := errors.Join(do(), fx.pause(listInterval)); err != nil {
				return 0, err
			}
		}
		after, err := cpuTime(fx.pod.Frontend.PID())
		return after - before, err
	}
	if err := fx.pause(s.lasts(afterLists, listInterval)); err != nil {
		return err
	}
	for range s.repeats(3, 1) {
		idle, err := used(func() error { return nil })
		if err != nil {
			return err
		}
		busy, err := used(list)
		if err != nil {
			return err
		}
		// A list may take less than the difference between two intervals without one.
		m.Samples = append(m.Samples, max(0, milliseconds(busy-idle))/float64(lists))
	}
	s.record(m)
	return nil
}

// waitRequest waits for a request that the NSP received after a time, and returns the time of
// its receipt.
func (fx *fixture) waitRequest(method string, after time.Time) (at time.Time, err error) {
	ctx, cancel := fx.withTimeout()
	defer cancel()
	err = lab.Eventually(ctx, time.Millisecond, func() error {
		for _, r := range fx.nsp.Requests(method) {
			if r.At.After(after) {
				at = r.At
				return nil
			}
		}
		return errors.New("the NSP has not received " + method)
	})
	return at, fx.explain(ctx, err)
}
