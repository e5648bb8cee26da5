package readiness

import (
	"maps"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/vip"
)

// gateFixture is a gate that consumes a watcher's updates. All conditions of its VIPs are met
// except the readiness of the load balancer.
type gateFixture struct {
	*gate.Gate
	view
	vips vip.Set
}

func newGateFixture(vips ...vip.VIP) *gateFixture {
	g := &gateFixture{Gate: gate.New(gate.Options{NoFlapBackoff: true, DrainTime: time.Second}), vips: vip.NewSet(vips...)}
	g.Configure(vips)
	g.Route(g.vips)
	return g
}

// update applies an update, as the frontend does.
func (g *gateFixture) update(now time.Time, u Update) {
	g.apply(u)
	h := gate.LBUpdate{
		Instance: u.Position.InstanceID, Revision: u.Position.Revision, Live: u.Synced, LeaseEnd: u.LeaseEnd,
		EndedAt: u.EndedAt,
		Grace:   u.StaleGrace, GoingAway: u.GoingAway, DrainEnd: u.DrainEnd, Complete: u.Complete,
	}
	for _, r := range u.Changed {
		h.VIPs = append(h.VIPs, gate.VIPState{VIP: r.VIP, State: r.State, DrainEnd: r.DrainEnd})
	}
	h.Removed = u.Removed
	g.UpdateLB(now, h)
}

// evaluate evaluates the gate with all gateways up and returns the changes.
func (g *gateFixture) evaluate(now time.Time) []gate.Change {
	g.Announcer(gate.Announcer{Up: true})
	g.Gateways(gate.Gateways{At: now, Up: [...]bool{true, true}})
	return g.Evaluate(now)
}

// announces reports whether a change announces the VIP.
func announces(c gate.Change) bool {
	return c.To.Advertisement == gate.Announced && c.From.Advertisement != gate.Announced
}

// book is an independent, simple model of one stream: which messages a watcher must reject and
// which states are complete.
type book struct {
	instance string // empty: no message was accepted yet
	revision uint64
	synced   bool
	going    kind // parts of this revision arrived, but not the last one
	goingAt  uint64
	changed  map[string]vip.State
	removed  map[string]bool
	state    map[string]vip.State
	whole    map[uint64]map[string]vip.State // complete states of a synced stream, by revision
}

func validDuration(d *durationpb.Duration, least, most time.Duration) bool {
	return (d == nil || d.IsValid()) && d.AsDuration() >= least && d.AsDuration() <= most
}

func kindOf(m *response) kind {
	switch {
	case m.GetSnapshot() != nil:
		return kindSnapshot
	case m.GetDelta() != nil:
		return kindDelta
	}
	return kindNone
}

// accepts applies a message and reports whether the protocol allows it.
func (b *book) accepts(m *response) bool {
	id, revision, k := m.GetPosition().GetInstanceId(), m.GetPosition().GetRevision(), kindOf(m)
	switch {
	case !validDuration(m.GetLease(), time.Millisecond, MaxLease), id == "", len(id) > 128, revision == 0,
		revision < b.revision:
		return false
	case b.instance == "" && (k != kindSnapshot || m.GetWatchId() == "" || len(m.GetWatchId()) > 128 ||
		!validDuration(m.GetStaleGrace(), 0, 24*time.Hour)):
		return false
	case b.instance != "" && b.instance != id, b.going != kindNone && (k != b.going || revision != b.goingAt):
		return false
	}
	b.instance = id
	var last bool
	var said []*readinessv1.ReadinessGroup
	var gone []string
	switch e := m.GetEvent().(type) {
	case *readinessv1.WatchReadinessResponse_Snapshot:
		if b.synced && !e.Snapshot.GetSynced() {
			return false
		}
		said, last = e.Snapshot.GetGroups(), e.Snapshot.GetLast()
	case *readinessv1.WatchReadinessResponse_Delta:
		if revision == b.revision {
			return false
		}
		said, gone, last = e.Delta.GetChanged(), e.Delta.GetRemoved(), e.Delta.GetLast()
	case *readinessv1.WatchReadinessResponse_Heartbeat:
		return revision == b.revision
	case *readinessv1.WatchReadinessResponse_GoingAway:
		return revision == b.revision && validDuration(e.GoingAway.GetDrainFor(), 0, 24*time.Hour)
	default:
		return false
	}
	if b.going == kindNone {
		b.going, b.goingAt, b.changed, b.removed = k, revision, map[string]vip.State{}, map[string]bool{}
	}
	twice := func(v string) bool { _, there := b.changed[v]; return there || b.removed[v] }
	for _, group := range said {
		state, known := map[readinessv1.VipState]vip.State{
			readinessv1.VipState_VIP_STATE_READY: vip.Ready, readinessv1.VipState_VIP_STATE_NOT_READY: vip.NotReady,
			readinessv1.VipState_VIP_STATE_DRAINING: vip.Draining,
		}[group.GetReadiness().GetState()]
		if !known || state == vip.Draining && !validDuration(group.GetReadiness().GetDrainFor(), 0, 24*time.Hour) {
			return false
		}
		for _, v := range group.GetVips() {
			if strings.HasSuffix(v, "/0") || twice(v) {
				return false
			}
			b.changed[v] = state
		}
	}
	for _, v := range gone {
		if strings.HasSuffix(v, "/0") || twice(v) {
			return false
		}
		b.removed[v] = true
	}
	if !last {
		return true
	}
	if k == kindSnapshot && b.synced && revision == b.revision {
		b.going = kindNone // the state of a position is immutable
		return true
	}
	if k == kindSnapshot {
		b.synced, b.state = m.GetSnapshot().GetSynced(), map[string]vip.State{}
	} else {
		b.state = maps.Clone(b.state)
	}
	maps.Copy(b.state, b.changed)
	for v := range b.removed {
		delete(b.state, v)
	}
	if b.revision, b.going = revision, kindNone; b.synced {
		if b.whole == nil {
			b.whole = map[uint64]map[string]vip.State{}
		}
		b.whole[revision] = b.state
	}
	return true
}

// hostileLB is a load balancer that executes a byte string as a script: several streams, each with
// valid and invalid messages.
type hostileLB struct {
	program  []byte
	now      time.Time
	merger   *updateMerger
	gate     *gateFixture
	open     []*hostileStream
	ever     []*hostileStream
	before   Position // returned by an earlier take
	accepted int      // streams on which a message was accepted
	counts   string   // the instance of the newest synced stream
	latest   int      // the latest stream that supplied its state
}

type hostileStream struct {
	decoder  decoder
	stream   streamState
	book     book
	instance string
	leaseEnd time.Time // positions after its first synced snapshot
	number   int       // in the order of the first messages
}

func (x *hostileLB) next() byte {
	if len(x.program) == 0 {
		return 0
	}
	b := x.program[0]
	x.program = x.program[1:]
	return b
}

const hostileVIPs = 8

// crowd holds the VIPs of a huge message.
var crowd = func() []*readinessv1.ReadinessGroup {
	var names []string
	for i := range 3000 {
		names = append(names, numbered(1000+i).String())
	}
	return readyGroup(names...)
}

func (x *hostileLB) vip(b byte) string {
	if b>>6 == 3 {
		return "0.0.0.0/0"
	}
	return numbered(int(b % hostileVIPs)).String()
}

// values decodes the VIPs of a message.
func (x *hostileLB) values() []*readinessv1.ReadinessGroup {
	n := x.next()
	var ms []*readinessv1.ReadinessGroup
	if n >= 250 {
		ms = crowd()
	}
	for range n % 5 {
		b := x.next()
		if b>>6 == 1 && len(ms) > 0 { // another VIP of the group
			group := ms[len(ms)-1]
			group.Vips = append(group.Vips, x.vip(b))
			continue
		}
		r := &readinessv1.VipReadiness{State: [...]readinessv1.VipState{
			readinessv1.VipState_VIP_STATE_READY, readinessv1.VipState_VIP_STATE_READY, readinessv1.VipState_VIP_STATE_READY,
			readinessv1.VipState_VIP_STATE_NOT_READY, readinessv1.VipState_VIP_STATE_NOT_READY,
			readinessv1.VipState_VIP_STATE_DRAINING, readinessv1.VipState_VIP_STATE_UNSPECIFIED, 99,
		}[b>>3&7]}
		if r.State == readinessv1.VipState_VIP_STATE_DRAINING {
			r.DrainFor = durationpb.New(time.Duration(x.next()-5) * 100 * time.Millisecond)
		}
		r.Reason = readinessv1.VipReason(b)
		ms = append(ms, &readinessv1.ReadinessGroup{Readiness: r, Vips: []string{x.vip(b)}})
	}
	return ms
}

var hostileLeases = [...]*durationpb.Duration{
	nil,
	{},
	{Nanos: 999_999},
	{Nanos: 1_000_000},
	{Nanos: 100_000_000},
	{Seconds: 2},
	{Seconds: 3600},
	{Seconds: 3600, Nanos: 1},
	{Seconds: -1},
	{Seconds: 1, Nanos: -1},
	{Seconds: 315_576_000_001},
	{Seconds: 1},
}

// message decodes a message. Small bytes produce mostly valid ones.
func (x *hostileLB) message(s *hostileStream) *response {
	shape := x.next()
	step := x.next()
	at := max(s.book.revision, s.book.goingAt)
	if step < 128 {
		at += uint64(step % 3)
	} else {
		at += uint64(int64(int8(step)))
	}
	m := message(at, func(m *response) {
		m.Position.InstanceId, m.WatchId, m.StaleGrace = s.instance, "w", durationpb.New(500*time.Millisecond)
	})
	last, synced := shape>>3&1 == 0, shape>>4&1 == 0
	if shape>>5&1 == 1 {
		m.Position.InstanceId = [...]string{"a", "b", "", strings.Repeat("x", 129)}[x.next()%4]
	}
	if shape>>6&1 == 1 {
		m.WatchId = [...]string{"", "v", strings.Repeat("x", 129), "w"}[x.next()%4]
	}
	if shape>>7 == 1 {
		m.Lease = hostileLeases[int(x.next())%len(hostileLeases)]
	}
	switch shape & 7 {
	case 0, 1:
		m.Event = &readinessv1.WatchReadinessResponse_Snapshot{Snapshot: &readinessv1.Snapshot{
			Groups: x.values(),
			Synced: synced, Last: last,
		}}
	case 2, 3:
		d := &readinessv1.Delta{Changed: x.values(), Last: last}
		for range x.next() % 3 {
			d.Removed = append(d.Removed, x.vip(x.next()))
		}
		m.Event = &readinessv1.WatchReadinessResponse_Delta{Delta: d}
	case 4, 5:
		heartbeat(m)
	case 6:
		goingAway(time.Duration(int8(x.next())) * 50 * time.Millisecond)(m)
	}
	return m
}

func (x *hostileLB) stream(b byte) *hostileStream {
	if len(x.open) == 0 {
		return x.start("a")
	}
	return x.open[int(b)%len(x.open)]
}

func (x *hostileLB) start(instance string) *hostileStream {
	s := &hostileStream{instance: instance}
	x.open, x.ever = append(x.open, s), append(x.ever, s)
	return s
}

func (x *hostileLB) end(s *hostileStream, err error) {
	for i, o := range x.open {
		if o == s {
			x.open = append(x.open[:i:i], x.open[i+1:]...)
		}
	}
	x.merger.end(&s.stream, x.now, err)
}

// send passes a message to the watcher's merger, as a connection does.
func (x *hostileLB) send(t *testing.T, s *hostileStream, m *response) {
	t.Helper()
	before := x.merger.pending
	allowed := s.book.accepts(m)
	said, err := s.decoder.decode(m, x.now)
	if (err == nil) != allowed {
		t.Fatalf("the protocol allows it: %v; the decoder says %v\n%v", allowed, err, m)
	}
	if err == nil {
		err = x.merger.merge(&s.stream, said, x.now)
		if wentBack := said.kind == kindSnapshot && said.synced && before.Position.InstanceID == s.book.instance &&
			said.position.Revision < before.Position.Revision && !before.Synced; (err != nil) != wentBack {
			t.Fatalf("stream %d at %+v, state at %+v: %v", s.number, said.position, before.Position, err)
		}
	}
	if err != nil {
		x.end(s, err)
		return
	}
	if s.number == 0 {
		x.accepted++
		s.number = x.accepted
	}
	if e := m.GetSnapshot(); e.GetSynced() && e.GetLast() && (s.number >= x.latest || s.book.instance == x.counts) {
		if s.book.instance != x.counts {
			x.before = Position{} // even if the states in between were not taken
		}
		x.counts, x.latest = s.book.instance, max(x.latest, s.number)
	}
	if s.book.synced {
		if end := x.now.Add(m.GetLease().AsDuration()); end.After(s.leaseEnd) {
			s.leaseEnd = end
		}
	}
}

// take takes an update and compares it with the sent states.
func (x *hostileLB) take(t *testing.T) {
	t.Helper()
	u := x.merger.take()
	x.gate.update(x.now, u)
	p := u.Position
	if p == (Position{}) {
		if u.Synced || len(u.Changed)+len(u.Removed) > 0 {
			t.Fatalf("something was handed over before anything was synced: %+v", u)
		}
		return
	}
	if p.InstanceID != x.counts {
		t.Fatalf("the state is that of %q, though %q is newer", p.InstanceID, x.counts)
	}
	if p.InstanceID == x.before.InstanceID && p.Revision < x.before.Revision {
		t.Fatalf("%+v was handed over after %+v", p, x.before)
	}
	x.before = p
	var candidates []*hostileStream // complete states of this instance
	for _, s := range x.ever {
		if s.book.instance == p.InstanceID && len(s.book.whole) > 0 {
			candidates = append(candidates, s)
		}
	}
	got := map[string]vip.State{}
	for v, r := range x.gate.view.vips {
		got[v.String()] = r.State
	}
	known := false
	for _, s := range candidates {
		want, ok := s.book.whole[p.Revision]
		known = known || ok
		if len(candidates) == 1 && !maps.Equal(got, want) {
			t.Fatalf("at %+v: got %v, want %v", p, got, want)
		}
	}
	if !known {
		t.Fatalf("no stream sent a complete state at %+v", p)
	}
	for v, state := range got {
		said := false
		for _, s := range candidates {
			for _, whole := range s.book.whole {
				if is, ok := whole[v]; ok && is == state {
					said = true
				}
			}
		}
		if !said {
			t.Fatalf("at %+v: no stream sent that %s is %v", p, v, state)
		}
	}
}

// evaluate evaluates the gate and compares the decisions with the leases.
func (x *hostileLB) evaluate(t *testing.T) {
	t.Helper()
	changes := x.gate.evaluate(x.now)
	live := x.gate.Freshness(x.now) == gate.Live
	vouched := false
	instance, _ := x.gate.Position()
	for _, s := range x.ever {
		vouched = vouched || s.book.instance == instance && x.now.Before(s.leaseEnd)
	}
	if live && !vouched {
		t.Fatalf("the state of %q is live after its lease", instance)
	}
	for _, c := range changes {
		if announces(c) && (!live || x.gate.view.vips[c.VIP].State != vip.Ready) {
			t.Fatalf("%+v: live is %v, the state %v", c, live, x.gate.view.vips[c.VIP])
		}
	}
}

// FuzzWatcher feeds a watcher's merger and its gate with the messages of a load balancer that
// executes a byte string as a script.
func FuzzWatcher(f *testing.F) {
	const advance, open, end, take, say = 0, 1, 2, 3, 4
	f.Add([]byte{say, 0, 0, 1, 2, 0, 1, take, say, 0, 4, 0, take, advance, 60, take})
	f.Add([]byte{say, 0, 8, 1, 1, 0, say, 0, 0, 0, 1, 1, take, say, 0, 2, 1, 1, 0x18, 1, 1, take})
	f.Add([]byte{say, 0, 0, 1, 1, 0, take, open, 1, say, 1, 16, 1, 1, 1, take, say, 1, 0, 1, 1, 2, take, end, 0, take})
	f.Fuzz(func(t *testing.T, program []byte) {
		x := &hostileLB{program: program, now: time.Now(), merger: newUpdateMerger()}
		var configured []vip.VIP
		for i := range hostileVIPs {
			configured = append(configured, numbered(i))
		}
		x.gate = newGateFixture(configured...)
		for steps := 0; len(x.program) > 0 && steps < 400; steps++ {
			switch x.next() % 8 {
			case advance:
				x.now = x.now.Add(time.Duration(x.next()) * 20 * time.Millisecond)
			case open:
				if len(x.open) < 4 {
					x.start([...]string{"a", "b", "c"}[x.next()%3])
				}
			case end:
				x.end(x.stream(x.next()), errMoved)
			case take:
				x.take(t)
			default:
				s := x.stream(x.next())
				x.send(t, s, x.message(s))
			}
			x.evaluate(t)
			if n := x.merger.waiting(); n > hostileVIPs+3000 {
				t.Fatalf("%d values wait", n)
			}
		}
		for len(x.open) > 0 {
			x.end(x.open[0], errStopped)
		}
		x.take(t)
		if x.evaluate(t); x.gate.Freshness(x.now) == gate.Live || x.gate.Synced || x.gate.Open {
			t.Fatalf("all streams ended: %+v", x.gate.Update)
		}
		x.now = x.now.Add(500 * time.Millisecond)
		if x.evaluate(t); x.gate.Freshness(x.now) != gate.Lost {
			t.Fatal("the grace does not end")
		}
		for _, v := range configured {
			if d := x.gate.Decision(v); d.Advertisement != gate.Withdrawn {
				t.Fatalf("%s is %v though the load balancer is lost", v, d)
			}
		}
	})
}
