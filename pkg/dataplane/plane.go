package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/bits"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/record"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// minPause is between two looks at the kernel that notifications ask for.
	minPause = 20 * time.Millisecond
	// failurePause is the pause after a failure; it doubles up to maxPause.
	failurePause = 50 * time.Millisecond
	maxPause     = 5 * time.Second
	// answerTime bounds questions of people.
	answerTime = 10 * time.Second
	// aroundPause is the longest pause between two looks at links and neighbours.
	aroundPause = 250 * time.Millisecond
	// failedPause is between two looks at neighbours that failed.
	failedPause = time.Second
	// defaultCheckInterval is the time between two looks when nothing is reported.
	defaultCheckInterval = time.Minute
)

// errEnded is the answer when Run has ended.
var errEnded = errors.New("the data plane is not running")

// Plane keeps the data plane in the kernel. It is a task.Task.
//
// While the records cannot be written nothing is changed, not even for a target that
// cannot be reached: what is not written down could not be found again. [State.Err]
// says so.
type Plane struct {
	o      Options
	store  ledger
	damage *record.Damage
	wanted latest.Value[*Wanted]
	state  latest.Value[State]
	ready  chan struct{}
	// requests are what the goroutine that owns everything is asked to do.
	requests chan request
	ended    chan struct{}
	endOnce  sync.Once
}

// request is one question of somebody else's goroutine.
type request struct {
	do   func(*engine)
	done chan struct{}
}

// withDefaults fills in zero fields.
func (o Options) withDefaults() Options {
	if o.First == 0 {
		o.First = DefaultFirst
	}
	if o.Mask == 0 {
		o.Mask = DefaultMask
	}
	if o.Priority == 0 {
		o.Priority = DefaultPriority
	}
	if o.CheckInterval == 0 {
		o.CheckInterval = defaultCheckInterval
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Validate tells what is wrong with options; zero fields have their defaults.
func (o Options) Validate() error {
	o = o.withDefaults()
	switch {
	case o.First&^o.Mask != 0:
		return fmt.Errorf("first number %d is outside the mask %#x of packet marks: choose a smaller number or a wider mask", o.First, o.Mask)
	case o.Mask != 1<<bits.Len32(o.Mask)-1:
		return fmt.Errorf("mask %#x of packet marks has a gap: numbers count up, so it must be like 0xffff or 0xffffff", o.Mask)
	case o.Priority < 1 || o.Priority > 32763:
		return fmt.Errorf("rule priority %d: choose one from 1 to 32763, since three are used and 32766 is the main table's", o.Priority)
	case o.CheckInterval < 0:
		return fmt.Errorf("check interval %s is negative", o.CheckInterval)
	}
	return nil
}

// New opens the records. Those that cannot be read are moved aside, and made anew
// from what is in the kernel once Run begins.
func New(o Options) (*Plane, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("data plane: %w", err)
	}
	o = o.withDefaults()
	o.Log = o.Log.With("component", "dataplane")
	store, damage, err := record.Open(o.StateDir, o.Log)
	if err != nil {
		return nil, fmt.Errorf("data plane: open the records in %s: %w", o.StateDir, err)
	}
	return newPlane(o, store, damage), nil
}

func newPlane(o Options, store ledger, damage *record.Damage) *Plane {
	return &Plane{o: o, store: store, damage: damage, ready: make(chan struct{}), requests: make(chan request), ended: make(chan struct{})}
}

// Configure sets what the data plane is to do. It never blocks; the newest call
// wins. Before the first one what is in the kernel stays as it is.
func (p *Plane) Configure(w *Wanted) { p.wanted.Set(w) }

// State returns what is known to be in the kernel.
func (p *Plane) State() *latest.Value[State] { return &p.state }

// Ready is closed once what was recorded has been compared with the kernel, and the
// State says what serves. While the records or the kernel cannot be read it stays
// open, and the State has the error.
func (p *Plane) Ready() <-chan struct{} { return p.ready }

// String implements task.Task.
func (p *Plane) String() string { return "data plane" }

// ask has the goroutine that owns everything do something, and waits for it.
func (p *Plane) ask(ctx context.Context, do func(*engine)) error {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	r := request{do: do, done: make(chan struct{})}
	select {
	case p.requests <- r:
	case <-p.ended:
		return errEnded
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-r.done:
		return nil
	case <-p.ended:
		return errEnded
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Reconcile puts everything back as it was recorded, also what somebody else
// removed or changed, and returns what it mended. Before the first Configure it
// refuses: nothing is known then of what is wanted.
func (p *Plane) Reconcile(ctx context.Context) ([]Drift, error) {
	type answer struct {
		drift []Drift
		err   error
	}
	answers := make(chan answer, 1)
	err := p.ask(ctx, func(e *engine) {
		drift, err := e.reconcile(p.wanted.Load())
		answers <- answer{drift, err}
	})
	if err != nil {
		return nil, fmt.Errorf("reconcile the data plane: %w", err)
	}
	a := <-answers
	if a.err != nil {
		return a.drift, fmt.Errorf("reconcile the data plane: %w", a.err)
	}
	return a.drift, nil
}

// Slots returns the targets in the kernel for people, sorted by stream and name. It
// reads the kernel.
func (p *Plane) Slots(ctx context.Context) ([]SlotView, error) {
	type answer struct {
		slots []SlotView
		err   error
	}
	answers := make(chan answer, 1)
	err := p.ask(ctx, func(e *engine) {
		slots, err := e.slots()
		answers <- answer{slots, err}
	})
	if err != nil {
		return nil, fmt.Errorf("ask the data plane for its targets: %w", err)
	}
	a := <-answers
	return a.slots, a.err
}

// Run works until ctx ends; what is in the kernel then stays. It works in the
// network namespace of the calling thread, and closes the records when it ends. It
// fails only if the kernel cannot be talked to at all: everything else is tried
// again.
func (p *Plane) Run(ctx context.Context) (err error) {
	defer p.endOnce.Do(func() { close(p.ended) })
	defer func() {
		if closeErr := p.store.Close(); closeErr != nil {
			err = errors.Join(err, fmt.Errorf("close the records: %w", closeErr))
		}
	}()
	f, err := newFabric(p.o)
	if err != nil {
		return fmt.Errorf("open the way to the kernel: %w", err)
	}
	defer func() {
		if closeErr := f.close(); closeErr != nil {
			p.o.Log.Warn("the way to the kernel could not be closed", "error", closeErr)
		}
	}()
	o := &overseer{p: p, e: newEngine(p.o, f, p.store), listen: listenBut(f), solicit: f.solicit, leave: f.leave, last: p.o.lastShape(), pause: failurePause}
	defer o.deafen()
	return o.run(ctx)
}

// listenBut listens to what others than f do: what it did itself, the engine reads
// back, and need not hear of.
func listenBut(f *fabric) func(Options) (*watch, error) {
	return func(o Options) (*watch, error) {
		w, err := newWatch(o)
		if err == nil {
			w.ignore(f)
		}
		return w, err
	}
}

// overseer decides when the engine works.
type overseer struct {
	p      *Plane
	e      *engine
	listen func(Options) (*watch, error)
	// solicit has neighbours that failed asked again.
	solicit func(map[netip.Addr]struct{}) error
	w       *watch
	// last is what the kernel was written with before this start, and leave removes what
	// only that shape has. reshaped: it is written with the options of this start.
	last     shape
	leave    func(shape) error
	reshaped bool
	// loaded: the records were read, and made anew if they were damaged.
	loaded, rebuilt bool
	pause           time.Duration
	// looked is when the engine last looked at the kernel, and dear how long that took:
	// it rests ten times as long, since our own changes are reported as well.
	looked time.Time
	dear   time.Duration
	// checked and seen are when everything, and links and neighbours, were last read.
	checked, seen time.Time
	// solicited is when neighbours were last asked, deaf why they could not be.
	solicited time.Time
	deaf      string
}

func (o *overseer) deafen() {
	if o.w == nil {
		return
	}
	if err := o.w.close(); err != nil {
		o.p.o.Log.Warn("listeners for changes of the kernel could not be closed", "error", err)
	}
	o.w = nil
}

func (o *overseer) run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var listenErr error
		if o.w == nil {
			// Listen first, so that no change falls between the look and the listening.
			if o.w, listenErr = o.listen(o.p.o); listenErr == nil {
				o.e.need.all, o.e.need.ways, o.e.need.around = true, true, true
			}
		}
		wanted, reconfigured := o.p.wanted.Get()
		failed := o.work(wanted, listenErr)

		next := time.Until(o.checked.Add(o.p.o.CheckInterval))
		if failed {
			next = min(next, o.pause)
			o.pause = min(2*o.pause, maxPause)
		} else {
			o.pause = failurePause
		}
		if end, ok := o.e.nextDrain(); ok && !failed {
			next = min(next, time.Until(end))
		}
		var changed, broken <-chan struct{}
		if o.w != nil {
			changed, broken = o.w.changed, o.w.failed
		}
		if o.e.needed() && !failed {
			// Something was reported that waits for its turn.
			changed = nil
			next = min(next, time.Until(o.looked.Add(o.quiet())))
		}
		if o.e.waiting() {
			// The kernel does not tell of all that become reachable again.
			next = min(next, time.Until(o.seen.Add(failedPause)))
		}
		if !failed && o.e.unfinished() {
			next = 0
		}
		timer.Reset(next)
		select {
		case <-ctx.Done():
			return nil
		case <-reconfigured:
		case <-timer.C:
		case r := <-o.p.requests:
			r.do(o.e)
			close(r.done)
		case <-changed:
			o.hear(o.w.take())
		case <-broken:
			o.p.o.Log.Warn("listening for changes of the kernel ended and begins anew", "error", o.w.err)
			o.deafen()
			if !rest(ctx, o.pause, reconfigured) {
				return nil
			}
			o.pause = min(2*o.pause, maxPause)
		}
	}
}

// rest pauses, but not for something new. It tells whether to go on.
func rest(ctx context.Context, pause time.Duration, news <-chan struct{}) bool {
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-news:
	case <-t.C:
	}
	return true
}

// hear takes what was reported. Our own transactions are reported as well: the
// generation tells.
func (o *overseer) hear(n news) {
	need := &o.e.need
	need.all = need.all || n.ruleset && o.e.foreignTransaction()
	need.ways = need.ways || n.ways || n.links
	need.around = need.around || n.links || n.neighbours
	need.downed = append(need.downed, n.downed...)
}

// work does one pass and publishes what is known then. It tells whether something is
// to be tried again.
func (o *overseer) work(wanted *Wanted, listenErr error) (failed bool) {
	e, log := o.e, o.p.o.Log
	now := time.Now()
	if !o.loaded {
		if err := o.begin(); err != nil {
			o.publish(wanted, err)
			return true
		}
	}
	if now.Sub(o.checked) >= o.p.o.CheckInterval {
		e.need.all, e.need.ways, e.need.around = true, true, true
		clear(e.refused)
	}
	if e.waiting() && now.Sub(o.seen) >= failedPause {
		e.need.around = true
	}
	due := now.Sub(o.looked) >= o.quiet()
	later := need{}
	if !due && e.actual != nil {
		later = e.need
		e.need = need{}
	}
	whole := e.need.all
	looking := e.needed()
	e.pass(wanted, o.reshapes())
	if wanted != nil && o.leave != nil && !o.reshaped && e.lookErr == nil && e.storeErr == nil {
		o.reshape()
	}
	if looking {
		o.looked, o.seen, o.dear = now, now, e.lookTime
	}
	if whole && e.lookErr == nil {
		o.checked = now
	}
	if e.waiting() && now.Sub(o.solicited) >= failedPause {
		o.solicited = now
		o.ask()
	}
	e.need.merge(later)
	err := errors.Join(e.lookErr, e.storeErr)
	if listenErr != nil {
		log.Warn("changes of the kernel cannot be listened for", "error", listenErr)
	}
	o.publish(wanted, err)
	if e.lookErr == nil {
		o.announce()
	}
	return err != nil || listenErr != nil || e.failing()
}

// reshapes tells whether what is in the kernel has the shape of other options.
func (o *overseer) reshapes() bool {
	return o.leave != nil && !o.reshaped && o.last != o.p.o.shape()
}

// reshape ends the change to other options than at the last start, after the first pass
// with something wanted.
func (o *overseer) reshape() {
	log := o.p.o.Log
	if o.reshapes() {
		if left := o.e.drift(); len(left) > 0 {
			log.Warn("not all of the data plane could be made anew for other options yet", "left", len(left), "first", left[0].Object)
			return
		}
		if err := o.leave(o.last); err != nil {
			log.Warn("policy rules from before a start with other options could not be removed yet", "error", err)
			return
		}
		log.Info("the data plane was made anew for other options than at the last start", "before", o.last, "now", o.p.o.shape())
	}
	if err := o.p.o.keepShape(); err != nil {
		log.Warn("the options of the data plane cannot be written down", "error", err)
	}
	o.reshaped = true
}

// ask has the neighbours of targets asked that failed. Why it cannot be done is said
// once: they come back by their checks at least.
func (o *overseer) ask() {
	deaf := ""
	if err := o.solicit(o.e.silent()); err != nil {
		deaf = err.Error()
	}
	if deaf != "" && deaf != o.deaf {
		o.p.o.Log.Warn("neighbours that failed cannot be asked again", "error", deaf)
	}
	o.deaf = deaf
}

// quiet is the time between two looks, so that somebody who writes all the time does
// not keep us busy. What may be about a neighbour or a link waits less.
func (o *overseer) quiet() time.Duration {
	pause := max(minPause, 10*o.dear)
	if o.e.need.around {
		pause = min(pause, aroundPause)
	}
	return pause
}

func (n *need) merge(m need) {
	n.all, n.ways, n.around = n.all || m.all, n.ways || m.ways, n.around || m.around
	n.downed = append(n.downed, m.downed...)
}

// begin reads the records, or makes them anew.
func (o *overseer) begin() error {
	if !o.rebuilt {
		if err := o.e.rebuild(o.p.damage); err != nil {
			return err
		}
		o.rebuilt = true
	}
	if err := o.e.load(); err != nil {
		return err
	}
	if o.reshapes() {
		o.p.o.Log.Info("the options are others than at the last start: what is in the kernel is made anew once something is wanted", "before", o.last, "now", o.p.o.shape())
	}
	o.loaded = true
	return nil
}

func (o *overseer) announce() {
	select {
	case <-o.p.ready:
	default:
		o.p.o.Log.Info("the records were compared with the kernel", "streams", len(o.e.records.Streams), "targets", len(o.e.records.Targets), "drift", len(o.e.drift()))
		close(o.p.ready)
	}
}

// publish tells what is known, if it is news.
func (o *overseer) publish(wanted *Wanted, err error) {
	old := o.p.state.Load()
	s := State{Err: err}
	if wanted != nil {
		s.Revision = wanted.Revision
	}
	if o.e.actual != nil {
		o.e.describe(&s)
	} else {
		s.Streams, s.VIPs, s.Unreachable = map[string]*StreamState{}, map[vip.VIP]string{}, map[netip.Addr]string{}
	}
	if err != nil {
		s.Failures = old.Failures + 1
		if old.Err == nil || old.Err.Error() != err.Error() {
			o.p.o.Log.Error("the data plane cannot be changed for now", "error", err, "failures", s.Failures)
		}
	} else if old.Err != nil {
		o.p.o.Log.Info("the data plane can be changed again", "failures", old.Failures)
	}
	o.logProblems(old.Problems, s.Problems)
	if !old.At.IsZero() && sameState(old, s) {
		return
	}
	s.At = time.Now()
	o.p.state.Set(s)
	fault(stepPublished)
}

func (o *overseer) logProblems(old, now []Problem) {
	for _, p := range now {
		if !slices.ContainsFunc(old, func(q Problem) bool { return p.Object == q.Object && p.Detail == q.Detail }) {
			o.p.o.Log.Error("the data plane has a problem", "object", p.Object, "detail", p.Detail, "remedy", p.Remedy)
		}
	}
	for _, p := range old {
		if !slices.ContainsFunc(now, func(q Problem) bool { return p.Object == q.Object && p.Detail == q.Detail }) {
			o.p.o.Log.Info("a problem of the data plane is over", "object", p.Object, "detail", p.Detail)
		}
	}
}

// sameState compares all but the time.
func sameState(a, b State) bool {
	errText := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	return a.Revision == b.Revision && a.Failures == b.Failures && errText(a.Err) == errText(b.Err) &&
		maps.EqualFunc(a.Streams, b.Streams, func(x, y *StreamState) bool { return x == y || reflect.DeepEqual(x, y) }) &&
		maps.Equal(a.VIPs, b.VIPs) && maps.Equal(a.Unreachable, b.Unreachable) &&
		slices.Equal(a.Drift, b.Drift) && reflect.DeepEqual(a.Problems, b.Problems)
}
