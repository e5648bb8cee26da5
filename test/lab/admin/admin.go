// Package admin asks the programs of pods for their states at the admin sockets.
package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/test/lab"
)

// Call calls an admin socket over a separate connection. A program that does not listen is an
// error without a retry.
func Call[Answer any](socket string, call func(*grpc.ClientConn) (Answer, error)) (Answer, error) {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		var none Answer
		return none, fmt.Errorf("admin socket %s: %w", socket, err)
	}
	answer, err := call(conn)
	return answer, errors.Join(err, conn.Close())
}

// LBStatus returns the status of the lb.
func LBStatus(ctx context.Context, p *lab.Pod) (*lbv1.Status, error) {
	return Call(p.LBAdmin(), func(conn *grpc.ClientConn) (*lbv1.Status, error) {
		return lbv1.NewLBServiceClient(conn).GetStatus(ctx, &adminv1.GetStatusRequest{})
	})
}

// FrontendStatus returns the status of the frontend.
func FrontendStatus(ctx context.Context, p *lab.Pod) (*frontendv1.Status, error) {
	return Call(p.FrontendAdmin(), func(conn *grpc.ClientConn) (*frontendv1.Status, error) {
		return frontendv1.NewFrontendServiceClient(conn).GetStatus(ctx, &adminv1.GetStatusRequest{})
	})
}

// WantServing returns an error unless a health service of an admin socket serves.
func WantServing(ctx context.Context, socket, service string) error {
	answer, err := Call(socket, func(conn *grpc.ClientConn) (*healthv1.HealthCheckResponse, error) {
		return healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{Service: service})
	})
	if err == nil && answer.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		err = fmt.Errorf("%s is %v", service, answer.GetStatus())
	}
	return err
}

// TargetStates returns the state of each target in the pod: the worst state of its addresses.
func TargetStates(ctx context.Context, p *lab.Pod) (map[string]targetv1.State, error) {
	list, err := Call(p.LBAdmin(), func(conn *grpc.ClientConn) (*targetv1.ListResponse, error) {
		return targetv1.NewTargetServiceClient(conn).List(ctx, &targetv1.ListRequest{})
	})
	states := map[string]targetv1.State{}
	for _, x := range list.GetTargets() {
		if was, seen := states[x.GetName()]; !seen || was == targetv1.State_STATE_READY {
			states[x.GetName()] = x.GetState()
		}
	}
	return states, err
}

// Condition returns an error unless the states of a pod's targets satisfy it.
type Condition func(states map[string]targetv1.State) error

// WantTargets returns an error unless the targets of all pods except the lost ones satisfy a
// condition.
func WantTargets(ctx context.Context, t *lab.Topology, condition Condition, lost ...int) error {
	for i, p := range t.Pods {
		if slices.Contains(lost, i+1) {
			continue
		}
		states, err := TargetStates(ctx, p)
		if err != nil {
			return fmt.Errorf("pod %d: %w", i+1, err)
		}
		if err := condition(states); err != nil {
			return fmt.Errorf("pod %d: %w; it has %v", i+1, err, states)
		}
	}
	return nil
}

// Ready requires that targets are ready.
func Ready(names ...string) Condition {
	return func(states map[string]targetv1.State) error {
		for _, name := range names {
			if states[name] != targetv1.State_STATE_READY {
				return fmt.Errorf("%s is %v, want it ready", name, states[name])
			}
		}
		return nil
	}
}

// Gone requires that the pod has no targets with these names.
func Gone(names ...string) Condition {
	return func(states map[string]targetv1.State) error {
		for _, name := range names {
			if state, ok := states[name]; ok {
				return fmt.Errorf("%s is %v, want it gone", name, state)
			}
		}
		return nil
	}
}
