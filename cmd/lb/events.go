package main

import (
	"context"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/status"
)

type eventsCommand struct{ cli.EventFlags }

// Run prints events.
func (c *eventsCommand) Run(ctx context.Context, out *cli.Output) error {
	if c.Follow {
		return cli.FollowEvents(ctx, out, c.EventFlags, "lb", status.LBEventLog(), c.watch)
	}
	return withLB(c.AdminSocket, func(ctx context.Context, client lbv1.LBServiceClient) error {
		r, err := client.ListEvents(ctx, &lbv1.ListEventsRequest{Limit: c.Limit})
		switch {
		case err != nil:
			return err
		case c.Output == "json":
			return cli.PrintJSON(out, r)
		}
		out.Printf("%s", status.LBEventLog().All(r.GetEvents()))
		return nil
	})
}

// followInterval is how often a followed lb is asked for new events.
const followInterval = 500 * time.Millisecond

// watch asks for events again and again and hands them to take until a call fails.
func (c *eventsCommand) watch(ctx context.Context, from cli.EventPosition, take func(cli.EventPage[*lbv1.Event]) error) error {
	conn, err := cli.DialAdmin("lb", c.AdminSocket)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := lbv1.NewLBServiceClient(conn)
	tick := time.NewTicker(followInterval)
	defer tick.Stop()
	for {
		page, err := newEvents(ctx, client, from)
		if err != nil {
			return err
		}
		if err := take(page); err != nil {
			return err
		}
		from = cli.EventPosition{Instance: page.Instance, After: page.UpTo}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// newEvents are those after a position; all, when an lb that was restarted numbers
// them from 1 again.
func newEvents(ctx context.Context, client lbv1.LBServiceClient, from cli.EventPosition) (cli.EventPage[*lbv1.Event], error) {
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
