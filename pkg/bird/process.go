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

	"github.com/vipgate/vipgate/pkg/bird/orphan"
	"github.com/vipgate/vipgate/pkg/durable"
)

// process is a BIRD child process. Its stderr is always drained, since a full pipe blocks BIRD.
type process struct {
	cmd    *exec.Cmd
	since  time.Time
	exited chan struct{}
	err    error  // valid once exited is closed
	last   string // the last error in its log, valid once exited is closed

	running sync.WaitGroup // the goroutines that end with the process
}

// startProcess starts BIRD and calls events, which must not block, for each line of BIRD's log.
func startProcess(
	ctx context.Context, executable, config, socket string, log *slog.Logger, verbose bool, events func(stateEvent),
) (*process, error) {
	p := &process{exited: make(chan struct{}), since: time.Now()}
	p.cmd = exec.Command(executable, "-f", "-c", config, "-s", socket)
	// Pdeathsig is not usable: it fires when the forking thread exits, not the process.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, AmbientCaps: ambientCapabilities()}
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
	p.running.Go(func() { logLines(lines, log, verbose) })
	p.running.Go(func() { p.killAfter(ctx) })
	if err := durable.Replace(orphan.PIDFile(socket), fmt.Appendln(nil, p.pid()), 0o600); err != nil {
		log.Warn("failed to write BIRD's PID file; after a crash, BIRD is found only by its control socket",
			"error", err)
	}
	return p, nil
}

const (
	maxEventLine    = 4096 // bytes of a line of BIRD's log; the rest is discarded
	maxPendingLines = 1024 // lines that wait to be written to the frontend's log
)

type logged struct {
	stateEvent
	dropped int // lines that were discarded before it
}

// drainLines reads BIRD's log until BIRD exits, and returns the last error in it. While lines is
// full it discards and counts lines instead of waiting, and sends the count with the next line.
func drainLines(r io.Reader, lines chan<- logged, events func(stateEvent)) (last string) {
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
		event := parseEvent(string(b))
		events(event)
		if event.isError() {
			last = event.Text
		}
		select {
		case lines <- logged{event, dropped}:
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
func (process *process) wait() {
	<-process.exited
	process.running.Wait()
}

func (process *process) ended() error {
	how := "BIRD exited"
	if process.err != nil {
		how = "BIRD exited: " + process.err.Error()
	}
	if process.last != "" {
		how += ": " + process.last
	}
	return errors.New(how)
}

// killAfter kills BIRD if the supervisor does not terminate it after the end of ctx. The
// supervisor may block in the kernel on a directory lock of a file system that hangs while BIRD
// holds the lock: then this process cannot exit, even by SIGKILL, before BIRD exits.
func (process *process) killAfter(ctx context.Context) {
	select {
	case <-process.exited:
		return
	case <-ctx.Done():
	}
	select {
	case <-process.exited:
	case <-time.After(2 * stopTimeout):
		_ = process.cmd.Process.Kill() // fails only if BIRD has exited
	}
}

func (process *process) pid() int { return process.cmd.Process.Pid }

func (process *process) kill() {
	_ = process.cmd.Process.Kill() // fails only if BIRD has exited
	<-process.exited
}

// stopTimeout bounds BIRD's exit after SIGTERM, which takes 10–90 ms with 20 000 routes.
const stopTimeout = 2 * time.Second

// terminate sends SIGTERM, which acts as `down`, and SIGKILL after stopTimeout.
func (process *process) terminate(log *slog.Logger) {
	_ = process.cmd.Process.Signal(unix.SIGTERM) // fails only if BIRD has exited
	select {
	case <-process.exited:
	case <-time.After(stopTimeout):
		log.Warn("BIRD did not exit in time; killing it", "pid", process.pid(), "after", stopTimeout)
		process.kill()
	}
}

// linuxCapabilities lists the capabilities that BIRD requires to manage kernel routes, bind sockets
// to an interface, and listen on a port below 1024.
var linuxCapabilities = []int{unix.CAP_NET_ADMIN, unix.CAP_NET_BIND_SERVICE, unix.CAP_NET_RAW}

// secbitNoAmbient is SECBIT_NO_CAP_AMBIENT_RAISE (linux/securebits.h).
const secbitNoAmbient = 1 << 6

// ambientCapabilities returns the subset of linuxCapabilities that this process has. BIRD inherits
// them unless its executable has file capabilities. If BIRD has a capability that this process
// lacks, it is not dumpable, so this process cannot set TCP_NODELAY on its sockets.
func ambientCapabilities() []uintptr {
	bits, err := unix.PrctlRetInt(unix.PR_GET_SECUREBITS, 0, 0, 0, 0)
	if err != nil || bits&secbitNoAmbient != 0 {
		return nil
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData // version 3 has two words for 64 capabilities
	if unix.Capget(&header, &sets[0]) != nil {
		return nil
	}
	var list []uintptr
	for _, capability := range linuxCapabilities {
		if sets[capability/32].Permitted&(1<<(capability%32)) != 0 {
			list = append(list, uintptr(capability))
		}
	}
	return list
}
