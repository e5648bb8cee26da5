package readiness

import (
	"context"
	"fmt"
	"maps"
	"sync"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// ReportDelta is what changed in what the frontend does.
type ReportDelta struct {
	// Applied is the position that the frontend has applied. Zero: as before.
	Applied Position
	// Families is the external connectivity of every configured family. nil: as
	// before. It must not be changed afterwards.
	Families map[vip.Family]bool
	// VIPs holds what the frontend does with the VIPs for which that changed.
	VIPs map[vip.VIP]VIPReport
	// Removed names VIPs that left the configuration. They are reported once as
	// withdrawn, not configured, and then no more.
	Removed []vip.VIP
}

// outbox holds what is to be reported: everything, and what the stream that
// reports now has not been told yet. Only one stream reports at a time.
type outbox struct {
	mu       sync.Mutex
	applied  Position
	families map[vip.Family]bool
	all      map[vip.VIP]VIPReport
	used     bool   // something was ever reported
	handed   uint64 // calls of report

	reporter *reporter     // who reports now
	written  chan struct{} // closed and replaced when the reporter has written or changed
}

// reporter is one stream's view of the outbox, guarded by outbox.mu.
type reporter struct {
	wake  chan struct{}
	dirty map[vip.VIP]VIPReport // what it has not been told
	taken uint64                // outbox.handed at the last take
	done  uint64                // outbox.handed that it has written entirely
	left  bool                  // another one took over
}

func newOutbox() *outbox {
	return &outbox{all: make(map[vip.VIP]VIPReport), written: make(chan struct{})}
}

func (o *outbox) report(d ReportDelta) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.used = true
	o.handed++
	if d.Applied != (Position{}) {
		o.applied = d.Applied
	}
	if d.Families != nil {
		o.families = d.Families
	}
	maps.Copy(o.all, d.VIPs)
	for _, v := range d.Removed {
		delete(o.all, v)
	}
	if o.reporter == nil {
		return
	}
	maps.Copy(o.reporter.dirty, d.VIPs)
	for _, v := range d.Removed {
		o.reporter.dirty[v] = VIPReport{
			Advertisement: readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN,
			Reason:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_CONFIGURED,
		}
	}
	o.reporter.poke()
}

func (r *reporter) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// attach makes a new reporter, which has to tell everything, the only one.
func (o *outbox) attach() *reporter {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.reporter != nil {
		o.reporter.left = true
		o.reporter.poke()
	}
	o.reporter = &reporter{wake: make(chan struct{}, 1), dirty: maps.Clone(o.all)}
	o.reporter.poke()
	o.changed()
	return o.reporter
}

// detach ends a reporter.
func (o *outbox) detach(r *reporter) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.reporter == r {
		o.reporter = nil
		o.changed()
	}
}

// changed wakes whoever waits for the state of writing. The caller holds o.mu.
func (o *outbox) changed() {
	close(o.written)
	o.written = make(chan struct{})
}

// restart makes the reporter tell everything anew, after its stream broke. It
// returns false when another reporter took over.
func (o *outbox) restart(r *reporter) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.reporter != r {
		return false
	}
	r.dirty, r.taken, r.done = maps.Clone(o.all), 0, 0
	r.poke()
	return true
}

// parcel is what one take has to send.
type parcel struct {
	applied  Position
	families map[vip.Family]bool
	vips     map[vip.VIP]VIPReport
}

// take returns what the reporter has to send now; ok is false when there is
// nothing. left says that it must not send any more.
func (o *outbox) take(r *reporter) (p parcel, ok, left bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if r.left || o.reporter != r {
		return p, false, true
	}
	if !o.used || r.taken == o.handed {
		return p, false, false
	}
	p = parcel{applied: o.applied, families: o.families, vips: r.dirty}
	r.dirty = make(map[vip.VIP]VIPReport)
	r.taken = o.handed
	return p, true, false
}

// wrote notes that everything taken was written.
func (o *outbox) wrote(r *reporter) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r.done = r.taken
	o.changed()
}

// settled waits until the reporter of the moment has written everything that
// was handed over before the call.
func (o *outbox) settled(ctx context.Context) error {
	o.mu.Lock()
	want := o.handed
	for {
		r, written := o.reporter, o.written
		done := want == 0 || (r != nil && r.done >= want)
		o.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-written:
		case <-ctx.Done():
			if r == nil {
				return fmt.Errorf("report to the load balancer: no connection: %w", ctx.Err())
			}
			return fmt.Errorf("report to the load balancer: it does not take it: %w", ctx.Err())
		}
		o.mu.Lock()
	}
}

// messages returns the parcel as messages for a watch.
func (p parcel) messages(watchID string) []*readinessv1.ReportAdvertisementRequest {
	var families []*readinessv1.FamilyConnectivity
	for _, f := range vip.Families {
		if up, configured := p.families[f]; configured {
			families = append(families, &readinessv1.FamilyConnectivity{Family: FamilyProto(f), Up: up})
		}
	}
	messages := []*readinessv1.ReportAdvertisementRequest{{WatchId: watchID, Families: families}}
	for v, r := range p.vips {
		last := messages[len(messages)-1]
		if len(last.Vips) == vipsPerPart {
			last = &readinessv1.ReportAdvertisementRequest{WatchId: watchID, Families: families}
			messages = append(messages, last)
		}
		last.Vips = append(last.Vips, r.Proto(v))
	}
	// Only the last part has a position, also when it is that of nothing yet: it
	// tells that the report is complete.
	messages[len(messages)-1].Applied = &readinessv1.Position{InstanceId: p.applied.InstanceID, Revision: p.applied.Revision}
	return messages
}
