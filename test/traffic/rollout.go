package traffic

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/vipgate/vipgate/test/lab/admin"
	"github.com/vipgate/vipgate/test/load"
)

const (
	// surge is how many targets a rollout replaces at the same time.
	surge = 2
	// lostPod is the pod that is lost during the rollout.
	lostPod = 2
)

// Rollout returns the scenarios of a deployment that rolls through ten targets while a pod is
// lost, in order: one trench plays all of them, with BFD.
func Rollout() []Scenario {
	return []Scenario{
		{"rollout of targets 1 to 4", targets, true, 0, rollOut(0, 4)},
		{"kill -9 of pod 2, links cut", targets, false, 0, losePod},
		{"rollout of targets 5 to 8, without pod 2", targets, true, 0, rollOut(4, 8)},
		{"pod 2 returns with another MAC", targets, true, 0, returnPod},
		{"rollout of targets 9 and 10", targets, true, 0, rollOut(8, targets)},
	}
}

// rollOut replaces targets, some at a time.
func rollOut(from, to int) func(context.Context, *Trench, *load.Generator) ([]string, error) {
	return func(ctx context.Context, t *Trench, g *load.Generator) ([]string, error) {
		left := t.names()[from:to]
		for names := range slices.Chunk(left, surge) {
			if err := t.replaceTargets(ctx, names); err != nil {
				return left, fmt.Errorf("replace %v: %w", names, err)
			}
		}
		bound, cancel := context.WithTimeout(ctx, waitTimeout)
		defer cancel()
		return left, g.WaitTargets(bound, t.names()...)
	}
}

// replaceTargets ends targets and replaces them by new ones with other link addresses, as a
// Deployment does: the next ones follow when these are ready.
func (t *Trench) replaceTargets(ctx context.Context, names []string) error {
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	if !t.o.Control {
		if err := errors.Join(t.announce(true, names...), t.wantTargets(ctx, admin.Gone(names...))); err != nil {
			return err
		}
	}
	for _, name := range names {
		if err := t.app(name).Stop(bound); err != nil {
			return err
		}
	}
	if t.o.Control {
		if err := t.wantDown(ctx, names...); err != nil {
			return err
		}
	}
	for _, name := range names {
		if err := errors.Join(t.ReplaceTarget(t.app(name)), t.app(name).Start()); err != nil {
			return err
		}
	}
	return errors.Join(t.announce(false, names...), t.settle(ctx))
}

// losePod loses a pod together with its node. The scenario ends with the first calm phase after
// the gateways noticed.
func losePod(ctx context.Context, t *Trench, _ *load.Generator) ([]string, error) {
	t.lost = lostPod
	return nil, errors.Join(t.Lose(lostPod), t.wantVia(ctx, t.without(0)...))
}

// returnPod replaces the lost pod by a new one.
func returnPod(ctx context.Context, t *Trench, g *load.Generator) ([]string, error) {
	t.lost = 0
	return nil, t.replacePod(ctx, lostPod, g)
}
