package registry

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

func TestRegistrationsSurviveRestart(t *testing.T) {
	for _, tt := range []struct {
		away   time.Duration
		onGone targetset.SourceGonePolicy
		want   []string
		later  []string // 6 s after the start
	}{
		{
			0, targetset.Drain,
			[]string{"a 10.0.0.1, fd00::1", "b 10.0.0.2 terminating 19s: deregistered"},
			[]string{
				"a 10.0.0.1, fd00::1 leaving 9s: its registration ended",
				"b 10.0.0.2 terminating 13s: deregistered",
			},
		},
		{
			4 * time.Second, targetset.Drop,
			[]string{"a 10.0.0.1, fd00::1", "b 10.0.0.2 terminating 15s: deregistered"},
			[]string{"b 10.0.0.2 terminating 9s: deregistered"},
		},
		{
			6 * time.Second, targetset.Drain,
			[]string{"b 10.0.0.2 terminating 13s: deregistered"},
			[]string{"b 10.0.0.2 terminating 7s: deregistered"},
		},
		{time.Hour, targetset.Drain, nil, nil},
		{
			time.Hour, targetset.Hold,
			[]string{"a 10.0.0.1, fd00::1: its registration ended"},
			[]string{"a 10.0.0.1, fd00::1: its registration ended"},
		},
	} {
		t.Run(fmt.Sprintf("%v away, %v", tt.away, tt.onGone), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				path := stateIn(t)
				before := newLocalFixture(t, Options{OnGone: tt.onGone, StateFile: path})
				before.register(alice, "s", "a=10.0.0.1,fd00::1")
				before.register(alice, "s", "b=10.0.0.2")
				if _, err := before.deregister(alice, "s", []string{"b"}, new(20*time.Second)); err != nil {
					t.Fatal(err)
				}
				advance(time.Second)
				before.stop()
				if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
					t.Fatal(info, err)
				}
				advance(tt.away)
				after := newLocalFixture(t, Options{OnGone: tt.onGone, StateFile: path})
				defer after.stop()
				after.offers("s", tt.want...)
				advance(6 * time.Second)
				after.offers("s", tt.later...)
			})
		})
	}
}

// A stream is restored once each of its targets in the state file is registered: immediately after
// a short downtime, and after a long downtime once all callers have returned.
func TestRestoredStreams(t *testing.T) {
	for _, away := range []time.Duration{time.Second, time.Hour} {
		t.Run(away.String(), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				path := stateIn(t)
				before := newLocalFixture(t, Options{OnGone: targetset.Drain, StateFile: path})
				before.register(alice, "s", "a=10.0.0.1")
				before.register(alice, "s", "b=10.0.0.2")
				before.register(alice, "s", "gone=10.0.0.3")
				if _, err := before.deregister(alice, "s", []string{"gone"}, new(time.Minute)); err != nil {
					t.Fatal(err)
				}
				if before.Restored("s") {
					t.Error("restored without a state file")
				}
				before.stop()
				advance(away)
				after := newLocalFixture(t, Options{OnGone: targetset.Drain, StateFile: path})
				defer after.stop()
				check := func(step string, want bool) {
					if got := after.Restored("s"); got != want {
						t.Errorf("%s: restored %v, want %v", step, got, want)
					}
				}
				short := away < time.Minute
				check("at the start", short)
				after.register(alice, "s", "b=10.0.0.2")
				check("one caller is back", short)
				after.register(alice, "s", "a=10.0.0.1")
				check("both callers are back", true)
				if after.Restored("other") {
					t.Error("a stream that had no targets is restored")
				}
			})
		})
	}
}

// The caller returns: its target is unchanged, and it still owns the target.
func TestReregisterAfterRestart(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		path := stateIn(t)
		before := newLocalFixture(t, Options{OnGone: targetset.Drain, StateFile: path})
		before.register(alice, "s", "a=10.0.0.1")
		before.register(theOperator, "s", "b=10.0.0.2")
		advance(10 * time.Second)
		before.stop()
		after := newLocalFixture(t, Options{OnGone: targetset.Drain, StateFile: path})
		defer after.stop()
		after.offers("s", "a 10.0.0.1", "b 10.0.0.2")
		_, err := after.open(bob, announce("s", "a=10.0.0.1"))
		after.refuses("another's", err, "AlreadyExists")
		after.register(alice, "s", "a=10.0.0.1")
		after.register(theOperator, "s", "b=10.0.0.2")
		advance(time.Hour)
		if after.changes() {
			t.Errorf("a change was reported: %v", after.offer)
		}
	})
}

func TestRevokedAllowanceAfterRestart(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		path := stateIn(t)
		before := newLocalFixture(t, Options{StateFile: path})
		before.register(alice, "s", "a=10.0.0.1")
		before.register(bob, "s", "b=10.0.0.2")
		advance(time.Second)
		before.stop()
		after := newLocalFixture(t, Options{StateFile: path, Allow: allowances(t, bob.String())})
		defer after.stop()
		after.offers("s", "b 10.0.0.2")
	})
}

// A killed process does not stamp the file, so the time of its end is known to within a second.
func TestStateFileIsStamped(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		path := stateIn(t)
		c := newLocalFixture(t, Options{StateFile: path})
		defer c.stop()
		c.register(alice, "s", "a=10.0.0.1")
		for range 5 {
			advance(10 * time.Second)
			info, err := os.Stat(path)
			harness.Must(t, err)
			if age := time.Since(info.ModTime()); age < 0 || age > stampEvery {
				t.Fatalf("the stamp is %v old", age)
			}
		}
		// A removed file is restored.
		harness.Must(t, os.Remove(path))
		advance(3 * time.Second)
		if data, err := os.ReadFile(path); err != nil || !bytes.Contains(data, []byte("10.0.0.1")) {
			t.Fatalf("%s, %v", data, err)
		}
	})
}

func TestCorruptStateFileIsMovedAside(t *testing.T) {
	good := `{"version":1,"registrations":[` +
		`{"stream":"s","name":"a","addresses":["10.0.0.1"],"owner":"operator","grace":"5s"}]}`
	for name, content := range map[string]string{
		"torn":            good[:len(good)/2],
		"empty":           "",
		"zeros":           strings.Repeat("\x00", 4096),
		"something after": good + good,
		"another version": strings.Replace(good, `"version":1`, `"version":2`, 1),
		"no version":      `{}`,
		"unknown field":   strings.Replace(good, `"grace"`, `"grease":1,"grace"`, 1),
		"bad name":        strings.Replace(good, `"a"`, `"a b"`, 1),
		"bad address":     strings.Replace(good, "10.0.0.1", "10.0.0", 1),
		"empty address":   strings.Replace(good, "10.0.0.1", "", 1),
		"no address":      strings.Replace(good, `"10.0.0.1"`, "", 1),
		"bad owner":       strings.Replace(good, "operator", "root", 1),
		"bad grace":       strings.Replace(good, "5s", "five", 1),
		"negative grace":  strings.Replace(good, "5s", "-5s", 1),
		"a drain of no end": strings.Replace(good, `"grace"`, `"drain":"x","drain_end":"2026-01-01T00:00:00Z","grace"`,
			1),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "registry.json")
			harness.Must(t, os.WriteFile(path, []byte(content), 0o600))
			var out bytes.Buffer
			c := newLocalFixture(t, Options{StateFile: path, Log: slog.New(slog.NewTextHandler(&out, nil))})
			c.offers("s")
			c.register(alice, "s", "a=10.0.0.1")
			c.stop()
			aside, err := filepath.Glob(path + ".broken-*")
			if err != nil || len(aside) != 1 {
				t.Fatalf("moved aside: %v, %v", aside, err)
			}
			if kept, err := os.ReadFile(aside[0]); err != nil || string(kept) != content {
				t.Errorf("what was moved aside is %q, %v", kept, err)
			}
			if log := out.String(); strings.Count(log, "level=ERROR") != 1 || !strings.Contains(log, aside[0]) {
				t.Errorf("the log:\n%s", log)
			}
			// What came after it is kept.
			c = newLocalFixture(t, Options{StateFile: path})
			defer c.stop()
			c.offers("s", "a 10.0.0.1")
		})
	}
}

func TestFailedWritesRefuseNothing(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, dir string) (path string, repair func()){
		"a file where the directory should be": func(t *testing.T, dir string) (string, func()) {
			file := filepath.Join(dir, "file")
			harness.Must(t, os.WriteFile(file, nil, 0o600))
			return filepath.Join(file, "registry.json"), func() {
				harness.Check(t, os.Remove(file))
			}
		},
		"a full disk": func(t *testing.T, dir string) (string, func()) {
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8k"); err != nil {
				lab.Skip(t, "a tmpfs that can be mounted: "+err.Error())
			}
			t.Cleanup(func() { harness.Must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
			hog := filepath.Join(dir, "hog")
			for file, content := range map[string]string{
				filepath.Join(dir, "registry.json"): `{"version":1,"registrations":[]}`, hog: strings.Repeat("x", 4096),
			} {
				harness.Must(t, os.WriteFile(file, []byte(content), 0o600))
			}
			return filepath.Join(dir, "registry.json"), func() {
				harness.Check(t, os.Remove(hog))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			path, repair := spoil(t, t.TempDir())
			inBubble(t, func(t *testing.T) {
				var out bytes.Buffer
				c := newLocalFixture(t, Options{StateFile: path, Log: slog.New(slog.NewTextHandler(&out, nil))})
				defer c.stop()
				c.register(alice, "s", "a=10.0.0.1")
				advance(time.Minute)
				c.offers("s", "a 10.0.0.1")
				if p := c.State().Problems; len(p) != 1 ||
					!strings.Contains(p[0], "registrations will not survive a restart: failed to write "+path) {
					t.Errorf("problems: %q", p)
				}
				changed := func() bool {
					select {
					case <-c.Changed():
						return true
					default:
						return false
					}
				}
				changed() // by the registration
				repair()
				advance(maxStateBackoff + time.Second)
				if !changed() {
					t.Error("the repair does not wake the reader of the state")
				}
				if p := c.State().Problems; len(p) != 0 {
					t.Errorf("problems after the repair: %q", p)
				}
				if data, err := os.ReadFile(path); err != nil || !bytes.Contains(data, []byte("10.0.0.1")) {
					t.Errorf("%s, %v", data, err)
				}
				if log := out.String(); strings.Count(log, "level=ERROR") != 1 ||
					strings.Count(log, "survive a restart again") != 1 {
					t.Errorf("the log:\n%s", log)
				}
				c.state.note(unix.EIO)
				first := changed()
				c.state.note(unix.ENOSPC)
				if second := changed(); !first || second {
					t.Errorf("the first failure wakes the reader: %v; the second: %v", first, second)
				}
			})
		})
	}
}

func TestChangesAreWrittenTogether(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		path := stateIn(t)
		c := newLocalFixture(t, Options{StateFile: path})
		defer c.stop()
		for i := range 100 {
			c.register(alice, "s", fmt.Sprintf("t%d=10.0.0.%d", i, i+1))
		}
		advance(3 * writeGap)
		data, err := os.ReadFile(path)
		if err != nil || bytes.Count(data, []byte(`"name"`)) != 100 {
			t.Fatalf("%d are written, %v", bytes.Count(data, []byte(`"name"`)), err)
		}
		entries, err := os.ReadDir(filepath.Dir(path))
		if err != nil || len(entries) != 1 {
			t.Errorf("left behind: %v, %v", entries, err)
		}
	})
}

// Registrations whose grace period ends before a trench file is accepted drain once one is.
func TestGraceEndsBeforeConfiguration(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		options := Options{OnGone: targetset.Drain, StateFile: stateIn(t)}
		before := newLocalFixture(t, options)
		before.register(alice, "s", "a=10.0.0.1")
		advance(time.Second)
		before.stop()
		options.Allow, options.Grace = before.Allow, before.Grace
		after := &localFixture{Registry: New(options), t: t, offer: targetset.Offers{}}
		after.stop = harness.Run(t, func(ctx context.Context) error { return task.Guard(ctx, "registry", after.Run) })
		defer after.stop()
		advance(20 * time.Second)
		after.Configure(testStreams, targetset.AddressPolicy{})
		advance(0)
		after.offers("s", "a 10.0.0.1 leaving 10s: its registration ended")
		advance(11 * time.Second)
		after.offers("s")
	})
}
