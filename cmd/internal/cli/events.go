package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/status"
)

// EventFlags are the flags of the events commands.
type EventFlags struct {
	AdminFlags
	Limit  uint32 `help:"Only the newest N; 0 shows all that are kept." placeholder:"N"`
	Output string `short:"o" help:"table or json." enum:"table,json" default:"table"`
	Follow bool   `short:"f" help:"Continue with new events as they happen, until Ctrl-C, also when the process restarts; with -o json one object in each line."`
}

// EventPosition is where events continue: after a number of an instance.
type EventPosition struct {
	Instance string
	After    uint64
	Limit    uint32
}

// EventPage holds events up to a number, and how many before them are lost.
type EventPage[E any] struct {
	Instance   string
	Events     []E
	UpTo, Lost uint64
}

// EventFollower prints events over restarts of a process, each once.
type EventFollower[E any] struct {
	Program string
	// Open passes the pages from a position on to take, until the connection ends.
	Open  func(ctx context.Context, from EventPosition, take func(EventPage[E]) error) error
	Print func([]E) error
	// Notes takes what is not an event: gaps and lost connections.
	Notes io.Writer

	Position EventPosition
}

// FollowEvents follows until SIGINT or SIGTERM and prints a table, or JSON.
func FollowEvents[E proto.Message](ctx context.Context, out *Output, flags EventFlags, program string, log *status.EventLog[E],
	open func(context.Context, EventPosition, func(EventPage[E]) error) error,
) error {
	ctx, cancel := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	f := &EventFollower[E]{
		Program: program, Open: open, Print: EventPrinter(out, flags.Output, log), Notes: os.Stderr,
		Position: EventPosition{Limit: flags.Limit},
	}
	return f.Run(ctx)
}

// EventPrinter prints events as a table that continues, or as an object in each line.
func EventPrinter[E proto.Message](out *Output, format string, log *status.EventLog[E]) func([]E) error {
	return func(events []E) error {
		if format != "json" {
			out.Printf("%s", log.Render(events))
			return nil
		}
		for _, e := range events {
			text, err := status.JSON(e, false)
			if err != nil {
				return err
			}
			out.Printf("%s", text)
		}
		return nil
	}
}

// Run follows until ctx ends. The first connection must succeed; later ones are tried until they
// do.
func (f *EventFollower[E]) Run(ctx context.Context) error {
	reached, away := false, false
	var broken error // of the output: no new connection resolves it
	retry := backoff.Backoff{Min: 100 * time.Millisecond, Max: 2 * time.Second}
	for {
		err := f.Open(ctx, f.Position, func(p EventPage[E]) error {
			if away {
				f.note("connected again")
			}
			reached, away = true, false
			retry.Reset()
			broken = f.take(p)
			return broken
		})
		switch code := grpcstatus.Code(err); {
		case ctx.Err() != nil:
			return nil
		case broken != nil:
			return broken
		case code == codes.Unimplemented:
			return fmt.Errorf("the running %[1]s is older than this program and cannot be followed: "+
				"use `%[1]s events` without --follow", f.Program)
		case code == codes.InvalidArgument, code == codes.PermissionDenied, !reached:
			return Explain(err)
		}
		if !away {
			f.note("the %s is gone, waiting for it: %v", f.Program, Explain(err))
			away = true
		}
		if retry.Wait(ctx) != nil {
			return nil
		}
	}
}

// take prints the events of a page and moves the position behind them.
func (f *EventFollower[E]) take(p EventPage[E]) error {
	if f.Position.Instance != "" && f.Position.Instance != p.Instance {
		f.note("the %s was restarted; events count from 1 again, and those not received from the previous process are lost",
			f.Program)
	}
	f.Position = EventPosition{Instance: p.Instance, After: p.UpTo}
	if p.Lost > 0 {
		f.note("%d events lost: they came faster than they were read, or while no client was connected", p.Lost)
	}
	return f.Print(p.Events)
}

func (f *EventFollower[E]) note(format string, args ...any) {
	// If stderr cannot be written to, no other output is left.
	_, _ = fmt.Fprintf(f.Notes, "%s: %s\n", f.Program, fmt.Sprintf(format, args...))
}
