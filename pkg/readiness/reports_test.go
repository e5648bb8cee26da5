package readiness

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

const (
	announced = readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED
	withdrawn = readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
)

type reportStream = grpc.ClientStreamingClient[readinessv1.ReportAdvertisementRequest,
	readinessv1.ReportAdvertisementResponse]

func reportRaw(t testing.TB, b *testLB, id spiffeid.ID) (reportStream, context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), streamLimit)
	t.Cleanup(cancel)
	s, err := dialRaw(t, b.path, id).ReportAdvertisement(ctx)
	harness.Must(t, err)
	return s, cancel
}

func reportOf(watchID, v string, a readinessv1.Advertisement) *readinessv1.ReportAdvertisementRequest {
	return &readinessv1.ReportAdvertisementRequest{
		WatchId: watchID, Applied: &readinessv1.Position{InstanceId: "i", Revision: 1},
		Families: []*readinessv1.FamilyConnectivity{{Family: readinessv1.IpFamily_IP_FAMILY_IPV4, Up: true}},
		Groups: []*readinessv1.AdvertisementGroup{{
			Advertisement: &readinessv1.VipAdvertisement{Advertisement: a}, Vips: []string{v},
		}},
	}
}

func send(t testing.TB, s reportStream, m *readinessv1.ReportAdvertisementRequest) {
	t.Helper()
	harness.Must(t, s.Send(m))
}

func TestNewestWatchReports(t *testing.T) {
	b := startSyncedLB(t, 1)
	v := vip.Require(v1)
	reportIs := func(watchID string, a readinessv1.Advertisement) func() bool {
		return func() bool {
			r, _ := b.Reported(v)
			s := b.Report().Load()
			return s.WatchID == watchID && s.Connected && r.Advertisement == a
		}
	}
	first, endFirst := watchRaw(t, b, frontendID)
	firstID := recv(t, first).GetWatchId()
	firstReport, _ := reportRaw(t, b, frontendID)
	send(t, firstReport, reportOf(firstID, v1, announced))
	await.True(t, "the first watch's report counts", reportIs(firstID, announced))

	second, endSecond := watchRaw(t, b, frontendID)
	secondID := recv(t, second).GetWatchId()
	secondReport, _ := reportRaw(t, b, frontendID)
	send(t, secondReport, reportOf(secondID, v1, withdrawn))
	await.True(t, "the second watch's report counts", reportIs(secondID, withdrawn))

	// The reports of the first watch are read but not used.
	send(t, firstReport, reportOf(firstID, v2, announced))
	await.True(t, "the first watch's late report is read", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		w := b.watches[firstID]
		return len(w.vips) == 2
	})
	if !reportIs(secondID, withdrawn)() {
		t.Fatalf("a report of the older watch counted: %+v", b.Report().Load())
	}
	if _, ok := b.Reported(vip.Require(v2)); ok {
		t.Fatal("a VIP that only the older watch reported is visible")
	}
	var reporting []string
	for _, w := range b.Watchers() {
		if w.Reporting {
			reporting = append(reporting, w.WatchID)
		}
	}
	if len(reporting) != 1 || reporting[0] != secondID {
		t.Fatalf("reporting: %v", reporting)
	}

	// The older report is kept: it is used again when the newer watch ends.
	endSecond()
	await.True(t, "the first watch counts again", reportIs(firstID, announced))
	endFirst()
	await.True(t, "no stream reports", func() bool { return !b.Report().Load().Connected })
	if r, ok := b.Reported(v); !ok || r.Advertisement != announced {
		t.Fatalf("the last report is lost: %+v %v", r, ok)
	}
}

// The removal of a last target and an orderly stop wait for this condition: gateways without
// another path still use a de-preferred VIP, and BIRD may at any time export a VIP that it does
// not export yet.
func TestDepreferredIsAdvertised(t *testing.T) {
	b := startSyncedLB(t, 1)
	stream, _ := watchRaw(t, b, frontendID)
	id := recv(t, stream).GetWatchId()
	report, _ := reportRaw(t, b, frontendID)
	const ready = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY
	for _, step := range []struct {
		advertisement        readinessv1.Advertisement
		reason               readinessv1.AdvertisementReason
		advertised, exported int
	}{
		{announced, ready, 1, 1},
		{announced, readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_EXPORTED, 1, 0},
		{readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED, ready, 1, 1},
		{withdrawn, ready, 0, 0},
	} {
		message := reportOf(id, v1, step.advertisement)
		message.Groups[0].Advertisement.Reason = step.reason
		send(t, report, message)
		await.True(t, "the report counts", func() bool {
			r, _ := b.Reported(vip.Require(v1))
			return r.Advertisement == step.advertisement && r.Reason == step.reason
		})
		if s := b.Report().Load(); s.Advertised != step.advertised || s.Exported != step.exported {
			t.Errorf("%+v: %d advertised, %d exported", step, s.Advertised, s.Exported)
		}
	}
}

func TestNewerReportReplacesWhenComplete(t *testing.T) {
	b := startSyncedLB(t, 1)
	first, endFirst := watchRaw(t, b, frontendID)
	firstID := recv(t, first).GetWatchId()
	firstReport, _ := reportRaw(t, b, frontendID)
	send(t, firstReport, reportOf(firstID, v1, announced))
	await.True(t, "the first report counts", func() bool { return b.Report().Load().WatchID == firstID })
	second, _ := watchRaw(t, b, frontendID)
	secondID := recv(t, second).GetWatchId()
	secondReport, _ := reportRaw(t, b, frontendID)
	part := reportOf(secondID, v1, announced)
	part.Applied = nil // not the last part
	send(t, secondReport, part)
	await.True(t, "the part is read", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.watches[secondID].streams > 0
	})
	if r := b.Report().Load(); r.WatchID != firstID || !r.Complete {
		t.Fatalf("half a report counts: %+v", r)
	}
	send(t, secondReport, reportOf(secondID, v2, announced))
	await.True(t, "the second report counts", reportedAs(b,
		map[vip.VIP]VIPReport{vip.Require(v1): {Advertisement: announced}, vip.Require(v2): {Advertisement: announced}}))
	endFirst()
	await.True(t, "the first watch ended", func() bool { return len(b.Watchers()) == 1 })
	if r := b.Report().Load(); r.WatchID != secondID || !r.Connected {
		t.Fatalf("after the end of the first: %+v", r)
	}
}

func TestReportForOtherPeersWatch(t *testing.T) {
	b := startSyncedLB(t, 1)
	s, _ := watchRaw(t, b, readerID)
	id := recv(t, s).GetWatchId()
	for _, watchID := range []string{id, "nonsense", ""} {
		report, _ := reportRaw(t, b, frontendID)
		send(t, report, reportOf(watchID, v1, announced))
		if _, err := report.CloseAndRecv(); err != nil { // the response confirms the receipt
			t.Fatal(err)
		}
	}
	if r := b.Report().Load(); r.WatchID != "" || b.AllReported() != nil {
		t.Fatalf("it counted: %+v", r)
	}
	if !strings.Contains(b.log.String(), "no open watch") {
		t.Fatal("it was not logged")
	}
}

func TestInvalidReportsEndStream(t *testing.T) {
	b := startSyncedLB(t, 1)
	s, _ := watchRaw(t, b, frontendID)
	id := recv(t, s).GetWatchId()
	tests := []struct {
		name   string
		change func(*readinessv1.ReportAdvertisementRequest)
		code   codes.Code
	}{
		{"bad VIP", func(m *readinessv1.ReportAdvertisementRequest) { m.Groups[0].Vips[0] = "x" }, codes.InvalidArgument},
		{
			"VIP twice", func(m *readinessv1.ReportAdvertisementRequest) { m.Groups = append(m.Groups, m.Groups[0]) },
			codes.InvalidArgument,
		},
		{
			"no advertisement", func(m *readinessv1.ReportAdvertisementRequest) { m.Groups[0].Advertisement.Advertisement = 0 },
			codes.InvalidArgument,
		},
		{"no family", func(m *readinessv1.ReportAdvertisementRequest) { m.Families[0].Family = 7 }, codes.InvalidArgument},
		{"long instance", func(m *readinessv1.ReportAdvertisementRequest) {
			m.Applied.InstanceId = strings.Repeat("x", 200)
		}, codes.InvalidArgument},
		{"too many VIPs", func(m *readinessv1.ReportAdvertisementRequest) {
			m.Groups[0].Vips = nil
			for i := range MaxVIPsPerMessage + 1 {
				m.Groups[0].Vips = append(m.Groups[0].Vips, numbered(i).String())
			}
		}, codes.InvalidArgument},
		{"too many bytes", func(m *readinessv1.ReportAdvertisementRequest) {
			m.Groups[0].Vips[0] = strings.Repeat("x", MaxMessageBytes)
		}, codes.ResourceExhausted},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			report, _ := reportRaw(t, b, frontendID)
			m := reportOf(id, v1, announced)
			tt.change(m)
			send(t, report, m)
			if _, err := report.CloseAndRecv(); status.Code(err) != tt.code {
				t.Fatalf("%v, want %v", err, tt.code)
			}
		})
	}
	if n := len(b.AllReported()); n != 0 {
		t.Fatalf("%d VIPs of refused reports counted", n)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := b.watches[id].streams; n != 0 {
		t.Errorf("%d report streams are open", n)
	}
}

func TestReportedVIPLimit(t *testing.T) {
	w := &watch{vips: make(map[vip.VIP]*watchedVIP)}
	for i := range MaxVIPs {
		w.vips[numbered(i)] = &watchedVIP{}
	}
	if err := w.apply(ReportDelta{VIPs: reportsOf(map[vip.VIP]VIPReport{numbered(1): {}})}, false); err != nil {
		t.Fatalf("a known VIP: %v", err)
	}
	err := w.apply(ReportDelta{VIPs: reportsOf(map[vip.VIP]VIPReport{numbered(MaxVIPs): {}})}, false)
	if status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("one VIP too many: %v", err)
	}
}

// reportedAs returns a condition that reports whether the load balancer has exactly this complete
// report.
func reportedAs(b *testLB, want map[vip.VIP]VIPReport) func() bool {
	return func() bool {
		r := b.Report().Load()
		return r.Connected && r.Complete && maps.Equal(b.AllReported(), want)
	}
}

func TestReportFullThenChanges(t *testing.T) {
	b := startSyncedLB(t, 1)
	f := startFrontend(t, b.path, nil)
	want := map[vip.VIP]VIPReport{}
	for i := range 2*reportsPerPart + 1 {
		want[numbered(i)] = VIPReport{
			Advertisement: announced,
			Reason:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY,
		}
	}
	f.Report(ReportDelta{
		Applied: Position{"i", 7}, Families: map[vip.Family]bool{vip.IPv4: true, vip.IPv6: false},
		VIPs: reportsOf(want),
	})
	harness.Must(t, f.Reported(testContext(t)))
	await.True(t, "everything arrives", reportedAs(b, want))
	r := b.Report().Load()
	if r.Applied != (Position{"i", 7}) || !maps.Equal(r.Families,
		map[vip.Family]bool{vip.IPv4: true, vip.IPv6: false}) || r.Advertised != len(want) {
		t.Fatalf("the report is %+v", r)
	}
	// A change is one small message.
	down := VIPReport{
		Advertisement: withdrawn,
		Reason:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY, Unconfirmed: true,
	}
	want[numbered(3)] = down
	f.Report(ReportDelta{Applied: Position{"i", 8}, VIPs: reportsOf(map[vip.VIP]VIPReport{numbered(3): down})})
	await.True(t, "the change arrives", reportedAs(b, want))
	if r := b.Report().Load(); r.Applied.Revision != 8 || r.Advertised != len(want)-1 || len(r.Families) != 2 {
		t.Fatalf("the report is %+v", r)
	}
	// A VIP that left the configuration is reported once.
	want[numbered(4)] = VIPReport{
		Advertisement: withdrawn,
		Reason:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_CONFIGURED,
	}
	f.Report(ReportDelta{Removed: []vip.VIP{numbered(4)}})
	await.True(t, "the removal arrives", reportedAs(b, want))
	delete(want, numbered(4))
	table := NewTable(TableOptions{Lease: time.Minute})
	table.Commit(Decision{Synced: true})
	b.kill()
	b = startLB(t, b.path, table)
	await.True(t, "everything is reported to the next load balancer", reportedAs(b, want))
	// At the end the load balancer has read the last report.
	f.Report(ReportDelta{VIPs: reportsOf(map[vip.VIP]VIPReport{numbered(5): down})})
	f.stop()
	if r, _ := b.Reported(numbered(5)); r != down || strings.Contains(f.log.String(), "in time") {
		t.Fatalf("after the watcher ended, the last report is %+v\n%s", r, f.log)
	}
}

func TestReportCompleteWithLastPart(t *testing.T) {
	var p ReportDelta
	for i := range 2*reportsPerPart + 1 {
		p.VIPs = append(p.VIPs, ReportedVIP{numbered(i), VIPReport{Advertisement: announced}})
	}
	messages := slices.Collect(p.messages("w"))
	if len(messages) != 3 {
		t.Fatalf("%d messages", len(messages))
	}
	for i, m := range messages {
		_, complete, err := decodeReport(m)
		if err != nil || complete != (i == 2) || m.GetWatchId() != "w" {
			t.Fatalf("message %d: complete=%v, %v", i, complete, err)
		}
	}
}

// reportsOf returns reports in ascending order.
func reportsOf(m map[vip.VIP]VIPReport) (list []ReportedVIP) {
	for _, v := range slices.SortedFunc(maps.Keys(m), vip.Compare) {
		list = append(list, ReportedVIP{v, m[v]})
	}
	return list
}

func TestReportedTimeoutError(t *testing.T) {
	w := NewWatcher(WatcherOptions{Target: "/nowhere", Credentials: fakeCredentials{id: frontendID}})
	if err := w.Reported(context.Background()); err != nil {
		t.Fatalf("with nothing to report: %v", err)
	}
	w.Report(ReportDelta{VIPs: reportsOf(map[vip.VIP]VIPReport{numbered(1): {Advertisement: withdrawn}})})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := w.Reported(ctx); err == nil || !strings.Contains(err.Error(), "no connection") {
		t.Fatalf("without a load balancer: %v", err)
	}
}

// nonReadingServer accepts a report stream and never reads it, or refuses it.
type nonReadingServer struct {
	*Server
	refuse func() error
}

func (s nonReadingServer) ReportAdvertisement(
	stream grpc.ClientStreamingServer[readinessv1.ReportAdvertisementRequest, readinessv1.ReportAdvertisementResponse],
) error {
	if err := s.refuse(); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func startNonReading(t *testing.T, refuse func() error) (path string) {
	table := NewTable(TableOptions{Lease: time.Minute})
	table.Commit(Decision{Synced: true})
	path = socketPath(t)
	server := NewServer(table, ServerOptions{Peer: fakePeer, Role: RolesOf([]spiffeid.ID{frontendID}, nil)})
	serveGRPC(t, path, nonReadingServer{server, refuse}, fakeCredentials{})
	return path
}

func TestNonReadingLBDelaysNoReport(t *testing.T) {
	f := startFrontend(t, startNonReading(t, func() error { return nil }), nil)
	f.waitFor(t, "synced", func() bool { return f.Synced })
	rounds := 0
	report := func() {
		var d ReportDelta
		rounds++
		for i := range 2000 {
			d.VIPs = append(d.VIPs, ReportedVIP{numbered(i), VIPReport{Advertisement: announced, Unconfirmed: rounds%2 == 0}})
		}
		f.Report(d)
	}
	// Reports are written one by one until the window is full; then pending reports are merged.
	var err error
	for err == nil && rounds < 100 {
		report()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		err = f.Reported(ctx)
		cancel()
	}
	if err == nil || !strings.Contains(err.Error(), "the stream is blocked") {
		t.Fatalf("Reported: %v", err)
	}
	for range 50 {
		report() // would block here
	}
	f.queue.mu.Lock()
	n := len(f.queue.reporter.dirty)
	f.queue.mu.Unlock()
	if n > 2000 {
		t.Fatalf("%d values wait", n)
	}
	f.stop() // ends within half a second without a response
}

func TestRefusedReportIsRetried(t *testing.T) {
	refusals := make(chan struct{}, 100)
	f := startFrontend(t, startNonReading(t, func() error {
		select {
		case refusals <- struct{}{}:
		default:
		}
		return status.Error(codes.PermissionDenied, "not you")
	}), func(o *WatcherOptions) { o.MaxBackoff = minBackoff })
	f.waitFor(t, "synced", func() bool { return f.Synced })
	f.Report(ReportDelta{VIPs: reportsOf(map[vip.VIP]VIPReport{numbered(1): {Advertisement: announced}})})
	for range 3 {
		select {
		case <-refusals:
		case <-time.After(waitLimit):
			t.Fatal("the report was not tried again")
		}
	}
	if n := f.Stats().ReportFailures; n < 2 {
		t.Fatalf("%d failures were counted", n)
	}
	f.apply(f.Take())
	if !f.Synced {
		t.Fatal("the watch suffered from the report")
	}
	if !strings.Contains(f.log.String(), "not you") {
		t.Fatalf("the log:\n%s", f.log)
	}
}

func TestSeveralReportStreams(t *testing.T) {
	b := startSyncedLB(t, 1)
	s, _ := watchRaw(t, b, frontendID)
	id := recv(t, s).GetWatchId()
	for i := range 3 {
		report, end := reportRaw(t, b, frontendID)
		send(t, report, reportOf(id, numbered(i).String(), announced))
		// A new stream starts with a full report and replaces the earlier one.
		want := map[vip.VIP]VIPReport{numbered(i): {Advertisement: announced}}
		await.True(t, fmt.Sprintf("stream %d counts", i), reportedAs(b, want))
		if i == 1 {
			end() // the earlier stream is still open
		}
	}
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
