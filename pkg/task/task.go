package task

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// Task is one concurrent part of a process.
type Task interface {
	// Run works until ctx ends or the task fails. It returns nil or ctx's error when ctx ended.
	Run(ctx context.Context) error
	// String names the task in errors and logs.
	String() string
}

// StopTimeout is how long tasks may run after the end of their context. It exceeds every bounded
// wait of a task, so only a call without a deadline exceeds it.
const StopTimeout = 10 * time.Second

// Run runs the tasks until ctx ends or one of them fails, and waits for all of them. It returns the
// first failure, or nil. A task that still runs after [StopTimeout] is abandoned and named in the
// error: the process ends.
func Run(ctx context.Context, tasks ...Task) error {
	g, ctx := errgroup.WithContext(ctx)
	running := make([]atomic.Bool, len(tasks))
	for i, t := range tasks {
		running[i].Store(true)
		g.Go(func() error {
			defer running[i].Store(false)
			return Guard(ctx, t.String(), t.Run)
		})
	}
	ended := make(chan error, 1)
	go func() { ended <- g.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(StopTimeout):
	}
	var hung []string
	for i, t := range tasks {
		if running[i].Load() {
			hung = append(hung, t.String())
		}
	}
	err := fmt.Errorf("still running %v after the stop: task %s", StopTimeout, strings.Join(hung, ", "))
	if cause := context.Cause(ctx); !errors.Is(cause, ctx.Err()) {
		err = errors.Join(cause, err)
	}
	return err
}

// Guard calls run, turns a panic into an error with the stack, and adds the name of the task to
// every error. The end of ctx is not an error.
func Guard(ctx context.Context, name string, run func(context.Context) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("task %s: panic: %v\n%s", name, p, debug.Stack())
		}
	}()
	err = run(ctx)
	if err == nil || (ctx.Err() != nil && errors.Is(err, ctx.Err())) {
		return nil
	}
	return fmt.Errorf("task %s: %w", name, err)
}
