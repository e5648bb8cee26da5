package serving

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// slowModel has a kernel, a frontend and gateways that follow late, each on its own.
type slowModel struct {
	*planeRig
	// kernel is the state that is confirmed next, done the number of desired states applied to it.
	kernel plan.State
	done   int
	// advertised holds the VIPs that gateways received, revision the decision that led to it.
	advertised vip.Set
	revision   uint64
}

func (w *slowModel) kernelApplies() {
	if w.done < len(w.sent) {
		w.kernel = applied(w.kernel, w.sent[w.done])
		w.done++
	}
}

func (w *slowModel) kernelConfirms() { w.confirmState(w.kernel) }

// frontendApplies applies the newest decision. The frontend does not report yet.
func (w *slowModel) frontendApplies() {
	s := w.table.State()
	w.revision, w.advertised = s.Position.Revision, vip.Set{}
	for _, r := range s.VIPs {
		if r.State != vip.NotReady {
			w.advertised[r.VIP] = struct{}{}
		}
	}
}

func (w *slowModel) frontendReports() {
	w.reportAt("lb", w.revision, w.advertised.Sorted()...)
	w.evaluate()
}

// check checks the invariant: what gateways receive leads to a target.
func (w *slowModel) check(t *rapid.T) {
	for v := range w.advertised {
		name, ok := w.kernel.VIPs[v]
		if !ok {
			t.Fatalf("%s is advertised, and no stream of the kernel has it", v)
		}
		if len(w.kernel.Streams[name].Serving[v.Family()]) == 0 {
			t.Fatalf("%s is advertised, and stream %s has no target in the kernel", v, name)
		}
	}
}

// settle runs all parts until they are idle, and checks that the state in force is the desired one.
func (w *slowModel) settle(t *rapid.T) {
	for range 6 {
		for w.done < len(w.sent) {
			w.kernelApplies()
			w.check(t)
		}
		w.kernelConfirms()
		w.frontendApplies()
		w.check(t)
		w.frontendReports()
	}
	if f := w.e.forwarding; len(f.holds) != 0 || len(w.out.Held) != 0 || !w.out.Next.IsZero() {
		t.Fatalf("all parts have followed, and yet something is held back: %v, %v", f.holds, w.out.Held)
	}
	last := w.last()
	if got, want := len(last.Streams), len(w.config.Streams); got != want {
		t.Fatalf("%d streams are desired, want %d", got, want)
	}
	for name, s := range w.e.streams {
		if want := w.e.planStream(s, nil); !last.Streams[name].Equal(want) {
			t.Fatalf("stream %s is desired as %+v, want %+v", name, last.Streams[name], want)
		}
	}
	for _, v := range w.config.Attractor.VIPs {
		w.checkVIP(t, v)
	}
}

// checkVIP is the oracle of one VIP when all parts have followed: the first of its streams by name
// decides.
func (w *slowModel) checkVIP(t *rapid.T, v vip.VIP) {
	want, ready := vip.NotReady, 0
	for _, name := range slices.Sorted(maps.Keys(w.e.streams)) {
		s := w.e.streams[name]
		if !slices.Contains(s.VIPs, v) {
			continue
		}
		leaving := 0
		for k, m := range s.keys() {
			dead := w.e.health[k].State != healthcheck.Ready || w.e.kernel.unreachable(k.Addr) != ""
			if dead || vip.FamilyOf(k.Addr) != v.Family() {
				continue
			}
			switch m.Draining {
			case healthcheck.Ready:
				ready++
			case healthcheck.Draining:
				leaving++
			}
		}
		switch {
		case ready >= s.MinReady:
			want = vip.Ready
		case ready+leaving >= s.MinReady:
			want = vip.Draining
		}
		break
	}
	if got := w.e.of(v); got.State != want || int(got.ReadyTargets) != ready {
		t.Fatalf("%s is %v with %d ready (%s), want %v with %d", v, got.State, got.ReadyTargets, got.Detail, want, ready)
	}
}

func drawPlaneConfig(t *rapid.T) *trench.Config {
	c := &trench.Config{Attractor: trench.Attractor{VIPs: drawVIPs(t, modelVIPs, 1)}}
	for _, name := range rapid.SliceOfNDistinct(rapid.SampledFrom(modelStreams), 0, 2, rapid.ID).Draw(t, "streams") {
		s := streamOf(name, drawVIPs(t, c.Attractor.VIPs, 1)...)
		s.MinReady = rapid.IntRange(1, 2).Draw(t, "minReady")
		c.Streams = append(c.Streams, s)
	}
	return c
}

// modelMember returns a target with its addresses.
func modelMember(stream, name string) targetset.Member {
	i, j := slices.Index(modelStreams, stream), slices.Index(modelNames, name)+1
	return member(name, fmt.Sprintf("172.16.%d.%d", i, j), fmt.Sprintf("fd00:%d::%d", i, j))
}

// Whatever happens in whatever order, and however late the parts follow, no VIP is advertised that
// the kernel leads to no target.
func TestModelOfDataPlane(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		members := map[string][]targetset.Member{}
		for _, stream := range modelStreams {
			for _, name := range modelNames {
				members[stream] = append(members[stream], modelMember(stream, name))
			}
		}
		w := &slowModel{planeRig: startPlaneRig(t, drawPlaneConfig(rt), members)}
		stream := func() string { return drawStream(rt) }
		name := func() string { return rapid.SampledFrom(modelNames).Draw(rt, "name") }
		rt.Repeat(map[string]func(*rapid.T){
			"kernel applies":   func(*rapid.T) { w.kernelApplies() },
			"kernel confirms":  func(*rapid.T) { w.kernelConfirms() },
			"frontend applies": func(*rapid.T) { w.frontendApplies() },
			"frontend reports": func(*rapid.T) { w.frontendReports() },
			"all follow":       func(t *rapid.T) { w.settle(t) },
			"reload":           func(t *rapid.T) { w.planeRig.configure(drawPlaneConfig(t)) },
			"health": func(t *rapid.T) {
				w.health(stream(), name(), drawState(t))
			},
			"drain":   func(*rapid.T) { w.drain(stream(), name(), time.Minute) },
			"drained": func(*rapid.T) { w.drain(stream(), name(), -1) },
			"undrain": func(*rapid.T) {
				s := stream()
				for i := range w.members[s] {
					w.members[s][i].Draining = healthcheck.Ready
				}
				w.retarget(s)
			},
			"vanish": func(*rapid.T) {
				s, n := stream(), name()
				w.members[s] = slices.DeleteFunc(slices.Clone(w.members[s]), func(m targetset.Member) bool { return m.Name == n })
				w.retarget(s)
			},
			"return": func(*rapid.T) {
				s, n := stream(), name()
				if !slices.ContainsFunc(w.members[s], func(m targetset.Member) bool { return m.Name == n }) {
					w.members[s] = append(slices.Clone(w.members[s]), modelMember(s, n))
					w.retarget(s)
				}
			},
			"unreachable": func(*rapid.T) {
				a := modelMember(stream(), name()).IPs[0]
				w.kernel.Unreachable = maps.Clone(w.kernel.Unreachable)
				if _, was := w.kernel.Unreachable[a]; was {
					delete(w.kernel.Unreachable, a)
					return
				}
				if w.kernel.Unreachable == nil {
					w.kernel.Unreachable = map[netip.Addr]string{}
				}
				w.kernel.Unreachable[a] = "neighbor does not answer"
			},
			"": func(t *rapid.T) { w.check(t) },
		})
		w.settle(rt)
	})
}
