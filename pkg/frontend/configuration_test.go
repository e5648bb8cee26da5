package frontend

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/vipgate/vipgate/pkg/nsp"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// VIPs that leave keep the gateways of their family that leave with them, unless a gateway has
// taken the name or the address.
func TestLeavingVIPs(t *testing.T) {
	gateway := func(name, address string) trench.Gateway {
		return trench.Gateway{Name: name, Address: netip.MustParseAddr(address)}
	}
	staying, leaving := vip.Require("20.0.0.1/32"), vip.Require("20.0.0.2/32")
	f := &follower{
		process: &process{}, leaving: vip.NewSet(leaving),
		gateways: []trench.Gateway{
			gateway("kept", "10.0.0.1"), gateway("leaves", "10.0.0.2"), gateway("renamed", "10.0.0.3"),
			gateway("moved", "10.0.0.4"), gateway("other-family", "fd00::1"),
		},
	}
	next := trench.Attractor{
		Name: "a", VIPs: []vip.VIP{staying},
		Gateways: []trench.Gateway{gateway("kept", "10.0.0.1"), gateway("new-name", "10.0.0.3"), gateway("moved", "10.0.0.5")},
	}
	got := f.withLeaving(next)
	if want := []vip.VIP{staying, leaving}; got.Name != "a" || !slices.Equal(got.VIPs, want) {
		t.Errorf("the attractor %s has the VIPs %v, want %v", got.Name, got.VIPs, want)
	}
	var names []string
	for _, g := range got.Gateways {
		names = append(names, g.Name+" "+g.Address.String())
	}
	want := []string{"kept 10.0.0.1", "new-name 10.0.0.3", "moved 10.0.0.5", "leaves 10.0.0.2"}
	if !slices.Equal(names, want) {
		t.Errorf("gateways are %q, want %q", names, want)
	}
	if len(next.VIPs) != 1 || len(next.Gateways) != 3 {
		t.Errorf("the next attractor was changed: %v", next)
	}
}

func TestReloadDetail(t *testing.T) {
	file := &process{configName: "trench file"}
	refused := errors.New("refused")
	for want, loaded := range map[string]trench.Loaded{
		"trench file reloaded":                                   {Generation: 1},
		"trench file refused, no VIPs configured: refused":       {Err: refused},
		"trench file refused, keeping the previous one: refused": {Err: refused, Generation: 1},
	} {
		if got := file.reloadDetail(loaded); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	refusals := nsp.Refusals{{Kind: nsp.KindVIP, Name: "a", Problem: "x"}, {Kind: nsp.KindGateway, Name: "b", Problem: "y"}}
	p := &process{configName: "NSP nsp:7778"}
	got := p.reloadDetail(trench.Loaded{Generation: 1, Err: refusals})
	if want := "NSP nsp:7778 reloaded, except for: VIP a: x; gateway b: y"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
