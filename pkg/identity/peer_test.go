package identity_test

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/lab"
)

// dialAs connects as another user. The thread with that user ends with the goroutine, since it is
// never unlocked.
func dialAs(t *testing.T, uid int, path string) net.Conn {
	t.Helper()
	type result struct {
		c   net.Conn
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread()
		var r result
		// The raw system call changes only this thread.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			r.err = errno
		} else {
			r.c, r.err = net.Dial("unix", path)
		}
		done <- r
	}()
	r := <-done
	must(t, r.err)
	t.Cleanup(func() { r.c.Close() })
	return r.c
}

func TestAdminSocketUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		lab.Skip(t, "root, to connect as another user")
	}
	for _, c := range []struct {
		name           string
		server, client int
		in             bool
	}{
		{"root to root", 0, 0, true},
		{"another user to root", 0, 1001, false},
		{"the same user", 1000, 1000, true},
		{"another user", 1000, 1001, false},
		{"root to a user", 1000, 0, true},
		{"unmapped user", identity.UnmappedUser, identity.UnmappedUser, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := identitytest.ShortDir(t)
			must(t, os.Chmod(dir, 0o711))
			path := filepath.Join(dir, "admin.sock")
			l, err := net.Listen("unix", path)
			must(t, err)
			defer l.Close()
			must(t, os.Chmod(path, 0o666)) // only the credentials are under test
			journal, log := newJournal()
			guard := identity.NewAdminGuard(log)
			identity.SetAdminUser(guard, uint32(c.server))

			conn := dialAs(t, c.client, path)
			accepted, err := l.Accept()
			must(t, err)
			defer accepted.Close()
			err = guard.Authorize(accepted)
			if c.in {
				must(t, err)
				return
			}
			if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("user %d may not use this socket", c.client)) {
				t.Fatalf("got %v", err)
			}
			journal.wait(t, map[string]any{"msg": "admin connection refused", "peer_uid": float64(c.client), "level": "WARN"})
			if _, err := conn.Read(make([]byte, 1)); err == nil {
				t.Fatal("the connection stayed open")
			}
		})
	}
}

func TestAdminSocketNeedsPeerCredentials(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	if err := identity.NewAdminGuard(slog.New(slog.DiscardHandler)).Authorize(a); err == nil {
		t.Fatal("was let in")
	}
}
