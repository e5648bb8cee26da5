package readiness

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"pgregory.net/rapid"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// pairLB is one start of the load balancer: a real Table and Server.
type pairLB struct {
	*Server
	table    *Table
	grpc     *grpc.Server
	incoming chan net.Conn
	closed   chan struct{}
	once     sync.Once
	number   int
	model    map[vip.VIP]vip.State // the expected content of the table
	away     bool

	mu    sync.Mutex
	hung  bool
	alive time.Time // the last commit or heartbeat of its loop
	wires []*wire
}

func (l *pairLB) Accept() (net.Conn, error) {
	select {
	case c := <-l.incoming:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}
func (l *pairLB) Close() error   { l.once.Do(func() { close(l.closed) }); return nil }
func (l *pairLB) Addr() net.Addr { return &net.UnixAddr{Name: "pair", Net: "unix"} }

// loop runs f in place of the loop that evaluates readiness, unless that loop hangs.
func (l *pairLB) loop(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.hung {
		l.alive = time.Now()
		f()
	}
}

// pair holds a watcher, its gate, the load balancers to which the watcher connects in turn, and a
// model of them.
type pair struct {
	lease, grace time.Duration
	crowd        bool // many VIPs, so that snapshots are split
	running      sync.WaitGroup
	watcher      *Watcher
	svid         latest.Value[uint64]

	mu      sync.Mutex
	lb      *pairLB // has the socket; nil: none
	lbs     []*pairLB
	history map[Position]map[vip.VIP]vip.State

	// The gate's side.
	looking  sync.Mutex // guards the four that follow
	gate     *gateFixture
	last     int // the load balancer of the last evaluation, and its revision
	lastR    uint64
	lives    int // evaluations at which the state was live
	reported map[vip.VIP]VIPReport

	awake   chan struct{} // closed while run may run; guarded by mu
	problem string        // the first one that run saw; guarded by mu
}

func (p *pair) dial(ctx context.Context, _ string) (net.Conn, error) {
	p.mu.Lock()
	lb := p.lb
	p.mu.Unlock()
	if lb == nil {
		return nil, &net.OpError{Op: "dial", Net: "unix", Err: syscall.ECONNREFUSED}
	}
	w, ours, theirs := span(&p.running, lb)
	lb.mu.Lock()
	lb.wires = append(lb.wires, w)
	lb.mu.Unlock()
	select {
	case lb.incoming <- theirs:
		return ours, nil
	case <-lb.closed:
		w.cut()
		return nil, &net.OpError{Op: "dial", Net: "unix", Err: syscall.ECONNREFUSED}
	case <-ctx.Done():
		w.cut()
		return nil, ctx.Err()
	}
}

// start starts a load balancer, which replaces the socket and sends heartbeats.
func (p *pair) start(synced bool, changed map[vip.VIP]vip.State) {
	l := &pairLB{
		incoming: make(chan net.Conn), closed: make(chan struct{}), number: len(p.lbs) + 1,
		model: map[vip.VIP]vip.State{},
	}
	l.table = NewTable(TableOptions{InstanceID: fmt.Sprintf("lb-%d", l.number), Lease: p.lease, StaleGrace: p.grace})
	l.Server = NewServer(l.table, ServerOptions{Peer: fakePeer, Role: RolesOf([]spiffeid.ID{frontendID}, nil)})
	l.grpc = grpc.NewServer(append(GRPCOptions(), grpc.Creds(fakeCredentials{}))...)
	readinessv1.RegisterReadinessServiceServer(l.grpc, l.Server)
	p.running.Go(func() { _ = l.grpc.Serve(l) }) // it ends with kill
	p.running.Go(func() {
		tick := time.NewTicker(p.lease / 5)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				l.loop(l.table.Heartbeat)
			case <-l.closed:
				return
			}
		}
	})
	p.mu.Lock()
	p.lb, p.lbs = l, append(p.lbs, l)
	p.mu.Unlock()
	if p.crowd {
		for i := range MaxVIPsPerMessage + 1 {
			changed[numbered(100+i)] = vip.Ready
		}
	}
	p.commit(l, synced, changed)
}

// commit commits a decision. An invalid state marks removed VIPs.
func (p *pair) commit(l *pairLB, synced bool, changed map[vip.VIP]vip.State) {
	l.loop(func() {
		d := Decision{Synced: synced}
		for v, s := range changed {
			if s > vip.Draining {
				d.Removed = append(d.Removed, v)
				delete(l.model, v)
				continue
			}
			r := VIPReadiness{VIP: v, State: s}
			if s == vip.Draining {
				r.DrainEnd = time.Now().Add(time.Hour)
			}
			d.Changed = append(d.Changed, r)
			l.model[v] = s
		}
		p.record(l)
		l.table.Commit(d)
	})
}

// record stores the state of the next revision before the commit can be observed.
func (p *pair) record(l *pairLB) {
	next := l.table.Position()
	next.Revision++
	p.mu.Lock()
	defer p.mu.Unlock()
	p.history[next] = maps.Clone(l.model)
}

// kill ends a load balancer as SIGKILL does: the kernel closes its connections.
func (p *pair) kill(l *pairLB) {
	p.mu.Lock()
	if p.lb == l {
		p.lb = nil
	}
	p.mu.Unlock()
	_ = l.Close()
	l.mu.Lock()
	wires := l.wires
	l.mu.Unlock()
	for _, w := range wires {
		w.cut()
	}
	l.grpc.Stop()
}

// run is the loop of the frontend.
func (p *pair) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		p.mu.Lock()
		awake := p.awake
		p.mu.Unlock()
		select {
		case <-awake:
		case <-ctx.Done():
			return
		}
		p.looking.Lock()
		now := time.Now()
		p.gate.update(now, p.watcher.Take())
		changes := p.gate.evaluate(now)
		problem := p.judge(now, changes)
		p.mu.Lock()
		if p.problem == "" {
			p.problem = problem
		}
		p.mu.Unlock()
		report := ReportDelta{Applied: p.gate.view.Position}
		for _, c := range changes {
			if p.gate.vips.Has(c.VIP) {
				r := VIPReport{Advertisement: readinessv1.Advertisement(1 + c.To.Advertisement)}
				report.VIPs = append(report.VIPs, ReportedVIP{c.VIP, r})
				p.reported[c.VIP] = r
			}
		}
		p.watcher.Report(report)
		timer.Reset(time.Until(p.gate.Deadline(now))) // always set, because of the gateways
		p.looking.Unlock()
		select {
		case <-p.watcher.Changed():
		case <-timer.C:
		case <-ctx.Done():
		}
	}
}

// had returns the state of a table at a position, and its load balancer.
func (p *pair) had(at Position) (lb *pairLB, state map[vip.VIP]vip.State, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range p.lbs {
		if l.table.instance == at.InstanceID {
			lb = l
		}
	}
	state, known = p.history[at]
	return lb, state, known
}

// judge compares the gate with the model and returns the difference.
func (p *pair) judge(now time.Time, changes []gate.Change) string {
	at := p.gate.view.Position
	if at == (Position{}) {
		if p.gate.Freshness(now) != gate.Lost {
			return "a state is live without a message"
		}
		return ""
	}
	lb, want, known := p.had(at)
	switch {
	case !known || !sameStates(p.gate.view.vips, want):
		got := statesOf(p.gate.view.vips)
		return fmt.Sprintf("at %+v the gate has %d VIPs, %v; the table had %d, %v", at, len(got), got, len(want), want)
	case lb.number < p.last, lb.number == p.last && at.Revision < p.lastR:
		return fmt.Sprintf("%+v after revision %d of load balancer %d", at, p.lastR, p.last)
	}
	p.last, p.lastR = lb.number, at.Revision
	live := p.gate.Freshness(now) == gate.Live
	if live {
		p.lives++
		if problem := p.vouched(now, lb); problem != "" {
			return problem
		}
	}
	for _, c := range changes {
		if announces(c) && (!live || want[c.VIP] != vip.Ready) {
			return fmt.Sprintf("%+v at %+v, where it is %v; live: %v", c, at, want[c.VIP], live)
		}
	}
	return ""
}

// vouched returns the reason why a live state of lb should not be live. The lease must have started
// no later than the arrival of the last bytes at the watcher, and no later than the last commit or
// heartbeat plus the longest delay of a message.
func (p *pair) vouched(now time.Time, lb *pairLB) string {
	lb.mu.Lock()
	defer lb.mu.Unlock()
	var delivered time.Time
	var slowest time.Duration
	for _, w := range lb.wires {
		w.mu.Lock()
		slowest = max(slowest, w.slowest)
		if w.delivered.After(delivered) {
			delivered = w.delivered
		}
		w.mu.Unlock()
	}
	switch {
	case now.Sub(delivered) >= p.lease:
		return fmt.Sprintf("live %v after the last bytes came", now.Sub(delivered))
	case !p.crowd && now.Sub(lb.alive) >= p.lease+p.lease/100+slowest: // many VIPs also wait for flow control
		return fmt.Sprintf("live %v after the last sign of life, and the longest way took %v", now.Sub(lb.alive), slowest)
	}
	return ""
}

// settle waits until all goroutines are blocked and checks the state.
func (p *pair) settle(r *rapid.T) {
	synctest.Wait()
	p.mu.Lock()
	problem, awake := p.problem, isClosed(p.awake)
	p.mu.Unlock()
	if problem != "" {
		r.Fatal(problem)
	}
	p.looking.Lock()
	defer p.looking.Unlock()
	if !awake || p.gate.Freshness(time.Now()) != gate.Live {
		return
	}
	lb, _, _ := p.had(p.gate.view.Position)
	lb.mu.Lock()
	defer lb.mu.Unlock()
	for _, w := range lb.wires {
		w.mu.Lock()
		broken := w.broken
		w.mu.Unlock()
		if !broken {
			return
		}
	}
	r.Fatalf("the state of %s is live though all its connections have ended", lb.table.instance)
}

// heal removes all faults, but not their effects.
func (p *pair) heal() {
	for _, l := range p.lbs {
		if l != p.lb {
			p.kill(l)
			continue
		}
		l.mu.Lock()
		l.hung = false
		for _, w := range l.wires {
			w.heal()
		}
		l.mu.Unlock()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !isClosed(p.awake) {
		close(p.awake)
	}
}

// converged checks that the gate and its report equal the table.
func (p *pair) converged(r *rapid.T, configured []vip.VIP) {
	p.looking.Lock()
	defer p.looking.Unlock()
	want := p.lb.table.Position()
	if f := p.gate.Freshness(time.Now()); p.gate.view.Position != want || f != gate.Live || p.gate.Err != nil {
		r.Fatalf("in the end the gate is at %+v, %v, and the table at %+v: %v", p.gate.view.Position, f, want, p.gate.Err)
	}
	if report := p.lb.Report().Load(); !report.Connected || report.Applied != want ||
		!maps.Equal(p.lb.AllReported(), p.reported) {
		r.Fatalf("in the end the report is %+v, %v, want %+v, %v", report, p.lb.AllReported(), want, p.reported)
	}
	for _, v := range configured {
		d := p.gate.Decision(v)
		if state := p.lb.model[v]; (state == vip.Ready) != (d.Advertisement == gate.Announced) || state == vip.NotReady &&
			d.Advertisement != gate.Withdrawn {
			r.Fatalf("in the end %s is %v and %+v", v, state, d)
		}
	}
}

const pairVIPs = 6

// changes draws the changes of a decision.
func changes(r *rapid.T) map[vip.VIP]vip.State {
	changed := map[vip.VIP]vip.State{}
	for range rapid.IntRange(0, 3).Draw(r, "changes") {
		changed[numbered(rapid.IntRange(0, pairVIPs-1).Draw(r, "vip"))] = vip.State(rapid.IntRange(0, 3).Draw(r, "state"))
	}
	return changed
}

// checkPair is one run of the model.
func checkPair(r *rapid.T) (lives int) {
	var configured []vip.VIP
	for i := range pairVIPs {
		configured = append(configured, numbered(i))
	}
	p := &pair{
		lease:    time.Duration(rapid.SampledFrom([]int{100, 300, 1000}).Draw(r, "lease ms")) * time.Millisecond,
		grace:    time.Duration(rapid.SampledFrom([]int{0, 0, 200, 2000}).Draw(r, "grace ms")) * time.Millisecond,
		crowd:    rapid.IntRange(1, 20).Draw(r, "crowd") == 20,
		history:  map[Position]map[vip.VIP]vip.State{},
		gate:     newGateFixture(configured...),
		reported: map[vip.VIP]VIPReport{},
		awake:    make(chan struct{}),
	}
	close(p.awake)
	p.watcher = NewWatcher(WatcherOptions{
		Target: "pair", Credentials: fakeCredentials{id: frontendID}, MaxBackoff: 500 * time.Millisecond,
		Rotation: func() (uint64, <-chan struct{}) { return p.svid.Get() },
	})
	p.watcher.dial = p.dial
	ctx, cancel := context.WithCancel(context.Background())
	defer func() {
		p.heal()
		cancel()
		for _, l := range p.lbs {
			p.kill(l)
		}
		p.running.Wait()
	}()
	p.running.Go(func() { _ = p.watcher.Run(ctx) })
	p.running.Go(func() { p.run(ctx) })
	if rapid.IntRange(0, 4).Draw(r, "first") > 0 {
		p.start(true, changes(r))
	}

	// anyLB applies f to a running load balancer, mostly the one with the socket.
	anyLB := func(f func(*rapid.T, *pairLB)) func(*rapid.T) {
		return func(r *rapid.T) {
			running := slices.DeleteFunc(slices.Clone(p.lbs), func(l *pairLB) bool { return isClosed(l.closed) })
			if len(running) > 0 {
				f(r, running[len(running)-1-rapid.IntRange(0, len(running)-1).Draw(r, "load balancer")])
			}
		}
	}
	// anyWire applies f to a connection of any load balancer.
	anyWire := func(f func(*wire)) func(*rapid.T) {
		return func(r *rapid.T) {
			var wires []*wire
			for _, l := range p.lbs {
				l.mu.Lock()
				wires = append(wires, l.wires...)
				l.mu.Unlock()
			}
			wires = slices.DeleteFunc(wires, func(w *wire) bool { w.mu.Lock(); defer w.mu.Unlock(); return w.broken })
			if len(wires) > 0 {
				f(wires[len(wires)-1-rapid.IntRange(0, len(wires)-1).Draw(r, "wire")])
			}
		}
	}
	pass := func(r *rapid.T) {
		<-time.After(time.Duration(rapid.IntRange(1, int(2*p.lease/time.Millisecond)).Draw(r, "ms")) * time.Millisecond)
	}
	rotate := func(*rapid.T) { p.svid.Update(func(n uint64) uint64 { return n + 1 }) }
	commit := anyLB(func(r *rapid.T, l *pairLB) { p.commit(l, false, changes(r)) })
	sleep := func(*rapid.T) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if isClosed(p.awake) {
			p.awake = make(chan struct{})
		}
	}
	wakeUp := func(*rapid.T) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if !isClosed(p.awake) {
			close(p.awake)
		}
	}
	hang := func(_ *rapid.T, l *pairLB) { l.mu.Lock(); defer l.mu.Unlock(); l.hung = !l.hung }
	settle := func(r *rapid.T) { p.settle(r) }
	r.Repeat(map[string]func(*rapid.T){
		"commit":      commit,
		"commit more": commit,
		"sync":        anyLB(func(r *rapid.T, l *pairLB) { p.commit(l, true, changes(r)) }),
		"go away": anyLB(func(_ *rapid.T, l *pairLB) {
			l.loop(func() {
				if !l.away {
					l.away = true
					p.record(l)
					l.table.GoAway(time.Hour)
				}
			})
		}),
		"hang": anyLB(hang),
		"hang, and a watch that opens late": anyLB(func(r *rapid.T, l *pairLB) {
			hang(r, l)
			<-time.After(p.lease + time.Millisecond)
			rotate(r)
		}),
		"decisions that the gate sleeps over": func(r *rapid.T) {
			sleep(r)
			for range 3 {
				commit(r)
				settle(r)
			}
			wakeUp(r)
		},
		"decisions while two streams are open": func(r *rapid.T) {
			rotate(r)
			settle(r)
			for range 3 {
				commit(r)
				<-time.After(time.Duration(rapid.IntRange(0, 15).Draw(r, "ms")) * time.Millisecond)
				settle(r)
			}
		},
		"kill": anyLB(func(_ *rapid.T, l *pairLB) { p.kill(l) }),
		"restart": func(r *rapid.T) {
			if p.lb != nil {
				p.kill(p.lb)
			}
			p.start(rapid.Bool().Draw(r, "synced"), changes(r))
		},
		"replace": func(r *rapid.T) { // the old one is still running
			p.start(rapid.Bool().Draw(r, "synced"), changes(r))
			rotate(r)
		},
		"two that are synced in the wrong order": func(r *rapid.T) {
			p.start(false, changes(r))
			<-time.After(time.Second)
			old := p.lb
			p.start(false, changes(r))
			rotate(r)
			<-time.After(time.Duration(rapid.IntRange(1, 100).Draw(r, "ms")) * time.Millisecond)
			for _, l := range []*pairLB{p.lb, old} {
				p.commit(l, true, changes(r))
				settle(r)
			}
		},
		"rotate": rotate,
		"slow down": anyWire(func(w *wire) {
			d := time.Duration(rapid.SampledFrom([]int{0, 10, 150, 700}).Draw(r, "delay ms")) * time.Millisecond
			w.mu.Lock()
			defer w.mu.Unlock()
			w.delay = d
		}),
		"stop":  anyWire(func(w *wire) { w.stop() }),
		"move":  anyWire(func(w *wire) { w.mu.Lock(); defer w.mu.Unlock(); w.move() }),
		"break": anyWire(func(w *wire) { w.cut() }),
		"break in the middle": anyWire(func(w *wire) {
			n := rapid.IntRange(0, 400).Draw(r, "bytes")
			if p.crowd {
				n *= 400
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			w.breakIn = n
		}),
		"the gate sleeps":   sleep,
		"the gate wakes up": wakeUp,
		"time passes":       pass,
		"more time":         pass,
		"":                  settle,
	})

	p.heal()
	if p.lb != nil && p.lb.away {
		p.kill(p.lb)
	}
	if p.lb == nil {
		p.start(true, changes(r))
	}
	p.commit(p.lb, true, changes(r))
	<-time.After(3 * time.Second)
	for range 3 { // and it stays so
		p.settle(r)
		p.converged(r, configured)
		<-time.After(2*p.lease + time.Millisecond)
	}
	p.looking.Lock()
	defer p.looking.Unlock()
	return p.lives
}

// TestGateNeverOutlivesLease is a model test of the real table, server, watcher and gate on a fake
// clock. Data is dropped, delayed, truncated and merged, and processes restart. At each evaluation
// the gate's state must be a complete state of some table and live only under a lease; in the end
// it must equal the table.
func TestGateNeverOutlivesLease(t *testing.T) {
	lives, runs := 0, 0
	synctest.Test(t, func(t *testing.T) {
		defer func() { <-time.After(time.Minute) }() // timers of gRPC
		// t has a deadline on the real clock, and this test runs on a fake one, on which rapid's
		// time to shrink ends after one run. Shrinking would not help: the order of goroutines at
		// one instant differs between runs.
		rapid.Check(struct{ rapid.TB }{t}, func(r *rapid.T) {
			lives += checkPair(r)
			runs++
		})
	})
	if lives < runs {
		t.Errorf("the state was live at only %d evaluations of %d runs", lives, runs)
	}
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
