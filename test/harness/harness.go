// Package harness has the parts that the tests of most packages share.
package harness

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Must ends the test, which may be a *rapid.T, unless err is nil.
func Must(t interface {
	Helper()
	Fatal(args ...any)
}, err error,
) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Check fails the test, which continues, unless err is nil.
func Check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// As runs f as another user, on a thread of its own, and returns its error.
func As(uid int, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread ends with the goroutine
		// The raw system call changes only this thread.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			done <- errno
			return
		}
		done <- f()
	}()
	return <-done
}

// Context returns a context that ends with the test or after a timeout.
func Context(t testing.TB, timeout time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	t.Cleanup(cancel)
	return ctx
}

// WantText fails the test, which continues, unless text contains every part.
func WantText(t testing.TB, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("no %q in\n%s", part, text)
		}
	}
}

// WantError fails the test, which continues, unless err contains a text.
func WantError(t testing.TB, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v, want one that contains %q", err, text)
	}
}

// Run runs a task until the test ends or stop is called, and waits for it. An error of the task
// fails the test, except the end of its context.
func Run(t testing.TB, task func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := task(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("the task ended: %v", err)
		}
	})
	stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// Server is a server such as grpc.Server.
type Server interface {
	Serve(net.Listener) error
	Stop()
}

// Serve serves on a listener until the test ends or stop is called.
func Serve(t testing.TB, server Server, listener net.Listener) (stop func()) {
	t.Helper()
	var running sync.WaitGroup
	running.Go(func() {
		if err := server.Serve(listener); err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	stop = sync.OnceFunc(func() {
		server.Stop()
		running.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// Log collects log lines. The zero Log is ready for use.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Logger returns a logger of all levels.
func (l *Log) Logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns the lines so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
