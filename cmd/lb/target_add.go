package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

type targetAddCommand struct {
	adminFlags
	registryFlags
	Name   string         `arg:"" help:"Name of the target, unique in the stream."`
	Stream string         `required:"" help:"Its stream." placeholder:"STREAM"`
	IP     []netip.Addr   `name:"ip" required:"" help:"Its address; repeatable, one of each family." placeholder:"ADDR"`
	Grace  *time.Duration `help:"How long it outlives a lost connection; absent, and anything longer: --registry-grace of the lb." placeholder:"DURATION"`
}

// Run keeps the target registered.
func (c *targetAddCommand) Run(ctx context.Context, out *cli.Output) error {
	request := &targetv1.RegisterRequest{Stream: c.Stream}
	t := &targetv1.Target{Name: c.Name}
	for i, ip := range c.IP {
		for _, other := range c.IP[:i] {
			if vip.FamilyOf(ip) == vip.FamilyOf(other) {
				return usage("--ip=%s and --ip=%s are of one family: a target has one address of a family, register a second target", other, ip)
			}
		}
		t.Addresses = append(t.Addresses, ip.String())
	}
	request.Targets = []*targetv1.Target{t}
	if c.Grace != nil {
		if *c.Grace < 0 {
			return usage("--grace=%v must not be negative", *c.Grace)
		}
		request.Grace = durationpb.New(*c.Grace)
	}
	conn, err := c.connect(ctx, c.AdminSocket, false)
	if err != nil {
		return err
	}
	defer conn.close()
	k := &leaseKeeper{
		client: targetv1.NewTargetServiceClient(conn), request: request, where: conn.String(),
		// Otherwise gRPC would still wait when we no longer do.
		retry: conn.ResetConnectBackoff, explain: conn.explain, print: out.Printf,
	}
	return cli.RunUntilStopped(trench.MaxDrainTime, func(stops <-chan struct{}) error { return k.run(ctx, stops) })
}

// farewell is how much longer than its drain time the end of a target is waited for.
const farewell = 2 * time.Second

// leaseKeeper keeps one target registered.
type leaseKeeper struct {
	client  targetv1.TargetServiceClient
	request *targetv1.RegisterRequest
	where   string
	retry   func()
	explain func(error) error
	print   func(format string, args ...any)
	// leaving is true from the moment at which the target is taken away: a call
	// that registered it once more would undo that.
	leaving atomic.Bool

	// Owned by the goroutine that follows; read once it has ended.
	states     map[string]targetv1.State
	registered bool
	complained string
	next       time.Duration // of the back-off
}

// run keeps the target until it is stopped, and then takes it away gently: a first
// stop deregisters it and waits until it is gone, a second ends at once.
func (k *leaseKeeper) run(ctx context.Context, stops <-chan struct{}) error {
	following, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- k.follow(following) }()
	select {
	case err := <-ended:
		return err
	case <-stops:
	}
	k.print("deregistering\n")
	k.leaving.Store(true)
	wait, err := k.deregister(ctx)
	if err != nil {
		cancel()
		<-ended
		if !k.registered || grpcstatus.Code(err) == codes.NotFound {
			return nil // there is nothing to take away
		}
		return fmt.Errorf("the target could not be deregistered, its grace ends it: %w", cli.Explain(k.explain(err)))
	}
	timer := time.NewTimer(wait + farewell)
	defer timer.Stop()
	select {
	case err = <-ended:
		return err
	case <-stops:
		k.print("ending at once; the target drains on\n")
	case <-timer.C:
		err = fmt.Errorf("%s did not say that the target is gone within %v", k.where, wait+farewell)
	}
	cancel()
	<-ended
	return err
}

func (k *leaseKeeper) deregister(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, cli.CallTimeout)
	defer cancel()
	r, err := k.client.Deregister(ctx, &targetv1.DeregisterRequest{Stream: k.request.GetStream(), Names: []string{k.request.GetTargets()[0].GetName()}})
	return r.GetDrainFor().AsDuration(), err
}

// follow registers the target, again and again while the load balancer cannot be
// reached, until it is gone (no error), refused, or taken over by another call.
func (k *leaseKeeper) follow(ctx context.Context) error {
	for {
		err := k.session(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, io.EOF), k.leaving.Load() && grpcstatus.Code(err) == codes.Unavailable:
			return nil
		case grpcstatus.Code(err) != codes.Unavailable:
			return errors.New(grpcstatus.Convert(err).Message())
		}
		if why := cli.Explain(k.explain(err)).Error(); why != k.complained {
			k.complained = why
			k.print("not registered, trying again: %s\n", why)
		}
		timer := time.NewTimer(k.pause())
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		if k.leaving.Load() {
			return nil
		}
		k.retry()
	}
}

// session is one Register. It returns why it ended.
func (k *leaseKeeper) session(ctx context.Context) error {
	stream, err := k.client.Register(ctx, k.request)
	if err != nil {
		return err
	}
	for first := true; ; first = false {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if first {
			k.next, k.registered, k.complained = 0, true, ""
			k.states = map[string]targetv1.State{}
			k.print("registered at %s; without this process the target stays for %v\n", k.where, m.GetGrace().AsDuration())
		}
		for _, i := range m.GetTargets() {
			if s, known := k.states[i.GetAddress()]; !known || s != i.GetState() {
				k.states[i.GetAddress()] = i.GetState()
				k.print("%s\n", status.TargetLine(i))
			}
		}
	}
}

// pause is the wait after one more failure.
func (k *leaseKeeper) pause() time.Duration {
	d := min(max(k.next, minBackoff), maxBackoff)
	k.next = d * 8 / 5
	return time.Duration(float64(d) * (0.8 + 0.4*rand.Float64()))
}
