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

func (owner caller) operator() bool { return owner == caller{} }

// String returns the SPIFFE ID, or "operator".
func (owner caller) String() string {
	if owner.operator() {
		return operatorName
	}
	return owner.id.String()
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
	// extended reports whether the grace period was extended for a stall of this process.
	extended bool
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
func (registry *Registry) begin(who caller) (done func(), err error) {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	switch {
	case registry.stopped:
		return nil, errStopping
	case !who.operator() && registry.calls[who] >= 2*registry.Quota:
		return nil, refuse(RefusedQuota, "%s has %d calls open, the limit: "+
			"register more targets in one call, or have --target-quota raised", who, registry.calls[who])
	}
	registry.calls[who]++
	return func() {
		registry.mu.Lock()
		defer registry.mu.Unlock()
		if registry.calls[who]--; registry.calls[who] == 0 {
			delete(registry.calls, who)
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
func (registry *Registry) holding(call *call) (held map[string]*registration, gone []string, taken string) {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	gone, call.gone = call.gone, nil
	return maps.Clone(call.held), gone, call.taken
}

// allows reports whether a caller may register targets of the stream.
func (registry *Registry) allows(who caller, stream string) bool {
	return who.operator() || registry.Allow.Allows(who.id, stream)
}

// open registers the targets of a call, all or none.
func (registry *Registry) open(who caller, announcement announcement) (*call, error) {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	if registry.stopped {
		return nil, errStopping
	}
	yielding, err := registry.check(who, announcement)
	if err != nil {
		return nil, err
	}
	// check has accepted all targets, so no step below can fail. Yielding registrations are removed
	// first to release their addresses.
	for reg := range yielding {
		registry.remove(reg)
	}
	opened := &call{
		owner: who, stream: announcement.stream, grace: registry.Grace, changed: make(chan struct{}, 1),
		held: map[string]*registration{},
	}
	if announcement.grace != nil {
		opened.grace = min(*announcement.grace, registry.Grace)
	}
	for _, target := range announcement.targets {
		registry.hold(opened, target)
	}
	registry.save()
	return opened, nil
}

// check returns the reason to refuse an announcement, or the registrations to remove because they
// have an announced address. Only registrations of the same caller without an open call yield.
func (registry *Registry) check(who caller, announcement announcement) (yielding map[*registration]struct{},
	err error,
) {
	stream, ok := registry.streams[announcement.stream]
	switch {
	case registry.Off:
		return nil, refuse(RefusedStream, "the registry is not in use here: start lb with --source=registry").
			as(codes.FailedPrecondition)
	case registry.streams == nil:
		return nil, errStarting
	case !ok:
		return nil, registry.unknownStream(who, announcement.stream)
	case !stream.checked:
		return nil, refuse(RefusedStream, "stream %s has no check, so that no target of it could become ready: "+
			"add one to the trench file", announcement.stream).as(codes.FailedPrecondition)
	}
	// Names first: they decide which addresses the announcement itself replaces.
	announced, fresh := map[string]bool{}, 0
	for _, target := range announcement.targets {
		announced[target.Name] = true
		if reg := registry.members[announcement.stream][target.Name]; reg == nil {
			fresh++
		} else if reg.owner != who {
			by := "another identity" // only the operator may see its SPIFFE ID
			if who.operator() {
				by = reg.owner.String()
			}
			return nil, refuse(RefusedConflict,
				"target %s of stream %s is registered by %s: use another name", target.Name, announcement.stream, by)
		}
		// A target without a checked family would never become ready.
		checked := false
		for _, addr := range target.IPs {
			if err := registry.policy.CheckRegistered(addr); err != nil {
				return nil, refuse(RefusedAddress, "target %s: %v", target.Name, err)
			}
			checked = checked || stream.families.Has(vip.FamilyOf(addr))
		}
		if !checked {
			return nil, refuse(RefusedAddress,
				"target %s has no address of a family that the check of stream %s looks at", target.Name, announcement.stream)
		}
	}
	yielding = map[*registration]struct{}{}
	for _, target := range announcement.targets {
		for _, addr := range target.IPs {
			reg := registry.users[at{announcement.stream, addr}]
			if reg == nil || announced[reg.Name] { // the announcement replaces the addresses of reg
				continue
			}
			if reg.call != nil || reg.owner != who {
				return nil, refuse(RefusedConflict,
					"target %s: %s is the address of target %s of this stream: deregister that first",
					target.Name, addr, reg.Name)
			}
			yielding[reg] = struct{}{}
		}
	}
	// Yielding registrations leave room for new ones. A renewal needs none, even above the quota.
	switch more := fresh - len(yielding); {
	case fresh == 0:
	case !who.operator() && registry.owned[who]+more > registry.Quota:
		return nil, refuse(RefusedQuota, "%s has %s, those that drain among them, and may have %d: "+
			"deregister some, or have --target-quota raised", who, plural(registry.owned[who], "target"), registry.Quota)
	case registry.count+more > registry.maxTargets:
		return nil, refuse(RefusedQuota, "%d targets are registered, the limit is %d", registry.count, registry.maxTargets)
	}
	return yielding, nil
}

// unknownStream refuses a stream that is not in the trench file, and lists those of the caller.
func (registry *Registry) unknownStream(who caller, stream string) error {
	usable := maps.Clone(registry.streams)
	maps.DeleteFunc(usable, func(name string, stream streamConfig) bool {
		return !stream.checked || !registry.allows(who, name)
	})
	// The list holds no stream of another caller.
	existing := "there are none yet"
	if len(usable) > 0 {
		existing = list(maps.Keys(usable), 10)
	}
	return refuse(RefusedStream, "the trench file has no stream %s: use one of %s", targetset.Quote(stream), existing)
}

type at struct {
	stream string
	addr   netip.Addr
}

// settle replaces the addresses of a registration. It releases the previous addresses, except for
// those that another registration has acquired.
func (registry *Registry) settle(reg *registration, ips []netip.Addr) {
	for _, addr := range reg.IPs {
		if key := (at{reg.stream, addr}); registry.users[key] == reg {
			delete(registry.users, key)
		}
	}
	reg.IPs = ips
	for _, addr := range ips {
		registry.users[at{reg.stream, addr}] = reg
	}
}

// hold assigns a target to a call.
func (registry *Registry) hold(call *call, target trench.Target) {
	reg := registry.members[call.stream][target.Name]
	if reg == nil {
		offer := targetset.Offer{Name: target.Name, IPs: target.IPs, Owner: call.owner.String()}
		reg = &registration{Offer: offer, stream: call.stream, owner: call.owner}
		registry.add(reg)
	} else if reg.call != nil {
		// The newest call of a caller wins: the old one may belong to a connection that is gone.
		reg.call.lose(target.Name, target.Name)
	}
	if reg.Cause != "" || !targetset.SameAddresses(reg.IPs, target.IPs) {
		registry.touch(call.stream)
	}
	// A new call cancels a grace period and also a drain.
	delete(registry.ending, reg)
	registry.settle(reg, target.IPs)
	reg.call, reg.grace = call, call.grace
	reg.Lifecycle, reg.Cause, reg.DrainEnd, reg.drain, reg.extended = targetset.Active, "", time.Time{}, 0, false
	call.held[target.Name] = reg
}

// add adds a registration with its addresses.
func (registry *Registry) add(reg *registration) {
	registry.number++
	reg.number = registry.number
	if registry.members[reg.stream] == nil {
		registry.members[reg.stream] = map[string]*registration{}
	}
	registry.members[reg.stream][reg.Name] = reg
	delete(registry.missing[reg.stream], reg.Name)
	registry.count++
	registry.owned[reg.owner]++
	registry.settle(reg, reg.IPs)
	registry.touch(reg.stream)
}

// remove removes a registration; its call, if it has one, is notified.
func (registry *Registry) remove(reg *registration) {
	registry.settle(reg, nil)
	delete(registry.ending, reg)
	if delete(registry.members[reg.stream], reg.Name); len(registry.members[reg.stream]) == 0 {
		delete(registry.members, reg.stream)
	}
	registry.count--
	if registry.owned[reg.owner]--; registry.owned[reg.owner] == 0 {
		delete(registry.owned, reg.owner)
	}
	if call := reg.call; call != nil {
		call.gone = append(call.gone, reg.Name)
		call.lose(reg.Name, "")
	}
	registry.touch(reg.stream)
}

// hangUp ends a call. The grace period of its targets begins.
func (registry *Registry) hangUp(call *call) {
	now := time.Now()
	registry.mu.Lock()
	defer registry.mu.Unlock()
	// The stop ended the call, not its caller: the next process restores the registration.
	if registry.stopped {
		return
	}
	for _, reg := range call.held {
		reg.call = nil
		if reg.Lifecycle == targetset.Active { // a drain in progress continues
			registry.endAt(reg, now.Add(reg.grace))
		}
	}
	clear(call.held)
}

// endAt sets the end of the grace period or drain of a registration.
func (registry *Registry) endAt(reg *registration, end time.Time) {
	reg.DrainEnd = end
	registry.ending[reg] = struct{}{}
	latest.Wake(registry.timed)
}

// terminate begins the drain of a registration. A drain in progress is shortened, but not extended.
func (registry *Registry) terminate(reg *registration, now time.Time, drain time.Duration,
	lifecycle targetset.Lifecycle,
) {
	if drain <= 0 {
		registry.remove(reg)
		return
	}
	if end := now.Add(drain); reg.Lifecycle == targetset.Active || !reg.DrainEnd.Before(end) {
		reg.drain = drain
		registry.endAt(reg, end)
	} else if reg.Lifecycle == lifecycle {
		return
	}
	reg.Lifecycle, reg.Cause = lifecycle, causes[lifecycle]
	registry.touch(reg.stream)
}

// expire ends expired grace periods and drains, and returns the time of the next expiry. late is
// the delay of the call. Before the first Configure, which wakes Run, no stream has a drain time.
func (registry *Registry) expire(now time.Time, late time.Duration) (next time.Time) {
	registry.mu.Lock()
	if registry.streams == nil {
		registry.mu.Unlock()
		return next
	}
	var ended, left []*registration
	for reg := range registry.ending {
		switch {
		case reg.DrainEnd.After(now):
		// A call that registers the target again may wait until this process reads it.
		case reg.Lifecycle == targetset.Active && late > starvedAfter && !reg.extended:
			reg.extended, reg.DrainEnd = true, now.Add(min(late, reg.grace))
		case reg.Lifecycle == targetset.Active:
			ended = append(ended, reg)
			registry.endGrace(reg, now)
		default:
			left = append(left, reg)
			registry.remove(reg)
		}
		// The end of a grace period may have begun a drain.
		if _, still := registry.ending[reg]; still && (next.IsZero() || reg.DrainEnd.Before(next)) {
			next = reg.DrainEnd
		}
	}
	if len(ended)+len(left) > 0 {
		registry.save()
	}
	registry.mu.Unlock()
	// Throttled per caller: a caller may request no grace period and register repeatedly.
	if len(ended) > 0 {
		registry.throttle.Log(registry.Log.Info, ended[0].owner.String(),
			"registrations ended without a new one in their grace",
			"targets", len(ended), "one_of_them", ended[0].id().String(), "on_gone", registry.OnGone)
	}
	if len(left) > 0 {
		registry.throttle.Log(registry.Log.Info, left[0].owner.String(), "registered targets have drained and left",
			"targets", len(left), "one_of_them", left[0].id().String())
	}
	return next
}

// endGrace applies OnGone to a registration whose grace period has expired.
func (registry *Registry) endGrace(reg *registration, now time.Time) {
	switch registry.OnGone {
	case targetset.Drop:
		registry.remove(reg)
	case targetset.Drain:
		registry.terminate(reg, now, registry.streams[reg.stream].drain, targetset.Leaving)
	default: // Hold
		reg.Cause, reg.DrainEnd = causes[targetset.Leaving], time.Time{}
		delete(registry.ending, reg)
		registry.touch(reg.stream)
	}
}

// deregister begins the drain of targets, all or none, and returns the drain time. The default is
// the drain time of the stream.
func (registry *Registry) deregister(
	who caller, stream string, names []string, requested *time.Duration,
) (drain time.Duration, err error) {
	now := time.Now()
	registry.mu.Lock()
	defer registry.mu.Unlock()
	if registry.stopped {
		return 0, errStopping
	}
	// Check all names before the first drain begins.
	members := registry.members[stream]
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
	if drain = registry.streams[stream].drain; requested != nil {
		drain = *requested
	}
	for _, name := range names {
		if reg := members[name]; reg != nil { // nil if names has duplicates and drain is 0
			registry.terminate(reg, now, drain, targetset.Terminating)
		}
	}
	registry.save()
	return drain, nil
}
