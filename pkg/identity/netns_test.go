package identity

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/test/harness"
)

func TestNetNSHasOneOwnerPerRole(t *testing.T) {
	role := "test-" + rand.Text()
	release, err := OwnNetNS(t.Context(), role, "admin socket unix:///run/a.sock", NetNSFallback{})
	harness.Must(t, err)
	want := fmt.Sprintf("another %s (pid %d, user %d, admin socket unix:///run/a.sock) owns this network namespace; "+
		"stop it first", role, os.Getpid(), os.Geteuid())
	for range 2 {
		if _, err := OwnNetNS(t.Context(), role, "", NetNSFallback{}); err == nil || err.Error() != want {
			t.Errorf("beside an owner: %v, want %s", err, want)
		}
	}
	other, err := OwnNetNS(t.Context(), role+"-other", "", NetNSFallback{})
	if err != nil {
		t.Errorf("another role: %v", err)
	} else {
		other()
	}
	owner := fmt.Sprintf("%s (pid %d, user %d, admin socket unix:///run/a.sock)", role, os.Getpid(), os.Geteuid())
	if got, plausible := NetNSOwner(t.Context(), role); got != owner || !plausible {
		t.Errorf("owner %q, want %q", got, owner)
	}
	release()
	if got, _ := NetNSOwner(t.Context(), role); got != "" {
		t.Errorf("owner %q after its end", got)
	}
	if release, err = OwnNetNS(t.Context(), role, "", NetNSFallback{}); err != nil {
		t.Fatalf("after the owner: %v", err)
	}
	release()
}

func TestOwnerTextIsQuoted(t *testing.T) {
	for _, tt := range []struct{ name, answer, want string }{
		{"escape sequences", "\x1b[2J", `"\x1b[2J"`},
		{"endless answer", strings.Repeat("x", 1<<20), strings.Repeat("x", maxOwnerText) + ") owns"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			role := "test-" + rand.Text()
			l, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", "@vipgate/"+role)
			harness.Must(t, err)
			done := make(chan struct{})
			go func() {
				defer close(done)
				if c, err := l.Accept(); err == nil {
					_, _ = c.Write([]byte(tt.answer)) // the peer closes before it has read everything
					_ = c.Close()
				}
			}()
			_, err = OwnNetNS(t.Context(), role, "", NetNSFallback{})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q in it", err, tt.want)
			}
			_ = l.Close()
			<-done
		})
	}
	t.Run("silent", func(t *testing.T) {
		role := "test-" + rand.Text()
		l, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", "@vipgate/"+role)
		harness.Must(t, err)
		defer l.Close()
		_, err = OwnNetNS(t.Context(), role, "", NetNSFallback{})
		harness.WantError(t, err, "which does not answer")
	})
}

// squat binds the socket of a role as another user.
func squat(t *testing.T, role string, user uintptr, listen bool) (closeSocket func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become another user")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	setUser := func(uid uintptr) {
		t.Helper()
		// The system call, unlike unix.Setresuid, changes only this thread.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uid, ^uintptr(0)); errno != 0 {
			t.Fatalf("set user %d: %v", uid, errno)
		}
	}
	setUser(user)
	defer setUser(0)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	harness.Must(t, err)
	closeSocket = sync.OnceFunc(func() { _ = unix.Close(fd) })
	t.Cleanup(closeSocket)
	harness.Must(t, unix.Bind(fd, &unix.SockaddrUnix{Name: "@vipgate/" + role}))
	if listen {
		harness.Must(t, unix.Listen(fd, 8))
	}
	return closeSocket
}

// A socket that another user has bound keeps no program from starting, and one program remains.
func TestNetNSSocketOfAnotherUser(t *testing.T) {
	for name, listen := range map[string]bool{"listens": true, "bound only": false} {
		t.Run(name, func(t *testing.T) {
			role := "test-" + rand.Text()
			free := squat(t, role, UnmappedUser, listen)
			var log bytes.Buffer
			dir := filepath.Join(t.TempDir(), "run")
			fallback := NetNSFallback{
				AdminSocket: "unix://" + dir + "/a.sock", Log: slog.New(slog.NewTextHandler(&log, nil)),
			}
			release, err := OwnNetNS(t.Context(), role, "first", fallback)
			harness.Must(t, err)
			if listen && !strings.Contains(log.String(), fmt.Sprintf("pid %d, user 65534", os.Getpid())) {
				t.Errorf("log %s", &log)
			}
			if _, err := OwnNetNS(t.Context(), role, "second", fallback); !errors.Is(err, files.ErrLocked) {
				t.Errorf("a second program: %v", err)
			}
			if _, err := OwnNetNS(t.Context(), role, "cleanup", NetNSFallback{}); err == nil {
				t.Error("a program without a lock file starts")
			}
			if owner, plausible := NetNSOwner(t.Context(), role); plausible {
				t.Errorf("another user's process is a plausible owner: %s", owner)
			}

			// The program takes the socket once it is free.
			free()
			for deadline := time.Now().Add(30 * time.Second); ; runtime.Gosched() {
				if owner, _ := NetNSOwner(t.Context(), role); strings.HasSuffix(owner, "first)") {
					break
				}
				if time.Now().After(deadline) {
					t.Fatal("the free socket is not bound")
				}
			}
			if _, err := OwnNetNS(t.Context(), role, "second", fallback); err == nil ||
				!strings.Contains(err.Error(), "first) owns") {
				t.Errorf("a second program beside both locks: %v", err)
			}
			release()
			if left, err := os.ReadDir(dir); len(left) > 0 || err != nil {
				t.Errorf("files %v, %v", left, err)
			}
			if release, err = OwnNetNS(t.Context(), role, "next", NetNSFallback{}); err != nil {
				t.Fatal(err)
			}
			release()
		})
	}
}

// The user of a unit is trusted by programs of other users.
func TestNetNSOwnerIsUserOfUnit(t *testing.T) {
	role, dir := "test-"+rand.Text(), t.TempDir()
	squat(t, role, 998, true)
	defer func(before []string) { unitDirectories = before }(unitDirectories)
	unitDirectories = []string{filepath.Join(dir, "missing"), dir}
	for user, want := range map[int]bool{998: true, 997: false} {
		harness.Must(t, os.Chown(dir, user, 0))
		fallback := NetNSFallback{AdminSocket: t.TempDir() + "/a.sock", Log: slog.New(slog.DiscardHandler)}
		release, err := OwnNetNS(t.Context(), role, "", fallback)
		if err == nil {
			release()
		}
		if (err != nil) != want {
			t.Errorf("beside user 998, in a directory of user %d: %v", user, err)
		}
		if owner, plausible := NetNSOwner(t.Context(), role); plausible != want {
			t.Errorf("owner %s, in a directory of user %d: plausible %t", owner, user, plausible)
		}
	}
	harness.Must(t, os.Chown(dir, UnmappedUser, 0))
	if isTrustedUser(UnmappedUser) {
		t.Error("all unmapped users are trusted")
	}
}

// A program that started beside another user's socket keeps a second one away as soon as the socket
// is free, before it has bound it.
func TestNetNSLockBesideFreeSocket(t *testing.T) {
	role, dir := "test-"+rand.Text(), t.TempDir()
	fallback := NetNSFallback{AdminSocket: dir + "/a.sock", Log: slog.New(slog.DiscardHandler)}
	first, err := lockNetNS(t.Context(), role, fallback.AdminSocket, false)
	harness.Must(t, err)
	for range 2 { // the refused program leaves the socket free
		if _, err := OwnNetNS(t.Context(), role, "", fallback); !errors.Is(err, files.ErrLocked) {
			t.Errorf("a second program: %v", err)
		}
	}
	harness.Must(t, first.Remove())
	// Nothing else about the file keeps a program that has the socket from starting.
	fallback.AdminSocket = filepath.Join(dir, "missing", "a.sock")
	ctx, cancel := context.WithCancel(t.Context())
	release, err := OwnNetNS(ctx, role, "first", fallback)
	harness.Must(t, err)
	if _, err := os.Stat(filepath.Join(dir, "missing")); !os.IsNotExist(err) {
		t.Errorf("the lock's directory: %v", err)
	}
	cancel()
	// A program that ends owns the namespace until then.
	if owner, _ := NetNSOwner(t.Context(), role); !strings.HasSuffix(owner, "first)") {
		t.Errorf("owner %q while it ends", owner)
	}
	release()
}

// The lock file of another user, in a directory that all may write, keeps no program from starting.
func TestNetNSLockOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become another user")
	}
	dir := t.TempDir()
	harness.Must(t, os.Chmod(filepath.Dir(dir), 0o755))
	harness.Must(t, os.Chmod(dir, 0o777))
	var netns unix.Stat_t
	harness.Must(t, unix.Stat("/proc/self/ns/net", &netns))
	for _, tt := range []struct {
		name     string
		user     uint32
		squatted bool
		want     string // in the error
	}{
		{"own user", 0, false, "stop it first"},
		{"another user", 997, false, ""},
		{"another user, who has the socket, too", 997, true, "belongs to user 997; use an --admin-socket"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			role := "test-" + rand.Text()
			file := fmt.Sprintf("%s/%s.netns-%d.lock", dir, role, netns.Ino)
			holder := exec.Command("flock", file, "sh", "-c", "echo locked; cat")
			holder.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: tt.user, Gid: tt.user}}
			stdin, err := holder.StdinPipe()
			harness.Must(t, err)
			stdout, err := holder.StdoutPipe()
			harness.Must(t, err)
			harness.Must(t, holder.Start())
			defer func() { _, _ = stdin.Close(), holder.Wait() }()
			_, err = stdout.Read(make([]byte, 1))
			harness.Must(t, err)
			if tt.squatted {
				squat(t, role, uintptr(tt.user), true)
			}
			release, err := OwnNetNS(t.Context(), role, "",
				NetNSFallback{AdminSocket: dir + "/a.sock", Log: slog.New(slog.DiscardHandler)})
			if err == nil {
				release()
			}
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestNetNSLockRefusesOwnedDirectory(t *testing.T) {
	role, dir := "test-"+rand.Text(), t.TempDir()
	squat(t, role, UnmappedUser, true)
	fallback := NetNSFallback{AdminSocket: dir + "/a.sock", Log: slog.New(slog.DiscardHandler)}
	harness.Must(t, os.Chown(dir, UnmappedUser, 0))
	if _, err := OwnNetNS(t.Context(), role, "", fallback); err == nil || !strings.Contains(err.Error(), "user 65534") {
		t.Errorf("in a directory of another user: %v", err)
	}
	harness.Must(t, os.Chown(dir, 0, 0))
	// The link does not lead the lock to another file.
	var netns unix.Stat_t
	harness.Must(t, unix.Stat("/proc/self/ns/net", &netns))
	harness.Must(t, os.Symlink(dir+"/other", fmt.Sprintf("%s/%s.netns-%d.lock", dir, role, netns.Ino)))
	if _, err := OwnNetNS(t.Context(), role, "", fallback); !errors.Is(err, unix.ELOOP) {
		t.Errorf("through a symbolic link: %v", err)
	}
}
