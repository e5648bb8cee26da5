package readiness

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/vipgate/vipgate/pkg/backoff"
)

// Delays between connection attempts.
const (
	minBackoff        = 50 * time.Millisecond
	DefaultMaxBackoff = 2 * time.Second
	backoffJitter     = 0.2
)

// WatcherOptions configure a Watcher.
type WatcherOptions struct {
	// Target is the load balancer's socket, as a path or as unix:///path.
	Target string
	// Credentials authenticate both sides; their handshake errors are reported.
	Credentials credentials.TransportCredentials
	// Rotation returns the generation of the frontend's own SVID, whose change replaces a
	// connection, and a channel that is closed when the SVID may have changed, which starts the next
	// attempt at once. nil: never.
	Rotation func() (uint64, <-chan struct{})
	// ConnectionEnd returns when a connection ends, the earlier NotAfter of its two certificates.
	// nil: never.
	ConnectionEnd func(credentials.AuthInfo) (time.Time, bool)
	// Reader is the name of this process in the load balancer's status.
	Reader string
	// MaxBackoff bounds the delay between two attempts. Default: DefaultMaxBackoff.
	MaxBackoff time.Duration
	Log        *slog.Logger
}

// Watcher watches a load balancer and reports to it. It implements task.Task.
type Watcher struct {
	opts   WatcherOptions
	path   string
	log    *slog.Logger
	merger *updateMerger
	queue  *reportQueue

	mu    sync.Mutex
	stats Stats

	// Deadlines, shorter in tests.
	handshakeWithin, firstMessageWithin time.Duration
	// dial connects to the socket; in memory in tests.
	dial func(ctx context.Context, path string) (net.Conn, error)
}

// Stats are counters since the start.
type Stats struct {
	// Streams counts the streams that were used: the first on which a message arrived, those after
	// a loss, and Moves to a second connection, which leave no gap.
	Streams, Moves uint64
	// Failures counts attempts and streams, ReportFailures report streams, that ended by themselves.
	Failures, ReportFailures uint64
	Messages                 uint64 // of all watches
}

// Reconnects returns how often a stream was opened again after a loss.
func (s Stats) Reconnects() uint64 { return s.Streams - s.Moves - min(1, s.Streams-s.Moves) }

// NewWatcher returns a watcher, which is idle until Run.
func NewWatcher(o WatcherOptions) *Watcher {
	o.MaxBackoff = cmp.Or(o.MaxBackoff, DefaultMaxBackoff)
	if o.Rotation == nil {
		o.Rotation = func() (uint64, <-chan struct{}) { return 0, nil }
	}
	return &Watcher{
		opts: o, path: strings.TrimPrefix(strings.TrimPrefix(o.Target, "unix:"), "//"),
		log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)), merger: newUpdateMerger(), queue: newReportQueue(),
		handshakeWithin: defaultHandshakeWithin, firstMessageWithin: defaultFirstMessageWithin,
		dial: func(ctx context.Context, path string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		},
	}
}

func (w *Watcher) newBackoff() backoff.Backoff {
	return backoff.Backoff{Min: minBackoff, Max: w.opts.MaxBackoff, Jitter: backoffJitter}
}

// count changes the counters.
func (w *Watcher) count(change func(*Stats)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(&w.stats)
}

// Changed returns a channel that holds a token whenever Take may return a change or a renewed
// lease. It has one reader.
func (w *Watcher) Changed() <-chan struct{} { return w.merger.changed }

// Take returns the merged messages since the last Take. It does not block.
func (w *Watcher) Take() Update { return w.merger.take() }

// Report queues changes of the frontend's advertisements. It does not block: while the load
// balancer does not read, changes are merged (newest wins).
func (w *Watcher) Report(d ReportDelta) { w.queue.report(d) }

// Reported waits until everything queued before the call was written to the load balancer's
// connection, or ctx ends. The load balancer has read it once Run has returned.
func (w *Watcher) Reported(ctx context.Context) error { return w.queue.waitWritten(ctx) }

// Stats returns the counters.
func (w *Watcher) Stats() Stats {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stats
}

// String implements task.Task.
func (w *Watcher) String() string { return "readiness watcher" }
