package kernel

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// patience bounds every wait of these tests.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		childMain()
		return
	}
	goleak.VerifyTestMain(m)
}

// running is a running Routing in a namespace.
type running struct {
	*Routing
	stop func()
}

func testOptions(t testing.TB) Options {
	return Options{Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
}

// start runs a Routing in the namespace until the test ends or stop is called.
func start(t *testing.T, ns *lab.NetNS, o Options) *running {
	t.Helper()
	return startRouting(t, ns, New(o))
}

func startRouting(t *testing.T, ns *lab.NetNS, r *Routing) *running {
	t.Helper()
	return &running{Routing: r, stop: ns.Background(t, r.Run)}
}

// waitReady waits until Ready is closed.
func (r *running) waitReady(t *testing.T) {
	t.Helper()
	select {
	case <-r.Ready():
	case <-time.After(patience):
		t.Fatalf("not ready; last error: %v", r.Confirmed().Load().Err)
	}
}

// waitConfirmed waits until exactly these VIPs are confirmed without error.
func (r *running) waitConfirmed(t *testing.T, want ...vip.VIP) Confirmed {
	t.Helper()
	return r.waitFor(t, fmt.Sprintf("%d VIPs confirmed", len(want)), func(c Confirmed) bool {
		return c.Err == nil && !c.At.IsZero() && c.VIPs.Equal(vip.NewSet(want...))
	})
}

func (r *running) waitFor(t *testing.T, what string, ok func(Confirmed) bool) Confirmed {
	t.Helper()
	deadline := time.After(patience)
	for {
		c, changed := r.Confirmed().Get()
		if ok(c) {
			return c
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("timed out: %s; last %d VIPs, error: %v", what, len(c.VIPs), c.Err)
		}
	}
}

var must = harness.Must

func vips(prefixes ...string) []vip.VIP {
	var out []vip.VIP
	for _, p := range prefixes {
		out = append(out, vip.Require(p))
	}
	return out
}

// manyVIPs returns n host VIPs, half of each family.
func manyVIPs(n int) []vip.VIP {
	out := make([]vip.VIP, 0, n)
	a4, a6 := netip.MustParseAddr("20.0.0.1"), netip.MustParseAddr("2000::1")
	for i := range n {
		a := &a4
		if i%2 == 1 {
			a = &a6
		}
		v, err := vip.FromPrefix(netip.PrefixFrom(*a, a.BitLen()))
		if err != nil {
			panic(err)
		}
		out = append(out, v)
		*a = a.Next()
	}
	return out
}
