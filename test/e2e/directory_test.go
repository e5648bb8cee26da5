package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/lab"
)

// readinessDir is the directory of readiness files of a pod without a load balancer that speaks.
func (w *world) readinessDir() string { return filepath.Join(w.Dir, "readiness") }

// makeReadinessDir makes it.
func (w *world) makeReadinessDir() {
	w.t.Helper()
	w.must(os.Mkdir(w.readinessDir(), 0o755))
}

func (w *world) readinessFile(name string) string { return filepath.Join(w.readinessDir(), name) }

func (w *world) makeReadiness(names ...string) {
	w.t.Helper()
	for _, name := range names {
		w.must(os.WriteFile(w.readinessFile(name), nil, 0o644))
	}
}

func (w *world) removeReadiness(names ...string) {
	w.t.Helper()
	for _, name := range names {
		w.must(os.Remove(w.readinessFile(name)))
	}
}

// directoryArgs are the arguments of a frontend that goes by the directory: it
// needs no identity.
func (w *world) directoryArgs(extra ...string) []string {
	args := slices.DeleteFunc(w.pod.FrontendArgs(), func(a string) bool {
		return slices.ContainsFunc([]string{"--lb-socket=", "--lb-id=", "--identity=", "--dev-authority-dir=", "--spiffe-id="},
			func(flag string) bool { return strings.HasPrefix(a, flag) })
	})
	return append(append(args, "--readiness-dir="+w.readinessDir()), extra...)
}

func (w *world) startDirectoryFrontend(extra ...string) {
	w.t.Helper()
	var err error
	w.pod.Frontend, err = w.Start(w.Pod, "frontend", w.directoryArgs(extra...)...)
	w.must(err)
}

func TestReadinessFilesGateVIPs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.makeReadinessDir()
	w.makeReadiness("lb-ready-stream-a")
	w.startDirectoryFrontend()
	w.wantRoutes(vipA4, vipA6)
	w.wantHealth(lab.FrontendHealth, "Started", healthServing)
	w.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
	w.makeReadiness("lb-ready-stream-b")
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	w.removeReadiness("lb-ready-stream-a")
	w.wantRoutes(vipB4, vipB6)
	if out, status := w.run("frontend", "status", "--admin-socket=unix://"+w.pod.FrontendAdmin()); status != 1 || !strings.Contains(out, "lb-ready-stream-a") {
		t.Errorf("status ended with %d and does not name the file that is missing:\n%s", status, out)
	}

	// From the first file of a VIP on, only those count.
	w.makeReadiness("lb-vip-ready-20.0.0.1", "lb-vip-ready-2000:0::2")
	w.wantRoutes(vipA4, vipB6)
	mark := w.mark()
	w.makeReadiness("lb-ready-nobody", "lb-vip-ready-rubbish")
	w.waitLog(w.pod.Frontend, "lb-vip-ready-rubbish")
	w.waitLog(w.pod.Frontend, "lb-ready-nobody")
	w.wantNothing(mark, vipA4, vipA6, vipB4, vipB6)
	w.removeReadiness("lb-vip-ready-20.0.0.1", "lb-vip-ready-2000:0::2")
	w.wantRoutes()

	// In order, although nobody is there to report to.
	w.makeReadiness("lb-vip-ready-20.0.0.1")
	w.wantRoutes(vipA4)
	mark = w.mark()
	w.must(w.pod.Frontend.Signal(unix.SIGTERM))
	w.wantExit(w.pod.Frontend, 0)
	w.wantStory(mark, vipA4, depreferred, withdrawn)
}

func TestMissingReadinessDirectoryIsWaitedFor(t *testing.T) {
	for name, flags := range map[string][]string{"not ready": nil, "ready": {"--readiness-dir-missing=ready"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.startDirectoryFrontend(flags...)
			if flags != nil {
				w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
				w.waitLog(w.pod.Frontend, "THE READINESS DIRECTORY WAS NEVER THERE")
			} else {
				w.waitLog(w.pod.Frontend, "does not exist")
				w.waitFrontend("Stream", false, w.readinessDir()+" does not exist")
			}
			w.makeReadinessDir()
			w.wantRoutes()
			w.makeReadiness("lb-ready-stream-a")
			w.wantRoutes(vipA4, vipA6)
		})
	}
}

func TestReplacedReadinessDirectory(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.makeReadinessDir()
	w.makeReadiness("lb-ready-stream-a")
	w.startDirectoryFrontend()
	w.wantRoutes(vipA4, vipA6)
	next := w.readinessDir() + ".new"
	w.must(os.Mkdir(next, 0o755))
	w.must(os.WriteFile(filepath.Join(next, "lb-ready-stream-b"), nil, 0o644))
	w.must(unix.Renameat2(unix.AT_FDCWD, next, unix.AT_FDCWD, w.readinessDir(), unix.RENAME_EXCHANGE))
	w.wantRoutes(vipB4, vipB6)
	w.must(os.RemoveAll(w.readinessDir()))
	w.wantRoutes()
	w.makeReadinessDir()
	w.makeReadiness("lb-ready-stream-a")
	w.wantRoutes(vipA4, vipA6)
}

func TestReadinessDirectoryThatIsGone(t *testing.T) {
	for name, after := range map[string][]string{"hold": {vipA4, vipA6}, "drain": nil, "drop": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.makeReadinessDir()
			w.makeReadiness("lb-ready-stream-a")
			w.startDirectoryFrontend("--on-directory-gone="+name, "--drain-time=500ms")
			w.wantRoutes(vipA4, vipA6)
			mark := w.mark()
			w.must(os.Rename(w.readinessDir(), w.readinessDir()+".away"))
			w.waitLog(w.pod.Frontend, "does not exist")
			switch name {
			case "hold":
				w.waitFrontend("Stream", false, w.readinessDir()+" does not exist")
				w.wantNothing(mark, vipA4, vipA6)
			case "drain":
				w.wantRoutes()
				w.wantStory(mark, vipA4, depreferred, withdrawn)
			}
			w.wantRoutes(after...)
			w.must(os.Rename(w.readinessDir()+".away", w.readinessDir()))
			w.wantRoutes(vipA4, vipA6)
		})
	}
}

// Files are no lease: what a writer that crashed leaves behind goes on counting,
// unless it touched its files and there is a limit of age.
func TestCrashedWriterOfReadinessFiles(t *testing.T) {
	t.Parallel()
	const maxAge = 2 * time.Second
	for name, limited := range map[string]bool{"without a limit of age": false, "with a limit of age": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.makeReadinessDir()
			writer, err := w.Start(w.Pod, "writer", "sh", "-c", `while :; do touch "$0"; sleep 0.2; done`, w.readinessFile("lb-ready-stream-a"))
			w.must(err)
			var flags []string
			if limited {
				flags = []string{"--readiness-max-age=" + maxAge.String()}
			}
			w.startDirectoryFrontend(flags...)
			w.wantRoutes(vipA4, vipA6)
			mark := w.mark()
			w.must(writer.Kill())
			info, err := os.Stat(w.readinessFile("lb-ready-stream-a"))
			w.must(err)
			if limited {
				w.wantRoutes()
				if after := w.waitHeard(mark, vipA4, withdrawn).At.Sub(info.ModTime()); after < maxAge-clockSlack {
					t.Errorf("withdrawn %v after the last touch", after)
				}
				w.waitLog(w.pod.Frontend, "was last touched more than 2s ago")
				w.makeReadiness("lb-ready-stream-a")
				w.must(os.Chtimes(w.readinessFile("lb-ready-stream-a"), time.Now(), time.Now()))
				w.wantRoutes(vipA4, vipA6)
				return
			}
			w.waitPast(info.ModTime().Add(2 * maxAge))
			w.wantNothing(mark, vipA4, vipA6)
			w.wantRoutes(vipA4, vipA6)
		})
	}
}

func TestBadReadinessDirectoryIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, env := range map[string]string{"flag": "", "variable": "VIPGATE_READINESS_DIR=", "Meridio's variable": "MERIDIO_READINESS_DIR="} {
		args := w.directoryArgs()
		if env == "" {
			args = append(args, "--readiness-dir=")
		} else {
			args = append([]string{"env", env}, slices.DeleteFunc(args, func(a string) bool { return strings.HasPrefix(a, "--readiness-dir=") })...)
		}
		p, err := w.Start(w.Pod, "frontend-"+strings.ReplaceAll(name, " ", "-"), args...)
		w.must(err)
		w.wantExit(p, 2)
		if out := p.Output(); !strings.Contains(out, "--readiness-dir") || !strings.Contains(out, "--gating=off") {
			t.Errorf("by %s: it does not say what to do: %s", name, out)
		}
	}
	w.wantNothing(0, vipA4, vipA6, vipB4, vipB6)
}
