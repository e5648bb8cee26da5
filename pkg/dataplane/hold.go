package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/durable"
)

// allStreams is the key of a hold of all streams and the common objects.
const allStreams = ""

// holds suspends repairs.
type holds struct {
	// until maps the streams whose drift is not repaired to the end of the hold. The key allStreams
	// holds every stream; the zero time is an unlimited hold.
	until map[string]time.Time
	// file stores the holds across restarts; "" keeps them in memory only.
	file string
	log  *slog.Logger
}

func newHolds(options Options) holds {
	h := holds{until: map[string]time.Time{}, log: options.Log}
	if options.StateDir != "" {
		h.file = filepath.Join(options.StateDir, "dataplane-hold.json")
	}
	return h
}

// load reads the holds of an earlier process. It moves a corrupt file aside and continues
// without holds.
func (h *holds) load() error {
	if h.file == "" {
		return nil
	}
	var until map[string]time.Time
	_, _, err := durable.Read(h.file, &until)
	if errors.Is(err, durable.ErrCorrupt) {
		durable.SetAside(h.file, err, time.Now(), h.log)
		return nil
	}
	maps.Copy(h.until, until)
	return err
}

// held reports whether repairs of a stream, or of the common objects with "", are suspended.
func (h *holds) held(stream string) bool {
	_, all := h.until[allStreams]
	_, one := h.until[stream]
	return all || one
}

// set replaces the holds. It writes the file first, so that a failure changes nothing.
func (h *holds) set(until map[string]time.Time) error {
	if h.file != "" {
		if err := durable.Write(h.file, until); err != nil {
			return fmt.Errorf("write hold of the data plane: %w", err)
		}
	}
	h.until = until
	return nil
}

// begin starts or changes a hold; the zero time is an unlimited hold.
func (h *holds) begin(stream string, end time.Time) error {
	until := maps.Clone(h.until)
	// Strip the monotonic clock reading: the hold survives restarts.
	until[stream] = end.Round(0)
	if err := h.set(until); err != nil {
		return err
	}
	h.log.Warn("data plane held: drift is shown and not repaired", "stream", stream, "until", end)
	return nil
}

// end ends the hold of a stream, or all holds with "".
func (h *holds) end(stream string) error {
	until := maps.Clone(h.until)
	_, ok := until[stream]
	_, all := until[allStreams]
	switch {
	case stream == allStreams:
		clear(until)
	case !ok && all:
		return errors.New("all streams are held together; resume without a stream")
	case !ok:
		return fmt.Errorf("stream %s is not held", stream)
	}
	delete(until, stream)
	if err := h.set(until); err != nil {
		return err
	}
	h.log.Info("data plane hold ended", "stream", stream)
	return nil
}

// expire ends expired holds.
func (h *holds) expire(now time.Time) {
	until := maps.Clone(h.until)
	for stream, end := range h.until {
		if !end.IsZero() && !now.Before(end) {
			delete(until, stream)
			h.log.Info("data plane hold expired", "stream", stream)
		}
	}
	if len(until) == len(h.until) {
		return
	}
	if err := h.set(until); err != nil {
		h.log.Warn("failed to write holds", "error", err) // the file contains the end times
	}
	h.until = until
}

// Hold suspends the repair of drift of a stream, or of all streams with "", until Resume, or
// for d if d is not 0. The hold survives restarts.
func (plane *Plane) Hold(ctx context.Context, stream string, d time.Duration) (until time.Time, err error) {
	if d > 0 {
		until = time.Now().Add(d)
	}
	return ask(ctx, plane, "hold the data plane", func(e *engine) (time.Time, error) {
		return until, e.holds.begin(stream, until)
	})
}

// Resume ends a hold, or all holds with "", and returns the repaired drift.
func (plane *Plane) Resume(ctx context.Context, stream string) ([]plan.Drift, error) {
	return ask(ctx, plane, "resume the data plane", func(e *engine) ([]plan.Drift, error) {
		return e.resume(stream, plane.desired.Load())
	})
}

// Reconcile immediately repairs all drift except in held streams, ignoring back-offs, and
// returns the repaired drift. It fails before the first Configure.
func (plane *Plane) Reconcile(ctx context.Context) ([]plan.Drift, error) {
	return ask(ctx, plane, "reconcile the data plane", func(e *engine) ([]plan.Drift, error) {
		return e.reconcile(plane.desired.Load())
	})
}
