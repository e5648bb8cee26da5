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
	// write is durable.Write; tests replace it.
	write func(file string, content any) error
	log   *slog.Logger
}

func newHolds(options Options) holds {
	h := holds{until: map[string]time.Time{}, write: durable.Write, log: options.Log}
	if options.StateDir != "" {
		h.file = filepath.Join(options.StateDir, "dataplane-hold.json")
	}
	return h
}

// load reads an earlier process's holds. It moves a corrupt file aside and continues without holds.
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

func (h *holds) expire(now time.Time) {
	until := maps.Clone(h.until)
	for stream, end := range h.until {
		if !end.IsZero() && !now.Before(end) {
			delete(until, stream)
			h.log.Info("data plane hold expired", "stream", stream)
		}
	}
	h.until = until // the file contains the end times
}

// changeHolds changes the holds, and runs then. It writes the file first, so that a failure changes
// nothing. The disk may hang, so the goroutine of the engine does not write it.
func changeHolds[T any](
	ctx context.Context, plane *Plane, what string, change func(map[string]time.Time) error, then func(*engine) (T, error),
) (answer T, err error) {
	plane.holding.Lock()
	defer plane.holding.Unlock()
	changed, err := ask(ctx, plane, what, func(e *engine) (holds, error) {
		changed := e.holds
		changed.until = maps.Clone(changed.until)
		return changed, change(changed.until)
	})
	if err != nil {
		return answer, err
	}
	if changed.file != "" {
		if err := changed.write(changed.file, changed.until); err != nil {
			return answer, fmt.Errorf("%s: write hold of the data plane: %w", what, err)
		}
	}
	return ask(context.WithoutCancel(ctx), plane, what, func(e *engine) (T, error) {
		e.holds = changed
		return then(e)
	})
}

// Hold suspends the repair of drift of a stream, or of all streams with "", until Resume, or
// for d if d is not 0. The hold survives restarts.
func (plane *Plane) Hold(ctx context.Context, stream string, d time.Duration) (until time.Time, err error) {
	if d > 0 {
		until = time.Now().Add(d)
	}
	return changeHolds(ctx, plane, "hold the data plane", func(holds map[string]time.Time) error {
		// Strip the monotonic clock reading: the hold survives restarts.
		holds[stream] = until.Round(0)
		return nil
	}, func(e *engine) (time.Time, error) {
		e.log.Warn("data plane held: drift is shown and not repaired", "stream", stream, "until", until)
		return until, nil
	})
}

// Resume ends a hold, or all holds with "", and returns the repaired drift.
func (plane *Plane) Resume(ctx context.Context, stream string) ([]plan.Drift, error) {
	return changeHolds(ctx, plane, "resume the data plane", func(holds map[string]time.Time) error {
		_, ok := holds[stream]
		_, all := holds[allStreams]
		switch {
		case stream == allStreams:
			clear(holds)
		case !ok && all:
			return errors.New("all streams are held together; resume without a stream")
		case !ok:
			return fmt.Errorf("stream %s is not held", stream)
		}
		delete(holds, stream)
		return nil
	}, func(e *engine) ([]plan.Drift, error) {
		e.log.Info("data plane hold ended", "stream", stream)
		return e.reconcile(plane.desired.Load())
	})
}

// Reconcile immediately repairs all drift except in held streams, ignoring back-offs, and
// returns the repaired drift. It fails before the first Configure.
func (plane *Plane) Reconcile(ctx context.Context) ([]plan.Drift, error) {
	return ask(ctx, plane, "reconcile the data plane", func(e *engine) ([]plan.Drift, error) {
		return e.reconcile(plane.desired.Load())
	})
}
