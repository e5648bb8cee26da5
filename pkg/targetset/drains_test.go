package targetset

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestDrainsSurviveRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", "drains.json")
	now := time.Now()
	d := openDrains(t, path)
	if err := d.Drain(ID{"s", "a"}, 30*time.Second, now); err != nil {
		t.Fatal(err)
	}
	if err := d.Drain(ID{"s", "b"}, 0, now); err != nil {
		t.Fatal(err)
	}
	if err := d.Drain(ID{"other", "a"}, time.Hour, now); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := d.Undrain(ID{"s", "b"}); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-d.Changed():
	default:
		t.Error("no wake-up after a drain")
	}
	again := openDrains(t, path)
	select {
	case <-again.Changed():
	default:
		t.Error("no wake-up for the drains of the previous process")
	}
	all := again.All()
	if len(all) != 2 {
		t.Fatalf("%v", all)
	}
	if end := all[ID{"s", "a"}]; end.Before(now.Add(29*time.Second)) || end.After(now.Add(31*time.Second)) {
		t.Errorf("the drain ends at %v, ordered at %v for 30 s", end, now)
	}
	for at, want := range map[time.Time]time.Duration{
		now: 30 * time.Second, now.Add(10 * time.Second): 20 * time.Second, now.Add(time.Hour): 0,
		now.Add(-time.Hour): 30 * time.Second, // the clock was set back
	} {
		if left := remaining(now.Round(0), 30*time.Second, at); left != want {
			t.Errorf("after %v %v are left, want %v", at.Sub(now), left, want)
		}
	}
	all[ID{"s", "x"}] = now
	if len(again.All()) != 2 {
		t.Error("the caller of All can change the drains")
	}
}

func TestUnsavedDrainIsAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	d := openDrains(t, filepath.Join(file, "drains.json"))
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Drain(ID{"s", "a"}, time.Second, time.Now()); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("got %v", err)
	}
	if len(d.All()) != 0 {
		t.Error("it is drained all the same")
	}
	for _, id := range []ID{{"s", ""}, {"s", "a b"}, {"", "a"}} {
		if err := openDrains(t, "").Drain(id, time.Second, time.Now()); err == nil {
			t.Errorf("%v was drained", id)
		}
	}
	if err := openDrains(t, "").Drain(ID{"s", "a"}, -time.Second, time.Now()); err == nil {
		t.Error("a negative drain was taken")
	}
	// An existing file that cannot be read must not undrain anything.
	if _, err := OpenDrains(t.TempDir(), discard); err == nil {
		t.Error("a directory was read as the file")
	}
}

func TestCorruptDrainsAreSetAside(t *testing.T) {
	for _, content := range []string{
		"", "{", `{"version":7,"drains":[]}`,
		`{"version":1,"drains":[{"stream":"s","name":"a/b","at":"2026-01-01T00:00:00Z","for":"1s"}]}`,
		`{"version":1,"drains":[{"stream":"s","name":"a","at":"2026-01-01T00:00:00Z","for":"-1s"}]}`,
	} {
		path := filepath.Join(t.TempDir(), "drains.json")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		d, err := OpenDrains(path, slog.New(slog.NewTextHandler(&out, nil)))
		if err != nil || len(d.All()) != 0 {
			t.Fatalf("%q: %v, %v", content, d.All(), err)
		}
		aside, err := filepath.Glob(path + ".broken-*")
		if err != nil || len(aside) != 1 || !strings.Contains(out.String(), "level=ERROR") {
			t.Errorf("%q: moved aside %v, %v; log:\n%s", content, aside, err, out.String())
		}
		if err := d.Drain(ID{"s", "a"}, time.Second, time.Now()); err != nil {
			t.Error(err)
		}
		if all := openDrains(t, path).All(); all[ID{"s", "a"}].IsZero() {
			t.Errorf("%v", all)
		}
	}
}

func openDrains(t *testing.T, path string) *Drains {
	t.Helper()
	d, err := OpenDrains(path, discard)
	if err != nil {
		t.Fatal(err)
	}
	return d
}
