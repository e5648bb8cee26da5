package readiness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	// connection. Each new connection tries WatchReadiness first. Without a Fallback it fails.
	Fallback Fallback
	// Consume, if set, is called by the receiving goroutine for a decision about at most MaxInline
	// VIPs. It reports whether it called Take; otherwise Changed notifies. It must not block.
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

// MaxInline is the maximum number of VIPs in a revision that is passed to Consume. Waking the
// consumer costs more than it gains: the other processor is BIRD's.
const MaxInline = maxRevisionVIPs

// Stats are counters since the start.
type Stats struct {
	// Streams counts the used streams: the first stream with a message, each stream after a loss, and
	// each stream after a move. Moves counts the moves to a second connection, which leave no gap.
	Streams, Moves uint64
	// Failures counts attempts and streams, ReportFailures report streams, not ended by the watcher.
	Failures, ReportFailures uint64
	Messages                 uint64 // of all watches
}

// Reconnects returns the number of streams that were opened after a loss.
func (s Stats) Reconnects() uint64 { return s.Streams - s.Moves - min(1, s.Streams-s.Moves) }

// NewWatcher returns a watcher, which is idle until Run.
func NewWatcher(options WatcherOptions) *Watcher {
	options.MaxBackoff = cmp.Or(options.MaxBackoff, DefaultMaxBackoff)
	if options.Rotation == nil {
		options.Rotation = func() (uint64, <-chan struct{}) { return 0, nil }
	}
	watcher := &Watcher{
		opts: options, path: strings.TrimPrefix(strings.TrimPrefix(options.Target, "unix:"), "//"),
		log: cmp.Or(options.Log, slog.New(slog.DiscardHandler)), merger: newUpdateMerger(), queue: newReportQueue(),
		handshakeWithin: defaultHandshakeWithin, firstMessageWithin: defaultFirstMessageWithin,
		dial: func(ctx context.Context, path string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		},
	}
	watcher.merger.consume = options.Consume
	return watcher
}

func (watcher *Watcher) newBackoff() backoff.Backoff {
	return backoff.Backoff{Min: minBackoff, Max: watcher.opts.MaxBackoff, Jitter: backoffJitter}
}

func (watcher *Watcher) count(change func(*Stats)) {
	watcher.mu.Lock()
	defer watcher.mu.Unlock()
	change(&watcher.stats)
}

// Changed returns a channel that holds a token whenever Take may return a change or a renewed
// lease. It has one reader.
func (watcher *Watcher) Changed() <-chan struct{} { return watcher.merger.changed }

// Take returns the merged messages since the last Take. It does not block.
func (watcher *Watcher) Take() Update { return watcher.merger.take() }

// Report queues changes of the frontend's advertisements. It does not block: while the load
// balancer does not read, changes are merged (newest wins).
func (watcher *Watcher) Report(delta ReportDelta) { watcher.queue.report(delta) }

// Reported waits until all reports queued before the call are written to the load balancer's
// connection, or ctx ends. The load balancer has read them once Run has returned.
func (watcher *Watcher) Reported(ctx context.Context) error { return watcher.queue.waitWritten(ctx) }

// Stats returns the counters.
func (watcher *Watcher) Stats() Stats {
	watcher.mu.Lock()
	defer watcher.mu.Unlock()
	return watcher.stats
}

// String implements task.Task.
func (watcher *Watcher) String() string { return "readiness watcher" }

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
func (watcher *Watcher) Run(ctx context.Context) error {
	// Connections outlive ctx, so that the load balancer can read the last report.
	base := context.WithoutCancel(ctx)
	reconnector := reconnector{
		w: watcher, base: base, wait: watcher.newBackoff(), moveWait: watcher.newBackoff(), started: time.Now(),
	}
	defer reconnector.closeAll()
	reconnector.connect()
	for ctx.Err() == nil {
		reconnector.step(ctx)
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

func (reconnector *reconnector) step(ctx context.Context) {
	// Read the generation before waiting: a rotation in between closes the channel, so none is missed.
	generation, rotated := reconnector.w.opts.Rotation()
	// One move at a time: the load balancer limits the streams of a SPIFFE ID.
	due := reconnector.moveDue || (reconnector.established && reconnector.current.generation != generation)
	if due && reconnector.next == nil && reconnector.oldDone == nil && !reconnector.moveBackoff {
		reconnector.moveDue = false
		reconnector.next = reconnector.w.open(reconnector.base, generation)
	}
	// A nil channel disables its case below.
	var currentReceived, currentDone, nextReady, nextDone <-chan struct{}
	if reconnector.current != nil {
		currentDone = reconnector.current.done
		if !reconnector.established {
			currentReceived = reconnector.current.received
		}
	}
	if reconnector.next != nil {
		nextDone, nextReady = reconnector.next.done, reconnector.next.synced
		if !isClosed(reconnector.current.synced) {
			// An unsynced current has no state to lose, so move at the first message of next instead of
			// waiting for its synced snapshot.
			nextReady = reconnector.next.received
		}
	}
	select {
	case <-ctx.Done():
	case <-rotated:
		// The rotation may have supplied a missing SVID. The load balancer may still be down, so do not
		// reset the back-off, and do not retry immediately after another attempt.
		if reconnector.current == nil && time.Since(reconnector.attemptedAt) >= minBackoff {
			reconnector.connect()
		}
	case <-reconnector.retry:
		reconnector.connect()
	case <-reconnector.poll:
		reconnector.checkSocket()
	case <-currentReceived:
		reconnector.establish()
	case <-currentDone:
		reconnector.currentEnded()
	case <-nextReady:
		reconnector.move()
	case <-nextDone:
		reconnector.moveFailed()
	case <-reconnector.moveAt:
		reconnector.moveDue, reconnector.moveBackoff = true, false
	case <-reconnector.oldDone:
		reconnector.abortOld()
		reconnector.oldDone = nil
	}
}

// checkSocket connects to a replaced socket file. An open stream stays in use until the second
// connection has readiness, too. A stream of ReadinessService is kept until the load balancer sends
// GoingAway, because lb itself binds a removed socket again.
func (reconnector *reconnector) checkSocket() {
	id, ok := statSocket(reconnector.w.path)
	switch {
	case reconnector.current == nil:
		reconnector.poll = time.After(socketPoll)
		if ok && id != reconnector.socket {
			reconnector.wait.Reset()
			reconnector.connect()
		}
	case reconnector.established:
		reconnector.pollReplaced()
		leaves := reconnector.current.state.service != Service || reconnector.w.merger.goingAway(&reconnector.current.state)
		moving := reconnector.next != nil || reconnector.moveDue || reconnector.moveBackoff
		if leaves && ok && id != reconnector.current.socket && !moving {
			reconnector.w.log.Info("readiness socket replaced, opening a second connection", "socket", reconnector.w.path)
			reconnector.moveDue = true
		}
	}
}

func (reconnector *reconnector) pollReplaced() {
	interval := replacedPoll
	if reconnector.current.state.service != Service {
		interval = fallbackReplacedPoll
	}
	reconnector.poll = time.After(tick.Until(time.Now(), interval))
}

func (reconnector *reconnector) connect() {
	reconnector.retry, reconnector.poll = nil, nil
	reconnector.attemptedAt = time.Now()
	reconnector.socket, _ = statSocket(reconnector.w.path)
	generation, _ := reconnector.w.opts.Rotation()
	reconnector.current = reconnector.w.open(reconnector.base, generation)
}

// establish is called when current has received a message. It selects current as the reporting
// connection and schedules the move to its replacement.
func (reconnector *reconnector) establish() {
	reconnector.established, reconnector.lastLogged = true, ""
	reconnector.countStream()
	reconnector.moveWait.Reset()
	reconnector.w.log.Info("readiness stream open", "socket", reconnector.w.path,
		"service", reconnector.current.state.service)
	reconnector.pollReplaced()
	reconnector.current.reporter <- reconnector.w.queue.attach()
	reconnector.moveAt, reconnector.moveDue, reconnector.moveBackoff = nil, false, false
	// Move after half of the remaining lifetime, plus or minus 10 %, so that frontends do not move in
	// step. The zero time of an unlimited lifetime gives a negative value.
	half := time.Duration(float64(time.Until(reconnector.current.expires())) * (0.45 + 0.1*rand.Float64()))
	if half >= minMoveWait {
		reconnector.moveAt = time.After(half)
	}
}

// countStream counts current as a used stream and resets the back-off.
func (reconnector *reconnector) countStream() {
	reconnector.wait.Reset()
	reconnector.w.count(func(stats *Stats) { stats.Streams++ })
}

// currentEnded handles the end of current or of a failed attempt.
func (reconnector *reconnector) currentEnded() {
	reconnector.w.count(func(stats *Stats) { stats.Failures++ })
	err := reconnector.current.err
	reconnector.moveAt, reconnector.moveDue, reconnector.moveBackoff = nil, false, false
	wasOpen := isClosed(reconnector.current.received)
	if wasOpen && !reconnector.established {
		reconnector.countStream() // the stream ended before step handled its first message
	}
	// A second connection under way is an attempt already; do not wait for the back-off.
	reconnector.current, reconnector.next, reconnector.established = reconnector.next, nil, false
	if reconnector.current != nil {
		reconnector.w.log.Warn("readiness stream lost, using the second connection", "error", err)
		return
	}
	after := reconnector.wait.Next()
	reconnector.retry, reconnector.poll = time.After(after), time.After(socketPoll)
	// A load balancer that is down fails every attempt alike: log a failure once.
	switch text := err.Error(); {
	case wasOpen:
		reconnector.w.log.Warn("readiness stream lost", "error", err, "retry_after", after)
	case text != reconnector.lastLogged, reconnector.lbStarting && time.Since(reconnector.started) > startTime:
		reconnector.lastLogged, reconnector.lbStarting = text, reconnector.isStarting(err)
		level := slog.LevelWarn
		if reconnector.lbStarting {
			level = slog.LevelInfo
		}
		reconnector.w.log.Log(reconnector.base, level, "readiness connection failed", "error", err, "retry_after", after)
	default:
		reconnector.w.log.Debug("readiness connection still failing", "error", err, "retry_after", after)
	}
}

// isStarting reports whether the load balancer is probably still starting, because the containers
// of a pod start in parallel.
func (reconnector *reconnector) isStarting(err error) bool {
	absent := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
	return absent && reconnector.w.Stats().Streams == 0 && time.Since(reconnector.started) <= startTime
}

// move replaces current by next without a gap: the merger already has the lease of next, so move
// the report and then close the old connection.
func (reconnector *reconnector) move() {
	ctx, cancel := context.WithTimeout(reconnector.base, moveReportWithin)
	old := reconnector.current
	reconnector.oldDone, reconnector.abortOld = make(chan struct{}), cancel
	reconnector.current, reconnector.next = reconnector.next, nil
	reconnector.w.count(func(stats *Stats) { stats.Moves++ })
	reconnector.establish()
	go reconnector.w.closeReplaced(ctx, old, reconnector.oldDone)
}

// closeReplaced closes a connection when its successor has written the report or ctx ends.
func (watcher *Watcher) closeReplaced(ctx context.Context, old *watchConn, done chan<- struct{}) {
	defer close(done)
	if err := watcher.queue.waitWritten(ctx); err != nil {
		watcher.log.Warn("report not sent on the second connection in time", "error", err)
	}
	select {
	case <-time.After(moveLinger):
	case <-old.done:
	case <-ctx.Done():
	}
	old.close(errMoved)
}

func (reconnector *reconnector) moveFailed() {
	reconnector.w.count(func(stats *Stats) { stats.Failures++ })
	after := reconnector.moveWait.Next()
	reconnector.w.log.Warn("move to a second readiness connection failed, retrying", "error", reconnector.next.err,
		"retry_after", after)
	reconnector.next = nil
	reconnector.moveAt, reconnector.moveBackoff = time.After(after), true
}

// closeAll closes all connections. It gives the load balancer time to read the report on current.
func (reconnector *reconnector) closeAll() {
	if reconnector.next != nil {
		reconnector.next.close(errStopped)
	}
	if reconnector.current != nil && reconnector.established {
		reconnector.current.retire()
		select {
		case <-reconnector.current.retired:
		case <-time.After(lastReportWithin):
			reconnector.w.log.Warn("last report not read by the load balancer in time")
		}
	}
	if reconnector.current != nil {
		reconnector.current.close(errStopped)
	}
	if reconnector.oldDone != nil {
		reconnector.abortOld()
		<-reconnector.oldDone
	}
}

type socketID struct {
	device, inode uint64
	changed       syscall.Timespec
}

// String identifies the socket in the instance ID of a fallback.
func (id socketID) String() string {
	return fmt.Sprintf("%x-%x-%x", id.device, id.inode, id.changed.Nano())
}

// statSocket returns the ID of the socket; false if the socket does not exist.
func statSocket(path string) (socketID, bool) {
	var stat syscall.Stat_t
	err := syscall.Stat(path, &stat)
	return socketID{stat.Dev, stat.Ino, stat.Ctim}, err == nil
}
