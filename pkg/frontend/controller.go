package frontend

import (
	"context"
	"slices"
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

// controller passes inputs to the gate and publishes its decisions. No call of its loop blocks.
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
	lastRun      atomic.Int64  // time of the last evaluation, since started

	revision uint64 // counts batches of decisions
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
	timer := time.NewTimer(0)
	defer timer.Stop()
	var updated <-chan struct{}
	if c.source != nil {
		updated = c.source.Changed()
	}
	sessions, sessionsChanged := c.bird.Get()
	confirmed, confirmedChanged := c.kernel.Get()
	c.gate.Gateways(gateways(sessions, c.requireRoute))
	c.gate.Route(confirmed.VIPs)
	c.started = time.Now()
	close(c.ready)
	for {
		var cause time.Time // time of the input; zero: now
		var done chan struct{}
		var update readiness.Update
		var isUpdate bool
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-updated:
			update, isUpdate = c.source.Take(), true
			cause = update.ReceivedAt
			u := lbUpdate(update, c.states[:0])
			c.states = u.VIPs
			c.gate.UpdateLB(time.Now(), u)
		case <-sessionsChanged:
			sessions, sessionsChanged = c.bird.Get()
			c.gate.Gateways(gateways(sessions, c.requireRoute))
		case <-confirmedChanged:
			confirmed, confirmedChanged = c.kernel.Get()
			c.gate.Route(confirmed.VIPs)
		case cmd := <-c.commands:
			cmd.apply(c.gate, time.Now())
			done = cmd.done
		case <-timer.C:
		case <-beat.C:
			// Only here: the runtime wakes the process also at the time from before a Reset.
			beat.Reset(tick.Until(time.Now(), beatInterval))
		}
		now := time.Now()
		c.lastRun.Store(int64(now.Sub(c.started)))
		if cause.IsZero() {
			cause = now
		}
		changes := c.gate.Evaluate(now)
		if len(changes) > 0 {
			c.post(cause, changes) // first: whatever wakes another goroutine delays BIRD
		}
		c.announcer.Heartbeat(now)
		c.attractor.follow(now, c.gate.Attract()) // before the decisions are reported
		if isUpdate {
			c.observer.updated(update) // before the decisions that follow from it
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
			timer.Reset(at.Sub(now))
		}
		if done != nil {
			close(done)
		}
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
