package orders

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/drains"
	"github.com/vipgate/vipgate/pkg/vip"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func parse(text string) vip.VIP {
	v, err := vip.Parse(text)
	if err != nil {
		panic(err)
	}
	return v
}

var (
	vipA = parse("20.0.0.1/32")
	vipB = parse("2000::1/128")
)

// The drain of a VIP is refused while this pod advertises it, unless another pod is known to.
func TestRefuseVIPs(t *testing.T) {
	now := time.Unix(100, 0)
	set := func(vips ...vip.VIP) Elsewhere { return Elsewhere{vip.NewSet(vips...), now.Add(time.Second)} }
	both, all := []vip.VIP{vipA, vipB}, []Object{{}}
	one := []Object{{VIP: vipA}}
	for name, test := range map[string]struct {
		objects    []Object
		advertised []vip.VIP
		ordered    Orders
		elsewhere  Elsewhere
		want       string
	}{
		"elsewhere":           {all, both, nil, set(both...), ""},
		"one is not":          {all, both, nil, set(vipA), "no other pod advertises 2000::1/128"},
		"the other one":       {one, both, nil, set(vipA), ""},
		"none is":             {all, both, nil, set(), "no other pod advertises 20.0.0.1/32, 2000::1/128"},
		"not advertised here": {all, nil, nil, set(), ""},
		"nothing received":    {one, both, nil, Elsewhere{}, "it is not known whether another pod advertises 20.0.0.1/32"},
		"received too long ago": {
			one, both, nil, Elsewhere{vip.NewSet(both...), now}, "it is not known whether another pod advertises 20.0.0.1/32",
		},
		"drained already": {one, both, Orders{{VIP: vipA}: {End: now}}, set(), ""},
		"all are drained": {one, both, Orders{{}: {End: now}}, set(), ""},
		"a gateway":       {[]Object{{Gateway: "gateway-a"}}, both, nil, set(), ""},
	} {
		advertised := vip.NewSet(test.advertised...)
		if got := test.ordered.RefuseVIPs(test.objects, both, advertised.Has, test.elsewhere, now); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
	var many []vip.VIP
	for i := range 9 {
		many = append(many, parse(fmt.Sprintf("20.0.0.%d/32", i+1)))
	}
	every := func(vip.VIP) bool { return true }
	if got := (Orders{}).RefuseVIPs(all, many, every, set(), now); !strings.HasSuffix(got, "20.0.0.5/32 and 4 more VIPs") {
		t.Errorf("nine VIPs: %q", got)
	}
}

// Of the drain of a VIP and of every VIP the earlier drain time and the later end count.
func TestDrainOfVIP(t *testing.T) {
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	for name, test := range map[string]struct{ all, own, want drains.Drain }{
		"the own lasts":  {drains.Drain{End: at(1), Over: at(9)}, drains.Drain{End: at(2)}, drains.Drain{End: at(1)}},
		"that of all":    {drains.Drain{End: at(2)}, drains.Drain{End: at(1), Over: at(9)}, drains.Drain{End: at(1)}},
		"the later ends": {drains.Drain{Over: at(8)}, drains.Drain{Over: at(9)}, drains.Drain{Over: at(9)}},
	} {
		ordered := Orders{{}: test.all, {VIP: vipA}: test.own}
		if got := ordered.Of(vipA); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
		delete(ordered, Object{VIP: vipA})
		if ordered[Object{Node: true}] = test.own; ordered.Of(vipA) != test.want {
			t.Errorf("%s, with the node: %v", name, ordered.Of(vipA))
		}
		if each := ordered.WithoutAll([]vip.VIP{vipA, vipB}); each[Object{VIP: vipB}] != test.all {
			t.Errorf("%s: without the drain of every VIP %v", name, each)
		}
	}
}

// Every kind of object is read from its text.
func TestTextOfObjects(t *testing.T) {
	for _, object := range []Object{{}, {Node: true}, {VIP: vipA}, {Gateway: "all with the node"}} {
		text, err := object.MarshalText()
		var got Object
		if err == nil {
			err = got.UnmarshalText(text)
		}
		if err != nil || got != object {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
}
