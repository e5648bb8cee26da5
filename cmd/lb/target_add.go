package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

type targetAddCommand struct {
	cli.AdminFlags
	registryFlags
	Name   string         `arg:"" help:"Name of the target, unique in the stream."`
	Stream string         `required:"" help:"Stream of the target." placeholder:"STREAM"`
	IP     []netip.Addr   `name:"ip" required:"" help:"Address of the target; repeatable, one of each family." placeholder:"ADDR"`
	Grace  *time.Duration `help:"How long it outlives a lost connection; absent, and anything longer: --registry-grace of the lb." placeholder:"DURATION"`
}

func (c *targetAddCommand) Run(ctx context.Context, out *cli.Output) error {
	t := &targetv1.Target{Name: c.Name}
	for i, ip := range c.IP {
		for _, other := range c.IP[:i] {
			if vip.FamilyOf(ip) == vip.FamilyOf(other) {
				return cli.Usage("--ip=%s and --ip=%s are of one family: a target has one address of a family, register a "+
					"second target", other, ip)
			}
		}
		t.Addresses = append(t.Addresses, ip.String())
	}
	request := &targetv1.RegisterRequest{Stream: c.Stream, Targets: []*targetv1.Target{t}}
	if c.Grace != nil {
		if *c.Grace < 0 {
			return cli.Usage("--grace=%v must not be negative", *c.Grace)
		}
		request.Grace = durationpb.New(*c.Grace)
	}
	conn, err := c.connect(ctx, c.AdminFlags, true)
	if err != nil {
		return err
	}
	defer conn.close()
	r := newRegistration(conn, out, request)
	return cli.RunUntilStopped(trench.MaxDrainTime, func(stops <-chan struct{}) error { return r.run(ctx, stops) })
}

// removalMargin is how much longer than its drain time the removal of a target may take.
const removalMargin = 2 * time.Second

// registration keeps one target registered.
type registration struct {
	client  targetv1.TargetServiceClient
	conn    *registryConn
	out     *cli.Output
	request *targetv1.RegisterRequest
	// leaving is set when the target is deregistered: registering it once more would undo that.
	leaving atomic.Bool

	// Owned by the goroutine of follow; read once it has ended.
	states     map[string]targetv1.State
	registered bool
	failure    string // that was printed
	retry      backoff.Backoff
}

func newRegistration(conn *registryConn, out *cli.Output, request *targetv1.RegisterRequest) *registration {
	return &registration{
		client: targetv1.NewTargetServiceClient(conn), conn: conn, out: out, request: request,
		retry: backoff.Backoff{Min: minBackoff, Max: maxBackoff, Jitter: 0.2},
	}
}

// run keeps the target registered until it is stopped: a first stop deregisters it and waits for its
// removal, a second ends at once.
func (r *registration) run(ctx context.Context, stops <-chan struct{}) error {
	following, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- r.follow(following) }()
	end := func() {
		cancel()
		<-ended
	}
	select {
	case err := <-ended:
		cancel()
		return err
	case <-stops:
	}
	r.out.Printf("deregistering\n")
	r.leaving.Store(true)
	drainTime, err := r.deregister(ctx)
	if err != nil {
		end()
		if !r.registered || grpcstatus.Code(err) == codes.NotFound {
			return nil // there is no registration to remove
		}
		return fmt.Errorf("the target could not be deregistered, its grace ends it: %w", cli.Explain(r.conn.explain(err)))
	}
	defer cancel()
	select {
	case err := <-ended:
		return err
	case <-stops:
		r.out.Printf("ending at once; the target continues to drain\n")
	case <-time.After(drainTime + removalMargin):
		err = fmt.Errorf("%s did not report the removal of the target within %v", r.conn, drainTime+removalMargin)
	}
	end()
	return err
}

func (r *registration) deregister(ctx context.Context) (drainTime time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, cli.CallTimeout)
	defer cancel()
	reply, err := r.client.Deregister(ctx, &targetv1.DeregisterRequest{
		Stream: r.request.GetStream(), Names: []string{r.request.GetTargets()[0].GetName()},
	})
	return reply.GetDrainFor().AsDuration(), err
}

// follow registers the target, again while the load balancer is unavailable, until it is removed
// (no error), rejected, or taken over by another call.
func (r *registration) follow(ctx context.Context) error {
	for {
		err := r.session(ctx)
		unavailable := grpcstatus.Code(err) == codes.Unavailable
		switch {
		case ctx.Err() != nil, errors.Is(err, io.EOF), unavailable && r.leaving.Load():
			return nil
		case !unavailable:
			return errors.New(grpcstatus.Convert(err).Message())
		}
		if failure := cli.Explain(r.conn.explain(err)).Error(); failure != r.failure {
			r.failure = failure
			r.out.Printf("not registered, trying again: %s\n", failure)
		}
		if r.retry.Wait(ctx) != nil || r.leaving.Load() {
			return nil
		}
		r.conn.ResetConnectBackoff() // else gRPC would continue to wait
	}
}

// session is one Register. It returns why it ended.
func (r *registration) session(ctx context.Context) error {
	stream, err := r.client.Register(ctx, r.request)
	if err != nil {
		return err
	}
	for first := true; ; first = false {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if first {
			r.retry.Reset()
			r.registered, r.failure, r.states = true, "", map[string]targetv1.State{}
			r.out.Printf("registered at %s; without this process the target stays for %v\n", r.conn, m.GetGrace().AsDuration())
		}
		for _, i := range m.GetTargets() {
			if s, known := r.states[i.GetAddress()]; !known || s != i.GetState() {
				r.states[i.GetAddress()] = i.GetState()
				r.out.Printf("%s\n", status.TargetLine(i))
			}
		}
	}
}
