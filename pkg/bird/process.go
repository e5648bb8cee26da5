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
// not block. chatty logs what BIRD says when all is well at level info.
func startProcess(executable, config, socket string, log *slog.Logger, chatty bool, events func(Event)) (*process, error) {
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
	lines := make(chan logged, maxPendingLines)
	go func() {
		p.last = drainLines(stderr, lines, events)
		p.err = p.cmd.Wait()
		close(p.exited)
	}()
	p.logging.Go(func() { logLines(lines, log, chatty) })
	if err := writePID(pidFile(socket), p.cmd.Process.Pid); err != nil {
		log.Warn("an orphan of this BIRD could not be found after a crash of ours", "error", err)
	}
	return p, nil
}

const (
	// maxEventLine bounds a line of the log; the rest of a longer one is lost.
	maxEventLine = 4096
	// maxPendingLines is how many lines may wait to be written to our own log.
	maxPendingLines = 1024
)

// logged is a line on its way to our log.
type logged struct {
	Event
	dropped int // lines before it that found no room
}

// drainLines reads BIRD's log until BIRD ends, and returns the last complaint in
// it. It never waits for whoever writes our log: a line that finds no room in
// lines is counted, and the number goes with the next one that does.
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
		if e.trouble() {
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

// logLines re-emits BIRD's log.
func logLines(lines <-chan logged, log *slog.Logger, chatty bool) {
	for e := range lines {
		attrs := []slog.Attr{slog.String("protocol", e.Protocol), slog.String("bird_level", e.Level)}
		if e.dropped > 0 {
			attrs = append(attrs, slog.Int("lines_dropped", e.dropped))
		}
		log.LogAttrs(context.Background(), e.level(chatty), "bird: "+e.Text, attrs...)
	}
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
// SIGTERM does what the command `down` does, and does not need BIRD to answer.
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
