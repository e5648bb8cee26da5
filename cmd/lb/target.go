package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/status"
)

// targetCommand are the commands about targets.
type targetCommand struct {
	List    targetListCommand    `cmd:"" help:"List targets, from whatever source."`
	Add     targetAddCommand     `cmd:"" help:"Register a target and keep it registered while this runs, such as in a sidecar. SIGTERM ends it gently."`
	Remove  targetRemoveCommand  `cmd:"" help:"Deregister targets: they drain, and their registrations end."`
	Drain   targetDrainCommand   `cmd:"" help:"Drain targets, from whatever source, until they are undrained. It survives restarts."`
	Undrain targetUndrainCommand `cmd:"" help:"Take drains by an operator back."`
}

type targetListCommand struct {
	cli.StatusFlags
	registryFlags
	Stream string `help:"Only this stream." placeholder:"STREAM" env:"-"`
}

// Run prints the list once, or again at every change.
func (c *targetListCommand) Run(ctx context.Context, out *cli.Output) error {
	conn, err := c.connect(ctx, c.AdminSocket, true)
	if err != nil {
		return err
	}
	defer conn.close()
	client := targetv1.NewTargetServiceClient(conn)
	return cli.ShowStatus(ctx, out, c.StatusFlags,
		func(ctx context.Context) (*targetv1.ListResponse, error) {
			all, err := listTargets(ctx, client, c.Stream)
			return all, conn.explain(err)
		},
		func(ctx context.Context) (func() (*targetv1.ListResponse, error), error) {
			stream, err := client.Watch(ctx, &targetv1.WatchRequest{Stream: c.Stream})
			if err != nil {
				return nil, conn.explain(err)
			}
			list := targetTable{}
			return func() (*targetv1.ListResponse, error) {
				all, err := list.next(stream.Recv)
				return all, conn.explain(err)
			}, nil
		},
		func(all *targetv1.ListResponse) (string, bool) {
			return status.Targets(all.GetTargets(), time.Now()), true
		},
	)
}

// listTargets gets all pages.
func listTargets(ctx context.Context, client targetv1.TargetServiceClient, stream string) (*targetv1.ListResponse, error) {
	all := &targetv1.ListResponse{}
	for token := ""; ; {
		page, err := client.List(ctx, &targetv1.ListRequest{Stream: stream, PageToken: token})
		if err != nil {
			return nil, err
		}
		all.Targets = append(all.Targets, page.GetTargets()...)
		if token = page.GetNextPageToken(); token == "" {
			return all, nil
		}
	}
}

// targetTable is what a watch has reported.
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
		if l.known == nil {
			l.known = map[string]*targetv1.TargetInfo{}
		}
		for _, i := range m.GetTargets() {
			key := i.GetStream() + "/" + i.GetName() + "/" + i.GetAddress()
			if i.GetState() == targetv1.State_STATE_GONE {
				delete(l.known, key)
			} else {
				l.known[key] = i
			}
		}
		if l.complete = l.complete || m.GetComplete(); l.complete {
			return l.list(), nil
		}
	}
}

func (l *targetTable) list() *targetv1.ListResponse {
	keys := make([]string, 0, len(l.known))
	for key := range l.known {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	all := &targetv1.ListResponse{}
	for _, key := range keys {
		all.Targets = append(all.Targets, l.known[key])
	}
	return all
}

type targetRemoveCommand struct {
	adminFlags
	registryFlags
	drainFlags
	Names  []string `arg:"" name:"name" help:"Names of targets."`
	Stream string   `required:"" help:"Their stream." placeholder:"STREAM" env:"-"`
}

// Run deregisters targets.
func (c *targetRemoveCommand) Run(ctx context.Context, out *cli.Output) error {
	drainFor, err := c.proto()
	if err != nil {
		return err
	}
	conn, err := c.connect(ctx, c.AdminSocket, true)
	if err != nil {
		return err
	}
	defer conn.close()
	ctx, cancel := context.WithTimeout(ctx, cli.CallTimeout)
	defer cancel()
	r, err := targetv1.NewTargetServiceClient(conn).Deregister(ctx, &targetv1.DeregisterRequest{Stream: c.Stream, Names: c.Names, DrainFor: drainFor})
	if err != nil {
		return cli.Explain(conn.explain(err))
	}
	out.Printf("deregistered in stream %s: %s; flows go on for %v\n", c.Stream, strings.Join(c.Names, " "), r.GetDrainFor().AsDuration())
	return nil
}

type targetDrainCommand struct {
	adminFlags
	drainFlags
	Names  []string `arg:"" name:"name" help:"Names of targets."`
	Stream string   `help:"Their stream; absent: every stream that has a target of such a name." placeholder:"STREAM" env:"-"`
}

// Run drains targets.
func (c *targetDrainCommand) Run(out *cli.Output) error {
	drainFor, err := c.proto()
	if err != nil {
		return err
	}
	return withLB(c.AdminSocket, func(ctx context.Context, client lbv1.LBServiceClient) error {
		r, err := client.DrainTargets(ctx, &lbv1.DrainTargetsRequest{Stream: c.Stream, Names: c.Names, DrainFor: drainFor})
		if err != nil {
			return err
		}
		what := "drained"
		if end := r.GetUntil().AsTime(); end.After(time.Now()) {
			what = "draining until " + end.Format(time.RFC3339)
		}
		out.Printf("%s: %s\n", what, strings.Join(r.GetDrained(), " "))
		return nil
	})
}

type targetUndrainCommand struct {
	adminFlags
	Names  []string `arg:"" name:"name" help:"Names of targets."`
	Stream string   `help:"Their stream; absent: every stream in which an operator drained such a target." placeholder:"STREAM" env:"-"`
}

// Run takes drains back.
func (c *targetUndrainCommand) Run(out *cli.Output) error {
	return withLB(c.AdminSocket, func(ctx context.Context, client lbv1.LBServiceClient) error {
		r, err := client.UndrainTargets(ctx, &lbv1.UndrainTargetsRequest{Stream: c.Stream, Names: c.Names})
		switch {
		case err != nil:
			return err
		case len(r.GetUndrained()) == 0:
			out.Printf("not drained: %s\n", strings.Join(c.Names, " "))
		default:
			out.Printf("no longer drained: %s\n", strings.Join(r.GetUndrained(), " "))
		}
		return nil
	})
}

// adminFlags are the flags of commands that talk to a running lb.
type adminFlags struct {
	AdminSocket string `help:"Unix socket of the running process." default:"${admin_socket}" placeholder:"SOCKET"`
}

// drainFlags say how long a drain lasts.
type drainFlags struct {
	DrainFor *time.Duration `help:"How long flows go on; absent: the stream's drainTime." placeholder:"DURATION" env:"-"`
}

// proto is the drain time of a request; nil leaves it to the stream.
func (f drainFlags) proto() (*durationpb.Duration, error) {
	switch {
	case f.DrainFor == nil:
		return nil, nil
	case *f.DrainFor < 0:
		return nil, usage("--drain-for=%v must not be negative", *f.DrainFor)
	}
	return durationpb.New(*f.DrainFor), nil
}

// withLB makes one call on the admin socket.
func withLB(socket string, f func(context.Context, lbv1.LBServiceClient) error) error {
	conn, err := cli.DialAdmin("lb", socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := cli.CallContext()
	defer cancel()
	if err := f(ctx, lbv1.NewLBServiceClient(conn)); err != nil {
		return cli.Explain(err)
	}
	return nil
}

// registryFlags say which registry to talk to.
type registryFlags struct {
	Registry string       `help:"Registry of a running lb to talk to over mTLS, instead of its admin socket: unix:///PATH of its readiness socket, or HOST:PORT." placeholder:"ADDRESS"`
	LBID     cli.SPIFFEID `name:"lb-id" help:"SPIFFE ID of that lb." placeholder:"ID" group:"Identity"`
	cli.Identity
}
