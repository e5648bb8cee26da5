package main

import (
	"context"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/sidecar"
)

type cleanupCommand struct{}

func (cleanupCommand) Run(ctx context.Context, out *cli.Output) error {
	// A running target would restore the removed objects.
	release, err := identity.OwnNetNS(ctx, role, "target cleanup")
	if err != nil {
		return err
	}
	defer release()
	removed, err := sidecar.Cleanup(ctx)
	// After an error, the list has the objects that were removed before it.
	for _, object := range removed {
		out.Printf("removed: %s\n", object)
	}
	if err == nil && len(removed) == 0 {
		out.Printf("nothing to remove\n")
	}
	return err
}
