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
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// minPause is between two looks at the kernel that notifications ask for.
	minPause = 20 * time.Millisecond
	// maxQuiet is the longest pause before a look, so that drift is repaired within a second.
	maxQuiet = 500 * time.Millisecond
	// failurePause is the pause after a failure; it doubles up to maxPause.
	failurePause = 50 * time.Millisecond
	maxPause     = 5 * time.Second
	// aroundPause is the longest pause between two looks at links and neighbours.
	aroundPause = 250 * time.Millisecond
	// linkPause lets a link that goes down and up again at once come back before a look.
	linkPause = 100 * time.Millisecond
	// failedPause is between two looks at neighbours that failed.
	failedPause = time.Second
	// defaultCheckInterval is the time between two looks when nothing is reported.
	defaultCheckInterval = time.Minute
)

// errEnded is the answer when Run has ended.
var errEnded = errors.New("the data plane is not running")

// Plane keeps the data plane in the kernel. It is a task.Task.
type Plane struct {
	o      Options
	holds  map[string]time.Time // at the start
	wanted latest.Value[*Wanted]
	state  latest.Value[State]
	ready  chan struct{}
	// requests are what the goroutine that owns everything is asked to do.
	requests chan func(*engine)
	ended    chan struct{}
	endOnce  sync.Once
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

// New reads the holds of an earlier process.
func New(o Options) (*Plane, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("data plane: %w", err)
	}
	o = o.withDefaults()
	o.Log = o.Log.With("component", "dataplane")
	holds, err := loadHolds(o, o.Log)
	if err != nil {
		return nil, fmt.Errorf("data plane: %w", err)
	}
	return &Plane{o: o, holds: holds, ready: make(chan struct{}), requests: make(chan func(*engine)), ended: make(chan struct{})}, nil
}

// Configure sets what the data plane is to do. It never blocks; the newest call
// wins. Before the first one what is in the kernel stays as it is.
func (p *Plane) Configure(w *Wanted) { p.wanted.Set(w) }

// State returns what is known to be in the kernel.
func (p *Plane) State() *latest.Value[State] { return &p.state }

// Ready is closed once the kernel has been read, and the State says what serves. While
// the kernel cannot be read it stays open, and the State has the error.
func (p *Plane) Ready() <-chan struct{} { return p.ready }

// String implements task.Task.
func (p *Plane) String() string { return "data plane" }

// ask has the goroutine that owns the engine do something, and waits for the answer.
func ask[T any](ctx context.Context, p *Plane, what string, do func(*engine) (T, error)) (answer T, err error) {
	type result struct {
		answer T
		err    error
	}
	results := make(chan result, 1)
	var request chan<- func(*engine) = p.requests
	for {
		select {
		case request <- func(e *engine) {
			answer, err := do(e)
			results <- result{answer, err}
		}:
			request = nil
			continue
		case r := <-results:
			answer, err = r.answer, r.err
		case <-p.ended:
			err = errEnded
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", what, err)
		}
		return answer, err
	}
}

// Slots returns the targets in the kernel for people, sorted by stream and name. It
// reads the kernel.
func (p *Plane) Slots(ctx context.Context) ([]SlotView, error) {
	return ask(ctx, p, "list the targets of the data plane", (*engine).slots)
}

// Run works until ctx ends; what is in the kernel then stays. It works in the network
// namespace of the calling thread. It fails only if the kernel cannot be talked to at
// all: everything else is tried again.
func (p *Plane) Run(ctx context.Context) error {
	defer p.endOnce.Do(func() { close(p.ended) })
	f, err := newFabric(p.o)
	if err != nil {
		return fmt.Errorf("open netlink sockets: %w", err)
	}
	defer func() {
		if err := f.close(); err != nil {
			p.o.Log.Warn("failed to close netlink sockets", "error", err)
		}
	}()
	e := newEngine(p.o, f)
	e.holds = p.holds
	o := &overseer{p: p, e: e, listen: listenBut(f), solicit: f.solicit, settings: f.lacksSettings, removeOld: f.removeOldRules, pause: failurePause}
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
	// settings checks the kernel parameters; set is when that was, wrong what it found.
	settings func() []settingProblem
	set      time.Time
	wrong    []settingProblem
	w        *watch
	// removeOld removes rules that were installed with other options, once: removed.
	removeOld func() error
	removed   bool
	// loaded: what is installed was read from the kernel.
	loaded bool
	pause  time.Duration
	// looked is when the engine last looked at the kernel, and dear how long that took:
	// it rests ten times as long, since our own changes are reported as well.
	looked time.Time
	dear   time.Duration
	// downed is when a link went down, at most once a second.
	downed time.Time
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
		o.checkSettings(time.Now())
		failed := o.work(wanted, listenErr)

		next := time.Until(o.checked.Add(o.p.o.CheckInterval))
		if o.settings != nil {
			next = min(next, time.Until(o.set.Add(settingsInterval)))
		}
		if failed {
			next = min(next, o.pause)
			o.pause = min(2*o.pause, maxPause)
		} else {
			o.pause = failurePause
		}
		for _, at := range o.deadlines() {
			// What is overdue after a failure waits for its next attempt.
			if left := time.Until(at); left > 0 || !failed {
				next = min(next, left)
			}
		}
		var changed, broken <-chan struct{}
		if o.w != nil {
			changed, broken = o.w.changed, o.w.failed
		}
		if o.e.needed() && o.e.lookErr == nil {
			// Something was reported that waits for its turn.
			changed = nil
			next = min(next, time.Until(o.due()))
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
		case do := <-o.p.requests:
			do(o.e)
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

// deadlines are when drains, pauses between repairs, and holds end.
func (o *overseer) deadlines() (list []time.Time) {
	for _, next := range []func() (time.Time, bool){o.e.nextDrain, o.e.nextRepair, o.e.expireHolds} {
		if at, ok := next(); ok {
			list = append(list, at)
		}
	}
	return list
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
	if n.settings {
		o.set = time.Time{}
	}
	if len(n.downed) > 0 && time.Since(o.downed) > time.Second {
		o.downed = time.Now()
	}
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
	later := need{}
	if now.Before(o.due()) && e.actual != nil {
		later = e.need
		e.need = need{}
	}
	whole := e.need.all
	looking := e.needed()
	e.expireHolds()
	e.observe()
	if e.lookErr == nil && e.wanted != nil && e.repairsAreSlow() {
		// Readiness must not wait for a repair that takes long.
		o.publish(e.wanted, nil)
	}
	e.converge(wanted, false)
	if wanted != nil && !o.removed && e.lookErr == nil && !e.failing() && len(e.drift()) == 0 {
		if err := o.removeOld(); err != nil {
			log.Warn("failed to remove policy rules that were installed with other options", "error", err)
		} else {
			o.removed = true
		}
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
	err := e.lookErr
	if listenErr != nil {
		log.Warn("changes of the kernel cannot be listened for", "error", listenErr)
	}
	o.publish(wanted, err)
	if e.lookErr == nil {
		o.announce()
	}
	return err != nil || listenErr != nil || e.failing()
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

// due is when the next look that was asked for may happen.
func (o *overseer) due() time.Time {
	at := o.looked.Add(o.quiet())
	if back := o.downed.Add(linkPause); back.After(at) {
		return back
	}
	return at
}

// quiet is the time between two looks, so that a process that writes all the time does
// not keep the engine busy. What may be about a neighbour or a link waits less.
func (o *overseer) quiet() time.Duration {
	pause := min(max(minPause, 10*o.dear), maxQuiet)
	if o.e.need.around {
		pause = min(pause, aroundPause)
	}
	return pause
}

func (n *need) merge(m need) {
	n.all, n.ways, n.around = n.all || m.all, n.ways || m.ways, n.around || m.around
	n.downed = append(n.downed, m.downed...)
}

// begin finds what is installed.
func (o *overseer) begin() error {
	if err := o.e.load(); err != nil {
		return err
	}
	o.loaded = true
	return nil
}

func (o *overseer) announce() {
	select {
	case <-o.p.ready:
	default:
		o.p.o.Log.Info("data plane read from the kernel", "streams", len(o.e.installed.Streams), "targets", len(o.e.installed.Targets))
		close(o.p.ready)
	}
}

// publish tells what is known, if it is news.
func (o *overseer) publish(wanted *Wanted, err error) {
	old := o.p.state.Load()
	s := State{Err: err, Held: o.e.holds, Repairs: o.e.repaired}
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
			o.p.o.Log.Error("data plane cannot be read or changed", "error", err, "failures", s.Failures)
		}
	} else if old.Err != nil {
		o.p.o.Log.Info("data plane can be changed again", "failures", old.Failures)
	}
	for _, p := range o.wrong {
		s.Problems = append(s.Problems, p.Problem)
	}
	s.Withheld = withheld(o.wrong)
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
	return a.Revision == b.Revision && a.Withheld == b.Withheld && a.Failures == b.Failures && errText(a.Err) == errText(b.Err) &&
		maps.EqualFunc(a.Streams, b.Streams, func(x, y *StreamState) bool { return x == y || reflect.DeepEqual(x, y) }) &&
		maps.Equal(a.VIPs, b.VIPs) && maps.Equal(a.Held, b.Held) && a.Repairs == b.Repairs && maps.Equal(a.Unreachable, b.Unreachable) &&
		slices.Equal(a.Drift, b.Drift) && reflect.DeepEqual(a.Problems, b.Problems)
}
