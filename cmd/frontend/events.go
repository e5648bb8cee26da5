package main

import (
	"context"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/status"
)

type eventsCommand struct {
	cli.EventFlags
	VIP string `name:"vip" help:"Only events of this VIP." placeholder:"PREFIX"`
}

func (c *eventsCommand) Run(ctx context.Context, out *cli.Output) error {
	if c.Follow {
		return cli.FollowEvents(ctx, out, c.EventFlags, "frontend", status.FrontendEventLog(), c.watch)
	}
	r, err := call(ctx, c.AdminFlags, client.ListEvents, &frontendv1.ListEventsRequest{Vip: c.VIP, Limit: c.Limit})
	switch {
	case err != nil:
		return err
	case c.Output == "json":
		return cli.PrintJSON(out, r)
	}
	out.Printf("%s", status.FrontendEventLog().All(r.GetEvents()))
	return nil
}

// watch opens the stream of events and passes its messages to take until it ends.
func (c *eventsCommand) watch(ctx context.Context, from cli.EventPosition,
	take func(cli.EventPage[*frontendv1.Event]) error,
) error {
	conn, err := cli.DialAdmin("frontend", c.AdminSocket, false)
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := frontendv1.NewFrontendServiceClient(conn).WatchEvents(ctx, &frontendv1.WatchEventsRequest{
		Vip: c.VIP, InstanceId: from.Instance, After: from.After, Limit: from.Limit,
	})
	for err == nil {
		var m *frontendv1.WatchEventsResponse
		if m, err = stream.Recv(); err == nil {
			err = take(eventPage(m))
		}
	}
	return err
}

func eventPage(m *frontendv1.WatchEventsResponse) cli.EventPage[*frontendv1.Event] {
	return cli.EventPage[*frontendv1.Event]{
		Instance: m.GetInstanceId(), Events: m.GetEvents(), UpTo: m.GetUpTo(), Lost: m.GetLost(),
	}
}
