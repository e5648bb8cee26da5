package load

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"
)

// pollInterval is the interval at which a wait checks its condition.
const pollInterval = 5 * time.Millisecond

// maxFailures is how many failures of a phase are kept in words.
const maxFailures = 10

// Generator sends until it is stopped.
type Generator struct {
	c     Config
	start time.Time

	send context.CancelFunc // ends the sending; answers to earlier requests are still awaited
	cut  context.CancelFunc // ends everything
	work sync.WaitGroup

	mu    sync.Mutex
	phase *phase
	flows map[int]*flow // by number; those that are being opened or open
	busy  int           // requests without an outcome, of all phases
}

// phase is an interval with the outcomes of the requests and flows that began in it.
type phase struct {
	began  time.Time
	result Result
	flows  map[*flow]*Flow
	open   int // requests without an outcome
}

func newPhase() *phase {
	return &phase{began: time.Now(), result: Result{ByTarget: map[string]int{}}, flows: map[*flow]*Flow{}}
}

// Start starts sending. The caller calls Stop. When ctx ends, all requests and flows are
// aborted.
func Start(ctx context.Context, c Config) (*Generator, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	g := &Generator{c: c, start: time.Now(), phase: newPhase(), flows: map[int]*flow{}}
	ctx, g.cut = context.WithCancel(ctx)
	sending, send := context.WithTimeout(ctx, c.For)
	g.send = send
	if c.Rate > 0 {
		g.work.Go(func() { g.requests(ctx, sending) })
	}
	for i := range c.Flows {
		g.work.Go(func() { g.keep(ctx, sending, i) })
	}
	return g, nil
}

// Now returns the result of the current phase so far. Open requests are counted only as sent.
func (g *Generator) Now() Result {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.phase.copy()
}

// Live counts the flows that are established and not broken.
func (g *Generator) Live() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for _, f := range g.flows {
		if f.target != "" {
			n++
		}
	}
	return n
}

// Take ends the phase and begins the next one. It returns once every request of the phase was
// answered or has failed, and every flow was answered again or broke. That takes at most Timeout
// and Silence. When ctx ends first, the error names the open requests and flows, and the result
// covers the completed ones.
func (g *Generator) Take(ctx context.Context) (Result, error) {
	g.mu.Lock()
	old := g.phase
	g.phase = newPhase()
	old.result.Took = time.Since(old.began)
	g.mu.Unlock()
	err := g.until(ctx, func() error {
		g.mu.Lock()
		defer g.mu.Unlock()
		waiting := 0
		for _, f := range g.flows {
			if f.phase == old {
				waiting++
			}
		}
		if old.open > 0 || waiting > 0 {
			return fmt.Errorf("the fate of %d requests and of %d flows is open", old.open, waiting)
		}
		return nil
	})
	g.mu.Lock()
	defer g.mu.Unlock()
	return old.copy(), err
}

// Stop ends the sending, waits for the open requests, closes every flow and returns the result
// of the last phase. When ctx ends first, open requests and flows are aborted and count as
// failed and broken. It can be called twice.
func (g *Generator) Stop(ctx context.Context) Result {
	g.send()
	stop := context.AfterFunc(ctx, g.cut)
	g.work.Wait()
	stop()
	g.cut()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.phase.result.Took == 0 {
		g.phase.result.Took = time.Since(g.phase.began)
	}
	return g.phase.copy()
}

// Wait waits until the current phase satisfies a condition. The error is the
// last one of the condition.
func (g *Generator) Wait(ctx context.Context, condition func(Result) error) (Result, error) {
	var r Result
	err := g.until(ctx, func() error {
		r = g.Now()
		return condition(r)
	})
	return r, err
}

// WaitFlows waits until every flow is established, that is: was answered once.
func (g *Generator) WaitFlows(ctx context.Context) error {
	return g.until(ctx, func() error {
		if n := g.Live(); n < g.c.Flows {
			return fmt.Errorf("%d of %d flows are established: %v", n, g.c.Flows, g.Now().Failures)
		}
		return nil
	})
}

// WaitAnswered waits until n more requests are answered than at the time of the call. The phase
// must not end during the wait.
func (g *Generator) WaitAnswered(ctx context.Context, n int) error {
	before := g.Now().Answered
	_, err := g.Wait(ctx, func(r Result) error {
		if r.Answered < before+n {
			return fmt.Errorf("%d more requests were answered, want %d", r.Answered-before, n)
		}
		return nil
	})
	return err
}

// WaitTargets waits until each of these targets has answered a request of the
// current phase.
func (g *Generator) WaitTargets(ctx context.Context, names ...string) error {
	_, err := g.Wait(ctx, func(r Result) error {
		for _, name := range names {
			if r.ByTarget[name] == 0 {
				return fmt.Errorf("%s has not answered; answers: %v", name, r.ByTarget)
			}
		}
		return nil
	})
	return err
}

func (g *Generator) until(ctx context.Context, condition func() error) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := condition()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w (waited: %w)", err, context.Cause(ctx))
		}
	}
}

// fail records a failure in a phase. The lock is held.
func (g *Generator) fail(c *phase, to netip.AddrPort, stage string, err error) {
	if len(c.result.Failures) < maxFailures {
		c.result.Failures = append(
			c.result.Failures, Failure{After: time.Since(g.start), To: to, Stage: stage, Err: err.Error()},
		)
	}
}
