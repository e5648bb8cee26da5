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
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
	"google.golang.org/grpc"
	"pgregory.net/rapid"
)

// chunk is bytes on their way through a wire.
type chunk struct {
	bytes []byte
	sent  time.Time
}

// wire is one connection between a watcher and a load balancer, in memory: it
// can be slow, stand still, and break, also in the middle of a message.
type wire struct {
	from *pairLB

	mu        sync.Mutex
	delay     time.Duration
	still     chan struct{} // closed when the wire moves again; nil while it moves
	breakIn   int           // bytes toward the watcher before it breaks; negative: never
	ends      []net.Conn
	broken    bool
	delivered time.Time     // when bytes last reached the watcher
	slowest   time.Duration // that bytes took to get there
}

// span makes a wire and returns its two ends.
func span(running *sync.WaitGroup, from *pairLB) (w *wire, watcher, balancer net.Conn) {
	watcher, ours := net.Pipe()
	theirs, balancer := net.Pipe()
	w = &wire{from: from, breakIn: -1, ends: []net.Conn{ours, theirs}}
	w.pump(running, ours, theirs, false)
	w.pump(running, theirs, ours, true)
	return w, watcher, balancer
}

// pump carries bytes one way until an end closes, which breaks the wire.
func (w *wire) pump(running *sync.WaitGroup, from, to net.Conn, down bool) {
	way := make(chan chunk, 4096) // the buffer of the socket
	running.Go(func() {
		defer close(way)
		for {
			b := make([]byte, 16<<10)
			n, err := from.Read(b)
			if err != nil {
				return
			}
			way <- chunk{b[:n], time.Now()}
		}
	})
	running.Go(func() {
		for c := range way {
			if !w.carry(c, to, down) {
				break
			}
		}
		w.cut()
		for range way { // until the reader sees the end
		}
	})
}

// carry delivers one chunk when the wire lets it through.
func (w *wire) carry(c chunk, to net.Conn, down bool) bool {
	w.mu.Lock()
	delay := w.delay
	w.mu.Unlock()
	if d := time.Until(c.sent.Add(delay)); d > 0 {
		<-time.After(d)
	}
	w.mu.Lock()
	for w.still != nil {
		still := w.still
		w.mu.Unlock()
		<-still
		w.mu.Lock()
	}
	b, last := c.bytes, w.broken
	if down && w.breakIn >= 0 && len(b) > w.breakIn {
		b, last = b[:w.breakIn], true
	}
	if down {
		if w.breakIn >= 0 {
			w.breakIn -= len(b)
		}
		w.delivered, w.slowest = time.Now(), max(w.slowest, time.Since(c.sent))
	}
	w.mu.Unlock()
	if len(b) == 0 {
		return !last
	}
	_, err := to.Write(b)
	return err == nil && !last
}

func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken = true
	for _, c := range w.ends {
		_ = c.Close() // of a pipe
	}
	w.move()
}

// stop makes the wire stand still; the caller holds no lock.
func (w *wire) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.still == nil && !w.broken {
		w.still = make(chan struct{})
	}
}

// move makes it move; the caller holds w.mu.
func (w *wire) move() {
	if w.still != nil {
		close(w.still)
		w.still = nil
	}
}

func (w *wire) heal() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.delay, w.breakIn = 0, -1
	w.move()
}

// pairLB is one start of the load balancer: the real Table and Server.
type pairLB struct {
	*Server
	table    *Table
	grpc     *grpc.Server
	incoming chan net.Conn
	closed   chan struct{}
	once     sync.Once
	number   int

	mu    sync.Mutex
	hung  bool
	alive time.Time // the last sign of life of its loop
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

// loop runs f as the loop that evaluates readiness does: not while it hangs.
func (l *pairLB) loop(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.hung {
		l.alive = time.Now()
		f()
	}
}

// pair is a watcher and a gate, the load balancers that they meet one after the
// other, and the truth about these.
type pair struct {
	lease, grace time.Duration
	crowd        bool // many VIPs, so that snapshots travel in parts
	running      sync.WaitGroup
	watcher      *Watcher
	svid         latest.Value[uint64]

	mu      sync.Mutex
	lb      *pairLB // that has the socket; nil: nobody
	lbs     []*pairLB
	history map[Position]map[vip.VIP]State
	model   map[vip.VIP]State // of lb

	// The gate's side, which belongs to run.
	gate  *gated
	last  int // the load balancer of the last look, and its revision
	lastR uint64
	lives int // looks at which the word was live

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

// start starts a load balancer that takes the socket, and beats.
func (p *pair) start(synced bool, changed map[vip.VIP]State) {
	l := &pairLB{incoming: make(chan net.Conn), closed: make(chan struct{}), number: len(p.lbs) + 1}
	l.table = NewTable(TableOptions{InstanceID: fmt.Sprintf("lb-%d", l.number), Lease: p.lease, StaleGrace: p.grace})
	l.Server = NewServer(l.table, ServerOptions{Peer: namedPeer, Role: RolesOf([]spiffeid.ID{frontendID}, nil)})
	l.grpc = grpc.NewServer(append(GRPCOptions(), grpc.Creds(named{}))...)
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
	p.lb, p.lbs, p.model = l, append(p.lbs, l), map[vip.VIP]State{}
	p.mu.Unlock()
	if p.crowd {
		for i := range 2500 {
			changed[numbered(100+i)] = Ready
		}
	}
	p.commit(synced, changed)
}

// commit has the load balancer of the moment decide; removed VIPs have a state
// that does not exist.
func (p *pair) commit(synced bool, changed map[vip.VIP]State) {
	p.lb.loop(func() {
		d := Decision{Synced: synced}
		for v, s := range changed {
			if s > Draining {
				d.Removed = append(d.Removed, v)
				delete(p.model, v)
				continue
			}
			r := VIPReadiness{VIP: v, State: s}
			if s == Draining {
				r.DrainEnd = time.Now().Add(time.Hour)
			}
			d.Changed = append(d.Changed, r)
			p.model[v] = s
		}
		p.record()
		p.lb.table.Commit(d)
	})
}

// record notes the state that is about to get the next revision, before anybody
// can hear of it.
func (p *pair) record() {
	next := p.lb.table.Position()
	next.Revision++
	p.mu.Lock()
	defer p.mu.Unlock()
	p.history[next] = maps.Clone(p.model)
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

// run is the gate's loop, as the frontend has it.
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
		now := time.Now()
		p.gate.hear(now, p.watcher.Take())
		problem := p.judge(now, p.gate.look(now))
		p.mu.Lock()
		if p.problem == "" {
			p.problem = problem
		}
		p.mu.Unlock()
		p.watcher.Report(ReportDelta{Applied: p.gate.view.Position})
		timer.Reset(time.Until(p.gate.Deadline(now))) // there is one: that of the gateways
		select {
		case <-p.watcher.Changed():
		case <-timer.C:
		case <-ctx.Done():
		}
	}
}

// had returns the state that a table had at a position, and whose it was.
func (p *pair) had(at Position) (lb *pairLB, state map[vip.VIP]State, known bool) {
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

// judge holds what the gate makes of what it heard against the truth, and says
// what is wrong.
func (p *pair) judge(now time.Time, risen []vip.VIP) string {
	at := p.gate.view.Position
	if at == (Position{}) {
		if p.gate.Freshness(now) != gate.Lost {
			return "something counts though nothing was heard"
		}
		return ""
	}
	lb, want, known := p.had(at)
	switch got := statesOf(p.gate.view.vips); {
	case !known || !maps.Equal(got, want):
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
	for _, v := range risen {
		if d := p.gate.Decision(v); d.Advertisement == gate.Announced && (!live || want[v] != Ready) {
			return fmt.Sprintf("%s rose to %+v at %+v, where it is %v; live: %v", v, d, at, want[v], live)
		}
	}
	return ""
}

// vouched says what is wrong with a word of lb that counts as live. Its lease
// cannot be longer than from the last bytes that reached the watcher, nor than
// from its last sign of life and the longest way of a message.
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
	case !p.crowd && now.Sub(lb.alive) >= p.lease+p.lease/100+slowest: // a crowd also waits for windows
		return fmt.Sprintf("live %v after the last sign of life, and the longest way took %v", now.Sub(lb.alive), slowest)
	}
	return ""
}

// settle waits until everybody waits, and looks at what holds then.
func (p *pair) settle(r *rapid.T) {
	synctest.Wait()
	p.mu.Lock()
	problem, awake := p.problem, isClosed(p.awake)
	p.mu.Unlock()
	if problem != "" {
		r.Fatal(problem)
	}
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
	r.Fatalf("the word of %s is live though all its connections have ended", lb.table.instance)
}

// heal ends all faults, but not what they have done.
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

const pairVIPs = 6

// changes draws what a decision changes.
func changes(r *rapid.T) map[vip.VIP]State {
	changed := map[vip.VIP]State{}
	for range rapid.IntRange(0, 3).Draw(r, "changes") {
		changed[numbered(rapid.IntRange(0, pairVIPs-1).Draw(r, "vip"))] = State(rapid.IntRange(0, 3).Draw(r, "state"))
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
		lease:   time.Duration(rapid.SampledFrom([]int{100, 300, 1000}).Draw(r, "lease ms")) * time.Millisecond,
		grace:   time.Duration(rapid.SampledFrom([]int{0, 0, 200, 2000}).Draw(r, "grace ms")) * time.Millisecond,
		crowd:   rapid.IntRange(0, 9).Draw(r, "crowd") == 0,
		history: map[Position]map[vip.VIP]State{},
		gate:    newGated(configured...),
		awake:   make(chan struct{}),
	}
	close(p.awake)
	p.watcher = NewWatcher(WatcherOptions{
		Target: "pair", Credentials: named{id: frontendID}, MaxBackoff: 500 * time.Millisecond,
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
		<-time.After(time.Minute) // what gRPC left to its own timers
	}()
	p.running.Go(func() { _ = p.watcher.Run(ctx) })
	p.running.Go(func() { p.run(ctx) })
	if rapid.IntRange(0, 4).Draw(r, "first") > 0 {
		p.start(true, changes(r))
	}

	away := false
	with := func(f func()) func(*rapid.T) {
		return func(*rapid.T) {
			if p.lb != nil {
				f()
			}
		}
	}
	// anyWire has f done to a connection of any load balancer.
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
	r.Repeat(map[string]func(*rapid.T){
		"commit":      with(func() { p.commit(false, changes(r)) }),
		"commit more": with(func() { p.commit(false, changes(r)) }),
		"sync":        with(func() { p.commit(true, changes(r)) }),
		"go away": with(func() {
			p.lb.loop(func() {
				if !away {
					away = true
					p.record()
					p.lb.table.GoAway(time.Hour)
				}
			})
		}),
		"hang": with(func() { p.lb.mu.Lock(); defer p.lb.mu.Unlock(); p.lb.hung = !p.lb.hung }),
		"kill": with(func() { p.kill(p.lb) }),
		"restart": func(r *rapid.T) {
			if p.lb != nil {
				p.kill(p.lb)
			}
			away = false
			p.start(rapid.Bool().Draw(r, "synced"), changes(r))
		},
		"replace": func(r *rapid.T) { // the old one lingers
			away = false
			p.start(rapid.Bool().Draw(r, "synced"), changes(r))
			p.svid.Update(func(n uint64) uint64 { return n + 1 })
		},
		"rotate": func(*rapid.T) { p.svid.Update(func(n uint64) uint64 { return n + 1 }) },
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
		"the gate sleeps": func(*rapid.T) {
			p.mu.Lock()
			defer p.mu.Unlock()
			if isClosed(p.awake) {
				p.awake = make(chan struct{})
			}
		},
		"the gate wakes up": func(*rapid.T) {
			p.mu.Lock()
			defer p.mu.Unlock()
			if !isClosed(p.awake) {
				close(p.awake)
			}
		},
		"time passes": pass,
		"more time":   pass,
		"":            func(r *rapid.T) { p.settle(r) },
	})

	p.heal()
	if p.lb != nil && away {
		p.kill(p.lb)
	}
	if p.lb == nil {
		p.start(true, changes(r))
	}
	p.commit(true, changes(r))
	<-time.After(3 * time.Second)
	for range 3 { // and it stays so
		p.settle(r)
		want := p.lb.table.Position()
		if f := p.gate.Freshness(time.Now()); p.gate.view.Position != want || f != gate.Live || p.gate.Err != nil {
			r.Fatalf("in the end the gate is at %+v, %v, and the table at %+v: %v", p.gate.view.Position, f, want, p.gate.Err)
		}
		if report := p.lb.Report().Load(); !report.Connected || report.Applied != want {
			r.Fatalf("in the end the report is %+v, want %+v", report, want)
		}
		for _, v := range configured {
			d := p.gate.Decision(v)
			if state := p.model[v]; (state == Ready) != (d.Advertisement == gate.Announced) || state == NotReady && d.Advertisement != gate.Withdrawn {
				r.Fatalf("in the end %s is %v and %+v", v, state, d)
			}
		}
		<-time.After(2*p.lease + time.Millisecond)
	}
	return p.lives
}

// TestGateNeverOutlivesTheLeaseAndConverges is the model of the pair: the real
// table, server, watcher and gate on a clock of their own. Whatever is dropped,
// delayed, cut off, merged or restarted in between, what the gate has is at each
// of its looks a whole state that some table had, counts as live only under a
// lease, and in the end is what the table says.
func TestGateNeverOutlivesTheLeaseAndConverges(t *testing.T) {
	lives, converged := 0, 0
	synctest.Test(t, func(t *testing.T) {
		// Without the deadline of t, which does not go by the clock in here.
		rapid.Check(struct{ rapid.TB }{t}, func(r *rapid.T) {
			lives += checkPair(r)
			converged++
		})
	})
	if lives < converged {
		t.Errorf("the word was live at only %d looks of %d runs", lives, converged)
	}
}
