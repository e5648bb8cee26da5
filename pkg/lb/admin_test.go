package lb

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/dataplane"
)

// Clients report Unavailable as a process that does not answer, so a refusal must have a different
// code.
func TestRepairRefusalCode(t *testing.T) {
	plane, err := dataplane.New(dataplane.Options{})
	if err != nil {
		t.Fatal(err)
	}
	a := &admin{process: &process{plane: plane}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // nothing runs the data plane, so that every call of it fails
	for name, call := range map[string]func() error{
		"hold":      func() error { _, err := a.Hold(ctx, &lbv1.HoldRequest{}); return err },
		"resume":    func() error { _, err := a.Resume(ctx, &lbv1.ResumeRequest{Stream: "a"}); return err },
		"reconcile": func() error { _, err := a.Reconcile(ctx, &lbv1.ReconcileRequest{}); return err },
	} {
		if err := call(); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A drain without a target is refused by its duration first.
func TestDrainTimeIsBounded(t *testing.T) {
	for drainFor, want := range map[time.Duration]error{
		-1: nil, 0: errNoTarget, maxDrain - 1: errNoTarget, maxDrain: errNoTarget, maxDrain + 1: nil,
	} {
		request := &lbv1.DrainTargetsRequest{DrainFor: durationpb.New(drainFor)}
		_, err := (&admin{process: &process{}}).DrainTargets(t.Context(), request)
		if want == nil && (status.Code(err) != codes.InvalidArgument || err == errNoTarget) || want != nil && err != want {
			t.Errorf("%v: %v", drainFor, err)
		}
	}
}
