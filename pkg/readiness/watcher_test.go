package readiness

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"pgregory.net/rapid"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
)

func TestSnapshotThenDeltas(t *testing.T) {
	path, table := socketPath(t), NewTable(TableOptions{StaleGrace: 2 * time.Second})
	startLB(t, path, table)
	sendHeartbeats(t, table)
	table.Commit(Decision{Changed: []VIPReadiness{ready(v1), notReady("2000::1/128")}, Synced: true})
	f := startFrontend(t, path, nil)
	f.waitFor(t, "snapshot", f.at(table))
	if !f.Complete || !f.Open || f.StaleGrace != 2*time.Second || len(f.vips) != 2 || f.ReceivedAt.IsZero() {
		t.Fatalf("after the snapshot: %+v", f.Update)
	}
	if lease := f.LeaseEnd.Sub(f.LastMessage); lease <= 0 || lease > DefaultLease {
		t.Fatalf("the lease is %v", lease)
	}
	if r := f.vips[vip.Require("2000::1/128")]; r.State != vip.NotReady || r.Detail != "connect: connection refused" ||
		r.TotalTargets != 1 || r.Since.IsZero() {
		t.Fatalf("2000::1/128 is %+v", r)
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

func TestDrainEnd(t *testing.T) {
	b := startSyncedLB(t, 0)
	r := ready(v1)
	r.State, r.DrainEnd = vip.Draining, time.Now().Add(time.Minute)
	b.table.Commit(Decision{Changed: []VIPReadiness{r}})
	f := startFrontend(t, b.path, nil)
	f.waitFor(t, "synced", f.at(b.table))
	got := f.vips[r.VIP]
	if off := got.DrainEnd.Sub(r.DrainEnd); got.State != vip.Draining || off < 0 || off > waitLimit {
		t.Fatalf("%+v, off by %v", got, off)
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
	if err := os.Rename(path+"-new", path); err != nil {
		t.Fatal(err)
	}
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
	opened atomic.Int64
}

func (s *scripted) WatchReadiness(_ *readinessv1.WatchReadinessRequest,
	stream grpc.ServerStreamingServer[response],
) error {
	s.opened.Add(1)
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
	done := make(chan error, 1)
	g := serveGRPC(t, path, s, done)
	t.Cleanup(func() { g.Stop(); <-done })
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

func TestShortStreamsBackOff(t *testing.T) {
	s := &scripted{script: []*response{message(5, snapshotOf(true, v1))}}
	f := startFrontend(t, startScripted(t, s), nil)
	await.True(t, "it ended thrice", func() bool { return s.opened.Load() >= 3 })
	if f.apply(f.Take()); f.Stats().Failures < 2 {
		t.Fatalf("%+v", f.Stats())
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
				if err != nil {
					t.Fatal(err)
				}
			case <-time.After(waitLimit):
				t.Fatal("Run does not end")
			}
			cancel()
		}
	}
	await.True(t, "the load balancer has forgotten them", func() bool { return len(b.Watchers()) == 0 })
}

// TestTableAndWatcherConverge is a model test over a real connection: for any order of decisions,
// restarts, rotations, unsynced phases and slow consumers, every taken state is a state of the
// table, and in the end it is the newest.
func TestTableAndWatcherConverge(t *testing.T) {
	path := socketPath(t)
	rapid.Check(t, func(r *rapid.T) {
		var svid clock
		history := map[Position]map[vip.VIP]vip.State{}
		var table *Table
		var b *testLB
		model := map[vip.VIP]vip.State{}
		commit := func(synced bool) {
			d := Decision{Synced: synced}
			for range rapid.IntRange(0, 3).Draw(r, "changes") {
				v := numbered(rapid.IntRange(0, 7).Draw(r, "vip"))
				s := vip.State(rapid.IntRange(0, 2).Draw(r, "state"))
				d.Changed = append(d.Changed, VIPReadiness{VIP: v, State: s})
				model[v] = s
			}
			if rapid.Bool().Draw(r, "remove") {
				v := numbered(rapid.IntRange(0, 7).Draw(r, "vip"))
				d.Removed = append(d.Removed, v)
				delete(model, v)
			}
			// The state is recorded before the commit can be observed.
			next := table.Position()
			next.Revision++
			history[next] = maps.Clone(model)
			table.Commit(d)
		}
		synced := false
		restart := func() {
			if b != nil {
				b.kill()
			}
			table = NewTable(TableOptions{Lease: time.Minute})
			clear(model)
			synced = rapid.Bool().Draw(r, "synced")
			commit(synced)
			b = startLB(t, path, table)
		}
		restart()
		f := startFrontend(t, path, func(o *WatcherOptions) { o.Rotation, o.MaxBackoff = svid.get, minBackoff })
		check := func(*rapid.T) {
			if f.Position == (Position{}) {
				return
			}
			want, ok := history[f.Position]
			if !ok || !sameStates(f.vips, want) {
				r.Fatalf("at %+v: got %v, want %v", f.Position, statesOf(f.vips), want)
			}
		}
		r.Repeat(map[string]func(*rapid.T){
			"commit":  func(*rapid.T) { commit(synced) },
			"commit2": func(*rapid.T) { commit(synced) },
			"sync":    func(*rapid.T) { synced = true; commit(true) },
			"beat":    func(*rapid.T) { table.Heartbeat() },
			"rotate":  func(*rapid.T) { svid.rotate() },
			"away": func(*rapid.T) {
				next := table.Position()
				next.Revision++
				history[next] = maps.Clone(model)
				table.GoAway(time.Minute)
			},
			"take": func(*rapid.T) { f.apply(f.Take()) },
			"hear": func(*rapid.T) {
				select {
				case <-f.Changed():
					f.apply(f.Take())
				case <-time.After(time.Millisecond):
				}
			},
			"restart": func(*rapid.T) {
				if rapid.IntRange(0, 4).Draw(r, "really") == 0 {
					restart()
				}
			},
			"": check,
		})
		synced = true
		commit(true)
		f.waitFor(t, fmt.Sprintf("the last state %+v is heard", table.Position()), f.at(table))
		check(r)
		if !sameStates(f.vips, model) {
			r.Fatalf("in the end: got %v, want %v", statesOf(f.vips), model)
		}
		f.stop()
		b.kill()
	})
}

func statesOf(m map[vip.VIP]VIPReadiness) map[vip.VIP]vip.State {
	s := make(map[vip.VIP]vip.State, len(m))
	for v, r := range m {
		s[v] = r.State
	}
	return s
}

// sameStates reports whether the VIPs of m have exactly the given states.
func sameStates(m map[vip.VIP]VIPReadiness, states map[vip.VIP]vip.State) bool {
	return maps.EqualFunc(m, states, func(r VIPReadiness, s vip.State) bool { return r.State == s })
}
