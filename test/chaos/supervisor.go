package main

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// supervisor runs a program of the pod and restarts it when it ends, as a kubelet does.
type supervisor struct {
	name     string
	start    func() (*lab.Process, error)
	timeline *timeline
	// report is called for an unexpected end.
	report func(p *lab.Process, began time.Time, status int)

	mu       sync.Mutex
	p        *lab.Process
	began    time.Time     // when p was started
	down     chan struct{} // closed when it may run; nil when it may
	expected bool          // its end is not reported
	done     chan struct{}
	quit     chan struct{}
	err      error
}

// restartDelay is the delay before a program that ended unexpectedly is restarted.
const restartDelay = 200 * time.Millisecond

// begin starts the program and keeps it running until end.
func (s *supervisor) begin() error {
	s.began = time.Now()
	p, err := s.start()
	if err != nil {
		return err
	}
	s.p, s.done, s.quit = p, make(chan struct{}), make(chan struct{})
	go s.supervise()
	return nil
}

func (s *supervisor) supervise() {
	defer close(s.done)
	for {
		s.mu.Lock()
		p, began := s.p, s.began
		s.mu.Unlock()
		select {
		case <-p.Done():
		case <-s.quit:
			return
		}
		s.mu.Lock()
		asked, down := s.expected, s.down
		s.mu.Unlock()
		// An end that no fault requested is reported.
		if !asked {
			status, _ := p.Wait(context.Background())
			s.report(p, began, status)
			s.pause(restartDelay)
		}
		// A fault keeps the program down until it is healed.
		if down != nil {
			select {
			case <-down:
			case <-s.quit:
				return
			}
		}
		// end may have been called during the wait.
		select {
		case <-s.quit:
			return
		default:
		}
		now := time.Now()
		next, err := s.start()
		s.mu.Lock()
		if err != nil {
			s.err = err
			s.mu.Unlock()
			return
		}
		s.p, s.began, s.expected = next, now, false
		s.mu.Unlock()
	}
}

func (s *supervisor) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.quit:
	}
}

// process returns the current process, or the last one.
func (s *supervisor) process() *lab.Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.p
}

// pid returns the process ID of the program, 0 when it does not run.
func (s *supervisor) pid() int {
	p := s.process()
	select {
	case <-p.Done():
		return 0
	default:
		return p.PID()
	}
}

// hold keeps the program from being started again until the returned function
// is called.
func (s *supervisor) hold() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expected = true
	down := make(chan struct{})
	s.down = down
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.down = nil
		close(down)
	}
}

// kill ends the program with SIGKILL. Healing starts it again.
func (s *supervisor) kill() (func(context.Context) error, error) {
	release := s.hold()
	err := s.process().Kill()
	return func(context.Context) error { release(); return nil }, err
}

// terminate sends SIGTERM. Healing waits for the end and starts the program again.
func (s *supervisor) terminate() (func(context.Context) error, error) {
	release := s.hold()
	p := s.process()
	s.timeline.set(s.name, terminating)
	err := p.Signal(syscall.SIGTERM)
	return func(ctx context.Context) error {
		defer release()
		bound, cancel := context.WithTimeout(ctx, waitTimeout)
		defer cancel()
		if _, err := p.Wait(bound); err != nil {
			return fmt.Errorf("%s was asked to end: %w", s.name, err)
		}
		return nil
	}, err
}

// end stops supervising the program, which continues.
func (s *supervisor) end() {
	if s.quit == nil {
		return
	}
	close(s.quit)
	<-s.done
}
