package readiness

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

// TestBackoffBetweenAttempts runs against a socket path that does not exist, on a fake clock.
func TestBackoffBetweenAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWatcher(WatcherOptions{Target: "unix:///nowhere/lb.sock", Credentials: fakeCredentials{id: frontendID}})
		stop := harness.Run(t, w.Run)
		<-time.After(time.Minute)
		synctest.Wait()
		// About 7 attempts until the delay is 2 s (3.2 s), then one each 2 s ± 20 %.
		if n := w.Stats().Failures; n < 30 || n > 46 {
			t.Errorf("%d attempts in a minute", n)
		}
		stop()
		// timers of gRPC
		<-time.After(time.Minute)
	})
}

// clock is a generation counter, as in package identity.
type clock struct{ latest.Value[uint64] }

func (c *clock) rotate()                        { c.Update(func(n uint64) uint64 { return n + 1 }) }
func (c *clock) get() (uint64, <-chan struct{}) { return c.Get() }

func TestRotationMovesWithoutGap(t *testing.T) {
	path, table := socketPath(t), NewTable(TableOptions{Lease: time.Minute})
	b := startLB(t, path, table)
	table.Commit(Decision{Changed: numberedReady(3), Synced: true})
	var svid clock
	f := startFrontend(t, path, func(o *WatcherOptions) { o.Rotation = svid.get })
	f.waitFor(t, "synced", f.at(table))
	want := map[vip.VIP]VIPReport{numbered(1): {Advertisement: announced}}
	f.Report(ReportDelta{Applied: table.Position(), VIPs: reportsOf(want)})
	await.True(t, "reported", reportedAs(b, want))
	for move := range uint64(5) {
		old := b.Report().Load().WatchID
		_, changed := b.Report().Get()
		svid.rotate()
		// At any time a report stream is open and the lease is valid.
		deadline, tick := time.After(waitLimit), time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for moved := false; !moved; {
			select {
			case <-changed:
				var r Report
				r, changed = b.Report().Get()
				if !r.Connected {
					t.Fatalf("move %d: no stream reported", move)
				}
			case <-f.Changed():
				f.apply(f.Take())
				if !f.Open || !f.Synced || f.GoingAway || len(f.Update.Changed) != 0 || f.Complete ||
					f.LeaseEnd.Before(time.Now()) || f.Err != nil {
					t.Fatalf("move %d shows: %+v", move, f.Update)
				}
			case <-tick.C:
			case <-deadline:
				t.Fatalf("move %d did not happen:\n%s", move, f.log)
			}
			ws := b.Watchers()
			moved = f.Stats().Moves == move+1 && len(ws) == 1 && ws[0].WatchID != old && ws[0].Reporting
		}
		want[numbered(int(10+move))] = VIPReport{Advertisement: withdrawn}
		f.Report(ReportDelta{VIPs: reportsOf(map[vip.VIP]VIPReport{numbered(int(10 + move)): {Advertisement: withdrawn}})})
		await.True(t, "the report continues", reportedAs(b, want))
		// The new connection delivers.
		table.Commit(Decision{Changed: []VIPReadiness{{VIP: numbered(0), State: vip.State(move % 2)}}})
		f.waitFor(t, "a delta on the new connection", f.at(table))
		if f.vips[numbered(0)].State != vip.State(move%2) {
			t.Fatalf("the delta gave %+v", f.vips)
		}
	}
	if s := f.Stats(); s.Failures != 0 || s.Reconnects() != 0 || s.ReportFailures != 0 {
		t.Fatalf("%+v", s)
	}
}

func TestMoveAtHalfLife(t *testing.T) {
	b := startSyncedLB(t, 1)
	// The first connection ends in two seconds, later connections in an hour.
	var handshakes atomic.Int64
	before := time.Now()
	f := startFrontend(t, b.path, func(o *WatcherOptions) {
		o.ConnectionEnd = func(credentials.AuthInfo) (time.Time, bool) {
			if handshakes.Add(1) == 1 {
				return time.Now().Add(2 * time.Second), true
			}
			return time.Now().Add(time.Hour), true
		}
	})
	f.waitFor(t, "synced", f.at(b.table))
	await.True(t, "it moved", func() bool { return f.Stats().Moves == 1 && len(b.Watchers()) == 1 })
	if since := time.Since(before); since < 900*time.Millisecond {
		t.Fatalf("it moved after %v", since)
	}
	if s := f.Stats(); s.Failures != 0 {
		t.Fatalf("%+v", s)
	}
}

func TestFailedMoveKeepsConnection(t *testing.T) {
	path, table := socketPath(t), NewTable(TableOptions{Lease: time.Minute})
	table.Commit(Decision{Changed: numberedReady(1), Synced: true})
	startLB(t, path, table)
	var svid clock
	f := startFrontend(t, path, func(o *WatcherOptions) { o.Rotation, o.MaxBackoff = svid.get, minBackoff })
	f.waitFor(t, "synced", f.at(table))
	away := path + ".away"
	harness.Must(t, os.Rename(path, away))
	svid.rotate()
	await.True(t, "moves fail and are tried again", func() bool { return f.Stats().Failures >= 3 })
	table.Commit(Decision{Changed: []VIPReadiness{notReady(v1)}})
	f.waitFor(t, "the first connection continues", f.at(table))
	if !f.Open || f.Err != nil {
		t.Fatalf("%+v", f.Update)
	}
	harness.Must(t, os.Rename(away, path))
	await.True(t, "it moved", func() bool { return f.Stats().Moves == 1 })
	if log := f.log.String(); !strings.Contains(log, "move to a second readiness connection failed") {
		t.Fatalf("the log:\n%s", log)
	}
}

func TestMoveWhenFirstConnectionEnds(t *testing.T) {
	// The new load balancer replaces the socket while the old one still serves its stream, so two
	// streams of two instances are open.
	path := socketPath(t)
	old, fresh := NewTable(TableOptions{Lease: time.Minute}), NewTable(TableOptions{Lease: time.Minute})
	old.Commit(Decision{Changed: []VIPReadiness{ready(v1)}, Synced: true})
	first := startLB(t, path, old)
	var svid clock
	f := startFrontend(t, path, func(o *WatcherOptions) { o.Rotation = svid.get })
	f.waitFor(t, "synced", f.at(old))
	harness.Must(t, os.Rename(path, path+".old"))
	fresh.Commit(Decision{Changed: []VIPReadiness{notReady(v1)}}) // not synced
	second := startLB(t, path, fresh)
	svid.rotate()
	await.True(t, "the second stream is open", func() bool { return len(second.Watchers()) == 1 })
	if f.apply(f.Take()); !f.Synced || f.Position != old.Position() {
		t.Fatalf("the unsynced second stream counts: %+v", f.Update)
	}
	fresh.Commit(Decision{Changed: []VIPReadiness{ready(v2)}, Synced: true})
	f.waitFor(t, "the newer instance counts", f.at(fresh))
	if !f.Complete || len(f.vips) != 2 || f.vips[vip.Require(v1)].State != vip.NotReady {
		t.Fatalf("%+v", f.view)
	}
	await.True(t, "the first stream is closed", func() bool { return len(first.Watchers()) == 0 })
}

func TestSVIDChangeEndsBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var svid latest.Value[uint64]
		w := NewWatcher(WatcherOptions{
			Target: "/nowhere/lb.sock", Credentials: fakeCredentials{id: frontendID}, MaxBackoff: 1000 * time.Hour,
			Rotation: func() (uint64, <-chan struct{}) { return svid.Get() },
		})
		stop := harness.Run(t, w.Run)
		<-time.After(20 * time.Minute)
		before := w.Stats().Failures
		svid.Set(0)
		<-time.After(minBackoff / 2)
		if n := w.Stats().Failures - before; n != 1 {
			t.Errorf("%d attempts at once", n)
		}
		// Many rotations do not cause many attempts.
		for range 1000 {
			svid.Set(0)
			<-time.After(time.Millisecond)
		}
		if n := w.Stats().Failures - before; n > 2+uint64(time.Second/minBackoff) {
			t.Errorf("%d attempts in a second", n)
		}
		stop()
		<-time.After(time.Minute) // timers of gRPC
	})
}

func TestNewSocketEndsBackoff(t *testing.T) {
	path := socketPath(t)
	synctest.Test(t, func(t *testing.T) {
		w := NewWatcher(WatcherOptions{
			Target: path, Credentials: fakeCredentials{id: frontendID},
			MaxBackoff: 1000 * time.Hour,
		})
		stop := harness.Run(t, w.Run)
		<-time.After(20 * time.Minute)
		before := w.Stats().Failures
		// Bound but not listening yet.
		harness.Must(t, os.WriteFile(path, nil, 0o600))
		<-time.After(socketPoll + time.Millisecond)
		if n := w.Stats().Failures - before; n != 1 {
			t.Errorf("%d attempts at once", n)
		}
		<-time.After(2 * minBackoff)
		if n := w.Stats().Failures - before; n < 2 {
			t.Errorf("%d attempts after the shortest back-off", n)
		}
		stop()
		<-time.After(time.Minute) // timers of gRPC
	})
}

func TestMoveClosesFirstAfterReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, late := range []bool{false, true} {
			w := NewWatcher(WatcherOptions{})
			w.Report(ReportDelta{VIPs: reportsOf(map[vip.VIP]VIPReport{numbered(1): {Advertisement: announced}})})
			r := w.queue.attach()
			old := &watchConn{done: make(chan struct{})}
			old.cancel = func(cause error) { old.err = cause; close(old.done) }
			ctx, cancel := context.WithTimeout(t.Context(), moveReportWithin)
			done := make(chan struct{})
			go w.closeReplaced(ctx, old, done)
			<-time.After(moveReportWithin - 2*moveLinger)
			synctest.Wait()
			if isClosed(old.done) {
				t.Errorf("the first connection was closed before the report had moved")
			}
			if !late {
				w.queue.take(r)
				w.queue.markWritten(r)
				<-time.After(moveLinger + time.Millisecond)
			} else {
				<-time.After(2*moveLinger + time.Millisecond)
			}
			synctest.Wait()
			if !isClosed(done) || old.err != errMoved {
				t.Errorf("late=%v: the first connection stays open", late)
			}
			cancel()
			<-done
		}
	})
}

func TestFirstSVIDConnectsAtOnce(t *testing.T) {
	b := startSyncedLB(t, 1)
	var svid latest.Value[bool] // an SVID exists; the first SVID does not count as a rotation
	f := startFrontend(t, b.path, func(o *WatcherOptions) {
		o.Credentials = withoutSVID{fakeCredentials{id: frontendID}, &svid}
		o.MaxBackoff = time.Hour
		o.Rotation = func() (uint64, <-chan struct{}) { _, changed := svid.Get(); return 0, changed }
	})
	await.True(t, "the back-off has grown", func() bool { return f.Stats().Failures >= 5 })
	await.True(t, "it waits", func() bool { svid.Set(true); return f.Stats().Streams == 1 })
}

// withoutSVID fails until there is an SVID.
type withoutSVID struct {
	fakeCredentials
	has *latest.Value[bool]
}

func (c withoutSVID) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn,
	credentials.AuthInfo, error,
) {
	if !c.has.Load() {
		return nil, nil, errors.New("no SVID yet")
	}
	return c.fakeCredentials.ClientHandshake(ctx, authority, conn)
}
func (c withoutSVID) Clone() credentials.TransportCredentials { return c }
