package frontend

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

func TestLoopbackProblem(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:1790")
	refused := fmt.Errorf("failed to connect: %w", syscall.ECONNREFUSED)
	timeout := fmt.Errorf("failed to connect: %w", context.DeadlineExceeded)
	passive := bird.State{Alive: true, Loopback: "Passive"}
	disabled := bird.State{Alive: true, Loopback: bird.LoopbackDisabled}
	taken := bird.State{Alive: true, Loopback: bird.NoLoopbackSocket}
	for name, tt := range map[string]struct {
		bird  bird.State
		err   error
		owner string
		want  []string
	}{
		"BIRD down":        {bird.State{Err: errors.New("exit 1")}, refused, "", []string{"exit 1"}},
		"port taken":       {taken, timeout, "process 7 (nc)", []string{"process 7 (nc)", "--lb-bgp-port"}},
		"port free again":  {taken, timeout, "", []string{"cannot listen on 127.0.0.1:1790;", "--lb-bgp-port"}},
		"disabled":         {disabled, refused, "", []string{"birdc enable LB"}},
		"no attempt yet":   {passive, nil, "", []string{"127.0.0.1:1790 yet"}},
		"packets dropped":  {passive, timeout, "", []string{"firewall", "nft list ruleset"}},
		"rejected locally": {passive, fmt.Errorf("dial: %w", syscall.EPERM), "", []string{"nft list ruleset"}},
		"refused":          {passive, refused, "", []string{"connection refused", "BIRD listens again"}},
		"notification":     {passive, errors.New("NOTIFICATION x"), "", []string{"NOTIFICATION x; see the logs"}},
	} {
		got := loopbackProblem(at, tt.bird, tt.err, func(a netip.AddrPort) string {
			if a != at {
				t.Errorf("%s: owner of %s", name, a)
			}
			return tt.owner
		})
		for _, want := range tt.want {
			if !strings.Contains(got, want) {
				t.Errorf("%s: %q does not contain %q", name, got, want)
			}
		}
	}
}

// exportsOf returns a BGP gateway that is up. If it is short, it receives the exported VIPs.
func exportsOf(name string, f vip.Family, short bool, exported vip.Set) bird.GatewayState {
	return bird.GatewayState{
		Name: name, Family: f, Protocol: trench.BGP, Up: true, Usable: true, Short: short, Exports: exported,
	}
}

// Each VIP lists the gateways that receive it. A VIP without a gateway is not exported.
func TestReceivers(t *testing.T) {
	static := bird.GatewayState{Name: "s", Family: vip.IPv4, Protocol: trench.Static, Up: true, Usable: true}
	down := bird.GatewayState{Name: "d", Family: vip.IPv4, Protocol: trench.BGP}
	held := bird.GatewayState{Name: "h", Family: vip.IPv4, Protocol: trench.Static, Held: true, Usable: true}
	whole := exportsOf("w", vip.IPv4, false, nil)
	onlyA, onlyB := exportsOf("a", vip.IPv4, true, vip.NewSet(vipA)), exportsOf("b", vip.IPv4, true, vip.NewSet(vipB))
	none := exportsOf("n", vip.IPv4, true, vip.Set{})
	unknown := exportsOf("u", vip.IPv4, true, nil)
	six := exportsOf("6", vip.IPv6, false, nil)
	dead := bird.State{Gateways: []bird.GatewayState{whole, none}}
	tests := map[string]struct {
		state    bird.State
		accepted bool
		a, b     string // names of the gateways of both VIPs
		exported string // of IPv4
	}{
		"whole":          {bird.State{Gateways: []bird.GatewayState{whole, down, six}}, true, "[w]", "[w]", "<nil>"},
		"one lacks some": {bird.State{Gateways: []bird.GatewayState{whole, onlyA}}, true, "[w a]", "[w]", "<nil>"},
		"each lacks one": {bird.State{Gateways: []bird.GatewayState{onlyA, onlyB}}, true, "[a]", "[b]", "2"},
		"one only":       {bird.State{Gateways: []bird.GatewayState{onlyA, none, six, down}}, true, "[a]", "[]", "1"},
		"none":           {bird.State{Gateways: []bird.GatewayState{none, held}}, true, "[]", "[]", "0"},
		"unknown":        {bird.State{Gateways: []bird.GatewayState{unknown, none}}, true, "[]", "[]", "<nil>"},
		"static":         {bird.State{Gateways: []bird.GatewayState{none, static}}, true, "[s]", "[s]", "<nil>"},
		"not accepted":   {bird.State{Gateways: []bird.GatewayState{whole, static}}, false, "[s]", "[s]", "<nil>"},
		"no gateway up":  {bird.State{Gateways: []bird.GatewayState{down, six}}, true, "[]", "[]", "<nil>"},
		"BIRD is dead":   {dead, true, "[]", "[]", "<nil>"},
	}
	for name, tt := range tests {
		tt.state.Alive = name != "BIRD is dead"
		of := receivers(tt.state, tt.accepted)
		if a, b := fmt.Sprint(of(vipA)), fmt.Sprint(of(vipB)); a != tt.a || b != tt.b {
			t.Errorf("%s: gateways %s and %s, want %s and %s", name, a, b, tt.a, tt.b)
		}
		g := withExports(gate.Gateways{}, tt.state)
		exported := "<nil>"
		if set := g.Exported[vip.IPv4]; set != nil {
			exported = fmt.Sprint(len(set))
		}
		if exported != tt.exported || g.Exported[vip.IPv6] != nil {
			t.Errorf("%s: exported are %v, want %s", name, g.Exported, tt.exported)
		}
	}
}

// A VIP that no gateway receives is shown as withdrawn, but stays announced to BIRD.
func TestNotExportedIsNotAdvertised(t *testing.T) {
	o, _ := testObserver()
	o.decided(decisions{At: time.Unix(1, 0), Changes: []gate.Change{
		changeOf(vipA, gate.Withdrawn, gate.Announced, gate.Ready),
		changeOf(vipB, gate.Withdrawn, gate.Announced, gate.NotExported),
	}})
	o.drain()
	s := o.state
	for v, want := range map[vip.VIP]bool{vipA: true, vipB: false} {
		if got, known := s.serves(v); got != want || !known {
			t.Errorf("serves %s: %v, %v", v, got, known)
		}
	}
	for _, m := range o.metrics() {
		want := map[vip.VIP]string{vipA: "announced ready", vipB: "withdrawn not_exported"}[m.VIP]
		if m.State+" "+m.Reason != want {
			t.Errorf("metrics %+v, want %s", m, want)
		}
	}
	if got := s.expected(); got[vip.IPv4] != 2 {
		t.Errorf("expected at gateways: %v", got)
	}
	list := s.vipStatus(time.Unix(2, 0), []vip.VIP{vipA, vipB}, nil, func(vip.VIP) []string { return []string{"g"} },
		[len(vip.Families)][]string{})
	a, b := list[0], list[1]
	got := fmt.Sprint(a.GetAdvertisement(), a.GetGateways(), b.GetAdvertisement(), b.GetReason(), b.GetGateways())
	if got != "ADVERTISEMENT_ANNOUNCED [g] ADVERTISEMENT_WITHDRAWN ADVERTISEMENT_REASON_NOT_EXPORTED []" {
		t.Errorf("status %s", got)
	}
	lost := changeOf(vipA, gate.Announced, gate.Announced, gate.NotExported)
	lost.From.Reason = gate.Ready
	o.decided(decisions{At: time.Unix(5, 0), Changes: []gate.Change{lost}})
	o.drain()
	if st := s.vips.Get(vipA); !st.Since.Equal(time.Unix(5, 0)) {
		t.Errorf("not advertised since %v", st.Since)
	}
}

// A VIP that gateways no longer receive counts as withdrawn in events and counters.
func TestExportLossIsATransition(t *testing.T) {
	o, counts := testObserver()
	decide := func(from, to gate.Reason) {
		ch := changeOf(vipA, gate.Announced, gate.Announced, to)
		ch.From.Reason = from
		o.decided(decisions{Changes: []gate.Change{ch}})
		o.drain()
	}
	o.decided(decisions{Changes: changes(0, 1, gate.Withdrawn, gate.Announced, gate.Ready)})
	decide(gate.Ready, gate.NotExported)
	if got := o.state.expected()[vip.IPv4]; got != 2 {
		t.Errorf("%d VIPs are expected at gateways, want 2", got)
	}
	decide(gate.NotExported, gate.Ready)
	var got []string
	for _, e := range eventsOf(t, o) {
		got = append(got, e.GetFrom()+" "+e.GetTo()+" "+e.GetReason())
	}
	if d := cmp.Diff([]string{
		"withdrawn announced ready", "announced withdrawn not_exported", "withdrawn announced ready",
	}, got); d != "" {
		t.Error(d)
	}
	if want := (countTransitions{"announced ready": 2, "withdrawn not_exported": 1}); !maps.Equal(counts, want) {
		t.Errorf("counted %v, want %v", counts, want)
	}
}
