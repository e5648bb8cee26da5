package registry

import (
	"net/netip"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/targetset"
)

// Why a registration drains, or stays without a call.
const (
	causeEnded        = "its registration ended"
	causeDeregistered = "deregistered"
)

// registration is one registered target. Everything is guarded by Registry.mu.
type registration struct {
	targetset.ID
	announced
	owner  caller
	number uint64 // in the order of registration
	grace  time.Duration
	// call keeps it; nil once that has ended.
	call *call
	// lifecycle is Active or Terminating.
	lifecycle targetset.Lifecycle
	cause     string
	// end is when the grace is over, or the drain when it is Terminating; zero while
	// a call keeps it, and when it is held.
	end time.Time
	// drain is how long all of the drain lasts.
	drain time.Duration
}

func (reg *registration) offer() targetset.Offer {
	o := targetset.Offer{Name: reg.announced.name, IPs: reg.ips, Lifecycle: reg.lifecycle, Cause: reg.cause, Owner: reg.owner.String()}
	if reg.lifecycle != targetset.Active {
		o.DrainEnd = reg.end
		if reg.cause == causeEnded {
			o.Lifecycle = targetset.Leaving // no caller announced the end: another source may know better
		}
	}
	return o
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
	for reg := range yielding {
		r.remove(reg)
	}
	c := &call{owner: who, stream: a.stream, grace: r.Grace, changed: make(chan struct{}, 1), held: make(map[string]*registration, len(a.targets))}
	if a.asked {
		c.grace = min(a.grace, r.Grace)
	}
	for _, t := range a.targets {
		r.hold(c, t)
	}
	r.save()
	return c, nil
}

// check says what speaks against an announcement, and which registrations that
// no call keeps any more have to give their addresses to it.
func (r *Registry) check(who caller, a announcement) (yielding map[*registration]struct{}, err error) {
	switch {
	case r.Off:
		return nil, refuse(RefusedStream, codes.FailedPrecondition, "the registry is not in use here: start lb with --source=registry")
	case r.streams == nil:
		return nil, errStarting
	}
	s, ok := r.streams[a.stream]
	switch {
	case !ok:
		return nil, refuse(RefusedStream, codes.NotFound, "the trench file has no stream %s: use one of %s", targetset.Quote(a.stream), r.existing(who))
	case !s.checked:
		return nil, refuse(RefusedStream, codes.FailedPrecondition, "stream %s has no check, so that no target of it could become ready: add one to the trench file", a.stream)
	}
	members := r.members[a.stream]
	here := make(map[string]struct{}, len(a.targets))
	yielding, fresh := map[*registration]struct{}{}, 0
	for _, t := range a.targets {
		here[t.name] = struct{}{}
		if reg := members[t.name]; reg == nil {
			fresh++
		} else if reg.owner != who {
			return nil, r.foreign(who, reg)
		}
		for _, ip := range t.ips {
			if err := r.policy.Check(ip); err != nil {
				return nil, refuse(RefusedAddress, codes.InvalidArgument, "target %s: %v", t.name, err)
			}
		}
		if !s.has(t) {
			return nil, refuse(RefusedAddress, codes.InvalidArgument, "target %s has no address of a family that the check of stream %s looks at", t.name, a.stream)
		}
	}
	for _, t := range a.targets {
		for _, ip := range t.ips {
			reg := r.users[at{a.stream, ip}]
			if reg == nil {
				continue
			}
			if _, replaced := here[reg.ID.Name]; replaced {
				continue
			}
			if reg.call != nil || reg.owner != who {
				return nil, refuse(RefusedConflict, codes.AlreadyExists, "target %s: %s is the address of target %s of this stream: deregister that first", t.name, ip, reg.ID.Name)
			}
			yielding[reg] = struct{}{}
		}
	}
	return yielding, r.room(who, fresh, len(yielding))
}

// foreign refuses a name that another caller holds.
func (r *Registry) foreign(who caller, reg *registration) error {
	by := "another identity"
	if who.operator() {
		by = reg.owner.String()
	}
	return refuse(RefusedConflict, codes.AlreadyExists, "target %s of stream %s is registered by %s: use another name", reg.ID.Name, reg.Stream, by)
}

// room refuses more targets than there may be, when fresh ones come and others go.
func (r *Registry) room(who caller, fresh, going int) error {
	switch {
	case fresh == 0:
		return nil
	case !who.operator() && r.owned[who]+fresh-going > r.Quota:
		return refuse(RefusedQuota, codes.ResourceExhausted, "%s has %s, those that drain among them, and may have %d: deregister some, or have --target-quota raised", who, plural(r.owned[who], "target"), r.Quota)
	case len(r.targets)+fresh-going > r.MaxTargets:
		return refuse(RefusedQuota, codes.ResourceExhausted, "%d targets are registered, the limit is %d", len(r.targets), r.MaxTargets)
	}
	return nil
}

// at is an address in a stream.
type at struct {
	stream string
	addr   netip.Addr
}

// settle gives a registration its addresses.
func (r *Registry) settle(reg *registration, t announced) {
	r.unsettle(reg)
	reg.announced = t
	for _, ip := range t.ips {
		r.users[at{reg.Stream, ip}] = reg
	}
}

// unsettle frees the addresses of a registration that no call has taken over yet.
func (r *Registry) unsettle(reg *registration) {
	for _, ip := range reg.ips {
		if k := (at{reg.Stream, ip}); r.users[k] == reg {
			delete(r.users, k)
		}
	}
}

// hold gives a target to a call.
func (r *Registry) hold(c *call, t announced) {
	id := targetset.ID{Stream: c.stream, Name: t.name}
	reg := r.targets[id]
	if reg == nil {
		reg = &registration{ID: id, announced: t, owner: c.owner}
		r.add(reg)
	} else if old := reg.call; old != nil {
		old.taken = t.name
		old.lose(t.name, allTaken)
	}
	if reg.lifecycle != targetset.Active || reg.cause != "" || !targetset.SameAddresses(reg.ips, t.ips) {
		r.touch(id.Stream)
	}
	delete(r.ending, reg)
	r.settle(reg, t)
	reg.call, reg.grace = c, c.grace
	reg.lifecycle, reg.cause, reg.end, reg.drain = targetset.Active, "", time.Time{}, 0
	c.held[t.name] = reg
}

// add puts a registration among the others.
func (r *Registry) add(reg *registration) {
	r.number++
	reg.number = r.number
	r.targets[reg.ID] = reg
	if r.members[reg.Stream] == nil {
		r.members[reg.Stream] = map[string]*registration{}
	}
	r.members[reg.Stream][reg.ID.Name] = reg
	r.owned[reg.owner]++
	r.settle(reg, reg.announced)
	r.touch(reg.Stream)
}

// remove forgets a registration; its call, if it has one, is notified.
func (r *Registry) remove(reg *registration) {
	r.unsettle(reg)
	delete(r.targets, reg.ID)
	delete(r.ending, reg)
	if delete(r.members[reg.Stream], reg.ID.Name); len(r.members[reg.Stream]) == 0 {
		delete(r.members, reg.Stream)
	}
	if r.owned[reg.owner]--; r.owned[reg.owner] == 0 {
		delete(r.owned, reg.owner)
	}
	if c := reg.call; c != nil {
		c.gone = append(c.gone, reg.ID.Name)
		c.lose(reg.ID.Name, allLeft)
	}
	r.touch(reg.Stream)
}

// hangUp ends a call: the grace of its targets begins.
func (r *Registry) hangUp(c *call) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return
	}
	for _, reg := range c.held {
		reg.call = nil
		if reg.lifecycle == targetset.Active {
			r.endAt(reg, now.Add(reg.grace))
		}
	}
	clear(c.held)
}

// endAt has the grace or the drain of a registration end.
func (r *Registry) endAt(reg *registration, end time.Time) {
	reg.end = end
	r.ending[reg] = struct{}{}
	latest.Wake(r.timed)
}

// terminate begins the drain of a registration. The earlier end counts.
func (r *Registry) terminate(reg *registration, now time.Time, drain time.Duration, cause string) {
	if drain <= 0 {
		r.remove(reg)
		return
	}
	end := now.Add(drain)
	if reg.lifecycle == targetset.Terminating && reg.end.Before(end) {
		if reg.cause == causeEnded && cause != causeEnded {
			reg.cause = cause // so far no caller had announced the end
			r.touch(reg.Stream)
		}
		return
	}
	reg.lifecycle, reg.cause, reg.drain = targetset.Terminating, cause, drain
	r.endAt(reg, end)
	r.touch(reg.Stream)
}

// expire ends what is due, and says when the next is.
func (r *Registry) expire(now time.Time) (next time.Time) {
	r.mu.Lock()
	var ended, left []targetset.ID
	for reg := range r.ending {
		switch {
		case reg.end.After(now):
		case reg.lifecycle == targetset.Terminating:
			left = append(left, reg.ID)
			r.remove(reg)
		default:
			ended = append(ended, reg.ID)
			r.outlived(reg, now)
		}
		if _, still := r.ending[reg]; still && (next.IsZero() || reg.end.Before(next)) {
			next = reg.end
		}
	}
	if len(ended)+len(left) > 0 {
		r.save()
	}
	r.mu.Unlock()
	if len(ended) > 0 {
		r.Log.Info("registrations ended without a new one in their grace", "targets", len(ended), "one_of_them", ended[0].String(), "on_gone", r.OnGone.String())
	}
	if len(left) > 0 {
		r.Log.Info("registered targets have drained and left", "targets", len(left), "one_of_them", left[0].String())
	}
	return next
}

// outlived does with a registration what is to be done after its grace.
func (r *Registry) outlived(reg *registration, now time.Time) {
	switch r.OnGone {
	case targetset.Drop:
		r.remove(reg)
	case targetset.Drain:
		r.terminate(reg, now, r.streams[reg.Stream].drain, causeEnded)
	default: // Hold
		reg.cause, reg.end = causeEnded, time.Time{}
		delete(r.ending, reg)
		r.touch(reg.Stream)
	}
}

// deregister begins the drain of targets, all or none, and says how long it lasts.
func (r *Registry) deregister(who caller, stream string, names []string, drain time.Duration, asked bool) (time.Duration, error) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return 0, errStopping
	}
	for _, name := range names {
		switch reg := r.members[stream][name]; {
		case reg == nil:
			return 0, refuse(RefusedUnknown, codes.NotFound, "stream %s has no registered target %s", targetset.Quote(stream), targetset.Quote(name))
		case !who.operator() && reg.owner != who:
			return 0, refuse(RefusedIdentity, codes.PermissionDenied, "target %s of stream %s is registered by another identity, only that may deregister it", name, stream)
		}
	}
	if !asked {
		drain = r.streams[stream].drain
	}
	for _, name := range names {
		if reg := r.members[stream][name]; reg != nil { // may be named twice
			r.terminate(reg, now, drain, causeDeregistered)
		}
	}
	r.save()
	return drain, nil
}
