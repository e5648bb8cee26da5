package lab

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
)

func TestRouteWatcher(t *testing.T) {
	if errs := Missing(); len(errs) > 0 {
		t.Fatal(errs)
	}
	l, err := New()
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, l.Close()) })
	ctx := harness.Context(t, waitTimeout)

	gateway, err := l.StartGateway(GatewayA())
	harness.Must(t, err)
	var control *Control
	if err := Eventually(ctx, 10*time.Millisecond, func() (err error) {
		control, err = gateway.Control(ctx)
		return err
	}); err != nil {
		t.Fatalf("%v\n%s", err, gateway.Process.Tail(20))
	}
	defer control.Close()
	watcher, err := gateway.WatchRoutes(ctx, time.Millisecond)
	harness.Must(t, err)
	defer watcher.Close()
	if got := watcher.Last(); len(got.Routes) > 0 {
		t.Fatalf("a gateway without a peer holds %v", got.Prefixes())
	}

	start := time.Now()
	peer, err := StartGateway(l.Pod, l.Dir, GatewayConfig{
		Name: "peer", RouterID: PodExternal4, LocalAS: PodAS, RemoteAS: GatewayAS, Port: BGPPort,
		Local: []netip.Addr{PodExternal4, PodExternal6}, Peers: []netip.Addr{GatewayA4, GatewayA6},
		Default: true,
	})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, peer.Process.Kill()) })
	defaults := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	holds := func(want ...netip.Prefix) func(Snapshot) error {
		return func(s Snapshot) error {
			if got := s.Prefixes(); !slices.Equal(got, want) {
				return fmt.Errorf("the gateway holds %v, want %v", got, want)
			}
			return nil
		}
	}
	s, err := watcher.Wait(ctx, holds(defaults...))
	harness.Must(t, err)
	for i, want := range []netip.Addr{PodExternal4, PodExternal6} {
		r := s.Routes[defaults[i]]
		if r.NextHop != want || !slices.Equal(r.ASPath, []string{fmt.Sprint(PodAS)}) {
			t.Errorf("route %+v, want it via %v from AS %d", r, want, PodAS)
		}
	}
	if _, err := control.Command(`disable "trench*"`); err != nil {
		t.Fatal(err)
	}
	if _, err := watcher.Wait(ctx, holds()); err != nil {
		t.Fatal(err)
	}
	history := watcher.Since(start)
	if first, last := history[0], history[len(history)-1]; len(first.Routes) != 0 || len(last.Routes) != 0 ||
		len(history) < 3 {
		t.Errorf("the history %v does not begin and end empty with routes in between", history)
	}
	if _, err := control.Command("nonsense"); err == nil {
		t.Error("BIRD's refusal is no error")
	}
	harness.Must(t, gateway.Process.Kill())
	if _, err := watcher.Wait(ctx, holds(defaults...)); err == nil {
		t.Error("the watcher of a killed gateway reports no error")
	}
}

func TestOwnerRuns(t *testing.T) {
	self := fmt.Sprint(os.Getpid())
	if !OwnerRuns(self, time.Now()) {
		t.Error("this process counts as dead")
	}
	if OwnerRuns(self, time.Now().Add(-time.Hour)) {
		t.Error("this process counts as the owner of an object that is older than it")
	}
	if OwnerRuns("4194305", time.Now()) { // above the largest pid_max
		t.Error("a process that does not exist counts as alive")
	}
}
