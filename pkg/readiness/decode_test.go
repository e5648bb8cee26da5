package readiness

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"pgregory.net/rapid"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// Valid messages of the load balancer "a", with changes.

func message(revision uint64, change ...func(*response)) *response {
	m := &response{
		Position: &readinessv1.Position{InstanceId: "a", Revision: revision},
		Lease:    durationpb.New(time.Second),
	}
	for _, c := range change {
		c(m)
	}
	return m
}

// readyGroup returns the VIPs as one group; none if there are no VIPs.
func readyGroup(names ...string) []*readinessv1.ReadinessGroup {
	if len(names) == 0 {
		return nil
	}
	return []*readinessv1.ReadinessGroup{{
		Readiness: &readinessv1.VipReadiness{State: readinessv1.VipState_VIP_STATE_READY}, Vips: names,
	}}
}

func snapshotOf(last bool, names ...string) func(*response) {
	return func(m *response) {
		m.WatchId = "w"
		m.Event = &readinessv1.WatchReadinessResponse_Snapshot{Snapshot: &readinessv1.Snapshot{
			Groups: readyGroup(names...),
			Synced: true, Last: last,
		}}
	}
}

func unsynced(m *response) { m.GetSnapshot().Synced = false }

func deltaOf(last bool, names ...string) func(*response) {
	return func(m *response) {
		delta := &readinessv1.Delta{Changed: readyGroup(names...), Last: last}
		m.Event = &readinessv1.WatchReadinessResponse_Delta{Delta: delta}
	}
}

func removing(names ...string) func(*response) {
	return func(m *response) { m.GetDelta().Removed = names }
}

func heartbeat(m *response) {
	m.Event = &readinessv1.WatchReadinessResponse_Heartbeat{Heartbeat: &readinessv1.Heartbeat{}}
}

func goingAway(drain time.Duration) func(*response) {
	return func(m *response) {
		m.Event = &readinessv1.WatchReadinessResponse_GoingAway{
			GoingAway: &readinessv1.GoingAway{DrainFor: durationpb.New(drain)},
		}
	}
}

func leaseOf(d *durationpb.Duration) func(*response) { return func(m *response) { m.Lease = d } }

func TestDecoderRejectsViolations(t *testing.T) {
	const v = "20.0.0.1/32"
	begin := message(5, snapshotOf(true, v))
	tests := []struct {
		name     string
		messages []*response // the last one is invalid
		problem  string
	}{
		{"no lease", []*response{message(5, snapshotOf(true), leaseOf(nil))}, "lease"},
		{"lease 0", []*response{begin, message(5, heartbeat, leaseOf(durationpb.New(0)))}, "lease"},
		{"lease under 1 ms", []*response{message(5, snapshotOf(true), leaseOf(durationpb.New(time.Millisecond-1)))}, "lease"},
		{"negative lease", []*response{message(5, snapshotOf(true), leaseOf(durationpb.New(-time.Second)))}, "lease"},
		{
			"invalid lease",
			[]*response{message(5, snapshotOf(true), leaseOf(&durationpb.Duration{Seconds: 1, Nanos: -1}))},
			"lease",
		},
		{"endless lease", []*response{message(5, snapshotOf(true),
			leaseOf(&durationpb.Duration{Seconds: 315_576_000_000}))}, "lease"},
		{"no position", []*response{message(5, snapshotOf(true), func(m *response) { m.Position = nil })}, "instance_id"},
		{
			"no instance",
			[]*response{message(5, snapshotOf(true), func(m *response) { m.Position.InstanceId = "" })},
			"instance_id",
		},
		{"long instance", []*response{message(5, snapshotOf(true),
			func(m *response) { m.Position.InstanceId = strings.Repeat("x", 129) })}, "instance_id"},
		{"revision 0", []*response{message(0, snapshotOf(true))}, "revision is 0"},
		{
			"other instance",
			[]*response{begin, message(6, heartbeat, func(m *response) { m.Position.InstanceId = "b" })},
			"instance_id changed",
		},
		{"revision goes back", []*response{begin, message(4, deltaOf(true, v))}, "went back from 5 to 4"},
		{"heartbeat goes back", []*response{begin, message(4, heartbeat)}, "went back"},
		{"heartbeat goes ahead", []*response{begin, message(6, heartbeat)}, "without a delta"},
		{"going away goes ahead", []*response{begin, message(6, goingAway(0))}, "without a delta"},
		{"delta does not advance", []*response{begin, message(5, deltaOf(true, v))}, "did not advance"},
		{"delta first", []*response{message(5, deltaOf(true, v))}, "not a snapshot"},
		{"heartbeat first", []*response{message(5, heartbeat)}, "not a snapshot"},
		{"no watch", []*response{message(5, snapshotOf(true), func(m *response) { m.WatchId = "" })}, "watch_id"},
		{"long watch", []*response{message(5, snapshotOf(true),
			func(m *response) { m.WatchId = strings.Repeat("x", 129) })}, "watch_id"},
		{"negative stale grace", []*response{message(5, snapshotOf(true),
			func(m *response) { m.StaleGrace = durationpb.New(-1) })}, "stale_grace"},
		{"endless stale grace", []*response{message(5, snapshotOf(true),
			func(m *response) { m.StaleGrace = durationpb.New(1000 * time.Hour) })}, "stale_grace"},
		{"no event", []*response{begin, message(6)}, "no known event"},
		{
			"last part missing: heartbeat",
			[]*response{message(5, snapshotOf(false, v)), message(5, heartbeat)},
			"last part of revision 5",
		},
		{
			"last part missing: delta",
			[]*response{begin, message(6, deltaOf(false, v)), message(7, deltaOf(true, v))},
			"last part of revision 6",
		},
		{
			"last part missing: snapshot",
			[]*response{begin, message(6, deltaOf(false, v)), message(6, snapshotOf(true, v))},
			"last part of revision 6",
		},
		{"VIP twice in a snapshot", []*response{message(5, snapshotOf(true, v, v))}, "twice"},
		{"VIP twice in parts", []*response{message(5, snapshotOf(false, v)), message(5, snapshotOf(true, v))}, "twice"},
		{"VIP changed and removed", []*response{begin, message(6, deltaOf(true, v), removing(v))}, "twice"},
		{"VIP removed twice", []*response{begin, message(6, deltaOf(true), removing(v, v))}, "twice"},
		{"bad VIP", []*response{message(5, snapshotOf(true, "nonsense"))}, "not a prefix"},
		{"default route", []*response{message(5, snapshotOf(true, "0.0.0.0/0"))}, "default route"},
		{"VIP not canonical", []*response{message(5, snapshotOf(true, "2000:0::1/128"))}, "use 2000::1/128"},
		{"bad removed VIP", []*response{begin, message(6, deltaOf(true), removing("::/0"))}, "default route"},
		{
			"no state",
			[]*response{message(5, snapshotOf(true, v), func(m *response) { m.GetSnapshot().Groups[0].Readiness.State = 0 })},
			"unknown state",
		},
		{"new state", []*response{message(5, snapshotOf(true, v),
			func(m *response) { m.GetSnapshot().Groups[0].Readiness.State = 99 })}, "unknown state"},
		{"negative drain", []*response{begin, message(5, goingAway(-1))}, "drain_for"},
		{"negative drain of a VIP", []*response{message(5, snapshotOf(true, v), func(m *response) {
			m.GetSnapshot().Groups[0].Readiness.State = readinessv1.VipState_VIP_STATE_DRAINING
			m.GetSnapshot().Groups[0].Readiness.DrainFor = durationpb.New(-1)
		})}, "drain_for"},
		{"synced taken back", []*response{begin, message(6, snapshotOf(true, v), unsynced)}, "unsynced snapshot after"},
		{"nil message", []*response{begin, nil}, "lease"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var d decoder
			for i, m := range tt.messages {
				_, err := d.decode(m, time.Now())
				if last := i == len(tt.messages)-1; !last && err != nil {
					t.Fatalf("message %d: %v", i, err)
				} else if last && (err == nil || !strings.Contains(err.Error(), tt.problem)) {
					t.Fatalf("error %v, want one with %q", err, tt.problem)
				}
			}
		})
	}
}

func TestDecoderVIPLimit(t *testing.T) {
	var d decoder
	for part := 0; ; part++ {
		var names []string
		for i := range MaxVIPsPerMessage {
			n := part*MaxVIPsPerMessage + i
			names = append(names, numbered(n).String())
		}
		_, err := d.decode(message(1, snapshotOf(false, names...)), time.Now())
		if part < MaxVIPs/MaxVIPsPerMessage {
			if err != nil {
				t.Fatalf("part %d: %v", part, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), "more than 200000 VIPs") {
			t.Fatalf("part %d: error %v", part, err)
		}
		return
	}
}

func TestDecoderAssemblesParts(t *testing.T) {
	at := time.Now()
	var d decoder
	steps := []struct {
		m        *response
		kind     kind
		revision uint64
		changed  int
		removed  int
	}{
		{message(5, snapshotOf(false, "20.0.0.1/32")), kindNone, 0, 0, 0},
		{message(5, snapshotOf(true, "20.0.0.2/32")), kindSnapshot, 5, 2, 0},
		{message(5, heartbeat), kindHeartbeat, 5, 0, 0},
		{message(7, deltaOf(false, "20.0.0.1/32")), kindNone, 5, 0, 0},
		{message(7, deltaOf(false), removing("20.0.0.2/32")), kindNone, 5, 0, 0},
		{message(7, deltaOf(true)), kindDelta, 7, 1, 1},
		{message(7, goingAway(time.Second)), kindGoingAway, 7, 0, 0},
		{message(7, snapshotOf(true)), kindSnapshot, 7, 0, 0},
	}
	for i, step := range steps {
		s, err := d.decode(step.m, at)
		if err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
		if s.kind != step.kind || s.position.Revision != step.revision || len(s.changed) != step.changed ||
			len(s.removed) != step.removed || s.lease != time.Second {
			t.Fatalf("message %d gave %+v", i, s)
		}
		if s.kind == kindGoingAway && !s.drainEnd.Equal(at.Add(time.Second)) {
			t.Fatalf("draining ends %v after the receipt", s.drainEnd.Sub(at))
		}
	}
}

func TestDecoderDiscardsUnsyncedData(t *testing.T) {
	var d decoder
	for i, m := range []*response{
		message(1, snapshotOf(true, "20.0.0.1/32"), unsynced),
		message(2, deltaOf(true, "20.0.0.2/32")),
	} {
		if s, err := d.decode(m, time.Now()); err != nil || s.synced || s.changed != nil || s.removed != nil {
			t.Fatalf("message %d: %+v, %v", i, s, err)
		}
	}
	if s, err := d.decode(message(3, snapshotOf(true, "20.0.0.3/32")), time.Now()); err != nil || !s.synced ||
		len(s.changed) != 1 {
		t.Fatalf("synced: %+v, %v", s, err)
	}
}

func TestDecoderAcceptsUnknownReason(t *testing.T) {
	m := &readinessv1.VipReadiness{
		State: readinessv1.VipState_VIP_STATE_READY, Reason: 4711,
		Detail: "a\nb",
	}
	r, err := readinessFromProto(m, time.Now())
	if err != nil || r.State != vip.Ready || r.Reason != 0 || r.Detail != "a b" {
		t.Fatalf("%+v, %v", r, err)
	}
}

// FuzzDecoder decodes two arbitrary messages after a valid one: it must not panic, and the position
// must not go back.
func FuzzDecoder(f *testing.F) {
	for _, m := range []*response{
		message(5, snapshotOf(true, "20.0.0.1/32")), message(6, deltaOf(false, "20.0.0.1/32"), removing("2000::1/128")),
		message(5, heartbeat), message(5, goingAway(time.Second)),
		{},
	} {
		b, err := proto.Marshal(m)
		harness.Must(f, err)
		f.Add(b, b)
	}
	f.Fuzz(func(t *testing.T, first, second []byte) {
		var d decoder
		b, h := newUpdateMerger(), &streamState{}
		revision := uint64(0)
		feed := func(data []byte) bool {
			m := new(response)
			if proto.Unmarshal(data, m) != nil {
				return false
			}
			s, err := d.decode(m, time.Now())
			if err == nil {
				err = b.merge(h, s, time.Now())
			}
			if err != nil {
				return false
			}
			if s.position.Revision < revision || s.lease < minLease || s.lease > MaxLease {
				t.Fatalf("accepted %+v after revision %d", s, revision)
			}
			revision = s.position.Revision
			return true
		}
		begin, err := proto.Marshal(message(5, snapshotOf(true, "20.0.0.1/32")))
		harness.Must(t, err)
		for _, data := range [][]byte{begin, first, second} {
			if !feed(data) {
				return
			}
		}
	})
}

func TestLongDrainIsCapped(t *testing.T) {
	now := time.Now()
	long := VIPReadiness{State: vip.Draining, DrainEnd: now.Add(1000 * time.Hour)}
	m := long.Proto(now)
	r, err := readinessFromProto(m, now)
	if err != nil || r.DrainEnd.Sub(now) != maxStaleGrace {
		t.Errorf("drains until %v, %v", r.DrainEnd.Sub(now), err)
	}
}

func TestDecoderKeepsOrder(t *testing.T) {
	var d decoder
	if _, err := d.decode(message(1, snapshotOf(true, v3, v1)), time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.decode(message(2, deltaOf(false, v2), removing(v3)), time.Now()); err != nil {
		t.Fatal(err)
	}
	e, err := d.decode(message(2, deltaOf(true, v1)), time.Now())
	if err != nil || len(e.changed) != 2 || e.changed[0].VIP != vip.Require(v2) || e.changed[1].VIP != vip.Require(v1) ||
		!slices.Equal(e.removed, []vip.VIP{vip.Require(v3)}) {
		t.Fatalf("%+v, %v", e, err)
	}
}

// TestSnapshotGrowsInFewSteps receives 10 000 VIPs in parts. Each growth copies the staged VIPs.
func TestSnapshotGrowsInFewSteps(t *testing.T) {
	const parts, each = 40, 250
	var d decoder
	capacity, grown := 0, 0
	for part := range parts {
		var names []string
		for i := range each {
			names = append(names, numbered(part*each+i).String())
		}
		e, err := d.decode(message(1, snapshotOf(part == parts-1, names...)), time.Now())
		harness.Must(t, err)
		if got := max(cap(d.staged.changed), cap(e.changed)); got != capacity {
			capacity, grown = got, grown+1
		}
	}
	if grown > 5 || capacity > 4*parts*each {
		t.Errorf("grew %d times, to %d VIPs", grown, capacity)
	}
}

// TestDecoderMatchesSets decodes random revisions and compares the names of the watch with a set.
func TestDecoderMatchesSets(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		var d decoder
		state := map[string]bool{}
		for revision := range uint64(rapid.IntRange(1, 20).Draw(r, "revisions")) {
			anyName := rapid.SampledFrom([]string{v1, v2, v3, "2001::/64"})
			names := rapid.SliceOfNDistinct(anyName, 0, 4, rapid.ID).Draw(r, "names")
			count := rapid.IntRange(0, len(names)).Draw(r, "changed")
			m := message(revision+1, deltaOf(true, names[:count]...))
			if revision == 0 || rapid.IntRange(0, 4).Draw(r, "snapshot") == 0 {
				m, state = message(revision+1, snapshotOf(true, names[:count]...)), map[string]bool{}
			} else {
				removing(names[count:]...)(m)
				for _, name := range names[count:] {
					delete(state, name)
				}
			}
			for _, name := range names[:count] {
				state[name] = true
			}
			if _, err := d.decode(m, time.Now()); err != nil {
				r.Fatal(err)
			}
			got := map[string]bool{}
			for name, named := range d.names {
				got[name] = named.vip == vip.Require(name)
			}
			if !maps.Equal(got, state) {
				r.Fatalf("after revision %d: %v, want %v", revision+1, got, state)
			}
		}
	})
}

func TestLiveVIPLimit(t *testing.T) {
	var d decoder
	names := func(part int) (texts []string) {
		for i := range MaxVIPs / 2 {
			texts = append(texts, numbered(part<<18+i).String())
		}
		return texts
	}
	for part := range 2 {
		m := message(uint64(part+1), deltaOf(true, names(part)...))
		if part == 0 {
			m = message(1, snapshotOf(true, names(0)...))
		}
		if _, err := d.decode(m, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	replaced := message(3, deltaOf(true, "2000::1/128"), removing(names(0)[:1]...))
	if _, err := d.decode(replaced, time.Now()); err != nil {
		t.Fatalf("one VIP instead of another: %v", err)
	}
	_, err := d.decode(message(4, deltaOf(true, "2000::2/128")), time.Now())
	if err == nil || !strings.Contains(err.Error(), "sent more than 200000 VIPs") {
		t.Fatalf("error %v", err)
	}
}
