package speaker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	pollInterval = time.Second
	// While the speaker is expected to export other routes, polls follow each other after
	// fastInterval, and twice the time after each one. FRR exports a change after 60 ms.
	fastInterval = 20 * time.Millisecond
	pollLimit    = 2 * time.Second // for one answer
	// starvedAfter is the delay of a timeout beyond which this process counts as starved of CPU time.
	starvedAfter = 500 * time.Millisecond
	// unansweredLimit is how long the last state counts without an answer. The gate counts it for 3 s.
	unansweredLimit = 2 * time.Second
	// exportTime is how long the speaker may take to export the announced VIPs to a gateway.
	exportTime = 2 * time.Second
	// The list of exported routes is read when counts do not explain each other for listDelay, and
	// again after maxListAge.
	listDelay, maxListAge = 300 * time.Millisecond, 10 * time.Second
	// sinceJitter bounds the error of the start of a session, which FRR computes from two clocks.
	sinceJitter = 2 * time.Second
)

// Options configure an Observer.
type Options struct {
	// View reads the speaker; nil if no session is observed. Every gateway then counts as up, and
	// each announced VIP as exported.
	View View
	Log  *slog.Logger
}

type sessionKey struct {
	name   string
	family vip.Family
}

// Observer follows the sessions of the gateways at a speaker. It never changes the speaker. It has
// the methods of [bird.Supervisor] that a frontend calls, and implements task.Task.
type Observer struct {
	options    Options
	desired    *latest.Value[trench.Attractor]
	expect     *latest.Value[[len(vip.Families)]int]
	state      *latest.Value[bird.State]
	hint       chan struct{} // poll now; coalesced
	confirming atomic.Int32
	pulse      task.Pulse

	// Owned by Run.
	exports  map[sessionKey]exports
	due      sessionKey // whose list is due for the longest time; zero without one
	answered time.Time  // last answer
}

// exports holds the routes that the speaker sends to a gateway. A speaker may send others than
// VIPs: their number is learned from a list, and is assumed to be constant until counts differ.
type exports struct {
	session Session
	differs time.Time // since when the counts do not explain each other; zero if they do
	short   time.Time // since when fewer VIPs than announced are exported; zero if not
	listed  time.Time // zero before the first list of the session
	counts  [2]int    // of all exported routes and of announced VIPs, at the list
	vips    vip.Set   // at the list; nil if it could not be read
	unknown bool      // the list cannot be read
	others  int       // routes that are not VIPs
}

// NewObserver returns an observer. Run polls after the first call of Configure.
func NewObserver(options Options) *Observer {
	options.Log = cmp.Or(options.Log, slog.New(slog.DiscardHandler))
	return &Observer{
		options: options, desired: latest.New(trench.Attractor{}), expect: latest.New([len(vip.Families)]int{}),
		state: latest.New(bird.State{Name: speakerName}), hint: make(chan struct{}, 1), exports: map[sessionKey]exports{},
	}
}

// String implements task.Task.
func (observer *Observer) String() string { return "speaker" }

// Overdue implements task.Loop.
func (observer *Observer) Overdue() time.Duration { return observer.pulse.Overdue() }

// State returns the state of the speaker and its sessions with the gateways.
func (observer *Observer) State() *latest.Value[bird.State] { return observer.state }

// Configure replaces gateways and VIPs. It does not block.
func (observer *Observer) Configure(attractor trench.Attractor) {
	observer.desired.Set(attractor)
	latest.Wake(observer.hint)
}

// Expect sets the number of VIPs of each family that were announced to the speaker.
func (observer *Observer) Expect(announced4, announced6 int) {
	want := [len(vip.Families)]int{announced4, announced6}
	if observer.expect.Load() != want {
		observer.expect.Set(want)
		latest.Wake(observer.hint)
	}
}

// ApplyNow, Attract, Export and ExportRoutes have no effect: the speaker's sessions and the kernel's
// routes belong to another program.
func (observer *Observer) ApplyNow() {}

// Attract has no effect; see ApplyNow.
func (observer *Observer) Attract(time.Time, [len(vip.Families)]bool) {}

// Export has no effect; see ApplyNow.
func (observer *Observer) Export(map[string]bird.Export) {}

// ExportRoutes has no effect; see ApplyNow.
func (observer *Observer) ExportRoutes() {}

// Confirm waits until a poll that began after the call finds that every gateway that is up receives
// the expected number of VIPs.
func (observer *Observer) Confirm(ctx context.Context) error {
	after := time.Now()
	observer.confirming.Add(1)
	defer observer.confirming.Add(-1)
	latest.Wake(observer.hint)
	for {
		want, expected := observer.expect.Get()
		state, looked := observer.state.Get()
		if state.Alive && state.At.After(after) && confirmed(state.Gateways, want) {
			return nil
		}
		select {
		case <-looked:
		case <-expected:
		case <-ctx.Done():
			return fmt.Errorf("the speaker does not export the expected routes (%d IPv4, %d IPv6): %w",
				want[vip.IPv4], want[vip.IPv6], ctx.Err())
		}
	}
}

func confirmed(gateways []bird.GatewayState, want [len(vip.Families)]int) bool {
	return !slices.ContainsFunc(gateways, func(gateway bird.GatewayState) bool {
		return gateway.Up && gateway.Exported != want[gateway.Family]
	})
}

// Run polls the speaker until ctx ends.
func (observer *Observer) Run(ctx context.Context) error {
	defer observer.pulse.End()
	timer := time.NewTimer(0)
	defer timer.Stop()
	fast := fastInterval
	for {
		wait := pollInterval
		observer.pulse.Next(pollLimit * 4)
		if attractor := observer.desired.Load(); len(attractor.Gateways) > 0 {
			observer.poll(ctx, attractor)
			if ctx.Err() == nil && (observer.confirming.Load() > 0 || observer.awaits()) {
				wait, fast = fast, min(2*fast, pollInterval)
			} else {
				fast = fastInterval
			}
		}
		timer.Reset(wait)
		observer.pulse.Next(wait)
		select {
		case <-timer.C:
		case <-observer.hint:
			fast = fastInterval
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// awaits reports whether a gateway that is up lacks announced VIPs, or has some that are not.
func (observer *Observer) awaits() bool {
	state := observer.state.Load()
	return !state.Alive || !confirmed(state.Gateways, observer.expect.Load())
}

// poll reads the speaker once and publishes the result.
func (observer *Observer) poll(ctx context.Context, attractor trench.Attractor) {
	at := time.Now()
	state, was := bird.State{At: at, Alive: true, Name: speakerName}, observer.state.Load()
	var sessions []Session
	var unknown error // why a LateView has no answer
	if observer.options.View == nil {
		state.Version = Unobserved
	} else {
		var err error
		limited, cancel := context.WithTimeout(ctx, pollLimit)
		state.Version, sessions, err = observer.options.View.Sessions(limited)
		cancel()
		if ctx.Err() != nil {
			return
		}
		// The time for which this process did not run is not a silence of the speaker.
		if late := time.Since(at) - pollLimit; err != nil && late > starvedAfter {
			observer.answered = observer.answered.Add(time.Since(at))
		}
		if err != nil && !observer.isLate() {
			observer.unanswered(was, err)
			return
		}
		unknown = err
	}
	observer.answered, state.Since = at, was.Since
	if !was.Alive {
		state.Since = at
		observer.options.Log.Info("observing the speaker", "version", state.Version)
	}
	for _, gateway := range attractor.Gateways {
		for _, family := range gateway.FamilyList() {
			state.Gateways = append(state.Gateways, observer.gateway(at, gateway, family, sessions))
			if unknown != nil {
				gateway := &state.Gateways[len(state.Gateways)-1]
				gateway.State, gateway.Problem, gateway.Warning = "unknown", "", unknown.Error()
			}
		}
	}
	observer.logTransitions(was.Gateways, state.Gateways)
	observer.state.Set(state)
	observer.list(ctx, at, attractor.VIPs)
}

// speakerName names the speaker in messages.
const speakerName = "the speaker"

// Unobserved is the version of a speaker that is not observed.
const Unobserved = "not observed"

// unanswered publishes that the speaker did not answer.
func (observer *Observer) unanswered(state bird.State, err error) {
	if state.Err == nil || state.Err.Error() != err.Error() {
		observer.options.Log.Warn("failed to read the speaker's state, retrying", "error", err)
	}
	state.Err = err
	if time.Since(observer.answered) > unansweredLimit {
		state.Alive = false
		for key := range observer.exports {
			delete(observer.exports, key) // the next speaker may have other routes
		}
	}
	observer.state.Set(state)
}

// isLate reports whether an answer withdraws no VIP.
func (observer *Observer) isLate() bool {
	_, is := observer.options.View.(LateView)
	return is
}

// find returns the session with a gateway, by its address, or by its interface or name.
func find(sessions []Session, gateway trench.Gateway, family vip.Family) (found Session, ok bool) {
	for _, session := range sessions {
		switch {
		case session.Family != family:
		case gateway.Address.IsValid() && session.Peer.WithZone("") == gateway.Address.WithZone(""):
			return session, true
		case gateway.Interface != "" && (session.Name == gateway.Interface || session.Peer.Zone() == gateway.Interface),
			session.Name == gateway.Name:
			found, ok = session, true
		}
	}
	return found, ok
}

// gateway returns the state of one family of a gateway.
func (observer *Observer) gateway(at time.Time, gateway trench.Gateway, family vip.Family, sessions []Session,
) bird.GatewayState {
	announced := observer.expect.Load()[family]
	state := bird.GatewayState{
		Name: gateway.Name, Address: gateway.Address, Interface: gateway.Interface, Family: family,
		Protocol: gateway.Protocol, Since: at, Announced: announced, Foreign: true,
	}
	session, known := find(sessions, gateway, family)
	key := sessionKey{gateway.Name, family}
	switch {
	case gateway.Protocol == trench.Static:
		state.Problem = "a static gateway needs --speaker=bird"
	case observer.options.View == nil:
		state.Up, state.State, state.Exported = true, Unobserved, announced
		state.Warning = "not observed (--gateway-state=none): VIPs are advertised whether or not this session is up"
	case !known:
		state.Problem = fmt.Sprintf("the speaker has no %s session with %s; add it there", family, gateway.Peer())
	default:
		state.Up, state.State, state.LastError = session.Up, session.State, session.LastError
		state.Imported = session.Imported
		if !session.Since.IsZero() {
			state.Since = session.Since
		}
	}
	state.Usable = state.Up || observer.isLate()
	for _, old := range observer.state.Load().Gateways {
		if old.Name == gateway.Name && old.Family == family && old.Up == state.Up &&
			(session.Since.IsZero() || session.Since.Sub(old.Since).Abs() <= sinceJitter) {
			state.Since = old.Since
		}
	}
	switch {
	case !state.Up:
		delete(observer.exports, key)
		if state.LastError != "" {
			state.LastErrorAt = at
		}
	case observer.options.View != nil:
		state.Exported = observer.countExports(at, key, session, announced)
		is := observer.exports[key]
		if is.unknown {
			state.Warning = "not confirmed that it receives VIPs: " + ErrUnknown.Error()
		}
		if state.Short = !is.short.IsZero() && at.Sub(is.short) >= exportTime; state.Short {
			state.Exports = is.vips
		}
	}
	return state
}

// countExports returns the number of VIPs that the speaker sends to a gateway.
func (observer *Observer) countExports(at time.Time, key sessionKey, session Session, announced int) int {
	is := observer.exports[key]
	defer func() { observer.exports[key] = is }()
	if is.session = session; is.unknown && session.Exported < 0 {
		return announced // a View cannot find out in this session
	}
	total, counts := session.Exported, [2]int{session.Exported, announced}
	exported := total - is.others
	isKnown := total >= 0 && is.vips != nil
	switch {
	case isKnown && exported == announced:
		is.differs, is.short = time.Time{}, time.Time{}
		return exported
	case is.differs.IsZero():
		is.differs = at
	}
	// A count that differs for long has another cause than a change on its way.
	age := at.Sub(is.listed) // long before the first list
	isDue := at.Sub(is.differs) >= listDelay && (counts != is.counts || age >= maxListAge) ||
		(total < 0 || is.unknown) && age >= pollInterval || is.listed.IsZero()
	if due, others := observer.exports[observer.due]; isDue && (!others || is.listed.Before(due.listed)) {
		observer.due = key
	}
	switch {
	case total < 0 && is.listed.IsZero():
		return announced // until the list was read
	case total < 0:
		exported = len(is.vips)
	}
	switch {
	case exported >= announced:
		is.short = time.Time{}
	case is.short.IsZero():
		is.short = at
	}
	return exported
}

// list reads the VIPs that the speaker sends to one gateway, if its list is due, for the next poll.
// Lists of all gateways in one poll would take longer than the gate counts the state.
func (observer *Observer) list(ctx context.Context, at time.Time, vips []vip.VIP) {
	key := observer.due
	is, isDue := observer.exports[key]
	if observer.due = (sessionKey{}); !isDue {
		return
	}
	limited, cancel := context.WithTimeout(ctx, pollLimit)
	defer cancel()
	all, err := observer.options.View.Exported(limited, is.session.Peer, key.family)
	is.listed, is.counts = at, [2]int{is.session.Exported, observer.expect.Load()[key.family]}
	is.vips, is.unknown = nil, errors.Is(err, ErrUnknown) // others stay if the list cannot be read
	switch {
	case err == nil:
		is.vips = vip.Set{}
		for _, v := range vips {
			if all.Has(v) {
				is.vips[v] = struct{}{}
			}
		}
		is.others = max(0, is.session.Exported-len(is.vips))
	case !is.unknown && ctx.Err() == nil:
		observer.options.Log.Warn("failed to read the routes that the speaker exports", "gateway", key.name,
			"error", err)
	}
	observer.exports[key] = is
	latest.Wake(observer.hint)
}

func (observer *Observer) logTransitions(before, after []bird.GatewayState) {
	was := map[sessionKey]bool{}
	for _, gateway := range before {
		was[sessionKey{gateway.Name, gateway.Family}] = gateway.Up
	}
	for _, gateway := range after {
		switch old := was[sessionKey{gateway.Name, gateway.Family}]; {
		case gateway.Up && !old:
			observer.options.Log.Info("gateway session up", "gateway", gateway.Name, "family", gateway.Family)
		case !gateway.Up && old:
			observer.options.Log.Warn("gateway session lost", "gateway", gateway.Name, "family", gateway.Family,
				"state", gateway.State, "last_error", gateway.LastError, "problem", gateway.Problem)
		}
	}
}
