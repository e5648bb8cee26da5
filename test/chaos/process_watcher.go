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

// pollInterval is the interval at which processes are polled and timers are measured.
const pollInterval = 10 * time.Millisecond

// threadInterval is the interval at which the CPU wait times of threads are read.
const threadInterval = 200 * time.Millisecond

// processWatcher polls the processes and records their states in the timeline. It measures the
// delay of its own timer, and how long the threads of the processes were ready to run but did
// not: the kernel does not delay all of them equally.
type processWatcher struct {
	fixture     *fixture
	last        map[string]int           // the process of a subject
	polled      map[string]time.Time     // when a subject was polled last
	waited      map[string]time.Duration // how long a thread waited for a CPU so far
	threadsRead time.Time                // when that was read last

	mu     sync.Mutex
	late   map[int64]time.Duration // the worst of each tenth of a second
	worst  time.Duration
	cancel context.CancelFunc
	done   chan struct{}
}

func startProcessWatcher(fx *fixture) *processWatcher {
	ctx, cancel := context.WithCancel(context.Background())
	l := &processWatcher{
		fixture: fx, last: map[string]int{}, polled: map[string]time.Time{},
		waited: map[string]time.Duration{}, late: map[int64]time.Duration{}, cancel: cancel, done: make(chan struct{}),
	}
	go l.run(ctx)
	return l
}

func (l *processWatcher) close() {
	l.cancel()
	<-l.done
}

func (l *processWatcher) run(ctx context.Context) {
	defer close(l.done)
	timer := time.NewTimer(pollInterval)
	defer timer.Stop()
	for {
		due := time.Now().Add(pollInterval)
		timer.Reset(pollInterval)
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		l.measure(due, time.Since(due))
		l.poll()
		if time.Since(l.threadsRead) > threadInterval {
			l.threadsRead = time.Now()
			l.measureThreads()
		}
	}
}

// measure records that a thread ran late after it was due.
func (l *processWatcher) measure(due time.Time, late time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	// A long sleep was late for its whole duration.
	for t := due; !t.After(due.Add(late)); t = t.Add(100 * time.Millisecond) {
		bin := t.UnixMilli() / 100
		l.late[bin] = max(l.late[bin], late)
	}
	l.worst = max(l.worst, late)
}

// measureThreads reads how long each thread of every process waited for a CPU since the last poll:
// the second field of schedstat, in nanoseconds. The kernel counts a wait when it is over.
func (l *processWatcher) measureThreads() {
	now := map[string]time.Duration{}
	for _, pid := range l.last {
		dir := fmt.Sprintf("/proc/%d/task", pid)
		tasks, err := os.ReadDir(dir)
		if err != nil {
			continue // it has just ended
		}
		for _, t := range tasks {
			path := dir + "/" + t.Name() + "/schedstat"
			b, err := os.ReadFile(path)
			if err != nil {
				continue
			}
			var ran, waited int64
			if _, err := fmt.Sscan(string(b), &ran, &waited); err != nil {
				continue
			}
			now[path] = time.Duration(waited)
			if last, known := l.waited[path]; known {
				more := now[path] - last
				l.measure(time.Now().Add(-more), more)
			}
		}
	}
	l.waited = now
}

// lateness returns the maximum delay of timers between two moments.
func (l *processWatcher) lateness(from, to time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	var worst time.Duration
	for bin := from.UnixMilli() / 100; bin <= to.UnixMilli()/100; bin++ {
		worst = max(worst, l.late[bin])
	}
	return worst
}

// poll records the state of every process in the timeline.
func (l *processWatcher) poll() {
	l.record("lb", running(l.fixture.lb.process()))
	l.record("frontend", running(l.fixture.frontend.process()))
	l.record("speaker", l.fixture.speakerPID())
	for _, p := range l.fixture.speakerHelpers() {
		l.record(p.Name, running(p))
	}
	for g, r := range l.fixture.routers {
		for i, p := range r.processes() {
			subject := gatewaySubject(g)
			if r.names[i] != "bird" && r.names[i] != "bgpd" {
				subject += "/" + r.names[i]
			}
			l.record(subject, running(p))
		}
	}
}

// running returns the process ID, 0 when the process has ended.
func running(p *lab.Process) int {
	select {
	case <-p.Done():
		return 0
	default:
		return p.PID()
	}
}

// record records the state of a process in the timeline.
func (l *processWatcher) record(subject string, pid int) {
	before, at := l.polled[subject], time.Now()
	l.polled[subject] = at
	s := processState(pid)
	last, known := l.last[subject]
	if s != down {
		l.last[subject] = pid
	}
	switch {
	case s != down && known && pid != last:
		// The process ended and another one started between two polls.
		l.fixture.timeline.setAt(at, subject, down)
	case s == healthy && l.fixture.timeline.get(subject) == terminating:
		return // it drains
	case s == healthy && known:
		// It may have continued right after the last poll, and acted since then.
		at = before
	}
	l.fixture.timeline.setAt(at, subject, s)
}

// processState reads the state of a process (proc(5)).
func processState(pid int) state {
	if pid == 0 {
		return down
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return down
	}
	text := string(b)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	switch {
	case len(fields) == 0 || fields[0] == "Z" || fields[0] == "X":
		return down
	case fields[0] == "T":
		return stopped
	default:
		return healthy
	}
}
