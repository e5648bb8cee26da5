package registration

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

func TestLookupUsesOneFamily(t *testing.T) {
	both := map[string][]netip.Addr{
		"ip4": {netip.MustParseAddr("::ffff:10.0.0.2"), netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")},
		"ip6": {netip.MustParseAddr("fd00::1")},
	}
	d := &dns{err: errServer}
	n := &name{Address: Address{host: "lb.test", port: "1"}, resolver: d}
	if _, err := n.lookup(t.Context()); !errors.Is(err, errServer) || d.asked["ip6"] != 0 {
		t.Errorf("error %v; IPv6 was looked up %d times after IPv4 had failed", err, d.asked["ip6"])
	}
	d.err = nil
	_, err := n.lookup(t.Context())
	harness.WantError(t, err, "the name has no address")
	d.answers = both
	want := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")}
	if ips, err := n.lookup(t.Context()); err != nil || !slices.Equal(ips, want) {
		t.Errorf("got %v, %v", ips, err)
	}
	// The addresses of the other family are the same load balancers.
	d.answers = map[string][]netip.Addr{"ip6": both["ip6"]}
	if ips, err := n.lookup(t.Context()); err == nil || !strings.Contains(err.Error(), "the name has no IPv4 address") {
		t.Errorf("got %v, %v", ips, err)
	}
	six := &name{Address: n.Address, resolver: d}
	if ips, err := six.lookup(t.Context()); err != nil || !slices.Equal(ips, both["ip6"]) {
		t.Errorf("got %v, %v", ips, err)
	}
}

func TestParseAddress(t *testing.T) {
	for text, want := range map[string]string{
		"unix:///run/lb.sock": "unix:/run/lb.sock fixed", "/run/lb.sock": "unix:/run/lb.sock fixed",
		"10.0.0.1:7790": "dns:///10.0.0.1:7790 fixed", "[fd00::1]:7790": "dns:///[fd00::1]:7790 fixed",
		"lb.trench-a.svc:7790": "dns:///lb.trench-a.svc:7790", "lb": "error", ":7790": "error", "lb:": "error",
		"unix://" + strings.Repeat("/long", 30): "error",
	} {
		a, err := ParseAddress(text)
		got := a.target()
		if a.fixed() {
			got += " fixed"
		}
		if err != nil {
			got = "error"
			if !strings.HasPrefix(err.Error(), text+": ") {
				t.Errorf("%s: %v", text, err)
			}
		}
		if got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}
