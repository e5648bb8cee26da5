package frontend

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/tick"
)

// beatInterval is the longest pause of the controller. The announcer's KEEPALIVE is due in the same
// instants and, if the heartbeat before is too old by then, waits for this one.
const beatInterval = time.Second

// controller passes inputs to the gate and publishes its decisions. No call of its loop blocks. A
// decision of the load balancer about a few VIPs is applied by the goroutine that received it: to
// wake the loop first takes longer. Whatever depends on time is left to the loop, and only the loop
// sends heartbeats to the announcer.
type controller struct {
	gate         *gate.Gate
	source       readinessSource // nil with --gating=off
	bird         *latest.Value[bird.State]
	kernel       *latest.Value[kernel.Confirmed]
	announcer    *announce.Announcer
	observer     *observer
	attractor    *attractor
	requireRoute bool // see gateways
	commands     chan command
	ready        chan struct{} // closed once Run works
	started      time.Time     // set before ready is closed
	lastRun      atomic.Int64  // time of the last evaluation of the loop, since started

	mu       sync.Mutex  // guards the gate and the rest
	running  bool        // Run works
	deadline *time.Timer // of the gate
	revision uint64      // counts batches of decisions
	applied  readiness.Position
	batch    []announce.Change // reused: Post copies what it needs
	states   []gate.VIPState   // reused: the gate copies what it needs
}

// command changes the gate; done is closed after its decisions were published.
type command struct {
	apply func(g *gate.Gate, now time.Time)
	done  chan struct{}
}

func (c *controller) String() string { return "gate" }

// Do has the controller apply f and waits until its decisions were published.
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

// idle returns the time since the last evaluation. It must be called after ready was closed.
func (c *controller) idle() time.Duration {
	return time.Since(c.started) - time.Duration(c.lastRun.Load())
}

// Run evaluates the gate on every input until ctx ends.
func (c *controller) Run(ctx context.Context) error {
	beat := time.NewTimer(tick.Until(time.Now(), beatInterval))
	defer beat.Stop()
	c.deadline = time.NewTimer(0)
	defer c.deadline.Stop()
	var updated <-chan struct{}
	if c.source != nil {
		updated = c.source.Changed()
	}
	sessions, sessionsChanged := c.bird.Get()
	confirmed, confirmedChanged := c.kernel.Get()
	c.gate.Gateways(gateways(sessions, c.requireRoute))
	c.gate.Route(confirmed.VIPs)
	c.started = time.Now()
	c.setRunning(true)
	defer c.setRunning(false)
	close(c.ready)
	for {
		var now time.Time // of the evaluation
		var done chan struct{}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-updated:
			now = c.step(nil)
		case <-sessionsChanged:
			sessions, sessionsChanged = c.bird.Get()
			now = c.step(func() { c.gate.Gateways(gateways(sessions, c.requireRoute)) })
		case <-confirmedChanged:
			confirmed, confirmedChanged = c.kernel.Get()
			now = c.step(func() { c.gate.Route(confirmed.VIPs) })
		case cmd := <-c.commands:
			now = c.step(func() { cmd.apply(c.gate, time.Now()) })
			done = cmd.done
		case <-c.deadline.C:
			now = c.step(func() {})
		case <-beat.C:
			// Only here: the runtime wakes the process also at the time from before a Reset.
			beat.Reset(tick.Until(time.Now(), beatInterval))
			now = c.step(func() {})
		}
		c.lastRun.Store(int64(now.Sub(c.started)))
		c.announcer.Heartbeat(now)
		if done != nil {
			close(done)
		}
	}
}

func (c *controller) setRunning(running bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running = running
}

// tryUpdate applies the source's changes unless the loop evaluates or does not run, and reports
// whether it did. It does not block.
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

// step applies an input of the loop, nil for the source's changes, and evaluates the gate.
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
	c.states = u.VIPs
	c.gate.UpdateLB(time.Now(), u)
	now, cause := time.Now(), update.ReceivedAt
	if cause.IsZero() {
		cause = now
	}
	c.evaluate(now, cause, &update)
	return now
}

// evaluate publishes the decisions that follow from an input at a time; update is nil unless it
// came from the source. The caller holds mu.
func (c *controller) evaluate(now, cause time.Time, update *readiness.Update) {
	changes := c.gate.Evaluate(now)
	if len(changes) > 0 {
		c.post(cause, changes) // first: whatever wakes another goroutine delays BIRD
	}
	c.attractor.follow(now, c.gate.Attract()) // before the decisions are reported
	if update != nil {
		c.observer.updated(*update) // before the decisions that follow from it
	}
	if len(changes) > 0 {
		c.observer.decided(decisions{
			At: now, Revision: c.revision, Position: c.position(), Changes: slices.Clone(changes),
		})
	}
	if position := c.position(); position != c.applied {
		c.applied = position
		c.observer.positionApplied(position)
	}
	c.observer.freshness(c.gate.Freshness(now))
	if at := c.gate.Deadline(now); !at.IsZero() {
		c.deadline.Reset(at.Sub(now))
	}
}

// post has the announcer write a batch of decisions.
func (c *controller) post(cause time.Time, changes []gate.Change) {
	c.revision++
	c.batch = c.batch[:0]
	for _, ch := range changes {
		if ch.From.Advertisement != ch.To.Advertisement {
			c.batch = append(c.batch, announce.Change{VIP: ch.VIP, Advertisement: ch.To.Advertisement})
		}
	}
	if len(c.batch) > 0 {
		c.announcer.Post(announce.Batch{Changes: c.batch, Revision: c.revision, Cause: cause})
	}
}

// position returns the load balancer's position on which the decisions are based.
func (c *controller) position() readiness.Position {
	instance, revision := c.gate.Position()
	return readiness.Position{InstanceID: instance, Revision: revision}
}

// gateways marks the families with a gateway that is up and, with requireRoute, advertises a route.
// A static gateway that is held down counts as up, since it can be released.
func gateways(s bird.State, requireRoute bool) gate.Gateways {
	g := gate.Gateways{At: s.At}
	if !s.Alive {
		return g
	}
	for _, gw := range s.Gateways {
		if gw.Usable && (gw.Imported > 0 || !requireRoute) {
			g.Up[gw.Family] = true
		}
	}
	return g
}

// lbUpdate converts an update; the states are appended to a slice.
func lbUpdate(u readiness.Update, states []gate.VIPState) gate.LBUpdate {
	g := gate.LBUpdate{
		Instance: u.Position.InstanceID, Revision: u.Position.Revision, Live: u.Synced,
		LeaseEnd: u.LeaseEnd, EndedAt: u.EndedAt, Grace: u.StaleGrace,
		GoingAway: u.GoingAway, DrainEnd: u.DrainEnd, Complete: u.Complete,
		VIPs: slices.Grow(states, len(u.Changed)), Removed: u.Removed,
	}
	for _, r := range u.Changed {
		g.VIPs = append(g.VIPs, gate.VIPState{VIP: r.VIP, State: r.State, DrainEnd: r.DrainEnd})
	}
	return g
}
