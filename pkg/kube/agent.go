package kube

import (
	"context"
	"log/slog"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/turn"
	"github.com/vipgate/vipgate/pkg/trench"
)

const (
	// settle is the quiet time that ends a burst of changes, such as the update of 1 000 pods.
	settle = 5 * time.Millisecond
	// interval is the minimum time between two writes, and the maximum time that a burst is collected.
	interval = 100 * time.Millisecond
	// pause is the minimum time between two translations, as a multiple of the duration of the last
	// one: a continuous stream of changes that affect no target takes a fifth of a CPU.
	pause = 4
)

// agent translates each snapshot and writes the result. It implements task.Task.
type agent struct {
	cluster    *cluster.Cluster
	translator func(cluster.Snapshot) translation.Result
	files      *files
	log        *slog.Logger
	// translated is called after each translation, when its file and keys are written, or that failed.
	translated func(cluster.Snapshot, translation.Result, outcome)
	turns      *turn.Taker // nil with a Gateway

	gateways []trench.Gateway // of the trench file on disk; nil before the first write
	turn     <-chan struct{}  // closed when a waiting change may have its turn; nil if none waits
	next     time.Time        // the earliest time of the next translation
	retry    backoff.Backoff
}

type outcome struct {
	took    time.Duration // duration of the translation
	latency time.Duration // from the first change to the end of the write
	wrote   bool          // a file on disk changed
	err     error         // of the write
}

// String implements task.Task.
func (*agent) String() string { return "trench file" }

// Run translates until ctx ends. Failed writes are retried with back-off.
func (a *agent) Run(ctx context.Context) error {
	a.retry = backoff.Backoff{Min: interval, Max: 5 * time.Second, Jitter: 0.1}
	var again <-chan time.Time // nil before the first failed write
	for {
		state, stateChanged := a.cluster.State().Get()
		// The stale file comes first: its readers must know that the trench file may be outdated.
		err := a.files.stale(state)
		if err != nil {
			a.log.Error("failed to say that the trench file is stale", "error", err)
			again = time.After(a.retry.Next())
		}
		select {
		// A new state alone changes the stale file, not the trench file.
		case <-stateChanged:
			continue
		case <-a.turn:
			a.turn = nil
		case <-again:
		case <-a.cluster.Changes():
			a.collect(ctx, a.cluster.Changes())
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := a.translate(); err != nil {
			again = time.After(a.retry.Next())
		} else {
			a.retry.Reset()
		}
	}
}

// collect waits, after the first change, for the end of the burst: settle after the last change,
// but at most interval after the first one, and not before the next translation is due.
func (a *agent) collect(ctx context.Context, changes <-chan struct{}) {
	begin := time.Now()
	due := begin.Add(settle)
	for {
		at := due
		// A longer pause also collects more changes in one write.
		if a.next.After(at) {
			at = a.next
		}
		select {
		case <-time.After(time.Until(at)):
			return
		case <-changes:
			due = time.Now().Add(settle)
			if last := begin.Add(interval); due.After(last) {
				due = last
			}
		case <-ctx.Done():
			return
		}
	}
}

// translate translates the newest snapshot, if any, and writes the result.
func (a *agent) translate() error {
	snapshot, ok := a.cluster.Snapshot()
	if !ok {
		return nil
	}
	begin := time.Now()
	result := a.translator(snapshot)
	o := outcome{took: time.Since(begin)}
	// Without a file the Trench is refused, and the previous file stays in force.
	if result.File != nil {
		o.wrote, o.err = a.write(result)
	}
	// Each write makes lb and frontend read the file again, so writes have a longer pause.
	a.next = time.Now().Add(min(pause*o.took, interval))
	if o.wrote {
		a.next = time.Now().Add(interval)
	}
	o.latency = time.Since(snapshot.Changed)
	if o.err != nil {
		a.log.Error("failed to write the trench file", "error", o.err)
	}
	a.translated(snapshot, result, o)
	return o.err
}
