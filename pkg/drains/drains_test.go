package drains

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/test/harness"
)

// key is a key that refuses "".
type key string

func (k *key) UnmarshalText(text []byte) error {
	if *k = key(text); *k == "" {
		return errors.New("no key")
	}
	return nil
}

func TestDrainsSurviveRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", "drains.json")
	now := time.Now()
	d := open(t, path)
	drain := func(length, lasts time.Duration, keys ...key) {
		t.Helper()
		for _, k := range keys {
			harness.Must(t, d.Drain(now, map[key]Drain{k: New(now, length, lasts)}))
		}
	}
	drain(30*time.Second, 0, "a")
	drain(0, 0, "b", "c")
	drain(0, time.Hour, "d")
	for range 2 {
		harness.Must(t, d.Undrain(now, "b"))
	}
	again := open(t, path)
	for _, d := range []*Drains[key]{d, again} {
		select {
		case <-d.Changed():
		default:
			t.Error("no wake-up")
		}
	}
	all, next := again.All(now)
	if len(all) != 3 {
		t.Fatalf("%v", all)
	}
	if end := all["a"].End; end.Before(now.Add(29*time.Second)) || end.After(now.Add(31*time.Second)) {
		t.Errorf("the drain ends at %v, ordered at %v for 30 s", end, now)
	}
	lasts := all["d"].Over.Sub(now)
	if !next.Equal(all["d"].Over) || lasts > 61*time.Minute || lasts < 59*time.Minute || !all["a"].Over.IsZero() {
		t.Errorf("%v, next %v, ordered at %v for an hour", all, next, now)
	}
	all["x"] = Drain{}
	if all, _ := again.All(now); len(all) != 3 {
		t.Error("the caller of All can change the drains")
	}
}

func TestRemainingTime(t *testing.T) {
	now := time.Now()
	for at, want := range map[time.Time]time.Duration{
		now: 30 * time.Second, now.Add(10 * time.Second): 20 * time.Second, now.Add(time.Hour): 0,
		now.Add(-time.Hour): 30 * time.Second, // the clock was set back
	} {
		if left := remaining(now.Round(0), 30*time.Second, at); left != want {
			t.Errorf("after %v %v are left, want %v", at.Sub(now), left, want)
		}
	}
}

// A drain that ends by itself ends in a running process, and while no process runs.
func TestDrainEndsByItself(t *testing.T) {
	path := filepath.Join(t.TempDir(), "drains.json")
	synctest.Test(t, func(t *testing.T) {
		d := open(t, path)
		harness.Must(t, d.Drain(time.Now(), map[key]Drain{"a": New(time.Now(), time.Second, time.Minute)}))
		has := func(d *Drains[key]) bool { all, _ := d.All(time.Now()); return len(all) == 1 }
		time.Sleep(time.Minute - time.Nanosecond)
		if again := open(t, path); !has(d) || !has(again) {
			t.Error("it ended early")
		}
		time.Sleep(time.Nanosecond)
		if again := open(t, path); has(d) || has(again) {
			t.Error("it did not end")
		}
		// Another order removes the ended one from the file.
		harness.Must(t, d.Drain(time.Now(), map[key]Drain{"b": {}}))
		if text, err := os.ReadFile(path); err != nil || strings.Contains(string(text), `"a"`) {
			t.Errorf("%s, %v", text, err)
		}
	})
}

func TestUnsavedDrainIsAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	d := open(t, filepath.Join(file, "drains.json"))
	harness.Must(t, os.WriteFile(file, nil, 0o600))
	now := time.Now()
	err := d.Drain(now, map[key]Drain{"a": New(now, time.Second, 0)})
	harness.WantError(t, err, file)
	if all, _ := d.All(now); len(all) != 0 {
		t.Error("it is drained all the same")
	}
	// An existing file that cannot be read must not undrain anything.
	if _, err := Open[key](t.TempDir(), slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a directory was read as the file")
	}
}

func TestCorruptDrainsAreSetAside(t *testing.T) {
	for _, content := range []string{
		"", "{", `{"version":7,"drains":{}}`,
		`{"version":2,"drains":{"":{"at":"2026-01-01T00:00:00Z","for":"1s"}}}`,
		`{"version":2,"drains":{"a":{"at":"2026-01-01T00:00:00Z","for":"-1s"}}}`,
	} {
		path := filepath.Join(t.TempDir(), "drains.json")
		harness.Must(t, os.WriteFile(path, []byte(content), 0o600))
		var out bytes.Buffer
		now := time.Now()
		d, err := Open[key](path, slog.New(slog.NewTextHandler(&out, nil)))
		if err != nil {
			t.Fatalf("%q: %v", content, err)
		}
		aside, err := filepath.Glob(path + ".broken-*")
		if err != nil || len(aside) != 1 || !strings.Contains(out.String(), "level=ERROR") {
			t.Errorf("%q: moved aside %v, %v; log:\n%s", content, aside, err, out.String())
		}
		harness.Check(t, d.Drain(now, map[key]Drain{"a": New(now, time.Second, 0)}))
		if all, _ := open(t, path).All(now); len(all) != 1 {
			t.Errorf("%q: %v", content, all)
		}
	}
}

func open(t *testing.T, path string) *Drains[key] {
	t.Helper()
	d, err := Open[key](path, slog.New(slog.DiscardHandler))
	harness.Must(t, err)
	return d
}
