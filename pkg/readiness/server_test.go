package readiness

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

type watchStream interface {
	Recv() (*readinessv1.WatchReadinessResponse, error)
}

func watchRaw(t testing.TB, b *testLB, id spiffeid.ID) (stream watchStream, cancel context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), streamLimit)
	stream, err := dialRaw(t, b.path, id).WatchReadiness(ctx, &readinessv1.WatchReadinessRequest{Reader: "raw"})
	harness.Must(t, err)
	t.Cleanup(cancel)
	return stream, cancel
}

func recv(t testing.TB, s watchStream) *readinessv1.WatchReadinessResponse {
	t.Helper()
	m, err := s.Recv()
	harness.Must(t, err)
	return m
}

// startSyncedLB serves n ready VIPs with a long lease.
func startSyncedLB(t testing.TB, n int) *testLB {
	t.Helper()
	table := NewTable(TableOptions{Lease: time.Minute})
	table.Commit(Decision{Changed: numberedReady(n), Synced: true})
	return startLB(t, socketPath(t), table)
}

func TestRoles(t *testing.T) {
	b := startSyncedLB(t, 1)
	want := map[spiffeid.ID][3]codes.Code{ // get, watch, report
		frontendID: {codes.OK, codes.OK, codes.OK},
		readerID:   {codes.OK, codes.OK, codes.PermissionDenied},
		unknownID:  {codes.PermissionDenied, codes.PermissionDenied, codes.PermissionDenied},
	}
	for id, codesWant := range want {
		t.Run(id.Path(), func(t *testing.T) {
			ctx := testContext(t)
			client := dialRaw(t, b.path, id)
			_, get := client.GetReadiness(ctx, &readinessv1.GetReadinessRequest{})
			stream, err := client.WatchReadiness(ctx, &readinessv1.WatchReadinessRequest{})
			harness.Must(t, err)
			_, watch := stream.Recv()
			report, err := client.ReportAdvertisement(ctx)
			harness.Must(t, err)
			_, reported := report.CloseAndRecv()
			for i, err := range []error{get, watch, reported} {
				if status.Code(err) != codesWant[i] {
					t.Errorf("call %d: %v, want %v", i, err, codesWant[i])
				}
			}
		})
	}
	if log := b.log.String(); !strings.Contains(log, `msg="call denied on the readiness socket"`) ||
		!strings.Contains(log, "peer="+readerID.String()+" method=ReportAdvertisement") {
		t.Errorf("denials were not logged:\n%s", log)
	}
}

func TestMessagesAreSplit(t *testing.T) {
	b := startSyncedLB(t, 2*vipsPerPart+101)
	s, _ := watchRaw(t, b, readerID)
	seen := vip.Set{}
	for i, want := range []int{vipsPerPart, vipsPerPart, 101} {
		m := recv(t, s)
		names := namesOf(m.GetSnapshot().GetGroups())
		if n := len(names); n != want || m.GetSnapshot().GetLast() != (i == 2) ||
			m.GetPosition().GetRevision() != 1 || m.GetLease() == nil || (m.GetWatchId() != "") != (i == 0) {
			t.Fatalf("part %d has %d VIPs: last=%v position=%v lease=%v watch=%q", i, n, m.GetSnapshot().GetLast(),
				m.GetPosition(), m.GetLease(), m.GetWatchId())
		}
		for _, name := range names {
			seen[vip.Require(name)] = struct{}{}
		}
	}
	if len(seen) != 2*vipsPerPart+101 {
		t.Fatalf("the parts hold %d VIPs", len(seen))
	}
	d := Decision{}
	for i := range 2 * vipsPerPart {
		d.Changed = append(d.Changed, VIPReadiness{VIP: numbered(i)})
	}
	for i := range 50 {
		d.Removed = append(d.Removed, numbered(2*vipsPerPart+i))
	}
	b.table.Commit(d)
	n := 0
	for i := range 3 {
		m := recv(t, s)
		n += len(namesOf(m.GetDelta().GetChanged())) + len(m.GetDelta().GetRemoved())
		// The 200 VIPs of the first revision, the 200 others, and the removed ones have a revision each.
		if !m.GetDelta().GetLast() || m.GetPosition().GetRevision() != uint64(2+i) {
			t.Fatalf("revision %d of the decision: %v %v", i, m.GetDelta().GetLast(), m.GetPosition())
		}
	}
	if n != 2*vipsPerPart+50 {
		t.Fatalf("the delta names %d VIPs", n)
	}
}

// namesOf returns the VIPs of all groups.
func namesOf(groups []*readinessv1.ReadinessGroup) (names []string) {
	for _, group := range groups {
		names = append(names, group.GetVips()...)
	}
	return names
}

// longest is a VIP whose message has the maximum size.
func longest(i int) VIPReadiness {
	return VIPReadiness{
		VIP: vip.Require(fmt.Sprintf("2000:aaaa:bbbb:cccc:dddd:eeee:ffff:%x/128", 0xf000+i)), State: vip.Draining,
		Reason: readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING, Detail: strings.Repeat("x", MaxDetailBytes),
		ReadyTargets: 1<<32 - 1, TotalTargets: 1<<32 - 1, Since: time.Now(), DrainEnd: time.Now().Add(time.Hour),
	}
}

func TestLargestMessageFitsLimit(t *testing.T) {
	m := &readinessv1.Snapshot{}
	for i := range MaxVIPsPerMessage {
		r := longest(i)
		group := &readinessv1.ReadinessGroup{Readiness: r.Proto(time.Now()), Vips: []string{r.VIP.String()}}
		m.Groups = append(m.Groups, group)
	}
	if n := proto.Size(m); n > MaxMessageBytes*9/10 {
		t.Fatalf("%d VIPs take %d bytes", len(m.GetGroups()), n)
	}
}

// TestPartFitsPooledBuffer sends a part with the maximum number of VIPs and of groups.
func TestPartFitsPooledBuffer(t *testing.T) {
	table := NewTable(TableOptions{Lease: time.Minute, StaleGrace: time.Hour})
	d := Decision{Synced: true}
	for i := range vipsPerPart {
		r := longest(i)
		r.ReadyTargets -= uint32(min(i, groupsPerPart-1))
		d.Changed = append(d.Changed, r)
	}
	table.Commit(d)
	c := table.open()
	defer table.close(c)
	sent := 0
	for m := range table.next(c, time.Now()).messages() {
		sent += len(namesOf(m.GetSnapshot().GetGroups()))
		if n := proto.Size(m); n > 31<<10 {
			t.Fatalf("%d VIPs take %d bytes", sent, n)
		}
	}
	if sent != vipsPerPart {
		t.Fatalf("%d VIPs", sent)
	}
}

func TestHeartbeatsNeedTheOwner(t *testing.T) {
	b := startSyncedLB(t, 1)
	s, _ := watchRaw(t, b, readerID)
	recv(t, s)
	for range 3 {
		b.table.Heartbeat()
		if m := recv(t, s); m.GetHeartbeat() == nil || m.GetPosition().GetRevision() != 1 {
			t.Fatalf("after a beat: %v", m)
		}
	}
	// The delta is next: nothing was sent in between.
	b.table.Commit(Decision{Removed: []vip.VIP{numbered(0)}})
	if m := recv(t, s); !slices.Equal(m.GetDelta().GetRemoved(), []string{numbered(0).String()}) {
		t.Fatalf("after a decision: %v", m)
	}
}

func TestHungLBStopsPartialSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := NewTable(TableOptions{})
		table.Commit(Decision{Changed: numberedReady(5000), Synced: true})
		s := NewServer(table, ServerOptions{})
		w := s.openWatch(frontendID, "slow")
		defer s.closeWatch(w)
		ctx, cancel := context.WithCancel(t.Context())
		sent := make(chan time.Duration) // the leases; sending waits for the reader
		done := make(chan error, 1)
		go func() {
			done <- s.serve(ctx, w, func(m *response) error {
				select {
				case sent <- m.GetLease().AsDuration():
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
		}()
		if lease := <-sent; lease != time.Second {
			t.Errorf("the first part is valid for %v", lease)
		}
		synctest.Wait() // the second part is on its way, with its lease
		<-time.After(2 * time.Second)
		<-sent
		select {
		case lease := <-sent:
			t.Errorf("the third part came, valid for %v", lease)
		case <-time.After(time.Minute):
		}
		table.Heartbeat()
		if lease := <-sent; lease != time.Second {
			t.Errorf("the third part is valid for %v", lease)
		}
		cancel()
		<-done
	})
}

func TestGoingAwayReachesAllWatches(t *testing.T) {
	b := startSyncedLB(t, 1)
	early, _ := watchRaw(t, b, readerID)
	recv(t, early)
	b.table.GoAway(time.Hour)
	b.table.GoAway(time.Second) // the first drain time is kept
	late, _ := watchRaw(t, b, readerID)
	if m := recv(t, late); m.GetSnapshot() == nil {
		t.Fatalf("a later watch begins with %v", m)
	}
	for name, s := range map[string]watchStream{"early": early, "late": late} {
		if m := recv(t, s); m.GetGoingAway().GetDrainFor().AsDuration() <= 50*time.Minute {
			t.Fatalf("%s: %v", name, m)
		}
	}
	// GoAway has a revision, which a watch sends afterwards; the late watch started at it.
	if m := recv(t, early); m.GetDelta() == nil || len(m.GetDelta().GetChanged()) != 0 ||
		m.GetPosition().GetRevision() != b.table.Position().Revision {
		t.Fatalf("going away is followed by %v", m)
	}
	b.table.Heartbeat()
	if m := recv(t, early); m.GetHeartbeat() == nil {
		t.Fatalf("after going away the lease is not renewed: %v", m)
	}
}

func TestStreamLimit(t *testing.T) {
	b := startSyncedLB(t, 1)
	var cancels []context.CancelFunc
	for range DefaultMaxStreamsPerPeer {
		s, cancel := watchRaw(t, b, readerID)
		recv(t, s)
		cancels = append(cancels, cancel)
	}
	s, _ := watchRaw(t, b, readerID)
	if _, err := s.Recv(); status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("one stream too many: %v", err)
	}
	other, _ := watchRaw(t, b, frontendID)
	recv(t, other)
	cancels[0]()
	await.True(t, "a stream may open after another ended", func() bool {
		s, cancel := watchRaw(t, b, readerID)
		_, err := s.Recv()
		if err != nil {
			cancel()
		}
		return err == nil
	})
	if !strings.Contains(b.log.String(), "too many open streams") {
		t.Error("the refusal was not logged")
	}
}

func TestGetReadinessPages(t *testing.T) {
	b := startSyncedLB(t, 2500)
	client := dialRaw(t, b.path, readerID)
	for _, tt := range []struct{ size, pages int }{{0, 2}, {1000, 3}, {2000, 2}, {999_999, 2}} {
		var got []string
		pages, token := 0, ""
		for {
			r, err := client.GetReadiness(testContext(t), &readinessv1.GetReadinessRequest{
				PageSize:  uint32(tt.size),
				PageToken: token,
			})
			harness.Must(t, err)
			pages++
			got = append(got, namesOf(r.GetGroups())...)
			if !r.GetSynced() || r.GetLease().AsDuration() <= 0 || r.GetPosition().GetRevision() != 1 {
				t.Fatalf("page %d: %v %v %v", pages, r.GetSynced(), r.GetLease(), r.GetPosition())
			}
			if token = r.GetNextPageToken(); token == "" {
				break
			}
		}
		if pages != tt.pages || len(got) != 2500 || got[0] != numbered(0).String() || got[2499] != numbered(2499).String() {
			t.Fatalf("page size %d: %d pages with %d VIPs", tt.size, pages, len(got))
		}
	}
	if _, err := client.GetReadiness(testContext(t),
		&readinessv1.GetReadinessRequest{PageToken: "x"}); status.Code(err) != codes.InvalidArgument {
		t.Fatalf("a bad token: %v", err)
	}
}

// TestStoppedReaderDelaysNoWatch tests a reader that stops reading after the first message. It must
// not affect decisions, another reader or the size of the table. When it resumes, it must receive
// merged values and end in the newest state.
func TestStoppedReaderDelaysNoWatch(t *testing.T) {
	const n, rounds = 3000, 12
	table := NewTable(TableOptions{Lease: time.Minute})
	decide := func(round int) Decision {
		d := Decision{Synced: true}
		for i := range n {
			d.Changed = append(d.Changed, VIPReadiness{
				VIP: numbered(i), State: vip.State(round % 2),
				Detail: fmt.Sprintf("round %d: %s", round, strings.Repeat("x", 200)),
			})
		}
		return d
	}
	table.Commit(decide(0))
	half := uint64(0) // revision after half of the rounds
	b := startLB(t, socketPath(t), table)
	stopped, _ := watchRaw(t, b, readerID)
	var d decoder
	merger, h := newUpdateMerger(), &streamState{}
	var v view
	receive := func() {
		t.Helper()
		s, err := d.decode(recv(t, stopped), time.Now())
		if err == nil {
			err = merger.merge(h, s, time.Now())
		}
		harness.Must(t, err)
		v.apply(merger.take())
	}
	receive()
	f := startFrontend(t, b.path, nil)
	for round := 1; round <= rounds; round++ {
		table.Commit(decide(round))
		f.waitFor(t, fmt.Sprintf("the other reader has round %d", round), f.at(table))
		if round == rounds/2 {
			half = table.Position().Revision
		}
	}
	for _, w := range b.Watchers() {
		if w.Reader == "raw" && w.SentRevision > half {
			t.Fatalf("the stopped reader was sent revision %d of %v: it did not stop", w.SentRevision, table.Position())
		}
	}
	if bound := 2*n + logSlack; len(table.log) > bound {
		t.Fatalf("the log has %d entries for %d VIPs", len(table.log), n)
	}
	parts, messages := 1, 0 // of the snapshot, and of all that follows
	for ; v.Position.Revision == 0; parts++ {
		receive()
	}
	for ; v.Position != table.Position(); messages++ {
		receive()
	}
	if len(v.vips) != n || v.vips[numbered(7)].State != vip.State(rounds%2) {
		t.Fatalf("the reader ended up with %d VIPs, %+v", len(v.vips), v.vips[numbered(7)])
	}
	// Each round has as many parts as the snapshot. The reader was sent those in flight and one
	// merged delta.
	if limit := rounds * parts / 2; messages > limit {
		t.Fatalf("after a snapshot of %d messages the reader was sent %d: not merged", parts, messages)
	}
}

func TestEndWatches(t *testing.T) {
	b := startSyncedLB(t, 1)
	s, _ := watchRaw(t, b, frontendID)
	m := recv(t, s)
	report, err := dialRaw(t, b.path, frontendID).ReportAdvertisement(testContext(t))
	harness.Must(t, err)
	harness.Must(t, report.Send(&readinessv1.ReportAdvertisementRequest{WatchId: m.GetWatchId()}))
	await.True(t, "the report is read", func() bool { return b.Report().Load().Connected })
	for range 2 { // also the second time
		harness.Must(t, b.EndWatches(testContext(t)))
	}
	if _, err := s.Recv(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "stopping") {
		t.Fatalf("the watch ended with %v", err)
	}
	if err := report.RecvMsg(&readinessv1.ReportAdvertisementResponse{}); status.Code(err) != codes.Unavailable {
		t.Fatalf("the report ended with %v", err)
	}
	late, _ := watchRaw(t, b, frontendID)
	if _, err := late.Recv(); status.Code(err) != codes.Unavailable {
		t.Fatalf("a late watch: %v", err)
	}
	if len(b.Watchers()) != 0 || b.Report().Load().Connected {
		t.Fatalf("left over: %+v, %+v", b.Watchers(), b.Report().Load())
	}
}

func TestEndWatchesTimeout(t *testing.T) {
	table := NewTable(TableOptions{Lease: time.Minute})
	table.Commit(Decision{Changed: numberedReady(50_000), Synced: true})
	b := startLB(t, socketPath(t), table)
	s, _ := watchRaw(t, b, readerID)
	recv(t, s) // the rest of the snapshot exceeds the flow control window
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := b.EndWatches(ctx); err == nil {
		t.Fatal("a handler that sits in Send was said to have ended")
	}
	b.kill() // ends the connection and thus the handler
	harness.Must(t, b.EndWatches(testContext(t)))
}
