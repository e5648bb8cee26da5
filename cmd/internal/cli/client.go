package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/identity"
)

// CallTimeout bounds one call to a running process.
const CallTimeout = 5 * time.Second

// maxStatusBytes is the largest accepted status: 200 000 VIPs.
const maxStatusBytes = 256 << 20

// AdminFlags are the flags of commands that talk to a running process.
type AdminFlags struct {
	AdminSocket string `help:"Unix socket of the running process." default:"${admin_socket}" placeholder:"SOCKET"`
}

// DialAdmin connects to the admin socket of a running process. Unless wait, the socket must exist;
// the error names the remedy.
func DialAdmin(program, socket string, wait bool) (*grpc.ClientConn, error) {
	path, err := identity.SocketPath(socket)
	if err != nil {
		return nil, Usage("--admin-socket: %w", err)
	}
	switch _, err := os.Stat(path); {
	case wait:
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

// Call makes one call of a method on the admin socket, within CallTimeout unless ctx has a
// deadline.
func Call[C, Q, R any](ctx context.Context, program string, f AdminFlags, client func(grpc.ClientConnInterface) C,
	method func(C, context.Context, Q, ...grpc.CallOption) (R, error), request Q,
) (r R, err error) {
	conn, err := DialAdmin(program, f.AdminSocket, false)
	if err != nil {
		return r, err
	}
	defer conn.Close()
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, CallTimeout)
		defer cancel()
	}
	return method(client(conn), ctx, request)
}

// Explain returns the error of a call on the admin socket without words of gRPC, and other errors,
// also those that only wrap one of a call, unchanged.
func Explain(err error) error {
	call, ok := err.(interface{ GRPCStatus() *grpcstatus.Status })
	if !ok {
		return err
	}
	switch s := call.GRPCStatus(); s.Code() {
	case codes.Unavailable:
		return fmt.Errorf("the process does not answer on its admin socket (it stopped, or belongs to another user): %s",
			health.Reason(err))
	case codes.InvalidArgument:
		return &UsageError{errors.New(s.Message())}
	case codes.DeadlineExceeded:
		return fmt.Errorf("the process did not answer within %v", CallTimeout)
	default:
		return errors.New(s.Message())
	}
}
