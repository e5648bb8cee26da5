package readiness

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"
)

func TestWatcherHearsSnapshotThenDeltas(t *testing.T) {
	path, table := socketPath(t), NewTable(TableOptions{StaleGrace: 2 * time.Second})
	startBalancer(t, path, table)
	beat(t, table)
	table.Commit(Decision{Changed: []VIPReadiness{ready(v1), notReady("2000::1/128")}, Synced: true})
	f := startFrontend(t, path, nil)
	f.until(t, "snapshot", f.at(table))
	if !f.Complete || !f.Open || f.StaleGrace != 2*time.Second || len(f.vips) != 2 || f.HeardAt.IsZero() {
		t.Fatalf("after the snapshot: %+v", f.Update)
	}
	if left := time.Until(f.LeaseEnd); left <= 0 || left > DefaultLease {
		t.Fatalf("the lease has %v left", left)
	}
	if r := f.vips[vip.Require("2000::1/128")]; r.State != NotReady || r.Detail != "connect: connection refused" || r.TotalTargets != 1 || r.Since.IsZero() {
		t.Fatalf("2000::1/128 is %+v", r)
	}
	table.Commit(Decision{Changed: []VIPReadiness{ready("2000::1/128")}, Removed: []vip.VIP{vip.Require(v1)}, Synced: true})
	f.until(t, "delta", f.at(table))
	if f.Complete || len(f.Update.Changed) != 1 || !f.Removed.Equal(vip.NewSet(vip.Require(v1))) {
		t.Fatalf("after the delta: %+v", f.Update)
	}
	before := f.LeaseEnd
	f.until(t, "heartbeats renew the lease", func() bool { return f.LeaseEnd.After(before.Add(time.Second)) })
	table.GoAway(time.Minute)
	f.until(t, "going away", func() bool { return f.GoingAway })
	if left := time.Until(f.DrainEnd); left < 30*time.Second || left > time.Minute {
		t.Fatalf("draining ends in %v", left)
	}
}

func TestDrainingVIPCarriesItsEnd(t *testing.T) {
	b := syncedBalancer(t, 0)
	r := ready(v1)
	r.State, r.DrainEnd = Draining, time.Now().Add(time.Minute)
	b.table.Commit(Decision{Changed: []VIPReadiness{r}})
	f := startFrontend(t, b.path, nil)
	f.until(t, "synced", f.at(b.table))
	got := f.vips[r.VIP]
	if off := got.DrainEnd.Sub(r.DrainEnd); got.State != Draining || off < 0 || off > patience {
		t.Fatalf("%+v, off by %v", got, off)
	}
}

func TestHungLoadBalancerLetsTheLeaseEnd(t *testing.T) {
	path, table := socketPath(t), NewTable(TableOptions{Lease: 100 * time.Millisecond})
	startBalancer(t, path, table)
	table.Commit(Decision{Changed: many(1), Synced: true})
	stop := beat(t, table)
	f := startFrontend(t, path, nil)
	f.until(t, "synced", f.at(table))
	stop()
	f.apply(f.Take())
	<-time.After(time.Until(f.LeaseEnd) + 50*time.Millisecond)
	if f.apply(f.Take()); f.LeaseEnd.After(time.Now()) || !f.Open || !f.Synced {
		t.Fatalf("nobody beats, and the lease goes on: %+v", f.Update)
	}
	// A watch that opens meanwhile is told nothing.
	late := startFrontend(t, path, nil)
	eventually(t, "the late watch is open", func() bool { return len(table.State().VIPs) == 1 && watchers(table) == 2 })
	if late.apply(late.Take()); late.Open {
		t.Fatalf("a hung load balancer spoke: %+v", late.Update)
	}
	// Any message renews, also after the end, on the same stream.
	table.Heartbeat()
	f.until(t, "the lease is renewed", func() bool { return f.LeaseEnd.After(time.Now()) || f.LastHeard.After(f.HeardAt) })
	late.until(t, "the late watch is synced", late.at(table))
	if n := f.Stats().Streams; n != 1 {
		t.Fatalf("%d streams", n)
	}
}

func watchers(t *Table) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.cursors)
}

func TestUnsyncedRestartNeitherWithdrawsNorRaises(t *testing.T) {
	path := socketPath(t)
	first := NewTable(TableOptions{Lease: time.Minute})
	first.Commit(Decision{Changed: []VIPReadiness{ready(v1), notReady(v2)}, Synced: true})
	b := startBalancer(t, path, first)
	f := startFrontend(t, path, nil)
	f.until(t, "synced", f.at(first))
	b.kill()
	f.until(t, "the end is noticed", func() bool { return !f.Synced && !f.Open })
	ended := f.EndedAt
	if f.Err == nil || ended.IsZero() {
		t.Fatalf("after the end: %+v", f.Update)
	}
	second := NewTable(TableOptions{Lease: time.Minute})
	second.Commit(Decision{Changed: []VIPReadiness{notReady(v1), ready(v2)}})
	startBalancer(t, path, second)
	f.until(t, "the next one has spoken", func() bool { return f.Open })
	if f.Synced || !f.EndedAt.Equal(ended) || f.Position != first.Position() || f.vips[vip.Require(v1)].State != Ready {
		t.Fatalf("an unsynced load balancer changed something: %+v", f.Update)
	}
	second.Commit(Decision{Changed: []VIPReadiness{ready(v1)}, Removed: []vip.VIP{vip.Require(v2)}, Synced: true})
	f.until(t, "synced again", f.at(second))
	if !f.Complete || len(f.vips) != 1 || f.vips[vip.Require(v1)].State != Ready {
		t.Fatalf("%+v", f.Update)
	}
	if s := f.Stats(); s.Reconnects() != 1 || s.Streams != 2 || s.Failures == 0 {
		t.Fatalf("%+v", s)
	}
}

func TestWatcherFindsALoadBalancerThatStartsLater(t *testing.T) {
	path, table := socketPath(t), NewTable(TableOptions{Lease: time.Minute})
	table.Commit(Decision{Changed: many(1), Synced: true})
	// With an hour of back-off, only the look at the socket can find it.
	f := startFrontend(t, path, func(o *WatcherOptions) { o.MaxBackoff = time.Hour })
	f.until(t, "the failure is told", func() bool { return f.Err != nil })
	eventually(t, "the back-off has grown", func() bool { return f.Stats().Failures >= 5 })
	if !errors.Is(f.Err, fs.ErrNotExist) || !strings.Contains(f.Err.Error(), path+" does not exist") {
		t.Fatalf("the error: %v", f.Err)
	}
	startBalancer(t, path, table)
	f.until(t, "synced", f.at(table))
	if f.Err != nil {
		t.Fatalf("the error stays: %v", f.Err)
	}
	// It is warned of once, not at each attempt.
	if n := strings.Count(f.log.String(), "level=WARN"); n != 1 {
		t.Fatalf("%d warnings:\n%s", n, f.log)
	}
}

// TestBackOffBetweenAttempts runs against a socket path that does not exist, on
// a clock of its own.
func TestBackOffBetweenAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := pause{max: DefaultMaxBackoff}
		want := float64(minBackoff)
		for i := range 20 {
			d := float64(p.after())
			if least, most := want*(1-backoffJitter), want*(1+backoffJitter); d < least || d > most {
				t.Fatalf("wait %d is %v, want about %v", i, time.Duration(d), time.Duration(want))
			}
			want = min(want*backoffFactor, float64(DefaultMaxBackoff))
		}
		p.reset()
		if d := p.after(); d > minBackoff*2 {
			t.Fatalf("after a reset: %v", d)
		}

		w := NewWatcher(WatcherOptions{Target: "unix:///nowhere/lb.sock", Credentials: named{id: frontendID}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- w.Run(ctx) }()
		<-time.After(time.Minute)
		synctest.Wait()
		// About 9 attempts until the wait is 2 s (3.4 s), then one each 2 s ± 20 %.
		if n := w.Stats().Failures; n < 30 || n > 46 {
			t.Errorf("%d attempts in a minute", n)
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		// What gRPC left to its own timers.
		<-time.After(time.Minute)
	})
}

// clock is a rotation counter as identity keeps it.
type clock struct{ latest.Value[uint64] }

func (c *clock) rotate()                        { c.Update(func(n uint64) uint64 { return n + 1 }) }
func (c *clock) get() (uint64, <-chan struct{}) { return c.Get() }

func TestRotationMovesToASecondConnectionWithoutAGap(t *testing.T) {
	path, table := socketPath(t), NewTable(TableOptions{})
	b := startBalancer(t, path, table)
	table.Commit(Decision{Changed: many(3), Synced: true})
	beat(t, table)
	var svid clock
	f := startFrontend(t, path, func(o *WatcherOptions) { o.Rotation = svid.get })
	f.until(t, "synced", f.at(table))
	want := map[vip.VIP]VIPReport{numbered(1): {Advertisement: announced}}
	f.Report(ReportDelta{Applied: table.Position(), VIPs: maps.Clone(want)})
	eventually(t, "reported", reportedAs(b, want))
	for move := range uint64(5) {
		old := b.Report().Load().WatchID
		_, changed := b.Report().Get()
		svid.rotate()
		// At each moment somebody reports and the lease holds.
		deadline := time.After(patience)
		for moved := false; !moved; {
			select {
			case <-changed:
				var r Report
				r, changed = b.Report().Get()
				if !r.Connected {
					t.Fatalf("move %d: nobody reported", move)
				}
			case <-f.Changed():
				f.apply(f.Take())
				if !f.Open || !f.Synced || f.GoingAway || len(f.Update.Changed) != 0 || f.Complete || f.LeaseEnd.Before(time.Now()) || f.Err != nil {
					t.Fatalf("move %d shows: %+v", move, f.Update)
				}
			case <-deadline:
				t.Fatalf("move %d did not happen:\n%s", move, f.log)
			}
			ws := b.Watchers()
			moved = f.Stats().Moves == move+1 && len(ws) == 1 && ws[0].WatchID != old && ws[0].Reporting
		}
		want[numbered(int(10+move))] = VIPReport{Advertisement: withdrawn}
		f.Report(ReportDelta{VIPs: map[vip.VIP]VIPReport{numbered(int(10 + move)): {Advertisement: withdrawn}}})
		eventually(t, "the report goes on", reportedAs(b, want))
		// The new connection delivers.
		table.Commit(Decision{Changed: []VIPReadiness{{VIP: numbered(0), State: State(move % 2)}}})
		f.until(t, "a delta on the new connection", f.at(table))
		if f.vips[numbered(0)].State != State(move%2) {
			t.Fatalf("the delta gave %+v", f.vips)
		}
	}
	if s := f.Stats(); s.Failures != 0 || s.Reconnects() != 0 || s.ReportFailures != 0 {
		t.Fatalf("%+v", s)
	}
}

func TestConnectionIsReplacedAtHalfOfItsLife(t *testing.T) {
	b := syncedBalancer(t, 1)
	// The first connection ends in a second, the others in an hour.
	var handshakes atomic.Int64
	f := startFrontend(t, b.path, func(o *WatcherOptions) {
		o.ConnectionEnd = func(credentials.AuthInfo) (time.Time, bool) {
			if handshakes.Add(1) == 1 {
				return time.Now().Add(time.Second), true
			}
			return time.Now().Add(time.Hour), true
		}
	})
	f.until(t, "synced", f.at(b.table))
	first := time.Now()
	eventually(t, "it moved", func() bool { return f.Stats().Moves == 1 && len(b.Watchers()) == 1 })
	if since := time.Since(first); since < 400*time.Millisecond {
		t.Fatalf("it moved after %v", since)
	}
	if s := f.Stats(); s.Failures != 0 {
		t.Fatalf("%+v", s)
	}
}

func TestFailedMoveLeavesTheFirstConnection(t *testing.T) {
	path, table := socketPath(t), NewTable(TableOptions{Lease: time.Minute})
	table.Commit(Decision{Changed: many(1), Synced: true})
	startBalancer(t, path, table)
	var svid clock
	f := startFrontend(t, path, func(o *WatcherOptions) { o.Rotation, o.MaxBackoff = svid.get, minBackoff })
	f.until(t, "synced", f.at(table))
	away := path + ".away"
	if err := os.Rename(path, away); err != nil {
		t.Fatal(err)
	}
	svid.rotate()
	eventually(t, "moves fail and are tried again", func() bool { return f.Stats().Failures >= 3 })
	table.Commit(Decision{Changed: []VIPReadiness{notReady(v1)}})
	f.until(t, "the first connection goes on", f.at(table))
	if !f.Open || f.Err != nil {
		t.Fatalf("%+v", f.Update)
	}
	if err := os.Rename(away, path); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it moved", func() bool { return f.Stats().Moves == 1 })
	if log := f.log.String(); !strings.Contains(log, "could not open a second readiness stream") {
		t.Fatalf("the log:\n%s", log)
	}
}

func TestSecondConnectionTakesOverWhenTheFirstIsLost(t *testing.T) {
	// The new load balancer takes the socket while the old one still serves:
	// two streams of two instances.
	path := socketPath(t)
	old, fresh := NewTable(TableOptions{Lease: time.Minute}), NewTable(TableOptions{Lease: time.Minute})
	old.Commit(Decision{Changed: []VIPReadiness{ready(v1)}, Synced: true})
	first := startBalancer(t, path, old)
	var svid clock
	f := startFrontend(t, path, func(o *WatcherOptions) { o.Rotation = svid.get })
	f.until(t, "synced", f.at(old))
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	fresh.Commit(Decision{Changed: []VIPReadiness{notReady(v1)}}) // not synced
	second := startBalancer(t, path, fresh)
	svid.rotate()
	eventually(t, "the second stream is open", func() bool { return len(second.Watchers()) == 1 })
	if f.apply(f.Take()); !f.Synced || f.Position != old.Position() {
		t.Fatalf("the unsynced second stream counts: %+v", f.Update)
	}
	fresh.Commit(Decision{Changed: []VIPReadiness{ready(v2)}, Synced: true})
	f.until(t, "the newer instance counts", f.at(fresh))
	if !f.Complete || len(f.vips) != 2 || f.vips[vip.Require(v1)].State != NotReady {
		t.Fatalf("%+v", f.view)
	}
	eventually(t, "the first stream is closed", func() bool { return len(first.Watchers()) == 0 })
}

// scripted is a load balancer that sends what it is told.
type scripted struct {
	readinessv1.UnimplementedReadinessServiceServer
	mu     sync.Mutex
	script []*response
	err    error
	hold   bool // keep the stream open after the script
	opened atomic.Int64
}

func (s *scripted) WatchReadiness(_ *readinessv1.WatchReadinessRequest, stream grpc.ServerStreamingServer[response]) error {
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

func TestHostileLoadBalancerIsLeftAndTriedAgain(t *testing.T) {
	s := &scripted{hold: true, script: []*response{message(5, snapshotOf(true, v1)), message(4, heartbeat)}}
	f := startFrontend(t, startScripted(t, s), func(o *WatcherOptions) { o.MaxBackoff = minBackoff })
	f.until(t, "the violation is told", func() bool { return f.Err != nil })
	if !strings.Contains(f.Err.Error(), "broke the readiness protocol") || !strings.Contains(f.Err.Error(), "went back from 5 to 4") {
		t.Fatalf("the error: %v", f.Err)
	}
	if f.Synced || f.EndedAt.IsZero() {
		t.Fatalf("%+v", f.Update)
	}
	// It comes to its senses.
	s.mu.Lock()
	s.script = s.script[:1]
	s.mu.Unlock()
	f.until(t, "synced", func() bool { return f.Synced })
	eventually(t, "both streams are counted", func() bool { return f.Stats().Reconnects() >= 1 })
}

func TestHugeMessageEndsTheStream(t *testing.T) {
	m := message(5, snapshotOf(true, v1))
	m.GetSnapshot().Vips[0].Detail = strings.Repeat("x", MaxMessageBytes)
	f := startFrontend(t, startScripted(t, &scripted{script: []*response{m}}), nil)
	f.until(t, "it is refused", func() bool { return f.Err != nil })
	if !strings.Contains(f.Err.Error(), "larger than max") {
		t.Fatalf("the error: %v", f.Err)
	}
}

func TestStreamsThatEndAtOnceAreNotHammered(t *testing.T) {
	s := &scripted{script: []*response{message(5, snapshotOf(true, v1))}}
	f := startFrontend(t, startScripted(t, s), nil)
	eventually(t, "it ended thrice", func() bool { return s.opened.Load() >= 3 })
	if f.apply(f.Take()); f.Stats().Failures < 2 {
		t.Fatalf("%+v", f.Stats())
	}
}

func TestErrorsSayWhereToLook(t *testing.T) {
	serve := func(s *scripted) func(*testing.T) string {
		return func(t *testing.T) string { return startScripted(t, s) }
	}
	// raw serves bare connections.
	raw := func(handle func(net.Conn)) func(*testing.T) string {
		return func(t *testing.T) string {
			path := socketPath(t)
			l, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			var running sync.WaitGroup
			running.Go(func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					handle(c)
				}
			})
			t.Cleanup(func() { l.Close(); running.Wait() })
			return path
		}
	}
	tests := []struct {
		name string
		path func(*testing.T) string
		id   spiffeid.ID
		want []string
	}{
		{"no socket", socketPathOf, frontendID, []string{"does not exist", "not running or listens elsewhere", "--lb-socket"}},
		{"left-over socket", func(t *testing.T) string {
			path := socketPath(t)
			fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer syscall.Close(fd)
			if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}); err != nil {
				t.Fatal(err)
			}
			return path
		}, frontendID, []string{"nobody listens", "died and left it behind"}},
		{"no socket but a file", func(t *testing.T) string {
			path := socketPath(t)
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			return path
		}, frontendID, []string{"nobody listens"}},
		{"closed after the handshake", raw(func(c net.Conn) { c.Close() }), frontendID, []string{"denied our SPIFFE ID", "TLS 1.3", "log of lb"}},
		{"closed after it was read", raw(func(c net.Conn) {
			c.Read(make([]byte, 1))
			c.Close()
		}), frontendID, []string{"denied our SPIFFE ID"}},
		{"not our service", serve(&scripted{err: status.Error(codes.Unimplemented, "no such method")}), frontendID, []string{"not a load balancer of ours"}},
		{"denied by role", func(t *testing.T) string { return syncedBalancer(t, 1).path }, strangerID, []string{"denied the watch", strangerID.String(), "--frontend-id"}},
		{"too many streams", serve(&scripted{err: status.Error(codes.ResourceExhausted, "8 streams open")}), frontendID, []string{"refused the stream", "8 streams open"}},
		{"stopping", serve(&scripted{err: errStopping}), frontendID, []string{"is stopping"}},
		{"ended without a word", serve(&scripted{}), frontendID, []string{"without a reason"}},
		{"ended by surprise", serve(&scripted{err: status.Error(codes.Internal, "boom")}), frontendID, []string{"boom"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := tt.path(t)
			f := startFrontend(t, path, func(o *WatcherOptions) { o.Credentials = named{id: tt.id} })
			f.until(t, "the error is told", func() bool { return f.Err != nil })
			for _, w := range append(tt.want, path) {
				if !strings.Contains(f.Err.Error(), w) {
					t.Errorf("%q lacks %q", f.Err, w)
				}
			}
		})
	}
}

func socketPathOf(t *testing.T) string { return socketPath(t) }

func TestHandshakeErrorsArePassedOn(t *testing.T) {
	b := syncedBalancer(t, 1)
	cause := errors.New("the peer is spiffe://example.org/other, expected spiffe://example.org/lb")
	f := startFrontend(t, b.path, func(o *WatcherOptions) { o.Credentials = failing{named{id: frontendID}, cause} })
	f.until(t, "the error is told", func() bool { return f.Err != nil })
	if !errors.Is(f.Err, cause) || !strings.Contains(f.Err.Error(), "TLS handshake") {
		t.Fatalf("the error: %v", f.Err)
	}
}

type failing struct {
	named
	err error
}

func (f failing) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, f.err
}
func (f failing) Clone() credentials.TransportCredentials { return f }

func TestRunEndsWithItsContextAtEveryMoment(t *testing.T) {
	b := syncedBalancer(t, 1)
	for _, path := range []string{b.path, socketPath(t)} {
		for i := range 30 {
			w := NewWatcher(WatcherOptions{Target: path, Credentials: named{id: frontendID}})
			w.Report(ReportDelta{VIPs: map[vip.VIP]VIPReport{numbered(1): {Advertisement: announced}}})
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*200*time.Microsecond)
			done := make(chan error, 1)
			go func() { done <- w.Run(ctx) }()
			select {
			case err := <-done:
				if err != nil {
					t.Fatal(err)
				}
			case <-time.After(patience):
				t.Fatal("Run does not end")
			}
			cancel()
			<-w.Ready()
		}
	}
	eventually(t, "the load balancer has forgotten them", func() bool { return len(b.Watchers()) == 0 })
}

// TestTableAndWatcherConverge is the model test over a real connection: whatever
// decisions, restarts, rotations, unsynced phases and slow consumers come in
// whatever order, what was handed over is at each moment a state that the table
// had, and in the end it is the last one.
func TestTableAndWatcherConverge(t *testing.T) {
	path := socketPath(t)
	rapid.Check(t, func(r *rapid.T) {
		var svid clock
		history := map[Position]map[vip.VIP]State{}
		var table *Table
		var b *balancer
		model := map[vip.VIP]State{}
		commit := func(synced bool) {
			d := Decision{Synced: synced}
			for range rapid.IntRange(0, 3).Draw(r, "changes") {
				v := numbered(rapid.IntRange(0, 7).Draw(r, "vip"))
				s := State(rapid.IntRange(0, 2).Draw(r, "state"))
				d.Changed = append(d.Changed, VIPReadiness{VIP: v, State: s})
				model[v] = s
			}
			if rapid.Bool().Draw(r, "remove") {
				v := numbered(rapid.IntRange(0, 7).Draw(r, "vip"))
				d.Removed = append(d.Removed, v)
				delete(model, v)
			}
			// The state is known before anybody can hear of it.
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
			b = startBalancer(t, path, table)
		}
		restart()
		f := startFrontend(t, path, func(o *WatcherOptions) { o.Rotation, o.MaxBackoff = svid.get, minBackoff })
		check := func(*rapid.T) {
			if f.Position == (Position{}) {
				return
			}
			want, ok := history[f.Position]
			if got := statesOf(f.vips); !ok || !maps.Equal(got, want) {
				r.Fatalf("at %+v: got %v, want %v", f.Position, got, want)
			}
		}
		r.Repeat(map[string]func(*rapid.T){
			"commit":  func(*rapid.T) { commit(synced) },
			"commit2": func(*rapid.T) { commit(synced) },
			"sync":    func(*rapid.T) { synced = true; commit(true) },
			"beat":    func(*rapid.T) { table.Heartbeat() },
			"rotate":  func(*rapid.T) { svid.rotate() },
			"away":    func(*rapid.T) { table.GoAway(time.Minute) },
			"take":    func(*rapid.T) { f.apply(f.Take()) },
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
		f.until(t, fmt.Sprintf("the last state %+v is heard", table.Position()), f.at(table))
		check(r)
		if got := statesOf(f.vips); !maps.Equal(got, model) {
			r.Fatalf("in the end: got %v, want %v", got, model)
		}
		f.stop()
		b.kill()
	})
}

func statesOf(m map[vip.VIP]VIPReadiness) map[vip.VIP]State {
	s := make(map[vip.VIP]State, len(m))
	for v, r := range m {
		s[v] = r.State
	}
	return s
}
