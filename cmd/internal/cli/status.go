package cli

import (
	"context"
	"os/signal"
	"syscall"

	"google.golang.org/protobuf/proto"

	"github.com/vipgate/vipgate/pkg/status"
)

// StatusFlags are the flags of the status commands.
type StatusFlags struct {
	AdminFlags
	Output string `short:"o" help:"table or json." enum:"table,json" default:"table"`
	Watch  bool   `short:"w" help:"Show it again at every change, until Ctrl-C."`
}

// Context returns the context of the call that ShowStatus prints.
func (f StatusFlags) Context(ctx context.Context) (context.Context, context.CancelFunc) {
	if f.Watch {
		return signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	}
	return context.WithTimeout(ctx, CallTimeout)
}

// clearScreen moves to the top left and erases everything (ECMA-48).
const clearScreen = "\x1b[H\x1b[2J\x1b[3J"

// ShowStatus prints the first status of next, with ExitFailed if render reports that something is
// not as it should be, or with --watch all of them until ctx ends.
func ShowStatus[S proto.Message](ctx context.Context, out *Output, flags StatusFlags, next func() (S, error),
	render func(S) (text string, good bool),
) error {
	for {
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
			if text, err = status.JSON(s, !flags.Watch); err != nil {
				return err
			}
		case flags.Watch:
			text = clearScreen + text
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

// PrintJSON prints a message as JSON.
func PrintJSON(out *Output, m proto.Message) error {
	text, err := status.JSON(m, true)
	if err == nil {
		out.Printf("%s", text)
	}
	return err
}
