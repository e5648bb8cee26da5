package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/vipgate/vipgate/pkg/identity"
)

// CallTimeout bounds one call to a running process.
const CallTimeout = 5 * time.Second

// maxStatusBytes is the largest status that is taken: 200 000 VIPs.
const maxStatusBytes = 256 << 20

// DialAdmin connects to the admin socket of a running process. The error says
// how to come to one.
func DialAdmin(program, socket string) (*grpc.ClientConn, error) {
	path, err := identity.SocketPath(socket)
	if err != nil {
		return nil, &UsageError{fmt.Errorf("--admin-socket: %w", err)}
	}
	switch _, err := os.Stat(path); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%s does not exist: is `%s run` running here, with this --admin-socket?", path, program)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("%s may not be used: run as the user of %s, or as root", path, program)
	}
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxStatusBytes)))
	if err != nil {
		return nil, fmt.Errorf("admin socket %s: %w", path, err)
	}
	return conn, nil
}

// CallContext returns a context for one call.
func CallContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), CallTimeout)
}
