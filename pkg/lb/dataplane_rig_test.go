package lb

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/outage"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// scriptedPlane does to its kernel what is desired, when the test lets it.
type scriptedPlane struct {
	ready chan struct{}
	state latest.Value[dataplane.State]

	mu     sync.Mutex
	wanted []*dataplane.Desired
}

func (p *scriptedPlane) Configure(w *dataplane.Desired) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wanted = append(p.wanted, w)
}

func (p *scriptedPlane) State() *latest.Value[dataplane.State] { return &p.state }
func (p *scriptedPlane) Ready() <-chan struct{}                { return p.ready }

func (p *scriptedPlane) last() *dataplane.Desired {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.wanted) == 0 {
		return nil
	}
	return p.wanted[len(p.wanted)-1]
}

// forward is the state of a kernel that had before and gets the desired state.
func forward(before dataplane.State, w *dataplane.Desired) dataplane.State {
	now := dataplane.State{
		Revision: w.Revision, Streams: map[string]*dataplane.StreamState{}, VIPs: map[vip.VIP]string{},
		Unreachable: before.Unreachable, At: time.Now(),
	}
	for _, name := range slices.Sorted(maps.Keys(w.Streams)) {
		st := &dataplane.StreamState{}
		for _, f := range vip.Families {
			st.Serving[f] = map[string]struct{}{}
			for _, t := range w.Streams[name].Targets {
				was := false
				if b := before.Streams[name]; b != nil {
					_, was = b.Serving[f][t.Name]
				}
				if t.Roles[f] == dataplane.Serving || (was && t.Roles[f] == dataplane.Unknown) {
					st.Serving[f][t.Name] = struct{}{}
				}
			}
		}
		now.Streams[name] = st
		for _, v := range w.Streams[name].VIPs {
			if _, taken := now.VIPs[v]; taken {
				now.Problems = append(now.Problems, dataplane.Problem{Object: "VIP " + v.String(), Detail: "is also in stream " + name})
				continue
			}
			now.VIPs[v] = name
		}
	}
	return now
}

// scriptedFrontend reports what the test says.
type scriptedFrontend struct {
	report latest.Value[readiness.Report]

	mu   sync.Mutex
	as   readinessv1.Advertisement // what it reports of advertised VIPs; announced by default
	vips map[vip.VIP]readiness.VIPReport
}

// advertise sets what is reported of advertised VIPs from now on.
func (f *scriptedFrontend) advertise(as readinessv1.Advertisement) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.as = as
}

func (f *scriptedFrontend) Report() *latest.Value[readiness.Report] { return &f.report }

func (f *scriptedFrontend) Reported(v vip.VIP) (readiness.VIPReport, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r, ok := f.vips[v]
	return r, ok
}

// say reports to have applied a revision and to advertise these VIPs.
func (f *scriptedFrontend) say(at time.Time, instance string, revision uint64, advertised ...vip.VIP) {
	f.mu.Lock()
	f.vips = map[vip.VIP]readiness.VIPReport{}
	for _, v := range advertised {
		f.vips[v] = readiness.VIPReport{Advertisement: cmp.Or(f.as, readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED)}
	}
	f.mu.Unlock()
	f.report.Set(readiness.Report{
		WatchID: "w", Connected: true, Complete: true, Applied: readiness.Position{InstanceID: instance, Revision: revision},
		Advertised: len(advertised), At: at,
	})
}

// planeRig is a rig with a data plane, whose steps are those of the loop.
type planeRig struct {
	*rig
	plane    *scriptedPlane
	frontend *scriptedFrontend
	table    *readiness.Table
	f        *forwarding
	config   *trench.Config
}

const testPatience = time.Second

func newPlaneRig(t *testing.T, c *trench.Config, members map[string][]targetset.Member) *planeRig {
	t.Helper()
	p := &planeRig{
		rig:   &rig{t, newAggregate(outage.New(outage.Options{})), time.Now(), members},
		plane: &scriptedPlane{ready: make(chan struct{})}, frontend: &scriptedFrontend{},
		table: readiness.NewTable(readiness.TableOptions{InstanceID: "lb"}),
	}
	p.a.kernel = &kernelView{}
	p.f = newForwarding(p.plane, p.frontend, p.table.Position, testPatience, quiet)
	p.configure(c)
	return p
}

// decide is what the loop does after it took in what came.
func (p *planeRig) decide(touched vip.Set, removed []vip.VIP) {
	p.table.Commit(readiness.Decision{Changed: p.a.judge(p.now, touched), Removed: removed, Synced: true, At: p.now})
	p.f.update(p.now, p.a)
}

func (p *planeRig) configure(c *trench.Config) {
	p.config = c
	touched, removed := p.a.configure(time.Now(), c, p.of)
	p.decide(touched, removed)
}

// health tells the health of a target's addresses.
func (p *planeRig) health(stream, name string, s healthcheck.State) {
	touched := vip.Set{}
	var e healthcheck.Evaluation
	for _, m := range p.members[stream] {
		for _, ip := range m.IPs {
			if m.Name == name {
				e.Changed = append(e.Changed, healthcheck.Health{Key: healthcheck.Key{Stream: stream, Name: name, Addr: ip}, State: s, LastError: "connection refused"})
			}
		}
	}
	p.a.apply(e, touched)
	p.decide(touched, nil)
}

// drains has a target drain for so long; a negative time: by an operator, and drained.
func (p *planeRig) drains(stream, name string, in time.Duration) {
	i := slices.IndexFunc(p.members[stream], func(m targetset.Member) bool { return m.Name == name })
	if i < 0 {
		return
	}
	m := &p.members[stream][i]
	m.Draining, m.DrainEnd = healthcheck.Draining, p.now.Add(in)
	if in < 0 {
		m.Draining = healthcheck.Drained
	}
	p.retarget(stream)
}

func (p *planeRig) retarget(stream string) {
	touched := vip.Set{}
	p.a.retarget([]trench.Stream{{Name: stream}}, p.of, touched)
	p.decide(touched, nil)
}

// confirm has the kernel do what is wanted and the loop hear of it.
func (p *planeRig) confirm() {
	p.t.Helper()
	if w := p.plane.last(); w != nil {
		p.hear(forward(p.a.kernel.state, w))
	}
}

func (p *planeRig) hear(s dataplane.State) {
	p.plane.state.Set(s)
	touched := vip.Set{}
	p.a.confirm(s, touched)
	p.decide(touched, nil)
}

// reports has the frontend say that it applied the newest revision.
func (p *planeRig) reports(advertised ...vip.VIP) {
	p.frontend.say(p.now, "lb", p.table.Position().Revision, advertised...)
	p.decide(vip.Set{}, nil)
}

func (p *planeRig) later(d time.Duration) {
	p.now = p.now.Add(d)
	p.decide(vip.Set{}, nil)
}

// role is that of a target in what the data plane last got.
func (p *planeRig) role(stream, name string, f vip.Family) (dataplane.Role, bool) {
	s := p.plane.last().Streams[stream]
	if s == nil {
		return 0, false
	}
	for _, t := range s.Targets {
		if t.Name == name {
			return t.Roles[f], true
		}
	}
	return 0, false
}

func (p *planeRig) wantRole(stream, name string, f vip.Family, want dataplane.Role) {
	p.t.Helper()
	if got, there := p.role(stream, name, f); !there || got != want {
		p.t.Fatalf("%s/%s is %d (there: %v), want %d", stream, name, got, there, want)
	}
}

const (
	reasonReady     = readinessv1.VipReason_VIP_REASON_TARGETS_READY
	reasonDataPlane = readinessv1.VipReason_VIP_REASON_DATA_PLANE
	reasonTooFew    = readinessv1.VipReason_VIP_REASON_TOO_FEW_READY
	reasonDraining  = readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING
)

func member(name string, ips ...string) targetset.Member {
	m := targetset.Member{Name: name, Draining: healthcheck.Ready}
	for _, ip := range ips {
		m.IPs = append(m.IPs, netip.MustParseAddr(ip))
	}
	return m
}

func streamOf(name string, vips ...vip.VIP) trench.Stream {
	return trench.Stream{Name: name, VIPs: vips, MinReady: 1, DrainTime: time.Minute, Maglev: trench.Maglev{Size: 101, Seed: 1}}
}

func trenchOf(streams ...trench.Stream) *trench.Config {
	c := &trench.Config{Streams: streams}
	seen := vip.Set{}
	for _, s := range streams {
		for _, v := range s.VIPs {
			if !seen.Has(v) {
				seen[v] = struct{}{}
				c.Attractor.VIPs = append(c.Attractor.VIPs, v)
			}
		}
	}
	return c
}

// twoTargets is a stream "s" of vipA and vip6 with targets a and b, both ready and
// confirmed.
func twoTargets(t *testing.T) *planeRig {
	t.Helper()
	p := newPlaneRig(t, trenchOf(streamOf("s", vipA, vip6)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1", "fd00::1"), member("b", "172.16.0.2", "fd00::2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.health("s", "b", healthcheck.Ready)
	p.confirm()
	p.want(vipA, readiness.Ready, reasonReady, 2, 2)
	p.want(vip6, readiness.Ready, reasonReady, 2, 2)
	p.reports(vipA, vip6)
	return p
}
