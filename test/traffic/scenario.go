package traffic

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
	"github.com/vipgate/vipgate/test/load"
)

// The traffic of a scenario. The lab sustains far more, so that every loss is due to the change.
const (
	rate  = 100 // requests per second
	flows = 24  // long-lived
	// calm is the number of requests that are answered before and after the change.
	calm = 30
)

// Scenario is a change under traffic.
type Scenario struct {
	Title string
	// Targets is the number of targets at the begin.
	Targets int
	// Planned scenarios lose nothing: no request, and no flow of a target that stayed.
	Planned bool
	// Flows is the number of long-lived flows; 0 selects the usual one.
	Flows int

	run func(context.Context, *Trench, *load.Generator) (left []string, err error)
}

// Scenarios returns all scenarios, in an order in which one trench can run them.
func Scenarios() []Scenario {
	return []Scenario{
		{"scale from 1 to 10 targets and back", 1, true, 0, scale},
		{"rolling restart of three targets", 4, true, 0, restartTargets},
		{"rolling restart of the pods", 4, true, 0, restartPods},
		{"kill -9 of an lb", 4, true, 0, killLB},
		{"SIGTERM to a frontend", 4, true, 0, stopFrontend},
		{"sudden death of a target", 4, false, 0, killTarget},
	}
}

// Run runs a scenario and returns the outcome of its traffic. The error is set if the scenario
// could not be run; lost requests and flows are only in the row.
func (t *Trench) Run(ctx context.Context, s Scenario) (load.Row, error) {
	row := load.Row{Title: s.Title}
	fail := func(what string, err error) (load.Row, error) {
		return row, fmt.Errorf("%s: %s: %w\n%s", s.Title, what, err, t.Logs())
	}
	if err := t.prepare(ctx, s.Targets); err != nil {
		return fail("prepare", err)
	}
	n, c := cmp.Or(s.Flows, flows), load.Config{}
	if t.o.Downloads {
		c.Downloads = n / 2
	}
	g, err := t.Load(ctx, rate, n, c)
	if err != nil {
		return fail("load", err)
	}
	defer func() { row.Result = g.Stop(ctx) }()
	begin, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	if err := errors.Join(g.WaitFlows(begin), g.WaitAnswered(begin, calm)); err != nil {
		return fail("before the change", err)
	}
	row.Left, err = s.run(ctx, t, g)
	if err != nil {
		return fail("play", err)
	}
	end, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	if err := g.WaitAnswered(end, calm); err != nil {
		return fail("after the change", err)
	}
	row.Result = g.Stop(ctx)
	return row, nil
}

// Check returns an error if a scenario lost requests or flows that it must keep, or had no traffic
// that it could lose.
func (s Scenario) Check(row load.Row) error {
	if row.Result.Answered == 0 || len(row.Result.Flows) == 0 {
		return fmt.Errorf("only %d requests were answered, and there were %d flows", row.Result.Answered,
			len(row.Result.Flows))
	}
	if s.Planned {
		return row.Result.Lost(row.Left...)
	}
	if broken, _ := row.Result.Broken(row.Left...); broken > 0 {
		return fmt.Errorf("%d flows broke whose targets stayed; %w", broken, row.Result.Lost(row.Left...))
	}
	if float64(row.Result.Failed) > deadShare*float64(row.Result.Sent) {
		return fmt.Errorf("%d of %d requests failed, more than went to the dead target", row.Result.Failed, row.Result.Sent)
	}
	return nil
}

// deadShare is above the share of requests that one of four targets gets.
const deadShare = 0.4

// prepare scales the trench to n targets and waits until all are ready.
func (t *Trench) prepare(ctx context.Context, n int) error {
	gone := t.names()
	if err := t.scale(n); err != nil {
		return err
	}
	if n < len(gone) {
		if err := t.wantTargets(ctx, admin.Gone(gone[n:]...)); err != nil {
			return err
		}
	}
	return t.settle(ctx)
}

// scale adds nine targets, waits until all of them answer, and removes them again. The
// long-lived flows belong to the target that stays.
func scale(ctx context.Context, t *Trench, g *load.Generator) ([]string, error) {
	if err := errors.Join(t.scale(targets), t.settle(ctx)); err != nil {
		return nil, err
	}
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	all := t.names()
	if err := g.WaitTargets(bound, all...); err != nil {
		return nil, err
	}
	left := all[1:]
	if err := t.scale(1); err != nil {
		return left, err
	}
	if !t.o.Control { // an orchestrator waits for the drain
		if err := t.wantTargets(ctx, admin.Gone(left...)); err != nil {
			return left, err
		}
	}
	for _, name := range left {
		if err := t.app(name).Stop(bound); err != nil {
			return left, err
		}
	}
	if err := errors.Join(t.wantTargets(ctx, admin.Gone(left...)), g.WaitAnswered(bound, calm)); err != nil {
		return left, err
	}
	for _, name := range left { // restore the targets for the next scenarios
		if err := t.app(name).Start(); err != nil {
			return left, err
		}
	}
	return left, nil
}

// restartTargets restarts three targets, one after the other.
func restartTargets(ctx context.Context, t *Trench, _ *load.Generator) ([]string, error) {
	left := t.names()[:3]
	for _, name := range left {
		if err := t.restart(ctx, name); err != nil {
			return left, fmt.Errorf("restart %s: %w", name, err)
		}
	}
	return left, nil
}

func (t *Trench) restart(ctx context.Context, name string) error {
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	if t.o.Control {
		return errors.Join(t.app(name).Stop(bound), t.wantDown(ctx, name), t.app(name).Start(), t.settle(ctx))
	}
	if err := errors.Join(t.announce(true, name), t.wantTargets(ctx, admin.Gone(name))); err != nil {
		return err
	}
	return errors.Join(t.app(name).Stop(bound), t.app(name).Start(), t.announce(false, name), t.settle(ctx))
}

// restartPods replaces all pods, one after the other. In a new pod the lb starts last: the
// containers of a pod start in any order, and the lb's image may have to be pulled.
func restartPods(ctx context.Context, t *Trench, g *load.Generator) ([]string, error) {
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	for n, p := range t.Pods {
		if err := lab.Stop(bound, p.LB, p.Frontend); err != nil {
			return nil, err
		}
		if !t.o.Control {
			if err := t.wantVia(ctx, t.without(n+1)...); err != nil {
				return nil, err
			}
		}
		if err := t.replacePod(ctx, n+1, g); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// replacePod replaces a pod that has ended by a new one.
func (t *Trench) replacePod(ctx context.Context, pod int, g *load.Generator) error {
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	p := t.Pods[pod-1]
	if err := errors.Join(t.Replace(pod), t.startFrontend(p), t.wantEgress(ctx, p),
		g.WaitAnswered(bound, calm)); err != nil {
		return err
	}
	if t.o.Control {
		// A quick lb would answer the retransmitted SYNs of the requests that the pod attracts.
		_, err := g.Wait(bound, func(r load.Result) error {
			if r.Failed == 0 {
				return errors.New("no request has failed")
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return errors.Join(t.startLB(p), t.settle(ctx), g.WaitAnswered(bound, calm))
}

// killLB kills the lb of one pod, which is started again as by a kubelet.
func killLB(ctx context.Context, t *Trench, g *load.Generator) ([]string, error) {
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	p := t.Pods[0]
	return nil, errors.Join(p.LB.Kill(), g.WaitAnswered(bound, calm), t.startLB(p), t.settle(ctx))
}

// stopFrontend restarts the frontend of one pod.
func stopFrontend(ctx context.Context, t *Trench, g *load.Generator) ([]string, error) {
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	p := t.Pods[0]
	if err := lab.Stop(bound, p.Frontend); err != nil {
		return nil, err
	}
	return nil, errors.Join(t.wantVia(ctx, t.without(1)...), g.WaitAnswered(bound, calm), t.startFrontend(p),
		t.settle(ctx))
}

// killTarget disconnects a target permanently. The scenario ends with the first calm phase after
// the pods noticed: only requests and flows to that target were lost.
func killTarget(ctx context.Context, t *Trench, g *load.Generator) ([]string, error) {
	name := t.names()[3]
	if err := errors.Join(t.app(name).Kill(), t.wantDown(ctx, name)); err != nil {
		return []string{name}, err
	}
	return []string{name}, nil
}

// Revive undoes the last scenario.
func (t *Trench) Revive() error {
	var errs []error
	for _, a := range t.Targets {
		errs = append(errs, a.Revive())
	}
	return errors.Join(errs...)
}
