package readiness

import (
	"context"
	"fmt"
	"maps"
	"sync"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// ReportDelta holds changes of the frontend's advertisements.
type ReportDelta struct {
	// Applied is the position that the frontend has applied. Zero: unchanged.
	Applied Position
	// Families is the external connectivity of every configured family. nil: unchanged. It must not
	// be modified afterwards.
	Families map[vip.Family]bool
	// VIPs holds the changed advertisements.
	VIPs map[vip.VIP]VIPReport
	// Removed holds VIPs that left the configuration. They are reported once as withdrawn, not
	// configured.
	Removed []vip.VIP
}

// reportQueue holds the full report and what the current reporter has not sent yet. Only one stream
// reports at a time.
type reportQueue struct {
	mu       sync.Mutex
	applied  Position
	families map[vip.Family]bool
	all      map[vip.VIP]VIPReport
	used     bool   // report was called
	version  uint64 // incremented by each report

	reporter *reporter     // who reports now
	written  chan struct{} // closed and replaced when the reporter has written or changed
}

// reporter is one stream's view of the queue, guarded by reportQueue.mu.
type reporter struct {
	wake     chan struct{}
	dirty    map[vip.VIP]VIPReport // not sent yet
	taken    uint64                // reportQueue.version at the last take
	written  uint64                // reportQueue.version that was written completely
	replaced bool                  // another reporter took over
}

func newReportQueue() *reportQueue {
	return &reportQueue{all: make(map[vip.VIP]VIPReport), written: make(chan struct{})}
}

func (q *reportQueue) report(d ReportDelta) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.used = true
	q.version++
	if d.Applied != (Position{}) {
		q.applied = d.Applied
	}
	if d.Families != nil {
		q.families = d.Families
	}
	maps.Copy(q.all, d.VIPs)
	for _, v := range d.Removed {
		delete(q.all, v)
	}
	if q.reporter == nil {
		return
	}
	maps.Copy(q.reporter.dirty, d.VIPs)
	for _, v := range d.Removed {
		q.reporter.dirty[v] = VIPReport{
			Advertisement: readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN,
			Reason:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_CONFIGURED,
		}
	}
	q.reporter.notify()
}

func (r *reporter) notify() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// attach creates the reporter that replaces the current one. It starts with the full report.
func (q *reportQueue) attach() *reporter {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter != nil {
		q.reporter.replaced = true
		q.reporter.notify()
	}
	q.reporter = &reporter{wake: make(chan struct{}, 1), dirty: maps.Clone(q.all)}
	q.reporter.notify()
	q.signal()
	return q.reporter
}

// detach ends a reporter.
func (q *reportQueue) detach(r *reporter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter == r {
		q.reporter = nil
		q.signal()
	}
}

// signal wakes the callers of waitWritten. The caller holds q.mu.
func (q *reportQueue) signal() {
	close(q.written)
	q.written = make(chan struct{})
}

// resend makes the reporter send the full report again after its stream failed. It returns false
// when another reporter took over.
func (q *reportQueue) resend(r *reporter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter != r {
		return false
	}
	r.dirty, r.taken, r.written = maps.Clone(q.all), 0, 0
	r.notify()
	return true
}

// reportBatch is the content that one take returns.
type reportBatch struct {
	applied  Position
	families map[vip.Family]bool
	vips     map[vip.VIP]VIPReport
}

// take returns what the reporter sends next; ok is false when nothing is pending. replaced reports
// whether the reporter must stop sending.
func (q *reportQueue) take(r *reporter) (p reportBatch, ok, left bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if r.replaced || q.reporter != r {
		return p, false, true
	}
	if !q.used || r.taken == q.version {
		return p, false, false
	}
	p = reportBatch{applied: q.applied, families: q.families, vips: r.dirty}
	r.dirty = make(map[vip.VIP]VIPReport)
	r.taken = q.version
	return p, true, false
}

// markWritten records that everything taken was written.
func (q *reportQueue) markWritten(r *reporter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	r.written = r.taken
	q.signal()
}

// waitWritten waits until the current reporter has written everything that was queued before the
// call.
func (q *reportQueue) waitWritten(ctx context.Context) error {
	q.mu.Lock()
	want := q.version
	for {
		r, written := q.reporter, q.written
		done := want == 0 || (r != nil && r.written >= want)
		q.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-written:
		case <-ctx.Done():
			if r == nil {
				return fmt.Errorf("failed to report to the load balancer: no connection: %w", ctx.Err())
			}
			return fmt.Errorf("failed to report to the load balancer: the stream is blocked: %w", ctx.Err())
		}
		q.mu.Lock()
	}
}

// messages returns the batch as messages for a watch.
func (p reportBatch) messages(watchID string) []*readinessv1.ReportAdvertisementRequest {
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
	// Only the last part has a position, even if it is the zero position: it marks the report as
	// complete.
	messages[len(messages)-1].Applied = &readinessv1.Position{
		InstanceId: p.applied.InstanceID,
		Revision:   p.applied.Revision,
	}
	return messages
}
