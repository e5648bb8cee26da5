package readiness

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

func TestSnapshotThenDeltas(t *testing.T) {
	path, table := socketPath(t), NewTable(TableOptions{StaleGrace: 2 * time.Second})
	startLB(t, path, table)
	sendHeartbeats(t, table)
	drains := ready(v2)
	drains.State, drains.DrainEnd = vip.Draining, time.Now().Add(time.Minute)
	table.Commit(Decision{Changed: []VIPReadiness{ready(v1), notReady("2000::1/128"), drains}, Synced: true})
	f := startFrontend(t, path, nil)
	f.waitFor(t, "snapshot", f.at(table))
	if !f.Complete || !f.Open || f.StaleGrace != 2*time.Second || len(f.vips) != 3 || f.ReceivedAt.IsZero() {
		t.Fatalf("after the snapshot: %+v", f.Update)
	}
	if lease := f.LeaseEnd.Sub(f.LastMessage); lease <= 0 || lease > DefaultLease {
		t.Fatalf("the lease is %v", lease)
	}
	if r := f.vips[vip.Require("2000::1/128")]; r.State != vip.NotReady || r.Detail != "connect: connection refused" ||
		r.TotalTargets != 1 || r.Since.IsZero() {
		t.Fatalf("2000::1/128 is %+v", r)
	}
	got := f.vips[drains.VIP]
	if off := got.DrainEnd.Sub(drains.DrainEnd); got.State != vip.Draining || off < 0 || off > waitLimit {
		t.Fatalf("%+v, off by %v", got, off)
	}
	table.Commit(Decision{
		Changed: []VIPReadiness{ready("2000::1/128")}, Removed: []vip.VIP{vip.Require(v1)},
		Synced: true,
	})
	f.waitFor(t, "delta", f.at(table))
	if f.Complete || len(f.Update.Changed) != 1 || !slices.Equal(f.Removed, []vip.VIP{vip.Require(v1)}) {
		t.Fatalf("after the delta: %+v", f.Update)
	}
	before := f.LeaseEnd
	f.waitFor(t, "heartbeats renew the lease", func() bool { return f.LeaseEnd.After(before.Add(time.Second)) })
	table.GoAway(time.Minute)
	f.waitFor(t, "going away", func() bool { return f.GoingAway })
	if left := time.Until(f.DrainEnd); left < 30*time.Second || left > time.Minute {
		t.Fatalf("draining ends in %v", left)
	}
}

func TestHungLBLeaseExpires(t *testing.T) {
	path, table := socketPath(t), NewTable(TableOptions{Lease: 100 * time.Millisecond})
	startLB(t, path, table)
	table.Commit(Decision{Changed: numberedReady(1), Synced: true})
	stop := sendHeartbeats(t, table)
	f := startFrontend(t, path, nil)
	f.waitFor(t, "synced", f.at(table))
	stop()
	await.True(t, "the lease expires without heartbeats", func() bool {
		f.apply(f.Take())
		return f.LeaseEnd.Before(time.Now())
	})
	if !f.Open || !f.Synced {
		t.Fatalf("the stream ended: %+v", f.Update)
	}
	// A watch that opens now receives nothing.
	late := startFrontend(t, path, nil)
	await.True(t, "the late watch is open", func() bool { return watchers(table) == 2 })
	if late.apply(late.Take()); late.Open {
		t.Fatalf("a hung load balancer sent a message: %+v", late.Update)
	}
	// Any message renews the lease, also after its end, on the same stream.
	ended := f.LeaseEnd
	sendHeartbeats(t, table)
	f.waitFor(t, "the lease is renewed", func() bool { return f.LeaseEnd.After(ended) })
	late.waitFor(t, "the late watch is synced", late.at(table))
	if n := f.Stats().Streams; n != 1 {
		t.Fatalf("%d streams", n)
	}
}

func watchers(t *Table) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.cursors)
}

func TestUnsyncedRestartKeepsState(t *testing.T) {
	path := socketPath(t)
	first := NewTable(TableOptions{Lease: time.Minute})
	first.Commit(Decision{Changed: []VIPReadiness{ready(v1), notReady(v2)}, Synced: true})
	b := startLB(t, path, first)
	f := startFrontend(t, path, nil)
	f.waitFor(t, "synced", f.at(first))
	b.kill()
	f.waitFor(t, "the end is noticed", func() bool { return !f.Synced && !f.Open })
	ended := f.EndedAt
	if f.Err == nil || ended.IsZero() {
		t.Fatalf("after the end: %+v", f.Update)
	}
	second := NewTable(TableOptions{Lease: time.Minute})
	second.Commit(Decision{Changed: []VIPReadiness{notReady(v1), ready(v2)}})
	startLB(t, path, second)
	f.waitFor(t, "a message of the next one", func() bool { return f.Open })
	if f.Synced || !f.EndedAt.Equal(ended) || f.Position != first.Position() ||
		f.vips[vip.Require(v1)].State != vip.Ready {
		t.Fatalf("an unsynced load balancer changed something: %+v", f.Update)
	}
	second.Commit(Decision{Changed: []VIPReadiness{ready(v1)}, Removed: []vip.VIP{vip.Require(v2)}, Synced: true})
	f.waitFor(t, "synced again", f.at(second))
	if !f.Complete || len(f.vips) != 1 || f.vips[vip.Require(v1)].State != vip.Ready {
		t.Fatalf("%+v", f.Update)
	}
	await.True(t, "it is counted", func() bool {
		s := f.Stats()
		return s.Reconnects() == 1 && s.Streams == 2 && s.Failures > 0
	})
}

func TestLBStartsLater(t *testing.T) {
	path, table := socketPath(t), NewTable(TableOptions{Lease: time.Minute})
	table.Commit(Decision{Changed: numberedReady(1), Synced: true})
	// With an hour of back-off, only the poll of the socket can find it.
	f := startFrontend(t, path, func(o *WatcherOptions) { o.MaxBackoff = time.Hour })
	f.waitFor(t, "a failure", func() bool { return f.Err != nil })
	await.True(t, "the back-off has grown", func() bool { return f.Stats().Failures >= 5 })
	if !errors.Is(f.Err, fs.ErrNotExist) || !strings.Contains(f.Err.Error(), path+" does not exist") {
		t.Fatalf("the error: %v", f.Err)
	}
	// Between bind and listen the kernel refuses connections with a different error.
	startLB(t, path+"-new", table)
	harness.Must(t, os.Rename(path+"-new", path))
	f.waitFor(t, "synced", f.at(table))
	if f.Err != nil {
		t.Fatalf("the error stays: %v", f.Err)
	}
	// The failure is logged once, not at each attempt, and at Info, because both processes may be
	// starting.
	if n := strings.Count(f.log.String(), `level=INFO msg="readiness connection failed"`); n != 1 ||
		strings.Contains(f.log.String(), "level=WARN") {
		t.Fatalf("%d lines:\n%s", n, f.log)
	}
	k := reconnector{w: &Watcher{}, started: time.Now()}
	if !k.isStarting(fs.ErrNotExist) || k.isStarting(fs.ErrPermission) {
		t.Error("an lb that does not listen yet is taken for another failure")
	}
	if k.started = k.started.Add(-startTime - time.Second); k.isStarting(fs.ErrNotExist) {
		t.Error("an lb that does not start is not warned of")
	}
	k.started = time.Now()
	if k.w.count(func(s *Stats) { s.Streams++ }); k.isStarting(fs.ErrNotExist) {
		t.Error("an lb that was lost is not warned of")
	}
}

// scripted is a load balancer that sends a script.
type scripted struct {
	readinessv1.UnimplementedReadinessServiceServer
	mu     sync.Mutex
	script []*response
	err    error
	hold   bool // keep the stream open after the script
}

func (s *scripted) WatchReadiness(_ *readinessv1.WatchReadinessRequest,
	stream grpc.ServerStreamingServer[response],
) error {
	s.mu.Lock()
	script, err, hold := s.script, s.err, s.hold
	s.mu.Unlock()
	for _, m := range script {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	if hold {
		<-stream.Context().Done()
	}
	return err
}

func startScripted(t *testing.T, s *scripted) (path string) {
	path = socketPath(t)
	serveGRPC(t, path, s, fakeCredentials{})
	return path
}

func TestHostileLBIsRetried(t *testing.T) {
	s := &scripted{hold: true, script: []*response{message(5, snapshotOf(true, v1)), message(4, heartbeat)}}
	f := startFrontend(t, startScripted(t, s), func(o *WatcherOptions) { o.MaxBackoff = minBackoff })
	f.waitFor(t, "a violation", func() bool { return f.Err != nil })
	if !strings.Contains(f.Err.Error(), "readiness protocol violation") ||
		!strings.Contains(f.Err.Error(), "went back from 5 to 4") {
		t.Fatalf("the error: %v", f.Err)
	}
	if f.Synced || f.EndedAt.IsZero() {
		t.Fatalf("%+v", f.Update)
	}
	// The load balancer recovers.
	s.mu.Lock()
	s.script = s.script[:1]
	s.mu.Unlock()
	f.waitFor(t, "synced", func() bool { return f.Synced })
	await.True(t, "both streams are counted", func() bool { return f.Stats().Reconnects() >= 1 })
}

func TestHugeMessageEndsStream(t *testing.T) {
	m := message(5, snapshotOf(true, v1))
	m.GetSnapshot().Groups[0].Readiness.Detail = strings.Repeat("x", MaxMessageBytes)
	f := startFrontend(t, startScripted(t, &scripted{script: []*response{m}}), nil)
	f.waitFor(t, "it is refused", func() bool { return f.Err != nil })
	if !strings.Contains(f.Err.Error(), "larger than max") {
		t.Fatalf("the error: %v", f.Err)
	}
}

func TestRunEndsWithContext(t *testing.T) {
	b := startSyncedLB(t, 1)
	for _, path := range []string{b.path, socketPath(t)} {
		for i := range 30 {
			w := NewWatcher(WatcherOptions{Target: path, Credentials: fakeCredentials{id: frontendID}})
			w.Report(ReportDelta{VIPs: reportsOf(map[vip.VIP]VIPReport{numbered(1): {Advertisement: announced}})})
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*200*time.Microsecond)
			done := make(chan error, 1)
			go func() { done <- w.Run(ctx) }()
			select {
			case err := <-done:
				harness.Must(t, err)
			case <-time.After(waitLimit):
				t.Fatal("Run does not end")
			}
			cancel()
		}
	}
	await.True(t, "the load balancer has forgotten them", func() bool { return len(b.Watchers()) == 0 })
}
