package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// fifo is a pipe for the stderr of programs; only the test reads it.
type fifo struct {
	t    *testing.T
	path string
	pipe *os.File
}

// newFIFO returns a FIFO of 4 KiB that no process reads.
func (f *fixture) newFIFO(name string) *fifo {
	f.t.Helper()
	path := f.path(name)
	f.must(unix.Mkfifo(path, 0o600))
	pipe, err := os.OpenFile(path, os.O_RDWR, 0) // waits for neither reader nor writer
	f.must(err)
	f.t.Cleanup(func() { _ = pipe.Close() })
	connection, err := pipe.SyscallConn()
	f.must(err)
	f.must(connection.Control(func(fd uintptr) { _, err = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, os.Getpagesize()) }))
	f.must(err)
	return &fifo{f.t, path, pipe}
}

// fill writes until a write would block.
func (p *fifo) fill() {
	p.t.Helper()
	fd, err := unix.Open(p.path, unix.O_WRONLY|unix.O_NONBLOCK, 0)
	for err == nil {
		_, err = unix.Write(fd, []byte("\n"))
	}
	if !errors.Is(err, unix.EAGAIN) {
		p.t.Fatal(err)
	}
	harness.Must(p.t, unix.Close(fd))
}

// readUntil reads lines until one contains the text.
func (p *fifo) readUntil(text string) {
	p.t.Helper()
	for lines := bufio.NewScanner(p.pipe); lines.Scan(); {
		if strings.Contains(lines.Text(), text) {
			return
		}
	}
	p.t.Fatalf("no line contains %q", text)
}

// start starts a program of the pod with its stderr in the FIFO.
func (p *fifo) start(f *fixture, name string, args []string) *lab.Process {
	f.t.Helper()
	shell := []string{"/bin/sh", "-c", `exec "$@" 2>` + p.path, "sh"}
	process, err := f.Start(f.Pod, name, append(shell, args...)...)
	f.must(err)
	return process
}

// A full log pipe, whose reader hangs, delays no decision, start or stop. Lost lines are counted,
// and their number is logged once the reader returns.
func TestUnreadLog(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	stderr := f.newFIFO("stderr")
	stderr.fill()
	f.pod.LB = stderr.start(f, "lb", f.pod.LBArgs())
	f.pod.Frontend = stderr.start(f, "frontend", f.pod.FrontendArgs())
	f.wantRoutes(every()...)

	mark := f.mark()
	f.down(f.target1)
	f.wantRoutes(vipB4, vipB6)
	f.up(f.target1)
	f.wantRoutes(every()...)
	for _, healthy := range []string{vipB4, vipB6} {
		f.wantUpdates(mark, healthy)
	}

	f.must(f.gateway.Process.Kill())
	f.waitFrontend("Egress", false)
	f.must(f.gateway.Start())
	f.wantRoutes(every()...)

	const added = "20.0.0.9/32"
	f.must(f.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "vips: ["+vipA4, "vips: ["+added+", "+vipA4)))
	f.wantRoutes(append(every(), added)...)

	const lost = "vipgate_log_lines_lost_total"
	f.logLines(10_000)
	if n := metric(t, f.get(lab.FrontendMetrics, "/metrics"), lost); n < 1 {
		t.Errorf("%s is %v", lost, n)
	}
	if n := metric(t, f.get(lab.LBMetrics, "/metrics"), lost); n != 0 {
		t.Errorf("%s of lb is %v, although its lines fit", lost, n)
	}
	stderr.readUntil("log lines lost")
	stderr.fill()
	if status := f.wantStop(f.pod.Frontend); status != 0 {
		t.Errorf("frontend ended with exit status %d", status)
	}
	// Without a reader a write fails instead.
	f.must(stderr.pipe.Close())
	f.waitFor(func() error {
		if metric(t, f.get(lab.LBMetrics, "/metrics"), lost) == 0 {
			return errors.New("lb wrote to a pipe without a reader")
		}
		return nil
	})
	if status := f.wantStop(f.pod.LB); status != 0 {
		t.Errorf("lb ended with exit status %d", status)
	}
}

// logLines makes the frontend log n lines.
func (f *fixture) logLines(n int) {
	f.t.Helper()
	const callers = 8
	admin := adminv1.NewLogServiceClient(f.dial(f.pod.FrontendAdmin()))
	failures := make([]error, callers)
	var calls sync.WaitGroup
	for i := range callers {
		calls.Go(func() {
			for range n / callers {
				_, err := admin.SetLogLevel(f.t.Context(), &adminv1.SetLogLevelRequest{Level: "info"})
				if err != nil {
					failures[i] = err
					return
				}
			}
		})
	}
	calls.Wait()
	if err := errors.Join(failures...); err != nil {
		f.t.Fatal(fmt.Errorf("log levels: %w", err))
	}
}
