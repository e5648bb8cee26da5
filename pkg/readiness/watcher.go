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
	// Fallback reads a load balancer that answers Unimplemented to WatchReadiness, on the connection
	// that it has answered on; each new connection asks first. nil: such a connection fails.
	Fallback Fallback
	// Consume, when set, is called for a decision about at most MaxInline VIPs by the goroutine that
	// received it. It reports whether it called Take; otherwise Changed notifies of the decision. It
	// must not block.
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

// MaxInline is the number of VIPs up to which Consume is called for a decision. The cost of more
// exceeds that of waking the consumer, and they are handled while further messages are decoded.
const MaxInline = 64

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

const (
	// socketPoll is the interval of checks for a new socket during a back-off, so that a start of
	// the load balancer is detected at once.
	socketPoll = 20 * time.Millisecond
	// replacedPoll is the interval of checks for a replaced socket while a stream is open: shorter of
	// a load balancer that does not say that it goes away.
	replacedPoll         = time.Second
	fallbackReplacedPoll = 100 * time.Millisecond
	// startTime is how long a load balancer that starts together with the frontend may take to listen.
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
	// Connections outlive ctx until the last report was read.
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
	retry       <-chan time.Time // during a back-off: its end
	poll        <-chan time.Time // the next check for a new socket, during a back-off and of established
	attemptedAt time.Time        // start of the last attempt
	socket      socketID         // the socket at that time
	lastLogged  string           // the last logged failure
	started     time.Time
	lbStarting  bool // the load balancer is expected to start: log at Info

	// A move to a second connection.
	next        *watchConn // is to replace current
	moveWait    backoff.Backoff
	moveAt      <-chan time.Time // half of the lifetime, or the end of the back-off after a failed move
	moveBackoff bool             // moveAt is the latter
	moveDue     bool             // half of the lifetime has passed

	oldDone  chan struct{}      // closed once the replaced connection is closed; nil: there is none
	abortOld context.CancelFunc // closes it at once
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
			// Before the first synced snapshot of current, a move loses nothing. The first message of
			// next precedes its first synced one.
			nextReady = r.next.received
		}
	}
	select {
	case <-ctx.Done():
	case <-rotated:
		// The rotation may have supplied a missing SVID. It says nothing about the load balancer,
		// so the back-off is not reset, and an attempt that has just started is not repeated.
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

// checkSocket connects to a socket file that was created again. A stream that is open stays in use
// until the second connection has readiness, too. One of ReadinessService remains until the load
// balancer goes away: lb itself binds a socket again that was removed.
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

// establish makes current, which has received a message, the reporting connection and plans its
// replacement.
func (r *reconnector) establish() {
	r.established, r.lastLogged = true, ""
	r.countStream()
	r.moveWait.Reset()
	r.w.log.Info("readiness stream open", "socket", r.w.path, "service", r.current.state.service)
	r.pollReplaced()
	r.current.reporter <- r.w.queue.attach()
	r.moveAt, r.moveDue, r.moveBackoff = nil, false, false
	// Half of the remaining lifetime, plus or minus 10 %, so that frontends do not move in step.
	half := time.Duration(float64(time.Until(r.current.expires())) * (0.45 + 0.1*rand.Float64()))
	if half >= minMoveWait { // not for an unlimited lifetime, a zero time
		r.moveAt = time.After(half)
	}
}

// countStream counts current, which has received a message.
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
		r.countStream() // it received and ended before step handled it
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

// isStarting reports whether an error means that the load balancer does not listen yet: the
// containers of a pod start in parallel.
func (r *reconnector) isStarting(err error) bool {
	absent := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
	return absent && r.w.Stats().Streams == 0 && time.Since(r.started) <= startTime
}

// move replaces current by next. The merger holds the lease of next already; the report is moved
// next, and the first connection is closed last.
func (r *reconnector) move() {
	ctx, cancel := context.WithTimeout(r.base, moveReportWithin)
	old := r.current
	r.oldDone, r.abortOld = make(chan struct{}), cancel
	r.current, r.next = r.next, nil
	r.w.count(func(s *Stats) { s.Moves++ })
	r.establish()
	go r.w.closeReplaced(ctx, old, r.oldDone)
}

// closeReplaced closes a connection once its successor has written the report, or ctx ends.
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

// closeAll closes all connections, current last, after the load balancer has read the report.
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

// statSocket returns the ID of the socket; false when it does not exist.
func statSocket(path string) (socketID, bool) {
	var st syscall.Stat_t
	err := syscall.Stat(path, &st)
	return socketID{st.Dev, st.Ino, st.Ctim}, err == nil
}
