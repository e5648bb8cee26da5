package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/serving"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// scriptedChecker reports the evaluations that a benchmark sets.
type scriptedChecker struct{ next healthcheck.Evaluation }

func (c *scriptedChecker) Update([]trench.Stream, []string) {}
func (c *scriptedChecker) Routed()                          {}
func (c *scriptedChecker) Changed() <-chan struct{}         { return nil }

func (c *scriptedChecker) Evaluate(time.Time) healthcheck.Evaluation {
	defer func() { c.next = healthcheck.Evaluation{} }()
	return c.next
}

// benchLoop is a loop without tasks, and the checks of its targets: one for each stream.
type benchLoop struct {
	*loop
	checker *scriptedChecker
	trench  *trench.Config
	keys    []healthcheck.Key
	ready   bool // the state of all targets
}

// newBenchLoop returns a synced loop with streams of VIPs. With a data plane the kernel has applied
// everything.
func newBenchLoop(b testing.TB, streams, vips int, dataPlane bool) *benchLoop {
	b.Helper()
	c := &trench.Config{}
	l := &benchLoop{loop: newLoop(b, TargetOptions{}), checker: &scriptedChecker{}}
	l.loop.checker = l.checker
	kernel := plan.State{Streams: map[string]*plan.StreamState{}, VIPs: map[vip.VIP]string{}, Revision: 1 << 32}
	for i := range streams {
		s := trench.Stream{
			Name: fmt.Sprintf("s%04d", i), MinReady: 1, DrainTime: time.Minute, Maglev: trench.Maglev{Size: 101, Seed: 1},
			Check: trench.Check{
				SingleCheck: trench.SingleCheck{
					TCP: trench.TCPCheck{Port: 1}, Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 1,
				},
			},
		}
		a := netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)})
		s.Targets = []trench.Target{{Name: "a", IPs: []netip.Addr{a}}}
		for range vips {
			n := len(c.Attractor.VIPs)
			v, err := vip.FromPrefix(netip.PrefixFrom(netip.AddrFrom4([4]byte{20, 0, byte(n >> 8), byte(n)}), 32))
			if err != nil {
				b.Fatal(err)
			}
			s.VIPs, c.Attractor.VIPs = append(s.VIPs, v), append(c.Attractor.VIPs, v)
			kernel.VIPs[v] = s.Name
		}
		c.Streams = append(c.Streams, s)
		kernel.Streams[s.Name] = &plan.StreamState{Serving: [2]map[string]struct{}{{"a": {}}, {}}}
		l.keys = append(l.keys, healthcheck.Key{Stream: s.Name, Name: "a", Addr: a})
	}
	l.trench = c
	in := l.load(trench.Loaded{Config: c, Generation: 1})
	if dataPlane {
		l.evaluator = serving.New(serving.Options{DataPlane: true, WithdrawTime: time.Hour})
		l.withPlane(&scriptedPlane{ready: make(chan struct{})}, &scriptedFrontend{}, func(time.Duration) {})
		l.compared, in.kernel = true, &kernel
	}
	l.evaluate(in)
	l.flip(len(l.keys))
	l.evaluate(input{})
	if s := l.table.State(); !s.Synced || s.VIPs[len(s.VIPs)-1].State != vip.Ready {
		b.Fatalf("synced %v, %+v", s.Synced, s.VIPs[len(s.VIPs)-1])
	}
	return l
}

// flip has the next evaluation find another state of the first n targets.
func (l *benchLoop) flip(n int) {
	l.ready = !l.ready
	state := healthcheck.NotReady
	if l.ready {
		state = healthcheck.Ready
	}
	for _, k := range l.keys[:n] {
		l.checker.next.Changed = append(l.checker.next.Changed, healthcheck.Health{Key: k, State: state})
	}
}

// BenchmarkDecide measures from the wake-up of the loop to the return of Table.Commit, when the
// targets of all streams, or of one, change.
func BenchmarkDecide(b *testing.B) {
	for _, c := range []struct {
		name                   string
		streams, vips, changed int
		dataPlane              bool
	}{
		{"1x1000", 1, 1000, 1, false},
		{"1x10000", 1, 10_000, 1, false},
		{"1000x10", 1000, 10, 1000, false},
		{"1000x10 one", 1000, 10, 1, false},
		{"1x10 one", 1, 10, 1, false},
		{"1x10000 data plane", 1, 10_000, 1, true},
		{"1000x10 data plane", 1000, 10, 1000, true},
		{"1000x10 one data plane", 1000, 10, 1, true},
	} {
		b.Run(c.name, func(b *testing.B) {
			l := newBenchLoop(b, c.streams, c.vips, c.dataPlane)
			b.ReportAllocs()
			for b.Loop() {
				l.flip(c.changed)
				d := l.decide(input{})
				if len(d.Changed) != c.changed*c.vips {
					b.Fatalf("%d VIPs changed", len(d.Changed))
				}
				b.StopTimer()
				l.publish(input{}, d)
				b.StartTimer()
			}
		})
	}
}

// BenchmarkDecideTrenchFile measures the same when a trench file has other targets.
func BenchmarkDecideTrenchFile(b *testing.B) {
	for _, c := range []struct{ streams, vips int }{{1, 10_000}, {1000, 10}} {
		b.Run(fmt.Sprintf("%dx%d", c.streams, c.vips), func(b *testing.B) {
			l := newBenchLoop(b, c.streams, c.vips, false)
			with, without := *l.trench, *l.trench
			without.Streams = slices.Clone(with.Streams)
			for i := range without.Streams {
				without.Streams[i].Targets = nil
				without.Streams[i].DrainTime = 0
			}
			b.ReportAllocs()
			for loads := uint64(2); b.Loop(); loads++ {
				config := &with
				if loads%2 == 0 {
					config = &without
				}
				in := l.load(trench.Loaded{Config: config, Generation: loads})
				d := l.decide(in)
				if len(d.Changed) != c.streams*c.vips {
					b.Fatalf("%d VIPs changed", len(d.Changed))
				}
				b.StopTimer()
				l.publish(in, d)
				b.StartTimer()
			}
		})
	}
}

// BenchmarkPublish measures the work of the loop after a decision is committed, and an evaluation
// without any change.
func BenchmarkPublish(b *testing.B) {
	for _, dataPlane := range []bool{false, true} {
		b.Run(fmt.Sprint("1x10000 data plane ", dataPlane), func(b *testing.B) {
			l := newBenchLoop(b, 1, 10_000, dataPlane)
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				l.flip(1)
				d := l.decide(input{})
				b.StartTimer()
				l.publish(input{}, d)
			}
		})
		b.Run(fmt.Sprint("1000x10 idle data plane ", dataPlane), func(b *testing.B) {
			l := newBenchLoop(b, 1000, 10, dataPlane)
			b.ReportAllocs()
			for b.Loop() {
				l.evaluate(input{})
			}
		})
	}
}
