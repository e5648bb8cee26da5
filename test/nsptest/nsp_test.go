package nsptest_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/nsptest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start returns a running NSP and connections to it by a member of its trust domain.
func start(t *testing.T, o nsptest.Options) (*nsptest.NSP, func() *grpc.ClientConn) {
	t.Helper()
	ca := identitytest.NewCA(t, "example.org")
	svid := ca.SVID(ca.ID("/ns/default/sa/nsp"), time.Hour)
	o.Credentials = nsptest.ServerCredentials(svid, ca.Bundle())
	n := nsptest.New(o)
	harness.Must(t, n.Start())
	t.Cleanup(func() { harness.Must(t, n.Stop()) })
	return n, func() *grpc.ClientConn {
		client := ca.SVID(ca.ID("/ns/default/sa/frontend"), time.Hour)
		c, err := grpc.NewClient(n.Addr(), grpc.WithTransportCredentials(nsptest.ClientCredentials(client, ca.Bundle())))
		harness.Must(t, err)
		t.Cleanup(func() { c.Close() })
		return c
	}
}

// attractor returns an attractor whose list needs more than one window of HTTP/2, so that a
// client that does not read stalls soon.
func attractor(vips int) *nspv1.Attractor {
	trench := &nspv1.Trench{Name: "trench-a"}
	a := &nspv1.Attractor{Name: "attractor-a", Trench: trench}
	for range vips {
		a.Vips = append(a.Vips, &nspv1.Vip{Name: "vip", Address: "20.0.0.1/32", Trench: trench})
	}
	return a
}

func watch(t *testing.T, c *grpc.ClientConn) grpc.ServerStreamingClient[nspv1.AttractorResponse] {
	t.Helper()
	s, err := nspv1.NewConfigurationManagerClient(c).WatchAttractor(t.Context(), &nspv1.Attractor{
		Name: "attractor-a", Trench: &nspv1.Trench{Name: "trench-a"},
	})
	harness.Must(t, err)
	return s
}

func receive(t *testing.T, s grpc.ServerStreamingClient[nspv1.AttractorResponse]) []*nspv1.Attractor {
	t.Helper()
	r, err := s.Recv()
	harness.Must(t, err)
	return r.GetAttractors()
}

func TestListsRepeat(t *testing.T) {
	t.Parallel()
	n, dial := start(t, nsptest.Options{})
	s := watch(t, dial())
	if got := receive(t, s); len(got) != 0 {
		t.Fatalf("first list of an unknown attractor: %v", got)
	}
	other := attractor(0)
	other.Name = "attractor-b"
	n.SetAttractors(attractor(2), other)
	n.Event()
	for range 2 {
		if got := receive(t, s); len(got) != 1 || len(got[0].GetVips()) != 2 {
			t.Fatalf("list %v", got)
		}
	}
	n.SetAttractors(other)
	if got := receive(t, s); len(got) != 0 {
		t.Fatalf("list without the attractor: %v", got)
	}
}

func TestStalledReaderBlocksOthers(t *testing.T) {
	t.Parallel()
	n, dial := start(t, nsptest.Options{})
	n.SetAttractors(attractor(5000))
	stalled, reads := watch(t, dial()), watch(t, dial())
	if got := receive(t, stalled); len(got) != 1 {
		t.Fatalf("list %v", got)
	}
	await.True(t, "two watchers", func() bool { return n.Watchers() == 2 })
	received := make(chan int)
	go func() {
		defer close(received)
		for {
			if _, err := reads.Recv(); err != nil {
				return
			}
			select {
			case received <- 1:
			case <-t.Context().Done():
				return
			}
		}
	}()
	const events = 60
	sent := make(chan bool)
	go func() {
		defer close(sent)
		for range events {
			n.Event()
		}
	}()
	count := 0
	for quiet := false; !quiet; {
		select {
		case <-received:
			count++
		case <-time.After(500 * time.Millisecond):
			quiet = true
		}
	}
	if count >= events {
		t.Fatalf("a stalled reader did not block: %d events reached the other", count)
	}
	go func() {
		for {
			if _, err := stalled.Recv(); err != nil {
				return
			}
		}
	}()
	for ; count <= events; count++ { // and the first list
		await.Receive(t, fmt.Sprintf("list %d", count), received)
	}
	<-sent
}

func TestTargets(t *testing.T) {
	t.Parallel()
	n, dial := start(t, nsptest.Options{EntryTimeout: 200 * time.Millisecond})
	c := nspv1.NewTargetRegistryClient(dial())
	frontend := &nspv1.Target{
		Ips: []string{"pod-1"}, Context: map[string]string{"identifier": "pod-1"}, Type: nspv1.Target_FRONTEND,
	}
	enabled, err := c.Watch(t.Context(), &nspv1.Target{Type: nspv1.Target_FRONTEND})
	harness.Must(t, err)
	if r, err := enabled.Recv(); err != nil || len(r.GetTargets()) != 0 {
		t.Fatalf("got %v, %v", r, err)
	}
	for i, want := range []nspv1.Target_Status{nspv1.Target_DISABLED, nspv1.Target_ENABLED} {
		if _, err := c.Register(t.Context(), frontend); err != nil {
			t.Fatal(err)
		}
		r, err := enabled.Recv()
		if err != nil || len(r.GetTargets()) != i || len(n.Targets()) != 1 || n.Targets()[0].GetStatus() != want {
			t.Fatalf("registration %d: watch %v, %v, stored %v", i, r, err, n.Targets())
		}
	}
	harness.Must(t, n.Stop())
	if len(n.Targets()) != 1 {
		t.Fatal("the target did not survive the restart")
	}
	harness.Must(t, n.Start())
	ctx := harness.Context(t, await.Timeout)
	harness.Must(t, n.WaitTargets(ctx, func(l []*nspv1.Target) bool { return len(l) == 0 }))
	if _, err := c.Unregister(ctx, frontend, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	if got := n.Requests("Unregister"); len(got) != 1 || got[0].Target.GetIps()[0] != "pod-1" {
		t.Fatalf("requests %v", got)
	}
}

func TestHang(t *testing.T) {
	t.Parallel()
	n, dial := start(t, nsptest.Options{})
	c := nspv1.NewTargetRegistryClient(dial())
	target := &nspv1.Target{Ips: []string{"pod-1"}, Type: nspv1.Target_FRONTEND}
	for _, hang := range []func(bool){n.Hang, n.Freeze} {
		hang(true)
		short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		_, err := c.Register(short, target, grpc.WaitForReady(true))
		cancel()
		if status.Code(err) != codes.DeadlineExceeded {
			t.Fatalf("got %v", err)
		}
		hang(false)
		long, cancel := context.WithTimeout(t.Context(), await.Timeout)
		_, err = c.Register(long, target, grpc.WaitForReady(true))
		cancel()
		harness.Must(t, err)
	}
	n.Delay(100 * time.Millisecond)
	begin := time.Now()
	if _, err := c.Register(t.Context(), target); err != nil || time.Since(begin) < 100*time.Millisecond {
		t.Fatalf("answered after %v, error %v", time.Since(begin), err)
	}
	// A frozen server ends with its test.
	n.Freeze(true)
}
