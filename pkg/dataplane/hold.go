package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/durable"
)

// allStreams is the name under which every stream, and what no stream owns, is held.
const allStreams = ""

// holdDocument is the file that keeps holds over restarts.
type holdDocument struct {
	Version int         `json:"version"`
	Holds   []savedHold `json:"holds"`
}

type savedHold struct {
	// Stream is absent for all streams, and Until for a hold without an end.
	Stream string    `json:"stream,omitempty"`
	Until  time.Time `json:"until,omitzero"`
}

const holdVersion = 1

func (o Options) holdFile() string { return filepath.Join(o.StateDir, "dataplane-hold.json") }

// loadHolds reads the holds of an earlier process. A file that cannot be understood is
// moved aside, and nothing is held.
func loadHolds(o Options, log *slog.Logger) (map[string]time.Time, error) {
	holds := map[string]time.Time{}
	if o.StateDir == "" {
		return holds, nil
	}
	var d holdDocument
	_, found, err := durable.Read(o.holdFile(), &d)
	if err == nil && found && d.Version != holdVersion {
		err = fmt.Errorf("%s %w: version %d is not %d", o.holdFile(), durable.ErrBroken, d.Version, holdVersion)
	}
	switch {
	case errors.Is(err, durable.ErrBroken):
		durable.SetAside(o.holdFile(), err, time.Now(), log)
		return holds, nil
	case err != nil:
		return nil, err
	}
	for _, h := range d.Holds {
		holds[h.Stream] = h.Until
	}
	return holds, nil
}

// saveHolds writes them down.
func (o Options) saveHolds(holds map[string]time.Time) error {
	if o.StateDir == "" {
		return nil
	}
	d := holdDocument{Version: holdVersion, Holds: []savedHold{}}
	for _, stream := range slices.Sorted(maps.Keys(holds)) {
		d.Holds = append(d.Holds, savedHold{stream, holds[stream]})
	}
	return durable.Write(o.holdFile(), d)
}

// held reports whether drift of a stream is left alone; "" is what no stream owns.
func (e *engine) held(stream string) bool {
	if _, all := e.holds[allStreams]; all {
		return true
	}
	_, ok := e.holds[stream]
	return ok
}

// setHolds replaces the holds, in the file first.
func (e *engine) setHolds(holds map[string]time.Time) error {
	if err := e.o.saveHolds(holds); err != nil {
		return fmt.Errorf("hold of the data plane: %w", err)
	}
	e.holds = holds
	return nil
}

// hold begins or changes a hold; the zero time is no end.
func (e *engine) hold(stream string, until time.Time) error {
	holds := maps.Clone(e.holds)
	holds[stream] = until.Round(0)
	if err := e.setHolds(holds); err != nil {
		return err
	}
	e.log.Warn("data plane held: drift is shown and not repaired", "stream", stream, "until", until)
	return nil
}

// resume ends a hold, or all of them without a stream, and repairs what was held.
func (e *engine) resume(stream string, w *Wanted) ([]Drift, error) {
	holds := maps.Clone(e.holds)
	_, ok := holds[stream]
	_, all := holds[allStreams]
	switch {
	case stream == allStreams:
		clear(holds)
	case !ok && all:
		return nil, errors.New("all streams are held together; resume without a stream")
	case !ok:
		return nil, fmt.Errorf("stream %s is not held", stream)
	}
	delete(holds, stream)
	if err := e.setHolds(holds); err != nil {
		return nil, err
	}
	e.log.Info("data plane hold ended", "stream", stream)
	return e.reconcile(w)
}

// expireHolds ends the holds whose time is over, and returns when the next one ends.
func (e *engine) expireHolds() (next time.Time, ok bool) {
	holds := maps.Clone(e.holds)
	for stream, until := range e.holds {
		switch {
		case until.IsZero():
		case !e.now().Before(until):
			delete(holds, stream)
			e.log.Info("data plane hold expired", "stream", stream)
		case !ok || until.Before(next):
			next, ok = until, true
		}
	}
	if len(holds) == len(e.holds) {
		return next, ok
	}
	if err := e.setHolds(holds); err != nil {
		// The file still has it, with the same end.
		e.log.Warn("failed to write the expired hold down", "error", err)
		e.holds = holds
	}
	return next, ok
}

// Hold has the data plane leave alone what other processes change of a stream, or of all
// streams with "", until Resume or for d if that is not 0. It survives restarts.
func (p *Plane) Hold(ctx context.Context, stream string, d time.Duration) (until time.Time, err error) {
	if d > 0 {
		until = time.Now().Add(d)
	}
	failed := make(chan error, 1)
	if err := p.ask(ctx, func(e *engine) { failed <- e.hold(stream, until) }); err != nil {
		return until, fmt.Errorf("hold the data plane: %w", err)
	}
	return until, <-failed
}

// Resume ends what Hold began, all holds with "", and returns what was repaired.
func (p *Plane) Resume(ctx context.Context, stream string) ([]Drift, error) {
	return p.repair(ctx, "resume", func(e *engine) ([]Drift, error) { return e.resume(stream, p.wanted.Load()) })
}

// Reconcile repairs at once, also what is in back-off, except what is held, and returns
// what it repaired. Before the first Configure it refuses.
func (p *Plane) Reconcile(ctx context.Context) ([]Drift, error) {
	return p.repair(ctx, "reconcile", func(e *engine) ([]Drift, error) { return e.reconcile(p.wanted.Load()) })
}

func (p *Plane) repair(ctx context.Context, what string, do func(*engine) ([]Drift, error)) ([]Drift, error) {
	type answer struct {
		drift []Drift
		err   error
	}
	answers := make(chan answer, 1)
	err := p.ask(ctx, func(e *engine) {
		drift, err := do(e)
		answers <- answer{drift, err}
	})
	if err != nil {
		return nil, fmt.Errorf("%s the data plane: %w", what, err)
	}
	a := <-answers
	if a.err != nil {
		return a.drift, fmt.Errorf("%s the data plane: %w", what, a.err)
	}
	return a.drift, nil
}
