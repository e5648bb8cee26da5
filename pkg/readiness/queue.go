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

func newReportQueue() *reportQueue { return &reportQueue{vips: make(map[vip.VIP]*queuedReport)} }

func (queue *reportQueue) report(delta ReportDelta) {
	queue.mu.Lock()
	defer queue.mu.Unlock()
	queue.version++ // also without changes, so that waitWritten covers the position
	if delta.Applied != (Position{}) {
		queue.applied = delta.Applied
	}
	if delta.Families != nil {
		queue.families = delta.Families
	}
	for i := range delta.VIPs {
		queue.set(&delta.VIPs[i], false)
	}
	for _, v := range delta.Removed {
		queue.set(&ReportedVIP{v, VIPReport{
			Advertisement: readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN,
			Reason:        readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_CONFIGURED,
		}}, true)
	}
	if queue.reporter != nil {
		latest.Wake(queue.reporter.wake)
	}
}

func (queue *reportQueue) set(report *ReportedVIP, removed bool) {
	// A later reporter starts with a full report, which does not contain removed VIPs.
	if removed && queue.reporter == nil {
		delete(queue.vips, report.VIP)
		return
	}
	queued := queue.vips[report.VIP]
	if queued == nil {
		queued = new(queuedReport)
		queue.vips[report.VIP] = queued
	}
	queued.ReportedVIP, queued.removed = *report, removed
	if queue.reporter != nil && !queued.dirty {
		queued.dirty = true
		queue.reporter.dirty = append(queue.reporter.dirty, queued)
	}
}

// attach creates the reporter that replaces the current one. It starts with the full report.
func (queue *reportQueue) attach() *reporter {
	queue.mu.Lock()
	defer queue.mu.Unlock()
	if queue.reporter != nil {
		latest.Wake(queue.reporter.wake)
	}
	queue.reporter = &reporter{wake: make(chan struct{}, 1)}
	queue.startOver()
	return queue.reporter
}

// startOver marks the full report as dirty. The caller holds mu.
func (queue *reportQueue) startOver() {
	queue.reporter.dirty, queue.reporter.taken = make([]*queuedReport, 0, len(queue.vips)), 0
	for v, queued := range queue.vips {
		if queued.removed {
			delete(queue.vips, v)
			continue
		}
		queued.dirty = true
		queue.reporter.dirty = append(queue.reporter.dirty, queued)
	}
	slices.SortFunc(queue.reporter.dirty, func(a, b *queuedReport) int { return vip.Compare(a.VIP, b.VIP) })
	// waitWritten must wait until the new stream has the full report.
	queue.written.Set(0)
}

// detach ends a reporter, unless another one has replaced it.
func (queue *reportQueue) detach(reporter *reporter) {
	queue.mu.Lock()
	defer queue.mu.Unlock()
	if queue.reporter != reporter {
		return
	}
	// The next reporter starts over, with a full report.
	for _, queued := range reporter.dirty {
		if queued.removed {
			delete(queue.vips, queued.VIP)
		}
		queued.dirty = false
	}
	queue.reporter, reporter.dirty = nil, nil
	queue.written.Set(0)
}

// resend makes the reporter send the full report again after its stream failed. It reports whether
// r is still the current reporter.
func (queue *reportQueue) resend(reporter *reporter) bool {
	queue.mu.Lock()
	defer queue.mu.Unlock()
	if queue.reporter != reporter {
		return false
	}
	queue.startOver()
	return true
}

// take returns the next report to send; ok is false if the queue is empty. replaced reports whether
// another reporter has taken over.
func (queue *reportQueue) take(reporter *reporter) (delta ReportDelta, ok, replaced bool) {
	queue.mu.Lock()
	defer queue.mu.Unlock()
	if queue.reporter != reporter {
		return delta, false, true
	}
	if reporter.taken == queue.version {
		return delta, false, false
	}
	delta = ReportDelta{Applied: queue.applied, Families: queue.families}
	delta.VIPs = make([]ReportedVIP, 0, len(reporter.dirty))
	for _, queued := range reporter.dirty {
		delta.VIPs = append(delta.VIPs, queued.ReportedVIP)
		queued.dirty = false
		if queued.removed {
			delete(queue.vips, queued.VIP)
		}
	}
	clear(reporter.dirty)
	reporter.dirty, reporter.taken = reporter.dirty[:0], queue.version
	return delta, true, false
}

// markWritten records that all taken reports were written.
func (queue *reportQueue) markWritten(reporter *reporter) {
	queue.mu.Lock()
	defer queue.mu.Unlock()
	if queue.reporter == reporter {
		queue.written.Set(reporter.taken)
	}
}

// waitWritten waits until the current reporter has written all reports queued before the call.
func (queue *reportQueue) waitWritten(ctx context.Context) error {
	queue.mu.Lock()
	want := queue.version
	queue.mu.Unlock()
	err := queue.written.Wait(ctx, func(written uint64) bool { return written >= want })
	if err == nil {
		return nil
	}
	queue.mu.Lock()
	defer queue.mu.Unlock()
	problem := "the stream is blocked"
	if queue.reporter == nil {
		problem = "no connection"
	}
	return fmt.Errorf("failed to report to the load balancer: %s: %w", problem, err)
}
