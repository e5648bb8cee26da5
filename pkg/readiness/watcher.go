package readiness

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/tick"
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
	// Credentials authenticate both sides. Update.Err includes their handshake errors.
	Credentials credentials.TransportCredentials
	// Rotation returns the generation of the frontend's SVID and a channel that is closed when the
	// SVID may have changed. A new generation replaces the connection; the closed channel starts the
	// next attempt immediately. If Rotation is nil, the SVID never changes.
	Rotation func() (uint64, <-chan struct{})
	// ConnectionEnd returns the time when a connection ends, the earlier NotAfter of its two
	// certificates. If it is nil, connections have no end.
	ConnectionEnd func(credentials.AuthInfo) (time.Time, bool)
	// Reader is the name of this process in the load balancer's status.
	Reader string
	// Fallback reads a load balancer that responds Unimplemented to WatchReadiness, on the same
	// connection. Each new connection tries WatchReadiness first. Without a Fallback such a connection
	// fails.
	Fallback Fallback
	// Consume, if set, is called by the receiving goroutine for a decision about at most MaxInline
	// VIPs. It reports whether it called Take; otherwise Changed notifies of the decision. It must not
	// block.
	Consume func() bool
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

	fallbackRevision atomic.Uint64 // of the newest state of a fallback

	mu    sync.Mutex
	stats Stats

	// Deadlines, shorter in tests.
	handshakeWithin, firstMessageWithin time.Duration
	// dial connects to the socket; in memory in tests.
	dial func(ctx context.Context, path string) (net.Conn, error)
}

// MaxInline is the maximum number of VIPs in a decision that is passed to Consume. For larger
// decisions, waking the consumer costs less than handling the VIPs, and the consumer handles them
// while further messages are decoded.
const MaxInline = 64

// Stats are counters since the start.
type Stats struct {
	// Streams counts the used streams: the first stream with a message, each stream after a loss, and
	// each stream after a move. Moves counts the moves to a second connection, which leave no gap.
	Streams, Moves uint64
	// Failures counts the attempts and streams, ReportFailures the report streams, that the watcher
	// did not end.
	Failures, ReportFailures uint64
	Messages                 uint64 // of all watches
}

// Reconnects returns the number of streams that were opened after a loss.
func (s Stats) Reconnects() uint64 { return s.Streams - s.Moves - min(1, s.Streams-s.Moves) }

// NewWatcher returns a watcher, which is idle until Run.
func NewWatcher(o WatcherOptions) *Watcher {
	o.MaxBackoff = cmp.Or(o.MaxBackoff, DefaultMaxBackoff)
	if o.Rotation == nil {
		o.Rotation = func() (uint64, <-chan struct{}) { return 0, nil }
	}
	w := &Watcher{
		opts: o, path: strings.TrimPrefix(strings.TrimPrefix(o.Target, "unix:"), "//"),
		log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)), merger: newUpdateMerger(), queue: newReportQueue(),
		handshakeWithin: defaultHandshakeWithin, firstMessageWithin: defaultFirstMessageWithin,
		dial: func(ctx context.Context, path string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		},
	}
	w.merger.consume = o.Consume
	return w
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

// Reported waits until all reports queued before the call are written to the load balancer's
// connection, or ctx ends. The load balancer has read them once Run has returned.
func (w *Watcher) Reported(ctx context.Context) error { return w.queue.waitWritten(ctx) }

// Stats returns the counters.
func (w *Watcher) Stats() Stats {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stats
}

// String implements task.Task.
func (w *Watcher) String() string { return "readiness watcher" }

const (
	// socketPoll is the interval of checks for a new socket during a back-off, so that the watcher
	// connects to a starting load balancer without waiting for the end of the back-off.
	socketPoll = 20 * time.Millisecond
	// replacedPoll is the interval of checks for a replaced socket while a stream is open. It is
	// shorter for a fallback, whose load balancer does not send GoingAway.
	replacedPoll         = time.Second
	fallbackReplacedPoll = 100 * time.Millisecond
	// startTime is the time in which a load balancer that starts together with the frontend listens.
	startTime = 10 * time.Second
	// minMoveWait is the shortest remaining half-life of a connection for which a move is planned.
	minMoveWait = 100 * time.Millisecond
	// moveReportWithin bounds the wait for the report to be written to the second connection before
	// the first is closed; moveLinger is the time for the load balancer to read it.
	moveReportWithin = time.Second
	moveLinger       = 100 * time.Millisecond
)

// Run keeps a watch open until ctx ends. It then waits up to half a second for the load balancer to
// read the last report. It is called once.
func (w *Watcher) Run(ctx context.Context) error {
	// Connections outlive ctx, so that the load balancer can read the last report.
	base := context.WithoutCancel(ctx)
	r := reconnector{w: w, base: base, wait: w.newBackoff(), moveWait: w.newBackoff(), started: time.Now()}
	defer r.closeAll()
	r.connect()
	for ctx.Err() == nil {
		r.step(ctx)
	}
	return nil
}

// reconnector is the state of Run: it opens connections and selects the one in use.
type reconnector struct {
	w    *Watcher
	base context.Context

	current     *watchConn // nil during a back-off
	established bool       // current has received a message and reports
	wait        backoff.Backoff
	retry       <-chan time.Time // end of the back-off
	poll        <-chan time.Time // next check of the socket, in a back-off and while established
	attemptedAt time.Time        // start of the last attempt
	socket      socketID         // the socket at attemptedAt
	lastLogged  string           // last logged failure
	started     time.Time
	lbStarting  bool // the load balancer is expected to start: log at Info

	// State of a move to a second connection.
	next        *watchConn // replaces current when ready
	moveWait    backoff.Backoff
	moveAt      <-chan time.Time // half of the lifetime, or end of the back-off after a failed move
	moveBackoff bool             // moveAt is the end of a back-off
	moveDue     bool             // a move starts as soon as possible

	oldDone  chan struct{}      // closed once the replaced connection is closed; nil without one
	abortOld context.CancelFunc // closes the replaced connection immediately
}

// step waits for one event and handles it.
func (r *reconnector) step(ctx context.Context) {
	generation, rotated := r.w.opts.Rotation()
	due := r.moveDue || (r.established && r.current.generation != generation)
	if due && r.next == nil && r.oldDone == nil && !r.moveBackoff {
		r.moveDue = false
		r.next = r.w.open(r.base, generation)
	}
	var currentReceived, currentDone, nextReady, nextDone <-chan struct{}
	if r.current != nil {
		currentDone = r.current.done
		if !r.established {
			currentReceived = r.current.received
		}
	}
	if r.next != nil {
		nextDone, nextReady = r.next.done, r.next.synced
		if !isClosed(r.current.synced) {
			// An unsynced current has no state to lose, so move at the first message of next instead of
			// waiting for its synced snapshot.
			nextReady = r.next.received
		}
	}
	select {
	case <-ctx.Done():
	case <-rotated:
		// The rotation may have supplied a missing SVID. The load balancer may still be down, so do not
		// reset the back-off, and do not retry immediately after another attempt.
		if r.current == nil && time.Since(r.attemptedAt) >= minBackoff {
			r.connect()
		}
	case <-r.retry:
		r.connect()
	case <-r.poll:
		r.checkSocket()
	case <-currentReceived:
		r.establish()
	case <-currentDone:
		r.currentEnded()
	case <-nextReady:
		r.move()
	case <-nextDone:
		r.moveFailed()
	case <-r.moveAt:
		r.moveDue, r.moveBackoff = true, false
	case <-r.oldDone:
		r.abortOld()
		r.oldDone = nil
	}
}

// checkSocket connects to a replaced socket file. An open stream stays in use until the second
// connection has readiness, too. A stream of ReadinessService is kept until the load balancer sends
// GoingAway, because lb itself binds a removed socket again.
func (r *reconnector) checkSocket() {
	id, ok := statSocket(r.w.path)
	switch {
	case r.current == nil:
		r.poll = time.After(socketPoll)
		if ok && id != r.socket {
			r.wait.Reset()
			r.connect()
		}
	case r.established:
		r.pollReplaced()
		leaves := r.current.state.service != Service || r.w.merger.goingAway(&r.current.state)
		if leaves && ok && id != r.current.socket && r.next == nil && !r.moveDue && !r.moveBackoff {
			r.w.log.Info("readiness socket replaced, opening a second connection", "socket", r.w.path)
			r.moveDue = true
		}
	}
}

func (r *reconnector) pollReplaced() {
	interval := replacedPoll
	if r.current.state.service != Service {
		interval = fallbackReplacedPoll
	}
	r.poll = time.After(tick.Until(time.Now(), interval))
}

// connect starts an attempt.
func (r *reconnector) connect() {
	r.retry, r.poll = nil, nil
	r.attemptedAt = time.Now()
	r.socket, _ = statSocket(r.w.path)
	generation, _ := r.w.opts.Rotation()
	r.current = r.w.open(r.base, generation)
}

// establish is called when current has received a message. It selects current as the reporting
// connection and schedules the move to its replacement.
func (r *reconnector) establish() {
	r.established, r.lastLogged = true, ""
	r.countStream()
	r.moveWait.Reset()
	r.w.log.Info("readiness stream open", "socket", r.w.path, "service", r.current.state.service)
	r.pollReplaced()
	r.current.reporter <- r.w.queue.attach()
	r.moveAt, r.moveDue, r.moveBackoff = nil, false, false
	// Move after half of the remaining lifetime, plus or minus 10 %, so that frontends do not move in
	// step. The zero time of an unlimited lifetime gives a negative value.
	half := time.Duration(float64(time.Until(r.current.expires())) * (0.45 + 0.1*rand.Float64()))
	if half >= minMoveWait {
		r.moveAt = time.After(half)
	}
}

// countStream counts current as a used stream and resets the back-off.
func (r *reconnector) countStream() {
	r.wait.Reset()
	r.w.count(func(s *Stats) { s.Streams++ })
}

// currentEnded handles the end of current or of a failed attempt.
func (r *reconnector) currentEnded() {
	r.w.count(func(s *Stats) { s.Failures++ })
	err := r.current.err
	r.moveAt, r.moveDue, r.moveBackoff = nil, false, false
	wasOpen := isClosed(r.current.received)
	if wasOpen && !r.established {
		r.countStream() // the stream ended before step handled its first message
	}
	r.current, r.next, r.established = r.next, nil, false
	if r.current != nil {
		r.w.log.Warn("readiness stream lost, using the second connection", "error", err)
		return
	}
	after := r.wait.Next()
	r.retry, r.poll = time.After(after), time.After(socketPoll)
	switch text := err.Error(); {
	case wasOpen:
		r.w.log.Warn("readiness stream lost", "error", err, "retry_after", after)
	case text != r.lastLogged, r.lbStarting && time.Since(r.started) > startTime:
		r.lastLogged, r.lbStarting = text, r.isStarting(err)
		level := slog.LevelWarn
		if r.lbStarting {
			level = slog.LevelInfo
		}
		r.w.log.Log(r.base, level, "readiness connection failed", "error", err, "retry_after", after)
	default:
		r.w.log.Debug("readiness connection still failing", "error", err, "retry_after", after)
	}
}

// isStarting reports whether the load balancer is probably still starting, because the containers
// of a pod start in parallel.
func (r *reconnector) isStarting(err error) bool {
	absent := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
	return absent && r.w.Stats().Streams == 0 && time.Since(r.started) <= startTime
}

// move replaces current by next without a gap: the merger already has the lease of next, so move
// the report and then close the old connection.
func (r *reconnector) move() {
	ctx, cancel := context.WithTimeout(r.base, moveReportWithin)
	old := r.current
	r.oldDone, r.abortOld = make(chan struct{}), cancel
	r.current, r.next = r.next, nil
	r.w.count(func(s *Stats) { s.Moves++ })
	r.establish()
	go r.w.closeReplaced(ctx, old, r.oldDone)
}

// closeReplaced closes a connection when its successor has written the report or ctx ends.
func (w *Watcher) closeReplaced(ctx context.Context, old *watchConn, done chan<- struct{}) {
	defer close(done)
	if err := w.queue.waitWritten(ctx); err != nil {
		w.log.Warn("report not sent on the second connection in time", "error", err)
	}
	select {
	case <-time.After(moveLinger):
	case <-old.done:
	case <-ctx.Done():
	}
	old.close(errMoved)
}

// moveFailed handles a failed attempt to move.
func (r *reconnector) moveFailed() {
	r.w.count(func(s *Stats) { s.Failures++ })
	after := r.moveWait.Next()
	r.w.log.Warn("move to a second readiness connection failed, retrying", "error", r.next.err, "retry_after", after)
	r.next = nil
	r.moveAt, r.moveBackoff = time.After(after), true
}

// closeAll closes all connections. It gives the load balancer time to read the report on current.
func (r *reconnector) closeAll() {
	if r.next != nil {
		r.next.close(errStopped)
	}
	if r.current != nil && r.established {
		r.current.retire()
		select {
		case <-r.current.retired:
		case <-time.After(lastReportWithin):
			r.w.log.Warn("last report not read by the load balancer in time")
		}
	}
	if r.current != nil {
		r.current.close(errStopped)
	}
	if r.oldDone != nil {
		r.abortOld()
		<-r.oldDone
	}
}

// socketID identifies a socket file.
type socketID struct {
	device, inode uint64
	changed       syscall.Timespec
}

// statSocket returns the ID of the socket; false if the socket does not exist.
func statSocket(path string) (socketID, bool) {
	var st syscall.Stat_t
	err := syscall.Stat(path, &st)
	return socketID{st.Dev, st.Ino, st.Ctim}, err == nil
}
