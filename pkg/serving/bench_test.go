package serving_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/serving"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// BenchmarkEvaluate measures a decision when the targets of all streams, of one, or of none change.
func BenchmarkEvaluate(b *testing.B) {
	for _, c := range []struct{ streams, vips, changed int }{
		{1, 1000, 1}, {1, 10_000, 1}, {1000, 10, 1000}, {1, 10, 1}, {1000, 10, 1}, {1, 10_000, 0}, {1000, 10, 0},
	} {
		b.Run(fmt.Sprintf("%dx%d changed %d", c.streams, c.vips, c.changed), func(b *testing.B) {
			config, keys := benchConfig(b, c.streams, c.vips)
			e := serving.New(serving.Options{Settle: time.Second})
			now := time.Now()
			e.Configure(now, config, func(stream string) []targetset.Member {
				for _, k := range keys {
					if k.Stream == stream {
						return []targetset.Member{{Name: k.Name, IPs: []netip.Addr{k.Addr}, Draining: healthcheck.Ready}}
					}
				}
				return nil
			})
			state := healthcheck.NotReady
			changed := func(n int) (e healthcheck.Evaluation) {
				state = healthcheck.Ready + healthcheck.NotReady - state
				for _, k := range keys[:n] {
					e.Changed = append(e.Changed, healthcheck.Health{Key: k, State: state})
				}
				return e
			}
			e.Evaluate(now, changed(len(keys)))
			e.Targets()
			b.ReportAllocs()
			for b.Loop() {
				if r := e.Evaluate(now, changed(c.changed)); len(r.Changed) != c.changed*c.vips {
					b.Fatalf("%d VIPs changed", len(r.Changed))
				}
				e.Targets()
			}
		})
	}
}

// BenchmarkConfigure measures the decision about a trench file with the same streams.
func BenchmarkConfigure(b *testing.B) {
	for _, c := range []struct{ streams, vips int }{{1, 10_000}, {1000, 10}} {
		b.Run(fmt.Sprintf("%dx%d", c.streams, c.vips), func(b *testing.B) {
			config, _ := benchConfig(b, c.streams, c.vips)
			e := serving.New(serving.Options{})
			now := time.Now()
			b.ReportAllocs()
			for b.Loop() {
				e.Configure(now, config, func(string) []targetset.Member { return nil })
				e.Evaluate(now, healthcheck.Evaluation{})
			}
		})
	}
}

// benchConfig returns streams with different VIPs, and the key of the target of each.
func benchConfig(b *testing.B, streams, vips int) (c *trench.Config, keys []healthcheck.Key) {
	b.Helper()
	c = &trench.Config{}
	for i := range streams {
		s := trench.Stream{Name: fmt.Sprintf("s%04d", i), MinReady: 1}
		for range vips {
			n := len(c.Attractor.VIPs)
			v, err := vip.FromPrefix(netip.PrefixFrom(netip.AddrFrom4([4]byte{20, 0, byte(n >> 8), byte(n)}), 32))
			harness.Must(b, err)
			s.VIPs, c.Attractor.VIPs = append(s.VIPs, v), append(c.Attractor.VIPs, v)
		}
		c.Streams = append(c.Streams, s)
		a := netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)})
		keys = append(keys, healthcheck.Key{Stream: s.Name, Name: "a", Addr: a})
	}
	return c, keys
}
