package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
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

// EventStream passes the messages of a WatchEvents call to take, until the stream ends or take
// returns an error.
type EventStream func(ctx context.Context, request *adminv1.WatchEventsRequest,
	take func(*adminv1.WatchEventsResponse) error) error

// EventFollower prints each event once, across restarts of the process.
type EventFollower struct {
	Program string
	Open    EventStream
	Print   func([]*adminv1.Event) error
	Notes   io.Writer // receives messages about gaps and lost connections

	Request *adminv1.WatchEventsRequest // of the next connection
}

// ShowEvents prints the events of a program, of one VIP unless vip is empty. With --follow it
// continues until SIGINT or SIGTERM.
func ShowEvents(ctx context.Context, out *Output, flags EventFlags, program, vip string, log *status.EventLog) error {
	if flags.Follow {
		ctx, cancel := Following(ctx)
		defer cancel()
		f := &EventFollower{
			Program: program, Print: EventPrinter(out, flags.Output, log), Notes: os.Stderr,
			Request: &adminv1.WatchEventsRequest{Vip: vip, Limit: flags.Limit},
			Open: func(ctx context.Context, request *adminv1.WatchEventsRequest,
				take func(*adminv1.WatchEventsResponse) error,
			) error {
				return watchEvents(ctx, program, flags.AdminSocket, request, take)
			},
		}
		return f.Run(ctx)
	}
	r, err := Call(ctx, program, flags.AdminFlags, adminv1.NewEventServiceClient, adminv1.EventServiceClient.ListEvents,
		&adminv1.ListEventsRequest{Vip: vip, Limit: flags.Limit})
	switch {
	case err != nil:
		return err
	case flags.Output == "json":
		text, err := status.JSON(r, true)
		if err == nil {
			out.Printf("%s", text)
		}
		return err
	}
	out.Printf("%s", log.All(r.GetEvents()))
	return nil
}

// watchEvents is the EventStream of an admin socket.
func watchEvents(ctx context.Context, program, socket string, request *adminv1.WatchEventsRequest,
	take func(*adminv1.WatchEventsResponse) error,
) error {
	conn, err := DialAdmin(program, socket, false)
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := adminv1.NewEventServiceClient(conn).WatchEvents(ctx, request)
	for err == nil {
		var message *adminv1.WatchEventsResponse
		if message, err = stream.Recv(); err == nil {
			err = take(message)
		}
	}
	return err
}

// EventPrinter returns a function that prints events as a continued table, or as JSON, a line each.
func EventPrinter(out *Output, format string, log *status.EventLog) func([]*adminv1.Event) error {
	return func(events []*adminv1.Event) error {
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

// Run prints events until ctx ends. The first connection must succeed; later ones are retried.
func (f *EventFollower) Run(ctx context.Context) error {
	reached, away := false, false
	var broken error // error of the output, which a new connection cannot resolve
	retry := backoff.Backoff{Min: 100 * time.Millisecond, Max: 2 * time.Second}
	for {
		err := f.Open(ctx, f.Request, func(page *adminv1.WatchEventsResponse) error {
			if away {
				f.note("connected again")
			}
			reached, away = true, false
			retry.Reset()
			broken = f.take(page)
			return broken
		})
		switch code := grpcstatus.Code(err); {
		case ctx.Err() != nil:
			return nil
		case broken != nil:
			return broken
		// A retry cannot correct the request, and a process that was never reached may not exist.
		case code == codes.InvalidArgument, code == codes.PermissionDenied, !reached:
			return Explain(err)
		}
		// One note for each outage, not for each attempt.
		if !away {
			f.note("the %s is gone, waiting for it: %v", f.Program, Explain(err))
			away = true
		}
		if retry.Wait(ctx) != nil {
			return nil
		}
	}
}

// take prints the events of a message and advances the position.
func (f *EventFollower) take(page *adminv1.WatchEventsResponse) error {
	if before := f.Request.GetInstanceId(); before != "" && before != page.GetInstanceId() {
		f.note("the %s was restarted; events count from 1 again, and those not received from the previous process are lost",
			f.Program)
	}
	// The next connection continues after the last event. Limit applies to the first one only.
	f.Request = &adminv1.WatchEventsRequest{
		Vip: f.Request.GetVip(), InstanceId: page.GetInstanceId(), After: page.GetUpTo(),
	}
	if n := page.GetLost(); n > 0 {
		f.note("%d events lost: they came faster than they were read, or while no client was connected", n)
	}
	return f.Print(page.GetEvents())
}

func (f *EventFollower) note(format string, args ...any) {
	// The error is ignored, because it cannot be reported elsewhere.
	_, _ = fmt.Fprintf(f.Notes, "%s: %s\n", f.Program, fmt.Sprintf(format, args...))
}
