package readiness

import (
	"context"
	"fmt"
	"slices"
	"sync"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// ReportDelta holds changes of the frontend's advertisements.
type ReportDelta struct {
	// Applied is the position that the frontend has applied; zero if unchanged.
	Applied Position
	// Families holds the external connectivity of every configured family; nil if unchanged. It must
	// not be modified afterwards.
	Families map[vip.Family]bool
	// VIPs holds the changed advertisements. The last entry of a VIP counts.
	VIPs []ReportedVIP
	// Removed holds VIPs that left the configuration. They are reported once, as withdrawn with the
	// reason "not configured".
	Removed []vip.VIP
}

// reportQueue holds the full report and the unsent changes of the current reporter. Only one stream
// reports at a time.
type reportQueue struct {
	mu       sync.Mutex
	applied  Position
	families map[vip.Family]bool
	vips     map[vip.VIP]*queuedReport // the full report, and removed VIPs that are dirty
	version  uint64                    // incremented by each report

	reporter *reporter // nil while no stream reports
	// written is the newest version that the reporter has written completely.
	written latest.Value[uint64]
}

// queuedReport is the newest report of a VIP.
type queuedReport struct {
	ReportedVIP
	removed bool // the VIP is reported once more, but is not part of a full report
	dirty   bool // the reporter has not sent the report yet
}

// reporter is one stream's view of the queue, guarded by reportQueue.mu.
type reporter struct {
	wake  chan struct{}
	dirty []*queuedReport // in the order of arrival
	taken uint64          // reportQueue.version at the last take
}

func newReportQueue() *reportQueue {
	return &reportQueue{vips: make(map[vip.VIP]*queuedReport)}
}

func (q *reportQueue) report(d ReportDelta) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.version++
	if d.Applied != (Position{}) {
		q.applied = d.Applied
	}
	if d.Families != nil {
		q.families = d.Families
	}
	for i := range d.VIPs {
		q.set(&d.VIPs[i], false)
	}
	for _, v := range d.Removed {
		q.set(&ReportedVIP{v, VIPReport{
			Advertisement: readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN,
			Reason:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_CONFIGURED,
		}}, true)
	}
	if q.reporter != nil {
		latest.Wake(q.reporter.wake)
	}
}

// set records the report of a VIP.
func (q *reportQueue) set(r *ReportedVIP, removed bool) {
	if removed && q.reporter == nil {
		delete(q.vips, r.VIP)
		return
	}
	is := q.vips[r.VIP]
	if is == nil {
		is = new(queuedReport)
		q.vips[r.VIP] = is
	}
	is.ReportedVIP, is.removed = *r, removed
	if q.reporter != nil && !is.dirty {
		is.dirty = true
		q.reporter.dirty = append(q.reporter.dirty, is)
	}
}

// attach creates the reporter that replaces the current one. It starts with the full report.
func (q *reportQueue) attach() *reporter {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter != nil {
		latest.Wake(q.reporter.wake)
	}
	q.reporter = &reporter{wake: make(chan struct{}, 1)}
	q.startOver()
	return q.reporter
}

// startOver marks the full report as dirty. The caller holds mu.
func (q *reportQueue) startOver() {
	q.reporter.dirty, q.reporter.taken = make([]*queuedReport, 0, len(q.vips)), 0
	for v, r := range q.vips {
		if r.removed {
			delete(q.vips, v)
			continue
		}
		r.dirty = true
		q.reporter.dirty = append(q.reporter.dirty, r)
	}
	slices.SortFunc(q.reporter.dirty, func(a, b *queuedReport) int { return vip.Compare(a.VIP, b.VIP) })
	// waitWritten must wait until the new stream has the full report.
	q.written.Set(0)
}

// detach ends a reporter, unless another one has replaced it.
func (q *reportQueue) detach(r *reporter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter != r {
		return
	}
	for _, queued := range r.dirty {
		if queued.removed {
			delete(q.vips, queued.VIP)
		}
		queued.dirty = false
	}
	q.reporter, r.dirty = nil, nil
	q.written.Set(0)
}

// resend makes the reporter send the full report again after its stream failed. It reports whether
// r is still the current reporter.
func (q *reportQueue) resend(r *reporter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter != r {
		return false
	}
	q.startOver()
	return true
}

// take returns the next report to send; ok is false if the queue is empty. replaced reports whether
// another reporter has taken over.
func (q *reportQueue) take(r *reporter) (d ReportDelta, ok, replaced bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter != r {
		return d, false, true
	}
	if r.taken == q.version {
		return d, false, false
	}
	d = ReportDelta{Applied: q.applied, Families: q.families, VIPs: make([]ReportedVIP, 0, len(r.dirty))}
	for _, queued := range r.dirty {
		d.VIPs = append(d.VIPs, queued.ReportedVIP)
		queued.dirty = false
		if queued.removed {
			delete(q.vips, queued.VIP)
		}
	}
	clear(r.dirty)
	r.dirty, r.taken = r.dirty[:0], q.version
	return d, true, false
}

// markWritten records that all taken reports were written.
func (q *reportQueue) markWritten(r *reporter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter == r {
		q.written.Set(r.taken)
	}
}

// waitWritten waits until the current reporter has written all reports that were queued before the
// call.
func (q *reportQueue) waitWritten(ctx context.Context) error {
	q.mu.Lock()
	want := q.version
	q.mu.Unlock()
	err := q.written.Wait(ctx, func(written uint64) bool { return written >= want })
	if err == nil {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	problem := "the stream is blocked"
	if q.reporter == nil {
		problem = "no connection"
	}
	return fmt.Errorf("failed to report to the load balancer: %s: %w", problem, err)
}
