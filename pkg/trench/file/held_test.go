package file

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
)

// holdNames holds every change of the trench's name until a confirmation.
func holdNames(inForce, next *trench.Config, _ trench.Held, confirmed string) (*trench.Config, trench.Held) {
	if inForce.Trench == next.Trench || confirmed == "v00000001" {
		return next, trench.Held{}
	}
	return inForce, trench.Held{ID: "v00000001", Gateways: []string{inForce.Trench}}
}

// holding runs a watcher of the trench one with a function that holds removals.
func holding(t *testing.T, path string,
	hold func(_, _ *trench.Config, _ trench.Held, _ string) (*trench.Config, trench.Held), waits func() bool,
) *Watcher {
	t.Helper()
	write(t, path, named("one"))
	initial, err := Read(path, trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	w := NewWatcher(path, trench.DefaultDefaults(), initial, slog.New(slog.DiscardHandler))
	w.Hold, w.Waits, w.poll = hold, waits, soon
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- task.Guard(ctx, w.String(), w.Run) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	<-w.Ready()
	return w
}

func TestConfirmation(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trench.yaml")
	w := holding(t, path, holdNames, nil)
	confirm := func(identifier, problem string) {
		t.Helper()
		_, err := w.Confirm(identifier)
		if (err == nil) != (problem == "") || err != nil && !strings.Contains(err.Error(), problem) {
			t.Errorf("%q was confirmed with %v, want %q", identifier, err, problem)
		}
	}
	held := func(l trench.Loaded) bool { return l.Err == nil && l.Held.ID != "" }

	confirm("", "no removal waits")
	replace(t, path, named("two"))
	if l := awaitLoaded(t, w, "the hold", held); l.Config.Trench != "one" || l.Generation != 1 {
		t.Errorf("got %+v", l)
	}
	confirm("v00000002", "v00000001 does: the removal of the last gateways")
	// What a refused file replaced is not confirmed.
	replace(t, path, strings.Replace(named("two"), "name: gw4", "name: g 4", 1))
	awaitLoaded(t, w, "the refusal", func(l trench.Loaded) bool { return l.Err != nil })
	confirm("", "the newest configuration is refused")
	replace(t, path, named("two"))
	awaitLoaded(t, w, "the hold", held)
	confirm("v00000001", "")
	if l := awaitLoaded(t, w, "the confirmed file", inForce("two")); l.Held.ID != "" || l.Generation != 2 {
		t.Errorf("got %+v", l)
	}
	// The confirmation was for one hold.
	replace(t, path, named("one"))
	awaitLoaded(t, w, "the hold", held)
	replace(t, path, named("two"))
	l := awaitLoaded(t, w, "the end of the hold", func(l trench.Loaded) bool { return l.Held.ID == "" })
	if l.Generation != 2 {
		t.Errorf("got %+v", l)
	}
}

// The confirmation of a part ends with it, although another part waits.
func TestConfirmationOfPart(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trench.yaml")
	hold := func(inForce, next *trench.Config, _ trench.Held, confirmed string) (*trench.Config, trench.Held) {
		check := trench.Held{ID: "c00000002", Checks: []string{"s"}}
		if inForce.Trench == next.Trench || strings.Contains(confirmed, "v00000001") {
			return next, check
		}
		return inForce, trench.Held{ID: "c00000002,v00000001", Checks: check.Checks, Gateways: []string{"g"}}
	}
	w := holding(t, path, hold, nil)
	both := func(l trench.Loaded) bool { return l.Held.Count() == 2 }
	replace(t, path, named("two"))
	awaitLoaded(t, w, "the hold", both)
	if held, err := w.Confirm("v00000001"); err != nil || held.ID != "v00000001" || held.Count() != 1 {
		t.Errorf("confirmed %+v (%v)", held, err)
	}
	awaitLoaded(t, w, "the confirmed file", inForce("two"))
	replace(t, path, named("one"))
	if l := awaitLoaded(t, w, "the hold", both); l.Config.Trench != "two" {
		t.Errorf("got %+v", l)
	}
}

// A hold whose reason is gone ends without another event.
func TestHoldIsReviewed(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trench.yaml")
	var failed atomic.Bool
	w := holding(t, path, func(inForce, next *trench.Config, before trench.Held, _ string) (*trench.Config, trench.Held) {
		if failed.Load() {
			return next, trench.Held{}
		}
		return holdNames(inForce, next, before, "")
	}, nil)
	replace(t, path, named("two"))
	awaitLoaded(t, w, "the hold", func(l trench.Loaded) bool { return l.Held.ID != "" })
	failed.Store(true)
	if l := awaitLoaded(t, w, "the file", inForce("two")); l.Held.ID != "" {
		t.Errorf("got %+v", l)
	}
}

// A part of the configuration in force may wait from a later time on.
func TestHoldBeginsLater(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trench.yaml")
	var failed atomic.Bool
	w := holding(t, path, func(_, next *trench.Config, _ trench.Held, _ string) (*trench.Config, trench.Held) {
		if failed.Load() {
			return next, trench.Held{ID: "c00000001", Checks: []string{"s"}}
		}
		return next, trench.Held{}
	}, failed.Load)
	replace(t, path, named("two"))
	awaitLoaded(t, w, "the file", inForce("two"))
	for _, waits := range []bool{true, false} {
		failed.Store(waits)
		l := awaitLoaded(t, w, "the change", func(l trench.Loaded) bool { return l.Held.Count() > 0 == waits })
		if l.Generation != 2 || l.Config.Trench != "two" {
			t.Errorf("got %+v", l)
		}
	}
}
