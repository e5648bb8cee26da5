package targetset

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/drains"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// setRig is a set with the stream "s", whose drain time is 10 s.
type setRig struct {
	t   *testing.T
	set *Set
	now time.Time
}

func newSetRig(t *testing.T, subnets ...string) *setRig {
	r := &setRig{t, New(), time.Now()}
	g := AddressPolicy{VIPs: []vip.VIP{vip.Require("20.0.0.0/24"), vip.Require("2000::1/128")}}
	for _, s := range subnets {
		g.Subnets = append(g.Subnets, netip.MustParsePrefix(s))
	}
	r.set.Configure([]trench.Stream{{Name: "s", MinReady: 1, DrainTime: 10 * time.Second}}, g)
	return r
}

func offer(name string, ips ...string) Offer {
	o := Offer{Name: name}
	for _, ip := range ips {
		o.IPs = append(o.IPs, netip.MustParseAddr(ip))
	}
	return o
}

func (r *setRig) leaving(o Offer, lifecycle Lifecycle, in time.Duration) Offer {
	o.Lifecycle, o.DrainEnd, o.Cause = lifecycle, r.now.Add(in), "test"
	return o
}

// want updates and compares the members, written as "name addresses origins state".
func (r *setRig) want(want ...string) Changes {
	r.t.Helper()
	c := r.set.Update(r.now)
	var got []string
	for _, m := range r.set.Members("s") {
		state := ""
		if m.Draining != healthcheck.Ready {
			state = fmt.Sprintf(" %v until %v (%s)", m.Draining, m.DrainEnd.Sub(r.now), m.Cause)
		}
		got = append(got, fmt.Sprintf("%s %s %s%s", m.Name, join(m.IPs), strings.Join(m.Origins.Names(), "+"), state))
	}
	if !slices.Equal(got, want) {
		r.t.Fatalf("the members are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	return c
}

func (r *setRig) wantProblem(o Origin, words ...string) {
	r.t.Helper()
	got := r.set.Problems(o)
	if len(got) != 1 {
		r.t.Fatalf("problems of %v: %q, want one", o, got)
	}
	for _, w := range words {
		if !strings.Contains(got[0], w) {
			r.t.Errorf("%q does not say %q", got[0], w)
		}
	}
}

func TestSourcesAreUnited(t *testing.T) {
	r := newSetRig(t)
	r.set.Offer(OriginFile, Offers{"s": {offer("a", "172.16.0.1", "fd00::1")}})
	r.set.Offer(OriginRegistry, Offers{
		"s":         {offer("b", "172.16.0.2"), offer("a", "fd00::1", "172.16.0.1")},
		"elsewhere": {offer("c", "172.16.0.3")},
	})
	c := r.want("a 172.16.0.1, fd00::1 file+registry", "b 172.16.0.2 registry")
	if len(c.Streams) != 1 || len(c.Streams[0].Targets) != 2 {
		t.Errorf("the stream changed to %+v", c.Streams)
	}
	if c := r.set.Update(r.now); len(c.Streams) != 0 {
		t.Errorf("nothing changed, and yet %+v", c)
	}
	// What one source no longer names is gone unless another does.
	r.set.Offer(OriginRegistry, Offers{"s": nil})
	r.want("a 172.16.0.1, fd00::1 file")
}

func TestBadOffersAreProblems(t *testing.T) {
	for name, tt := range map[string]struct {
		offer Offer
		words []string
	}{
		"outside the subnets": {
			offer("x", "10.0.0.1"),
			[]string{"target x of stream s", "10.0.0.1", "--target-subnet"},
		},
		"in a VIP":             {offer("x", "20.0.0.7"), []string{"20.0.0.7 lies in the VIP 20.0.0.0/24"}},
		"multicast":            {offer("x", "224.0.0.1"), []string{"224.0.0.1 is a multicast"}},
		"duplicate of another": {offer("x", "172.16.0.1"), []string{"target x", "172.16.0.1", "target a's"}},
		"other addresses": {offer("a", "172.16.0.9"), []string{
			"target a",
			"172.16.0.9 here and 172.16.0.1 in file, which counts",
		}},
		"IPv6 link-local":          {offer("x", "fe80::1"), []string{"link-local"}},
		"unspecified":              {offer("x", "0.0.0.0"), []string{"unspecified"}},
		"one good, one bad":        {offer("x", "172.16.0.3", "2000::1"), []string{"2000::1 lies in the VIP"}},
		"an IPv4-mapped address":   {offer("x", "::ffff:172.16.0.3"), []string{"write 172.16.0.3"}},
		"no address at all":        {offer("x"), []string{"nothing would check it"}},
		"the broadcast address":    {offer("x", "255.255.255.255"), []string{"broadcast"}},
		"an address without value": {Offer{Name: "x", IPs: []netip.Addr{{}}}, []string{"no address"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newSetRig(t, "172.16.0.0/16", "::/0", "0.0.0.0/32", "20.0.0.0/8", "224.0.0.0/4", "255.255.255.255/32")
			r.set.Offer(OriginFile, Offers{"s": {offer("a", "172.16.0.1")}})
			r.set.Offer(OriginRegistry, Offers{"s": {tt.offer, offer("b", "172.16.0.2")}})
			r.want("a 172.16.0.1 file", "b 172.16.0.2 registry")
			r.wantProblem(OriginRegistry, tt.words...)
		})
	}
}

func TestUncheckedFamilyIsAProblem(t *testing.T) {
	r := newSetRig(t)
	r.set.Configure([]trench.Stream{{Name: "s", Check: trench.Check{Families: trench.OnlyIPv4}}}, AddressPolicy{})
	r.set.Offer(OriginRegistry, Offers{"s": {offer("six", "fd00::1"), offer("both", "fd00::2", "172.16.0.1")}})
	r.want("both fd00::2, 172.16.0.1 registry")
	r.wantProblem(OriginRegistry, "target six", "nothing would check it")
}

func TestLeavingEnds(t *testing.T) {
	r := newSetRig(t)
	r.set.Offer(OriginFile, Offers{"s": {r.leaving(offer("a", "172.16.0.1"), Leaving, 5*time.Second)}})
	end := r.now.Add(5 * time.Second)
	if c := r.want("a 172.16.0.1 file draining until 5s (test)"); !c.Next.Equal(end) {
		t.Errorf("next update at %v, want %v", c.Next, end)
	}
	r.now = end
	if c := r.want(); len(c.Streams) != 1 || !c.Next.IsZero() {
		t.Errorf("after the drain: %+v", c)
	}
}

func TestTerminatingOverridesActive(t *testing.T) {
	r := newSetRig(t)
	r.set.Offer(OriginFile, Offers{"s": {offer("a", "172.16.0.1")}})
	r.set.Offer(OriginRegistry, Offers{"s": {r.leaving(offer("a", "172.16.0.1"), Terminating, 5*time.Second)}})
	r.want("a 172.16.0.1 file+registry draining until 5s (test)")
}

func TestLeavingOneOfTwoSources(t *testing.T) {
	r := newSetRig(t)
	r.set.Offer(OriginFile, Offers{"s": {r.leaving(offer("a", "172.16.0.1"), Leaving, 5*time.Second)}})
	r.set.Offer(OriginRegistry, Offers{"s": {offer("a", "172.16.0.1")}})
	r.want("a 172.16.0.1 registry")
	r.set.Offer(OriginRegistry, Offers{"s": nil})
	r.want("a 172.16.0.1 file draining until 5s (test)")
}

func TestLeavingSeveralSources(t *testing.T) {
	r := newSetRig(t)
	r.set.Offer(OriginFile, Offers{"s": {r.leaving(offer("a", "172.16.0.1"), Leaving, 5*time.Second)}})
	// It is checked as b since it moved there: as a it would be new, and not ready.
	r.set.Offer(OriginRegistry, Offers{"s": {r.leaving(offer("b", "172.16.0.1"), Leaving, 9*time.Second)}})
	r.want("b 172.16.0.1 registry draining until 9s (test)")
}

func TestAnnouncedEndOverridesOffers(t *testing.T) {
	r := newSetRig(t)
	r.set.Offer(OriginFile, Offers{"s": {r.leaving(offer("a", "172.16.0.1"), Terminating, 5*time.Second)}})
	r.set.Offer(OriginRegistry, Offers{"s": {offer("a", "172.16.0.1"), offer("b", "172.16.0.2")}})
	c := r.want("a 172.16.0.1 file+registry draining until 5s (test)", "b 172.16.0.2 registry")
	if r.now = r.now.Add(5 * time.Second); !c.Next.Equal(r.now) {
		t.Errorf("to be looked at at %v", c.Next)
	}
	r.want("b 172.16.0.2 registry")
	r.wantProblem(OriginRegistry, "target a of stream s has drained and left: test")
	// The address is free, and so is the name once the file no longer lists it.
	r.set.Offer(OriginRegistry, Offers{"s": {
		offer("a", "172.16.0.1"), offer("b", "172.16.0.2"),
		offer("c", "172.16.0.1"),
	}})
	r.want("b 172.16.0.2 registry", "c 172.16.0.1 registry")
	r.set.Offer(OriginRegistry, Offers{"s": {
		offer("a", "172.16.0.1"),
		r.leaving(offer("a", "172.16.0.1"), Leaving, time.Minute),
	}})
	r.want()
	r.set.Offer(OriginFile, Offers{"s": nil})
	r.want("a 172.16.0.1 registry")
}

func TestMovedAddressDoesNotDrain(t *testing.T) {
	r := newSetRig(t)
	r.set.Offer(OriginFile, Offers{"s": {
		offer("b", "172.16.0.1"), offer("a", "172.16.0.2"),
		r.leaving(offer("a", "172.16.0.1", "fd00::1"), Leaving, time.Second),
	}})
	r.want("b 172.16.0.1 file", "a 172.16.0.2 file", "a fd00::1 file draining until 1s (test)")
	if p := r.set.Problems(OriginFile); len(p) != 0 {
		t.Errorf("problems %q", p)
	}
}

func TestManualDrainOutlivesSources(t *testing.T) {
	r := newSetRig(t)
	id := ID{"s", "a"}
	r.set.SetManualDrains(map[ID]drains.Drain{id: {End: r.now.Add(3 * time.Second)}, {"s", "none"}: {End: r.now}})
	r.set.Offer(OriginFile, Offers{"s": {offer("a", "172.16.0.1"), offer("b", "172.16.0.2")}})
	c := r.want("a 172.16.0.1 file draining until 3s (by an operator)", "b 172.16.0.2 file")
	if !c.Next.Equal(r.now.Add(3 * time.Second)) {
		t.Errorf("to be looked at at %v", c.Next)
	}
	// No resync overrides it.
	r.set.Offer(OriginFile, Offers{"s": {offer("a", "172.16.0.1")}})
	r.want("a 172.16.0.1 file draining until 3s (by an operator)")
	r.now = r.now.Add(3 * time.Second)
	if c := r.want("a 172.16.0.1 file drained until 0s (by an operator)"); !c.Next.IsZero() {
		t.Errorf("nothing ends any more, and yet to be looked at at %v", c.Next)
	}
	r.set.Offer(OriginFile, Offers{"s": nil})
	r.want()
	r.set.Offer(OriginFile, Offers{"s": {offer("a", "172.16.0.1")}})
	r.want("a 172.16.0.1 file drained until 0s (by an operator)")
	r.set.SetManualDrains(map[ID]drains.Drain{})
	r.want("a 172.16.0.1 file")
}

func TestEarlierEndOfTwoDrainsCounts(t *testing.T) {
	r := newSetRig(t)
	r.set.SetManualDrains(map[ID]drains.Drain{
		{"s", "a"}: {End: r.now.Add(8 * time.Second)},
		{"s", "b"}: {End: r.now.Add(2 * time.Second)},
	})
	r.set.Offer(OriginFile, Offers{"s": {
		r.leaving(offer("a", "172.16.0.1"), Terminating, 5*time.Second),
		r.leaving(offer("b", "172.16.0.2"), Terminating, 5*time.Second),
	}})
	r.want("a 172.16.0.1 file draining until 5s (test)", "b 172.16.0.2 file draining until 2s (by an operator)")
}

func TestRemovedStreamIsReported(t *testing.T) {
	r := newSetRig(t)
	r.set.Offer(OriginFile, Offers{"s": {offer("a", "172.16.0.1")}})
	r.want("a 172.16.0.1 file")
	r.set.Configure([]trench.Stream{{Name: "t"}}, AddressPolicy{})
	if c := r.set.Update(r.now); !slices.Equal(c.Removed, []string{"s"}) || r.set.Members("s") != nil {
		t.Errorf("removed %q, with members %v", c.Removed, r.set.Members("s"))
	}
	// Offers for an unknown stream wait for it.
	r.set.Configure([]trench.Stream{{Name: "s"}}, AddressPolicy{})
	r.want("a 172.16.0.1 file")
}

func BenchmarkOneRegistrationAmong10000(b *testing.B) {
	s := New()
	var streams []trench.Stream
	all := Offers{}
	for i := range 1000 {
		name := fmt.Sprintf("s%d", i)
		streams = append(streams, trench.Stream{Name: name})
		for j := range 10 {
			all[name] = append(all[name], offer(fmt.Sprintf("t%d", j), fmt.Sprintf("10.%d.%d.%d", i/250, i%250, j+1)))
		}
	}
	s.Configure(streams, AddressPolicy{})
	s.Offer(OriginRegistry, all)
	s.Update(time.Now())
	now := time.Now()
	for b.Loop() {
		s.Offer(OriginRegistry, Offers{"s7": all["s7"]})
		s.Update(now)
	}
}
