package lb

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// slowWorld has a kernel, a frontend and gateways that follow late, each on its own.
type slowWorld struct {
	*planeRig
	// kernel is what it does, known what the loop will hear of it next.
	kernel dataplane.State
	dealt  int // how many of the plane's orders
	// advertised is what gateways received, applied the revision that it comes from.
	advertised vip.Set
	applied    uint64
}

func (w *slowWorld) kernelFollows() {
	if w.dealt < len(w.plane.wanted) {
		w.kernel = forward(w.kernel, w.plane.wanted[w.dealt])
		w.dealt++
	}
}

func (w *slowWorld) loopHears() { w.hear(w.kernel) }

// frontendFollows takes in the newest decision. It does not report yet.
func (w *slowWorld) frontendFollows() {
	s := w.table.State()
	w.applied, w.advertised = s.Position.Revision, vip.Set{}
	for _, r := range s.VIPs {
		if r.State != readiness.NotReady {
			w.advertised[r.VIP] = struct{}{}
		}
	}
}

func (w *slowWorld) frontendReports() {
	w.frontend.say(w.now, "lb", w.applied, w.advertised.Sorted()...)
	w.decide(vip.Set{}, nil)
}

// check is the promise: what gateways receive leads to a target.
func (w *slowWorld) check(t *rapid.T) {
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

// settle lets everybody follow, and checks that what is in force is what should be.
func (w *slowWorld) settle(t *rapid.T) {
	for range 6 {
		for w.dealt < len(w.plane.wanted) {
			w.kernelFollows()
			w.check(t)
		}
		w.loopHears()
		w.frontendFollows()
		w.check(t)
		w.frontendReports()
	}
	if len(w.f.holds) != 0 || len(w.f.pending) != 0 || w.f.reported != nil || !w.f.next.IsZero() {
		t.Fatalf("everybody has followed, and yet something is held back: %v, %v", w.f.holds, w.f.pending)
	}
	last := w.plane.last()
	if got, want := len(last.Streams), len(w.config.Streams); got != want {
		t.Fatalf("%d streams are wanted, there are %d", got, want)
	}
	for name, s := range w.a.streams {
		if want := w.a.forwardable(s, nil); !sameStream(last.Streams[name], want) {
			t.Fatalf("stream %s is wanted as %+v, should be %+v", name, last.Streams[name], want)
		}
	}
	for _, v := range w.config.Attractor.VIPs {
		w.checkVIP(t, v)
	}
}

// checkVIP is a plain reckoning of one VIP when everybody has followed: the first of
// its streams by name decides.
func (w *slowWorld) checkVIP(t *rapid.T, v vip.VIP) {
	want, ready := readiness.NotReady, 0
	for _, name := range slices.Sorted(maps.Keys(w.a.streams)) {
		s := w.a.streams[name]
		if !slices.Contains(s.VIPs, v) {
			continue
		}
		leaving := 0
		for _, m := range w.members[name] {
			for _, ip := range m.IPs {
				k := healthcheck.Key{Stream: name, Name: m.Name, Addr: ip}
				if vip.FamilyOf(ip) != v.Family() || w.a.health[k].State != healthcheck.Ready || w.a.kernel.unreachable(ip) != "" {
					continue
				}
				switch m.Draining {
				case healthcheck.Ready:
					ready++
				case healthcheck.Draining:
					leaving++
				}
			}
		}
		switch {
		case ready >= s.MinReady:
			want = readiness.Ready
		case ready+leaving >= s.MinReady:
			want = readiness.Draining
		}
		break
	}
	if got := w.a.current[v]; got.State != want || int(got.ReadyTargets) != ready {
		t.Fatalf("%s is %v with %d ready (%s), want %v with %d", v, got.State, got.ReadyTargets, got.Detail, want, ready)
	}
}

func drawPlaneConfig(t *rapid.T) *trench.Config {
	c := &trench.Config{Attractor: trench.Attractor{VIPs: rapid.SliceOfNDistinct(rapid.SampledFrom(modelVIPs), 1, 3, rapid.ID).Draw(t, "vips")}}
	for _, name := range rapid.SliceOfNDistinct(rapid.SampledFrom(modelStreams), 0, 2, rapid.ID).Draw(t, "streams") {
		s := streamOf(name, rapid.SliceOfNDistinct(rapid.SampledFrom(c.Attractor.VIPs), 1, len(c.Attractor.VIPs), rapid.ID).Draw(t, "its vips")...)
		s.MinReady = rapid.IntRange(1, 2).Draw(t, "minReady")
		c.Streams = append(c.Streams, s)
	}
	return c
}

// Whatever happens in whatever order, and however late everybody follows, no VIP is
// advertised that the kernel leads nowhere.
func TestNoAdvertisedVIPLeadsNowhere(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		members := map[string][]targetset.Member{}
		for i, stream := range modelStreams {
			for j, name := range modelNames {
				members[stream] = append(members[stream], member(name, fmt.Sprintf("172.16.%d.%d", i, j+1), fmt.Sprintf("fd00:%d::%d", i, j+1)))
			}
		}
		w := &slowWorld{planeRig: newPlaneRig(t, drawPlaneConfig(rt), members)}
		w.kernel.Revision = 0
		stream := func() string { return drawStream(rt) }
		name := func() string { return rapid.SampledFrom(modelNames).Draw(rt, "name") }
		rt.Repeat(map[string]func(*rapid.T){
			"kernel follows":   func(*rapid.T) { w.kernelFollows() },
			"loop hears":       func(*rapid.T) { w.loopHears() },
			"frontend follows": func(*rapid.T) { w.frontendFollows() },
			"frontend reports": func(*rapid.T) { w.frontendReports() },
			"everybody follows": func(t *rapid.T) {
				w.settle(t)
			},
			"reload": func(t *rapid.T) { w.planeRig.configure(drawPlaneConfig(t)) },
			"health": func(t *rapid.T) {
				w.health(stream(), name(), rapid.SampledFrom([]healthcheck.State{healthcheck.Ready, healthcheck.Ready, healthcheck.NotReady, healthcheck.Overdue}).Draw(t, "to"))
			},
			"drain":   func(*rapid.T) { w.drains(stream(), name(), time.Minute) },
			"drained": func(*rapid.T) { w.drains(stream(), name(), -1) },
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
					i, j := slices.Index(modelStreams, s), slices.Index(modelNames, n)
					w.members[s] = append(slices.Clone(w.members[s]), member(n, fmt.Sprintf("172.16.%d.%d", i, j+1), fmt.Sprintf("fd00:%d::%d", i, j+1)))
					w.retarget(s)
				}
			},
			"unreachable": func(t *rapid.T) {
				s, n := stream(), name()
				i, j := slices.Index(modelStreams, s), slices.Index(modelNames, n)
				w.kernel.Unreachable = maps.Clone(w.kernel.Unreachable)
				a := member(n, fmt.Sprintf("172.16.%d.%d", i, j+1)).IPs[0]
				if _, was := w.kernel.Unreachable[a]; was {
					delete(w.kernel.Unreachable, a)
					return
				}
				if w.kernel.Unreachable == nil {
					w.kernel.Unreachable = map[netip.Addr]string{}
				}
				w.kernel.Unreachable[a] = "neighbour does not answer"
			},
			"": func(t *rapid.T) { w.check(t) },
		})
		w.settle(rt)
	})
}
