package registry

import (
	"cmp"
	"maps"
	"net/netip"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc/codes"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// causes maps a lifecycle to the reason why a registration drains, or remains without a call.
var causes = map[targetset.Lifecycle]string{
	targetset.Leaving:     "its registration ended",
	targetset.Terminating: "deregistered",
}

// caller is the peer of a call. The zero caller is the operator on the admin socket.
type caller struct{ id spiffeid.ID }

// operatorName identifies the operator, who has no SPIFFE ID.
const operatorName = "operator"

func (c caller) operator() bool { return c == caller{} }

// String returns the SPIFFE ID, or "operator".
func (c caller) String() string {
	if c.operator() {
		return operatorName
	}
	return c.id.String()
}

// registration is one registered target. It is guarded by Registry.mu.
type registration struct {
	// Offer has the lifecycle Active, Leaving if the registration ended, or Terminating if a caller
	// deregistered the target. DrainEnd of an Active target is the end of its grace period; zero while
	// a call keeps the target, and with the policy Hold after the grace period.
	targetset.Offer
	stream string
	owner  caller
	number uint64 // sequence number of the registration
	grace  time.Duration
	call   *call         // nil once it has ended
	drain  time.Duration // total drain time, up to DrainEnd
}

func (reg *registration) id() targetset.ID { return targetset.ID{Stream: reg.stream, Name: reg.Name} }

func (reg *registration) compare(other *registration) int {
	return cmp.Compare(reg.number, other.number)
}

// call is one open Register call. Registry.mu guards the fields that change.
type call struct {
	owner  caller
	stream string
	grace  time.Duration
	// changed holds a token if a field below has changed.
	changed chan struct{}
	held    map[string]*registration
	gone    []string // names of targets that left since the previous call of holding
	taken   string   // name of the last lost target, if another call registered it
}

// begin counts a call; done must be called when the call ends. The limit is twice the quota, so
// that a caller that reconnects is accepted before its old calls have ended.
func (r *Registry) begin(who caller) (done func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.stopped:
		return nil, errStopping
	case !who.operator() && r.calls[who] >= 2*r.Quota:
		return nil, refuse(RefusedQuota, "%s has %d calls open, the limit: "+
			"register more targets in one call, or have --target-quota raised", who, r.calls[who])
	}
	r.calls[who]++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.calls[who]--; r.calls[who] == 0 {
			delete(r.calls, who)
		}
	}, nil
}

// lose removes a target from a call.
func (c *call) lose(name, taken string) {
	delete(c.held, name)
	c.taken = taken
	latest.Wake(c.changed)
}

// holding returns the targets that a call still holds, the names of its targets that left since the
// previous call of holding, and the last target that another call registered.
func (r *Registry) holding(c *call) (held map[string]*registration, gone []string, taken string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	gone, c.gone = c.gone, nil
	return maps.Clone(c.held), gone, c.taken
}

// allows reports whether a caller may register targets of the stream.
func (r *Registry) allows(who caller, stream string) bool {
	return who.operator() || r.Allow.Allows(who.id, stream)
}

// open registers the targets of a call, all or none.
func (r *Registry) open(who caller, a announcement) (*call, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return nil, errStopping
	}
	yielding, err := r.check(who, a)
	if err != nil {
		return nil, err
	}
	// check has accepted all targets, so no step below can fail. Yielding registrations are removed
	// first to release their addresses.
	for reg := range yielding {
		r.remove(reg)
	}
	c := &call{
		owner: who, stream: a.stream, grace: r.Grace, changed: make(chan struct{}, 1), held: map[string]*registration{},
	}
	if a.grace != nil {
		c.grace = min(*a.grace, r.Grace)
	}
	for _, t := range a.targets {
		r.hold(c, t)
	}
	r.save()
	return c, nil
}

// check returns the reason to refuse an announcement, or the registrations to remove because they
// have an announced address. Only registrations of the same caller without an open call yield.
func (r *Registry) check(who caller, a announcement) (yielding map[*registration]struct{}, err error) {
	s, ok := r.streams[a.stream]
	switch {
	case r.Off:
		return nil, refuse(RefusedStream, "the registry is not in use here: start lb with --source=registry").
			as(codes.FailedPrecondition)
	case r.streams == nil:
		return nil, errStarting
	case !ok:
		return nil, r.unknownStream(who, a.stream)
	case !s.checked:
		return nil, refuse(RefusedStream, "stream %s has no check, so that no target of it could become ready: "+
			"add one to the trench file", a.stream).as(codes.FailedPrecondition)
	}
	announced, fresh := map[string]bool{}, 0
	for _, t := range a.targets {
		announced[t.Name] = true
		if reg := r.members[a.stream][t.Name]; reg == nil {
			fresh++
		} else if reg.owner != who {
			by := "another identity" // only the operator may see its SPIFFE ID
			if who.operator() {
				by = reg.owner.String()
			}
			return nil, refuse(RefusedConflict,
				"target %s of stream %s is registered by %s: use another name", t.Name, a.stream, by)
		}
		checked := false
		for _, ip := range t.IPs {
			if err := r.policy.Check(ip); err != nil {
				return nil, refuse(RefusedAddress, "target %s: %v", t.Name, err)
			}
			checked = checked || s.families.Has(vip.FamilyOf(ip))
		}
		if !checked {
			return nil, refuse(RefusedAddress,
				"target %s has no address of a family that the check of stream %s looks at", t.Name, a.stream)
		}
	}
	yielding = map[*registration]struct{}{}
	for _, t := range a.targets {
		for _, ip := range t.IPs {
			reg := r.users[at{a.stream, ip}]
			if reg == nil || announced[reg.Name] { // the announcement replaces the addresses of reg
				continue
			}
			if reg.call != nil || reg.owner != who {
				return nil, refuse(RefusedConflict,
					"target %s: %s is the address of target %s of this stream: deregister that first",
					t.Name, ip, reg.Name)
			}
			yielding[reg] = struct{}{}
		}
	}
	switch more := fresh - len(yielding); {
	case fresh == 0:
	case !who.operator() && r.owned[who]+more > r.Quota:
		return nil, refuse(RefusedQuota, "%s has %s, those that drain among them, and may have %d: "+
			"deregister some, or have --target-quota raised", who, plural(r.owned[who], "target"), r.Quota)
	case r.count+more > r.maxTargets:
		return nil, refuse(RefusedQuota, "%d targets are registered, the limit is %d", r.count, r.maxTargets)
	}
	return yielding, nil
}

// unknownStream refuses a stream that is not in the trench file. The error lists the streams that
// the caller may use.
func (r *Registry) unknownStream(who caller, stream string) error {
	usable := maps.Clone(r.streams)
	maps.DeleteFunc(usable, func(name string, s streamConfig) bool { return !s.checked || !r.allows(who, name) })
	existing := "there are none yet"
	if len(usable) > 0 {
		existing = list(maps.Keys(usable), 10)
	}
	return refuse(RefusedStream, "the trench file has no stream %s: use one of %s", targetset.Quote(stream), existing)
}

// at is an address in a stream.
type at struct {
	stream string
	addr   netip.Addr
}

// settle replaces the addresses of a registration. It releases the previous addresses, except for
// those that another registration has acquired.
func (r *Registry) settle(reg *registration, ips []netip.Addr) {
	for _, ip := range reg.IPs {
		if k := (at{reg.stream, ip}); r.users[k] == reg {
			delete(r.users, k)
		}
	}
	reg.IPs = ips
	for _, ip := range ips {
		r.users[at{reg.stream, ip}] = reg
	}
}

// hold assigns a target to a call.
func (r *Registry) hold(c *call, t trench.Target) {
	reg := r.members[c.stream][t.Name]
	if reg == nil {
		o := targetset.Offer{Name: t.Name, IPs: t.IPs, Owner: c.owner.String()}
		reg = &registration{Offer: o, stream: c.stream, owner: c.owner}
		r.add(reg)
	} else if reg.call != nil {
		reg.call.lose(t.Name, t.Name)
	}
	if reg.Cause != "" || !targetset.SameAddresses(reg.IPs, t.IPs) {
		r.touch(c.stream)
	}
	delete(r.ending, reg)
	r.settle(reg, t.IPs)
	reg.call, reg.grace = c, c.grace
	reg.Lifecycle, reg.Cause, reg.DrainEnd, reg.drain = targetset.Active, "", time.Time{}, 0
	c.held[t.Name] = reg
}

// add adds a registration with its addresses.
func (r *Registry) add(reg *registration) {
	r.number++
	reg.number = r.number
	if r.members[reg.stream] == nil {
		r.members[reg.stream] = map[string]*registration{}
	}
	r.members[reg.stream][reg.Name] = reg
	delete(r.missing[reg.stream], reg.Name)
	r.count++
	r.owned[reg.owner]++
	r.settle(reg, reg.IPs)
	r.touch(reg.stream)
}

// remove removes a registration; its call, if it has one, is notified.
func (r *Registry) remove(reg *registration) {
	r.settle(reg, nil)
	delete(r.ending, reg)
	if delete(r.members[reg.stream], reg.Name); len(r.members[reg.stream]) == 0 {
		delete(r.members, reg.stream)
	}
	r.count--
	if r.owned[reg.owner]--; r.owned[reg.owner] == 0 {
		delete(r.owned, reg.owner)
	}
	if c := reg.call; c != nil {
		c.gone = append(c.gone, reg.Name)
		c.lose(reg.Name, "")
	}
	r.touch(reg.stream)
}

// hangUp ends a call. The grace period of its targets begins.
func (r *Registry) hangUp(c *call) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return
	}
	for _, reg := range c.held {
		reg.call = nil
		if reg.Lifecycle == targetset.Active { // a drain in progress continues
			r.endAt(reg, now.Add(reg.grace))
		}
	}
	clear(c.held)
}

// endAt sets the end of the grace period or drain of a registration.
func (r *Registry) endAt(reg *registration, end time.Time) {
	reg.DrainEnd = end
	r.ending[reg] = struct{}{}
	latest.Wake(r.timed)
}

// terminate begins the drain of a registration. A drain in progress is shortened, but not extended.
func (r *Registry) terminate(reg *registration, now time.Time, drain time.Duration, to targetset.Lifecycle) {
	if drain <= 0 {
		r.remove(reg)
		return
	}
	if end := now.Add(drain); reg.Lifecycle == targetset.Active || !reg.DrainEnd.Before(end) {
		reg.drain = drain
		r.endAt(reg, end)
	} else if reg.Lifecycle == to {
		return
	}
	reg.Lifecycle, reg.Cause = to, causes[to]
	r.touch(reg.stream)
}

// expire ends expired grace periods and drains, and returns the time of the next expiry.
func (r *Registry) expire(now time.Time) (next time.Time) {
	r.mu.Lock()
	var ended, left []*registration
	for reg := range r.ending {
		switch {
		case reg.DrainEnd.After(now):
		case reg.Lifecycle == targetset.Active:
			ended = append(ended, reg)
			r.endGrace(reg, now)
		default:
			left = append(left, reg)
			r.remove(reg)
		}
		if _, still := r.ending[reg]; still && (next.IsZero() || reg.DrainEnd.Before(next)) {
			next = reg.DrainEnd
		}
	}
	if len(ended)+len(left) > 0 {
		r.save()
	}
	r.mu.Unlock()
	// Throttled per caller: a caller may request no grace period and register repeatedly.
	if len(ended) > 0 {
		r.throttle.Log(r.Log.Info, ended[0].owner.String(), "registrations ended without a new one in their grace",
			"targets", len(ended), "one_of_them", ended[0].id().String(), "on_gone", r.OnGone)
	}
	if len(left) > 0 {
		r.throttle.Log(r.Log.Info, left[0].owner.String(), "registered targets have drained and left",
			"targets", len(left), "one_of_them", left[0].id().String())
	}
	return next
}

// endGrace applies OnGone to a registration whose grace period has expired.
func (r *Registry) endGrace(reg *registration, now time.Time) {
	switch r.OnGone {
	case targetset.Drop:
		r.remove(reg)
	case targetset.Drain:
		r.terminate(reg, now, r.streams[reg.stream].drain, targetset.Leaving)
	default: // Hold
		reg.Cause, reg.DrainEnd = causes[targetset.Leaving], time.Time{}
		delete(r.ending, reg)
		r.touch(reg.stream)
	}
}

// deregister begins the drain of targets, all or none, and returns the drain time. The default is
// the drain time of the stream.
func (r *Registry) deregister(
	who caller, stream string, names []string, requested *time.Duration,
) (drain time.Duration, err error) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return 0, errStopping
	}
	members := r.members[stream]
	for _, name := range names {
		switch reg := members[name]; {
		case reg == nil:
			return 0, refuse(RefusedUnknown,
				"stream %s has no registered target %s", targetset.Quote(stream), targetset.Quote(name))
		case !who.operator() && reg.owner != who:
			return 0, refuse(RefusedIdentity,
				"target %s of stream %s is registered by another identity, only that may deregister it", name, stream)
		}
	}
	if drain = r.streams[stream].drain; requested != nil {
		drain = *requested
	}
	for _, name := range names {
		if reg := members[name]; reg != nil { // nil if names has duplicates and drain is 0
			r.terminate(reg, now, drain, targetset.Terminating)
		}
	}
	r.save()
	return drain, nil
}
