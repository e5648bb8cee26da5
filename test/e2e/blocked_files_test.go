package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// stopBound is how long a process without work to finish may take to end after SIGTERM.
const stopBound = 20 * time.Second

// wantStop sends SIGTERM and waits for the end of the process.
func (f *fixture) wantStop(p *lab.Process) int {
	f.t.Helper()
	f.must(p.Signal(syscall.SIGTERM))
	ctx := harness.Context(f.t, stopBound)
	status, err := p.Wait(ctx)
	f.must(err)
	return status
}

// hangMount mounts a file system whose server never answers over a directory: every access blocks,
// as with a hard NFS mount of a server that is down. detach unmounts it, so that new accesses
// reach the original directory; calls that already block do so until the end of the test.
func hangMount(t *testing.T, dir string) (detach func()) {
	t.Helper()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		lab.Skip(t, "/dev/fuse: "+err.Error())
	}
	if err := unix.Mount("hung", dir, "fuse", 0,
		fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fd)); err != nil {
		_ = unix.Close(fd)
		lab.Skip(t, "mount of a FUSE file system: "+err.Error())
	}
	mounted := true
	detach = func() {
		if !mounted {
			return
		}
		mounted = false
		harness.Check(t, unix.Unmount(dir, unix.MNT_DETACH))
	}
	t.Cleanup(func() {
		detach()
		if err := unix.Close(fd); err != nil { // aborts calls that still block
			t.Error(err)
		}
	})
	return detach
}

// open of a FIFO without a writer blocks forever.
func TestFIFOAsTrenchFile(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	fifo := f.path("fifo.yaml")
	f.must(unix.Mkfifo(fifo, 0o644))
	const refused = "not a regular file"

	for _, program := range []string{"lb", "frontend"} {
		args := f.pod.LBArgs
		if program == "frontend" {
			args = f.pod.FrontendArgs
		}
		for _, command := range []string{"validate", "run"} {
			line := slices.Replace(args("--trench-file="+fifo), 1, 2, command)
			if program == "lb" {
				line = append(line, "--source=registry", "--target-id=stream-a="+lab.AppID)
			}
			p, err := f.Start(f.Pod, program+"-"+command, line...)
			f.must(err)
			f.waitLog(p, refused)
			if command == "validate" {
				f.wantExit(p, 2)
			} else {
				f.wantStop(p)
			}
		}
	}

	f.up(f.target1, f.target2)
	f.startPod()
	f.wantRoutes(every()...)
	f.must(os.Rename(fifo, f.pod.TrenchFile()))
	f.waitLog(f.pod.LB, refused)
	f.waitLog(f.pod.Frontend, refused)
	f.waitLB("Configuration", false, refused)
	f.waitFrontend("Configuration", false, refused)
	f.wantRoutes(every()...)
	// The watchers still work, and apply a valid file immediately.
	f.must(f.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "target-2", "target-two")))
	f.waitLog(f.pod.LB, "new configuration in force")
	f.waitLog(f.pod.Frontend, "new configuration in force")
	f.must(os.Remove(f.pod.TrenchFile()))
	f.must(unix.Mkfifo(f.pod.TrenchFile(), 0o644))
	f.waitLogs(f.pod.LB, refused, 2)
	f.waitLogs(f.pod.Frontend, refused, 2)
	for _, p := range []*lab.Process{f.pod.Frontend, f.pod.LB} {
		if status := f.wantStop(p); status != 0 {
			t.Errorf("%s ended with exit status %d", p.Name, status)
		}
	}
}

// Every directory that a program uses while it runs hangs; SIGTERM still ends the program. The
// trench directory hangs first: it is reported, and a replacement file is read although the first
// read never returns.
func TestHungMountStops(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	svid := func(name, id string) string {
		dir := f.path(name)
		f.must(os.Mkdir(dir, 0o700))
		f.must(f.authority().WriteFiles(dir, f.mint(f.authority(), id)))
		return dir
	}
	lbSVID, frontendSVID := svid("lb-svid", lab.LBID), svid("fe-svid", lab.FrontendID)
	written := f.path("written")
	f.must(os.Mkdir(written, 0o755))
	// Each program has a separate directory: while a lookup of a name hangs, the kernel makes a
	// second process wait for it uninterruptibly.
	own := f.path("own")
	f.must(os.Mkdir(own, 0o755))
	f.must(os.WriteFile(filepath.Join(own, "trench.yaml"), []byte(usualTrench()), 0o644))
	lb := []string{"--identity=files", "--svid-dir=" + lbSVID, "--write-readiness-dir=" + written}
	frontend := []string{
		"--identity=files", "--svid-dir=" + frontendSVID, "--trench-file=" + filepath.Join(own, "trench.yaml"),
	}
	trench := filepath.Dir(f.pod.TrenchFile())
	for _, c := range []struct {
		name      string
		dirs      []string
		condition bool // the trench directory hangs
	}{
		{"trench directories", []string{trench, own}, true},
		{"SVIDs", []string{lbSVID, frontendSVID}, false},
		{"state, readiness files and BIRD", []string{f.pod.StateDir(), written, f.pod.BirdDir()}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := f.in(t)
			f.must(f.pod.StartLB(lb...))
			f.must(f.pod.StartFrontend(frontend...))
			f.wantRoutes(every()...)
			var detach []func()
			for _, dir := range c.dirs {
				detach = append(detach, hangMount(t, dir))
			}
			if c.condition {
				const hangs = "did not answer within"
				f.waitLB("Configuration", false, hangs)
				f.waitFrontend("Configuration", false, hangs)
				f.wantRoutes(every()...)
				for _, d := range detach {
					d()
				}
				edited := strings.ReplaceAll(usualTrench(), "target-2", "target-two")
				f.must(f.pod.WriteTrench(edited))
				f.must(os.WriteFile(filepath.Join(own, "trench.yaml"), []byte(edited), 0o644))
				for _, p := range []*lab.Process{f.pod.Frontend, f.pod.LB} {
					f.waitLog(p, "new configuration in force")
				}
			}
			for _, p := range []*lab.Process{f.pod.Frontend, f.pod.LB} {
				f.wantStop(p)
			}
		})
	}
}
