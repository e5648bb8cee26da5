package readiness

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
)

var errEndedReport = errors.New("the load balancer ended the report stream")

// WatcherOptions says what to watch and how.
type WatcherOptions struct {
	// Target is the load balancer's socket, as a path or as unix:///path.
	Target string
	// Credentials authenticate both sides; their handshake errors are passed on.
	Credentials credentials.TransportCredentials
	// Rotation returns how often our own SVID was replaced, and a channel that
	// is closed when that, or anything else about the SVID, may have changed: a
	// connection is replaced when the number changes, and one that could not be
	// made is tried again at once. nil: never.
	Rotation func() (uint64, <-chan struct{})
	// ConnectionEnd returns when a connection ends for good, the earlier
	// NotAfter of its two certificates. nil: never.
	ConnectionEnd func(credentials.AuthInfo) (time.Time, bool)
	// Reader is what we call ourselves in the load balancer's status.
	Reader string
	// MaxBackoff bounds the wait between two attempts. Default: DefaultMaxBackoff.
	MaxBackoff time.Duration
	Log        *slog.Logger
}

// Watcher watches a load balancer and reports to it. It implements task.Task.
type Watcher struct {
	opts   WatcherOptions
	path   string
	log    *slog.Logger
	inbox  *inbox
	outbox *outbox
	ready  chan struct{}
	stats  stats

	// Deadlines, shorter in tests.
	handshakeWithin, firstMessageWithin time.Duration
	// dial connects to the socket; in memory in tests.
	dial func(ctx context.Context, path string) (net.Conn, error)
}

type stats struct {
	streams, moves, failures, reportFailures, messages atomic.Uint64
}

// Stats counts what happened since the start.
type Stats struct {
	// Streams counts the watches that counted: the first on which the load
	// balancer spoke, those after a loss, and Moves.
	Streams uint64
	// Moves counts the moves to a second connection, which leave no gap.
	Moves uint64
	// Failures counts attempts that ended before the load balancer spoke, and
	// streams that ended after it did; not those that we ended ourselves.
	Failures uint64
	// ReportFailures counts report streams that ended otherwise than by us.
	ReportFailures uint64
	// Messages counts the messages of all watches.
	Messages uint64
}

// Reconnects returns how often a stream had to be opened again after a loss.
func (s Stats) Reconnects() uint64 { return s.Streams - s.Moves - min(1, s.Streams-s.Moves) }

// NewWatcher returns a watcher, which does nothing before Run.
func NewWatcher(o WatcherOptions) *Watcher {
	if o.MaxBackoff <= 0 {
		o.MaxBackoff = DefaultMaxBackoff
	}
	if o.Rotation == nil {
		o.Rotation = func() (uint64, <-chan struct{}) { return 0, nil }
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Watcher{
		opts:   o,
		path:   strings.TrimPrefix(strings.TrimPrefix(o.Target, "unix:"), "//"),
		log:    o.Log,
		inbox:  newInbox(),
		outbox: newOutbox(),
		ready:  make(chan struct{}),

		handshakeWithin:    defaultHandshakeWithin,
		firstMessageWithin: defaultFirstMessageWithin,
		dial:               dialUnix,
	}
}

// Changed returns a channel that holds a token whenever Take may return
// something new, also a renewed lease. It is for one reader.
func (w *Watcher) Changed() <-chan struct{} { return w.inbox.changed }

// Take returns everything heard since the last Take, merged. It never waits for
// the load balancer.
func (w *Watcher) Take() Update { return w.inbox.take() }

// Report hands over what changed in what the frontend does. It never waits for
// the load balancer: while that does not listen, changes merge, newest wins.
func (w *Watcher) Report(d ReportDelta) { w.outbox.report(d) }

// Reported waits until everything handed to Report before the call was written
// to the load balancer's connection, or ctx ends. That the load balancer has
// read it is certain once Run has returned.
func (w *Watcher) Reported(ctx context.Context) error { return w.outbox.settled(ctx) }

// Stats returns the counters.
func (w *Watcher) Stats() Stats {
	moves := w.stats.moves.Load()
	return Stats{
		Streams:        w.stats.streams.Load(),
		Moves:          moves,
		Failures:       w.stats.failures.Load(),
		ReportFailures: w.stats.reportFailures.Load(),
		Messages:       w.stats.messages.Load(),
	}
}

// Ready implements task.Task: it is closed once the watcher runs. Whether a
// load balancer is there is not a matter of the frontend's start.
func (w *Watcher) Ready() <-chan struct{} { return w.ready }

// String implements task.Task.
func (w *Watcher) String() string { return "readiness watcher" }
