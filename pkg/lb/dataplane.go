package lb

import (
	"cmp"
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/serving"
	"github.com/vipgate/vipgate/pkg/vip"
)

// plane is the data plane as the loop sees it: a [dataplane.Plane], or a script.
type plane interface {
	Configure(*plan.Desired)
	State() *latest.Value[plan.State]
	Ready() <-chan struct{}
}

// frontend is what the frontend reports: a [readiness.Server], or a script.
type frontend interface {
	Report() *latest.Value[readiness.Report]
	Reported(vip.VIP) (readiness.VIPReport, bool)
}

// forwarder passes the desired state from the evaluator to the data plane. It belongs to the loop
// and never waits.
type forwarder struct {
	plane
	frontend frontend
	position func() readiness.Position // of the newest decision
	applied  func(time.Duration)       // takes how long the kernel took; must not block
	log      *slog.Logger
	// reported is closed when the frontend reports again; nil while nothing is held back.
	reported <-chan struct{}
	// sent is when desired states that the kernel has not applied yet were sent, by revision.
	sent map[uint64]time.Time
	// shown is what status and metrics show.
	shown atomic.Pointer[forwarded]
}

type forwarded struct {
	desired *plan.Desired
	held    []string
}

func newForwarder(p plane, f frontend, position func() readiness.Position, applied func(time.Duration), log *slog.Logger,
) *forwarder {
	w := &forwarder{plane: p, frontend: f, position: position, applied: applied, log: log, sent: map[uint64]time.Time{}}
	w.shown.Store(&forwarded{desired: &plan.Desired{}})
	return w
}

// forward sends the desired state to the data plane, if it changed. It returns when it has to be
// called again.
func (f *forwarder) forward(now time.Time, e *serving.Evaluator) (next time.Time) {
	state := f.State().Load()
	for revision, at := range f.sent {
		if revision <= state.Revision {
			f.applied(max(0, state.At.Sub(at)))
			delete(f.sent, revision)
		}
	}
	report, changed := f.frontend.Report().Get()
	out := e.Forward(now, serving.Frontend{Report: report, Reported: f.frontend.Reported, Position: f.position()})
	if f.reported = nil; len(out.Held) > 0 {
		f.reported = changed
	}
	shown := &forwarded{desired: cmp.Or(out.Desired, f.shown.Load().desired), held: out.Held}
	if out.Desired != nil {
		f.sent[out.Desired.Revision] = now
		f.Configure(out.Desired)
	}
	f.shown.Store(shown)
	for _, r := range out.Released {
		f.log.Log(context.Background(), r.Level, r.Cause+"; the last targets of VIPs leave the data plane",
			"stream", r.Stream, "vips", r.VIPs, "after", r.After.Round(time.Millisecond))
	}
	return out.Next
}
