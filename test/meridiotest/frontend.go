package meridiotest

import (
	"context"
	"fmt"

	"google.golang.org/grpc"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
)

// WatchFrontend calls found with whether the frontend of the host is registered at the NSP,
// first with the current state and then on each change, until the stream or ctx ends. While the
// frontend is not registered, Meridio's load balancer has no targets and is unavailable.
func WatchFrontend(ctx context.Context, nsp grpc.ClientConnInterface, host string, found func(bool)) error {
	stream, err := nspv1.NewTargetRegistryClient(nsp).Watch(ctx, &nspv1.Target{
		Status: nspv1.Target_ANY, Type: nspv1.Target_FRONTEND,
	}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("watch frontends: %w", err)
	}
	for {
		r, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("watch frontends: %w", err)
		}
		here := false
		for _, t := range r.GetTargets() {
			here = here || t.GetContext()[Identifier] == host
		}
		found(here)
	}
}
