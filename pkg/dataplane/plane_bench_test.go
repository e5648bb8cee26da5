package dataplane

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// thousand returns 100 streams with 10 targets each.
func thousand() []*plan.Stream {
	var streams []*plan.Stream
	for i := range 100 {
		var targets []plan.Target
		for j := range 10 {
			n := i*10 + j
			t := plan.Target{
				Name: fmt.Sprintf("t%d", j),
				IPs: []netip.Addr{
					netip.AddrFrom4([4]byte{10, 1, 4 + byte(n>>8), byte(n)}),
					netip.MustParseAddr(fmt.Sprintf("fd01::1:%x", n+1)),
				},
			}
			t.Roles = [2]plan.Role{plan.Serving, plan.Serving}
			targets = append(targets, t)
		}
		s := testStream(fmt.Sprintf("s%d", i), []string{fmt.Sprintf("20.0.%d.1/32", i), fmt.Sprintf("2000::%x/128", i+1)},
			targets...)
		s.Size, s.DrainTime = 1009, 0
		streams = append(streams, s)
	}
	return streams
}

// with returns the streams with one target of the first one changed.
func with(streams []*plan.Stream, change func(*plan.Target)) []*plan.Stream {
	out := append([]*plan.Stream(nil), streams...)
	s := *out[0]
	s.Targets = append([]plan.Target(nil), s.Targets...)
	change(&s.Targets[0])
	out[0] = &s
	return out
}

func BenchmarkChangeAmong1000Targets(b *testing.B) {
	for _, tt := range []struct {
		name   string
		change func(*plan.Target)
	}{
		{"drains", func(t *plan.Target) { t.Roles = [2]plan.Role{plan.Draining, plan.Draining} }},
		{"is another", func(t *plan.Target) { t.Name = "other" }},
	} {
		b.Run(tt.name, func(b *testing.B) {
			x := newSite(b)
			x.must(x.ns.IP("address", "add", "10.1.0.1/16", "dev", "eth1"))
			p := x.start(func(o *Options) { o.Log = slog.New(slog.DiscardHandler) })
			all := thousand()
			other := with(all, tt.change)
			p.configure(all...)
			for i := 0; b.Loop(); i++ {
				streams := all
				if i%2 == 0 {
					streams = other
				}
				s := p.configure(streams...)
				if s.Err != nil || s.Streams["s0"].Problem[vip.IPv4] != "" {
					b.Fatal(describeState(s))
				}
			}
		})
	}
}

// BenchmarkTargetComesAmong1000 alternates between a new target that serves immediately, and a
// target that already has routes and starts to serve.
func BenchmarkTargetComesAmong1000(b *testing.B) {
	x := newSite(b)
	x.must(x.ns.IP("address", "add", "10.1.0.1/16", "dev", "eth1"))
	p := x.start(func(o *Options) { o.Log = slog.New(slog.DiscardHandler) })
	all := thousand()
	without := func(s *plan.Stream) *plan.Stream {
		c := *s
		c.Targets = s.Targets[1:]
		return &c
	}
	var took [2][]float64 // in milliseconds
	for b.Loop() {
		for i, name := range []string{"s0", "s1"} {
			s := *all[i]
			p.configure(append([]*plan.Stream{without(all[0]), without(all[1])}, all[2:]...)...)
			streams := append([]*plan.Stream{without(all[0]), without(all[1])}, all[2:]...)
			if i == 1 {
				s.RouteAll = true
				routed := s
				routed.Targets = append([]plan.Target(nil), s.Targets...)
				routed.Targets[0].Roles = [2]plan.Role{}
				streams[1] = &routed
				p.configure(streams...)
			}
			streams = append([]*plan.Stream(nil), streams...)
			streams[i] = &s
			began := time.Now()
			if is := p.configure(streams...); is.Err != nil || !is.Serves(name, vip.IPv4, "t0") {
				b.Fatal(describeState(is))
			}
			took[i] = append(took[i], float64(time.Since(began))/float64(time.Millisecond))
		}
	}
	for i, unit := range []string{"ms-at-once", "ms-routed"} {
		slices.Sort(took[i])
		b.ReportMetric(took[i][len(took[i])/2], unit)
	}
}

func BenchmarkStartWith1000Targets(b *testing.B) {
	x := newSite(b)
	x.must(x.ns.IP("address", "add", "10.1.0.1/16", "dev", "eth1"))
	quiet := func(o *Options) { o.Log = slog.New(slog.DiscardHandler) }
	p := x.start(quiet)
	p.configure(thousand()...)
	p.stop()
	for b.Loop() {
		p = x.start(quiet)
		<-p.Ready()
		p.stop()
	}
}
