package main

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/status"
)

type client = lbv1.LBServiceClient

// call makes one call of a method on the admin socket of an lb.
func call[Q, R any](ctx context.Context, f cli.AdminFlags,
	method func(client, context.Context, Q, ...grpc.CallOption) (R, error), request Q,
) (R, error) {
	return cli.Call(ctx, "lb", f, lbv1.NewLBServiceClient, method, request)
}

type statusCommand struct {
	cli.StatusFlags
}

func (c *statusCommand) Run(ctx context.Context, out *cli.Output) error {
	conn, err := cli.DialAdmin("lb", c.AdminSocket, false)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := c.Context(ctx)
	defer cancel()
	stream, err := lbv1.NewLBServiceClient(conn).WatchStatus(ctx, &lbv1.WatchStatusRequest{})
	if err != nil {
		return err
	}
	return cli.ShowStatus(ctx, out, c.StatusFlags,
		func() (*lbv1.Status, error) {
			r, err := stream.Recv()
			return r.GetStatus(), err
		},
		func(s *lbv1.Status) (string, bool) { return status.LB(s, time.Now()), true },
	)
}

type eventsCommand struct{ cli.EventFlags }

func (c *eventsCommand) Run(ctx context.Context, out *cli.Output) error {
	if c.Follow {
		return cli.FollowEvents(ctx, out, c.EventFlags, "lb", status.LBEventLog(), c.watch)
	}
	r, err := call(ctx, c.AdminFlags, client.ListEvents, &lbv1.ListEventsRequest{Limit: c.Limit})
	switch {
	case err != nil:
		return err
	case c.Output == "json":
		return cli.PrintJSON(out, r)
	}
	out.Printf("%s", status.LBEventLog().All(r.GetEvents()))
	return nil
}

// followInterval is the time between two requests for new events.
const followInterval = 500 * time.Millisecond

// watch polls events and passes them to take until a call fails.
func (c *eventsCommand) watch(ctx context.Context, from cli.EventPosition,
	take func(cli.EventPage[*lbv1.Event]) error,
) error {
	conn, err := cli.DialAdmin("lb", c.AdminSocket, false)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := lbv1.NewLBServiceClient(conn)
	for {
		page, err := newEvents(ctx, client, from)
		if err == nil {
			err = take(page)
		}
		if err == nil {
			err = backoff.Sleep(ctx, followInterval)
		}
		if err != nil {
			return err
		}
		from = cli.EventPosition{Instance: page.Instance, After: page.UpTo}
	}
}

// newEvents returns the events after a position, or all events if lb has restarted and numbers them
// from 1 again.
func newEvents(ctx context.Context, client client, from cli.EventPosition) (cli.EventPage[*lbv1.Event], error) {
	call, cancel := context.WithTimeout(ctx, cli.CallTimeout)
	defer cancel()
	page := cli.EventPage[*lbv1.Event]{UpTo: from.After}
	r, err := client.ListEvents(call, &lbv1.ListEventsRequest{Limit: from.Limit, After: from.After})
	if err == nil && from.Instance != "" && r.GetInstanceId() != from.Instance {
		page.UpTo = 0
		r, err = client.ListEvents(call, &lbv1.ListEventsRequest{})
	}
	page.Instance, page.Events = r.GetInstanceId(), r.GetEvents()
	if n := len(page.Events); n > 0 {
		if first := page.Events[0].GetSequence(); page.UpTo > 0 && first > page.UpTo+1 {
			page.Lost = first - page.UpTo - 1
		}
		page.UpTo = page.Events[n-1].GetSequence()
	}
	return page, err
}
