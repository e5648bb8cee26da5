package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// lookEvery is how often processes are looked at, and timers are measured.
const lookEvery = 10 * time.Millisecond

// looker looks at the processes all the time and tells the timeline how they
// are. It measures how late its own timer is: as late as everybody's.
type looker struct {
	w    *world
	last map[string]int // the process of a subject

	mu     sync.Mutex
	late   map[int64]time.Duration // the worst of each tenth of a second
	worst  time.Duration
	cancel context.CancelFunc
	done   chan struct{}
}

func startLooker(w *world) *looker {
	ctx, cancel := context.WithCancel(context.Background())
	l := &looker{w: w, last: map[string]int{}, late: map[int64]time.Duration{}, cancel: cancel, done: make(chan struct{})}
	go l.run(ctx)
	return l
}

func (l *looker) close() {
	l.cancel()
	<-l.done
}

func (l *looker) run(ctx context.Context) {
	defer close(l.done)
	timer := time.NewTimer(lookEvery)
	defer timer.Stop()
	for {
		due := time.Now().Add(lookEvery)
		timer.Reset(lookEvery)
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		l.measure(due)
		l.look()
	}
}

// measure notes how late a timer fired.
func (l *looker) measure(due time.Time) {
	now := time.Now()
	late := now.Sub(due)
	l.mu.Lock()
	defer l.mu.Unlock()
	// A long sleep was late all along.
	for t := due; !t.After(now); t = t.Add(100 * time.Millisecond) {
		bin := t.UnixMilli() / 100
		l.late[bin] = max(l.late[bin], late)
	}
	l.worst = max(l.worst, late)
}

// lateness is how late timers were at most between two moments.
func (l *looker) lateness(from, to time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	var worst time.Duration
	for bin := from.UnixMilli() / 100; bin <= to.UnixMilli()/100; bin++ {
		worst = max(worst, l.late[bin])
	}
	return worst
}

// look tells the timeline how every process is.
func (l *looker) look() {
	l.see("lb", running(l.w.lb.process()))
	l.see("frontend", running(l.w.frontend.process()))
	l.see("bird", l.w.birdPID())
	for g, r := range l.w.routers {
		for i, p := range r.processes() {
			subject := gatewaySubject(g)
			if r.names[i] != "bird" && r.names[i] != "bgpd" {
				subject += "/" + r.names[i]
			}
			l.see(subject, running(p))
		}
	}
}

// running is the process id, 0 when the process has ended.
func running(p *lab.Process) int {
	select {
	case <-p.Done():
		return 0
	default:
		return p.PID()
	}
}

// see tells the timeline how a process is.
func (l *looker) see(subject string, pid int) {
	s := processState(pid)
	last, known := l.last[subject]
	if s != gone {
		l.last[subject] = pid
	}
	switch {
	case s != gone && known && pid != last:
		// Between two looks it ended, and another one began.
		l.w.truth.set(subject, gone)
	case s == sound && l.w.truth.get(subject) == ending:
		return // it drains
	}
	l.w.truth.set(subject, s)
}

// processState reads how a process is (proc(5)).
func processState(pid int) state {
	if pid == 0 {
		return gone
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return gone
	}
	text := string(b)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	switch {
	case len(fields) == 0 || fields[0] == "Z" || fields[0] == "X":
		return gone
	case fields[0] == "T":
		return frozen
	default:
		return sound
	}
}
