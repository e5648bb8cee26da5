package identity_test

import (
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

func listen(t *testing.T, path string, mode fs.FileMode) (net.Listener, error) {
	t.Helper()
	l, err := identity.Listen(t.Context(), identity.ListenOptions{Path: path, Mode: mode})
	if err == nil {
		t.Cleanup(func() { l.Close() })
	}
	return l, err
}

func umask(t *testing.T, mask int) {
	old := syscall.Umask(mask)
	t.Cleanup(func() { syscall.Umask(old) })
}

func modeOf(t *testing.T, path string) fs.FileMode {
	t.Helper()
	info, err := os.Lstat(path)
	must(t, err)
	return info.Mode()
}

func TestSocketAndDirectoryModes(t *testing.T) {
	for _, mask := range []int{0, 0o022, 0o077, 0o177} {
		for socket, directory := range map[fs.FileMode]fs.FileMode{0: 0o700, 0o600: 0o700, 0o660: 0o750} {
			base := identitytest.ShortDir(t)
			umask(t, mask)
			path := filepath.Join(base, "a", "b", "s.sock")
			_, err := listen(t, "unix://"+path, socket)
			must(t, err)
			if socket == 0 {
				socket = 0o600
			}
			if got := modeOf(t, path); got != fs.ModeSocket|socket {
				t.Errorf("umask %#o: the socket has mode %v, not %#o", mask, got, socket)
			}
			for _, dir := range []string{filepath.Join(base, "a"), filepath.Join(base, "a", "b")} {
				if got := modeOf(t, dir).Perm(); got != directory {
					t.Errorf("umask %#o: %s has mode %#o, not %#o", mask, dir, got, directory)
				}
			}
			if got := syscall.Umask(mask); got != mask {
				t.Errorf("the umask of the process became %#o", got)
			}
		}
	}
}

// The mode is checked right after bind, before any chmod.
func TestSocketModeAtBind(t *testing.T) {
	umask(t, 0)
	for _, mode := range []fs.FileMode{0o600, 0o660} {
		path := filepath.Join(identitytest.ShortDir(t), "s.sock")
		l, err := identity.Bind(t.Context(), path, mode)
		must(t, err)
		if got := modeOf(t, path).Perm(); got != mode {
			t.Errorf("bound with mode %#o, not %#o", got, mode)
		}
		must(t, l.Close())
	}
}

func TestExistingDirectoryKeepsItsMode(t *testing.T) {
	dir := identitytest.ShortDir(t)
	must(t, os.Chmod(dir, 0o711))
	_, err := listen(t, filepath.Join(dir, "s.sock"), 0o660)
	must(t, err)
	if got := modeOf(t, dir).Perm(); got != 0o711 {
		t.Fatalf("mode %#o", got)
	}
}

// leftover creates a socket without a listener, like a killed process.
func leftover(t *testing.T, path string) {
	t.Helper()
	l, err := net.Listen("unix", path)
	must(t, err)
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	must(t, l.Close())
}

func TestStaleSocketIsReplaced(t *testing.T) {
	path := filepath.Join(identitytest.ShortDir(t), "s.sock")
	leftover(t, path)
	must(t, os.WriteFile(path+".lock", nil, 0o600)) // without its lock
	_, err := listen(t, path, 0)
	must(t, err)
	c, err := net.Dial("unix", path)
	must(t, err)
	must(t, c.Close())
}

func TestSocketInUse(t *testing.T) {
	for _, c := range []struct {
		name  string
		serve func(path string) (net.Listener, error)
	}{
		{"ours", func(path string) (net.Listener, error) { return listen(t, path, 0) }},
		{"another program's", func(path string) (net.Listener, error) { return net.Listen("unix", path) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(identitytest.ShortDir(t), "s.sock")
			l, err := c.serve(path)
			must(t, err)
			defer l.Close()
			if _, err := listen(t, path, 0); !errors.Is(err, identity.ErrSocketInUse) || !strings.Contains(err.Error(), path) {
				t.Fatalf("got %v", err)
			}
			conn, err := net.Dial("unix", path)
			if err != nil {
				t.Fatalf("the live socket was harmed: %v", err)
			}
			must(t, conn.Close())
		})
	}
}

func TestNonSocketIsNotRemoved(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"a file":          func(path string) error { return os.WriteFile(path, []byte("precious"), 0o600) },
		"a directory":     func(path string) error { return os.Mkdir(path, 0o700) },
		"a symbolic link": func(path string) error { return os.Symlink("/dev/null", path) },
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(identitytest.ShortDir(t), "s.sock")
			must(t, make(path))
			before := modeOf(t, path)
			if _, err := listen(t, path, 0); err == nil || !strings.Contains(err.Error(), "is not a socket but "+name) {
				t.Fatalf("got %v", err)
			}
			if got := modeOf(t, path); got != before {
				t.Fatalf("it became %v", got)
			}
			if _, err := os.Lstat(path + ".lock"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the lock file was left: %v", err)
			}
		})
	}
}

func TestCloseRemovesSocketAndLock(t *testing.T) {
	dir := identitytest.ShortDir(t)
	path := filepath.Join(dir, "s.sock")
	l, err := listen(t, path, 0)
	must(t, err)
	must(t, l.Close())
	must(t, l.Close())
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 0 {
		t.Fatalf("left: %v, %v", entries, err)
	}
}

func TestCloseKeepsForeignSocket(t *testing.T) {
	path := filepath.Join(identitytest.ShortDir(t), "s.sock")
	l, err := listen(t, path, 0)
	must(t, err)
	must(t, os.Remove(path))
	other, err := net.Listen("unix", path)
	must(t, err)
	defer other.Close()
	must(t, l.Close())
	if _, err := os.Lstat(path); err != nil {
		t.Fatal(err)
	}
}

// watched listens, answers every connection with one byte, and returns the reports about the
// socket.
func watched(t *testing.T, path string) (net.Listener, <-chan error) {
	t.Helper()
	reports := make(chan error, 100)
	l, err := identity.Listen(t.Context(), identity.ListenOptions{Path: path, Watch: func(err error) { reports <- err }})
	must(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l, reports
}

// waitReport waits for a report with this text; "" means that the socket is bound.
func waitReport(t *testing.T, reports <-chan error, says string) {
	t.Helper()
	deadline := time.After(waitLimit)
	for {
		select {
		case err := <-reports:
			if says == "" && err == nil || says != "" && err != nil && strings.Contains(err.Error(), says) {
				return
			}
		case <-deadline:
			t.Fatalf("no report %q", says)
		}
	}
}

// echo sends a byte and reads it back.
func echo(t *testing.T, c net.Conn) {
	t.Helper()
	must(t, c.SetDeadline(time.Now().Add(waitLimit)))
	_, err := c.Write([]byte{1})
	must(t, err)
	_, err = io.ReadFull(c, make([]byte, 1))
	must(t, err)
}

func TestRemovedSocketIsRebound(t *testing.T) {
	for _, c := range []struct {
		name   string
		remove func(path string) error
	}{
		{"socket", os.Remove},
		{"socket and lock", func(path string) error { return errors.Join(os.Remove(path), os.Remove(path+".lock")) }},
		{"directory", func(path string) error { return os.RemoveAll(filepath.Dir(path)) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(identitytest.ShortDir(t), "run")
			path := filepath.Join(dir, "s.sock")
			l, reports := watched(t, path)
			waitReport(t, reports, "")
			before, err := net.Dial("unix", path)
			must(t, err)
			defer before.Close()
			echo(t, before)
			must(t, c.remove(path))
			waitReport(t, reports, "the socket was removed")
			waitReport(t, reports, "")
			echo(t, before)
			after, err := net.Dial("unix", path)
			must(t, err)
			defer after.Close()
			echo(t, after)
			if got := modeOf(t, path); got != fs.ModeSocket|0o600 {
				t.Errorf("mode %v", got)
			}
			if _, err := listen(t, path, 0); !errors.Is(err, identity.ErrSocketInUse) {
				t.Errorf("a second listener: %v", err)
			}
			must(t, l.Close())
			if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
		})
	}
}

// A process that took over the path keeps it.
func TestReplacedSocketIsKept(t *testing.T) {
	for _, c := range []struct {
		name string
		lock bool
	}{{"without a lock", false}, {"with the lock", true}} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(identitytest.ShortDir(t), "s.sock")
			l, reports := watched(t, path)
			var other net.Listener
			err := errors.New("not tried")
			for range 10 { // the listener may be faster
				if err == nil {
					break
				}
				_ = os.Remove(path)
				if c.lock {
					_ = os.Remove(path + ".lock")
					other, err = listen(t, path, 0)
				} else {
					other, err = net.Listen("unix", path)
				}
			}
			must(t, err)
			waitReport(t, reports, identity.ErrSocketInUse.Error())
			must(t, l.Close())
			before := modeOf(t, path)
			must(t, other.Close())
			if before.Type() != fs.ModeSocket {
				t.Errorf("the path holds %v", before)
			}
			_, err = os.Lstat(path + ".lock")
			if gone := errors.Is(err, fs.ErrNotExist); !gone {
				t.Errorf("the lock file is left: %v", err)
			}
		})
	}
}

func TestConcurrentListen(t *testing.T) {
	path := filepath.Join(identitytest.ShortDir(t), "s.sock")
	leftover(t, path)
	var live, wins atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 200 {
				l, err := identity.Listen(t.Context(), identity.ListenOptions{Path: path})
				if err != nil {
					if !errors.Is(err, identity.ErrSocketInUse) {
						t.Error(err)
					}
					continue
				}
				if n := live.Add(1); n != 1 {
					t.Errorf("%d listen at once", n)
				}
				wins.Add(1)
				live.Add(-1)
				harness.Check(t, l.Close())
			}
		})
	}
	wg.Wait()
	if wins.Load() == 0 {
		t.Fatal("no listener succeeded")
	}
}

func TestInvalidSocketAddresses(t *testing.T) {
	dir := identitytest.ShortDir(t)
	must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	long := filepath.Join(dir, strings.Repeat("x", 107-len(dir)-1))
	for _, c := range []struct {
		path string
		mode fs.FileMode
		says string
	}{
		{"", 0, "empty"},
		{"unix://", 0, "absolute path"},
		{"unix://run/lb.sock", 0, "absolute path"},
		{"@abstract", 0, "abstract"},
		{"unix:@abstract", 0, "abstract"},
		{"/run/a\x00b", 0, "zero byte"},
		{long + "x", 0, "108 bytes, the maximum is 107"},
		{filepath.Join(dir, "s"), 0o666, "only permissions for user and group"},
		{filepath.Join(dir, "s"), 0o700, "only permissions for user and group"},
		{filepath.Join(dir, "s"), 0o600 | fs.ModeSetgid, "only permissions for user and group"},
		{filepath.Join(dir, "file", "s"), 0, "not a directory"},
	} {
		_, err := listen(t, c.path, c.mode)
		harness.WantError(t, err, c.says)
	}
	if _, err := listen(t, long, 0); err != nil {
		t.Errorf("107 bytes: %v", err)
	}
}
