package lb

import (
	"context"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
