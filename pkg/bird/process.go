package bird

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is a BIRD that runs as our child, in a process group of its own, with
// its stderr always drained: a full pipe blocks BIRD.
type process struct {
	cmd    *exec.Cmd
	since  time.Time
	exited chan struct{}
	err    error // valid once exited is closed
	drain  sync.WaitGroup
}

// startProcess starts BIRD. events is called for each line of its log; it must
// not block.
func startProcess(executable, config, socket string, log *slog.Logger, info bool, events func(Event)) (*process, error) {
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		return nil, fmt.Errorf("directory of BIRD's control socket: %w", err)
	}
	p := &process{cmd: exec.Command(executable, "-f", "-c", config, "-s", socket), exited: make(chan struct{}), since: time.Now()}
	// Not Pdeathsig: it fires when the forking thread ends, not the process.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		return nil, fmt.Errorf("start BIRD: %w", err)
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start BIRD: %w", err)
	}
	p.drain.Go(func() { drainLines(stderr, log, info, events) })
	go func() {
		p.drain.Wait()
		p.err = p.cmd.Wait()
		close(p.exited)
	}()
	if err := writePID(pidFile(socket), p.cmd.Process.Pid); err != nil {
		log.Warn("an orphan of this BIRD could not be found after a crash of ours", "error", err)
	}
	return p, nil
}

// maxEventLine bounds a line of the log; what is longer comes in pieces.
const maxEventLine = 4096

// drainLines re-emits BIRD's log.
func drainLines(r io.Reader, log *slog.Logger, info bool, events func(Event)) {
	lines := bufio.NewReaderSize(r, maxEventLine)
	for {
		b, _, err := lines.ReadLine()
		if err != nil {
			return // the process ended
		}
		e := ParseEvent(string(b))
		events(e)
		level := slog.LevelDebug
		switch e.Level {
		case "INFO", "REMOTE", "RMT", "AUTH":
			if info {
				level = slog.LevelInfo
			}
		case "WARN", "WARNING":
			level = slog.LevelWarn
		case "ERR", "ERROR", "FATAL", "BUG":
			level = slog.LevelError
		case "TRACE":
			if info {
				level = slog.LevelInfo
			}
		}
		if e.Text == "Shutdown completed" || strings.Contains(e.Text, "without explicit authentication") {
			level = slog.LevelDebug // FATAL and WARN only in name
		}
		log.Log(context.Background(), level, "bird: "+e.Text, "protocol", e.Protocol, "bird_level", e.Level)
	}
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// kill ends BIRD at once and waits.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.exited
}

// stopTimeout is how long BIRD gets to end: it takes 10–90 ms with 20 000 routes.
const stopTimeout = 2 * time.Second

// terminate asks BIRD to end and waits; what does not end in time is killed.
func (p *process) terminate(log *slog.Logger) {
	_ = p.cmd.Process.Signal(unix.SIGTERM)
	timer := time.NewTimer(stopTimeout)
	defer timer.Stop()
	select {
	case <-p.exited:
	case <-timer.C:
		log.Warn("BIRD did not end in time; killing it", "pid", p.pid(), "after", stopTimeout)
		p.kill()
	}
}

func pidFile(socket string) string { return socket + ".pid" }

func writePID(path string, pid int) error {
	return replaceFile(path, []byte(strconv.Itoa(pid)+"\n"), 0o600)
}

// endOrphan ends a BIRD that an earlier run of ours left behind: the process in
// the pid file, if it is BIRD and serves our control socket.
func endOrphan(ctx context.Context, executable, socket string, log *slog.Logger) error {
	b, err := os.ReadFile(pidFile(socket))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("pid file of an earlier BIRD: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid <= 1 || !isOurBIRD(pid, executable, socket) {
		return nil
	}
	log.Warn("ending a BIRD that an earlier run left behind", "pid", pid)
	if err := unix.Kill(pid, unix.SIGTERM); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("end orphan BIRD %d: %w", pid, err)
	}
	return waitGone(ctx, pid, executable, socket)
}

// waitGone waits for the end of a process that is not our child, and kills it
// when it takes too long. A process descriptor tells the end without polling.
func waitGone(ctx context.Context, pid int, executable, socket string) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("wait for orphan BIRD %d: %w", pid, err)
	}
	defer unix.Close(fd)
	for _, signal := range []unix.Signal{0, unix.SIGKILL} {
		if signal != 0 && isOurBIRD(pid, executable, socket) {
			if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("kill orphan BIRD %d: %w", pid, err)
			}
		}
		for deadline := time.Now().Add(stopTimeout); time.Now().Before(deadline) && ctx.Err() == nil; {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100)
			if n > 0 {
				return nil
			}
			if err != nil && !errors.Is(err, unix.EINTR) {
				return fmt.Errorf("wait for orphan BIRD %d: %w", pid, err)
			}
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return fmt.Errorf("orphan BIRD %d does not end", pid)
}

// isOurBIRD tells whether a process runs the executable with our socket.
func isOurBIRD(pid int, executable, socket string) bool {
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return false
	}
	if want, err := filepath.EvalSymlinks(executable); err != nil || strings.TrimSuffix(exe, " (deleted)") != want {
		return false
	}
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && strings.Contains(string(args), "\x00"+socket+"\x00")
}

// replaceFile writes a file and moves it into place, so that nobody ever reads
// half of it and a full disk leaves the old one.
func replaceFile(path string, content []byte, mode fs.FileMode) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("write %s: %w", path, errors.Join(err, os.Remove(tmp.Name())))
		}
	}()
	_, err = tmp.Write(content)
	if err == nil {
		err = tmp.Chmod(mode)
	}
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}
