package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/latest"
)

// errEnded is the error of requests after the end of Run.
var errEnded = errors.New("the data plane is not running")

// Plane keeps the data plane in the kernel. It is a task.Task.
type Plane struct {
	o       Options
	holds   map[string]time.Time // at the start
	desired latest.Value[*Desired]
	state   latest.Value[State]
	ready   chan struct{}
	// requests run on the goroutine that owns the engine.
	requests chan func(*engine)
	ended    chan struct{}
	endOnce  sync.Once
}

// withDefaults fills in zero fields.
func (o Options) withDefaults() Options {
	c := o.config().WithDefaults()
	o.First, o.Mask, o.Priority = c.First, c.Mask, c.Priority
	if o.CheckInterval == 0 {
		o.CheckInterval = defaultCheckInterval
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Validate returns an error for invalid options; zero fields have their defaults.
func (o Options) Validate() error {
	o = o.withDefaults()
	if o.CheckInterval < 0 {
		return fmt.Errorf("check interval %s is negative", o.CheckInterval)
	}
	return o.config().Validate()
}

// config returns the options of the kernel connection.
func (o Options) config() fwstate.Config {
	return fwstate.Config{First: o.First, Mask: o.Mask, Priority: o.Priority, Stateless: o.Stateless}
}

// New reads the holds of an earlier process.
func New(o Options) (*Plane, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("data plane: %w", err)
	}
	o = o.withDefaults()
	o.Log = o.Log.With("component", "dataplane")
	holds, err := loadHolds(o, o.Log)
	if err != nil {
		return nil, fmt.Errorf("data plane: %w", err)
	}
	return &Plane{o: o, holds: holds, ready: make(chan struct{}), requests: make(chan func(*engine)), ended: make(chan struct{})}, nil
}

// Configure sets the desired state. It never blocks; the newest call wins. Before the first
// call the kernel state stays as it is.
func (p *Plane) Configure(w *Desired) { p.desired.Set(w) }

// State returns the confirmed state of the kernel.
func (p *Plane) State() *latest.Value[State] { return &p.state }

// Ready is closed once the kernel was read and State has the result. While the kernel cannot be
// read it stays open, and State has the error.
func (p *Plane) Ready() <-chan struct{} { return p.ready }

// String implements task.Task.
func (p *Plane) String() string { return "data plane" }

// ask runs do on the goroutine that owns the engine, and waits for its result.
func ask[T any](ctx context.Context, p *Plane, what string, do func(*engine) (T, error)) (answer T, err error) {
	type result struct {
		answer T
		err    error
	}
	results := make(chan result, 1)
	var request chan<- func(*engine) = p.requests
	for {
		select {
		case request <- func(e *engine) {
			answer, err := do(e)
			results <- result{answer, err}
		}:
			request = nil
			continue
		case r := <-results:
			answer, err = r.answer, r.err
		case <-p.ended:
			err = errEnded
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", what, err)
		}
		return answer, err
	}
}

// Targets reads the targets in the kernel for operators, sorted by stream and name.
func (p *Plane) Targets(ctx context.Context) ([]TargetView, error) {
	return ask(ctx, p, "list the targets of the data plane", (*engine).listTargets)
}

// Run reconciles until ctx ends, and leaves the kernel state in place. It uses the network
// namespace of the calling thread. It fails only if netlink sockets cannot be opened;
// everything else is retried.
func (p *Plane) Run(ctx context.Context) error {
	defer p.endOnce.Do(func() { close(p.ended) })
	f, err := fwstate.Dial(p.o.config())
	if err != nil {
		return fmt.Errorf("open netlink sockets: %w", err)
	}
	defer func() {
		if err := f.Close(); err != nil {
			p.o.Log.Warn("failed to close netlink sockets", "error", err)
		}
	}()
	e := newEngine(p.o, f)
	e.holds = p.holds
	o := &reconciler{p: p, e: e, subscribe: subscribeExcept(f), solicit: f.SolicitNeighbors, checkSysctl: func() []sysctlProblem { return sysctlProblems(f) }, removeOld: f.RemoveOldRules, pause: failurePause}
	defer o.unsubscribe()
	return o.run(ctx)
}
