package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// milestones of a start, in the words of the logs.
var milestones = []struct {
	what    string
	process func(*lab.Pod) *lab.Process
	line    string // part of the first line that says so
}{
	{"LB has its SVID", lbOf, `msg="SVID received"`},
	{"LB serves readiness", lbOf, `msg="serving readiness"`},
	{"frontend has its SVID", frontendOf, `msg="SVID received"`},
	{"BIRD started", frontendOf, `msg="BIRD started"`},
	{"session with BIRD up", frontendOf, `msg="session with BIRD is up"`},
	{"source routing of the VIPs in the kernel", frontendOf, `msg="VIP set updated"`},
	{"readiness heard", frontendOf, `msg="load balancer's word went from`},
	{"gateway's session seen up", frontendOf, `service=Egress serving=true`},
	{"first VIP announced", frontendOf, `to=announced`},
}

func lbOf(p *lab.Pod) *lab.Process       { return p.LB }
func frontendOf(p *lab.Pod) *lab.Process { return p.Frontend }

// logTime finds the first line of a text log that holds a text, and returns when
// it was written.
func logTime(log, text string) (time.Time, bool) {
	for line := range strings.Lines(log) {
		if !strings.Contains(line, text) {
			continue
		}
		stamp, _, _ := strings.Cut(strings.TrimPrefix(line, "time="), " ")
		at, err := time.Parse(time.RFC3339Nano, stamp)
		return at, err == nil
	}
	return time.Time{}, false
}

// measureStart is row 7. Every start has a laboratory of its own, so that nothing
// is there of an earlier one: no kernel state, no authority, no socket.
func measureStart(ctx context.Context, s *session) error {
	repeats := s.repeats(15, 1)
	for _, c := range []struct {
		n    int
		goal string
	}{{1, "max ≤ 1.5"}, {10_000, "max ≤ 2.5"}} {
		var total []float64
		parts := make([][]float64, len(milestones))
		for range repeats {
			b, err := newSite(s, c.n)
			if err != nil {
				return err
			}
			began := time.Now()
			at, err := b.start(ctx)
			if err == nil {
				total = append(total, at.Sub(began).Seconds())
				for i, m := range milestones {
					if at, ok := logTime(m.process(b.pod).Output(), m.line); ok {
						parts[i] = append(parts[i], at.Sub(began).Seconds())
					}
				}
			}
			if err := errors.Join(err, b.close()); err != nil {
				return err
			}
		}
		s.record(Measurement{Row: 7, What: "start of lb and frontend → all VIPs at the gateway", Method: vipgate, N: c.n, Unit: "s", Goal: c.goal, Samples: total})
		for i, m := range milestones {
			if len(parts[i]) > 0 {
				s.record(Measurement{Row: 7, What: "start → " + m.what, Method: vipgate, N: c.n, Unit: "s", Samples: parts[i]})
			}
		}
	}
	return nil
}

// stopGoal is the drain time, 1 s by default, and 3 s.
const stopGoal = "max ≤ 4"

// measureStop is row 10.
func measureStop(ctx context.Context, s *session) (err error) {
	const n = 10_000
	repeats := s.repeats(10, 1)
	b, err := newSite(s, n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	if _, err := b.start(ctx); err != nil {
		return err
	}
	var lb, frontend, together, gone []float64
	for range repeats {
		took, err := endAll(ctx, b.pod.LB)
		if err != nil {
			return err
		}
		lb = append(lb, took[0])
		if err := b.pod.StartLB(); err != nil {
			return err
		}
		if _, err := b.announced(ctx); err != nil {
			return err
		}

		if took, err = endAll(ctx, b.pod.Frontend); err != nil {
			return err
		}
		frontend = append(frontend, took[0])
		if err := b.pod.StartFrontend(); err != nil {
			return err
		}
		if _, err := b.announced(ctx); err != nil {
			return err
		}

		began := time.Now()
		if took, err = endAll(ctx, b.pod.LB, b.pod.Frontend); err != nil {
			return err
		}
		together = append(together, max(took[0], took[1]))
		at, err := b.holds(ctx, 0)
		if err != nil {
			return err
		}
		gone = append(gone, at.Sub(began).Seconds())
		if _, err := b.start(ctx); err != nil {
			return err
		}
	}
	for _, m := range []struct {
		what    string
		goal    string
		samples []float64
	}{
		{"SIGTERM to lb → its exit", stopGoal, lb},
		{"SIGTERM to frontend → its exit", stopGoal, frontend},
		{"SIGTERM to both → exit of both", stopGoal, together},
		{"SIGTERM to both → last withdraw", "", gone},
	} {
		s.record(Measurement{Row: 10, What: m.what, Method: vipgate, N: n, Unit: "s", Goal: m.goal, Samples: m.samples})
	}
	return nil
}

// endAll sends SIGTERM to processes and returns how many seconds later each had
// ended, which must be with status 0.
func endAll(ctx context.Context, processes ...*lab.Process) ([]float64, error) {
	ctx, cancel := context.WithTimeout(ctx, sitePatience)
	defer cancel()
	began := time.Now()
	for _, p := range processes {
		if err := p.Signal(syscall.SIGTERM); err != nil {
			return nil, err
		}
	}
	took := make([]float64, len(processes))
	for i, p := range processes {
		status, err := p.Wait(ctx)
		if err != nil {
			return nil, err
		}
		if status != 0 {
			return nil, fmt.Errorf("%s ended with status %d after SIGTERM: %s", p.Name, status, p.Tail(5))
		}
		took[i] = p.Ended().Sub(began).Seconds()
	}
	return took, nil
}
