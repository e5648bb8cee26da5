package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// registrations registers targets in one pod, as the operator, until the context ends.
type registrations struct {
	ctx    context.Context
	client targetv1.TargetServiceClient
}

func (f *dataPlaneFixture) dialRegistry(p *lab.Pod) registrations {
	f.t.Helper()
	conn, err := grpc.NewClient("unix:"+p.LBAdmin(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	f.must(err)
	f.t.Cleanup(func() { f.must(conn.Close()) })
	return registrations{f.ctx, targetv1.NewTargetServiceClient(conn)}
}

// register registers a target and waits until it passes its checks.
func (r registrations) register(a *lab.App) error {
	target := &targetv1.Target{Name: a.Name}
	for _, ip := range a.Addrs {
		target.Addresses = append(target.Addresses, ip.String())
	}
	stream, err := r.client.Register(r.ctx,
		&targetv1.RegisterRequest{Stream: "stream-a", Targets: []*targetv1.Target{target}}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("register %s: %w", a.Name, err)
	}
	for ready := map[string]bool{}; len(ready) < len(a.Addrs); {
		m, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("register %s: %w", a.Name, err)
		}
		for _, i := range m.GetTargets() {
			if i.GetState() == targetv1.State_STATE_READY {
				ready[i.GetAddress()] = true
			}
		}
	}
	return nil
}

// TestFreshPodAwaitsRegistrations starts a second pod while the first one serves ten registered
// targets, which register with the new pod one after the other: the new pod attracts flows once
// all targets are registered, each flow keeps its target, and new flows are spread over all
// targets.
func TestFreshPodAwaitsRegistrations(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixtureOf(t, 2, 10)
	f.must(f.WriteTrench(strings.TrimSuffix(dataPlaneTrench(), "    targets:\n")))
	start := func(p *lab.Pod, settle string) registrations {
		f.must(p.StartLB("--dataplane=nftables", "--source=registry", "--target-id="+lab.AppID, settle))
		f.must(p.StartFrontend("--ecmp"))
		return f.dialRegistry(p)
	}
	first := start(f.Pods[0], "--registry-settle=0s")
	for _, a := range f.Targets {
		f.must(first.register(a))
	}
	f.must(f.WantVia(f.ctx, 1))
	f.waitOutput("10/10", "status") // the kernel state is confirmed
	g, err := f.Load(f.ctx, 100, 50, load.Config{})
	f.must(err)
	defer g.Stop(f.ctx)
	f.must(g.WaitFlows(f.ctx))

	f.pod = f.Pods[1]
	second := start(f.pod, "--registry-settle=15s") // longer than a step on a slow machine
	for i, a := range f.Targets {
		f.must(second.register(a))
		f.waitOutput(fmt.Sprintf("%d of %[1]d targets ready, needs 1; no VIP rises", i+1), "status", "--output=json")
		f.must(f.WantVia(f.ctx, 1))
	}
	f.waitOutput("targets still register. The load balancer is new", "status")
	f.must(f.WantVia(f.ctx, 1, 2))
	for _, vip := range f.VIPs {
		out := f.pod.LB.Output()
		if rise := fmt.Sprintf("vip=%s/%d from=\"not ready\" to=ready", vip, vip.BitLen()); !strings.Contains(out, rise) ||
			!strings.Contains(out[strings.Index(out, rise):], "ready_targets=10") {
			t.Errorf("%s did not rise with ten targets:\n%s", vip, out)
		}
	}

	f.must(g.WaitAnswered(f.ctx, 100))
	r, err := g.Take(f.ctx)
	f.must(err)
	f.must(r.Lost())
	const flows = 200
	spread, err := f.Load(f.ctx, 0, flows, load.Config{})
	f.must(err)
	defer spread.Stop(f.ctx)
	f.must(spread.WaitFlows(f.ctx))
	r = spread.Now()
	t.Logf("flows by target: %v", r.Targets())
	for name, n := range r.Targets() {
		if n > 3*flows/len(f.Targets) {
			t.Errorf("%s has %d of %d flows", name, n, flows)
		}
	}
}
