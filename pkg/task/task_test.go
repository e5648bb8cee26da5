package task

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type fake struct {
	run   func(context.Context) error
	ready chan struct{}
}

func (f fake) Run(ctx context.Context) error { return f.run(ctx) }
func (f fake) Ready() <-chan struct{}        { return f.ready }
func (f fake) String() string                { return "fake" }

func wait(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

func TestRunRecoversPanic(t *testing.T) {
	err := Run(t.Context(), fake{run: wait}, fake{run: func(context.Context) error { panic("boom") }})
	if err == nil || !strings.Contains(err.Error(), "task fake: panic: boom") {
		t.Fatalf("got %v", err)
	}
}

func TestRunReturnsFirstFailure(t *testing.T) {
	cause := errors.New("cause")
	err := Run(t.Context(), fake{run: wait}, fake{run: func(context.Context) error { return cause }})
	if !errors.Is(err, cause) {
		t.Fatalf("got %v", err)
	}
}

func TestRunEndsWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Run(ctx, fake{run: wait}); err != nil {
		t.Fatalf("got %v", err)
	}
}

func TestRunNamesHungTask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		begin := time.Now()
		err := Run(ctx, fake{run: wait}, fake{run: func(context.Context) error { <-release; return nil }})
		if err == nil || !strings.HasSuffix(err.Error(), ": task fake") || time.Since(begin) != StopTimeout {
			t.Errorf("after %v: %v", time.Since(begin), err)
		}
		cause := errors.New("cause")
		err = Run(t.Context(), fake{run: func(context.Context) error { return cause }},
			fake{run: func(context.Context) error { <-release; return nil }})
		if !errors.Is(err, cause) || !strings.Contains(err.Error(), "still running") {
			t.Errorf("got %v", err)
		}
		close(release)
	})
}
