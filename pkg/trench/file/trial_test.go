package file

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
)

// trialFixture is a state directory and a trench file.
type trialFixture struct {
	*testing.T
	dir, path string
	overdue   atomic.Int64
	last      *Trial
}

// write replaces the trench file; VIPs tell the configurations apart.
func (f *trialFixture) write(vip string) {
	f.Helper()
	if err := os.WriteFile(f.path, []byte(trenchOf(vip)), 0o600); err != nil {
		f.Fatal(err)
	}
}

func trenchOf(vip string) string {
	return "trench: red\nattractor:\n  name: a\n  vips: [" + vip + "]\n"
}

// open returns the trial of the next process. The kernel has released the lock of the last one.
func (f *trialFixture) open() *Trial {
	if f.last != nil && f.last.lock != nil {
		f.last.lock.Release()
	}
	f.last = OpenTrial(f.dir, slog.New(slog.DiscardHandler))
	return f.last
}

// read begins a process that ends before Run.
func (f *trialFixture) read() (*Trial, error) {
	trial := f.open()
	_, err := trial.Read(f.path, trench.DefaultDefaults())
	return trial, err
}

// edit replaces the file of a running process, which accepts it.
func (f *trialFixture) edit(trial *Trial, vip string) {
	f.Helper()
	f.write(vip)
	config, err := Read(f.path, trench.DefaultDefaults())
	if err != nil {
		f.Fatal(err)
	}
	trial.Begin(config.Digest)
	trial.Accept(config.Digest, config, false)
}

// start begins a process, runs it for a time, and returns its trial and the VIP in force.
func (f *trialFixture) start(runs time.Duration) (*Trial, string, error) {
	f.Helper()
	trial := f.open()
	config, err := trial.Read(f.path, trench.DefaultDefaults())
	trial.Overdue = func() time.Duration { return time.Duration(f.overdue.Load()) }
	ctx, cancel := context.WithTimeout(f.Context(), runs)
	defer cancel()
	if failure := trial.Run(ctx); !errors.Is(failure, context.DeadlineExceeded) {
		f.Fatal(failure)
	}
	if config == nil {
		return trial, "", err
	}
	return trial, config.Attractor.VIPs[0].String(), err
}

// wants starts a process and compares the VIP in force and a part of the error.
func (f *trialFixture) wants(runs time.Duration, vip, refused string) *Trial {
	f.Helper()
	trial, got, err := f.start(runs)
	if got != vip || (err == nil) != (refused == "") || err != nil && !strings.Contains(err.Error(), refused) {
		f.Fatalf("%s is in force (%v), want %s and the error %q", got, err, vip, refused)
	}
	return trial
}

const (
	goodVIP, badVIP, newVIP = "20.0.0.1/32", "20.0.0.2/32", "20.0.0.3/32"
	long                    = trialTime + 2*time.Second
)

func TestTrial(t *testing.T) {
	failed := errors.New("task loop: panic: no\nstack")
	tests := map[string]func(f *trialFixture){
		"failed task": func(f *trialFixture) {
			f.wants(0, badVIP, "").Fail(failed)
			f.wants(long, goodVIP, "(task loop: panic: no)")
			f.wants(0, goodVIP, "task loop") // also at the start after the next one
			f.write(newVIP)
			f.wants(0, newVIP, "")
		},
		"killed once": func(f *trialFixture) {
			f.wants(0, badVIP, "")
			f.wants(long, badVIP, "")
			f.wants(0, badVIP, "")
			f.wants(0, badVIP, "")
		},
		"killed twice": func(f *trialFixture) {
			f.wants(0, badVIP, "")
			f.wants(trialTime/2, badVIP, "")
			f.wants(0, goodVIP, "the process ended 2 times without a known cause")
		},
		"killed once after a hold of the file changed": func(f *trialFixture) {
			trial := f.wants(0, badVIP, "")
			f.edit(trial, badVIP)
			f.wants(0, badVIP, "")
			f.wants(0, goodVIP, "ended 2 times")
		},
		"stopped twice": func(f *trialFixture) {
			f.wants(0, badVIP, "").End()
			f.wants(0, badVIP, "").End()
			f.wants(0, badVIP, "")
		},
		"killed while it reads the file": func(f *trialFixture) {
			f.wants(0, badVIP, "")
			f.read()
			if _, err := f.read(); err == nil || !strings.Contains(err.Error(), "ended 2 times") {
				f.Fatalf("the file is read again: %v", err)
			}
		},
		"killed while the first process reads an edit": func(f *trialFixture) {
			trial := f.wants(0, badVIP, "")
			f.write(newVIP)
			trial.Begin(sha256.Sum256([]byte(trenchOf(newVIP))))
			f.read()
			f.wants(0, goodVIP, "ended 2 times")
		},
		"refused starts": func(f *trialFixture) {
			for range maxStarts + 1 {
				trial, err := f.read()
				if err != nil {
					f.Fatal(err)
				}
				trial.End()
			}
			f.wants(0, badVIP, "")
		},
		"refused start with an invalid file": func(f *trialFixture) {
			f.wants(0, badVIP, "").Fail(failed)
			f.write("x")
			trial, _ := f.read()
			trial.End()
			f.write(badVIP)
			f.wants(0, goodVIP, "task loop")
		},
		"failed before the trial runs": func(f *trialFixture) {
			trial, err := f.read()
			if err != nil {
				f.Fatal(err)
			}
			trial.Fail(failed)
			trial.End()
			f.wants(0, goodVIP, "task loop")
		},
		"a second process, which is refused": func(f *trialFixture) {
			first := f.wants(0, badVIP, "")
			before, err := os.Stat(first.path("trial.json"))
			if err != nil {
				f.Fatal(err)
			}
			second := OpenTrial(f.dir, slog.New(slog.DiscardHandler))
			_, failure := second.Read(f.path, trench.DefaultDefaults())
			// Before End, whose write could have the inode again.
			after, err := os.Stat(first.path("trial.json"))
			if second.End(); errors.Join(failure, err) != nil || !os.SameFile(before, after) {
				f.Fatalf("the second process wrote the trial of the first: %v, %v", failure, err)
			}
		},
		"hung": func(f *trialFixture) {
			f.overdue.Store(int64(hung))
			f.wants(long, badVIP, "")
			f.wants(0, goodVIP, "a task of the process hung")
		},
		"hung and recovered": func(f *trialFixture) {
			f.overdue.Store(int64(hung))
			time.AfterFunc(trialTime, func() { f.overdue.Store(0) })
			f.wants(trialTime+long, badVIP, "")
			f.wants(0, badVIP, "")
		},
		"slow": func(f *trialFixture) {
			f.overdue.Store(int64(slow))
			f.wants(time.Minute, badVIP, "")
			f.wants(0, badVIP, "")
			f.wants(0, goodVIP, "2 times")
		},
		"invalid file": func(f *trialFixture) {
			f.wants(0, badVIP, "").Fail(failed)
			bad, err := os.ReadFile(f.path)
			if err != nil {
				f.Fatal(err)
			}
			f.write("x")
			f.wants(0, "", "not a prefix")
			if err := os.WriteFile(f.path, bad, 0o600); err != nil {
				f.Fatal(err)
			}
			f.wants(0, goodVIP, "task loop")
		},
		"a crash while the good file is in force": func(f *trialFixture) {
			f.write(goodVIP)
			f.wants(0, goodVIP, "").Fail(failed)
			f.wants(0, goodVIP, "")
		},
		"no last good configuration": func(f *trialFixture) {
			f.wants(0, badVIP, "").Fail(failed)
			if err := os.Remove(filepath.Join(f.dir, "last-good.yaml")); err != nil {
				f.Fatal(err)
			}
			f.wants(0, badVIP, "")
		},
		"unreadable state": func(f *trialFixture) {
			f.wants(0, badVIP, "").Fail(failed)
			if err := os.WriteFile(filepath.Join(f.dir, "trial.json"), []byte("{"), 0o600); err != nil {
				f.Fatal(err)
			}
			f.wants(0, badVIP, "")
		},
	}
	for name, run := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				f := &trialFixture{T: t, dir: filepath.Join(dir, "state"), path: filepath.Join(dir, "trench.yaml")}
				f.write(goodVIP)
				f.wants(long, goodVIP, "")
				f.write(badVIP)
				run(f)
			})
		})
	}
}

// Without a directory every file is accepted, and nothing is written.
func TestNoTrial(t *testing.T) {
	f := &trialFixture{T: t, path: filepath.Join(t.TempDir(), "trench.yaml")}
	f.write(goodVIP)
	trial := OpenTrial("", slog.New(slog.DiscardHandler))
	config, err := trial.Read(f.path, trench.DefaultDefaults())
	if err != nil || config.Attractor.VIPs[0].String() != goodVIP || trial.Refused() != nil {
		t.Errorf("%v, %v", config, err)
	}
	trial.Begin(config.Digest)
	trial.Cancel()
	trial.Accept(config.Digest, config, false)
	trial.Fail(errors.New("failed"))
	trial.End()
}

// A refused start creates no directory, and removes none. Other starts record their trial.
func TestRefusedStartLeavesNothing(t *testing.T) {
	for _, exists := range []bool{false, true} {
		f := &trialFixture{T: t, dir: filepath.Join(t.TempDir(), "state"), path: filepath.Join(t.TempDir(), "trench.yaml")}
		if exists {
			if err := os.Mkdir(f.dir, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		f.write(goodVIP)
		trial, err := f.read()
		if err != nil {
			t.Fatal(err)
		}
		trial.End()
		if _, err := os.Stat(f.dir); (err == nil) != exists {
			t.Errorf("directory existed: %v, after a refused start: %v", exists, err)
		}
		if trial, err = f.read(); err != nil {
			t.Fatal(err)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		_ = trial.Run(ended)
		if _, err := os.Stat(trial.path("trial.json")); err != nil {
			t.Errorf("directory existed: %v, after a start: %v", exists, err)
		}
	}
}

// Files that change faster than trialTime become good one after the other.
func TestTrialOfManyEdits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		f := &trialFixture{T: t, dir: dir, path: filepath.Join(dir, "trench.yaml")}
		f.write(goodVIP)
		trial := OpenTrial(f.dir, slog.New(slog.DiscardHandler))
		if _, err := trial.Read(f.path, trench.DefaultDefaults()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- trial.Run(ctx) }()
		var last string
		for _, vip := range []string{badVIP, newVIP, "20.0.0.4/32", "20.0.0.5/32"} {
			time.Sleep(trialTime - 3*time.Second)
			f.edit(trial, vip)
			last = vip
		}
		good := func() string {
			text, err := os.ReadFile(filepath.Join(dir, "last-good.yaml"))
			if err != nil {
				t.Fatal(err)
			}
			return string(text)
		}
		if text := good(); strings.Contains(text, last) {
			t.Errorf("the newest file is good too early:\n%s", text)
		}
		time.Sleep(2 * long)
		synctest.Wait()
		if text := good(); !strings.Contains(text, last) {
			t.Errorf("the newest file is not good:\n%s", text)
		}
		cancel()
		<-ended
	})
}

// An edit that is reverted before it is good never becomes good.
func TestTrialOfRevertedEdit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		f := &trialFixture{T: t, dir: dir, path: filepath.Join(dir, "trench.yaml")}
		f.write(goodVIP)
		trial := f.wants(long, goodVIP, "")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- trial.Run(ctx) }()
		for _, vip := range []string{badVIP, goodVIP} {
			f.edit(trial, vip)
			time.Sleep(3 * time.Second)
		}
		time.Sleep(long)
		cancel()
		<-ended
		f.wants(0, goodVIP, "")
		f.wants(0, goodVIP, "")
		f.wants(0, goodVIP, "")
	})
}

// Removals that an earlier process would have held are held after a restart, too.
func TestRemovalsHeldAfterRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		f := &trialFixture{T: t, dir: filepath.Join(dir, "state"), path: filepath.Join(dir, "trench.yaml")}
		f.write("20.0.0.1/32, 20.0.0.2/32, 20.0.0.3/32, 20.0.0.4/32")
		f.wants(long, goodVIP, "")
		// The VIPs that the file adds must not make the removal a small one after the second restart.
		f.write(goodVIP + ", 30.0.0.1/32, 30.0.0.2/32, 30.0.0.3/32, 30.0.0.4/32")
		for range 2 {
			trial := f.open()
			config, err := trial.Read(f.path, trench.DefaultDefaults())
			if err != nil {
				t.Fatal(err)
			}
			watcher := NewWatcher(f.path, trench.DefaultDefaults(), config, slog.New(slog.DiscardHandler))
			watcher.Trial = trial
			watcher.Hold = func(inForce, next *trench.Config, before trench.Held, confirmed string) (*trench.Config,
				trench.Held,
			) {
				return change.Hold(inForce, next, before, confirmed, nil)
			}
			watcher.Resume()
			loaded := watcher.Value().Load()
			if len(loaded.Held.VIPs) != 3 || len(loaded.Config.Attractor.VIPs) != 8 || loaded.Generation != 1 {
				t.Fatalf("%+v is held, %v in force", loaded.Held, loaded.Config.Attractor.VIPs)
			}
			ctx, cancel := context.WithTimeout(t.Context(), long)
			_ = trial.Run(ctx)
			cancel()
		}
	})
}

// While only old checks are held, the whole file is in force: a restart compares nothing with an
// older one.
func TestFileWithHeldChecksIsGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		f := &trialFixture{T: t, dir: filepath.Join(dir, "state"), path: filepath.Join(dir, "trench.yaml")}
		f.write(goodVIP)
		trial := f.wants(long, goodVIP, "")
		config, err := Read(f.path, trench.DefaultDefaults())
		if err != nil {
			t.Fatal(err)
		}
		watcher := NewWatcher(f.path, trench.DefaultDefaults(), config, slog.New(slog.DiscardHandler))
		watcher.Trial = trial
		watcher.Hold = func(_, next *trench.Config, _ trench.Held, _ string) (*trench.Config, trench.Held) {
			return next, trench.Held{ID: "c00000001", Checks: []string{"s"}}
		}
		f.write(newVIP)
		watcher.publish([]byte(trenchOf(newVIP)))
		ctx, cancel := context.WithTimeout(t.Context(), long)
		defer cancel()
		_ = trial.Run(ctx)
		if restarted, err := f.read(); err != nil || restarted.Base() != nil {
			t.Errorf("a restart compares the file with %+v (%v)", restarted.Base(), err)
		}
	})
}
