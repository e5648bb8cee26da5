package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	// flapInterval is the time between two decisions while VIPs flap, and flapsPerDecision the
	// number of VIPs that change in each.
	flapInterval     = time.Millisecond
	flapsPerDecision = 20
	// slowRead is how long a slow reader waits before it takes the pending deltas.
	slowRead = 500 * time.Millisecond
	// sourceStreams is the number of streams that a peer may have: each watcher
	// needs two.
	sourceStreams = 1000
)

// readinessSource is a load balancer's table that this process serves on a real mTLS unix
// socket, and the identity of its watchers.
type readinessSource struct {
	dir    string
	vips   []vip.VIP
	table  *readiness.Table
	grpc   *grpc.Server
	client *identity.Source
	ctx    context.Context // ends with the source
	cancel context.CancelFunc
	tasks  sync.WaitGroup
}

// startReadinessSource serves a synced table of n ready VIPs. The caller closes it.
func startReadinessSource(ctx context.Context, n int) (_ *readinessSource, err error) {
	// Named like the directory of a lab: if this run is killed, the next one removes it.
	dir, err := os.MkdirTemp("/tmp", fmt.Sprintf("vg-%d-", os.Getpid()))
	if err != nil {
		return nil, err
	}
	x := &readinessSource{
		dir: dir, vips: numberedVIPs(n, oneFamily),
		table: readiness.NewTable(readiness.TableOptions{}),
	}
	x.ctx, x.cancel = context.WithCancel(ctx)
	defer func() {
		if err != nil {
			err = errors.Join(err, x.close())
		}
	}()
	x.table.Commit(decision(true, x.vips...))

	lbID, frontendID := spiffeid.RequireFromString(lab.LBID), spiffeid.RequireFromString(lab.FrontendID)
	own, err := x.identity(lbID)
	if err != nil {
		return nil, err
	}
	if x.client, err = x.identity(frontendID); err != nil {
		return nil, err
	}
	server := readiness.NewServer(x.table, readiness.ServerOptions{
		Peer: identity.PeerID, Role: readiness.RolesOf([]spiffeid.ID{frontendID}, nil),
		MaxStreamsPerPeer: sourceStreams, Log: slog.New(slog.DiscardHandler),
	})
	creds := identity.NewCredentials(own, identity.CredentialOptions{Authorize: identity.Authorize(frontendID)})
	x.grpc = grpc.NewServer(append(readiness.GRPCOptions(), grpc.Creds(creds))...)
	readinessv1.RegisterReadinessServiceServer(x.grpc, server)
	listener, err := identity.Listen(ctx, identity.ListenOptions{Path: x.path()})
	if err != nil {
		return nil, err
	}
	// If Serve ends too early, the watchers report that no revision arrives.
	x.tasks.Go(func() { _ = x.grpc.Serve(listener) })
	x.tasks.Go(x.beat)
	return x, nil
}

func (x *readinessSource) path() string { return filepath.Join(x.dir, "lb.sock") }

// identity runs a source of SVIDs and waits for the first.
func (x *readinessSource) identity(id spiffeid.ID) (*identity.Source, error) {
	source, err := identity.NewDev(filepath.Join(x.dir, "authority"), id, identity.Options{})
	if err != nil {
		return nil, err
	}
	x.tasks.Go(func() { _ = source.Run(x.ctx) })
	limit, cancel := context.WithTimeout(x.ctx, waitTimeout)
	defer cancel()
	for {
		status, changed := source.Status().Get()
		if !status.ID.IsZero() {
			return source, nil
		}
		select {
		case <-changed:
		case <-limit.Done():
			return nil, fmt.Errorf("no SVID for %s: %w", id, errors.Join(status.Err, limit.Err()))
		}
	}
}

// beat renews the lease until the end, as the load balancer's loop does.
func (x *readinessSource) beat() {
	for backoff.Sleep(x.ctx, readiness.DefaultLease/5) == nil {
		x.table.Heartbeat()
	}
}

func (x *readinessSource) close() error {
	x.cancel()
	if x.grpc != nil {
		x.grpc.Stop()
	}
	x.tasks.Wait()
	return os.RemoveAll(x.dir)
}

// heard is a revision and the time at which the consumer of a watcher received it.
type heard struct {
	revision uint64
	at       time.Time
}

// watch starts a frontend's watcher on a separate connection. Its consumer reads the pending
// changes after each wait, and reports each new revision.
func (x *readinessSource) watch(wait time.Duration, tell chan<- heard) {
	w := readiness.NewWatcher(readiness.WatcherOptions{
		Target: x.path(), Credentials: x.clientCredentials(), ConnectionEnd: identity.ConnectionEnd,
		Reader: "bench", Log: slog.New(slog.DiscardHandler),
	})
	x.tasks.Go(func() { _ = w.Run(x.ctx) })
	x.tasks.Go(func() {
		var last uint64
		for {
			select {
			case <-w.Changed():
			case <-x.ctx.Done():
				return
			}
			if wait > 0 && backoff.Sleep(x.ctx, wait) != nil {
				return
			}
			u := w.Take()
			now := time.Now()
			if u.Position.Revision == last {
				continue
			}
			last = u.Position.Revision
			select {
			case tell <- heard{last, now}:
			case <-x.ctx.Done():
				return
			}
		}
	})
}

// reached waits until n watchers have reported a revision, and returns when the last one
// received it.
func (x *readinessSource) reached(tell <-chan heard, n int, revision uint64) (time.Time, error) {
	limit := time.NewTimer(waitTimeout)
	defer limit.Stop()
	var last time.Time
	for got := 0; got < n; {
		select {
		case h := <-tell:
			if h.revision != revision {
				continue
			}
			got++
			if h.at.After(last) {
				last = h.at
			}
		case <-limit.C:
			return last, fmt.Errorf("%d of %d watchers have revision %d after %v", got, n, revision, waitTimeout)
		case <-x.ctx.Done():
			return last, x.ctx.Err()
		}
	}
	return last, nil
}

// drain discards the reports of watchers.
func (x *readinessSource) drain(tell <-chan heard) {
	for {
		select {
		case <-tell:
		case <-x.ctx.Done():
			return
		}
	}
}

// measureWatchers is row 11.
func measureWatchers(ctx context.Context, s *session) error {
	for _, watchers := range []int{1, 10, 100} {
		if err := measureFanOut(ctx, s, watchers); err != nil {
			return err
		}
	}
	return measureFlapping(ctx, s)
}

// measureFanOut measures from a decision about one VIP until the last watcher has it.
func measureFanOut(ctx context.Context, s *session, watchers int) (err error) {
	const n = 1000
	x, err := startReadinessSource(ctx, n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.close()) }()
	tell := make(chan heard, watchers)
	for range watchers {
		x.watch(0, tell)
	}
	if _, err := x.reached(tell, watchers, x.table.Position().Revision); err != nil {
		return err
	}
	m := Measurement{
		Row: 11, What: fmt.Sprintf("decision in the LB → the last of %d watchers has it", watchers),
		Method: vipgate, N: n, Unit: "ms",
	}
	if watchers == 10 {
		m.Goal = "p99 ≤ 1"
	}
	for k := range s.repeats(2000, 100) {
		i, up := flipped(k, n)
		began := time.Now()
		at, err := x.reached(tell, watchers, x.table.Commit(decision(up, x.vips[i])))
		if err != nil {
			return err
		}
		m.Samples = append(m.Samples, milliseconds(at.Sub(began)))
		// Idle before the change, so that the load balancer starts from a blocked state, not from a
		// busy one.
		if err := backoff.Sleep(ctx, 2*time.Millisecond); err != nil {
			return err
		}
	}
	s.record(m)
	return nil
}

// tally is the count of a reader of the plain stream.
type tally struct {
	deltas, entries int
	twice           int // entries for a VIP that the same delta had named before
	revision        uint64
	err             error
}

// add counts one message.
func (t *tally) add(m *readinessv1.WatchReadinessResponse) {
	t.revision = m.GetPosition().GetRevision()
	d := m.GetDelta()
	if d == nil {
		return
	}
	t.deltas++
	named := map[string]bool{}
	for _, group := range d.GetChanged() {
		for _, v := range group.GetVips() {
			if named[v] {
				t.twice++
			}
			named[v] = true
		}
		t.entries += len(group.GetVips())
	}
	t.entries += len(d.GetRemoved())
}

func (x *readinessSource) clientCredentials() credentials.TransportCredentials {
	return identity.NewCredentials(
		x.client, identity.CredentialOptions{Authorize: identity.Authorize(spiffeid.RequireFromString(lab.LBID))},
	)
}

// tap opens a watch without a watcher. With a tally it reads and counts the received deltas;
// without one it never reads.
func (x *readinessSource) tap(counted *latest.Value[tally]) error {
	conn, err := grpc.NewClient("unix://"+x.path(), grpc.WithTransportCredentials(x.clientCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(readiness.MaxMessageBytes)))
	if err != nil {
		return err
	}
	x.tasks.Go(func() { <-x.ctx.Done(); _ = conn.Close() })
	stream, err := readinessv1.NewReadinessServiceClient(conn).WatchReadiness(
		x.ctx, &readinessv1.WatchReadinessRequest{Reader: "tap"},
	)
	if err != nil || counted == nil {
		return err
	}
	x.tasks.Go(func() {
		var t tally
		for t.err == nil {
			var m *readinessv1.WatchReadinessResponse
			if m, t.err = stream.Recv(); t.err == nil {
				t.add(m)
			}
			counted.Set(t)
		}
	})
	return nil
}

// caughtUp waits until the tap has read a revision, and returns its tally.
func (x *readinessSource) caughtUp(counted *latest.Value[tally], revision uint64) (tally, error) {
	limit := time.NewTimer(waitTimeout)
	defer limit.Stop()
	for {
		t, changed := counted.Get()
		if t.revision >= revision || t.err != nil {
			return t, t.err
		}
		select {
		case <-changed:
		case <-limit.C:
			return t, fmt.Errorf("the tap has read revision %d, not %d, after %v", t.revision, revision, waitTimeout)
		}
	}
}

// measureFlapping lets VIPs flip at random while readers of every kind watch.
func measureFlapping(ctx context.Context, s *session) (err error) {
	const n, each = 10_000, 4 // VIPs, and readers of each kind
	x, err := startReadinessSource(ctx, n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.close()) }()
	var counted latest.Value[tally]
	fast, slow := make(chan heard), make(chan heard)
	for range each {
		x.watch(0, fast)
		x.watch(slowRead, slow)
		if err := x.tap(nil); err != nil {
			return err
		}
	}
	if err := x.tap(&counted); err != nil {
		return err
	}
	start := x.table.Position().Revision
	before, err := x.caughtUp(&counted, start)
	if err != nil {
		return err
	}
	for _, tell := range []chan heard{fast, slow} {
		if _, err := x.reached(tell, each, start); err != nil {
			return err
		}
		x.tasks.Go(func() { x.drain(tell) })
	}

	heapBefore := liveHeap()
	var heap, commits []float64
	var changes int
	random, up := rand.New(rand.NewPCG(1, 1)), make([]bool, n)
	for i := range up {
		up[i] = true
	}
	lasts := s.lasts(20*time.Second, 300*time.Millisecond)
	began := time.Now()
	for report := lasts / 10; time.Since(began) < lasts; {
		d := flap(random, x.vips, up)
		changes += len(d.Changed)
		at := time.Now()
		x.table.Commit(d)
		commits = append(commits, milliseconds(time.Since(at)))
		if time.Since(began) > report {
			heap = append(heap, liveHeap()-heapBefore)
			report += lasts / 10
		}
		if err := backoff.Sleep(ctx, flapInterval); err != nil {
			return err
		}
	}
	last := time.Now()
	after, err := x.caughtUp(&counted, x.table.Position().Revision)
	if err != nil {
		return err
	}
	caught := time.Since(last)
	if after.twice > 0 {
		return fmt.Errorf("%d entries for a VIP that the same delta had named before", after.twice)
	}
	what := "VIPs flap at random: "
	s.record(Measurement{
		Row: 11, What: what + "time in a decision about 20 of them", Method: vipgate, N: n, Unit: "ms",
		Samples: commits,
	})
	s.record(Measurement{
		Row: 11, What: what + "entries sent to a reader ÷ changes decided", Method: vipgate, N: n,
		Unit: "×", Goal: "max ≤ 1", Samples: []float64{float64(after.entries-before.entries) / float64(changes)},
	})
	s.record(Measurement{
		Row: 11, What: what + "last decision → read from the stream", Method: vipgate, N: n,
		Unit: "ms", Samples: []float64{milliseconds(caught)},
	})
	s.record(Measurement{
		Row: 11, What: what + "growth of the live heap", Method: vipgate, N: n, Unit: "MiB",
		Goal: "bounded: max ≤ 10", Samples: heap,
	})
	s.note(11, "%d VIPs flapped at random in the sight of %d fast readers, %d that take the pending deltas every %v, "+
		"and %d that never read; %d changes in %d decisions reached a fast one in %d deltas",
		n, each+1, each, slowRead, each, changes, len(commits), after.deltas-before.deltas)
	return nil
}

// flap returns a decision that inverts the state of some VIPs, chosen at random.
func flap(r *rand.Rand, vips []vip.VIP, up []bool) readiness.Decision {
	var all readiness.Decision
	chosen := map[int]bool{}
	for len(chosen) < min(flapsPerDecision, len(vips)) {
		i := r.IntN(len(vips))
		if chosen[i] {
			continue
		}
		chosen[i], up[i] = true, !up[i]
		all.Changed = append(all.Changed, decision(up[i], vips[i]).Changed...)
	}
	return all
}

// liveHeap returns the size of the live heap of this process, in MiB.
func liveHeap() float64 {
	var m runtime.MemStats
	for range 3 { // a sync.Pool releases its objects only at the second collection
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc) / (1 << 20)
}
