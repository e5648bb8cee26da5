package readiness

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// mergerFixture is one stream into a merger.
type mergerFixture struct {
	t        *testing.T
	b        *updateMerger
	d        decoder
	h        streamState
	instance string
}

func (f *mergerFixture) tryMerge(at time.Time, m *response) error {
	if f.instance != "" {
		m.Position.InstanceId = f.instance
	}
	s, err := f.d.decode(m, at)
	if err != nil {
		return err
	}
	return f.b.merge(&f.h, s, at)
}

func (f *mergerFixture) merge(at time.Time, ms ...*response) {
	f.t.Helper()
	for _, m := range ms {
		harness.Must(f.t, f.tryMerge(at, m))
	}
}

func names(u Update) string {
	var changed, removed []string
	for _, v := range vip.NewSet(keys(u)...).Sorted() {
		changed = append(changed, v.String())
	}
	for _, v := range vip.NewSet(u.Removed...).Sorted() {
		removed = append(removed, v.String())
	}
	return fmt.Sprintf("complete=%v changed=%v removed=%v", u.Complete, changed, removed)
}

func keys(u Update) []vip.VIP {
	var vs []vip.VIP
	for _, r := range u.Changed {
		vs = append(vs, r.VIP)
	}
	return vs
}

// waiting returns the number of values that are pending for Take.
func (m *updateMerger) waiting() int {
	n := len(m.pending.Changed) + len(m.pending.Removed)
	if m.merged != nil {
		n += len(m.merged.changed)
	}
	return n
}

const (
	v1 = "20.0.0.1/32"
	v2 = "20.0.0.2/32"
	v3 = "20.0.0.3/32"
)

func TestTakeMergesNewest(t *testing.T) {
	b := newUpdateMerger()
	f := &mergerFixture{t: t, b: b}
	t0 := time.Now()
	f.merge(t0, message(1, snapshotOf(true, v1, v2)))
	f.merge(t0.Add(1), message(2, deltaOf(true, v3), removing(v1)))
	if u := b.take(); names(u) != "complete=true changed=[20.0.0.2/32 20.0.0.3/32] removed=[]" || !u.ReceivedAt.Equal(t0) {
		t.Fatalf("%s received at +%v", names(u), u.ReceivedAt.Sub(t0))
	}
	f.merge(t0.Add(2), message(3, deltaOf(true, v1), removing(v2)))
	f.merge(t0.Add(3), message(4, deltaOf(true, v2), removing(v1)))
	if u := b.take(); names(u) != "complete=false changed=[20.0.0.2/32] removed=[20.0.0.1/32]" ||
		!u.ReceivedAt.Equal(t0.Add(2)) || u.Position.Revision != 4 {
		t.Fatalf("%s at %+v", names(u), u.Position)
	}
	f.merge(t0.Add(4), message(4, heartbeat))
	if u := b.take(); names(u) != "complete=false changed=[] removed=[]" || !u.ReceivedAt.IsZero() ||
		!u.LeaseEnd.Equal(t0.Add(4+time.Second)) {
		t.Fatalf("after a heartbeat: %+v", u)
	}
}

func TestUnsyncedInstanceIsIgnored(t *testing.T) {
	b := newUpdateMerger()
	t0 := time.Now()
	old := &mergerFixture{t: t, b: b, instance: "old"}
	old.merge(t0, message(9, snapshotOf(true, v1, v2)))
	b.end(&old.h, t0.Add(time.Millisecond), fmt.Errorf("gone"))
	fresh := &mergerFixture{t: t, b: b, instance: "fresh"}
	fresh.merge(t0.Add(2*time.Millisecond), message(1, snapshotOf(true, v1), unsynced), message(1, heartbeat),
		message(1, goingAway(time.Minute)))
	u := b.take()
	if !u.Open || u.Synced || u.Position.InstanceID != "old" || !u.EndedAt.Equal(t0.Add(time.Millisecond)) ||
		!u.LeaseEnd.Equal(t0.Add(time.Second)) || u.GoingAway {
		t.Fatalf("while the new instance is not synced: %+v", u)
	}
	fresh.merge(t0.Add(3*time.Millisecond), message(2, snapshotOf(true, v2)))
	u = b.take()
	if !u.Synced || !u.EndedAt.IsZero() || u.Position != (Position{"fresh", 2}) || !u.GoingAway ||
		names(u) != "complete=true changed=[20.0.0.2/32] removed=[]" {
		t.Fatalf("once it is: %+v", u)
	}
}

func TestTwoStreamsOfOneInstance(t *testing.T) {
	b := newUpdateMerger()
	t0 := time.Now()
	first, second := &mergerFixture{t: t, b: b}, &mergerFixture{t: t, b: b}
	first.merge(t0, message(5, snapshotOf(true, v1, v2)))
	b.take()
	// The second stream is ahead: its snapshot wins, and the older delta of the first stream is
	// ignored.
	second.merge(t0.Add(1), message(7, snapshotOf(true, v2, v3)))
	first.merge(t0.Add(2), message(6, deltaOf(true, v1)))
	if u := b.take(); u.Position.Revision != 7 ||
		names(u) != "complete=true changed=[20.0.0.2/32 20.0.0.3/32] removed=[]" {
		t.Fatalf("after the newer snapshot: %s at %+v", names(u), u.Position)
	}
	// The first stream that receives the next revision supplies it.
	first.merge(t0.Add(3), message(8, deltaOf(true, v3), removing(v1, v2)))
	second.merge(t0.Add(4), message(8, deltaOf(true), removing(v2)))
	if u := b.take(); u.Position.Revision != 8 ||
		names(u) != "complete=false changed=[20.0.0.3/32] removed=[20.0.0.1/32 20.0.0.2/32]" {
		t.Fatalf("after revision 8: %s", names(u))
	}
	// The later lease end wins, even if the shorter lease arrived last.
	long := t0.Add(5 + time.Second)
	first.merge(t0.Add(5), message(8, heartbeat))
	second.merge(t0.Add(6), message(8, heartbeat, leaseOf(message(1).Lease),
		func(m *response) { m.Lease.Seconds, m.Lease.Nanos = 0, 1e8 }))
	if u := b.take(); !u.LeaseEnd.Equal(long) {
		t.Fatalf("the lease ends %v after the right moment", u.LeaseEnd.Sub(long))
	}
	// The end of one stream does not end the lease.
	b.end(&first.h, t0.Add(7), fmt.Errorf("gone"))
	if u := b.take(); !u.Open || !u.Synced || u.Err != nil || !u.ReceivedAt.IsZero() {
		t.Fatalf("after the end of the first: %+v", u)
	}
	b.end(&second.h, t0.Add(8), fmt.Errorf("gone"))
	if u := b.take(); u.Open || u.Synced || u.Err == nil || !u.EndedAt.Equal(t0.Add(8)) || u.Position.Revision != 8 {
		t.Fatalf("after the end of both: %+v", u)
	}
}

func TestMoveWithoutChanges(t *testing.T) {
	b := newUpdateMerger()
	first, second := &mergerFixture{t: t, b: b}, &mergerFixture{t: t, b: b}
	first.merge(time.Now(), message(5, snapshotOf(true, v1)))
	b.take()
	second.merge(time.Now(), message(5, snapshotOf(true, v1)))
	b.end(&first.h, time.Now(), errMoved)
	if u := b.take(); u.Complete || u.Changed != nil || !u.Synced || !u.ReceivedAt.IsZero() {
		t.Fatalf("%+v", u)
	}
	second.merge(time.Now(), message(6, deltaOf(true, v2)))
	if u := b.take(); names(u) != "complete=false changed=[20.0.0.2/32] removed=[]" {
		t.Fatalf("the second stream's delta: %s", names(u))
	}
}

func TestUpdateAfterLossIsComplete(t *testing.T) {
	b := newUpdateMerger()
	first, second, third := &mergerFixture{t: t, b: b}, &mergerFixture{t: t, b: b}, &mergerFixture{t: t, b: b}
	first.merge(time.Now(), message(5, snapshotOf(true, v1)))
	b.end(&first.h, time.Now(), errMoved)
	b.take()
	if err := third.tryMerge(time.Now(), message(4, snapshotOf(true, v1))); err == nil ||
		!strings.Contains(err.Error(), "went back from 5 to 4") {
		t.Fatalf("an older state of the same instance: %v", err)
	}
	second.merge(time.Now(), message(5, snapshotOf(true, v1)))
	if u := b.take(); !u.Complete || !u.Synced || len(u.Changed) != 1 {
		t.Fatalf("%+v", u)
	}
}

func TestNewerInstanceWins(t *testing.T) {
	b := newUpdateMerger()
	t0 := time.Now()
	old, fresh := &mergerFixture{t: t, b: b, instance: "old"}, &mergerFixture{t: t, b: b, instance: "fresh"}
	old.merge(t0, message(900, snapshotOf(true, v1)))
	fresh.merge(t0, message(1, snapshotOf(true, v2)))
	b.take()
	old.merge(t0.Add(time.Hour), message(901, deltaOf(true, v1)), message(902, snapshotOf(true, v1, v3)),
		message(902, goingAway(time.Second)))
	if u := b.take(); u.Position != (Position{"fresh", 1}) || len(u.Changed) != 0 || u.GoingAway ||
		!u.LeaseEnd.Equal(t0.Add(time.Second)) {
		t.Fatalf("the old instance changed the state: %+v", u)
	}
	b.end(&fresh.h, t0.Add(2), fmt.Errorf("gone"))
	old.merge(t0.Add(time.Hour), message(903, snapshotOf(true, v1, v3)))
	if u := b.take(); u.Position != (Position{"fresh", 1}) || u.Synced || !u.Open {
		t.Fatalf("the old instance changed the state after the end of the newer: %+v", u)
	}
}

func TestMergedVIPLimit(t *testing.T) {
	b := newUpdateMerger()
	f := &mergerFixture{t: t, b: b}
	f.merge(time.Now(), message(1, snapshotOf(true)))
	b.take() // and never again
	var previous []string
	for i := 0; ; i++ {
		var add []string
		for j := range MaxVIPsPerMessage / 2 {
			add = append(add, fmt.Sprintf("2000:%x::%x/128", i+1, j+1))
		}
		m := message(uint64(i+2), deltaOf(true, add...), removing(previous...))
		previous = add
		if err := f.tryMerge(time.Now(), m); err != nil {
			if !strings.Contains(err.Error(), "faster than") || i < 100 {
				t.Fatalf("delta %d: %v", i, err)
			}
			return
		}
		if n := b.waiting(); n > 2*MaxVIPs {
			t.Fatalf("%d values wait for a consumer that does not come", n)
		}
	}
}

func states(rs []VIPReadiness) map[vip.VIP]vip.State {
	m := make(map[vip.VIP]vip.State, len(rs))
	for _, r := range rs {
		m[r.VIP] = r.State
	}
	return m
}

func TestMergedChangesKeepOrder(t *testing.T) {
	b := newUpdateMerger()
	f := &mergerFixture{t: t, b: b}
	f.merge(time.Now(), message(1, snapshotOf(true)))
	b.take()
	f.merge(time.Now(), message(2, deltaOf(true, v3, v1)), message(3, deltaOf(true, v2), removing(v3)),
		message(4, deltaOf(true, v1)), message(5, deltaOf(true, v3), removing(v2)))
	u := b.take()
	if got, want := keys(u), []vip.VIP{vip.Require(v3), vip.Require(v1)}; !slices.Equal(got, want) ||
		!slices.Equal(u.Removed, []vip.VIP{vip.Require(v2)}) {
		t.Fatalf("changed %v, removed %v", got, u.Removed)
	}
	if b.merged != nil || b.waiting() != 0 {
		t.Fatalf("%d values remain", b.waiting())
	}
}

// TestHandOver asserts that the work after the last part of a revision does not depend on its
// number of VIPs.
func TestHandOver(t *testing.T) {
	for _, n := range []int{1, 10_000} {
		b := newUpdateMerger()
		s := streamState{seq: 1, instance: "a", synced: true}
		b.pending.Position = Position{"a", 1}
		e := event{kind: kindDelta, synced: true, position: Position{"a", 1}, changed: numberedReady(n), lease: time.Second}
		at := time.Now()
		if allocs := testing.AllocsPerRun(10, func() {
			e.position.Revision++
			harness.Must(t, b.merge(&s, e, at))
			if u := b.take(); len(u.Changed) != n || &u.Changed[0] != &e.changed[0] {
				t.Fatalf("%d VIPs were copied", len(u.Changed))
			}
		}); allocs > 0 {
			t.Errorf("%d VIPs: %v allocations", n, allocs)
		}
	}
}

func TestPartsWakeForLease(t *testing.T) {
	b := newUpdateMerger()
	f := &mergerFixture{t: t, b: b}
	woken := func() bool {
		select {
		case <-b.changed:
			return true
		default:
			return false
		}
	}
	at := time.Now()
	f.merge(at, message(1, snapshotOf(true, v1)))
	if !woken() {
		t.Fatal("the snapshot wakes no consumer")
	}
	for i := range 50 {
		at = at.Add(time.Millisecond)
		f.merge(at, message(2, deltaOf(false, numbered(i).String())))
		if woken() {
			t.Fatalf("part %d wakes the consumer", i)
		}
	}
	// The lease of 1 s is renewed while the parts take longer than that.
	at = at.Add(50 * time.Millisecond)
	f.merge(at, message(2, deltaOf(false)))
	if !woken() || !b.take().LeaseEnd.Equal(at.Add(time.Second)) {
		t.Fatal("a part renews no lease")
	}
	f.merge(at, message(2, deltaOf(true)))
	if u := b.take(); !woken() || len(u.Changed) != 50 {
		t.Fatalf("the last part: %d VIPs", len(u.Changed))
	}
}

func TestConsumedByReceiver(t *testing.T) {
	b := newUpdateMerger()
	consumed, accept := "", true
	b.consume = func() bool {
		if accept {
			consumed = names(b.take())
		}
		return accept
	}
	f := &mergerFixture{t: t, b: b}
	notified := func() bool {
		select {
		case <-b.changed:
			b.take()
			return true
		default:
			return false
		}
	}
	t0 := time.Now()
	f.merge(t0, message(1, snapshotOf(true, v1)))
	// A pending token may announce more than MaxInline changes.
	f.merge(t0, message(2, deltaOf(true, v2)))
	if consumed != "" || !notified() {
		t.Fatalf("a snapshot: consumed %s", consumed)
	}
	f.merge(t0, message(3, deltaOf(true, v2), removing(v1)))
	if consumed != "complete=false changed=[20.0.0.2/32] removed=[20.0.0.1/32]" || notified() {
		t.Fatalf("a delta: consumed %s", consumed)
	}
	consumed = ""
	f.merge(t0, message(3, heartbeat))
	if consumed != "" || !notified() {
		t.Fatalf("a heartbeat: consumed %s", consumed)
	}
	many := make([]string, MaxInline+1)
	for i := range many {
		many[i] = numbered(i).String()
	}
	f.merge(t0, message(4, deltaOf(true, many...)))
	if consumed != "" || !notified() {
		t.Fatalf("many VIPs: consumed %s", consumed)
	}
	accept = false
	f.merge(t0, message(5, deltaOf(true, v3)))
	if !notified() {
		t.Fatal("no token for a delta that was not consumed")
	}
}
