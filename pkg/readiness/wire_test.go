package readiness

import (
	"bytes"
	"net"
	"sync"
	"time"
)

// chunk is bytes in transit through a wire.
type chunk struct {
	bytes []byte
	sent  time.Time
}

// wire is an in-memory connection between a watcher and a load balancer. It can be slow, stall and
// break, even in the middle of a message.
type wire struct {
	from *pairLB

	mu        sync.Mutex
	delay     time.Duration
	still     chan struct{} // closed when the wire resumes; nil while it is not stalled
	breakIn   int           // bytes toward the watcher before it breaks; negative: never
	ends      []net.Conn
	broken    bool
	delivered time.Time     // when bytes last reached the watcher
	slowest   time.Duration // their time in transit
}

// span creates a wire and returns its two ends.
func span(running *sync.WaitGroup, from *pairLB) (w *wire, watcher, balancer net.Conn) {
	watcher, ours := net.Pipe()
	theirs, balancer := net.Pipe()
	w = &wire{from: from, breakIn: -1, ends: []net.Conn{ours, theirs}}
	w.pump(running, ours, theirs, false)
	w.pump(running, theirs, ours, true)
	return w, watcher, balancer
}

// pump forwards bytes in one direction until an end closes, which breaks the wire.
func (w *wire) pump(running *sync.WaitGroup, from, to net.Conn, down bool) {
	way := make(chan chunk, 4096) // the buffer of the socket
	running.Go(func() {
		defer close(way)
		b := make([]byte, 16<<10)
		for {
			n, err := from.Read(b)
			if err != nil {
				return
			}
			way <- chunk{bytes.Clone(b[:n]), time.Now()}
		}
	})
	running.Go(func() {
		for c := range way {
			if !w.carry(c, to, down) {
				break
			}
		}
		w.cut()
		for range way { // until the reader sees the end
		}
	})
}

// carry delivers one chunk, delayed by the faults of the wire.
func (w *wire) carry(c chunk, to net.Conn, down bool) bool {
	w.mu.Lock()
	delay := w.delay
	w.mu.Unlock()
	if d := time.Until(c.sent.Add(delay)); d > 0 {
		<-time.After(d)
	}
	w.mu.Lock()
	for w.still != nil {
		still := w.still
		w.mu.Unlock()
		<-still
		w.mu.Lock()
	}
	b, last := c.bytes, w.broken
	if down && w.breakIn >= 0 && len(b) > w.breakIn {
		b, last = b[:w.breakIn], true
	}
	if down {
		if w.breakIn >= 0 {
			w.breakIn -= len(b)
		}
		w.delivered, w.slowest = time.Now(), max(w.slowest, time.Since(c.sent))
	}
	w.mu.Unlock()
	if len(b) == 0 {
		return !last
	}
	_, err := to.Write(b)
	return err == nil && !last
}

func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken = true
	for _, c := range w.ends {
		_ = c.Close() // of a pipe
	}
	w.move()
}

// stop stalls the wire; the caller holds no lock.
func (w *wire) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.still == nil && !w.broken {
		w.still = make(chan struct{})
	}
}

// move resumes the wire; the caller holds w.mu.
func (w *wire) move() {
	if w.still != nil {
		close(w.still)
		w.still = nil
	}
}

func (w *wire) heal() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.delay, w.breakIn = 0, -1
	w.move()
}
