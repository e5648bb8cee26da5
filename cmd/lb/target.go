package main

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/registration"
	"github.com/vipgate/vipgate/pkg/trench"
)

type targetCommand struct {
	List    targetListCommand    `cmd:"" help:"List the targets of all sources."`
	Add     targetAddCommand     `cmd:"" help:"Register a target and keep it registered while this runs, such as in a sidecar. SIGTERM deregisters it and waits for its drain."`
	Remove  targetRemoveCommand  `cmd:"" help:"Deregister targets: they drain, and their registrations end."`
	Drain   targetDrainCommand   `cmd:"" help:"Drain targets of any source until they are undrained, or for --for. It survives restarts."`
	Undrain targetUndrainCommand `cmd:"" help:"End drains by an operator."`
}

type targetListCommand struct {
	cli.StatusFlags
	registryFlags
	Stream string `help:"Only this stream." placeholder:"STREAM" env:"-"`
}

func (c *targetListCommand) Run(ctx context.Context, out *cli.Output) error {
	conn, err := c.connect(ctx, c.AdminFlags, false)
	if err != nil {
		return err
	}
	defer conn.close()
	ctx, cancel := c.Context(ctx)
	defer cancel()
	stream, err := targetv1.NewTargetServiceClient(conn).Watch(ctx, &targetv1.WatchRequest{Stream: c.Stream})
	if err != nil {
		return conn.Explain(err)
	}
	// The stream sends the list in several messages, and then its changes.
	list := targetTable{known: map[string]*targetv1.TargetInfo{}}
	return conn.Explain(cli.ShowStatus(ctx, out, c.StatusFlags,
		func() (*targetv1.ListResponse, error) { return list.next(stream.Recv) },
		func(all *targetv1.ListResponse) (string, bool) {
			return c.View().Targets(all.GetTargets(), time.Now()), true
		},
	))
}

type targetTable struct {
	known    map[string]*targetv1.TargetInfo // by stream, name and address
	complete bool
}

// next takes messages until the list is complete and returns it, sorted.
func (l *targetTable) next(recv func() (*targetv1.WatchResponse, error)) (*targetv1.ListResponse, error) {
	for {
		m, err := recv()
		if err != nil {
			return nil, err
		}
		for _, i := range m.GetTargets() {
			key := i.GetStream() + "/" + i.GetName() + "/" + i.GetAddress()
			if i.GetState() == targetv1.State_STATE_GONE {
				delete(l.known, key)
			} else {
				l.known[key] = i
			}
		}
		// A part of the list would look like missing targets.
		if l.complete = l.complete || m.GetComplete(); !l.complete {
			continue
		}
		all := &targetv1.ListResponse{}
		for _, key := range slices.Sorted(maps.Keys(l.known)) {
			all.Targets = append(all.Targets, l.known[key])
		}
		return all, nil
	}
}

type targetRemoveCommand struct {
	cli.AdminFlags
	registryFlags
	drainFlags
	namesFlag
	Stream string `required:"" help:"Stream of the targets." placeholder:"STREAM" env:"-"`
}

func (c *targetRemoveCommand) Run(ctx context.Context, out *cli.Output) error {
	drainFor, err := cli.NotNegative("--drain-time", c.DrainTime)
	if err != nil {
		return err
	}
	conn, err := c.connect(ctx, c.AdminFlags, false)
	if err != nil {
		return err
	}
	defer conn.close()
	ctx, cancel := context.WithTimeout(ctx, cli.CallTimeout)
	defer cancel()
	r, err := targetv1.NewTargetServiceClient(conn).Deregister(ctx, &targetv1.DeregisterRequest{
		Stream: c.Stream, Names: c.Names, DrainFor: drainFor,
	})
	if err == nil {
		out.Printf("deregistered in stream %s: %s; flows continue for %v\n", c.Stream, strings.Join(c.Names, " "),
			r.GetDrainFor().AsDuration())
	}
	return conn.Explain(err)
}

type targetDrainCommand struct {
	cli.AdminFlags
	cli.DrainEnd
	drainFlags
	namesFlag
	Stream string `help:"Stream of the targets; absent: every stream that has a target of such a name." placeholder:"STREAM" env:"-"`
}

func (c *targetDrainCommand) Run(ctx context.Context, out *cli.Output) error {
	drainFor, err := cli.NotNegative("--drain-time", c.DrainTime)
	if err != nil {
		return err
	}
	endsAfter, err := c.EndsAfter()
	if err != nil {
		return err
	}
	r, err := call(ctx, c.AdminFlags, client.DrainTargets,
		&lbv1.DrainTargetsRequest{Stream: c.Stream, Names: c.Names, DrainFor: drainFor, EndsAfter: endsAfter})
	if err != nil {
		return err
	}
	// Without a drain time, the drain has ended already.
	what := "drained"
	if end := r.GetUntil().AsTime(); end.After(time.Now()) {
		what = "draining until " + end.Format(time.RFC3339)
	}
	out.Printf("%s: %s\n", what, strings.Join(r.GetDrained(), " "))
	return nil
}

type targetUndrainCommand struct {
	cli.AdminFlags
	namesFlag
	Stream string `help:"Stream of the targets; absent: every stream in which an operator drained such a target." placeholder:"STREAM" env:"-"`
}

func (c *targetUndrainCommand) Run(ctx context.Context, out *cli.Output) error {
	r, err := call(ctx, c.AdminFlags, client.UndrainTargets,
		&lbv1.UndrainTargetsRequest{Stream: c.Stream, Names: c.Names})
	switch {
	case err != nil:
		return err
	// Not an error: the targets are in the state that the operator wants.
	case len(r.GetUndrained()) == 0:
		out.Printf("not drained: %s\n", strings.Join(c.Names, " "))
	default:
		out.Printf("no longer drained: %s\n", strings.Join(r.GetUndrained(), " "))
	}
	return nil
}

type namesFlag struct {
	Names []string `arg:"" name:"name" help:"Names of targets."`
}

type drainFlags struct {
	DrainTime *time.Duration `help:"How long flows continue; absent: the stream's drainTime." placeholder:"DURATION" env:"-"`
}

type registryFlags struct {
	Registry string      `help:"Registry of a running lb, over mTLS, instead of its admin socket: unix:///PATH of its readiness socket, or HOST:PORT." placeholder:"ADDRESS"`
	LBID     spiffeid.ID `name:"lb-id" help:"SPIFFE ID of that lb." placeholder:"ID" group:"Identity"`
	cli.Identity
}

type targetAddCommand struct {
	cli.AdminFlags
	registryFlags
	cli.TargetFlags
}

func (c *targetAddCommand) Run(ctx context.Context, out *cli.Output) error {
	return cli.RunUntilStopped(trench.MaxDrainTime, func(stops <-chan struct{}) error { return c.run(ctx, out, stops) })
}

func (c *targetAddCommand) run(ctx context.Context, out *cli.Output, stops <-chan struct{}) error {
	request, err := c.Request()
	if err != nil {
		return err
	}
	// A target may start before the load balancer, so wait for it.
	conn, err := c.connect(ctx, c.AdminFlags, true)
	if err != nil {
		return err
	}
	defer conn.close()
	r := registration.Registration{
		Conn: conn.Conn, Request: request, Report: func(line string) { out.Printf("%s\n", line) },
	}
	return cli.RunUntilDrained(ctx, out, stops, r.Run)
}
