package turns

import (
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Session is the session with a gateway as BIRD needs it.
type Session struct {
	trench.Gateway // with the learned address, if it has an interface
	Path
	Password string
}

// Path is how the session and its routes reach the gateway.
type Path struct {
	Local netip.Addr
	// Local6 is the next hop of IPv6 VIPs in a session over IPv4; zero without a global address.
	Local6 netip.Addr
	// Via is the first hop toward a gateway that is not on the link.
	Via netip.Addr
}

// Phase is the progress of a change of one session.
type Phase uint8

// The phases.
const (
	Steady     Phase = iota
	Pending          // the new parameters wait for their turn
	Draining         // de-preferred, before the restart
	Restarting       // with the new parameters, until it is up and exports every VIP
	Leaving          // de-preferred, before the removal
)

// Change is the progress of a change of one session.
type Change struct {
	Phase Phase
	// Parameters are the changed parameters that restart the session, in words.
	Parameters []string
	// Until is the end of the phase; of Pending and Restarting, it is the time limit.
	Until time.Time
	// Failed holds the parameters of a change after which the session did not come back in time. It is
	// empty again once the session is up.
	Failed []string
}

// Equal reports whether two changes are the same.
func (change Change) Equal(other Change) bool {
	return change.Phase == other.Phase && change.Until.Equal(other.Until) &&
		slices.Equal(change.Parameters, other.Parameters) && slices.Equal(change.Failed, other.Failed)
}

// Entry is one session of BIRD's configuration.
type Entry struct {
	Session
	Change
	Next string // the gateway of the desired configuration; empty for a session that leaves

	loaded    bool // BIRD has loaded the phase
	carried   bool // another session carried the traffic when Draining began
	displaces bool // BIRD cannot have the desired session together with another one
	extended  bool // Leaving has waited for the drain time already
	answered  bool // the BFD session was up
	stable    int  // consecutive observations of the completed restart
}

// Depreferred reports whether all VIPs are de-preferred at the gateway.
func (entry *Entry) Depreferred() bool { return entry.Phase == Draining || entry.Phase == Leaving }

// State is the observed state of a session.
type State struct {
	Up       bool
	Complete bool // BIRD exports every VIP
	BFD      bool // the BFD session is up
	// Lacks reports which families of the session the gateway has not activated.
	Lacks [len(vip.Families)]bool
}

// Input is the desired configuration and the observed state.
type Input struct {
	Now      time.Time
	Gateways []trench.Gateway // desired
	// Sessions holds the desired sessions. Without a usable local address or password there is none.
	Sessions []Session
	// Loaded reports whether BIRD had loaded the entries of the last Step when State was observed.
	Loaded bool
	// Hung reports whether BIRD runs and does not answer. Then nothing changes.
	Hung  bool
	State map[string]State // by name of an entry
	// Drained reports whether an operator has moved the traffic of a gateway away.
	Drained func(name string) bool
	// Immediate applies every change without a drain and without turns.
	Immediate bool
	// Ordered reports whether pods change one after another, so that this pod needs no slot.
	Ordered bool
}

// Options configures a Plan.
type Options struct {
	Drain   time.Duration // for gateways to move traffic
	Confirm time.Duration // after which a gateway that leaves has processed withdrawals
	Limit   time.Duration // of each wait for a session
	// SlotTime is the time of one pod to restart the only session of a family; 0 disables slots.
	SlotTime time.Duration
	Slot     int // see Slot
}

// Plan holds the sessions of BIRD's configuration.
type Plan struct {
	Options
	entries []Entry
	in      Input
}

// stableStates is the number of consecutive observations that confirm a restart: BIRD counts a
// route as exported before it writes the UPDATE.
const stableStates = 3

// exportTime is how long BIRD may take to export a VIP that rises.
const exportTime = time.Second

// password is the parameter that a new content of a password file changes.
const password = "password"

// Step returns the sessions to configure in the order of the desired gateways, and the time of
// the next Step without a new input, or zero. The result must not be modified.
func (plan *Plan) Step(in Input) (entries []Entry, wake time.Time) {
	plan.in = in
	if in.Hung && plan.entries != nil {
		return plan.entries, time.Time{}
	}
	// The caller holds the previous result.
	plan.entries = slices.Clone(plan.entries)
	plan.observe()
	plan.compare()
	for _, family := range vip.Families {
		plan.takeTurn(family)
	}
	plan.add()
	slices.SortStableFunc(plan.entries, func(a, b Entry) int { return plan.order(a) - plan.order(b) })
	for i := range plan.entries {
		end := plan.entries[i].Until
		if plan.entries[i].Phase != Steady && end.After(in.Now) && (wake.IsZero() || end.Before(wake)) {
			wake = end
		}
	}
	return plan.entries, wake
}

// Active reports whether a change is in progress.
func (plan *Plan) Active() bool {
	return slices.ContainsFunc(plan.entries, func(entry Entry) bool { return entry.Phase != Steady })
}

// order returns the position of an entry; sessions that leave are last.
func (plan *Plan) order(entry Entry) int {
	i := slices.IndexFunc(plan.in.Gateways, func(g trench.Gateway) bool { return g.Name == entry.Next })
	if i < 0 {
		return len(plan.in.Gateways)
	}
	return i
}

// enter begins a phase. The time limit counts until BIRD has loaded it.
func (plan *Plan) enter(entry *Entry, phase Phase) {
	entry.Phase, entry.loaded, entry.stable, entry.extended = phase, false, 0, false
	entry.Until = plan.in.Now.Add(plan.Limit)
}

// observe applies the observed state to the phases.
func (plan *Plan) observe() {
	for i := range plan.entries {
		entry := &plan.entries[i]
		state := plan.in.State[entry.Name]
		if state.Up {
			entry.Failed = nil
			entry.answered = entry.answered || state.BFD
		}
		if plan.in.Loaded && !entry.loaded {
			entry.loaded = true
			switch entry.Phase {
			case Draining:
				entry.Until = plan.in.Now.Add(plan.Drain)
			case Leaving:
				entry.Until = plan.in.Now.Add(plan.Drain + plan.Confirm)
			case Restarting:
				entry.Until = plan.in.Now.Add(plan.Limit)
			}
			continue // the next state shows the effect
		}
		if entry.Phase != Restarting {
			continue
		}
		if entry.stable++; !entry.loaded || !plan.settled(entry, true) {
			entry.stable = 0
		}
		switch {
		case entry.stable >= stableStates:
			entry.Phase, entry.Parameters = Steady, nil
		case !plan.in.Now.Before(entry.Until):
			entry.answered = false
			entry.Phase, entry.Parameters, entry.Failed = Steady, nil, entry.Parameters
		}
	}
}

// compare compares each entry with the desired configuration.
func (plan *Plan) compare() {
	old := make([]trench.Gateway, 0, len(plan.entries))
	for i := range plan.entries {
		old = append(old, plan.entries[i].Gateway)
	}
	kept, replaced := make([]Entry, 0, len(plan.entries)), []Entry(nil)
	for _, entry := range plan.entries {
		successor, found := change.Successor(entry.Gateway, old, plan.in.Gateways)
		if !found {
			if entry.Next = ""; plan.stays(&entry) {
				kept = append(kept, entry)
			}
			continue
		}
		entry.Next = successor.Name
		desired, usable := plan.session(successor.Name)
		if !usable { // for example, the local address was removed
			continue
		}
		if plan.update(&entry, desired) {
			replaced = append(replaced, entry)
		}
		kept = append(kept, entry)
	}
	plan.entries = kept
	for i := range replaced {
		plan.displace(&replaced[i])
	}
}

// displace removes the sessions that BIRD cannot have together with an entry. Their successors are
// added in the same step.
func (plan *Plan) displace(entry *Entry) {
	plan.entries = slices.DeleteFunc(plan.entries, func(other Entry) bool {
		return other.Next != entry.Next && conflicts(other.Session, entry.Session)
	})
}

// session returns the desired session with a gateway.
func (plan *Plan) session(name string) (Session, bool) {
	i := slices.IndexFunc(plan.in.Sessions, func(s Session) bool { return s.Name == name })
	if i < 0 {
		return Session{}, false
	}
	return plan.in.Sessions[i], true
}

// stays reports whether a session that leaves is still configured.
func (plan *Plan) stays(entry *Entry) bool {
	if plan.idle(entry) || plan.Drain == 0 {
		return false
	}
	if entry.Phase != Leaving {
		plan.enter(entry, Leaving)
	}
	switch {
	case plan.in.Now.Before(entry.Until) && !entry.extended:
		return true
	case !plan.awaited(entry) || plan.carried(entry, true):
		return false
	case !entry.extended:
		// Make before break: the gateway that replaces this one is not up yet.
		entry.extended, entry.Until = true, plan.in.Now.Add(plan.Limit)
	}
	return plan.in.Now.Before(entry.Until)
}

// update applies the desired parameters, or makes the entry wait for its turn. It reports whether
// it restarted the session.
func (plan *Plan) update(entry *Entry, desired Session) (replaced bool) {
	parameters := change.Reset(entry.Gateway, desired.Gateway)
	if entry.Password != desired.Password && entry.PasswordFile == desired.PasswordFile {
		parameters = append(parameters, password)
	}
	entry.displaces = slices.ContainsFunc(plan.entries, func(other Entry) bool {
		return other.Name != entry.Name && conflicts(other.Session, desired) && !plan.idle(&other)
	})
	switch {
	case len(parameters) == 0, !entry.displaces && (plan.idle(entry) || entry.Path != desired.Path):
		if replaced = len(parameters) > 0; replaced {
			entry.Failed = nil
		}
		entry.Session = desired
		if entry.Phase != Restarting {
			entry.Phase, entry.Parameters = Steady, nil
		}
		return replaced
	default:
		entry.Parameters = parameters
		if entry.Phase != Pending && entry.Phase != Draining {
			plan.enter(entry, Pending)
		}
	}
	return false
}

// idle reports whether no traffic depends on a session, so that a change needs no drain.
func (plan *Plan) idle(entry *Entry) bool {
	// BFD of a static gateway is down while it drains, and its last replies still need a route.
	down := !plan.in.State[entry.Name].Up && entry.Protocol == trench.BGP
	return down || plan.in.Drained(entry.Name) || plan.in.Immediate
}

// conflicts reports whether BIRD cannot have both sessions.
func conflicts(a, b Session) bool { return a.Name == b.Name || a.Address == b.Address }

// takeTurn restarts at most one session of a family.
func (plan *Plan) takeTurn(family vip.Family) {
	in := func(phase Phase) int {
		return slices.IndexFunc(plan.entries, func(entry Entry) bool { return entry.Has(family) && entry.Phase == phase })
	}
	if in(Restarting) >= 0 {
		return
	}
	if i := in(Draining); i >= 0 {
		entry := &plan.entries[i]
		switch {
		// The gateway that should carry the traffic failed in the drain, not only to export a rising VIP.
		case entry.carried && !plan.carried(entry, plan.in.Now.Sub(entry.Until) >= exportTime):
			plan.enter(entry, Pending)
		case !plan.in.Now.Before(entry.Until) && (!entry.carried || plan.carried(entry, true)):
			plan.restart(i)
		}
		return
	}
	i := in(Pending)
	if i < 0 {
		return
	}
	// A session takes the address of another one after that has left it.
	if free := slices.IndexFunc(plan.entries, func(entry Entry) bool {
		return entry.Has(family) && entry.Phase == Pending && !entry.displaces
	}); free >= 0 {
		i = free
	}
	entry := &plan.entries[i]
	if entry.carried = plan.carried(entry, true); !entry.carried && !plan.alone(entry) {
		return
	}
	if plan.Drain == 0 || plan.in.Immediate {
		plan.restart(i)
		return
	}
	desired, _ := plan.session(entry.Next)
	for n := range plan.entries {
		// The restart ends a session that waits to leave the desired address, too.
		if other := &plan.entries[n]; n == i || other.Phase == Pending && conflicts(other.Session, desired) {
			other.carried = entry.carried
			plan.enter(other, Draining)
		}
	}
}

// alone reports whether a session may restart although no other session carries its traffic: a
// gateway that is down had its time to come up, and this pod's slot began.
func (plan *Plan) alone(entry *Entry) bool {
	switch {
	case plan.in.Immediate:
		return true
	// Another session did not come back after a change: the last one must not follow it.
	case slices.ContainsFunc(plan.entries, func(other Entry) bool {
		return other.Failed != nil && share(entry.Gateway, other.Gateway)
	}):
		return false
	case plan.awaited(entry) && plan.in.Now.Before(entry.Until):
		return false
	// The order of pods does not cover the content of a password file.
	case plan.SlotTime == 0 || plan.in.Ordered && !slices.Contains(entry.Parameters, password):
		return true
	}
	start := nextSlot(plan.in.Now, plan.Slot, plan.SlotTime)
	entry.Until = start
	return !start.After(plan.in.Now)
}

// restart replaces a session by the desired one, and with it sessions that BIRD cannot have then.
func (plan *Plan) restart(i int) {
	entry := plan.entries[i]
	desired, ok := plan.session(entry.Next)
	if !ok {
		return
	}
	entry.Session = desired
	plan.enter(&entry, Restarting)
	plan.entries[i] = entry
	plan.displace(&entry)
}

// settled reports whether a session carries traffic, if complete of every VIP, and stays up. After
// a restart, a gateway resets BGP once more when the new BFD session replaces the old one, one or
// two seconds after BGP is up (FRR 8.4.4, Cease 6.10).
func (plan *Plan) settled(entry *Entry, complete bool) bool {
	state := plan.in.State[entry.Name]
	return state.Up && (state.Complete || !complete) && (state.BFD || entry.BFD == nil || !entry.answered)
}

// carried reports whether other sessions carry the traffic, in each family that the session has; if
// complete, of every VIP.
func (plan *Plan) carried(entry *Entry, complete bool) bool {
	state := plan.in.State[entry.Name]
	return !slices.ContainsFunc(entry.FamilyList(), func(family vip.Family) bool {
		return !(state.Up && state.Lacks[family]) && !slices.ContainsFunc(plan.entries, func(other Entry) bool {
			return other.Has(family) && plan.carrier(entry, &other) && plan.settled(&other, complete) &&
				!plan.in.State[other.Name].Lacks[family]
		})
	})
}

// awaited reports whether another session of one of the families may come up.
func (plan *Plan) awaited(entry *Entry) bool {
	return slices.ContainsFunc(plan.in.Sessions, func(s Session) bool {
		return s.Name != entry.Next && share(s.Gateway, entry.Gateway) && !plan.in.Drained(s.Name)
	})
}

// share reports whether two gateways have a family in common.
func share(a, b trench.Gateway) bool { return slices.ContainsFunc(a.FamilyList(), b.Has) }

// carrier reports whether another session may carry traffic of the entry once it is up, and stays
// when the entry restarts.
func (plan *Plan) carrier(entry, other *Entry) bool {
	desired, _ := plan.session(entry.Next)
	return other.Name != entry.Name && !conflicts(other.Session, desired) && !plan.in.Drained(other.Name) &&
		(other.Phase == Steady || other.Phase == Pending)
}

// add adds the desired sessions that BIRD can have now.
func (plan *Plan) add() {
	for _, desired := range plan.in.Sessions {
		if !slices.ContainsFunc(plan.entries, func(entry Entry) bool {
			return entry.Next == desired.Name || conflicts(entry.Session, desired)
		}) {
			plan.entries = append(plan.entries, Entry{Session: desired, Next: desired.Name})
		}
	}
}

// Slots is the number of slots. Two pods share one with a probability of 1/Slots.
const Slots = 60

// Slot returns the slot of a pod, which depends on its identity only.
func Slot(identity string) int {
	sum := sha256.Sum256([]byte("vipgate slot " + identity))
	return int(binary.BigEndian.Uint64(sum[:8]) % Slots)
}

// nextSlot returns now if the first half of the slot is not over, else the next start of the slot.
// Slots follow the wall clock: pods may get a new configuration at different times.
func nextSlot(now time.Time, slot int, length time.Duration) time.Time {
	cycle := Slots * length
	begin := now.Truncate(cycle).Add(time.Duration(slot) * length)
	switch {
	case now.Sub(begin) < 0:
		return begin
	case now.Sub(begin) < length/2:
		return now
	}
	return begin.Add(cycle)
}
