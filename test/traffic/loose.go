package traffic

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/test/lab/admin"
	"github.com/vipgate/vipgate/test/load"
)

// Replies returns a scenario for targets whose replies take any pod (lab.ECMP): no flow breaks,
// not even flows of draining targets while these still serve.
func Replies() Scenario {
	return Scenario{"drain, scale and restart, replies over all pods", 3, true, 0, repliesOverAllPods}
}

// longDrain is the duration of a drain that the scenario cancels.
const longDrain = time.Minute

// repliesOverAllPods drains each target and cancels the drain, adds three targets, restarts two
// of these, removes them, and restarts the last of the first ones.
func repliesOverAllPods(ctx context.Context, t *Trench, g *load.Generator) ([]string, error) {
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	first := t.names()
	for _, name := range first {
		if err := errors.Join(t.drainEverywhere(bound, name), g.WaitAnswered(bound, calm)); err != nil {
			return nil, fmt.Errorf("drain %s: %w", name, err)
		}
		if err := errors.Join(t.undrainEverywhere(bound, name), t.settle(ctx)); err != nil {
			return nil, fmt.Errorf("undrain %s: %w", name, err)
		}
	}
	if err := errors.Join(t.scale(2*len(first)), t.settle(ctx), g.WaitTargets(bound, t.names()...)); err != nil {
		return nil, fmt.Errorf("scale out: %w", err)
	}
	more := t.names()[len(first):]
	for _, name := range more[1:] {
		if err := t.restart(ctx, name); err != nil {
			return nil, fmt.Errorf("restart %s: %w", name, err)
		}
	}
	if err := errors.Join(t.scale(len(first)), t.wantTargets(ctx, admin.Gone(more...)),
		g.WaitAnswered(bound, calm)); err != nil {
		return nil, fmt.Errorf("scale in: %w", err)
	}
	// The flows of this target end with it.
	left := first[len(first)-1:]
	return left, t.restart(ctx, left[0])
}

// drainEverywhere drains a target in every pod, as an operator.
func (t *Trench) drainEverywhere(ctx context.Context, name string) error {
	if err := t.eachLB(func(c lbv1.LBServiceClient) error {
		_, err := c.DrainTargets(ctx, &lbv1.DrainTargetsRequest{
			Names: []string{name}, DrainFor: durationpb.New(longDrain),
		}, grpc.WaitForReady(true))
		return err
	}); err != nil {
		return err
	}
	return t.wantTargets(ctx, func(have map[string]targetv1.State) error {
		if have[name] != targetv1.State_STATE_DRAINING {
			return fmt.Errorf("%s is %v, want it draining", name, have[name])
		}
		return nil
	})
}

func (t *Trench) undrainEverywhere(ctx context.Context, name string) error {
	return t.eachLB(func(c lbv1.LBServiceClient) error {
		_, err := c.UndrainTargets(ctx, &lbv1.UndrainTargetsRequest{Names: []string{name}}, grpc.WaitForReady(true))
		return err
	})
}

// eachLB calls the lb of every pod.
func (t *Trench) eachLB(call func(lbv1.LBServiceClient) error) error {
	for n, p := range t.Pods {
		if _, err := admin.Call(p.LBAdmin(), func(conn *grpc.ClientConn) (any, error) {
			return nil, call(lbv1.NewLBServiceClient(conn))
		}); err != nil {
			return fmt.Errorf("pod %d: %w", n+1, err)
		}
	}
	return nil
}
