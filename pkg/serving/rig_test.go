package serving

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

var (
	vipA = vip.Require("20.0.0.1/32")
	vipB = vip.Require("20.0.0.2/32")
	vip6 = vip.Require("2000::1/128")
)

const (
	reasonReady      = readinessv1.VipReason_VIP_REASON_TARGETS_READY
	reasonNotChecked = readinessv1.VipReason_VIP_REASON_NOT_CHECKED
	reasonDataPlane  = readinessv1.VipReason_VIP_REASON_DATA_PLANE
	reasonTooFew     = readinessv1.VipReason_VIP_REASON_TOO_FEW_READY
	reasonDraining   = readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING

	reasonReconfigured = readinessv1.VipReason_VIP_REASON_RECONFIGURED
)

// rig is an evaluator with the targets that its streams have.
type rig struct {
	t       testing.TB
	e       *Evaluator
	now     time.Time
	members map[string][]targetset.Member
	// evaluated is called after each evaluation.
	evaluated func(Result)
}

// of returns the newest verdict on a VIP; the zero VIPReadiness if it is not judged.
func (e *Evaluator) of(v vip.VIP) (r readiness.VIPReadiness) {
	if j := e.roster.find(v, new(int)); j != nil && j.verdict != nil {
		r = *j.verdict
		r.VIP = v
	}
	return r
}

func newRig(t testing.TB, o Options, members map[string][]targetset.Member) *rig {
	return &rig{t, New(o), time.Now(), members, func(Result) {}}
}

func (r *rig) of(stream string) []targetset.Member { return slices.Clone(r.members[stream]) }

func (r *rig) evaluate(changed ...healthcheck.Health) Result {
	return r.check(healthcheck.Evaluation{Changed: changed})
}

func (r *rig) check(e healthcheck.Evaluation) Result {
	result := r.e.Evaluate(r.now, e)
	inOrder := slices.IsSortedFunc(result.Changed, func(x, y readiness.VIPReadiness) int {
		return vip.Compare(x.VIP, y.VIP)
	})
	if !inOrder || !slices.IsSortedFunc(result.Removed, vip.Compare) {
		r.t.Fatalf("changed %v and removed %v are not in order", result.Changed, result.Removed)
	}
	r.evaluated(result)
	return result
}

func (r *rig) configure(c *trench.Config) Result {
	r.e.Configure(r.now, c, r.of)
	return r.evaluate()
}

func (r *rig) retarget(stream string) {
	r.e.Retarget(r.now, []trench.Stream{{Name: stream}}, r.of)
	r.evaluate()
}

// set sets the health of one address and returns the VIPs that changed.
func (r *rig) set(stream, name, addr string, s healthcheck.State) []vip.VIP {
	result := r.evaluate(healthcheck.Health{
		Key:   healthcheck.Key{Stream: stream, Name: name, Addr: netip.MustParseAddr(addr)},
		State: s, LastError: "connection refused",
	})
	var vips []vip.VIP
	for _, c := range result.Changed {
		vips = append(vips, c.VIP)
	}
	return slices.SortedFunc(slices.Values(vips), vip.Compare)
}

// health sets the health of all addresses of a target.
func (r *rig) health(stream, name string, s healthcheck.State) {
	var changed []healthcheck.Health
	for _, m := range r.members[stream] {
		for _, ip := range m.IPs {
			if m.Name == name {
				k := healthcheck.Key{Stream: stream, Name: name, Addr: ip}
				changed = append(changed, healthcheck.Health{Key: k, State: s, LastError: "connection refused"})
			}
		}
	}
	r.evaluate(changed...)
}

// drain lets a target of a stream drain for some time; a negative time: drained by an operator.
func (r *rig) drain(stream, name string, in time.Duration) {
	i := slices.IndexFunc(r.members[stream], func(m targetset.Member) bool { return m.Name == name })
	if i < 0 {
		return
	}
	m := &r.members[stream][i]
	m.Draining, m.DrainEnd, m.Cause = healthcheck.Draining, r.now.Add(in), "test"
	if in < 0 {
		m.Draining = healthcheck.Drained
	}
	r.retarget(stream)
}

func (r *rig) want(v vip.VIP, s vip.State, reason readinessv1.VipReason, ready, total uint32,
) readiness.VIPReadiness {
	r.t.Helper()
	got := r.e.of(v)
	if got.State != s || got.Reason != reason || got.ReadyTargets != ready || got.TotalTargets != total {
		r.t.Fatalf("%s is %v (%v) with %d/%d, want %v (%v) with %d/%d",
			v, got.State, got.Reason, got.ReadyTargets, got.TotalTargets, s, reason, ready, total)
	}
	return got
}

func member(name string, ips ...string) targetset.Member {
	m := targetset.Member{Name: name, Draining: healthcheck.Ready}
	for _, ip := range ips {
		m.IPs = append(m.IPs, netip.MustParseAddr(ip))
	}
	return m
}

func targets(stream string, list ...targetset.Member) map[string][]targetset.Member {
	return map[string][]targetset.Member{stream: list}
}

// numbered returns n targets t0, t1 … with an address of each family.
func numbered(n int) []targetset.Member {
	var list []targetset.Member
	for i := range n {
		list = append(list, member(fmt.Sprintf("t%d", i), fmt.Sprintf("172.16.0.%d", i+1), fmt.Sprintf("fd00::%d", i+1)))
	}
	return list
}

func streamOf(name string, vips ...vip.VIP) trench.Stream {
	return trench.Stream{
		Name: name, VIPs: vips, MinReady: 1, DrainTime: time.Minute, Maglev: trench.Maglev{Size: 101, Seed: 1},
	}
}

func trenchOf(streams ...trench.Stream) *trench.Config {
	c := &trench.Config{Streams: streams}
	vips := vip.Set{}
	for _, s := range streams {
		maps.Copy(vips, vip.NewSet(s.VIPs...))
	}
	c.Attractor.VIPs = vips.Sorted()
	return c
}

// planeRig is a rig with a data plane and a frontend, which follow when the test lets them.
type planeRig struct {
	*rig
	table  *readiness.Table
	config *trench.Config
	sent   []*plan.Desired
	out    Forwarding // of the newest evaluation

	report readiness.Report
	vips   map[vip.VIP]readiness.VIPReport
	// as is the reported state of advertised VIPs; announced by default.
	as readinessv1.Advertisement
}

const testWithdrawTime = 3 * time.Second

// newPlaneRig returns a rig whose kernel has a state from before the start.
func newPlaneRig(t testing.TB, state plan.State, members map[string][]targetset.Member) *planeRig {
	p := &planeRig{
		rig:   newRig(t, Options{DataPlane: true, WithdrawTime: testWithdrawTime}, members),
		table: readiness.NewTable(readiness.TableOptions{InstanceID: "lb"}),
	}
	p.e.kernel.state = state
	p.evaluated = p.follow
	return p
}

// startPlaneRig returns a rig with an empty kernel and a configuration.
func startPlaneRig(t testing.TB, c *trench.Config, members map[string][]targetset.Member) *planeRig {
	p := newPlaneRig(t, plan.State{}, members)
	p.configure(c)
	return p
}

// follow performs the steps of the loop after an evaluation.
func (p *planeRig) follow(r Result) {
	p.table.Commit(readiness.Decision{Changed: r.Changed, Removed: r.Removed, Synced: true, At: p.now})
	p.out = p.e.Forward(p.now, Frontend{
		Report: p.report, Position: p.table.Position(),
		Reported: func(v vip.VIP) (readiness.VIPReport, bool) { r, ok := p.vips[v]; return r, ok },
	})
	if p.out.Desired != nil {
		p.sent = append(p.sent, p.out.Desired)
	}
}

func (p *planeRig) configure(c *trench.Config) {
	p.config = c
	p.rig.configure(c)
}

func (p *planeRig) last() *plan.Desired {
	if len(p.sent) == 0 {
		return nil
	}
	return p.sent[len(p.sent)-1]
}

// applied returns the state of a kernel after a desired state was applied to it.
func applied(before plan.State, w *plan.Desired) plan.State {
	now := plan.State{
		Revision: w.Revision, Streams: map[string]*plan.StreamState{}, VIPs: map[vip.VIP]string{},
		Unreachable: before.Unreachable, At: time.Now(),
	}
	for _, name := range slices.Sorted(maps.Keys(w.Streams)) {
		st := &plan.StreamState{}
		for _, f := range vip.Families {
			st.Serving[f] = map[string]struct{}{}
			if !plan.HasFamily(w.Streams[name].VIPs, f) && !w.Streams[name].Prepare[f] {
				continue // no map
			}
			for _, t := range w.Streams[name].Targets {
				was := false
				if b := before.Streams[name]; b != nil {
					_, was = b.Serving[f][t.Name]
				}
				if t.Roles[f] == plan.Serving || (was && t.Roles[f] == plan.Unknown) {
					st.Serving[f][t.Name] = struct{}{}
				}
			}
		}
		now.Streams[name] = st
		for _, v := range w.Streams[name].VIPs {
			if _, taken := now.VIPs[v]; taken {
				now.Problems = append(now.Problems, plan.Problem{Object: "VIP " + v.String(), Detail: "is also in stream " + name})
				continue
			}
			now.VIPs[v] = name
		}
	}
	return now
}

// confirm lets the kernel apply and confirm the newest desired state.
func (p *planeRig) confirm() {
	p.t.Helper()
	if w := p.last(); w != nil {
		p.confirmState(applied(p.e.kernel.state, w))
	}
}

func (p *planeRig) confirmState(s plan.State) {
	p.e.Confirm(s)
	p.evaluate()
}

// reportAt lets the frontend report that it applied a revision and advertises these VIPs. The
// evaluator receives that with its next evaluation.
func (p *planeRig) reportAt(instance string, revision uint64, advertised ...vip.VIP) {
	p.vips = map[vip.VIP]readiness.VIPReport{}
	for _, v := range advertised {
		p.vips[v] = readiness.VIPReport{Advertisement: cmp.Or(p.as, readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED)}
	}
	p.report = readiness.Report{
		WatchID: "w", Connected: true, Complete: true, Applied: readiness.Position{InstanceID: instance, Revision: revision},
		Advertised: len(advertised), At: p.now,
	}
}

// reports lets the frontend report that it applied the newest revision.
func (p *planeRig) reports(advertised ...vip.VIP) {
	p.reportAt("lb", p.table.Position().Revision, advertised...)
	p.evaluate()
}

func (p *planeRig) later(d time.Duration) {
	p.now = p.now.Add(d)
	p.evaluate()
}

// streamsOf returns the streams of the newest desired state that have a VIP.
func (p *planeRig) streamsOf(v vip.VIP) (names []string) {
	for name, s := range p.last().Streams {
		if slices.Contains(s.VIPs, v) {
			names = append(names, name)
		}
	}
	return names
}

// role returns the role of a target in the newest desired state.
func (p *planeRig) role(stream, name string, f vip.Family) (plan.Role, bool) {
	t := byName(p.last().Streams[stream])[name]
	if t == nil {
		return 0, false
	}
	return t.Roles[f], true
}

func (p *planeRig) wantRole(stream, name string, f vip.Family, want plan.Role) {
	p.t.Helper()
	if got, known := p.role(stream, name, f); !known || got != want {
		p.t.Fatalf("%s/%s has role %d (known: %v), want %d", stream, name, got, known, want)
	}
}

// twoTargets is a stream "s" of vipA and vip6 with targets a and b, both ready and confirmed.
func twoTargets(t testing.TB) *planeRig {
	t.Helper()
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA, vip6)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1", "fd00::1"), member("b", "172.16.0.2", "fd00::2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.health("s", "b", healthcheck.Ready)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 2, 2)
	p.want(vip6, vip.Ready, reasonReady, 2, 2)
	p.reports(vipA, vip6)
	return p
}
