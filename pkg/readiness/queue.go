package readiness

import (
	"context"
	"fmt"
	"maps"
	"sync"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/latest"
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
	mu      sync.Mutex
	all     ReportDelta // the full report
	version uint64      // incremented by each report

	reporter *reporter // nil: no stream reports
	// written is the version that the reporter has written completely.
	written latest.Value[uint64]
}

// reporter is one stream's view of the queue, guarded by reportQueue.mu.
type reporter struct {
	wake  chan struct{}
	dirty map[vip.VIP]VIPReport // not sent yet
	taken uint64                // reportQueue.version at the last take
}

func newReportQueue() *reportQueue {
	return &reportQueue{all: ReportDelta{VIPs: make(map[vip.VIP]VIPReport)}}
}

func (q *reportQueue) report(d ReportDelta) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.version++
	if d.Applied != (Position{}) {
		q.all.Applied = d.Applied
	}
	if d.Families != nil {
		q.all.Families = d.Families
	}
	maps.Copy(q.all.VIPs, d.VIPs)
	for _, v := range d.Removed {
		delete(q.all.VIPs, v)
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
	latest.Wake(q.reporter.wake)
}

// attach creates the reporter that replaces the current one. It starts with the full report.
func (q *reportQueue) attach() *reporter {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter != nil {
		latest.Wake(q.reporter.wake)
	}
	q.reporter = &reporter{wake: make(chan struct{}, 1), dirty: maps.Clone(q.all.VIPs)}
	q.written.Set(0)
	return q.reporter
}

// detach ends a reporter.
func (q *reportQueue) detach(r *reporter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter == r {
		q.reporter = nil
		q.written.Set(0)
	}
}

// resend makes the reporter send the full report again after its stream failed. It reports whether
// r is still the current reporter.
func (q *reportQueue) resend(r *reporter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter != r {
		return false
	}
	r.dirty, r.taken = maps.Clone(q.all.VIPs), 0
	q.written.Set(0)
	return true
}

// take returns what the reporter sends next; ok is false when nothing is pending. replaced reports
// whether another reporter took over.
func (q *reportQueue) take(r *reporter) (d ReportDelta, ok, replaced bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter != r {
		return d, false, true
	}
	if r.taken == q.version {
		return d, false, false
	}
	d = ReportDelta{Applied: q.all.Applied, Families: q.all.Families, VIPs: r.dirty}
	r.dirty, r.taken = make(map[vip.VIP]VIPReport), q.version
	return d, true, false
}

// markWritten records that everything taken was written.
func (q *reportQueue) markWritten(r *reporter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.reporter == r {
		q.written.Set(r.taken)
	}
}

// waitWritten waits until the current reporter has written everything that was queued before the
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

// messages returns the report as messages for a watch.
func (d ReportDelta) messages(watchID string) []*readinessv1.ReportAdvertisementRequest {
	families := FamiliesProto(d.Families)
	messages := []*readinessv1.ReportAdvertisementRequest{{WatchId: watchID, Families: families}}
	for v, r := range d.VIPs {
		last := messages[len(messages)-1]
		if len(last.Vips) == vipsPerPart {
			last = &readinessv1.ReportAdvertisementRequest{WatchId: watchID, Families: families}
			messages = append(messages, last)
		}
		last.Vips = append(last.Vips, &readinessv1.VipAdvertisement{
			Vip: v.String(), Advertisement: r.Advertisement, Reason: r.Reason, Unconfirmed: r.Unconfirmed,
		})
	}
	// Only the last part has a position, even if it is the zero position: it marks the report as
	// complete.
	applied := &readinessv1.Position{InstanceId: d.Applied.InstanceID, Revision: d.Applied.Revision}
	messages[len(messages)-1].Applied = applied
	return messages
}
