package kube

import (
	"context"
	"log/slog"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/translation"
)

const (
	// settle is how long a change waits for others of the same burst, such as those of 1 000 pods.
	settle = 5 * time.Millisecond
	// interval is the least time between two writes, and the longest that a burst is collected.
	interval = 100 * time.Millisecond
	// pause is the least time between two translations, as a multiple of what the last one took: a
	// stream of changes that matter to no target takes a fifth of a CPU.
	pause = 4
)

// agent translates each snapshot and writes the result. It implements task.Task.
type agent struct {
	cluster    *cluster.Cluster
	translator func(cluster.Snapshot) translation.Result
	files      *files
	log        *slog.Logger
	// translated is called after each translation of which file and keys are on disk.
	translated func(cluster.Snapshot, translation.Result, outcome)

	next  time.Time // of the next translation at the earliest
	retry backoff.Backoff
}

// outcome is what became of a translation.
type outcome struct {
	took    time.Duration // by the translation
	latency time.Duration // from the first change to the end of the write
	wrote   bool          // some file has changed
	err     error         // of writing
}

// String implements task.Task.
func (*agent) String() string { return "trench file" }

// Run translates until ctx ends.
func (a *agent) Run(ctx context.Context) error {
	a.retry = backoff.Backoff{Min: interval, Max: 5 * time.Second, Jitter: 0.1}
	again := time.NewTimer(0)
	defer again.Stop()
	again.Stop()
	for {
		state, stateChanged := a.cluster.State().Get()
		err := a.files.stale(state)
		if err != nil {
			a.log.Error("failed to say that the trench file is stale", "error", err)
			again.Reset(a.retry.Next())
		}
		select {
		case <-stateChanged:
			continue
		case <-again.C:
		case <-a.cluster.Changes():
			a.collect(ctx, a.cluster.Changes())
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := a.translate(); err != nil {
			again.Reset(a.retry.Next())
		} else {
			a.retry.Reset()
		}
	}
}

// collect waits, after the first change, until a burst of changes is over.
func (a *agent) collect(ctx context.Context, changes <-chan struct{}) {
	begin := time.Now()
	due := begin.Add(settle)
	for {
		at := due
		if a.next.After(at) {
			at = a.next
		}
		timer := time.NewTimer(time.Until(at))
		select {
		case <-timer.C:
			return
		case <-changes:
			timer.Stop()
			due = time.Now().Add(settle)
			if last := begin.Add(interval); due.After(last) {
				due = last
			}
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// translate writes the translation of the newest snapshot, if there is one.
func (a *agent) translate() error {
	snapshot, ok := a.cluster.Snapshot()
	if !ok {
		return nil
	}
	begin := time.Now()
	result := a.translator(snapshot)
	o := outcome{took: time.Since(begin)}
	if result.File != nil {
		o.wrote, o.err = a.files.write(result)
	}
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
