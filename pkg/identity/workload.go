package identity

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/workloadapi"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/backoff"
)

// NewWorkloadAPI returns a source that follows the SPIFFE Workload API. It fails only when the
// address is missing or malformed: the API may be absent at any time.
func NewWorkloadAPI(o Options) (*Source, error) {
	addr := os.Getenv(workloadapi.SocketEnv)
	if addr == "" {
		return nil, fmt.Errorf("no Workload API: set %s, such as unix:///run/spire/sockets/agent.sock", workloadapi.SocketEnv)
	}
	if err := workloadapi.ValidateAddress(addr); err != nil {
		return nil, fmt.Errorf("address of the Workload API %q: %w", addr, err)
	}
	w := &workloadAPI{addr: addr, idleTimeout: 10 * time.Second}
	if o.Cache != "" {
		w.cache = &cache{path: o.Cache, id: o.ID}
	}
	return newSource(w, o), nil
}

type workloadAPI struct {
	addr string
	// idleTimeout is how long a stream may be without messages while the SVID is overdue, before it
	// is opened again.
	idleTimeout time.Duration
	cache       *cache // nil: none
}

func (w *workloadAPI) String() string { return "the Workload API at " + w.addr }

func (w *workloadAPI) watch(ctx context.Context, s *Source) error {
	if w.cache != nil {
		var starting sync.WaitGroup
		defer starting.Wait()
		starting.Go(func() { w.cache.replace(ctx, s) })
	}
	retry := newRetry()
	for {
		err := w.session(ctx, s, retry)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.fail(fmt.Errorf("%s: %w", w, err))
		if err := retry.Wait(ctx); err != nil {
			return err
		}
	}
}

// The back-off between two attempts to get an SVID.
const (
	minBackoff = 50 * time.Millisecond
	maxBackoff = 2 * time.Second
)

// retry is a back-off that also implements workloadapi.BackoffStrategy and workloadapi.Backoff.
type retry struct {
	backoff.Backoff
	begin time.Time // of the current attempt
}

func newRetry() *retry {
	return &retry{Backoff: backoff.Backoff{Min: minBackoff, Max: maxBackoff, Jitter: 0.1}, begin: time.Now()}
}

// Next returns the delay after one more failure. An attempt that took maxBackoff has spaced the
// attempts already, so the next one follows after minBackoff: SPIRE's agent answers PermissionDenied
// only after it has looked for the container for half a minute.
func (r *retry) Next() time.Duration {
	now := time.Now()
	if now.Sub(r.begin) >= maxBackoff {
		r.Reset()
	}
	delay := r.Backoff.Next()
	r.begin = now.Add(delay)
	return delay
}

// Wait waits for Next. It returns ctx's error when that ends first.
func (r *retry) Wait(ctx context.Context) error { return backoff.Sleep(ctx, r.Next()) }

// NewBackoff returns r itself: a new watch continues the back-off.
func (r *retry) NewBackoff() workloadapi.Backoff { return r }

var errIdleStream = errors.New("no message on the stream although the SVID is due for rotation")

// session follows the API over one connection. The client of go-spiffe retries, except after
// Canceled and InvalidArgument, which end the session.
func (w *workloadAPI) session(ctx context.Context, s *Source, retry *retry) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var watchdog sync.WaitGroup
	watchdog.Go(func() { w.endIdleSession(ctx, s, cancel) })
	err := workloadapi.WatchX509Context(ctx, &contextWatcher{ctx: ctx, source: s, origin: w},
		workloadapi.WithAddr(w.addr),
		workloadapi.WithBackoffStrategy(retry),
		workloadapi.WithDialOptions(grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: minBackoff, Multiplier: 2, Jitter: 0.1, MaxDelay: maxBackoff},
			MinConnectTimeout: maxBackoff,
		})))
	if cause := context.Cause(ctx); errors.Is(cause, errIdleStream) {
		err = cause
	}
	cancel(nil)
	watchdog.Wait()
	return err
}

// endIdleSession ends the session when the SVID is overdue: an open stream may lead to an agent
// that has stopped responding.
func (w *workloadAPI) endIdleSession(ctx context.Context, s *Source, cancel context.CancelCauseFunc) {
	for backoff.Sleep(ctx, w.idleTimeout) == nil {
		if s.status.Load().Overdue {
			cancel(errIdleStream)
			return
		}
	}
}

// contextWatcher passes updates of the Workload API to the source.
type contextWatcher struct {
	ctx    context.Context // of the session; its end is not a failure of the API
	source *Source
	origin *workloadAPI
}

func (c *contextWatcher) OnX509ContextUpdate(x *workloadapi.X509Context) {
	svid := c.source.offer(x.SVIDs, x.Bundles)
	if svid != nil && c.origin.cache != nil {
		c.origin.cache.store(c.ctx, svid, x.Bundles, c.source.log)
	}
}

func (c *contextWatcher) OnX509ContextWatchError(err error) {
	if c.ctx.Err() != nil {
		return
	}
	switch status.Code(err) {
	case codes.Canceled, codes.InvalidArgument:
		// These end the session, and watch reports them.
		return
	case codes.PermissionDenied:
		err = fmt.Errorf("it has no identity for this process; check its registration entry: %w", err)
	}
	c.source.fail(fmt.Errorf("%s: %w", c.origin, err))
}
