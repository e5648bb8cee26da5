package traffic

import (
	"context"
	"errors"
	"fmt"

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
// to a pod that saw the scaling, then to pods that did not.
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
		if err := errors.Join(t.stop(bound, t.Pods[pod-1]), t.wantVia(ctx, t.pods(pod+1)...)); err != nil {
			return nil, fmt.Errorf("end pod %d: %w", pod, err)
		}
	}
	if err := g.WaitAnswered(bound, calm); err != nil {
		return nil, err
	}
	t.mu.Lock()
	t.earlier = before
	t.mu.Unlock()
	if err := t.write(); err != nil {
		return nil, err
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
	return nil, errors.Join(t.stop(bound, t.Pods[pods-1]), t.wantVia(ctx, 1, 2), g.WaitAnswered(bound, calm))
}

// pods returns the pods from a number on.
func (t *Trench) pods(from int) (numbers []int) {
	for ; from <= len(t.Pods); from++ {
		numbers = append(numbers, from)
	}
	return numbers
}
