package frontend

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/policy"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/tick"
	"github.com/vipgate/vipgate/pkg/vip"
)

// beatInterval is the longest pause of the controller. The announcer's KEEPALIVEs are due at the
// same times. A KEEPALIVE waits for the next heartbeat if the previous heartbeat is too old.
const beatInterval = time.Second

// stalledAfter is the delay of a heartbeat beyond which this process counts as stalled.
const stalledAfter = 50 * time.Millisecond

// controller passes inputs to the gate and publishes its decisions. No call of its loop blocks. The
// goroutine that receives a small update of the load balancer applies it directly, because waking
// the loop takes longer. Only the loop handles timers and sends heartbeats to the announcer.
type controller struct {
	gate         *gate.Gate
	source       readinessSource // nil with --gating=off
	bird         *latest.Value[bird.State]
	kernel       *latest.Value[kernel.Confirmed]
	announcer    *announce.Announcer
	session      *latest.Value[gate.Announcer] // loopback session of the announcer
	observer     *observer
	attractor    *attractor
	requireRoute bool // see gateways
	commands     chan command
	ready        chan struct{} // closed once Run works
	pulse        task.Pulse
	tracer       *tracer // nil: no decision has a trace

	mu       sync.Mutex  // guards the gate and the rest
	running  bool        // Run works
	beatBy   time.Time   // when the next heartbeat is due, or the end of the last stall
	deadline *time.Timer // of the gate
	revision uint64      // counts batches for the announcer
	applied  readiness.Position
	policies policy.Policies
	batch    []announce.Change // reused, because Post copies the changes
	states   []gate.VIPState   // reused, because the gate copies the states
}

// command changes the gate; done is closed after its decisions were published.
type command struct {
	apply func(g *gate.Gate, now time.Time)
	done  chan struct{}
}

func (c *controller) String() string { return "gate" }

// Do applies f in the controller's loop and waits until the resulting decisions are published.
func (c *controller) Do(ctx context.Context, f func(g *gate.Gate, now time.Time)) error {
	cmd := command{f, make(chan struct{})}
	select {
	case c.commands <- cmd:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-cmd.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Overdue implements task.Loop.
func (c *controller) Overdue() time.Duration { return c.pulse.Overdue() }

// Run evaluates the gate on every input until ctx ends.
func (c *controller) Run(ctx context.Context) error {
	// Aligned to the wall clock, as the KEEPALIVE timer of the announcer.
	beat := c.nextBeat()
	// evaluate resets the timer to the gate's next deadline.
	c.deadline = time.NewTimer(0)
	defer c.deadline.Stop()
	var updated <-chan struct{}
	if c.source != nil {
		updated = c.source.Changed()
	}
	sessions, sessionsChanged := c.bird.Get()
	confirmed, confirmedChanged := c.kernel.Get()
	session, sessionChanged := c.session.Get()
	// The channels report only later changes, so pass the current values.
	c.gate.Gateways(withExports(gateways(sessions, c.requireRoute), sessions))
	c.gate.Announcer(session)
	c.gate.Route(confirmed.VIPs)
	// From here on, tryUpdate may apply updates in the watcher's goroutine.
	c.setRunning(true)
	defer c.setRunning(false)
	close(c.ready)
	defer c.pulse.End()
	for {
		c.pulse.Next(beatInterval)
		var now time.Time // of the evaluation
		var done chan struct{}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-updated:
			now = c.step(nil)
		case <-sessionsChanged:
			sessions, sessionsChanged = c.bird.Get()
			now = c.step(func() { c.gate.Gateways(withExports(gateways(sessions, c.requireRoute), sessions)) })
		case <-sessionChanged:
			session, sessionChanged = c.session.Get()
			now = c.step(func() { c.gate.Announcer(session) })
		case <-confirmedChanged:
			confirmed, confirmedChanged = c.kernel.Get()
			now = c.step(func() { c.gate.Route(confirmed.VIPs) })
		case cmd := <-c.commands:
			now = c.step(func() { cmd.apply(c.gate, time.Now()) })
			done = cmd.done
		case <-c.deadline.C:
			now = c.step(func() {})
		case <-beat:
			// Reset the timer only here: a Reset in each pass costs an extra wakeup, because the runtime
			// still wakes the process at the old time.
			now = c.step(func() {})
			beat = c.nextBeat()
		}
		// A loop that hangs sends no heartbeat, and BIRD withdraws all VIPs when the hold time expires.
		c.announcer.Heartbeat(now)
		if done != nil {
			close(done)
		}
	}
}

// nextBeat returns a channel that fires when the next heartbeat is due.
func (c *controller) nextBeat() <-chan time.Time {
	now := time.Now()
	wait := tick.Until(now, beatInterval)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.beatBy = now.Add(wait)
	return time.After(wait)
}

func (c *controller) setRunning(running bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running = running
}

// tryUpdate applies the source's changes and reports whether it did. It does nothing while the
// loop holds the lock or does not run. It does not block.
func (c *controller) tryUpdate() bool {
	if !c.mu.TryLock() {
		return false
	}
	defer c.mu.Unlock()
	if c.running {
		c.update()
	}
	return c.running
}

// step applies an input of the loop and evaluates the gate. nil applies the source's changes.
func (c *controller) step(apply func()) (now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if apply == nil {
		return c.update()
	}
	apply()
	now = time.Now()
	c.evaluate(now, now, nil)
	return now
}

// update applies the source's changes and evaluates the gate. The caller holds mu.
func (c *controller) update() time.Time {
	update := c.source.Take()
	u := lbUpdate(update, c.states[:0])
	// Keep the grown slice for the next update.
	c.states = u.VIPs
	c.gate.UpdateLB(time.Now(), u)
	now, cause := time.Now(), update.ReceivedAt
	if cause.IsZero() {
		cause = now
	}
	c.evaluate(now, cause, &update)
	return now
}

// evaluate evaluates the gate and publishes the decisions. cause is the time of the input; update
// is nil unless the input came from the source. The caller holds mu.
func (c *controller) evaluate(now, cause time.Time, update *readiness.Update) {
	// BIRD's sessions were not read during a stall of this process: their state is as old as before.
	if stall := now.Sub(c.beatBy); stall > stalledAfter && !c.beatBy.IsZero() {
		c.gate.Stalled(now, stall)
		c.beatBy = now
	}
	changes := c.gate.Evaluate(now)
	if len(changes) > 0 {
		c.post(cause, changes) // first, because waking another goroutine delays the UPDATE to BIRD
	}
	c.attractor.follow(now, c.gate.Attract()) // before the decisions are reported
	if update != nil {
		c.observer.updated(*update) // before the decisions that follow from it
	}
	if decided := slices.DeleteFunc(slices.Clone(changes), gate.Change.IsWeight); len(decided) > 0 {
		c.observer.decided(decisions{At: now, Revision: c.revision, Position: c.position(), Changes: decided})
	}
	// The position follows its decisions, because the load balancer takes it as their end.
	if position := c.position(); position != c.applied {
		c.applied = position
		c.observer.positionApplied(position)
	}
	if c.tracer != nil && len(changes) > 0 {
		c.tracer.decided(now, cause, c.position(), c.revision, changes, update)
	}
	c.observer.freshness(c.gate.Freshness(now))
	// A stale timer only costs an evaluation, so it is not stopped.
	if at := c.gate.Deadline(now); !at.IsZero() {
		c.deadline.Reset(at.Sub(now))
	}
}

// post passes the changed routes to the announcer.
func (c *controller) post(cause time.Time, changes []gate.Change) {
	c.batch = c.policies.Changes(c.batch[:0], changes)
	c.send(cause)
}

// setPolicies puts policies in force. It is called by a command.
func (c *controller) setPolicies(next policy.Policies, vips []vip.VIP, now time.Time) {
	if next.Weigh() {
		c.gate.Weigh(now)
	}
	c.batch = c.policies.Replaced(c.batch[:0], next, vips, c.gate.Decision)
	was := c.policies
	c.policies = next
	c.observer.policies.Store(&next)
	c.send(now)
	if len(c.batch) > 0 {
		c.observer.note(was.Edit(next, c.batch, c.gate.Decision))
	}
}

// send passes the batch to the announcer, which confirms only revisions that it gets.
func (c *controller) send(cause time.Time) {
	if len(c.batch) > 0 {
		c.revision++
		c.announcer.Post(announce.Batch{Changes: c.batch, Revision: c.revision, Cause: cause})
	}
}

// position returns the load balancer's position on which the decisions are based.
func (c *controller) position() readiness.Position {
	instance, revision := c.gate.Position()
	return readiness.Position{InstanceID: instance, Revision: revision}
}

// maxRenewal bounds the age of the sessions' state while BIRD answers other requests, to 10 s with
// the time for which the gate takes it as valid.
const maxRenewal = 6800 * time.Millisecond

// gateways returns the families that have a gateway that is up and, with requireRoute, advertises
// a route. A static gateway that is held down counts as up, because the frontend can release it.
func gateways(s bird.State, requireRoute bool) gate.Gateways {
	g := gate.Gateways{At: s.At}
	// BIRD works, and a session that is lost meanwhile receives nothing.
	if !s.At.IsZero() {
		g.At = s.At.Add(max(0, min(s.Answered.Sub(s.At), maxRenewal)))
	}
	// A BIRD that does not answer may have lost its sessions.
	if !s.Alive {
		return g
	}
	for _, gw := range s.Gateways {
		// An operator drained the gateway: it receives no VIP.
		if gw.Export == bird.ExportNone {
			continue
		}
		if gw.Usable && (gw.Imported > 0 || !requireRoute) {
			g.Up[gw.Family] = true
			g.Static[gw.Family] = g.Static[gw.Family] || isStatic(gw)
		}
	}
	return g
}

// withExports adds the VIPs of each family that gateways receive, if every gateway that is up
// lacks some of them and BIRD has listed its exports.
func withExports(g gate.Gateways, s bird.State) gate.Gateways {
	for _, family := range vip.Families {
		isUp := func(gw bird.GatewayState) bool {
			return gw.Family == family && gw.Up && gw.Export != bird.ExportNone
		}
		complete := func(gw bird.GatewayState) bool { return isUp(gw) && (!gw.Short || gw.Exports == nil) }
		if !s.Alive || !slices.ContainsFunc(s.Gateways, isUp) || slices.ContainsFunc(s.Gateways, complete) {
			continue
		}
		exported := vip.Set{}
		for _, gw := range s.Gateways {
			if isUp(gw) {
				maps.Copy(exported, gw.Exports)
			}
		}
		g.Exported[family] = exported
	}
	return g
}

// short returns the problem of each gateway of a family that lacks VIPs.
func short(s bird.State, family vip.Family) (problems []string) {
	for _, g := range s.Gateways {
		if g.Family == family && g.Up && g.Short {
			problems = append(problems, g.Name+": "+g.ExportsProblem())
		}
	}
	return problems
}

// lbUpdate converts an update for the gate and appends its VIPs to states.
func lbUpdate(u readiness.Update, states []gate.VIPState) gate.LBUpdate {
	g := gate.LBUpdate{
		Instance: u.Position.InstanceID, Revision: u.Position.Revision, Live: u.Synced,
		LeaseEnd: u.LeaseEnd, EndedAt: u.EndedAt, Grace: u.StaleGrace,
		GoingAway: u.GoingAway, DrainEnd: u.DrainEnd, Complete: u.Complete, Shared: sharesState(u.Service),
		VIPs: slices.Grow(states, len(u.Changed)), Removed: u.Removed,
	}
	for _, r := range u.Changed {
		g.VIPs = append(g.VIPs, gate.VIPState{
			VIP: r.VIP, State: r.State, DrainEnd: r.DrainEnd,
			Reconfigured: r.Reason == readinessv1.VipReason_VIP_REASON_RECONFIGURED,
			LastResort:   r.Reason == readinessv1.VipReason_VIP_REASON_LAST_RESORT,
			Suspected:    r.State == vip.Ready && r.Reason == readinessv1.VipReason_VIP_REASON_PROBES,
			Weight:       gate.Weight(r.ReadyTargets, r.WarmingTenths),
		})
	}
	return g
}

// readinessSource is the load balancer's stream or a directory of readiness files.
type readinessSource interface {
	// Changed holds a token whenever Take may return a change.
	Changed() <-chan struct{}
	// Take returns the changes since the last Take. It does not block.
	Take() readiness.Update
}
