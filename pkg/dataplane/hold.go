package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"time"

	"github.com/vipgate/vipgate/pkg/durable"
)

// allStreams is the key of a hold of all streams and the common objects.
const allStreams = ""

func (o Options) holdFile() string { return filepath.Join(o.StateDir, "dataplane-hold.json") }

// loadHolds reads the holds of an earlier process. It moves a corrupt file aside and continues
// without holds.
func (e *engine) loadHolds() error {
	if e.o.StateDir == "" {
		return nil
	}
	var holds map[string]time.Time
	_, _, err := durable.Read(e.o.holdFile(), &holds)
	if errors.Is(err, durable.ErrCorrupt) {
		durable.SetAside(e.o.holdFile(), err, time.Now(), e.log)
		return nil
	}
	maps.Copy(e.holds, holds)
	return err
}

// held reports whether repairs of a stream, or of the common objects with "", are suspended.
func (e *engine) held(stream string) bool {
	_, all := e.holds[allStreams]
	_, one := e.holds[stream]
	return all || one
}

// setHolds replaces the holds. It writes the file first, so that a failure changes nothing.
func (e *engine) setHolds(holds map[string]time.Time) error {
	if e.o.StateDir != "" {
		if err := durable.Write(e.o.holdFile(), holds); err != nil {
			return fmt.Errorf("write hold of the data plane: %w", err)
		}
	}
	e.holds = holds
	return nil
}

// hold starts or changes a hold; the zero time is an unlimited hold.
func (e *engine) hold(stream string, until time.Time) error {
	holds := maps.Clone(e.holds)
	holds[stream] = until.Round(0)
	if err := e.setHolds(holds); err != nil {
		return err
	}
	e.log.Warn("data plane held: drift is shown and not repaired", "stream", stream, "until", until)
	return nil
}

// resume ends the hold of a stream, or all holds with "", and repairs the held drift.
func (e *engine) resume(stream string, w *Desired) ([]Drift, error) {
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

// expireHolds ends expired holds.
func (e *engine) expireHolds() {
	holds := maps.Clone(e.holds)
	for stream, until := range e.holds {
		if !until.IsZero() && !e.now().Before(until) {
			delete(holds, stream)
			e.log.Info("data plane hold expired", "stream", stream)
		}
	}
	if len(holds) == len(e.holds) {
		return
	}
	if err := e.setHolds(holds); err != nil {
		e.log.Warn("failed to write holds", "error", err) // the file contains the end times
	}
	e.holds = holds
}

// Hold suspends the repair of drift of a stream, or of all streams with "", until Resume, or
// for d if d is not 0. The hold survives restarts.
func (p *Plane) Hold(ctx context.Context, stream string, d time.Duration) (until time.Time, err error) {
	if d > 0 {
		until = time.Now().Add(d)
	}
	return ask(ctx, p, "hold the data plane", func(e *engine) (time.Time, error) { return until, e.hold(stream, until) })
}

// Resume ends a hold, or all holds with "", and returns the repaired drift.
func (p *Plane) Resume(ctx context.Context, stream string) ([]Drift, error) {
	return ask(ctx, p, "resume the data plane", func(e *engine) ([]Drift, error) {
		return e.resume(stream, p.desired.Load())
	})
}

// Reconcile immediately repairs all drift except in held streams, ignoring back-offs, and
// returns the repaired drift. It fails before the first Configure.
func (p *Plane) Reconcile(ctx context.Context) ([]Drift, error) {
	return ask(ctx, p, "reconcile the data plane", func(e *engine) ([]Drift, error) {
		return e.reconcile(p.desired.Load())
	})
}
