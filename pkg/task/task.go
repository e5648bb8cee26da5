package task

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"golang.org/x/sync/errgroup"
)

// Task is one concurrent part of a process.
type Task interface {
	// Run works until ctx ends, or fails. It returns nil, or ctx's error, when
	// it ended because ctx did.
	Run(ctx context.Context) error
	// Ready is closed once the task does its work; until then the process is
	// starting.
	Ready() <-chan struct{}
	// String names the task in errors and logs.
	String() string
}

// Run runs the tasks until ctx ends or one of them fails, and waits for all of
// them. It returns the first failure, or nil.
func Run(ctx context.Context, tasks ...Task) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, t := range tasks {
		g.Go(func() error { return Guard(ctx, t.String(), t.Run) })
	}
	return g.Wait()
}

// Guard calls run, turns a panic into an error that holds the stack, and names
// the task in every error. The end of ctx is not an error.
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

// AllReady waits until every task is ready or ctx ends.
func AllReady(ctx context.Context, tasks ...Task) error {
	for _, t := range tasks {
		select {
		case <-t.Ready():
		case <-ctx.Done():
			return fmt.Errorf("task %s was not ready: %w", t, ctx.Err())
		}
	}
	return nil
}
