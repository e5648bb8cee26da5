package nsp

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
)

func TestConvert(t *testing.T) {
	o := &Options{Trench: "t", Attractor: "a", Defaults: trench.DefaultDefaults(), Keys: &keys{}}
	full := gateway("full", "169.254.100.150")
	full.LocalAsn, full.RemoteAsn, full.LocalPort, full.RemotePort, full.HoldTime = 1, 2, 3, 4, 90
	full.Bfd = true
	full.BfdSpec = &nspv1.Gateway_BfdSpec{MinTx: 100, MinRx: 200, Multiplier: 5}
	full.BgpAuth = &nspv1.Gateway_BgpAuth{KeyName: "k", KeySource: "s"}
	plain := gateway("plain", "fd00::1/64")
	plain.BfdSpec = &nspv1.Gateway_BfdSpec{MinTx: 1}
	converted, err := o.convert(attractor(vips("20.0.0.1/32", "2000::1/128"), full, plain))
	if err != nil || len(converted.refused) > 0 {
		t.Fatalf("refused %v, error %v", converted.refused, err)
	}
	c := converted.Config
	want := []trench.Gateway{
		{
			Name: "full", Address: netip.MustParseAddr("169.254.100.150"), LocalASN: 1, RemoteASN: 2, LocalPort: 3,
			RemotePort: 4, HoldTime: 90 * time.Second, PasswordFile: "/keys/s/k",
			BFD: &trench.BFD{MinTx: 100 * time.Millisecond, MinRx: 200 * time.Millisecond, Multiplier: 5},
		},
		{
			Name: "plain", Address: netip.MustParseAddr("fd00::1"), LocalASN: 8103, RemoteASN: 4248829953,
			LocalPort: 10179, RemotePort: 10179, HoldTime: 3 * time.Second,
		},
	}
	if !reflect.DeepEqual(c.Attractor.Gateways, want) {
		t.Errorf("gateways are\n%+v, want\n%+v", c.Attractor.Gateways, want)
	}
	if c.Trench != "t" || c.Attractor.Name != "a" || c.Attractor.Interface != "ext-vlan" || text(c) !=
		"20.0.0.1/32 2000::1/128 full plain" {
		t.Errorf("the configuration is %+v", c)
	}
}

// An invalid object is refused by name, and the valid objects are in force.
func TestRefusals(t *testing.T) {
	type change func(a *nspv1.Attractor)
	withVIP := func(name, address string) change {
		return func(a *nspv1.Attractor) { a.Vips = append(a.Vips, &nspv1.Vip{Name: name, Address: address}) }
	}
	withGateway := func(name, address string, edit func(g *nspv1.Gateway)) change {
		return func(a *nspv1.Attractor) {
			g := gateway(name, address)
			if edit != nil {
				edit(g)
			}
			a.Gateways = append(a.Gateways, g)
		}
	}
	field := func(edit func(g *nspv1.Gateway)) change { return withGateway("bad", "169.254.100.160", edit) }
	for _, test := range []struct {
		name   string
		change change
		want   string // text of the only refusal
	}{
		{"VIP without a prefix length", withVIP("bad", "20.0.0.9"), "VIP bad: VIP \"20.0.0.9\" has no prefix length"},
		{"default route", withVIP("bad", "0.0.0.0/0"), "VIP bad: VIP 0.0.0.0/0 is a default route"},
		{"IPv6 default route", withVIP("bad", "::/0"), "VIP bad: VIP ::/0 is a default route"},
		{
			"garbage", withVIP("bad", "20.0.0.9/32 via 1.2.3.4\n- x"),
			"VIP bad: VIP \"20.0.0.9/32 via 1.2.3.4\\n- x\" is not a prefix",
		},
		{"long VIP", withVIP("bad", strings.Repeat("x", 1<<20)), "VIP bad: VIP \"xxx"},
		{"empty VIP", withVIP("bad", ""), "VIP bad: "},
		{"host bits", withVIP("bad", "30.0.0.1/24"), "VIP bad: VIP 30.0.0.1/24 has host bits set"},
		{"unreadable name", withVIP("bad\nname", "x"), `VIP "bad\nname": `},
		{"duplicate VIP", withVIP("vip-9", "20.0.0.1/32"), "VIP vip-9: VIP 20.0.0.1/32 appears twice, first in VIP vip-1"},
		{"overlap", withVIP("bad", "20.0.0.0/24"), "VIP vip-1: VIP 20.0.0.1/32 lies in the VIP 20.0.0.0/24 in VIP bad"},
		{"gateway in a VIP", withGateway("bad", "20.0.0.1", nil), "gateway bad: address is 20.0.0.1, which lies in the VIP"},
		{"gateway name", withGateway("b'; d", "169.254.100.160", nil), `gateway "b'; d": name is `},
		{"empty gateway name", withGateway("", "169.254.100.160", nil), `gateway "": name is empty`},
		{"name of BFD", withGateway("BFD", "169.254.100.160", nil), "gateway BFD: name is \"BFD\""},
		{
			"duplicate gateway name", withGateway("gw4", "169.254.100.160", nil),
			"gateway gw4: name gateway gw4 appears twice, first in gateway gw4",
		},
		{
			"duplicate gateway address", withGateway("other", "169.254.100.150", nil),
			"gateway other: address gateway address 169.254.100.150 appears twice, first in gateway gw4",
		},
		{"garbage address", withGateway("bad", "gw.example", nil), "gateway bad: address is gw.example"},
		{"loopback", withGateway("bad", "127.0.0.1", nil), "gateway bad: address "},
		{
			"family mismatch", field(func(g *nspv1.Gateway) { g.IpFamily = "ipv6" }),
			"gateway bad: ipFamily is ipv6, but address is 169.254.100.160",
		},
		{"unknown family", field(func(g *nspv1.Gateway) { g.IpFamily = "v4" }), "gateway bad: ipFamily is v4"},
		{"unknown protocol", field(func(g *nspv1.Gateway) { g.Protocol = "ospf" }), `gateway bad: protocol is "ospf"`},
		{
			"remote AS", field(func(g *nspv1.Gateway) { g.RemoteAsn = 4294967295 }),
			"gateway bad: remoteASN is \"4294967295\"",
		},
		{"local AS", field(func(g *nspv1.Gateway) { g.LocalAsn = 65535 }), "gateway bad: localASN is 65535"},
		{"remote port", field(func(g *nspv1.Gateway) { g.RemotePort = 65536 }), "gateway bad: remotePort is \"65536\""},
		{"local port", field(func(g *nspv1.Gateway) { g.LocalPort = 70000 }), "gateway bad: localPort is \"70000\""},
		{"hold time of 1 s", field(func(g *nspv1.Gateway) { g.HoldTime = 1 }), "gateway bad: holdTime is \"1s\""},
		{"hold time of 2 s", field(func(g *nspv1.Gateway) { g.HoldTime = 2 }), "gateway bad: holdTime is \"2s\""},
		{"long hold time", field(func(g *nspv1.Gateway) { g.HoldTime = 4294967295 }), "gateway bad: holdTime is "},
		{"BFD", field(func(g *nspv1.Gateway) {
			g.Bfd, g.BfdSpec = true, &nspv1.Gateway_BfdSpec{MinTx: 1, Multiplier: 256}
		}), "gateway bad: bfd.minTx is \"1ms\""},
		{"no Secret", field(func(g *nspv1.Gateway) {
			g.BgpAuth = &nspv1.Gateway_BgpAuth{KeyName: "k", KeySource: "../etc"}
		}), "gateway bad: bgpAuth: "},
		{"no key", field(func(g *nspv1.Gateway) {
			g.BgpAuth = &nspv1.Gateway_BgpAuth{KeyName: "..", KeySource: "s"}
		}), "gateway bad: bgpAuth: "},
	} {
		t.Run(test.name, func(t *testing.T) {
			o := &Options{Trench: "t", Attractor: "a", Defaults: trench.DefaultDefaults(), Keys: &keys{}}
			a := attractor(vips("20.0.0.1/32", "2000::1/128"), gateway("gw4", "169.254.100.150"), gateway("gw6", "fd00::1"))
			want := "20.0.0.1/32 2000::1/128 gw4 gw6"
			test.change(a)
			if test.name == "overlap" {
				want = "2000::1/128 20.0.0.0/24 gw4 gw6"
			}
			c, err := o.convert(a)
			harness.Must(t, err)
			if len(c.refused) != 1 || !strings.HasPrefix(c.refused.Error(), test.want) {
				t.Errorf("refused are\n%.1000v, want one that begins with\n%s", c.refused, test.want)
			}
			if n := len(c.refused.Error()); n > 1000 {
				t.Errorf("the refusal has %d bytes", n)
			}
			if got := text(c.Config); got != want {
				t.Errorf("in force is %s, want %s", got, want)
			}
		})
	}
}

func TestManyRefusals(t *testing.T) {
	o := &Options{Trench: "t", Attractor: "a", Defaults: trench.DefaultDefaults()}
	a := attractor(vips("20.0.0.1/32"))
	for i := range 500 {
		a.Vips = append(a.Vips,
			&nspv1.Vip{Name: fmt.Sprintf("garbage-%d", i), Address: "x"},
			&nspv1.Vip{Name: fmt.Sprintf("twice-%d", i), Address: "20.0.0.1/32"})
	}
	c, err := o.convert(a)
	if err != nil || len(c.refused) != 1000 || text(c.Config) != "20.0.0.1/32" {
		t.Fatalf("%d refused, in force %s, error %v", len(c.refused), text(c.Config), err)
	}
	if n := strings.Count(c.refused.Error(), "\n"); n != maxLines {
		t.Errorf("the error has %d lines more than one, want %d", n, maxLines)
	}
}

// A gateway of a family without a VIP keeps its session, because VIPs may be added later.
func TestFamilyWithoutVIP(t *testing.T) {
	o := &Options{Trench: "t", Attractor: "a", Defaults: trench.DefaultDefaults()}
	list := attractor(vips("20.0.0.1/32", "2000::1"), gateway("gw4", "169.254.100.150"), gateway("gw6", "fd00::1"))
	c, err := o.convert(list)
	if err != nil || len(c.refused) != 1 || text(c.Config) != "20.0.0.1/32 gw4 gw6" {
		t.Fatalf("refused %v, in force %s, error %v", c.refused, text(c.Config), err)
	}
}

func TestTooManyVIPs(t *testing.T) {
	o := &Options{Trench: "t", Attractor: "a", Defaults: trench.DefaultDefaults()}
	a := attractor(nil)
	for i := range trench.MaxVIPs + 1 {
		a.Vips = append(a.Vips, &nspv1.Vip{Address: fmt.Sprintf("20.%d.%d.%d/32", i>>16, i>>8&255, i&255)})
	}
	if _, err := o.convert(a); err == nil || !strings.Contains(err.Error(), "50000 at most") {
		t.Fatalf("error %v, want that there are too many VIPs", err)
	}
}

func TestPick(t *testing.T) {
	o := &Options{Trench: "t", Attractor: "a"}
	other, foreign, part := attractor(vips("20.0.0.1/32")), attractor(vips("20.0.0.2/32")), attractor(vips("20.0.0.3/32"))
	other.Name, foreign.Trench = "b", &nspv1.Trench{Name: "u"}
	part.Vips[0].Name = "vip-0"
	got := o.pick([]*nspv1.Attractor{other, foreign, attractor(vips("20.0.0.4/32")), part})
	if len(got.GetVips()) != 2 || got.GetVips()[0].GetAddress() != "20.0.0.3/32" ||
		got.GetVips()[1].GetAddress() != "20.0.0.4/32" {
		t.Errorf("VIPs are %v, want those of the attractor a of the trench t, sorted by name", got.GetVips())
	}
}

// The reader of the trench file reports at most 100 problems. A list with more problems must not
// be parsed repeatedly.
func TestManyDuplicates(t *testing.T) {
	o := &Options{Trench: "t", Attractor: "a", Defaults: trench.DefaultDefaults()}
	a := attractor(vips("20.0.0.1/32"))
	const n = 20_000
	for i := range n {
		a.Vips = append(a.Vips, &nspv1.Vip{Name: fmt.Sprintf("copy-%d", i), Address: "20.0.0.1/32"})
	}
	c, err := o.convert(a)
	if err != nil || len(c.refused) != n || text(c.Config) != "20.0.0.1/32" {
		t.Errorf("%d VIPs are refused, in force is %s, error %v", len(c.refused), text(c.Config), err)
	}
}

// Static gateways may have BGP defaults, which are ignored. Gateways whose BFD parameters differ
// from the first are refused, because BIRD has one set per interface.
func TestStaticGateways(t *testing.T) {
	o := &Options{Trench: "t", Attractor: "a", Defaults: trench.DefaultDefaults(), Keys: &keys{}}
	static := func(name, address string, minTx uint32) *nspv1.Gateway {
		g := gateway(name, address)
		g.Protocol, g.RemoteAsn, g.LocalAsn, g.RemotePort, g.LocalPort, g.HoldTime = "static", 1, 2, 3, 4, 5
		g.BgpAuth = &nspv1.Gateway_BgpAuth{KeyName: "k", KeySource: "s"}
		g.Bfd, g.BfdSpec = true, &nspv1.Gateway_BfdSpec{MinTx: minTx, MinRx: 100, Multiplier: 3}
		return g
	}
	c, err := o.convert(attractor(vips("20.0.0.1/32"), static("a", "169.254.100.1", 100),
		static("b", "169.254.100.2", 100), static("c", "169.254.100.3", 200)))
	if err != nil || text(c.Config) != "20.0.0.1/32 a b" {
		t.Fatalf("in force is %s, error %v", text(c.Config), err)
	}
	if len(c.refused) != 1 || !strings.HasPrefix(c.refused.Error(), "gateway c: bfd ") ||
		!strings.Contains(c.refused.Error(), "in gateway a") {
		t.Errorf("refused are %v, want the gateway c, with the name of a", c.refused)
	}
	g := c.Attractor.Gateways[0]
	if g.Protocol != trench.Static || g.PasswordFile != "" || g.BFD.MinTx != 100*time.Millisecond {
		t.Errorf("the first gateway is %+v", g)
	}
}
