package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/lab"
)

// stopBound is how long a process without work to finish may take to end after SIGTERM.
const stopBound = 20 * time.Second

// wantStop sends SIGTERM and waits for the end of the process.
func (w *world) wantStop(p *lab.Process) int {
	w.t.Helper()
	w.must(p.Signal(syscall.SIGTERM))
	ctx, cancel := context.WithTimeout(w.t.Context(), stopBound)
	defer cancel()
	status, err := p.Wait(ctx)
	w.must(err)
	return status
}

// hangMount mounts a file system over a directory whose server never answers: every access blocks, as with a hard
// NFS mount of a server that is down.
func hangMount(t *testing.T, dir string) (restore func()) {
	t.Helper()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		lab.Skip(t, "/dev/fuse: "+err.Error())
	}
	if err := unix.Mount("hung", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fd)); err != nil {
		_ = unix.Close(fd)
		lab.Skip(t, "mount of a FUSE file system: "+err.Error())
	}
	mounted := true
	restore = func() {
		if !mounted {
			return
		}
		mounted = false
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
		if err := unix.Close(fd); err != nil { // aborts what still blocks
			t.Error(err)
		}
	}
	t.Cleanup(restore)
	return restore
}

// A reader of a FIFO without a writer blocks at open, for ever.
func TestFIFOAsTrenchFile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	fifo := w.path("fifo.yaml")
	w.must(unix.Mkfifo(fifo, 0o644))
	const refused = "not a regular file"

	for _, program := range []string{"lb", "frontend"} {
		args := w.pod.LBArgs
		if program == "frontend" {
			args = w.pod.FrontendArgs
		}
		for _, command := range []string{"validate", "run"} {
			line := slices.Replace(args("--trench-file="+fifo), 1, 2, command)
			if program == "lb" {
				line = append(line, "--source=registry", "--target-id=stream-a="+lab.AppID)
			}
			p, err := w.Start(w.Pod, program+"-"+command, line...)
			w.must(err)
			w.waitLog(p, refused)
			if status := w.wantStop(p); command == "validate" && status != 2 {
				t.Errorf("%s validate ended with exit status %d, want 2: %s", program, status, p.Output())
			}
		}
	}

	w.up(w.target1)
	w.up(w.target2)
	w.startPod()
	w.wantRoutes(every()...)
	w.must(os.Rename(fifo, w.pod.TrenchFile()))
	w.waitLog(w.pod.LB, refused)
	w.waitLog(w.pod.Frontend, refused)
	w.waitLB("Configuration", false, refused)
	w.waitFrontend("Configuration", false, refused)
	w.wantRoutes(every()...)
	// The watchers still work, and take a good file at once.
	w.must(w.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "target-2", "target-two")))
	w.waitLog(w.pod.LB, "new configuration in force")
	w.waitLog(w.pod.Frontend, "new configuration in force")
	w.must(os.Remove(w.pod.TrenchFile()))
	w.must(unix.Mkfifo(w.pod.TrenchFile(), 0o644))
	w.waitLogs(w.pod.LB, refused, 2)
	w.waitLogs(w.pod.Frontend, refused, 2)
	for _, p := range []*lab.Process{w.pod.Frontend, w.pod.LB} {
		if status := w.wantStop(p); status != 0 {
			t.Errorf("%s ended with exit status %d", p.Name, status)
		}
	}
}

// Every directory that a program uses while it runs hangs; SIGTERM ends the program all
// the same, and the trench directory, which hangs first, is reported.
func TestHungMountStops(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.up(w.target2)
	svid := func(name, id string) string {
		dir := w.path(name)
		w.must(os.Mkdir(dir, 0o700))
		w.must(w.authority().WriteFiles(dir, w.mint(w.authority(), id)))
		return dir
	}
	lbSVID, frontendSVID := svid("lb-svid", lab.LBID), svid("fe-svid", lab.FrontendID)
	written := w.path("written")
	w.must(os.Mkdir(written, 0o755))
	// Each program has its own directory: a second process that looks up a name of which a lookup hangs waits for the
	// first one in the kernel, and no signal ends that.
	own := w.path("own")
	w.must(os.Mkdir(own, 0o755))
	w.must(os.WriteFile(filepath.Join(own, "trench.yaml"), []byte(usualTrench()), 0o644))
	lb := []string{"--identity=files", "--svid-dir=" + lbSVID, "--write-readiness-dir=" + written}
	frontend := []string{"--identity=files", "--svid-dir=" + frontendSVID, "--trench-file=" + filepath.Join(own, "trench.yaml")}
	trench := filepath.Dir(w.pod.TrenchFile())
	for _, c := range []struct {
		name      string
		dirs      []string
		condition bool // the trench directory hangs
	}{
		{"trench directories", []string{trench, own}, true},
		{"SVIDs", []string{lbSVID, frontendSVID}, false},
		{"state, readiness files and BIRD", []string{w.pod.StateDir(), written, w.pod.BirdDir()}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := w.in(t)
			w.must(w.pod.StartLB(lb...))
			w.must(w.pod.StartFrontend(frontend...))
			w.wantRoutes(every()...)
			for _, dir := range c.dirs {
				hangMount(t, dir)
			}
			if c.condition {
				const hangs = "did not answer within"
				w.waitLB("Configuration", false, hangs)
				w.waitFrontend("Configuration", false, hangs)
				w.wantRoutes(every()...)
			}
			for _, p := range []*lab.Process{w.pod.Frontend, w.pod.LB} {
				w.wantStop(p)
			}
		})
	}
}
