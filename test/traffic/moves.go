package traffic

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
	"github.com/vipgate/vipgate/test/load"
)

const (
	// movedFlows is the number of flows that change their pod.
	movedFlows = 120
	// firstTargets have all flows before the trench is scaled.
	firstTargets = 2
	// generation is the number of requests during which a set of targets becomes one that pods
	// remember: 4 s.
	generation = 4 * rate
)

// Moves returns a scenario in which every flow changes its pod after the targets were scaled, first
// to a pod that saw the scaling, then to pods that did not. With Options.History the new pods find
// the earlier targets in the trench file, otherwise they ask all targets.
func Moves() Scenario {
	return Scenario{"scale from 2 to 10 targets, all flows change their pod", firstTargets, true, movedFlows, moveFlows}
}

// moveFlows scales the targets, ends two of three pods, replaces them by new ones that find the
// earlier targets in the trench file, and ends the third.
func moveFlows(ctx context.Context, t *Trench, g *load.Generator) ([]string, error) {
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	before := t.names()
	if err := g.WaitAnswered(bound, generation); err != nil {
		return nil, err
	}
	if err := errors.Join(t.scale(targets), t.settle(ctx), g.WaitTargets(bound, t.names()...)); err != nil {
		return nil, fmt.Errorf("scale out: %w", err)
	}
	for pod := 1; pod < pods; pod++ {
		if err := errors.Join(endPod(bound, t.Pods[pod-1]), t.wantVia(ctx, t.pods(pod+1)...)); err != nil {
			return nil, fmt.Errorf("end pod %d: %w", pod, err)
		}
	}
	if err := g.WaitAnswered(bound, calm); err != nil {
		return nil, err
	}
	if t.o.History {
		t.mu.Lock()
		t.earlier = before
		t.mu.Unlock()
		if err := t.write(); err != nil {
			return nil, err
		}
	}
	for pod := 1; pod < pods; pod++ {
		p := t.Pods[pod-1]
		if err := errors.Join(t.Replace(pod), t.startFrontend(p), t.wantEgress(ctx, p), t.startLB(p)); err != nil {
			return nil, fmt.Errorf("replace pod %d: %w", pod, err)
		}
	}
	if err := errors.Join(t.settle(ctx), g.WaitAnswered(bound, calm)); err != nil {
		return nil, err
	}
	return nil, errors.Join(endPod(bound, t.Pods[pods-1]), t.wantVia(ctx, 1, 2), g.WaitAnswered(bound, calm))
}

// Sequence returns a scenario in which flows live through every change that leaves their target
// alive. Some begin after each change.
func Sequence(flows int) Scenario {
	return Scenario{"every change of targets, pods and gateways", firstTargets, false, flows / 4, func(
		ctx context.Context, t *Trench, g *load.Generator,
	) ([]string, error) {
		return sequence(ctx, t, g, flows)
	}}
}

func sequence(ctx context.Context, t *Trench, g *load.Generator, flows int) (left []string, err error) {
	steps := []struct {
		name string
		run  func(context.Context, *Trench, *load.Generator) ([]string, error)
	}{
		{"scale to 10 targets", func(ctx context.Context, t *Trench, g *load.Generator) ([]string, error) {
			bound, cancel := context.WithTimeout(ctx, waitTimeout)
			defer cancel()
			return nil, errors.Join(t.scale(targets), t.settle(ctx), g.WaitTargets(bound, t.names()...))
		}},
		{"flows take other pods", rehash("11")},
		{"rollout of targets 4 to 6", rollOut(3, 6)},
		{"flows take other pods", rehash("12")},
		{"rollout of the pods", restartPods},
		{"removal of target 10", removeLast},
		{"loss of pod 2", losePod},
		{"return of pod 2", returnPod},
		{"loss of gateway 2", loseGateway},
		{"return of gateway 2", func(ctx context.Context, t *Trench, _ *load.Generator) ([]string, error) {
			return nil, errors.Join(t.ReturnGateway(), t.settle(ctx))
		}},
		{"flows take other pods", rehash("13")},
		{"rollout of the pods", restartPods},
	}
	var later []*load.Generator
	defer func() {
		for _, generator := range later {
			generator.Stop(ctx)
		}
	}()
	for _, step := range steps {
		gone, err := step.run(ctx, t, g)
		left = append(left, gone...)
		if err != nil {
			return left, fmt.Errorf("%s: %w", step.name, err)
		}
		generator, err := t.Load(ctx, 1, flows*3/4/len(steps), load.Config{})
		if err != nil {
			return left, err
		}
		later = append(later, generator)
		bound, cancel := context.WithTimeout(ctx, waitTimeout)
		err = errors.Join(generator.WaitFlows(bound), g.WaitAnswered(bound, calm))
		cancel()
		if err != nil {
			return left, fmt.Errorf("after %s: %w", step.name, err)
		}
	}
	var errs []error
	for i, generator := range later {
		// Flows of a target that left before they began have another target of the same name.
		if broken, _ := generator.Now().Broken(left...); broken > 0 {
			errs = append(errs, fmt.Errorf("%d flows broke that began after %s", broken, steps[i].name))
		}
	}
	return left, errors.Join(errs...)
}

// rehash lets the gateways hash flows to pods with another seed, as when the flows of a lost
// gateway reach another one.
func rehash(seed string) func(context.Context, *Trench, *load.Generator) ([]string, error) {
	return func(_ context.Context, t *Trench, _ *load.Generator) ([]string, error) {
		return nil, errors.Join(t.Gateway.Sysctl("net.ipv4.fib_multipath_hash_seed", seed),
			t.Second.Sysctl("net.ipv4.fib_multipath_hash_seed", seed+"1"))
	}
}

// loseGateway loses a gateway. It ends when replies of every pod take the other one.
func loseGateway(ctx context.Context, t *Trench, _ *load.Generator) ([]string, error) {
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	return nil, errors.Join(t.LoseGateway(), lab.Eventually(bound, pollInterval, func() error {
		for _, p := range t.Pods {
			for family, lost := range map[string]netip.Addr{"-4": lab.GatewayB4, "-6": lab.GatewayB6} {
				routes, err := p.NS.Run(bound, "ip", family, "route", "show", "table", "4096")
				if err != nil {
					return err
				}
				if strings.Contains(routes, "via "+lost.String()) {
					return fmt.Errorf("replies take the lost gateway:\n%s", routes)
				}
			}
		}
		return nil
	}))
}

// removeLast removes the last target, which drains and ends.
func removeLast(ctx context.Context, t *Trench, _ *load.Generator) ([]string, error) {
	last := t.names()[len(t.names())-1:]
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	return last, errors.Join(t.scale(len(t.names())-1), t.wantTargets(ctx, admin.Gone(last...)),
		t.app(last[0]).Stop(bound))
}

// endPod ends both programs of a pod.
func endPod(ctx context.Context, pod *lab.Pod) error { return lab.Stop(ctx, pod.LB, pod.Frontend) }

// pods returns the pods from a number on.
func (t *Trench) pods(from int) (numbers []int) {
	for ; from <= len(t.Pods); from++ {
		numbers = append(numbers, from)
	}
	return numbers
}

// knowHistory writes the state of an lb that has seen every set of targets, so that it does not ask
// all targets. It keeps an existing state.
func knowHistory(p *lab.Pod) error {
	file := filepath.Join(p.StateDir(), "generations.json")
	if _, err := os.Stat(file); err == nil {
		return nil
	}
	return errors.Join(os.MkdirAll(p.StateDir(), 0o700),
		os.WriteFile(file, []byte(`{"stream-a":{"since":"2000-01-01T00:00:00Z"}}`), 0o600))
}
