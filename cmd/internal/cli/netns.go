package cli

import (
	"context"
	"log/slog"

	"github.com/vipgate/vipgate/pkg/identity"
)

// WarnOfTarget logs a warning if the program target runs in the network namespace of this
// process. In a trench pod, target intercepts packets that should be forwarded.
func WarnOfTarget(ctx context.Context, log *slog.Logger) {
	switch owner, plausible := identity.NetNSOwner(ctx, "target"); {
	case plausible:
		log.Error("target runs in the network namespace of a trench pod and takes packets to its pool; "+
			"end it, and run target cleanup here", "owner", owner)
	case owner != "":
		log.Warn("another user's process has the socket of target", "owner", owner)
	}
}
