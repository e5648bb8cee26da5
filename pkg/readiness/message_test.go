package readiness

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// decodeParts passes the pending batch of a cursor to a decoder and returns the event of its last
// part.
func decodeParts(t testing.TB, table *Table, c *cursor, d *decoder) (last event, parts int) {
	t.Helper()
	batch := table.next(c, time.Now())
	for m := range batch.messages() {
		m.WatchId, m.Position, m.Lease = "w", batch.position.Proto(), message(1).Lease
		if last.kind != kindNone {
			t.Fatalf("part %d follows the last part", parts)
		}
		var err error
		if last, err = d.decode(m, time.Now()); err != nil {
			t.Fatal(err)
		}
		parts++
	}
	return last, parts
}

// drawReadiness returns a readiness that a Table may hold.
func drawReadiness(r *rapid.T, v vip.VIP) VIPReadiness {
	x := VIPReadiness{
		VIP: v, State: vip.State(rapid.IntRange(0, 2).Draw(r, "state")),
		Reason:       readinessv1.VipReason(rapid.IntRange(0, len(readinessv1.VipReason_name)-1).Draw(r, "reason")),
		Detail:       rapid.SampledFrom([]string{"", "a", "ä\n", strings.Repeat("ü", 300)}).Draw(r, "detail"),
		ReadyTargets: rapid.Uint32().Draw(r, "ready"), TotalTargets: rapid.Uint32Max(200).Draw(r, "total"),
		WarmingTenths: rapid.Uint32().Draw(r, "warming"),
	}
	if rapid.Bool().Draw(r, "since") {
		x.Since = time.Unix(rapid.Int64Range(-5, 1<<33).Draw(r, "seconds"), rapid.Int64Range(0, 1e9-1).Draw(r, "nanos")).UTC()
	}
	if x.State == vip.Draining {
		x.DrainEnd = time.Now().Add(time.Duration(rapid.Int64Range(-1, 1e12).Draw(r, "drain")))
	}
	return x
}

// TestReadinessRoundTrip groups random VIPs and compares the decoded values.
func TestReadinessRoundTrip(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		now := time.Now()
		values := []VIPReadiness{drawReadiness(r, vip.VIP{}), drawReadiness(r, vip.VIP{}), drawReadiness(r, vip.VIP{})}
		byReadiness := readinessGroups{now: now}
		want := make(map[vip.VIP]VIPReadiness)
		for i := range rapid.IntRange(1, 20).Draw(r, "vips") {
			one := rapid.SampledFrom(values).Draw(r, "value")
			one.VIP = numbered(i)
			byReadiness.add(one.VIP.String(), &one)
			one.Detail = cleanDetail(one.Detail)
			if one.State == vip.Draining {
				one.DrainEnd = now.Add(max(0, one.DrainEnd.Sub(now)))
			}
			want[one.VIP] = one
		}
		if n := len(byReadiness.messages); n > len(values) {
			r.Fatalf("%d groups of %d values", n, len(values))
		}
		for _, group := range byReadiness.messages {
			for _, name := range group.GetVips() {
				got, err := readinessFromProto(group.GetReadiness(), now)
				got.VIP = vip.Require(name)
				expected := want[got.VIP]
				if err != nil || !got.equal(&expected) {
					r.Fatalf("got %+v, %v, want %+v", got, err, expected)
				}
				delete(want, got.VIP)
			}
		}
		if len(want) > 0 {
			r.Fatalf("not sent: %v", want)
		}
	})
}

// TestPartsMatchTable compares the parts of a snapshot and a delta with the table.
func TestPartsMatchTable(t *testing.T) {
	const n = 1000
	table := NewTable(TableOptions{Lease: time.Minute})
	c := table.open()
	defer table.close(c)
	initial := Decision{Synced: true, Changed: numberedReady(n)}
	for i := range initial.Changed {
		initial.Changed[i].Detail = strings.Repeat("x", i%MaxDetailBytes)
	}
	table.Commit(initial)
	var d decoder
	check := func(what string, removed int) {
		t.Helper()
		got, parts := decodeParts(t, table, c, &d)
		// A large decision has several revisions.
		for got.position != table.Position() {
			next, more := decodeParts(t, table, c, &d)
			next.changed, next.removed = append(got.changed, next.changed...), append(got.removed, next.removed...)
			got, parts = next, parts+more
		}
		want := table.State().VIPs
		if parts < 2 || len(got.changed) != len(want) || len(got.removed) != removed {
			t.Fatalf("%s: %d changed and %d removed in %d parts", what, len(got.changed), len(got.removed), parts)
		}
		slices.SortFunc(got.changed, func(a, b VIPReadiness) int { return vip.Compare(a.VIP, b.VIP) })
		for i := range want {
			if !got.changed[i].equal(&want[i]) {
				t.Fatalf("%s: VIP %d is %+v, want %+v", what, i, got.changed[i], want[i])
			}
		}
	}
	check("snapshot", 0)
	var change Decision
	for i := range n / 2 {
		initial.Changed[i].State = vip.NotReady
		change.Removed = append(change.Removed, initial.Changed[n/2+i].VIP)
	}
	change.Changed = initial.Changed[:n/2]
	table.Commit(change)
	check("delta", n/2)
}

// TestReportRoundTrip compares the decoded messages of a report with the report.
func TestReportRoundTrip(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		want := ReportDelta{Applied: Position{"i", rapid.Uint64().Draw(r, "revision")}}
		for i := range rapid.IntRange(0, 6).Draw(r, "vips") {
			want.VIPs = append(want.VIPs, ReportedVIP{VIP: numbered(i), VIPReport: VIPReport{
				Advertisement: readinessv1.Advertisement(rapid.IntRange(1, 3).Draw(r, "advertisement")),
				Reason:        readinessv1.AdvertisementReason(rapid.IntRange(0, 1).Draw(r, "reason")),
				Unconfirmed:   rapid.Bool().Draw(r, "unconfirmed"),
			}})
		}
		if rapid.Bool().Draw(r, "families") {
			want.Families = map[vip.Family]bool{vip.IPv4: rapid.Bool().Draw(r, "up"), vip.IPv6: true}
		}
		for m := range want.messages("w") {
			got, complete, err := decodeReport(m)
			slices.SortFunc(got.VIPs, func(a, b ReportedVIP) int { return vip.Compare(a.VIP, b.VIP) })
			if err != nil || m.GetWatchId() != "w" || !complete || got.Applied != want.Applied ||
				!slices.Equal(got.VIPs, want.VIPs) || !maps.Equal(got.Families, want.Families) {
				r.Fatalf("got %+v, %v, want %+v", got, err, want)
			}
		}
	})
}

// FuzzReport decodes arbitrary messages: an accepted report is within the limits.
func FuzzReport(f *testing.F) {
	for _, m := range []*reportRequest{reportOf("w", v1, announced), {}} {
		b, err := proto.Marshal(m)
		harness.Must(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var m reportRequest
		if proto.Unmarshal(data, &m) != nil {
			return
		}
		d, complete, err := decodeReport(&m)
		if err != nil {
			return
		}
		for _, r := range d.VIPs {
			if r.VIP.IsZero() || r.advertised() == 0 && r.Advertisement != withdrawn {
				t.Fatalf("accepted %+v", r)
			}
		}
		if len(d.VIPs) > MaxVIPsPerMessage || (m.GetApplied() != nil) != complete {
			t.Fatalf("%d VIPs, complete: %v", len(d.VIPs), complete)
		}
	})
}
