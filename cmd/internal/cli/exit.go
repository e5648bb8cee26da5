package cli

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// Exit statuses.
const (
	ExitOK     = 0
	ExitFailed = 1 // the process failed, or a VIP is not as desired
	ExitUsage  = 2 // the configuration or the command line was refused
)

// UsageError is an error of the user's configuration, reported with ExitUsage.
type UsageError struct{ error }

// Unwrap returns the cause.
func (e *UsageError) Unwrap() error { return e.error }

// Usage returns a [UsageError].
func Usage(format string, args ...any) error { return &UsageError{fmt.Errorf(format, args...)} }

// ExitError ends a command with a status and without a message.
type ExitError int

// Error names the status.
func (e ExitError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// stopMargin is how long a program may take to end after SIGTERM beyond its drain
// time: the bounded stages of its stop, and the removal of what it leaves.
const stopMargin = 30 * time.Second

// RunUntilStopped calls run with a channel that gets a value for each SIGTERM or SIGINT, and
// returns its error. It does not wait for a run that hangs after the first signal: a
// signal always ends the process.
func RunUntilStopped(drainTime time.Duration, run func(stops <-chan struct{}) error) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)
	return runUntil(signals, drainTime+stopMargin, run)
}

func runUntil(signals <-chan os.Signal, limit time.Duration, run func(stops <-chan struct{}) error) error {
	stops := make(chan struct{}, cap(signals))
	ended := make(chan error, 1)
	go func() { ended <- run(stops) }()
	var expired <-chan time.Time
	for {
		select {
		case err := <-ended:
			return err
		case <-signals:
			if expired == nil {
				expired = time.After(limit)
			}
			select {
			case stops <- struct{}{}:
			default: // a third signal means what the second did
			}
		case <-expired:
			return fmt.Errorf("still running %v after the first signal: a call of the start or of the cleanup hangs", limit)
		}
	}
}
