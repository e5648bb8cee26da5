package bird

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
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
	err    error  // valid once exited is closed
	last   string // the last complaint in the log, valid once exited is closed

	logging sync.WaitGroup
}

// startProcess starts BIRD. events is called for each line of its log; it must
// not block.
func startProcess(executable, config, socket string, log *slog.Logger, info bool, events func(Event)) (*process, error) {
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
	lines := make(chan Event, maxPendingLines)
	go func() {
		p.last = drainLines(stderr, lines, events)
		p.err = p.cmd.Wait()
		close(p.exited)
	}()
	p.logging.Go(func() { logLines(lines, log, info) })
	if err := writePID(pidFile(socket), p.cmd.Process.Pid); err != nil {
		log.Warn("an orphan of this BIRD could not be found after a crash of ours", "error", err)
	}
	return p, nil
}

const (
	// maxEventLine bounds a line of the log; what is longer comes in pieces.
	maxEventLine = 4096
	// maxPendingLines is how many lines may wait to be written to our own log.
	maxPendingLines = 1024
)

// drainLines reads BIRD's log until BIRD ends, and returns the last complaint in
// it. It never waits for whoever writes our log: a line that finds no room in
// lines is counted, and the number goes with the next one that does.
func drainLines(r io.Reader, lines chan<- Event, events func(Event)) (last string) {
	defer close(lines)
	reader := bufio.NewReaderSize(r, maxEventLine)
	dropped := 0
	for {
		b, _, err := reader.ReadLine()
		if err != nil {
			return last // the process ended
		}
		e := ParseEvent(string(b))
		events(e)
		if e.level() >= slog.LevelError || e.Level == "" {
			last = e.Text
		}
		e.dropped = dropped
		select {
		case lines <- e:
			dropped = 0
		default:
			dropped++
		}
	}
}

// logLines re-emits BIRD's log. What is no warning is for debugging, or at level
// info if so asked.
func logLines(lines <-chan Event, log *slog.Logger, info bool) {
	for e := range lines {
		level := e.level()
		if level == slog.LevelInfo && !info {
			level = slog.LevelDebug
		}
		attrs := []slog.Attr{slog.String("protocol", e.Protocol), slog.String("bird_level", e.Level)}
		if e.dropped > 0 {
			attrs = append(attrs, slog.Int("lines_dropped", e.dropped))
		}
		log.LogAttrs(context.Background(), level, "bird: "+e.Text, attrs...)
	}
}

// level is how much a line matters.
func (e Event) level() slog.Level {
	if e.Text == "Shutdown completed" || strings.Contains(e.Text, "without explicit authentication") {
		return slog.LevelInfo // FATAL and WARN only in name
	}
	switch e.Level {
	case "WARN", "WARNING":
		return slog.LevelWarn
	case "ERR", "ERROR", "FATAL", "BUG":
		return slog.LevelError
	}
	return slog.LevelInfo
}

// wait waits for the end of the process and of the writing of its log.
func (p *process) wait() {
	<-p.exited
	p.logging.Wait()
}

// ended says how the process ended.
func (p *process) ended() error {
	how := "BIRD ended by itself"
	if p.err != nil {
		how = "BIRD ended: " + p.err.Error()
	}
	if p.last != "" {
		how += ": " + p.last
	}
	return errors.New(how)
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// kill ends BIRD at once and waits.
func (p *process) kill() {
	// It fails only for a process that has ended.
	_ = p.cmd.Process.Kill()
	<-p.exited
}

// stopTimeout is how long BIRD gets to end: it takes 10–90 ms with 20 000 routes.
const stopTimeout = 2 * time.Second

// terminate asks BIRD to end and waits; what does not end in time is killed.
func (p *process) terminate(log *slog.Logger) {
	_ = p.cmd.Process.Signal(unix.SIGTERM) // fails only if it has ended
	timer := time.NewTimer(stopTimeout)
	defer timer.Stop()
	select {
	case <-p.exited:
	case <-timer.C:
		log.Warn("BIRD did not end in time; killing it", "pid", p.pid(), "after", stopTimeout)
		p.kill()
	}
}

// lockSocket makes sure that no other frontend runs a BIRD on the same control
// socket: it would be taken for an orphan. The lock ends with the process.
func lockSocket(socket string) (unlock func(), err error) {
	f, err := os.OpenFile(socket+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock of BIRD's control socket: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("BIRD's control socket %s is in use by another frontend: give this one its own --bird-socket: %w", socket, err), f.Close())
	}
	return func() { _ = f.Close() }, nil // closing ends the lock, whatever it returns
}

func pidFile(socket string) string { return socket + ".pid" }

func writePID(path string, pid int) error {
	return replaceFile(path, []byte(strconv.Itoa(pid)+"\n"), 0o600)
}

// endOrphan ends every BIRD that an earlier run of ours left behind: the process
// in the pid file and the one that serves our control socket, if they are BIRD
// with our socket.
func endOrphan(ctx context.Context, executable, socket string, log *slog.Logger) error {
	var errs []error
	seen := map[int]bool{}
	for _, find := range []func(context.Context, string) (int, error){recordedPID, servingPID} {
		pid, err := find(ctx, socket)
		if err != nil {
			errs = append(errs, err)
		}
		if pid <= 1 || seen[pid] || !isOurBIRD(pid, executable, socket) {
			continue
		}
		seen[pid] = true
		log.Warn("ending a BIRD that an earlier run left behind", "pid", pid)
		errs = append(errs, waitGone(ctx, pid))
	}
	return errors.Join(errs...)
}

// recordedPID returns the process in the pid file, 0 if there is none.
func recordedPID(_ context.Context, socket string) (int, error) {
	b, err := os.ReadFile(pidFile(socket))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("pid file of an earlier BIRD: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0, fmt.Errorf("pid file %s: %w", pidFile(socket), err)
	}
	return pid, nil
}

// servingPID returns the process that listens on the control socket, 0 if there
// is none. It finds a BIRD whose pid we had no time to record.
func servingPID(ctx context.Context, socket string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return 0, nil // nobody listens
	}
	pid, err := peerPID(conn)
	return pid, errors.Join(err, conn.Close())
}

// waitGone ends a process that is not our child and waits for its end; what does
// not end in time is killed. A process descriptor names this process for as long
// as it is open, whoever gets its number, and tells the end without polling.
func waitGone(ctx context.Context, pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("end orphan BIRD %d: %w", pid, err)
	}
	defer unix.Close(fd)
	for _, signal := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
		if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("end orphan BIRD %d: %w", pid, err)
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
