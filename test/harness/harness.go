// Package harness has the parts that the tests of most packages share.
package harness

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
)

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
