package bird

import (
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
)

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
