package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// Exit statuses.
const (
	ExitOK     = 0
	ExitFailed = 1 // something that should be true is not, or the process failed
	ExitUsage  = 2 // the configuration or the command line was refused
)

// UsageError is an error of the user's configuration, told with ExitUsage.
type UsageError struct{ Err error }

// Error returns the message of Err.
func (e *UsageError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *UsageError) Unwrap() error { return e.Err }

// ExitError ends a command with a status and without a message.
type ExitError int

// Error names the status.
func (e ExitError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// Stops returns a channel that gets a value for each SIGTERM or SIGINT, and a
// function that ends that.
func Stops() (<-chan struct{}, func()) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	stops := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-signals:
			case <-ctx.Done():
				return
			}
			select {
			case stops <- struct{}{}:
			case <-ctx.Done():
				return
			}
		}
	})
	return stops, func() {
		signal.Stop(signals)
		cancel()
		wg.Wait()
	}
}
