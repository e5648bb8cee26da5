package readiness

import (
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"
	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func TestUnchangedDecisionKeepsRevision(t *testing.T) {
	table := NewTable(TableOptions{})
	if p := table.Position(); p.Revision != 0 || p.InstanceID == "" {
		t.Fatalf("a new table is at %+v", p)
	}
	steps := []struct {
		name string
		d    Decision
		want uint64
	}{
		{"the first decision, even an empty one", Decision{}, 1},
		{"nothing", Decision{}, 1},
		{"a new VIP", Decision{Changed: []VIPReadiness{notReady("20.0.0.1/32")}}, 2},
		{"the same again", Decision{Changed: []VIPReadiness{notReady("20.0.0.1/32")}}, 2},
		{"synced", Decision{Synced: true}, 3},
		{"synced is not taken back", Decision{Synced: false}, 3},
		{"another state", Decision{Changed: []VIPReadiness{ready("20.0.0.1/32")}}, 4},
		{"several changes at once", Decision{
			Changed: []VIPReadiness{ready("20.0.0.2/32"), ready("20.0.0.3/32")},
			Removed: []vip.VIP{vip.Require("20.0.0.1/32")},
		}, 5},
		{"removed again", Decision{Removed: []vip.VIP{vip.Require("20.0.0.1/32"), vip.Require("20.0.0.9/32")}}, 5},
		{"back after a removal", Decision{Changed: []VIPReadiness{ready("20.0.0.1/32")}}, 6},
	}
	for _, s := range steps {
		if got := table.Commit(s.d); got != s.want {
			t.Fatalf("%s: revision %d, want %d", s.name, got, s.want)
		}
	}
	if s := table.State(); len(s.VIPs) != 3 || !s.Synced || s.VIPs[0].VIP.String() != "20.0.0.1/32" ||
		s.VIPs[2].VIP.String() != "20.0.0.3/32" {
		t.Fatalf("the state is %+v", s)
	}
}

func TestSinceFollowsState(t *testing.T) {
	table := NewTable(TableOptions{})
	v := vip.Require("20.0.0.1/32")
	t0 := time.Unix(1000, 0)
	table.Commit(Decision{Changed: []VIPReadiness{notReady("20.0.0.1/32")}, At: t0})
	r := notReady("20.0.0.1/32")
	r.Detail = "i/o timeout"
	table.Commit(Decision{Changed: []VIPReadiness{r}, At: t0.Add(time.Second)})
	if got := table.index[v]; !got.Since.Equal(t0) || got.Detail != "i/o timeout" {
		t.Fatalf("after another detail: %+v", got)
	}
	table.Commit(Decision{Changed: []VIPReadiness{ready("20.0.0.1/32")}, At: t0.Add(2 * time.Second)})
	if got := table.index[v]; !got.Since.Equal(t0.Add(2 * time.Second)) {
		t.Fatalf("after another state: %+v", got)
	}
}

func TestTableKeepsDetailOfEachVIP(t *testing.T) {
	table := NewTable(TableOptions{})
	var d Decision
	want := []string{"", "two lines", "two lines", "other", "", "two lines"}
	for i, detail := range []string{"", "two\nlines", "two\nlines", "other", "", "two\nlines"} {
		// Only a draining VIP has a DrainEnd.
		r := VIPReadiness{VIP: numbered(i), State: vip.NotReady, Detail: detail, DrainEnd: time.Unix(1000, 0)}
		d.Changed = append(d.Changed, r)
	}
	table.Commit(d)
	for i, r := range table.State().VIPs {
		if r.Detail != want[i] || !r.DrainEnd.IsZero() {
			t.Errorf("%s: %q until %v, want %q", r.VIP, r.Detail, r.DrainEnd, want[i])
		}
	}
}

func TestCleanDetail(t *testing.T) {
	long := strings.Repeat("é", 200)
	for in, want := range map[string]string{
		"":                        "",
		"plain":                   "plain",
		" padded  in ":            "padded  in",
		"deleted\x7f~":            "deleted ~",
		"two\nlines\x1b[31m":      "two lines [31m",
		"bad \xff utf-8":          "bad \ufffd utf-8",
		long:                      long[:256],
		strings.Repeat("a", 1000): strings.Repeat("a", 256),
	} {
		got := cleanDetail(in)
		if got != want || !utf8.ValidString(got) {
			t.Errorf("cleanDetail(%q) = %q, want %q", in, got, want)
		}
	}
}

// drain takes all pending batches of the cursor and applies them as a reader does.
func drain(t testing.TB, table *Table, c *cursor, d *decoder, b *updateMerger, h *streamState) (kinds []kind) {
	t.Helper()
	for {
		next := table.next(c, time.Now())
		if next.kind == kindNone {
			return kinds
		}
		kinds = append(kinds, next.kind)
		for m := range next.messages() {
			lease, ok := table.currentLease(time.Now())
			if !ok {
				t.Fatal("a message without a lease")
			}
			if next.first {
				m.WatchId, next.first = "w", false
			}
			m.Position, m.Lease = next.position.Proto(), durationpb.New(lease)
			said, err := d.decode(m, time.Now())
			if err == nil {
				err = b.merge(h, said, time.Now())
			}
			harness.Must(t, err)
		}
	}
}

func TestLogIsBounded(t *testing.T) {
	table := NewTable(TableOptions{Lease: MaxLease})
	table.Commit(Decision{Changed: numberedReady(100), Synced: true})
	stopped := table.open()
	defer table.close(stopped)
	var d decoder
	b, h := newUpdateMerger(), &streamState{}
	drain(t, table, stopped, &d, b, h)
	// Flips of the same VIPs, then new VIPs only.
	for i := range 20_000 {
		r := VIPReadiness{VIP: numbered(i % 100), State: vip.State(i / 100 % 2)}
		table.Commit(Decision{Changed: []VIPReadiness{r}})
	}
	for i := range 20_000 {
		table.Commit(Decision{
			Changed: []VIPReadiness{{VIP: numbered(i + 100), State: vip.Ready}},
			Removed: []vip.VIP{numbered(i)},
		})
		if bound := 2*table.live + logSlack; len(table.log) > bound || len(table.index) > bound {
			t.Fatalf("after %d changes the log has %d entries, the index %d, for %d VIPs", i, len(table.log), len(table.index),
				table.live)
		}
	}
	// The reader wakes up and gets one batch.
	if kinds := drain(t, table, stopped, &d, b, h); len(kinds) != 1 {
		t.Fatalf("the reader was sent %v", kinds)
	}
	var v view
	v.apply(b.take())
	if len(v.vips) != 100 || v.Position != table.Position() {
		t.Fatalf("the reader has %d VIPs at %+v", len(v.vips), v.Position)
	}
	for i := range 100 {
		if v.vips[numbered(20_000+i)].State != vip.Ready {
			t.Fatalf("the reader lacks %s", numbered(20_000+i))
		}
	}
}

func TestOneFlipIsOneEntry(t *testing.T) {
	table := NewTable(TableOptions{Lease: MaxLease})
	table.Commit(Decision{Changed: numberedReady(50_000), Synced: true})
	c := table.open()
	defer table.close(c)
	table.next(c, time.Now())
	for i := range 5000 {
		table.Commit(Decision{Changed: []VIPReadiness{{VIP: numbered(7), State: vip.State(i % 2)}}})
		if b := table.next(c, time.Now()); b.kind != kindDelta || len(b.entries) != 1 || b.entries[0].VIP != numbered(7) {
			t.Fatalf("flip %d: kind %d with %d entries", i, b.kind, len(b.entries))
		}
	}
	// A reader that was absent for 5 000 flips of one VIP gets one entry.
	for i := range 5000 {
		table.Commit(Decision{Changed: []VIPReadiness{{VIP: numbered(8), State: vip.State(i % 2)}}})
	}
	n := 0
	for m := range table.next(c, time.Now()).messages() {
		n += len(m.GetDelta().GetChanged())
	}
	if n != 1 {
		t.Fatalf("the reader was sent %d VIPs", n)
	}
}

func TestHungLoopSendsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := NewTable(TableOptions{})
		c := table.open()
		defer table.close(c)
		if b := table.next(c, time.Now()); b.kind != kindNone {
			t.Fatalf("a table sent before its first decision: %+v", b)
		}
		table.Heartbeat()
		if b := table.next(c, time.Now()); b.kind != kindNone {
			t.Fatalf("a heartbeat before the first decision was sent: %+v", b)
		}
		table.Commit(Decision{Changed: []VIPReadiness{ready("20.0.0.1/32")}, Synced: true})
		if left, ok := table.currentLease(time.Now()); !ok || left != DefaultLease {
			t.Fatalf("the lease of a fresh decision is %v, %v", left, ok)
		}
		<-time.After(400 * time.Millisecond)
		if left, _ := table.currentLease(time.Now()); left != 600*time.Millisecond {
			t.Fatalf("400 ms after the last sign of life a message is valid for %v", left)
		}
		<-time.After(600 * time.Millisecond)
		if b := table.next(c, time.Now()); b.kind != kindNone {
			t.Fatalf("a watch that opens after the loop hung was sent %+v", b)
		}
		if s := table.State(); s.LeaseLeft != 0 {
			t.Fatalf("the state is said to hold for %v", s.LeaseLeft)
		}
		table.Heartbeat()
		if b := table.next(c, time.Now()); b.kind != kindSnapshot {
			t.Fatalf("after the loop went on: %+v", b)
		}
	})
}

func TestUnsyncedTableSendsNoVIPs(t *testing.T) {
	table := NewTable(TableOptions{Lease: MaxLease})
	c := table.open()
	defer table.close(c)
	table.Commit(Decision{Changed: numberedReady(3)})
	if b := table.next(c, time.Now()); b.kind != kindSnapshot || b.synced || len(b.entries) != 0 {
		t.Fatalf("first: %+v", b)
	}
	table.Commit(Decision{Changed: numberedReady(5)})
	if b := table.next(c, time.Now()); b.kind != kindNone {
		t.Fatalf("then: %+v", b)
	}
	table.Heartbeat()
	if b := table.next(c, time.Now()); b.kind != kindHeartbeat || b.position.Revision != 1 {
		t.Fatalf("heartbeat: %+v", b)
	}
	table.Commit(Decision{Synced: true})
	if b := table.next(c, time.Now()); b.kind != kindSnapshot || !b.synced || len(b.entries) < 5 ||
		b.position.Revision != 3 {
		t.Fatalf("synced: %+v", b)
	}
}

// TestTableMatchesModel commits random decisions in ascending order, with removals that are
// compacted, and compares the table and a reader of it with a map.
func TestTableMatchesModel(t *testing.T) {
	const n = 600
	random := rand.New(rand.NewPCG(1, 2))
	table := NewTable(TableOptions{Lease: MaxLease})
	model := map[vip.VIP]vip.State{}
	c := table.open()
	defer table.close(c)
	var d decoder
	merger, stream := newUpdateMerger(), &streamState{}
	var v view
	compacted := false
	for round := range 200 {
		decision := Decision{Synced: true}
		first, count := random.IntN(n), random.IntN(n/2)
		for i := first; i < min(n, first+count); i++ {
			x := VIPReadiness{VIP: numbered(i), State: vip.State(random.IntN(3))}
			if random.IntN(3) == 0 {
				decision.Removed = append(decision.Removed, x.VIP)
				delete(model, x.VIP)
				continue
			}
			decision.Changed = append(decision.Changed, x)
			model[x.VIP] = x.State
		}
		before := len(table.log)
		table.Commit(decision)
		compacted = compacted || len(table.log) < before
		ready := 0
		for _, s := range model {
			if s == vip.Ready {
				ready++
			}
		}
		if got := states(table.State().VIPs); !maps.Equal(got, model) || table.live != len(model) || table.ready != ready {
			t.Fatalf("round %d: %d VIPs, %d live, %d ready, want %d, %d ready", round, len(got), table.live, table.ready,
				len(model), ready)
		}
		if random.IntN(4) == 0 {
			drain(t, table, c, &d, merger, stream)
			v.apply(merger.take())
			got := map[vip.VIP]vip.State{}
			for name, r := range v.vips {
				got[name] = r.State
			}
			if !maps.Equal(got, model) {
				t.Fatalf("round %d: the reader has %d VIPs, want %d", round, len(got), len(model))
			}
		}
	}
	if !compacted {
		t.Fatal("the log was never compacted")
	}
}

// TestFewChangesKeepNoOldRecords lets VIPs flap at random: superseded records must not stay in
// memory together with the newest ones.
func TestFewChangesKeepNoOldRecords(t *testing.T) {
	const n = 5000
	liveHeap := func() int {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc)
	}
	table := NewTable(TableOptions{})
	rs := numberedReady(n)
	table.Commit(Decision{Changed: rs, Synced: true})
	table.log = append(make([]entry, 0, 2*n+logSlack+100), table.log...) // its capacity at the end
	before := liveHeap()
	random := rand.New(rand.NewPCG(1, 1))
	for range 2500 {
		var d Decision
		for range 20 {
			r := &rs[random.IntN(n)]
			r.State = vip.Ready - r.State
			d.Changed = append(d.Changed, *r)
		}
		table.Commit(d)
	}
	if grown := liveHeap() - before; grown > n*100 {
		t.Errorf("the heap grew by %d bytes with %d VIPs", grown, n)
	}
	runtime.KeepAlive(table)
}

// tableReader is a watch of a table, and the state that its messages describe.
type tableReader struct {
	view
	table    *Table
	watch    *cursor
	received decoder
	merger   *updateMerger
	stream   streamState
}

func newTableReader(table *Table) *tableReader {
	return &tableReader{table: table, watch: table.open(), merger: newUpdateMerger()}
}

// receive receives one batch.
func (reader *tableReader) receive() error {
	batch := reader.table.next(reader.watch, time.Now())
	if batch.kind == kindNone {
		return nil
	}
	for part := range batch.messages() {
		part.WatchId, part.Position, part.Lease = "w", batch.position.Proto(), message(1).Lease
		event, err := reader.received.decode(part, time.Now())
		if err == nil {
			err = reader.merger.merge(&reader.stream, event, time.Now())
		}
		if err != nil {
			return err
		}
	}
	reader.apply(reader.merger.take())
	return nil
}

// sameVIPs returns a VIP whose readiness differs in two states, if any.
func sameVIPs(one, other map[vip.VIP]VIPReadiness) (differs vip.VIP, same bool) {
	for _, v := range slices.Concat(slices.Collect(maps.Keys(one)), slices.Collect(maps.Keys(other))) {
		a, inOne := one[v]
		b, inOther := other[v]
		if inOne != inOther || !a.equal(&b) {
			return v, false
		}
	}
	return differs, true
}

// TestLargeDecisionsArriveInParts compares readers with the table. After each revision every VIP
// has its value before or after the decision, and VIPs rise before others fall or leave. The last
// revision has the whole decision. A reader that falls behind sees the same state at the same
// position.
func TestLargeDecisionsArriveInParts(t *testing.T) {
	middles := 0 // of decisions, at which a slow reader was compared
	rapid.Check(t, func(r *rapid.T) {
		count := rapid.SampledFrom([]int{1, firstVIPs, firstVIPs + 1, 3000}).Draw(r, "VIPs")
		table := NewTable(TableOptions{Lease: time.Minute})
		table.Commit(Decision{Synced: true, Changed: numberedReady(count)})
		fast := newTableReader(table)
		slow := []*tableReader{newTableReader(table), newTableReader(table)}
		states := map[Position]map[vip.VIP]VIPReadiness{} // that the fast reader saw
		ended := map[Position]bool{}                      // positions after a decision
		receive := func(reader *tableReader) {
			if err := reader.receive(); err != nil {
				r.Fatal(err)
			}
			state, known := states[reader.Position]
			if reader == fast {
				states[reader.Position] = maps.Clone(fast.vips)
				return
			}
			if !known { // the fast reader received this revision together with the next
				return
			}
			if v, same := sameVIPs(reader.vips, state); !same {
				r.Fatalf("at %v a slow reader has %+v, a fast one %+v", reader.Position, reader.vips[v], state[v])
			}
			if !ended[reader.Position] {
				middles++
			}
		}
		receive(fast)
		ended[fast.Position] = true
		for range 4 {
			before := maps.Clone(fast.vips)
			split, low, high := rapid.IntRange(0, count).Draw(r, "split"), rapid.IntRange(0, count).Draw(r, "low"),
				rapid.IntRange(0, count).Draw(r, "high")
			kept := rapid.IntRange(0, count).Draw(r, "kept")
			decision := Decision{Synced: true}
			for i := min(low, high); i < max(low, high); i++ {
				// The VIPs below split have the other state than the VIPs above; some leave or return.
				if _, held := before[numbered(i)]; held && i > kept {
					decision.Removed = append(decision.Removed, numbered(i))
					continue
				}
				state := vip.State((i / max(1, split)) % 2)
				decision.Changed = append(decision.Changed, VIPReadiness{VIP: numbered(i), State: state})
			}
			table.Commit(decision)
			after := map[vip.VIP]VIPReadiness{}
			for _, readiness := range table.State().VIPs {
				after[readiness.VIP] = readiness
			}
			fell := false
			for revisions := 0; fast.Position != table.Position(); revisions++ {
				was := maps.Clone(fast.vips)
				receive(fast)
				fellBefore := fell
				for v, is := range fast.vips {
					old, next := before[v], after[v]
					if !is.equal(&old) && !is.equal(&next) {
						r.Fatalf("%s is %+v, before %+v, after %+v", v, is, old, next)
					}
					if is.State == vip.Ready && was[v].State != vip.Ready && fellBefore {
						r.Fatalf("%s rises in a later revision than another VIP falls", v)
					}
				}
				for v, old := range was {
					fell = fell || old.State == vip.Ready && fast.vips[v].State != vip.Ready
				}
				if revisions > count/firstVIPs {
					r.Fatalf("%d revisions for %d VIPs", revisions, count)
				}
			}
			if v, same := sameVIPs(fast.vips, after); !same {
				r.Fatalf("%s is %+v at the end, want %+v", v, fast.vips[v], after[v])
			}
			ended[fast.Position] = true
			for _, reader := range slow {
				for range rapid.IntRange(0, 3).Draw(r, "received") {
					receive(reader)
				}
			}
		}
		for _, reader := range slow {
			for reader.Position != table.Position() {
				receive(reader)
			}
		}
	})
	if middles == 0 {
		t.Error("no slow reader was in the middle of a decision")
	}
}
