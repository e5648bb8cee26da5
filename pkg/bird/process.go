package bird

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/durable"
)

// process is a BIRD child process in a process group of its own. Its stderr is always drained,
// since a full pipe blocks BIRD.
type process struct {
	cmd    *exec.Cmd
	since  time.Time
	exited chan struct{}
	err    error  // valid once exited is closed
	last   string // the last error in its log, valid once exited is closed

	logging sync.WaitGroup
}

// startProcess starts BIRD. It calls events for each line of BIRD's log; events must not block.
// verbose logs lines that are neither warnings nor errors at info instead of debug.
func startProcess(
	executable, config, socket string, log *slog.Logger, verbose bool, events func(Event),
) (*process, error) {
	p := &process{exited: make(chan struct{}), since: time.Now()}
	p.cmd = exec.Command(executable, "-f", "-c", config, "-s", socket)
	// Not Pdeathsig: it fires when the forking thread ends, not the process.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		return nil, fmt.Errorf("failed to start BIRD: %w", err)
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("failed to start BIRD: %w", err)
	}
	lines := make(chan logged, maxPendingLines)
	go func() {
		p.last = drainLines(stderr, lines, events)
		p.err = p.cmd.Wait()
		close(p.exited)
	}()
	p.logging.Go(func() { logLines(lines, log, verbose) })
	if err := durable.Replace(pidFile(socket), fmt.Appendln(nil, p.pid()), 0o600); err != nil {
		log.Warn("failed to write BIRD's PID file; after a crash, BIRD is found only by its control socket", "error", err)
	}
	return p, nil
}

const (
	// maxEventLine bounds a line of BIRD's log; the rest of a longer line is discarded.
	maxEventLine = 4096
	// maxPendingLines is how many lines may wait to be written to the frontend's log.
	maxPendingLines = 1024
)

type logged struct {
	Event
	dropped int // lines that were discarded before it
}

// drainLines reads BIRD's log until BIRD exits, and returns the last error in it. It never waits
// for the writer of the frontend's log: while lines is full it discards and counts lines, and sends
// the count with the next line.
func drainLines(r io.Reader, lines chan<- logged, events func(Event)) (last string) {
	defer close(lines)
	reader := bufio.NewReaderSize(r, maxEventLine)
	dropped, rest := 0, false
	for {
		b, more, err := reader.ReadLine()
		if err != nil {
			return last // the process ended
		}
		isRest := rest
		if rest = more; isRest {
			continue
		}
		e := ParseEvent(string(b))
		events(e)
		if e.isError() {
			last = e.Text
		}
		select {
		case lines <- logged{e, dropped}:
			dropped = 0
		default:
			dropped++
		}
	}
}

func logLines(lines <-chan logged, log *slog.Logger, verbose bool) {
	for e := range lines {
		attrs := []slog.Attr{slog.String("protocol", e.Protocol), slog.String("bird_level", e.Level)}
		if e.dropped > 0 {
			attrs = append(attrs, slog.Int("lines_dropped", e.dropped))
		}
		log.LogAttrs(context.Background(), e.level(verbose), "bird: "+e.Text, attrs...)
	}
}

// wait waits until the process has exited and its log is written.
func (p *process) wait() {
	<-p.exited
	p.logging.Wait()
}

func (p *process) ended() error {
	how := "BIRD exited"
	if p.err != nil {
		how = "BIRD exited: " + p.err.Error()
	}
	if p.last != "" {
		how += ": " + p.last
	}
	return errors.New(how)
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) kill() {
	// Kill fails only for a process that has exited.
	_ = p.cmd.Process.Kill()
	<-p.exited
}

// stopTimeout bounds BIRD's exit after SIGTERM, which takes 10–90 ms with 20 000 routes.
const stopTimeout = 2 * time.Second

// terminate sends SIGTERM, and SIGKILL after stopTimeout, and waits for BIRD's exit. SIGTERM does
// the same as the command `down`, and does not need BIRD to answer.
func (p *process) terminate(log *slog.Logger) {
	_ = p.cmd.Process.Signal(unix.SIGTERM) // fails only if BIRD has exited
	timer := time.NewTimer(stopTimeout)
	defer timer.Stop()
	select {
	case <-p.exited:
	case <-timer.C:
		log.Warn("BIRD did not exit in time; killing it", "pid", p.pid(), "after", stopTimeout)
		p.kill()
	}
}
