package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/status"
)

// CallTimeout bounds one call to a running process.
const CallTimeout = 5 * time.Second

// maxStatusBytes is the largest accepted status: 200 000 VIPs.
const maxStatusBytes = 256 << 20

// AdminFlags is the group of flags of commands that call a running process.
type AdminFlags struct {
	AdminSocket string `help:"Unix socket of the running process." default:"${admin_socket}" placeholder:"SOCKET"`
}

// DialAdmin connects to the admin socket of a running process. Unless wait is set, the socket must
// exist; the error contains the remedy.
func DialAdmin(program, socket string, wait bool) (*grpc.ClientConn, error) {
	path, err := identity.SocketPath(socket)
	if err != nil {
		return nil, Usage("--admin-socket: %w", err)
	}
	switch _, err := os.Stat(path); {
	// With wait, gRPC retries until the socket exists.
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

// Call calls a method on the admin socket. The default deadline is [CallTimeout].
func Call[C, Q, R any](ctx context.Context, program string, f AdminFlags, client func(grpc.ClientConnInterface) C,
	method func(C, context.Context, Q, ...grpc.CallOption) (R, error), request Q,
) (r R, err error) {
	conn, err := DialAdmin(program, f.AdminSocket, false)
	if err != nil {
		return r, err
	}
	defer conn.Close()
	// Calls that repair the data plane have a longer deadline of their own.
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, CallTimeout)
		defer cancel()
	}
	return method(client(conn), ctx, request)
}

// Explain returns the error of a call on the admin socket without gRPC's prefixes. It returns
// other errors unchanged, including errors that wrap an error of a call.
func Explain(err error) error {
	// Not errors.As: a wrapped error already has a text for the user.
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

// ConfirmFlags are the flags of the confirm commands.
type ConfirmFlags struct {
	AdminFlags
	ID string `arg:"" optional:"" name:"id" help:"Identifier that the status shows; refuses any other removals."`
}

// Confirm puts held removals of a running process in force.
func Confirm(ctx context.Context, out *Output, flags ConfirmFlags, program string) error {
	response, err := Call(ctx, program, flags.AdminFlags, adminv1.NewConfigurationServiceClient,
		adminv1.ConfigurationServiceClient.ConfirmRemovals, &adminv1.ConfirmRemovalsRequest{Id: flags.ID})
	if err == nil {
		out.Printf("confirmed %s: the removal of %s\n", response.GetId(), response.GetRemovals())
	}
	return err
}

// StatusFlags are the flags of the status commands.
type StatusFlags struct {
	AdminFlags
	Output string `short:"o" help:"table; problems: only what is not good; wide: also instances and revisions; or json." enum:"table,problems,wide,json" default:"table" placeholder:"table|problems|wide|json"`
	Watch  bool   `short:"w" help:"Show it again at every change, until Ctrl-C."`
}

// View returns the view that --output selects.
func (f StatusFlags) View() status.View {
	return status.View{Problems: f.Output == "problems", Wide: f.Output == "wide"}
}

// VIPFlags select VIPs of a status.
type VIPFlags struct {
	VIPs []string `arg:"" optional:"" name:"vip" help:"Only these VIPs, such as 20.0.0.1."`
}

// Select applies a selection of the status package, unless no VIP is named.
func Select[S any](f VIPFlags, apply func(S, []string) error) (func(S) error, error) {
	var vips []string
	for _, text := range f.VIPs {
		parsed, err := ParseVIP(text)
		if err != nil {
			return nil, err
		}
		vips = append(vips, parsed)
	}
	return func(s S) error {
		if len(vips) == 0 {
			return nil
		}
		return apply(s, vips)
	}, nil
}

// Context returns the context of the call that ShowStatus prints.
func (f StatusFlags) Context(ctx context.Context) (context.Context, context.CancelFunc) {
	if f.Watch {
		return Following(ctx)
	}
	return context.WithTimeout(ctx, CallTimeout)
}

// Interruptible returns a context that ends with SIGINT, SIGTERM, or the end of a standard input
// that is a pipe: a process that was started by exec in a container gets no signal when its client
// goes away, and would stay.
func Interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	if isPipe(os.Stdin) {
		// The goroutine ends with the process: a read of standard input cannot be interrupted.
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin) // an error is an end, too
			cancel()
		}()
	}
	return ctx, cancel
}

// Following is Interruptible for a command that prints until it is interrupted. Its context also
// ends when a standard output that is a pipe has no reader: a write would notice that only with the
// next event.
func Following(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := Interruptible(ctx)
	stdout, ended := os.Stdout, make(chan struct{})
	if !isPipe(stdout) {
		return ctx, cancel
	}
	go func() {
		defer close(ended)
		for ctx.Err() == nil && !closed(int(stdout.Fd()), readerPoll) {
		}
		cancel()
	}()
	return ctx, func() {
		cancel()
		<-ended
	}
}

// readerPoll bounds the time by which the end of a command that follows is delayed.
const readerPoll = 100 * time.Millisecond

func isPipe(file *os.File) bool {
	info, err := file.Stat()
	return err == nil && info.Mode()&(fs.ModeNamedPipe|fs.ModeSocket) != 0
}

// closed waits until the other end of a pipe is closed, and reports whether it is within a time.
func closed(fd int, within time.Duration) bool {
	// Poll reports POLLERR and POLLHUP without a request.
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd)}}, int(within.Milliseconds()))
	return n > 0 || err != nil && err != unix.EINTR
}

// Control sequences of xterm. The alternate screen has no scrollback, and leaving it restores the
// previous content of the terminal.
const (
	alternateScreen = "\x1b[?1049h"
	normalScreen    = "\x1b[?1049l"
	clearScreen     = "\x1b[H\x1b[2J" // ECMA-48: to the top left, erase the screen
)

func (o *Output) isTerminal() bool {
	f, ok := o.Writer.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// screen returns the terminal, or the zero Screen without one.
func (o *Output) screen() status.Screen {
	if !o.isTerminal() {
		return status.Screen{}
	}
	// https://no-color.org
	screen := status.Screen{Colour: os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
	if size, err := unix.IoctlGetWinsize(int(o.Writer.(*os.File).Fd()), unix.TIOCGWINSZ); err == nil {
		screen.Width, screen.Height = int(size.Col), int(size.Row)
	}
	return screen
}

// Show prints a text, fitted to the width of a terminal.
func (o *Output) Show(text string) {
	screen := o.screen()
	screen.Height = 0 // the terminal scrolls
	o.Printf("%s", screen.Fit(text))
}

// RunStatus shows the part of the status of a running process that choose leaves. client and watch
// are generated by gRPC.
func RunStatus[C, S any, P interface {
	*S
	proto.Message
}](ctx context.Context, out *Output, flags StatusFlags, program string, client func(grpc.ClientConnInterface) C,
	watch func(C, context.Context, *adminv1.WatchStatusRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[S], error),
	choose func(P) error, render func(P, time.Time) (text string, good bool),
) error {
	conn, err := DialAdmin(program, flags.AdminSocket, false)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := flags.Context(ctx)
	defer cancel()
	stream, err := watch(client(conn), ctx, &adminv1.WatchStatusRequest{})
	if err != nil {
		return err
	}
	next := func() (P, error) {
		s, err := stream.Recv()
		if err == nil {
			err = choose(s)
		}
		return s, err
	}
	return ShowStatus(ctx, out, flags, next, func(s P) (string, bool) { return render(s, time.Now()) })
}

// ShowStatus prints the first status of next, and returns ExitFailed if render reports a problem.
// With --watch it prints every status until ctx ends. On a terminal it uses the alternate screen;
// otherwise it separates the statuses by empty lines.
func ShowStatus[S proto.Message](ctx context.Context, out *Output, flags StatusFlags, next func() (S, error),
	render func(S) (text string, good bool),
) error {
	for first := true; ; first = false {
		s, err := next()
		if err != nil {
			if flags.Watch && ctx.Err() != nil {
				return nil // interrupted by the user
			}
			return err
		}
		text, good := render(s)
		switch {
		case flags.Output == "json":
			// With --watch, each line is one object, for programs that read a stream.
			if text, err = status.JSON(s, !flags.Watch); err != nil {
				return err
			}
		// Leave the alternate screen at the end, or the terminal keeps the last status.
		case flags.Watch && out.isTerminal():
			if first {
				out.Printf(alternateScreen)
				defer out.Printf(normalScreen)
			}
			text = clearScreen + out.screen().Fit(text)
		case flags.Watch && !first:
			text = "\n" + text
		case !flags.Watch:
			out.Show(text)
			text = ""
		}
		out.Printf("%s", text)
		switch {
		case flags.Watch:
		case good:
			return nil
		default:
			return ExitError(ExitFailed)
		}
	}
}
