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

// readinessDir is the directory of readiness files of a pod whose load balancer serves no gRPC.
func (f *fixture) readinessDir() string { return filepath.Join(f.Dir, "readiness") }

// makeReadinessDir creates the directory.
func (f *fixture) makeReadinessDir() {
	f.t.Helper()
	f.must(os.Mkdir(f.readinessDir(), 0o755))
}

func (f *fixture) readinessFile(name string) string { return filepath.Join(f.readinessDir(), name) }

func (f *fixture) makeReadiness(names ...string) {
	f.t.Helper()
	for _, name := range names {
		f.must(os.WriteFile(f.readinessFile(name), nil, 0o644))
	}
}

func (f *fixture) removeReadiness(names ...string) {
	f.t.Helper()
	for _, name := range names {
		f.must(os.Remove(f.readinessFile(name)))
	}
}

// directoryArgs are the arguments of a frontend that reads the directory: it needs no identity.
func (f *fixture) directoryArgs(extra ...string) []string {
	args := slices.DeleteFunc(f.pod.FrontendArgs(), func(a string) bool {
		return slices.ContainsFunc([]string{
			"--lb-socket=", "--lb-id=", "--identity=", "--dev-authority-dir=", "--spiffe-id=",
		},
			func(flag string) bool { return strings.HasPrefix(a, flag) })
	})
	return append(append(args, "--readiness-dir="+f.readinessDir()), extra...)
}

func (f *fixture) startDirectoryFrontend(extra ...string) {
	f.t.Helper()
	var err error
	f.pod.Frontend, err = f.Start(f.Pod, "frontend", f.directoryArgs(extra...)...)
	f.must(err)
}

func TestReadinessFilesGateVIPs(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.makeReadinessDir()
	f.makeReadiness("lb-ready-stream-a")
	f.startDirectoryFrontend()
	f.wantRoutes(vipA4, vipA6)
	f.wantHealth(lab.FrontendHealth, "Started", healthServing)
	f.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
	f.makeReadiness("lb-ready-stream-b")
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	f.removeReadiness("lb-ready-stream-a")
	f.wantRoutes(vipB4, vipB6)
	if out, status := f.run("frontend", "status", "--admin-socket=unix://"+f.pod.FrontendAdmin()); status != 1 ||
		!strings.Contains(out, "lb-ready-stream-a") {
		t.Errorf("status ended with %d and does not name the file that is missing:\n%s", status, out)
	}

	// Once a VIP file exists, only VIP files count.
	f.makeReadiness("lb-vip-ready-20.0.0.1", "lb-vip-ready-2000:0::2")
	f.wantRoutes(vipA4, vipB6)
	mark := f.mark()
	f.makeReadiness("lb-ready-unknown", "lb-vip-ready-rubbish")
	f.waitLog(f.pod.Frontend, "lb-vip-ready-rubbish")
	f.waitLog(f.pod.Frontend, "lb-ready-unknown")
	f.wantNoUpdates(mark, vipA4, vipA6, vipB4, vipB6)
	f.removeReadiness("lb-vip-ready-20.0.0.1", "lb-vip-ready-2000:0::2")
	f.wantRoutes()

	// Reports are in order, although no lb receives them.
	f.makeReadiness("lb-vip-ready-20.0.0.1")
	f.wantRoutes(vipA4)
	mark = f.mark()
	f.stop(f.pod.Frontend)
	f.wantUpdates(mark, vipA4, depreferred, withdrawn)
}

func TestLateReadinessDirectory(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{"not ready": nil, "ready": {"--readiness-dir-missing=ready"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.startDirectoryFrontend(flags...)
			if flags != nil {
				f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
				f.waitLog(f.pod.Frontend, "readiness directory has never existed")
			} else {
				f.waitLog(f.pod.Frontend, "does not exist")
				f.waitFrontend("Stream", false, f.readinessDir()+" does not exist")
			}
			f.makeReadinessDir()
			f.wantRoutes()
			f.makeReadiness("lb-ready-stream-a")
			f.wantRoutes(vipA4, vipA6)
		})
	}
}

func TestReplacedReadinessDirectory(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.makeReadinessDir()
	f.makeReadiness("lb-ready-stream-a")
	f.startDirectoryFrontend()
	f.wantRoutes(vipA4, vipA6)
	next := f.readinessDir() + ".new"
	f.must(os.Mkdir(next, 0o755))
	f.must(os.WriteFile(filepath.Join(next, "lb-ready-stream-b"), nil, 0o644))
	f.must(unix.Renameat2(unix.AT_FDCWD, next, unix.AT_FDCWD, f.readinessDir(), unix.RENAME_EXCHANGE))
	f.wantRoutes(vipB4, vipB6)
	f.must(os.RemoveAll(f.readinessDir()))
	f.wantRoutes()
	f.makeReadinessDir()
	f.makeReadiness("lb-ready-stream-a")
	f.wantRoutes(vipA4, vipA6)
}

func TestMissingReadinessDirectory(t *testing.T) {
	t.Parallel()
	for name, after := range map[string][]string{"hold": {vipA4, vipA6}, "drain": nil, "drop": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.makeReadinessDir()
			f.makeReadiness("lb-ready-stream-a")
			f.startDirectoryFrontend("--on-missing-directory="+name, visibleDrain)
			f.wantRoutes(vipA4, vipA6)
			mark := f.mark()
			f.must(os.Rename(f.readinessDir(), f.readinessDir()+".away"))
			f.waitLog(f.pod.Frontend, "does not exist")
			switch name {
			case "hold":
				f.waitFrontend("Stream", false, f.readinessDir()+" does not exist")
				f.wantNoUpdates(mark, vipA4, vipA6)
			case "drain":
				f.wantRoutes()
				f.wantUpdates(mark, vipA4, depreferred, withdrawn)
			}
			f.wantRoutes(after...)
			f.must(os.Rename(f.readinessDir()+".away", f.readinessDir()))
			f.wantRoutes(vipA4, vipA6)
		})
	}
}

// Readiness files have no lease: the files of a crashed writer remain valid, unless the writer
// touched its files periodically and a maximum age is configured.
func TestCrashedWriterOfReadinessFiles(t *testing.T) {
	t.Parallel()
	const maxAge = 2 * time.Second
	for name, limited := range map[string]bool{"without a limit of age": false, "with a limit of age": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.makeReadinessDir()
			writer, err := f.Start(f.Pod, "writer", "sh", "-c", `while :; do touch "$0"; sleep 0.2; done`,
				f.readinessFile("lb-ready-stream-a"))
			f.must(err)
			var flags []string
			if limited {
				flags = []string{"--readiness-max-age=" + maxAge.String()}
			}
			f.startDirectoryFrontend(flags...)
			f.wantRoutes(vipA4, vipA6)
			mark := f.mark()
			f.must(writer.Kill())
			info, err := os.Stat(f.readinessFile("lb-ready-stream-a"))
			f.must(err)
			if limited {
				f.wantRoutes()
				if after := f.waitUpdate(mark, vipA4, withdrawn).At.Sub(info.ModTime()); after < maxAge-clockSlack {
					t.Errorf("withdrawn %v after the last touch", after)
				}
				f.waitLog(f.pod.Frontend, "was last touched more than 2s ago")
				f.makeReadiness("lb-ready-stream-a")
				f.must(os.Chtimes(f.readinessFile("lb-ready-stream-a"), time.Now(), time.Now()))
				f.wantRoutes(vipA4, vipA6)
				return
			}
			f.waitPast(info.ModTime().Add(2 * maxAge))
			f.wantNoUpdates(mark, vipA4, vipA6)
			f.wantRoutes(vipA4, vipA6)
		})
	}
}

func TestBadReadinessDirectoryIsRefused(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for name, env := range map[string]string{
		"flag": "", "variable": "VIPGATE_READINESS_DIR=",
		"Meridio's variable": "MERIDIO_READINESS_DIR=",
	} {
		args := f.directoryArgs()
		if env == "" {
			args = append(args, "--readiness-dir=")
		} else {
			args = append([]string{"env", env},
				slices.DeleteFunc(args, func(a string) bool { return strings.HasPrefix(a, "--readiness-dir=") })...)
		}
		p, err := f.Start(f.Pod, "frontend-"+strings.ReplaceAll(name, " ", "-"), args...)
		f.must(err)
		f.wantExit(p, 2)
		if out := p.Output(); !strings.Contains(out, "--readiness-dir") || !strings.Contains(out, "--gating=off") {
			t.Errorf("by %s: it does not say what to do: %s", name, out)
		}
	}
	f.wantNoUpdates(0, vipA4, vipA6, vipB4, vipB6)
}
