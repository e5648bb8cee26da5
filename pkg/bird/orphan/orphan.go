// Package orphan ends a BIRD that outlived its frontend.
package orphan

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/identity"
)

// Lock locks the control socket: a second frontend must not terminate this one's BIRD as an orphan.
func Lock(socket string) (unlock func(), err error) {
	lock, err := files.TryLock(socket + ".lock")
	switch {
	case errors.Is(err, files.ErrLocked):
		return nil, fmt.Errorf("BIRD's control socket %s is in use by another frontend: %w; set another --bird-socket",
			socket, err)
	case err != nil:
		return nil, fmt.Errorf("failed to lock BIRD's control socket: %w", err)
	}
	return lock.Release, nil
}

// PIDFile returns the path of the PID file of the BIRD with a control socket.
func PIDFile(socket string) string { return socket + ".pid" }

const (
	socketTimeout = 2 * time.Second // of a connection to the control socket
	stopTimeout   = 2 * time.Second // after each signal
	maxPIDFile    = 64              // bytes
)

// Terminate ends each BIRD of an earlier frontend that runs with this control socket.
func Terminate(ctx context.Context, executable, socket string, log *slog.Logger) error {
	var errs []error
	seen := map[int]bool{}
	// A frontend may have ended before it wrote the PID file, or BIRD before it opened the socket.
	for _, find := range []func(context.Context, string) (int, error){recordedPID, servingPID} {
		pid, err := find(ctx, socket)
		errs = append(errs, err)
		if pid > 1 && !seen[pid] && matchesBIRD(pid, executable, socket) {
			seen[pid] = true
			log.Warn("terminating BIRD of an earlier run", "pid", pid)
			if err := terminate(ctx, pid); err != nil {
				errs = append(errs, fmt.Errorf("failed to terminate orphan BIRD %d: %w", pid, err))
			}
		}
	}
	return errors.Join(errs...)
}

// recordedPID returns the process in the PID file, or 0 without a file.
func recordedPID(_ context.Context, socket string) (int, error) {
	b, err := files.Read(PIDFile(socket), maxPIDFile)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	pid := 0
	if err == nil {
		pid, err = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	if err != nil {
		return 0, fmt.Errorf("failed to read BIRD's PID file %s: %w", PIDFile(socket), err)
	}
	return pid, nil
}

// servingPID returns the process that listens on the control socket, or 0 without a listener.
func servingPID(ctx context.Context, socket string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, socketTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return 0, nil // no process listens
	}
	defer conn.Close()
	peer, err := identity.PeerProcess(conn)
	if err != nil {
		return 0, err
	}
	return int(peer.Pid), nil
}

// terminate ends a process that is not a child. It waits for the exit by polling the pidfd.
func terminate(ctx context.Context, pid int) error {
	// A pidfd still refers to this process after its PID is reused.
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, signal := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
		if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
		for deadline := time.Now().Add(stopTimeout); time.Now().Before(deadline) && ctx.Err() == nil; {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100)
			if n > 0 {
				return nil
			}
			if err != nil && !errors.Is(err, unix.EINTR) {
				return err
			}
		}
	}
	return cmp.Or(ctx.Err(), errors.New("it did not exit after SIGKILL"))
}

// matchesBIRD reports whether a process runs the executable with this control socket.
func matchesBIRD(pid int, executable, socket string) bool {
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
