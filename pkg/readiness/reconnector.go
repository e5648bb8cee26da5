package readiness

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
)

const (
	// socketPoll is the interval of checks for a new socket during a back-off, so that a start of
	// the load balancer is detected at once.
	socketPoll = 20 * time.Millisecond
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
	retry, poll <-chan time.Time // during a back-off: its end, the next check for a new socket
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
		r.poll = time.After(socketPoll)
		if id, ok := statSocket(r.w.path); ok && id != r.socket {
			r.wait.Reset()
			r.connect()
		}
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
	r.w.log.Info("readiness stream open", "socket", r.w.path)
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
