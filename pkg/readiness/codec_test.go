package readiness

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// failer is a test or a property.
type failer interface {
	Helper()
	Fatal(args ...any)
}

// encoded returns a message in wire format, as gRPC sends it.
func encoded(t failer, m marshaler) []byte {
	t.Helper()
	parts, err := newCodec().Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	defer parts.Free()
	return parts.Materialize()
}

// parsed returns a message as a reader without this package's codec receives it.
func parsed(t failer, m *watchMessage) *response {
	t.Helper()
	r := new(response)
	if err := proto.Unmarshal(encoded(t, m), r); err != nil {
		t.Fatal(err)
	}
	return r
}

// drawReadiness returns a readiness that a Table may hold.
func drawReadiness(r *rapid.T, v vip.VIP) VIPReadiness {
	x := VIPReadiness{
		VIP: v, State: vip.State(rapid.IntRange(0, 2).Draw(r, "state")),
		Reason:       readinessv1.VipReason(rapid.IntRange(0, len(readinessv1.VipReason_name)-1).Draw(r, "reason")),
		Detail:       rapid.SampledFrom([]string{"", "a", "ä\n", strings.Repeat("ü", 300)}).Draw(r, "detail"),
		ReadyTargets: rapid.Uint32().Draw(r, "ready"), TotalTargets: rapid.Uint32Max(200).Draw(r, "total"),
	}
	if rapid.Bool().Draw(r, "since") {
		x.Since = time.Unix(rapid.Int64Range(-5, 1<<33).Draw(r, "seconds"), rapid.Int64Range(0, 1e9-1).Draw(r, "nanos")).UTC()
	}
	if x.State == vip.Draining {
		x.DrainEnd = time.Now().Add(time.Duration(rapid.Int64Range(-1, 1e12).Draw(r, "drain")))
	}
	return x
}

// TestEncodingMatchesProtobuf compares the encoder and decoder with the protobuf library.
func TestEncodingMatchesProtobuf(t *testing.T) {
	names := []string{"20.0.0.1/32", "20.0.0.0/8", "2000::1/128", "2000:aaaa:bbbb:cccc:dddd:eeee:ffff:1111/128"}
	rapid.Check(t, func(r *rapid.T) {
		var d decoder
		now := time.Now()
		for range rapid.IntRange(1, 4).Draw(r, "messages") {
			x := drawReadiness(r, vip.Require(rapid.SampledFrom(names).Draw(r, "vip")))
			want := x
			if want.Detail = cleanDetail(x.Detail); x.State == vip.Draining {
				want.DrainEnd = now.Add(max(0, x.DrainEnd.Sub(now)))
			}
			x.Detail = want.Detail
			sent := appendVIP(nil, &x, now)
			var m readinessv1.VipReadiness
			if err := proto.Unmarshal(sent, &m); err != nil || !proto.Equal(&m, x.Proto(now)) {
				r.Fatalf("%+v was encoded as %v, %v", x, &m, err)
			}
			if n := len(sent); n > vipBytes-6+len(x.Detail) {
				r.Fatalf("%+v takes %d bytes", x, n)
			}
			library, err := proto.Marshal(x.Proto(now))
			if err != nil {
				r.Fatal(err)
			}
			for _, data := range [][]byte{sent, library} {
				var got VIPReadiness
				d.names.begin(1, false)
				if err := d.vipReadiness(&got, data, now); err != nil || !got.equal(&want) {
					r.Fatalf("got %+v, %v, want %+v", got, err, want)
				}
			}
		}
	})
}

// TestPartsMatchProtobuf compares the parts of a snapshot and a delta with the table.
func TestPartsMatchProtobuf(t *testing.T) {
	const n = 1000
	table := NewTable(TableOptions{Lease: time.Minute})
	c := table.open()
	defer table.close(c)
	d := Decision{Synced: true, Changed: numberedReady(n)}
	for i := range d.Changed {
		d.Changed[i].Detail = strings.Repeat("x", i%MaxDetailBytes)
	}
	table.Commit(d)
	check := func(event string, want []VIPReadiness, removed int) {
		t.Helper()
		var got []*readinessv1.VipReadiness
		gone, parts, last := 0, 0, false
		for m := range table.next(c, time.Now()).messages() {
			if last {
				t.Errorf("%s: part %d is the last, and is followed by another", event, parts)
			}
			if size := len(*m.event); size > partBytes {
				t.Errorf("%s: a part takes %d bytes", event, size)
			}
			p := parsed(t, m)
			got = append(append(got, p.GetSnapshot().GetVips()...), p.GetDelta().GetChanged()...)
			gone += len(p.GetDelta().GetRemoved())
			last = p.GetSnapshot().GetLast() || p.GetDelta().GetLast()
			parts++
		}
		if len(got) != len(want) || gone != removed || parts < 2 || !last {
			t.Fatalf("%s: %d changed and %d removed in %d parts, the last one: %t", event, len(got), gone, parts, last)
		}
		for i := range want {
			if !proto.Equal(got[i], want[i].Proto(time.Now())) {
				t.Fatalf("%s: VIP %d is %v, want %+v", event, i, got[i], want[i])
			}
		}
	}
	check("snapshot", table.State().VIPs, 0)
	for i := range n / 2 {
		d.Changed[i].State = vip.NotReady
		d.Removed = append(d.Removed, d.Changed[n/2+i].VIP)
	}
	table.Commit(Decision{Changed: d.Changed[:n/2], Removed: d.Removed})
	check("delta", table.State().VIPs, n/2)
}

func TestReasonsAreContiguous(t *testing.T) {
	for i := range len(readinessv1.VipReason_name) {
		if _, known := readinessv1.VipReason_name[int32(i)]; !known {
			t.Errorf("there is no reason %d", i)
		}
	}
}

func TestDecoderRejectsMalformedParts(t *testing.T) {
	begin, err := proto.Marshal(message(5, snapshotOf(true, v1)))
	if err != nil {
		t.Fatal(err)
	}
	part, err := proto.Marshal(message(6, deltaOf(true, v2)))
	if err != nil {
		t.Fatal(err)
	}
	beat, err := proto.Marshal(message(6, heartbeat))
	if err != nil {
		t.Fatal(err)
	}
	invalid := message(6, deltaOf(true, v2))
	invalid.GetDelta().Changed[0].Detail = "\xff"
	text, err := proto.MarshalOptions{}.Marshal(message(6, deltaOf(true, v2), func(m *response) {
		m.GetDelta().Changed[0].Detail = "a detail"
	}))
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name    string
		data    []byte
		problem string
	}{
		{"two events", append(part[:len(part):len(part)], part...), "several events"},
		{"delta and heartbeat", append(part[:len(part):len(part)], beat...), "several events"},
		{"not UTF-8", []byte(strings.Replace(string(text), "a detail", "a \xffetail", 1)), "UTF-8"},
	}
	for i := range part {
		tests = append(tests, struct {
			name    string
			data    []byte
			problem string
		}{fmt.Sprintf("%d of %d bytes", i, len(part)), part[:i], ""})
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var d decoder
			if _, err := d.decode(begin, time.Now()); err != nil {
				t.Fatal(err)
			}
			if e, err := d.decode(tt.data, time.Now()); err == nil || !strings.Contains(err.Error(), tt.problem) {
				t.Errorf("%+v, %v", e, err)
			}
		})
	}
}

// TestKnownVIPsAllocateNothing asserts that a part allocates the slice of its VIPs and the header,
// but nothing per VIP.
func TestKnownVIPsAllocateNothing(t *testing.T) {
	allocations := func(n int) float64 {
		var d decoder
		var b []byte
		data := func(revision uint64) {
			event := snapshotOf(true)
			if revision > 1 {
				event = deltaOf(true)
			}
			m := message(revision, event)
			for _, r := range numberedReady(n) {
				r.Detail, r.Since = "connect: connection refused", time.Unix(1e9, 5)
				if s := m.GetSnapshot(); s != nil {
					s.Vips = append(s.Vips, r.Proto(time.Now()))
				} else {
					m.GetDelta().Changed = append(m.GetDelta().Changed, r.Proto(time.Now()))
				}
			}
			var err error
			if b, err = proto.Marshal(m); err != nil {
				t.Fatal(err)
			}
			_, err = d.decode(b, time.Now())
			if err != nil {
				t.Fatal(err)
			}
		}
		data(1)
		data(2)
		return testing.AllocsPerRun(10, func() {
			d.position.Revision = 1
			if e, err := d.decode(b, time.Now()); err != nil || len(e.changed) != n {
				t.Fatalf("%d VIPs, %v", len(e.changed), err)
			}
		})
	}
	if one, many := allocations(1), allocations(1000); many != one {
		t.Errorf("a delta of one VIP: %v allocations, of 1000 VIPs: %v", one, many)
	}
}

// TestSendingAllocatesNoVIPs asserts that encoding a part allocates nothing per VIP.
func TestSendingAllocatesNoVIPs(t *testing.T) {
	table := NewTable(TableOptions{})
	table.Commit(Decision{Changed: numberedReady(vipsPerPart), Synced: true})
	allocations := func(n int) float64 {
		return testing.AllocsPerRun(20, func() {
			event, _ := encodeEvent(kindSnapshot, true, table.log[:n], time.Now())
			mem.DefaultBufferPool().Put(event)
		})
	}
	if n := allocations(vipsPerPart); n > 2 {
		t.Errorf("%v allocations", n)
	}
}

// TestReportsMatchProtobuf compares encoded and decoded reports with the protobuf library.
func TestReportsMatchProtobuf(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		want := ReportDelta{Applied: Position{"i", rapid.Uint64().Draw(r, "revision")}}
		for i := range rapid.IntRange(0, 3).Draw(r, "vips") {
			x := ReportedVIP{VIP: numbered(i), VIPReport: VIPReport{
				Advertisement: readinessv1.Advertisement(rapid.IntRange(1, 3).Draw(r, "advertisement")),
				Reason:        readinessv1.AdvertisementReason(rapid.IntRange(0, 12).Draw(r, "reason")),
				Unconfirmed:   rapid.Bool().Draw(r, "unconfirmed"),
			}}
			want.VIPs = append(want.VIPs, x)
		}
		if rapid.Bool().Draw(r, "families") {
			want.Families = map[vip.Family]bool{vip.IPv4: rapid.Bool().Draw(r, "up"), vip.IPv6: true}
		}
		for m := range want.messages("w") {
			sent := encoded(r, m)
			var library readinessv1.ReportAdvertisementRequest
			if err := proto.Unmarshal(sent, &library); err != nil || len(library.GetVips()) != len(want.VIPs) {
				r.Fatalf("%+v was encoded as %v, %v", want, &library, err)
			}
			for i, x := range want.VIPs {
				if v := library.GetVips()[i]; v.GetVip() != x.VIP.String() || v.GetAdvertisement() != x.Advertisement ||
					v.GetReason() != x.Reason || v.GetUnconfirmed() != x.Unconfirmed {
					r.Fatalf("%+v was encoded as %v", x, v)
				}
			}
			again, err := proto.Marshal(&library)
			if err != nil {
				r.Fatal(err)
			}
			for _, data := range [][]byte{sent, again} {
				watchID, got, complete, err := decodeReport(data)
				if err != nil || watchID != "w" || !complete || got.Applied != want.Applied ||
					!slices.Equal(got.VIPs, want.VIPs) || !maps.Equal(got.Families, want.Families) {
					r.Fatalf("got %+v, %v, want %+v", got, err, want)
				}
			}
		}
	})
}

// FuzzReport decodes arbitrary bytes: the protobuf library must accept every accepted message.
func FuzzReport(f *testing.F) {
	for _, m := range []*readinessv1.ReportAdvertisementRequest{reportOf("w", v1, announced), {}} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		watchID, d, complete, err := decodeReport(data)
		if err != nil {
			return
		}
		var m readinessv1.ReportAdvertisementRequest
		if err := proto.Unmarshal(data, &m); err != nil {
			t.Fatalf("the library rejects what was accepted: %v", err)
		}
		if m.GetWatchId() != watchID || len(m.GetVips()) != len(d.VIPs) || (m.GetApplied() != nil) != complete {
			t.Fatalf("got %+v, want %v", d, &m)
		}
		for i, r := range d.VIPs {
			if v, err := vip.Parse(m.GetVips()[i].GetVip()); err != nil || v != r.VIP ||
				m.GetVips()[i].GetAdvertisement() != r.Advertisement {
				t.Fatalf("got %+v, want %v", r, m.GetVips()[i])
			}
		}
	})
}

func TestFullReportIsOrdered(t *testing.T) {
	q := newReportQueue()
	for i := range 100 {
		q.report(ReportDelta{VIPs: []ReportedVIP{{VIP: numbered((i * 37) % 100)}}})
	}
	r := q.attach()
	d, ok, _ := q.take(r)
	if !ok || len(d.VIPs) != 100 ||
		!slices.IsSortedFunc(d.VIPs, func(a, b ReportedVIP) int { return vip.Compare(a.VIP, b.VIP) }) {
		t.Fatalf("the full report is %+v", d.VIPs)
	}
	// Changes keep the order of the reports, each VIP once with its newest value.
	q.report(ReportDelta{VIPs: []ReportedVIP{{VIP: numbered(7)}, {VIP: numbered(3)}}})
	changed := ReportedVIP{numbered(7), VIPReport{Unconfirmed: true}}
	q.report(ReportDelta{VIPs: []ReportedVIP{changed}, Removed: []vip.VIP{numbered(3)}})
	if d, _, _ = q.take(r); len(d.VIPs) != 2 || d.VIPs[0] != changed ||
		d.VIPs[1].VIP != numbered(3) || d.VIPs[1].Advertisement != withdrawn {
		t.Fatalf("the changes are %+v", d.VIPs)
	}
	q.resend(r)
	if d, _, _ = q.take(r); len(d.VIPs) != 99 || len(q.vips) != 99 {
		t.Fatalf("%d VIPs after a removal", len(d.VIPs))
	}
	// A VIP that is removed without a reporter is not reported.
	q.report(ReportDelta{Removed: []vip.VIP{numbered(5)}})
	q.detach(r)
	q.report(ReportDelta{Removed: []vip.VIP{numbered(6)}})
	if d, _, _ = q.take(q.attach()); len(d.VIPs) != 97 || len(q.vips) != 97 {
		t.Fatalf("%d VIPs, %d are kept", len(d.VIPs), len(q.vips))
	}
}
