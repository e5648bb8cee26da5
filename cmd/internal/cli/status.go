package cli

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"syscall"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/status"
)

// StatusFlags are the flags of the status commands.
type StatusFlags struct {
	AdminSocket string `help:"Unix socket of the running process." default:"${admin_socket}" placeholder:"SOCKET"`
	Output      string `short:"o" help:"table or json." enum:"table,json" default:"table"`
	Watch       bool   `short:"w" help:"Show it again at every change, until Ctrl-C."`
}

// clearScreen moves to the top left and erases everything (ECMA-48).
const clearScreen = "\x1b[H\x1b[2J\x1b[3J"

// ShowStatus prints a status: once, with ExitFailed if render says that
// something is not as it should be, or again at every change.
func ShowStatus[S proto.Message](ctx context.Context, out *Output, flags StatusFlags,
	get func(context.Context) (S, error), watch func(context.Context) (func() (S, error), error), render func(S) (string, bool),
) error {
	show := func(s S) (string, bool, error) {
		text, good := render(s)
		if flags.Output == "json" {
			var err error
			if text, err = status.JSON(s, !flags.Watch); err != nil {
				return "", false, err
			}
		}
		return text, good, nil
	}
	if !flags.Watch {
		ctx, cancel := context.WithTimeout(ctx, CallTimeout)
		defer cancel()
		s, err := get(ctx)
		if err != nil {
			return Explain(err)
		}
		text, good, err := show(s)
		if err != nil {
			return err
		}
		out.Printf("%s", text)
		if !good {
			return ExitError(ExitFailed)
		}
		return nil
	}
	ctx, cancel := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	next, err := watch(ctx)
	if err != nil {
		return Explain(err)
	}
	for {
		s, err := next()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return Explain(err)
		}
		text, _, err := show(s)
		if err != nil {
			return err
		}
		if flags.Output == "table" {
			text = clearScreen + text
		}
		out.Printf("%s", text)
	}
}

// Explain turns the error of a call on the admin socket into words.
func Explain(err error) error {
	switch s := grpcstatus.Convert(err); s.Code() {
	case codes.Unavailable:
		return fmt.Errorf("the process does not answer on its admin socket (it stopped, or belongs to another user): %s", health.Reason(err))
	case codes.InvalidArgument:
		return &UsageError{errors.New(s.Message())}
	case codes.DeadlineExceeded:
		return fmt.Errorf("the process did not answer within %v", CallTimeout)
	default:
		return errors.New(s.Message())
	}
}

// PrintJSON prints a message as JSON.
func PrintJSON(out *Output, m proto.Message) error {
	text, err := status.JSON(m, true)
	if err != nil {
		return err
	}
	out.Printf("%s", text)
	return nil
}
