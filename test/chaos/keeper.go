package main

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// keeper runs a program of the pod and starts it again when it ended, as a
// kubelet does.
type keeper struct {
	name  string
	start func() (*lab.Process, error)
	truth *timeline
	// report is told of an end that nobody asked for.
	report func(p *lab.Process, began time.Time, status int)

	mu    sync.Mutex
	p     *lab.Process
	began time.Time     // when p was started
	down  chan struct{} // closed when it may run; nil when it may
	asked bool          // its end is no surprise
	done  chan struct{}
	quit  chan struct{}
	err   error
}

// restartDelay is how long a program that ended by itself stays down.
const restartDelay = 200 * time.Millisecond

// begin starts the program and keeps it running until end.
func (k *keeper) begin() error {
	k.began = time.Now()
	p, err := k.start()
	if err != nil {
		return err
	}
	k.p, k.done, k.quit = p, make(chan struct{}), make(chan struct{})
	go k.keep()
	return nil
}

func (k *keeper) keep() {
	defer close(k.done)
	for {
		k.mu.Lock()
		p, began := k.p, k.began
		k.mu.Unlock()
		select {
		case <-p.Done():
		case <-k.quit:
			return
		}
		k.mu.Lock()
		asked, down := k.asked, k.down
		k.mu.Unlock()
		if !asked {
			status, _ := p.Wait(context.Background())
			k.report(p, began, status)
			k.pause(restartDelay)
		}
		if down != nil {
			select {
			case <-down:
			case <-k.quit:
				return
			}
		}
		select {
		case <-k.quit:
			return
		default:
		}
		now := time.Now()
		next, err := k.start()
		k.mu.Lock()
		if err != nil {
			k.err = err
			k.mu.Unlock()
			return
		}
		k.p, k.began, k.asked = next, now, false
		k.mu.Unlock()
	}
}

func (k *keeper) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-k.quit:
	}
}

// process is the program that runs, or ran last.
func (k *keeper) process() *lab.Process {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.p
}

// pid is its process id, 0 when it does not run.
func (k *keeper) pid() int {
	p := k.process()
	select {
	case <-p.Done():
		return 0
	default:
		return p.PID()
	}
}

// hold keeps the program from being started again until the returned function
// is called.
func (k *keeper) hold() (release func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.asked = true
	down := make(chan struct{})
	k.down = down
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.down = nil
		close(down)
	}
}

// kill ends the program at once. Healing starts it again.
func (k *keeper) kill() (func(context.Context) error, error) {
	release := k.hold()
	err := k.process().Kill()
	return func(context.Context) error { release(); return nil }, err
}

// terminate asks the program to end. Healing waits for that and starts it again.
func (k *keeper) terminate() (func(context.Context) error, error) {
	release := k.hold()
	p := k.process()
	k.truth.set(k.name, ending)
	err := p.Signal(syscall.SIGTERM)
	return func(ctx context.Context) error {
		defer release()
		bound, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if _, err := p.Wait(bound); err != nil {
			return fmt.Errorf("%s was asked to end: %w", k.name, err)
		}
		return nil
	}, err
}

// end stops keeping the program, which goes on.
func (k *keeper) end() {
	if k.quit == nil {
		return
	}
	close(k.quit)
	<-k.done
}
