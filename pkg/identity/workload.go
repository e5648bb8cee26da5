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
func NewWorkloadAPI(options Options) (*Source, error) {
	addr := os.Getenv(workloadapi.SocketEnv)
	if addr == "" {
		return nil, fmt.Errorf("no Workload API: set %s, such as unix:///run/spire/sockets/agent.sock", workloadapi.SocketEnv)
	}
	if err := workloadapi.ValidateAddress(addr); err != nil {
		return nil, fmt.Errorf("address of the Workload API %q: %w", addr, err)
	}
	api := &workloadAPI{addr: addr, idleTimeout: 10 * time.Second}
	if options.Cache != "" {
		api.cache = &cache{path: options.Cache, id: options.ID}
	}
	return newSource(api, options), nil
}

type workloadAPI struct {
	addr string
	// idleTimeout is how long a stream may be silent while the SVID is overdue, before it is reopened.
	idleTimeout time.Duration
	cache       *cache // nil: none
}

func (api *workloadAPI) String() string { return "the Workload API at " + api.addr }

func (api *workloadAPI) watch(ctx context.Context, source *Source) error {
	if api.cache != nil {
		var starting sync.WaitGroup
		defer starting.Wait()
		starting.Go(func() { api.cache.replace(ctx, source) })
	}
	retry := newRetry()
	for {
		err := api.session(ctx, source, retry)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		source.fail(fmt.Errorf("%s: %w", api, err))
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
func (retry *retry) Next() time.Duration {
	now := time.Now()
	if now.Sub(retry.begin) >= maxBackoff {
		retry.Reset()
	}
	delay := retry.Backoff.Next()
	retry.begin = now.Add(delay)
	return delay
}

// Wait waits for Next. It returns ctx's error when that ends first.
func (retry *retry) Wait(ctx context.Context) error { return backoff.Sleep(ctx, retry.Next()) }

// NewBackoff returns retry itself: a new watch continues the back-off.
func (retry *retry) NewBackoff() workloadapi.Backoff { return retry }

var errIdleStream = errors.New("no message on the stream although the SVID is due for rotation")

// session follows the API over one connection. The client of go-spiffe retries, except after
// Canceled and InvalidArgument, which end the session.
func (api *workloadAPI) session(ctx context.Context, source *Source, retry *retry) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var watchdog sync.WaitGroup
	watchdog.Go(func() { api.endIdleSession(ctx, source, cancel) })
	err := workloadapi.WatchX509Context(ctx, &contextWatcher{ctx: ctx, source: source, origin: api},
		workloadapi.WithAddr(api.addr),
		workloadapi.WithBackoffStrategy(retry),
		workloadapi.WithDialOptions(grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: minBackoff, Multiplier: 2, Jitter: 0.1, MaxDelay: maxBackoff},
			MinConnectTimeout: maxBackoff,
		})))
	if cause := context.Cause(ctx); errors.Is(cause, errIdleStream) {
		// The API returns only "canceled", which does not name the reason.
		err = cause
	}
	cancel(nil)
	watchdog.Wait()
	return err
}

// endIdleSession ends the session when the SVID is overdue: an open stream may lead to an agent
// that has stopped responding.
func (api *workloadAPI) endIdleSession(ctx context.Context, source *Source, cancel context.CancelCauseFunc) {
	for backoff.Sleep(ctx, api.idleTimeout) == nil {
		if source.status.Load().Overdue {
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

func (watcher *contextWatcher) OnX509ContextUpdate(x *workloadapi.X509Context) {
	svid := watcher.source.offer(x.SVIDs, x.Bundles)
	if svid != nil && watcher.origin.cache != nil {
		watcher.origin.cache.store(watcher.ctx, svid, x.Bundles, watcher.source.log)
	}
}

func (watcher *contextWatcher) OnX509ContextWatchError(err error) {
	if watcher.ctx.Err() != nil {
		return
	}
	switch status.Code(err) {
	case codes.Canceled, codes.InvalidArgument:
		// These end the session, and watch reports them.
		return
	case codes.PermissionDenied:
		err = fmt.Errorf("it has no identity for this process; check its registration entry: %w", err)
	}
	watcher.source.fail(fmt.Errorf("%s: %w", watcher.origin, err))
}
