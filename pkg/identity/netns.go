package identity

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/files"
)

const (
	// lockRetry is the poll interval of a lock that another process holds.
	lockRetry = 10 * time.Millisecond
	// lockWait bounds that wait; the other process writes a few files, which takes milliseconds.
	lockWait = 10 * time.Second
)

// waitLock takes the lock on path once it is free, within lockWait, or until ctx ends.
func waitLock(ctx context.Context, path string) (*files.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	for {
		lock, err := files.TryLock(path)
		if !errors.Is(err, files.ErrLocked) || backoff.Sleep(ctx, lockRetry) != nil {
			return lock, err
		}
	}
}

const (
	// ownerTimeout bounds the request to the owner of a network namespace.
	ownerTimeout = time.Second
	// maxOwnerText bounds the owner's response: a socket path and a few words.
	maxOwnerText = 256
)

// NetNSFallback configures the lock of [OwnNetNS] beside a socket of another user.
type NetNSFallback struct {
	// AdminSocket is in the directory of the lock file; "" fails beside any owner of the socket.
	AdminSocket string
	Log         *slog.Logger
}

// OwnNetNS makes this process the only one of its role ("lb", "frontend") in its network namespace
// until release is called or the process ends. The lock is an abstract unix socket: the kernel
// keeps it per network namespace, and no mount namespace or leftover file can hide or fake it.
// about is the text that other processes receive. While another process owns the namespace, the
// error names it.
//
// Any user can bind the socket. Beside one that is not trusted the lock is a file, which each
// process tries to hold.
func OwnNetNS(ctx context.Context, role, about string, fallback NetNSFallback) (release func(), err error) {
	name := "@vipgate/" + role
	listener, owner, err := bindOwner(ctx, name)
	switch {
	case owner != nil && (owner.trusted || fallback.AdminSocket == ""):
		return nil, fmt.Errorf("another %s (%s) owns this network namespace; stop it first", role, owner.text)
	case err != nil:
		return nil, fmt.Errorf("socket %s, which locks the network namespace: %w", name, err)
	}
	var lock *files.Lock
	if fallback.AdminSocket != "" {
		lock, err = lockNetNS(ctx, role, fallback.AdminSocket, owner != nil)
	}
	switch {
	case owner != nil && err != nil:
		return nil, fmt.Errorf("another user's process (%s) has the socket %s, which locks the network namespace; "+
			"the lock file instead of it: %w", owner.text, name, err)
	case owner != nil:
		fallback.Log.Warn("the socket that locks the network namespace belongs to another user, using a lock file",
			"socket", name, "owner", owner.text, "file", lock.Path())
	// The socket was another user's when a program with that lock started, and is free since.
	case errors.Is(err, files.ErrLocked):
		_ = listener.Close()
		return nil, fmt.Errorf("another %s owns this network namespace; stop it first: %w", role, err)
	}
	// The end of ctx starts the end of this process, which owns the namespace until release.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		serveOwner(ctx, listener, name, about)
	}()
	return func() {
		// First, since a successor that has the socket tries the lock only once.
		if lock != nil {
			// The kernel releases the lock of a process whose file system hangs.
			_, _ = files.Do(context.Background(), &files.Calls{}, lock.Path(),
				func() (struct{}, error) { return struct{}{}, lock.Remove() })
		}
		cancel()
		<-done
	}, nil
}

// bindOwner binds the socket of a role, or returns its owner.
func bindOwner(ctx context.Context, name string) (net.Listener, *netNSOwner, error) {
	// An owner of this program that starts or ends answers within that time.
	waiting, cancel := context.WithTimeout(ctx, ownerTimeout)
	defer cancel()
	for {
		listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", name)
		if !errors.Is(err, syscall.EADDRINUSE) {
			return listener, nil, err
		}
		owner := askOwner(waiting, name)
		if owner.known || backoff.Sleep(waiting, lockRetry) != nil {
			return nil, &owner, nil
		}
	}
}

// serveOwner sends about to all that ask until ctx ends, and binds a nil listener once it can.
func serveOwner(ctx context.Context, listener net.Listener, name, about string) {
	for listener == nil {
		if backoff.Sleep(ctx, ownerTimeout) != nil {
			return
		}
		listener, _ = (&net.ListenConfig{}).Listen(ctx, "unix", name)
	}
	defer listener.Close()
	defer context.AfterFunc(ctx, func() { _ = listener.(*net.UnixListener).SetDeadline(time.Now()) })()
	for ctx.Err() == nil {
		conn, err := listener.Accept()
		if err != nil {
			// Out of file descriptors, or ctx ended. The lock does not depend on the response.
			_ = backoff.Sleep(ctx, ownerTimeout)
			continue
		}
		// The response fits the socket buffer: no peer can block this.
		_, _ = io.WriteString(conn, about)
		_ = conn.Close()
	}
}

// lockNetNS locks a file beside the admin socket, for the network namespace of this process. It
// creates the directory only on request: one of a socket for a group has another mode.
func lockNetNS(ctx context.Context, role, adminSocket string, create bool) (*files.Lock, error) {
	path, err := SocketPath(adminSocket)
	if err != nil {
		return nil, err
	}
	dir := filepath.Dir(path)
	return files.Do(ctx, &files.Calls{}, "directory "+dir, func() (*files.Lock, error) {
		var namespace, directory, holder unix.Stat_t
		var err error
		if create {
			err = createDirectory(dir, 0o700)
		}
		err = errors.Join(err, unix.Stat(dir, &directory), unix.Stat("/proc/self/ns/net", &namespace))
		if err == nil && !isTrustedUser(directory.Uid) {
			err = fmt.Errorf("directory %s of user %d: it must belong to root or user %d", dir, directory.Uid, os.Geteuid())
		}
		if err != nil {
			return nil, err
		}
		file := filepath.Join(dir, fmt.Sprintf("%s.netns-%d.lock", role, namespace.Ino))
		lock, err := files.TryLock(file)
		// In a directory that all users may write, any user can hold the lock.
		if err != nil && unix.Lstat(file, &holder) == nil && !isTrustedUser(holder.Uid) {
			err = fmt.Errorf("%s belongs to user %d; use an --admin-socket in a directory that only this user can write",
				file, holder.Uid)
		}
		return lock, err
	})
}

// unitDirectories are those of the packaged units, in which a unit's user runs a program. Only root
// can create the first.
var unitDirectories = []string{"/run/vipgate", "/run/vipgate/target"}

// isTrustedUser reports whether a user is root, this process's, who can end it anyway, or a unit's.
func isTrustedUser(uid uint32) bool {
	isUnit := func(directory string) bool {
		var stat unix.Stat_t
		return unix.Lstat(directory, &stat) == nil && stat.Uid == uid
	}
	return uid == 0 || uid != UnmappedUser &&
		(uid == uint32(os.Geteuid()) || slices.ContainsFunc(unitDirectories, isUnit))
}

// NetNSOwner describes the process that owns the network namespace in a role, as [OwnNetNS] does in
// its error; "" if no process does. It reports whether a program of vipgate may be the owner: a
// process of a trusted user, or of another container of a pod.
func NetNSOwner(ctx context.Context, role string) (owner string, plausible bool) {
	name := "@vipgate/" + role
	ctx, cancel := context.WithTimeout(ctx, ownerTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", name)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return "", false
	}
	if err == nil {
		_ = conn.Close()
	}
	found := askOwner(ctx, name)
	return fmt.Sprintf("%s (%s)", role, found.text), found.trusted || found.hidden
}

// netNSOwner is the process that has bound the socket of a role.
type netNSOwner struct {
	text    string
	known   bool // the kernel reported its user
	trusted bool
	hidden  bool // in another PID namespace
}

// askOwner returns the owner of a network namespace: its process and user as reported by the
// kernel, since any process of the namespace can bind the socket, and its about text.
func askOwner(ctx context.Context, name string) netNSOwner {
	ctx, cancel := context.WithTimeout(ctx, ownerTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", name)
	if err != nil {
		return netNSOwner{text: "which does not answer: " + err.Error()}
	}
	defer conn.Close()
	cred, err := PeerProcess(conn)
	if err != nil {
		return netNSOwner{text: err.Error()}
	}
	who := fmt.Sprintf("pid %d, user %d", cred.Pid, cred.Uid)
	// SO_PEERCRED reports PID 0 for a process that this PID namespace does not contain.
	if cred.Pid == 0 {
		who = fmt.Sprintf("in another PID namespace, user %d", cred.Uid)
	}
	deadline, _ := ctx.Deadline()
	_ = conn.SetReadDeadline(deadline)
	about, err := io.ReadAll(io.LimitReader(conn, maxOwnerText))
	switch {
	case err != nil:
		who += ", which does not answer"
	// Any process can bind the socket: escape control characters before they reach a terminal.
	case bytes.ContainsFunc(about, func(r rune) bool { return r < ' ' || r > '~' }):
		who += fmt.Sprintf(", %q", about)
	default:
		who += ", " + string(about)
	}
	return netNSOwner{text: who, known: true, trusted: isTrustedUser(cred.Uid), hidden: cred.Pid == 0}
}
