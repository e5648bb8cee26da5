package change

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

func TestRestarts(t *testing.T) {
	t.Parallel()
	gateway := func(name, address string, edits ...func(*trench.Gateway)) trench.Gateway {
		g := trench.Gateway{
			Name: name, Address: netip.MustParseAddr(address), LocalASN: 1, RemoteASN: 2,
			LocalPort: 10179, RemotePort: 10179, HoldTime: 3 * time.Second,
		}
		for _, edit := range edits {
			edit(&g)
		}
		return g
	}
	slower := func(g *trench.Gateway) { g.HoldTime = 6 * time.Second }
	static := func(g *trench.Gateway) {
		*g = trench.Gateway{Name: g.Name, Address: g.Address, Protocol: trench.Static}
	}
	guarded := func(g *trench.Gateway) { g.TTLSecurity = true }
	dual := func(g *trench.Gateway) { g.Families = trench.SessionBoth }
	six := func(g *trench.Gateway) { g.Families = trench.SessionIPv6 }
	timers := func(g *trench.Gateway) { g.KeepaliveTime, g.ConnectRetryTime = time.Second, time.Second }
	link := func(g *trench.Gateway) { g.Interface, g.Address = "ext", netip.Addr{} }
	learned := gateway("a", "fe80::1", func(g *trench.Gateway) { g.Interface = "ext" })
	fast := func(g *trench.Gateway) { g.BFD = &trench.BFD{Multiplier: 3} }
	a, b, c := "192.0.2.1", "192.0.2.2", "2001:db8::1"
	both := []trench.Gateway{gateway("a", a), gateway("b", b), gateway("c", c)}
	for name, test := range map[string]struct {
		old, next   []trench.Gateway
		want, alone []string
	}{
		"no change":      {both, slices.Clone(both), nil, nil},
		"hold time":      {both, []trench.Gateway{gateway("a", a, slower), both[1], both[2]}, []string{"a"}, nil},
		"only gateway":   {both, []trench.Gateway{both[0], both[1], gateway("c", c, slower)}, []string{"c"}, []string{"c"}},
		"renamed":        {both, []trench.Gateway{gateway("d", a), both[1], both[2]}, []string{"a"}, nil},
		"other address":  {both, []trench.Gateway{gateway("a", "192.0.2.3"), both[1], both[2]}, []string{"a"}, nil},
		"both differ":    {both, []trench.Gateway{gateway("d", "192.0.2.3"), both[1], both[2]}, nil, nil},
		"names swapped":  {both, []trench.Gateway{gateway("b", a), gateway("a", b), both[2]}, []string{"a", "b"}, nil},
		"added":          {both[:1], both, nil, nil},
		"removed":        {both, both[:1], nil, nil},
		"TTL security":   {both[:1], []trench.Gateway{gateway("a", a, guarded)}, []string{"a"}, []string{"a"}},
		"families":       {both[:1], []trench.Gateway{gateway("a", a, dual)}, []string{"a"}, []string{"a"}},
		"both families":  {[]trench.Gateway{gateway("a", a, dual), both[1]}, both[:2], []string{"a"}, []string{"a"}},
		"own families":   {[]trench.Gateway{gateway("c", c, six)}, both[2:], nil, nil},
		"timers":         {both[:2], []trench.Gateway{gateway("a", a, timers), both[1]}, []string{"a"}, nil},
		"unnumbered":     {[]trench.Gateway{learned}, []trench.Gateway{gateway("d", a, link)}, []string{"a"}, []string{"a"}},
		"BFD":            {both[:1], []trench.Gateway{gateway("a", a, fast)}, nil, nil},
		"becomes static": {both[:1], []trench.Gateway{gateway("a", a, static)}, []string{"a"}, []string{"a"}},
		"static": {
			[]trench.Gateway{gateway("a", a, static)}, []trench.Gateway{gateway("a", b, static)}, nil, nil,
		},
	} {
		if got := Restarts(test.old, test.next); !slices.Equal(got, test.want) {
			t.Errorf("%s: restarts %v, want %v", name, got, test.want)
		}
		if got := RestartsLast(test.old, test.next); !slices.Equal(got, test.alone) {
			t.Errorf("%s: restarts last %v, want %v", name, got, test.alone)
		}
	}
	if got := Reset(both[0], gateway("d", b, slower)); !slices.Equal(got, []string{"name", "address", "hold time"}) {
		t.Errorf("reset parameters: %v", got)
	}
}
