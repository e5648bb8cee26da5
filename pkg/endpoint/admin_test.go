package endpoint

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/lab"
)

func TestWatchStatusInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		changes := latest.New(0)
		var sent atomic.Int32
		ended := make(chan error)
		go func() {
			ended <- WatchStatus(ctx, changes, func() error {
				sent.Add(1)
				return nil
			})
		}()
		want := func(n int32) {
			t.Helper()
			synctest.Wait()
			if got := sent.Load(); got != n {
				t.Errorf("%d messages, want %d", got, n)
			}
		}
		want(1)
		for i := range 5 {
			changes.Set(i)
			want(1)
		}
		time.Sleep(statusInterval)
		want(2)
		time.Sleep(10 * statusInterval)
		want(2)
		changes.Set(7)
		want(3)
		cancel()
		if err := <-ended; status.Code(err) != codes.Canceled {
			t.Errorf("got %v", err)
		}
	})
}

// The peer's kernel credentials decide, even if the socket has a wider mode.
func TestAdminSocketRefusesOtherUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		lab.Skip(t, "root, to connect as another user")
	}
	dir := identitytest.ShortDir(t)
	path := filepath.Join(dir, "admin.sock")
	e, err := NewAdmin(t.Context(), path, slog.New(slog.DiscardHandler), metrics.NewLB("test"), nil, registerHealth)
	harness.Must(t, err)
	harness.Run(t, e.Run)
	harness.Must(t, errors.Join(os.Chmod(dir, 0o755), os.Chmod(path, 0o666)))
	for uid, allowed := range map[int]bool{0: true, 65534: false} {
		answer, err := requestAs(uid, path)
		harness.Must(t, err)
		if got := strings.HasPrefix(answer, "HTTP/1.0 200"); got != allowed || !allowed && answer != "" {
			t.Errorf("user %d: answer %.40q, want one: %v", uid, answer, allowed)
		}
	}
}

// requestAs requests the pprof index as another user and returns the response.
func requestAs(uid int, path string) (answer string, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, because the thread keeps the user ID
		if _, _, number := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); number != 0 {
			err = number
			return
		}
		var fd int
		if fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return
		}
		f := os.NewFile(uintptr(fd), path)
		defer f.Close()
		if err = unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
			return
		}
		_, _ = io.WriteString(f, "GET /debug/pprof/ HTTP/1.0\r\n\r\n") // the peer may have closed it
		content, _ := io.ReadAll(f)
		answer = string(content)
	}()
	<-done
	return answer, err
}
