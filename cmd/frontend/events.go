package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/status"
)

type eventsCommand struct {
	adminFlags
	VIP    string `name:"vip" help:"Only events of this VIP." placeholder:"PREFIX"`
	Limit  uint32 `help:"Only the newest N; 0 shows all that are kept." placeholder:"N"`
	Output string `short:"o" help:"table or json." enum:"table,json" default:"table"`
	Follow bool   `short:"f" help:"Go on with new ones as they happen, until Ctrl-C, also when the frontend restarts; with -o json one object in each line."`
}

// Run prints events.
func (c *eventsCommand) Run(ctx context.Context, out *cli.Output) error {
	if c.Follow {
		ctx, cancel := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
		defer cancel()
		f := &eventFollower{
			request: &frontendv1.WatchEventsRequest{Vip: c.VIP, Limit: c.Limit},
			open:    c.watch, print: printer(out, c.Output), notes: os.Stderr,
		}
		return f.run(ctx)
	}
	return withFrontend(c.AdminSocket, func(client frontendv1.FrontendServiceClient) error {
		ctx, cancel := cli.CallContext()
		defer cancel()
		r, err := client.ListEvents(ctx, &frontendv1.ListEventsRequest{Vip: c.VIP, Limit: c.Limit})
		if err != nil {
			return cli.Explain(err)
		}
		if c.Output == "json" {
			return cli.PrintJSON(out, r)
		}
		out.Printf("%s", status.Events(r.GetEvents()))
		return nil
	})
}

// watch opens the stream of events and hands its messages to take until it ends.
func (c *eventsCommand) watch(ctx context.Context, r *frontendv1.WatchEventsRequest, take func(*frontendv1.WatchEventsResponse) error) error {
	return withFrontend(c.AdminSocket, func(client frontendv1.FrontendServiceClient) error {
		stream, err := client.WatchEvents(ctx, r)
		if err != nil {
			return err
		}
		for {
			m, err := stream.Recv()
			if err != nil {
				return err
			}
			if err := take(m); err != nil {
				return err
			}
		}
	})
}

// printer prints events as a table that goes on, or as an object in each line.
func printer(out *cli.Output, format string) func([]*frontendv1.Event) error {
	if format != "json" {
		log := status.NewEventLog()
		return func(events []*frontendv1.Event) error {
			out.Printf("%s", log.Render(events))
			return nil
		}
	}
	return func(events []*frontendv1.Event) error {
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

// Back-off between attempts to reach a frontend that was reached before.
const (
	minFollowBackoff = 100 * time.Millisecond
	maxFollowBackoff = 2 * time.Second
)

// eventFollower prints events over restarts of the frontend, each once.
type eventFollower struct {
	// request is where to go on; it moves with what was printed.
	request *frontendv1.WatchEventsRequest
	open    func(ctx context.Context, r *frontendv1.WatchEventsRequest, take func(*frontendv1.WatchEventsResponse) error) error
	print   func([]*frontendv1.Event) error
	// notes takes what is not an event: gaps and lost connections.
	notes io.Writer
}

// errPrint wraps what no new connection mends.
type errPrint struct{ error }

// run follows until ctx ends. The first connection must succeed; later ones are
// tried until they do.
func (f *eventFollower) run(ctx context.Context) error {
	reached, away := false, false
	wait := minFollowBackoff
	for {
		err := f.open(ctx, f.request, func(m *frontendv1.WatchEventsResponse) error {
			if away {
				f.note("connected again")
			}
			reached, away, wait = true, false, minFollowBackoff
			return f.take(m)
		})
		var broken errPrint
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.As(err, &broken):
			return broken.error
		case !worthRetrying(err) || !reached:
			return explainFollow(err)
		}
		if !away {
			f.note("the frontend is gone, waiting for it: %v", explainFollow(err))
			away = true
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil
		}
		wait = min(2*wait, maxFollowBackoff)
	}
}

// take prints the events of a message and moves the request behind them.
func (f *eventFollower) take(m *frontendv1.WatchEventsResponse) error {
	r := f.request
	if r.GetInstanceId() != "" && r.GetInstanceId() != m.GetInstanceId() {
		f.note("the frontend was restarted; events count from 1 again, and what the one before did not get to tell is gone")
	}
	r.InstanceId, r.After, r.Limit = m.GetInstanceId(), m.GetUpTo(), 0
	if m.GetLost() > 0 {
		f.note("%d events lost: they came faster than they were read here, or while nobody was connected", m.GetLost())
	}
	if err := f.print(m.GetEvents()); err != nil {
		return errPrint{err}
	}
	return nil
}

func (f *eventFollower) note(format string, args ...any) {
	// What cannot be written to stderr has nowhere else to go.
	_, _ = fmt.Fprintf(f.notes, "frontend: %s\n", fmt.Sprintf(format, args...))
}

// worthRetrying tells whether another attempt may end otherwise: not when the
// frontend refuses the request, or does not know it.
func worthRetrying(err error) bool {
	switch grpcstatus.Code(err) {
	case codes.InvalidArgument, codes.Unimplemented, codes.PermissionDenied:
		return false
	}
	return true
}

func explainFollow(err error) error {
	switch s, isStatus := grpcstatus.FromError(err); {
	case !isStatus: // it says itself how to come to a frontend
		return err
	case s.Code() == codes.Unimplemented:
		return errors.New("the running frontend is older than this program and cannot be followed: use `frontend events` without --follow")
	}
	return cli.Explain(err)
}
