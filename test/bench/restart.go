package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// milestone is a part of a start that appears in the logs.
type milestone struct {
	what    string
	process func(*lab.Pod) *lab.Process
	lines   []string // parts of lines; the first line that contains one of them marks the milestone
}

// milestones of a start.
var milestones = []milestone{
	{"LB has its SVID", lbOf, []string{`msg="SVID received"`}},
	{"LB serves readiness", lbOf, []string{`msg="serving readiness"`}},
	{"frontend has its SVID", frontendOf, []string{`msg="SVID received"`}},
	{"BIRD started", frontendOf, []string{`msg="BIRD started"`}},
	{"session with BIRD up", frontendOf, []string{`msg="session with BIRD established"`}},
	{"source routing of the VIPs in the kernel", frontendOf, []string{`msg="VIP set updated"`}},
	{"readiness heard", frontendOf, []string{`msg="load balancer readiness went from`}},
	{"gateway's session seen up", frontendOf, []string{`service=Egress serving=true`}},
	// A line for each VIP, or one line for a decision about many VIPs.
	{"first VIP announced", frontendOf, []string{`to=announced`, ` to announced`}},
}

func lbOf(p *lab.Pod) *lab.Process       { return p.LB }
func frontendOf(p *lab.Pod) *lab.Process { return p.Frontend }

// logTime finds the first line of a text log that contains one of the texts, and returns its
// time.
func logTime(log string, texts ...string) (time.Time, bool) {
	for line := range strings.Lines(log) {
		if !slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(line, text) }) {
			continue
		}
		stamp, _, _ := strings.Cut(strings.TrimPrefix(line, "time="), " ")
		at, err := time.Parse(time.RFC3339Nano, stamp)
		return at, err == nil
	}
	return time.Time{}, false
}

// startPod starts lb and frontend with their default settings, and returns when
// the last VIP came to the gateway.
func (fx *fixture) startPod() (time.Time, error) {
	if err := errors.Join(fx.pod.StartLB(), fx.pod.StartFrontend()); err != nil {
		return time.Time{}, err
	}
	return fx.waitCount(len(fx.vips))
}

// measureStart is row 7. Every start has a separate fixture, without kernel state, authority or
// socket of an earlier one.
func measureStart(ctx context.Context, s *session) error {
	goals := map[int]string{1: "max ≤ 1.5", 10_000: "max ≤ 2.5"}
	measure := func(m Measurement) error {
		m.Row = 7
		return measureStarts(ctx, s, m, s.repeats(15, 1), milestones, func(fx *fixture) (began, at time.Time, err error) {
			if err := errors.Join(fx.startTarget(), fx.withPolicy(m.Method)); err != nil {
				return began, at, err
			}
			began = time.Now()
			at, err = fx.startPod()
			return began, at, err
		})
	}
	for _, n := range s.sizes([]int{1, policyVIPs}, []int{1, 1000}) {
		if err := measure(Measurement{Method: vipgate, N: n, Goal: goals[n]}); err != nil {
			return err
		}
	}
	if err := measureEarlyStarts(ctx, s); err != nil {
		return err
	}
	if err := measureUnnumberedStart(ctx, s); err != nil {
		return err
	}
	if s.quick {
		return nil
	}
	return measure(Measurement{Method: communities, N: policyVIPs, Goal: policyGoal, Against: vipgate})
}

// measureStarts starts a pod on a new fixture repeatedly, and records when all VIPs were at the
// gateway and when each part of the start was logged. start returns when the start began and
// when the last VIP came.
func measureStarts(ctx context.Context, s *session, m Measurement, repeats int, parts []milestone,
	start func(*fixture) (began, at time.Time, err error),
) error {
	m.Unit = "s"
	total := m
	total.What = "start of lb and frontend → all VIPs at the gateway"
	samples := make([][]float64, len(parts))
	for range repeats {
		err := on(ctx, s, m.N, oneFamily, func(fx *fixture) error {
			began, at, err := start(fx)
			if err != nil {
				return err
			}
			total.Samples = append(total.Samples, at.Sub(began).Seconds())
			for i, part := range parts {
				logged, ok := logTime(part.process(fx.pod).Output(), part.lines...)
				for !ok && time.Since(at) < time.Second { // the line is written after the UPDATEs
					if err := fx.pause(10 * time.Millisecond); err != nil {
						return err
					}
					logged, ok = logTime(part.process(fx.pod).Output(), part.lines...)
				}
				if ok {
					samples[i] = append(samples[i], logged.Sub(began).Seconds())
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	s.record(total)
	for i, part := range parts {
		if len(samples[i]) > 0 {
			m.What, m.Goal, m.Samples = "start → "+part.what, "", samples[i]
			s.record(m)
		}
	}
	return nil
}

// stopGoal is the drain time, 1 s by default, and 3 s.
const stopGoal = "max ≤ 4"

// measureStop is row 10.
func measureStop(ctx context.Context, s *session) error {
	n := s.sizes([]int{10_000}, []int{1000})[0]
	results := []Measurement{
		{What: "SIGTERM to lb → its exit", Goal: stopGoal},
		{What: "SIGTERM to frontend → its exit", Goal: stopGoal},
		{What: "SIGTERM to both → exit of both", Goal: stopGoal},
		{What: "SIGTERM to both → last withdraw"},
	}
	add := func(i int, seconds float64) { results[i].Samples = append(results[i].Samples, seconds) }
	err := on(ctx, s, n, oneFamily, func(fx *fixture) error {
		if err := fx.startTarget(); err != nil {
			return err
		}
		for range s.repeats(10, 1) {
			if _, err := fx.startPod(); err != nil {
				return err
			}
			// Each program alone: it is restarted, and the next step begins with all VIPs at the
			// gateway.
			alone := []struct {
				process **lab.Process
				start   func(...string) error
			}{{&fx.pod.LB, fx.pod.StartLB}, {&fx.pod.Frontend, fx.pod.StartFrontend}}
			if s.quick {
				alone = alone[:1]
			}
			for i, p := range alone {
				took, err := fx.endAll(*p.process)
				if err != nil {
					return err
				}
				add(i, took)
				if err := p.start(); err != nil {
					return err
				}
				if _, err := fx.waitCount(n); err != nil {
					return err
				}
			}
			began := time.Now()
			took, err := fx.endAll(fx.pod.LB, fx.pod.Frontend)
			if err != nil {
				return err
			}
			gone, err := fx.waitCount(0)
			if err != nil {
				return err
			}
			add(2, took)
			add(3, gone.Sub(began).Seconds())
		}
		return nil
	})
	for _, m := range results {
		if len(m.Samples) > 0 {
			m.Row, m.Method, m.N, m.Unit = 10, vipgate, n, "s"
			s.record(m)
		}
	}
	if err != nil {
		return err
	}
	return measureUnreadLog(ctx, s)
}

// endAll sends SIGTERM to processes and returns the seconds until the last one had exited, all
// with status 0.
func (fx *fixture) endAll(processes ...*lab.Process) (float64, error) {
	ctx, cancel := fx.withTimeout()
	defer cancel()
	began := time.Now()
	for _, p := range processes {
		if err := p.Signal(syscall.SIGTERM); err != nil {
			return 0, err
		}
	}
	var took float64
	for _, p := range processes {
		status, err := p.Wait(ctx)
		if err != nil {
			return 0, fx.explain(ctx, err)
		}
		if status != 0 {
			return 0, fmt.Errorf("%s ended with status %d after SIGTERM: %s", p.Name, status, p.Tail(5))
		}
		took = max(took, p.Ended().Sub(began).Seconds())
	}
	return took, nil
}
