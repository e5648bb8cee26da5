package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/balancer"
)

// scriptedLB is a load balancer that publishes the readiness that a test sets.
type scriptedLB struct{ *balancer.Balancer }

// startScriptedLB starts a scripted load balancer without a ready VIP. It ends with the test.
func (f *fixture) startScriptedLB() scriptedLB {
	f.t.Helper()
	b, err := balancer.Start(f.t.Context(), f.pod)
	f.must(err)
	f.t.Cleanup(func() {
		harness.Check(f.t, b.Close())
	})
	lb := scriptedLB{b}
	lb.publish(nil, vipA4, vipA6, vipB4, vipB6)
	return lb
}

// publish commits one decision with the ready VIPs and the VIPs that are not ready.
func (lb scriptedLB) publish(ready []string, not ...string) {
	parsed := func(texts []string) []vip.VIP {
		vips := make([]vip.VIP, len(texts))
		for i, text := range texts {
			vips[i] = vip.Require(text)
		}
		return vips
	}
	lb.Table.Commit(readiness.Decision{
		Synced: true, Changed: append(balancer.Readiness(true, parsed(ready)...),
			balancer.Readiness(false, parsed(not)...)...),
	})
}

// scriptedFrontend is a frontend whose reports a test controls.
type scriptedFrontend struct {
	f       *fixture
	watch   grpc.ServerStreamingClient[readinessv1.WatchReadinessResponse]
	reports grpc.ClientStreamingClient[readinessv1.ReportAdvertisementRequest, readinessv1.ReportAdvertisementResponse]
	first   *readinessv1.WatchReadinessResponse
}

// startScriptedFrontend watches the pod's lb as the frontend does, and waits for the synced
// snapshot.
func (f *fixture) startScriptedFrontend() *scriptedFrontend {
	f.t.Helper()
	client := readinessv1.NewReadinessServiceClient(f.dialAsFrontend())
	reader := &scriptedFrontend{f: f}
	within, done := context.WithTimeout(f.t.Context(), waitTimeout)
	f.t.Cleanup(done)
	var err error
	reader.watch, err = client.WatchReadiness(
		within, &readinessv1.WatchReadinessRequest{Reader: "scripted"}, grpc.WaitForReady(true),
	)
	f.must(err)
	reader.first = reader.wait(func(m *readinessv1.WatchReadinessResponse) bool { return m.GetWatchId() != "" })
	reader.reports, err = client.ReportAdvertisement(within)
	f.must(err)
	f.waitFor(func() error {
		if !f.lbStatus().GetSynced() {
			return errors.New("the lb is not synced")
		}
		return nil
	})
	return reader
}

// dialAsFrontend connects to the readiness socket of the lb with the frontend's SPIFFE ID.
func (f *fixture) dialAsFrontend() *grpc.ClientConn {
	f.t.Helper()
	source, err := identity.NewDev(f.pod.Authority(), spiffeid.RequireFromString(lab.FrontendID), identity.Options{})
	f.must(err)
	var tasks sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	f.t.Cleanup(func() { cancel(); tasks.Wait() })
	tasks.Go(func() {
		if err := source.Run(ctx); err != nil && ctx.Err() == nil {
			f.t.Errorf("identity of a scripted frontend: %v", err)
		}
	})
	conn, err := grpc.NewClient("unix:"+f.pod.Socket(), grpc.WithAuthority("localhost"), grpc.WithTransportCredentials(
		identity.NewCredentials(source,
			identity.CredentialOptions{Authorize: identity.Authorize(spiffeid.RequireFromString(lab.LBID))})))
	f.must(err)
	f.t.Cleanup(func() { conn.Close() })
	return conn
}

// wait returns the next message that satisfies a condition.
func (reader *scriptedFrontend) wait(condition func(*readinessv1.WatchReadinessResponse) bool,
) *readinessv1.WatchReadinessResponse {
	reader.f.t.Helper()
	for {
		m, err := reader.watch.Recv()
		reader.f.must(err)
		if condition(m) {
			return m
		}
	}
}

// report reports that, after applying a position, VIPs are withdrawn for reason.
func (reader *scriptedFrontend) report(applied *readinessv1.Position, reason readinessv1.AdvertisementReason,
	vips ...string,
) {
	reader.f.t.Helper()
	reader.f.must(reader.reports.Send(&readinessv1.ReportAdvertisementRequest{
		WatchId: reader.first.GetWatchId(), Applied: applied,
		Groups: []*readinessv1.AdvertisementGroup{{Vips: vips, Advertisement: &readinessv1.VipAdvertisement{
			Advertisement: readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN, Reason: reason,
		}}},
	}))
}

// 1 000 flips, 1 ms apart, end in the right state (docs/architecture.md#failure-table).
func TestThousandFlips(t *testing.T) {
	t.Parallel()
	const flips = 1000
	f := newFixture(t)
	lb := f.startScriptedLB()
	f.must(f.pod.StartFrontend("--flap-backoff=off", shortSettle))
	lb.publish([]string{vipB4, vipB6})
	f.wantRoutes(vipB4, vipB6)
	mark, bird := f.mark(), f.birdPID()

	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for n := range flips {
		if n%2 == 0 {
			lb.publish([]string{vipA4}, vipA6)
		} else {
			lb.publish([]string{vipA6}, vipA4)
		}
		<-tick.C
	}
	lb.publish([]string{vipA4}, vipA6)
	f.wantRoutes(vipA4, vipB4, vipB6)
	// The LB receives the end state as well, confirmed.
	f.waitFor(func() error {
		a4, _ := lb.Server.Reported(vip.Require(vipA4))
		a6, _ := lb.Server.Reported(vip.Require(vipA6))
		if a4.Advertisement != readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED ||
			a6.Advertisement != readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN || a6.Unconfirmed {
			return fmt.Errorf("the LB received %+v of %s and %+v of %s", a4, vipA4, a6, vipA6)
		}
		return nil
	})
	// The gateway has received every earlier update, because a later one has arrived.
	f.wantNoUpdates(mark, vipB4, vipB6)
	lb.publish(nil, vipB4)
	f.wantRoutes(vipA4, vipB6)
	for prefix, want := range map[string]string{vipA4: announced, vipA6: withdrawn} {
		received := changes(f.updates(mark, prefix))
		t.Logf("the gateway received updates of %s %d times", prefix, len(received))
		if len(received) < 2 || received[len(received)-1] != want || slices.Contains(received, depreferred) {
			t.Errorf("the gateway received for %s %v, want flips that end %s", prefix, received, want)
		}
	}
	// The frontend did not exit.
	f.wantRunning(f.pod.Frontend)
	if s := f.frontendStatus().GetBird(); s.GetRestarts() != 0 || int(s.GetPid()) != bird || !f.runs(bird) {
		t.Errorf("BIRD was %d, and is now %v", bird, s)
	}
	if n := strings.Count(f.gateway.Process.Output(), "State changed to up"); n != 2 {
		t.Errorf("the gateway's two sessions came up %d times", n)
	}
	if n := strings.Count(f.pod.Frontend.Output(), "session with BIRD established"); n != 1 {
		t.Errorf("the session with BIRD came up %d times", n)
	}
}

// A slow reader gets merged values (docs/adr/0018-one-log-for-all-watches.md): flips that no reader
// received in time end in the right state.
func TestFlipsDuringFrontendHang(t *testing.T) {
	t.Parallel()
	const flips = 1000
	f := newFixture(t)
	lb := f.startScriptedLB()
	f.must(f.pod.StartFrontend("--flap-backoff=off", shortSettle))
	lb.publish([]string{vipA6, vipB4})
	f.wantRoutes(vipA6, vipB4)
	mark := f.mark()

	f.must(f.pod.Frontend.Signal(syscall.SIGSTOP))
	for n := range flips {
		if n%2 == 0 {
			lb.publish([]string{vipA4}, vipA6)
		} else {
			lb.publish([]string{vipA6}, vipA4)
		}
	}
	lb.publish([]string{vipA4}, vipA6)
	f.must(f.pod.Frontend.Signal(syscall.SIGCONT))
	f.wantRoutes(vipA4, vipB4)
	// The gateway has received every earlier update once it receives this one.
	lb.publish(nil, vipB4)
	f.waitUpdate(mark, vipB4, withdrawn)
	f.wantRoutes(vipA4)
	f.wantRunning(f.pod.Frontend)
}

// After the second flap within 60 s a rise waits 1, 2, 4 … 30 s; a withdrawal never waits
// (docs/architecture.md#the-gate).
func TestFlapBackoff(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	lb := f.startScriptedLB()
	f.must(f.pod.StartFrontend(shortSettle, "--log-level=debug"))
	lb.publish([]string{vipB4})
	f.wantRoutes(vipB4)
	for range 2 { // both rises are immediate
		lb.publish([]string{vipA4})
		f.wantRoutes(vipA4, vipB4)
		lb.publish(nil, vipA4)
		f.wantRoutes(vipB4)
	}
	mark, said := f.mark(), time.Now()
	lb.publish([]string{vipA4})
	f.waitLog(f.pod.Frontend, "vip=20.0.0.1/32 state=withdrawn reason=flapping")
	f.wantRoutes(vipA4, vipB4)
	if after := f.waitUpdate(mark, vipA4, announced).At.Sub(said); after < time.Second-clockSlack {
		t.Errorf("the VIP rose %v after its second flap, before its wait of 1s was over", after)
	}
	f.wantUpdates(mark, vipA4, announced)
	f.wantUpdates(0, vipB4, announced)
}
