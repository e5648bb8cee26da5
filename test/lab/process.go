package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a process in a namespace. Its output goes to a file.
type Process struct {
	Name string
	Log  string // path of the file that holds stdout and stderr
	Args []string

	cmd   *exec.Cmd
	done  chan struct{}
	err   error     // valid once done is closed
	ended time.Time // valid once done is closed
}

// StartProcess starts a program in a namespace with its output in dir/name.log,
// to which a second start appends.
func StartProcess(ns *NetNS, dir, name string, args ...string) (*Process, error) {
	path := filepath.Join(dir, name+".log")
	out, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("log of %s: %w", name, err)
	}
	defer out.Close()
	p := &Process{Name: name, Log: path, Args: args, cmd: exec.Command(args[0], args[1:]...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.Dir = dir
	p.cmd.Env = append(os.Environ(), "GOTRACEBACK=all")
	// A separate process group: otherwise a terminal's Ctrl-C would reach the process before the
	// lab stops it.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := ns.Start(p.cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		p.ended = time.Now()
		close(p.done)
	}()
	return p, nil
}

// PID returns the process ID.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Signal sends a signal. It succeeds if the process has ended.
func (p *Process) Signal(s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal %s to %s: %w", s, p.Name, err)
	}
	return nil
}

// Done returns a channel that is closed when the process ends.
func (p *Process) Done() <-chan struct{} { return p.done }

// Ended returns when the process ended; valid once Done is closed.
func (p *Process) Ended() time.Time { return p.ended }

// Wait waits for the end of the process and returns its exit status.
func (p *Process) Wait(ctx context.Context) (int, error) {
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode(), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("%s (pid %d) still runs: %w", p.Name, p.PID(), ctx.Err())
	}
}

// Kill ends the process with SIGKILL and waits for its end.
func (p *Process) Kill() error {
	if err := p.Signal(unix.SIGKILL); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	_, err := p.Wait(ctx)
	return err
}

// Stop ends processes with SIGTERM and waits for their ends. It fails unless each exit status is 0.
func Stop(ctx context.Context, processes ...*Process) error {
	for _, p := range processes {
		if err := p.Signal(unix.SIGTERM); err != nil {
			return err
		}
	}
	for _, p := range processes {
		if status, err := p.Wait(ctx); err != nil || status != 0 {
			return errors.Join(fmt.Errorf("%s ended with status %d", p.Name, status), err)
		}
	}
	return nil
}

// Output returns the output of the process so far.
func (p *Process) Output() string {
	b, err := os.ReadFile(p.Log)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// Tail returns the last n lines of Output.
func (p *Process) Tail(n int) string {
	lines := strings.Split(strings.TrimRight(p.Output(), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// Eventually waits until condition returns nil and returns its last error when ctx ends first. It
// checks every interval, because conditions of other processes have no channel to wait on, and
// conditions that start a process less often, which would take a processor otherwise.
func Eventually(ctx context.Context, interval time.Duration, condition func() error) error {
	var last error // the last error before ctx ended
	for {
		start := time.Now()
		err := condition()
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		select {
		case <-time.After(max(interval, min(4*time.Since(start), 250*time.Millisecond))):
		case <-ctx.Done():
			return fmt.Errorf("%w (waited until: %v)", last, ctx.Err())
		}
	}
}
