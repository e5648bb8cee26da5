package dataplane

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// modelFixture is a model of the kernel with an engine that can be killed.
type modelFixture struct {
	k     *modelKernel
	e     *engine
	clock time.Time
}

func newModelFixture() *modelFixture {
	k := newModelKernel()
	w := &modelFixture{k: k, clock: time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)}
	w.restart()
	return w
}

// restart starts a new process.
func (w *modelFixture) restart() {
	w.k.left = -1
	holds := map[string]time.Time{}
	if w.e != nil {
		holds = w.e.holds.until
	}
	w.e = newEngine(Options{Log: slog.New(slog.DiscardHandler)}.withDefaults(), w.k)
	w.e.now, w.e.holds.until = func() time.Time { return w.clock }, holds
	if err := w.e.load(); err != nil {
		panic(err)
	}
	w.e.pass(nil, false)
}

// settle runs passes until no change is pending. It reports whether the process survived.
func (w *modelFixture) settle(desired *plan.Desired, urgent bool) (alive bool) {
	defer func() {
		if p := recover(); p != nil {
			if err, ok := p.(error); !ok || !errors.Is(err, errKilled) {
				panic(p)
			}
			alive = false
		}
	}()
	for i := 0; ; i++ {
		w.e.pass(desired, urgent)
		if w.e.readErr != nil || w.e.desired == nil || !w.e.any(func(m *streamRecord) bool { return m.dirty && !m.failed }) {
			return true
		}
		if i > 20 {
			panic("the engine never gets done")
		}
	}
}

// notice makes the next pass read everything.
func (w *modelFixture) notice(downed ...int) {
	w.e.stale = everything
	w.e.linksDown = append(w.e.linksDown, downed...)
}

func (w *modelFixture) state() plan.State {
	s := plan.State{
		Streams: map[string]*plan.StreamState{}, VIPs: map[vip.VIP]string{},
		Unreachable: map[netip.Addr]string{},
	}
	w.e.describe(&s)
	return s
}

// number returns the fwmark of a target, or 0.
func (w *modelFixture) number(stream, name string) uint32 {
	for n, t := range w.e.targets {
		if t.Stream == stream && t.Name == name {
			return n
		}
	}
	return 0
}

func (w *modelFixture) slot(stream, name string) *plan.KernelTarget {
	return w.k.Targets[w.number(stream, name)]
}

// serving lists the targets in the kernel's table.
func (w *modelFixture) serving(stream string, f vip.Family) []string {
	s := w.k.Streams[stream]
	if s == nil {
		return nil
	}
	in := map[string]struct{}{}
	for _, n := range s.Tables[f] {
		if t, ok := w.e.targets[n]; ok {
			in[t.Name] = struct{}{}
		}
	}
	return slices.Sorted(maps.Keys(in))
}

const testSize = 13

func testTarget(name string, roles ...plan.Role) plan.Target {
	i := int(name[len(name)-1])
	t := plan.Target{Name: name, IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, name[0], byte(i)})}}
	t.Roles[vip.IPv4] = roles[0]
	if len(roles) > 1 {
		a := netip.MustParseAddr("fd00::").As16()
		a[14], a[15] = name[0], byte(i)
		t.IPs = append(t.IPs, netip.AddrFrom16(a))
		t.Roles[vip.IPv6] = roles[1]
	}
	return t
}

func testStream(name string, vips []string, targets ...plan.Target) *plan.Stream {
	s := &plan.Stream{Name: name, Size: testSize, Seed: 1, DrainTime: 10 * time.Second, Targets: targets}
	for _, v := range vips {
		s.VIPs = append(s.VIPs, vip.Require(v))
	}
	return s
}

var revisions atomic.Uint64

func desiredOf(streams ...*plan.Stream) *plan.Desired {
	w := &plan.Desired{Revision: revisions.Add(1), Streams: map[string]*plan.Stream{}}
	for _, s := range streams {
		w.Streams[s.Name] = s
	}
	return w
}

// streamA returns a desired state with the stream a, which serves one VIP.
func streamA(targets ...plan.Target) *plan.Desired {
	return desiredOf(testStream("a", []string{"20.0.0.1/32"}, targets...))
}

// oracle is the expected kernel state in terms of names: by stream and family the table's
// targets, by target its flows and hops, by VIP the stream, by stream the ports. It ignores
// drains: a target that is not desired is removed.
type oracle struct {
	Tables map[string][2][]string
	Match  map[string][]plan.Port
	Slots  map[string]string
	VIPs   map[string]string
}

func newOracle() oracle {
	return oracle{
		Tables: map[string][2][]string{}, Match: map[string][]plan.Port{}, Slots: map[string]string{},
		VIPs: map[string]string{},
	}
}

func wish(w *plan.Desired, had map[string]bool) oracle {
	o := newOracle()
	for _, name := range slices.Sorted(maps.Keys(w.Streams)) {
		s := w.Streams[name]
		var tables [2][]string
		for _, v := range s.VIPs {
			if o.VIPs[v.String()] == "" {
				o.VIPs[v.String()] = name
			}
		}
		for _, t := range s.Targets {
			key := name + "/" + t.Name
			if t.Roles[0] != plan.Serving && t.Roles[1] != plan.Serving && !had[key] && !s.RouteAll {
				continue
			}
			var flows [2]bool
			hops := plan.ByFamily(t.IPs)
			for _, f := range vip.Families {
				flows[f] = t.Roles[f] == plan.Draining || t.Roles[f] == plan.Serving
				if t.Roles[f] == plan.Serving {
					tables[f] = append(tables[f], t.Name)
				}
			}
			o.Slots[key] = fmt.Sprint(flows, hops)
		}
		o.Tables[name], o.Match[name] = tables, s.Match
	}
	for name, tables := range o.Tables {
		for _, f := range vip.Families {
			mine := false
			for v, by := range o.VIPs {
				mine = mine || by == name && vip.Require(v).Family() == f
			}
			if !mine {
				tables[f] = nil
			}
			slices.Sort(tables[f])
		}
		o.Tables[name] = tables
	}
	return o
}

// is returns the state of the model kernel in the oracle's terms.
func (w *modelFixture) is(t interface{ Fatalf(string, ...any) }) oracle {
	o := newOracle()
	for name, s := range w.k.Streams {
		var tables [2][]string
		for _, f := range vip.Families {
			tables[f] = w.serving(name, f)
		}
		o.Tables[name], o.Match[name] = tables, s.Match
	}
	for n, s := range w.k.Targets {
		if !s.ChainIntact || s.Blackhole != s.Rules {
			t.Fatalf("number %d is torn: %+v", n, s)
		}
		o.Slots[s.Stream+"/"+s.Name] = fmt.Sprint(s.Flows, s.NextHops)
	}
	for v, s := range w.k.VIPs {
		o.VIPs[v.String()] = s
	}
	return o
}

// checkTables compares each table with the Maglev table of its names.
func (w *modelFixture) checkTables(t interface{ Fatalf(string, ...any) }) {
	for name, s := range w.k.Streams {
		for _, f := range vip.Families {
			if s.Tables[f] == nil {
				continue
			}
			targets := map[string]plan.InstalledTarget{}
			for _, r := range w.e.targets {
				if r.Stream == name {
					targets[r.Name] = r
				}
			}
			x := plan.InstalledStream{Size: s.Size, Seed: s.Seed}
			x.Tables[f] = append([]string{}, w.serving(name, f)...)
			want := x.Kernel(targets, new(plan.TableCaches)).Tables[f]
			if !slices.Equal(want, s.Tables[f]) {
				t.Fatalf("table of %s: %v, want %v", name, s.Tables[f], want)
			}
		}
	}
}

// had returns the recorded targets.
func (w *modelFixture) had() map[string]bool {
	had := map[string]bool{}
	for _, r := range w.e.targets {
		had[r.Stream+"/"+r.Name] = true
	}
	return had
}

func sameKernel(a, b *plan.KernelState) bool {
	return cmp.Equal(a, b, cmp.AllowUnexported(plan.KernelState{}, plan.KernelStream{}, plan.KernelTarget{}, plan.Label{}),
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b vip.VIP) bool { return a == b }))
}

func (w *modelFixture) kernel() *plan.KernelState {
	c, _ := w.k.Read(slices.Collect(maps.Keys(w.k.Targets)))
	return c
}

// pass is one round of the engine.
func (e *engine) pass(w *plan.Desired, urgent bool) {
	e.observe(true)
	e.converge(w, urgent)
}
