package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/midstream"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/latest"
)

// Types of other packages in the API.
type (
	Config    = fwstate.Config
	Conntrack = fwstate.Conntrack
	Problem   = plan.Problem
)

// Defaults of [Options].
const (
	DefaultFirst    = fwstate.DefaultFirst
	DefaultMask     = fwstate.DefaultMask
	DefaultPriority = fwstate.DefaultPriority
	ConntrackOn     = fwstate.ConntrackOn
	ConntrackOff    = fwstate.ConntrackOff
	ConntrackLoose  = fwstate.ConntrackLoose
)

// Options configures the data plane: fwmarks, tables and rule priorities in its network
// namespace, and its behavior. Zero fields select the defaults, except where noted.
type Options struct {
	Config
	FastPath FastPath
	// StateDir stores holds and earlier sets of targets across restarts; "" keeps them in memory only.
	StateDir string
	// OnRepair is called with the repaired objects. It must not block.
	OnRepair func([]Repaired)
	// Gateways returns the addresses of the gateways, the source of forwarded packets. It must not
	// block. It is nil if the gateways are unknown.
	Gateways func() []netip.Addr
	Log      *slog.Logger
}

// errEnded is returned for requests after the end of Run.
var errEnded = errors.New("the data plane is not running")

// Plane reconciles the data plane in the kernel. It implements task.Task.
type Plane struct {
	desired latest.Value[*plan.Desired]
	state   latest.Value[plan.State]
	ready   chan struct{}
	// requests run on the goroutine that owns the engine.
	requests chan func(*engine)
	ended    chan struct{}
	holding  sync.Mutex // during a change of the holds and of their file

	reconciler
}

func (options Options) withDefaults() Options {
	options.Config = options.Config.WithDefaults()
	if options.Log == nil {
		options.Log = slog.New(slog.DiscardHandler)
	}
	return options
}

// New returns a Plane with the holds of an earlier process.
func New(options Options) (*Plane, error) {
	options = options.withDefaults()
	options.Log = options.Log.With("component", "dataplane")
	e := newEngine(options, nil)
	if err := errors.Join(e.holds.load(), e.moved.Load(options.StateDir, options.Log)); err != nil {
		return nil, fmt.Errorf("data plane: %w", err)
	}
	return &Plane{
		ready: make(chan struct{}), requests: make(chan func(*engine)), ended: make(chan struct{}),
		reconciler: reconciler{
			e: e, subscribe: fwstate.Subscribe, checkInterval: fullReadInterval,
			retry: backoff.Backoff{Min: failurePause, Max: maxPause},
		},
	}, nil
}

// Overdue implements task.Loop.
func (plane *Plane) Overdue() time.Duration { return plane.e.pulse.Overdue() }

// Configure sets the desired state. It never blocks; the newest call wins. The kernel state does
// not change before the first call.
func (plane *Plane) Configure(w *plan.Desired) { plane.desired.Set(w) }

// State returns the confirmed state of the kernel.
func (plane *Plane) State() *latest.Value[plan.State] { return &plane.state }

// Ready returns a channel that is closed when State holds the first kernel state read. While reads
// fail, it remains open and State holds the error.
func (plane *Plane) Ready() <-chan struct{} { return plane.ready }

// String implements task.Task.
func (plane *Plane) String() string { return "data plane" }

// ask runs do on the goroutine that owns the engine and waits for the result.
func ask[T any](ctx context.Context, plane *Plane, what string, do func(*engine) (T, error)) (answer T, err error) {
	type result struct {
		answer T
		err    error
	}
	// Buffered: the goroutine of the engine must not wait for a caller whose ctx has ended.
	results := make(chan result, 1)
	request := plane.requests
	for {
		select {
		case request <- func(e *engine) {
			answer, err := do(e)
			results <- result{answer, err}
		}:
			request = nil // sent; wait for the result
			continue
		case r := <-results:
			answer, err = r.answer, r.err
		case <-plane.ended:
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
func (plane *Plane) Targets(ctx context.Context) ([]TargetView, error) {
	return ask(ctx, plane, "list the targets of the data plane", (*engine).listTargets)
}

// Unmatched returns how many packets each stream's match dropped since its rules were last written.
func (plane *Plane) Unmatched(ctx context.Context) (map[string]uint64, error) {
	return ask(ctx, plane, "read the dropped packets of the data plane", (*engine).unmatched)
}

// Moved returns the earlier sets of targets, and the packets of flows of other pods.
func (plane *Plane) Moved(ctx context.Context) (midstream.View, error) {
	return ask(ctx, plane, "read the flows of other pods",
		func(e *engine) (midstream.View, error) { return e.moved.View() })
}

// Run reconciles until ctx ends and leaves the kernel state installed. It uses the network
// namespace of the calling thread. It fails only if netlink sockets cannot be opened; all other
// failures are retried. It must be called only once.
func (plane *Plane) Run(ctx context.Context) error {
	defer close(plane.ended)
	conn, err := fwstate.Dial(plane.e.options.Config)
	if err != nil {
		return fmt.Errorf("open netlink sockets: %w", err)
	}
	if err := conn.UseTimeouts(); err != nil {
		plane.e.log.Warn("timeouts unavailable, flows of checks stay up to 120 s", "error", err)
	}
	plane.e.kernel, plane.conn = conn, conn
	plane.e.moved.UseKernel(conn, midstream.Mode{
		Mask: plane.e.options.FWMarkMask(), Returning: plane.e.options.Conntrack != ConntrackOn,
	})
	var writer sync.WaitGroup
	if plane.e.options.StateDir != "" {
		writer.Go(func() { plane.e.moved.Write(ctx, plane.e.options.StateDir, plane.e.log) })
	}
	plane.run(ctx)
	plane.e.fast.detach("lb has stopped")
	writer.Wait()
	plane.unsubscribe()
	if err := conn.Close(); err != nil {
		plane.e.log.Warn("failed to close netlink sockets", "error", err)
	}
	return nil
}
