package readiness

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"syscall"
	"time"
)

const (
	// socketPoll is how often the socket is looked at while it is awaited: a
	// start of the load balancer is noticed at once, however long the back-off
	// has become.
	socketPoll = 20 * time.Millisecond
	// leastMove is the shortest wait before a move that is due to the end of
	// the connection; closer to it a move gains nothing.
	leastMove = 100 * time.Millisecond
	// moveReportWithin bounds the wait for the report to be written to the
	// second connection before the first is closed, and moveLinger gives the
	// load balancer the time to read it.
	moveReportWithin = time.Second
	moveLinger       = 100 * time.Millisecond
)

// Run keeps a watch open until ctx ends. At the end it waits up to half a second
// for the load balancer to have read the last report. It is called once.
func (w *Watcher) Run(ctx context.Context) error {
	close(w.ready)
	k := keeper{
		w: w,
		// Links outlive ctx by that half second.
		base:     context.WithoutCancel(ctx),
		wait:     pause{max: w.opts.MaxBackoff},
		retry:    stoppedTimer(),
		poll:     time.NewTicker(socketPoll),
		moveWait: pause{max: w.opts.MaxBackoff},
		moveAt:   stoppedTimer(),
		started:  time.Now(),
	}
	k.poll.Stop()
	defer k.end()
	k.connect()
	for ctx.Err() == nil {
		k.step(ctx)
	}
	return nil
}

// keeper is the state of Run: it opens links and decides which one counts.
type keeper struct {
	w    *Watcher
	base context.Context

	current *link // nil while waiting to connect again
	spoke   bool  // the load balancer has spoken on current, which reports
	wait    pause
	retry   *time.Timer
	poll    *time.Ticker
	tried   time.Time // when the last attempt began
	socket  socketID  // the socket at that time
	logged  string    // the last failure that was logged
	started time.Time
	waiting bool // for a load balancer that starts beside us: that failure is none

	// A move to a second connection.
	next     *link // is to replace current
	moveWait pause
	moveAt   *time.Timer
	cooling  bool // moveAt ends the wait after a failed move, else half a life
	moveDue  bool // half of the life is over

	old     *link              // was replaced and is being closed
	oldDone chan struct{}      // closed once it is
	hurry   context.CancelFunc // closes it now
}

func stoppedTimer() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

// step waits for the next thing to happen and does what it asks for.
func (k *keeper) step(ctx context.Context) {
	generation, rotated := k.w.opts.Rotation()
	if due := k.moveDue || (k.spoke && k.current.generation != generation); due && k.next == nil && k.old == nil && !k.cooling {
		k.moveDue = false
		k.next = k.w.open(k.base, generation)
	}
	var retry <-chan time.Time
	var poll <-chan time.Time
	var currentSpoke, currentDone, nextSpoke, nextSynced, nextDone <-chan struct{}
	switch {
	case k.current == nil:
		retry, poll = k.retry.C, k.poll.C
	case k.spoke:
		currentDone = k.current.done
	default:
		currentDone, currentSpoke = k.current.done, k.current.spoke
	}
	if k.next != nil {
		nextDone, nextSynced = k.next.done, k.next.synced
		if !isClosed(k.current.synced) {
			// Nothing is lost by moving before the first synced snapshot.
			nextSpoke = k.next.spoke
		}
	}
	select {
	case <-ctx.Done():
	case <-rotated:
		// Without a connection this may be the SVID that was missing. It is
		// not news of ours, so the back-off goes on, and an attempt that has
		// just been made is not repeated.
		if k.current == nil && time.Since(k.tried) >= minBackoff {
			k.connect()
		}
	case <-retry:
		k.connect()
	case <-poll:
		if id, ok := identify(k.w.path); ok && id != k.socket {
			k.wait.reset()
			k.connect()
		}
	case <-currentSpoke:
		k.heard()
	case <-currentDone:
		k.lost()
	case <-nextSynced:
		k.move()
	case <-nextSpoke:
		k.move()
	case <-nextDone:
		k.notMoved()
	case <-k.moveAt.C:
		k.moveDue = !k.cooling || k.moveDue
		k.cooling = false
	case <-k.oldDone:
		k.hurry()
		k.old, k.oldDone = nil, nil
	}
}

// connect begins an attempt.
func (k *keeper) connect() {
	k.retry.Stop()
	k.poll.Stop()
	k.tried = time.Now()
	k.socket, _ = identify(k.w.path)
	generation, _ := k.w.opts.Rotation()
	k.current = k.w.open(k.base, generation)
}

// heard makes current, on which the load balancer has spoken, the one that
// reports, and plans its replacement.
func (k *keeper) heard() {
	k.spoke, k.logged = true, ""
	k.opened()
	k.moveWait.reset()
	k.w.log.Info("readiness stream open", "socket", k.w.path)
	k.current.reporter <- k.w.outbox.attach()
	k.moveAt.Stop()
	k.moveDue, k.cooling = false, false
	if half, ok := k.current.half(time.Now()); ok {
		if half = time.Duration(float64(half) * (0.9 + 0.2*rand.Float64())); half >= leastMove {
			k.moveAt.Reset(half)
		}
	}
}

// opened counts current, on which the load balancer has spoken.
func (k *keeper) opened() {
	k.wait.reset()
	k.w.stats.streams.Add(1)
}

// lost goes on after the end of current, or after a failed attempt.
func (k *keeper) lost() {
	k.w.stats.failures.Add(1)
	err := k.current.err
	k.moveAt.Stop()
	k.moveDue, k.cooling = false, false
	wasOpen := k.current.spoken()
	if wasOpen && !k.spoke {
		k.opened() // it spoke and ended before step could look
	}
	k.current, k.next, k.spoke = k.next, nil, false
	if k.current != nil {
		k.w.log.Warn("readiness stream lost, a second one is on its way", "error", err)
		return
	}
	after := k.wait.after()
	k.retry.Reset(after)
	k.poll.Reset(socketPoll)
	switch text := err.Error(); {
	case wasOpen:
		k.w.log.Warn("readiness stream lost", "error", err, "retry_after", after)
	case text != k.logged, k.waiting && time.Since(k.started) > startTime:
		k.logged, k.waiting = text, k.starting(err)
		level := slog.LevelWarn
		if k.waiting {
			level = slog.LevelInfo
		}
		k.w.log.Log(k.base, level, "no readiness stream", "error", err, "retry_after", after)
	default:
		k.w.log.Debug("still no readiness stream", "error", err, "retry_after", after)
	}
}

// startTime is how long a load balancer that is started together with the frontend
// may take to listen.
const startTime = 10 * time.Second

// starting reports whether an error only means that the load balancer does not listen
// yet: the containers of a pod do not wait for each other.
func (k *keeper) starting(err error) bool {
	absent := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
	return absent && k.w.stats.streams.Load() == 0 && time.Since(k.started) <= startTime
}

// move replaces current by next: first the lease, which the inbox has merged
// already, then the report, and only then the first connection is closed.
func (k *keeper) move() {
	ctx, cancel := context.WithTimeout(k.base, moveReportWithin)
	k.old, k.oldDone, k.hurry = k.current, make(chan struct{}), cancel
	k.current, k.next = k.next, nil
	k.w.stats.moves.Add(1)
	k.heard()
	go k.w.replaced(ctx, k.old, k.oldDone)
}

// replaced closes a link once the one that replaced it has reported, or ctx
// ends.
func (w *Watcher) replaced(ctx context.Context, old *link, done chan<- struct{}) {
	defer close(done)
	if err := w.outbox.settled(ctx); err != nil {
		w.log.Warn("the report was not moved to the second connection in time", "error", err)
	}
	linger := time.NewTimer(moveLinger)
	defer linger.Stop()
	select {
	case <-linger.C:
	case <-old.done:
	case <-ctx.Done():
	}
	old.close(errMoved)
}

// notMoved goes on after a failed attempt to move.
func (k *keeper) notMoved() {
	k.w.stats.failures.Add(1)
	after := k.moveWait.after()
	k.w.log.Warn("could not open a second readiness stream to move to, the first goes on", "error", k.next.err, "retry_after", after)
	k.next = nil
	k.moveDue, k.cooling = true, true
	k.moveAt.Reset(after)
}

// end closes all links, current last and only after the load balancer has read
// the report.
func (k *keeper) end() {
	k.retry.Stop()
	k.poll.Stop()
	k.moveAt.Stop()
	if k.next != nil {
		k.next.close(errStopped)
	}
	if k.current != nil && k.spoke {
		close(k.current.retire)
		timeout := time.NewTimer(lastReportWithin)
		defer timeout.Stop()
		select {
		case <-k.current.retired:
		case <-timeout.C:
			k.w.log.Warn("the load balancer did not read the last report in time")
		}
	}
	if k.current != nil {
		k.current.close(errStopped)
	}
	if k.old != nil {
		k.hurry()
		<-k.oldDone
	}
}

// socketID tells whether a socket is the one that was tried before.
type socketID struct {
	device, inode uint64
	changed       syscall.Timespec
}

// identify looks at the socket; false when there is none.
func identify(path string) (socketID, bool) {
	info, err := os.Stat(path)
	if err != nil {
		return socketID{}, false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return socketID{}, false
	}
	return socketID{st.Dev, st.Ino, st.Ctim}, true
}
