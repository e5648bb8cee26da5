package dataplane

import (
	"fmt"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/pkg/vip"
)

// thousand is 100 streams with 10 targets each.
func thousand() []*Stream {
	var streams []*Stream
	for i := range 100 {
		var targets []Target
		for j := range 10 {
			n := i*10 + j
			t := Target{
				Name: fmt.Sprintf("t%d", j),
				IPs: []netip.Addr{
					netip.AddrFrom4([4]byte{10, 1, 4 + byte(n>>8), byte(n)}),
					netip.MustParseAddr(fmt.Sprintf("fd01::1:%x", n+1)),
				},
			}
			t.Roles = [2]Role{Serving, Serving}
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
func with(streams []*Stream, change func(*Target)) []*Stream {
	out := append([]*Stream(nil), streams...)
	s := *out[0]
	s.Targets = append([]Target(nil), s.Targets...)
	change(&s.Targets[0])
	out[0] = &s
	return out
}

func BenchmarkChangeAmong1000Targets(b *testing.B) {
	for _, tt := range []struct {
		name   string
		change func(*Target)
	}{
		{"drains", func(t *Target) { t.Roles = [2]Role{Draining, Draining} }},
		{"is another", func(t *Target) { t.Name = "other" }},
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
