package identity

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
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/tick"
)

const (
	// maxSocketPath is the maximum path length in sun_path (unix(7): 108 bytes with the final zero).
	maxSocketPath = 107
	// probeTimeout bounds the connect that distinguishes a stale socket from a live one.
	probeTimeout = time.Second
	// watchInterval is the poll interval of the socket file. Unlike inotify, a stat detects a
	// directory that was removed and created again.
	watchInterval = time.Second
)

// ErrSocketInUse is wrapped when another process serves the socket.
var ErrSocketInUse = errors.New("in use by another process")

// ListenOptions configure Listen.
type ListenOptions struct {
	// Path is "unix:///run/vipgate/lb.sock" or "/run/vipgate/lb.sock", with at most 107 bytes of
	// path. The lock file has the same name plus ".lock".
	Path string
	// Mode is the mode of the socket: 0600, or 0660 for processes that share a group. Permissions
	// for other users are rejected. Zero: 0600.
	Mode fs.FileMode
	// Watch is called with nil once the socket is bound, with an error when its file was removed or
	// replaced, and with nil once it is bound again. It must not block. Optional.
	Watch func(error)
}

// Listen listens on a unix socket that is never more accessible than Mode.
//
// A missing directory is created with mode 0700, or 0750 when the group may use the socket. The
// socket of a dead process is removed; a socket in use is an error ([ErrSocketInUse]), and so is a
// file that is not a socket. A socket whose file is removed while the listener is open is bound
// again within seconds; connections are not affected. Close removes the socket and its lock file.
func Listen(ctx context.Context, options ListenOptions) (net.Listener, error) {
	path, err := SocketPath(options.Path)
	if err != nil {
		return nil, err
	}
	mode := cmp.Or(options.Mode, 0o600)
	if mode&^0o660 != 0 {
		return nil, fmt.Errorf("mode %#o for socket %s: only permissions for user and group (0600, 0660) are allowed", mode,
			path)
	}
	bound, err := openSocket(ctx, path, mode)
	if err != nil {
		return nil, err
	}
	watching, cancel := context.WithCancel(context.WithoutCancel(ctx))
	if options.Watch == nil {
		options.Watch = func(error) {}
	}
	options.Watch(nil)
	listener := &socketListener{path: path, mode: mode, report: options.Watch, bound: bound, cancel: cancel}
	listener.watching.Go(func() { listener.watch(watching) })
	return listener, nil
}

// openSocket binds the socket under a lock, which makes probe, removal and bind atomic for vipgate.
func openSocket(ctx context.Context, path string, mode fs.FileMode) (_ *boundSocket, err error) {
	directory := fs.FileMode(0o700)
	if mode&0o060 != 0 {
		directory = 0o750 // the group needs search and read permission only
	}
	if err := createDirectory(filepath.Dir(path), directory); err != nil {
		return nil, fmt.Errorf("directory of socket %s: %w", path, err)
	}
	lock, err := files.TryLock(path + ".lock")
	switch {
	case errors.Is(err, files.ErrLocked):
		return nil, fmt.Errorf("socket %s is %w", path, ErrSocketInUse)
	case err != nil:
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, lock.Remove())
		}
	}()
	if err := removeStaleSocket(ctx, path); err != nil {
		return nil, err
	}
	listener, err := bind(ctx, path, mode)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	// Only needed if the umask removed the group's permissions.
	if err := os.Chmod(path, mode); err != nil {
		return nil, errors.Join(fmt.Errorf("mode of socket %s: %w", path, err), listener.Close(), os.Remove(path))
	}
	info, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("socket %s: %w", path, err), listener.Close())
	}
	return &boundSocket{UnixListener: listener, path: path, info: info, lock: lock}, nil
}

// SocketPath returns the path in a unix socket's address: a path, or a URI such as unix:///path.
func SocketPath(address string) (string, error) {
	path, isURI := strings.CutPrefix(address, "unix:")
	if rest, ok := strings.CutPrefix(path, "//"); isURI && ok {
		path = rest
		if !strings.HasPrefix(path, "/") {
			return "", fmt.Errorf("socket %q: unix:// must be followed by an absolute path, "+
				"as in unix:///run/vipgate/lb.sock", address)
		}
	}
	switch {
	case path == "":
		return "", fmt.Errorf("socket %q: the path is empty", address)
	case strings.HasPrefix(path, "@"):
		return "", fmt.Errorf("socket %q: abstract sockets have no permissions, use a path", address)
	case strings.ContainsRune(path, 0):
		return "", fmt.Errorf("socket %q: the path contains a zero byte", address)
	}
	path = filepath.Clean(path)
	if len(path) > maxSocketPath {
		return "", fmt.Errorf("socket %s: the path has %d bytes, the maximum is %d", path, len(path), maxSocketPath)
	}
	return path, nil
}

// createDirectory creates dir and its missing parents.
func createDirectory(dir string, mode fs.FileMode) error {
	err := os.Mkdir(dir, mode)
	switch {
	case errors.Is(err, fs.ErrExist):
		return nil
	case errors.Is(err, fs.ErrNotExist):
		if err := createDirectory(filepath.Dir(dir), mode); err != nil {
			return err
		}
		return createDirectory(dir, mode)
	case err != nil:
		return err
	}
	return os.Chmod(dir, mode) // the umask may have removed the group's permissions
}

// removeStaleSocket removes the socket at path, and nothing else, if no process listens on it.
func removeStaleSocket(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("socket %s: %w", path, err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s is not a socket but %s; it is not removed", path, fileKind(info.Mode()))
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		_ = conn.Close()
		return fmt.Errorf("socket %s is %w", path, ErrSocketInUse)
	case !errors.Is(err, syscall.ECONNREFUSED):
		// A full backlog or missing permissions do not prove that the socket is stale.
		return fmt.Errorf("socket %s may be in use: %w", path, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("leftover socket: %w", err)
	}
	return nil
}

var fileKinds = map[fs.FileMode]string{0: "a file", fs.ModeDir: "a directory", fs.ModeSymlink: "a symbolic link"}

func fileKind(mode fs.FileMode) string {
	return cmp.Or(fileKinds[mode.Type()], "a "+mode.Type().String())
}

// bind binds the socket and listens; the socket is never more accessible than mode. The umask
// belongs to the whole process, and other goroutines create files, so it is not changed: Linux
// gives the new file the mode of the socket itself (less the umask), which fchmod sets beforehand.
func bind(ctx context.Context, path string, mode fs.FileMode) (*net.UnixListener, error) {
	config := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) error {
		var failed error
		if err := conn.Control(func(fd uintptr) { failed = unix.Fchmod(int(fd), uint32(mode.Perm())) }); err != nil {
			return err
		}
		return failed
	}}
	listener, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	u := listener.(*net.UnixListener)
	// Close removes the file itself: by then another process's socket may have the path.
	u.SetUnlinkOnClose(false)
	return u, nil
}

// boundSocket is a socket with its file and its lock.
type boundSocket struct {
	*net.UnixListener
	path string
	info fs.FileInfo
	lock *files.Lock
}

// checkPath returns an error unless the path leads to the socket.
func (socket *boundSocket) checkPath() error {
	info, err := os.Lstat(socket.path)
	switch {
	case err != nil:
		return fmt.Errorf("the socket was removed: %w", err)
	case !os.SameFile(info, socket.info):
		return fmt.Errorf("the socket %s was replaced by %s", socket.path, fileKind(info.Mode()))
	}
	return nil
}

// socketListener removes its socket and lock file when it is closed, and binds the socket again
// when its file is removed.
type socketListener struct {
	path     string
	mode     fs.FileMode
	report   func(error)
	cancel   context.CancelFunc
	watching sync.WaitGroup

	mu    sync.Mutex
	bound *boundSocket

	once sync.Once
	err  error
}

func (listener *socketListener) current() *boundSocket {
	listener.mu.Lock()
	defer listener.mu.Unlock()
	return listener.bound
}

// Accept returns the next connection, also after a rebind.
func (listener *socketListener) Accept() (net.Conn, error) {
	for {
		socket := listener.current()
		conn, err := socket.Accept()
		// rebind closed the old socket: its error is expected, and the new socket accepts.
		if err == nil || listener.current() == socket {
			return conn, err
		}
	}
}

// Addr returns the address of the socket.
func (listener *socketListener) Addr() net.Addr { return listener.current().Addr() }

// watch binds the socket again when its file is removed, until ctx ends.
func (listener *socketListener) watch(ctx context.Context) {
	for backoff.Sleep(ctx, tick.Until(time.Now(), watchInterval)) == nil {
		lost := listener.bound.checkPath() // only this goroutine writes listener.bound
		if lost != nil {
			if err := listener.rebind(ctx); err != nil {
				listener.report(fmt.Errorf("%w; failed to bind it again: %w", lost, err))
				continue
			}
			listener.report(lost) // for the log
		}
		listener.report(nil)
	}
}

// rebind binds a new socket in place of the one whose file was removed.
func (listener *socketListener) rebind(ctx context.Context) error {
	old := listener.bound
	// Its file may be removed, too, or belong to another process; a repeated attempt has no effect.
	_ = old.lock.Remove()
	bound, err := openSocket(ctx, listener.path, listener.mode)
	if err != nil {
		return err
	}
	listener.mu.Lock()
	listener.bound = bound
	listener.mu.Unlock()
	// Accept continues with the new socket; an error has no consequence.
	_ = old.Close()
	return nil
}

// Close stops listening and removes the socket unless it was replaced.
func (listener *socketListener) Close() error {
	listener.once.Do(func() {
		listener.cancel()
		listener.watching.Wait()
		// Remove the path first, so that no client finds a socket that refuses connections.
		var err error
		if listener.bound.checkPath() == nil {
			err = os.Remove(listener.path)
		}
		listener.err = errors.Join(listener.bound.Close(), err, listener.bound.lock.Remove())
	})
	return listener.err
}

// PeerProcess returns the credentials of the process that connected to or accepted a unix socket
// (SO_PEERCRED, unix(7)).
func PeerProcess(conn net.Conn) (*unix.Ucred, error) {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("a %T has no peer credentials", conn)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("peer credentials: %w", err)
	}
	var cred *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) {
		cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, failed); err != nil {
		return nil, fmt.Errorf("peer credentials: %w", err)
	}
	return cred, nil
}

// peerAttrs returns log attributes of the peer process as far as they are known.
func peerAttrs(conn net.Conn) []any {
	cred, err := PeerProcess(conn)
	if err != nil {
		return []any{"peer_address", conn.RemoteAddr().String()}
	}
	return []any{slog.Int("peer_pid", int(cred.Pid)), slog.Uint64("peer_uid", uint64(cred.Uid))}
}

// AdminGuard authorizes connections to an admin socket by the process that opened them.
type AdminGuard struct {
	uid      uint32
	log      *slog.Logger
	throttle logs.Throttle
}

// NewAdminGuard returns a guard that accepts processes of the same user and of root (SO_PEERCRED).
// It logs rejections, rate-limited.
func NewAdminGuard(log *slog.Logger) *AdminGuard {
	return &AdminGuard{uid: uint32(os.Geteuid()), log: log}
}

// Authorize returns an error, and closes the connection, unless its peer is authorized.
func (guard *AdminGuard) Authorize(conn net.Conn) error {
	key := "admin"
	cred, err := PeerProcess(conn)
	// The kernel reports UnmappedUser for any user outside of the user namespace.
	if err == nil && cred.Uid != 0 && (cred.Uid != guard.uid || cred.Uid == UnmappedUser) {
		key = fmt.Sprint(cred.Uid)
		err = fmt.Errorf("user %d may not use this socket, only user %d and root", cred.Uid, guard.uid)
		if cred.Uid == guard.uid {
			err = fmt.Errorf("user %d may not use this socket, only root: it stands for any unmapped user", cred.Uid)
		}
	}
	if err == nil {
		return nil
	}
	guard.throttle.Log(guard.log.Warn, key, "admin connection refused", append(peerAttrs(conn), "error", err)...)
	return errors.Join(err, conn.Close())
}
