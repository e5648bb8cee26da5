package secret

import (
	"cmp"
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/task"
)

const (
	// minBackoff and maxBackoff limit the delay between two watches of a Secret.
	minBackoff = 200 * time.Millisecond
	maxBackoff = 10 * time.Second
	// watchTimeout is the minimum duration of a watch; the maximum is twice that, as in client-go.
	watchTimeout = 5 * time.Minute
	// watchSlack is the time after the timeout in which the API server must end a watch.
	watchSlack = 2 * headerTimeout
	// quietTime is the time without an event after which a Secret counts as absent, for an API
	// server without streamed lists. Such a server sends the current state immediately after the
	// header. The time is long, because a key that is removed by mistake ends a BGP session, while
	// a late removal is harmless.
	quietTime = 10 * time.Second
)

// Options configure a Watcher.
type Options struct {
	// Dir is the directory in which the directory of keys is created.
	Dir string
	// Namespace is the namespace of the Secrets.
	Namespace string
	// Host and Port are the address of the API server: the pod's KUBERNETES_SERVICE_HOST, which may
	// be an IPv6 address, and KUBERNETES_SERVICE_PORT.
	Host, Port string
	// Account is the directory of the service account. Default: AccountDir.
	Account string
	Log     *slog.Logger
}

// Watcher keeps the wanted keys of Secrets in files. It implements task.Task.
type Watcher struct {
	dir       string // directory of keys
	namespace string
	client    *client
	log       *slog.Logger
	want      *latest.Value[map[string][]string] // nil before the first Want

	// Shorter in tests.
	minBackoff, maxBackoff, timeout, slack, quiet time.Duration

	mu       sync.Mutex
	failures uint64
	states   map[string]state // by Secret
}

// New returns a watcher, which is idle until Run.
func New(o Options) *Watcher {
	return &Watcher{
		dir: filepath.Join(o.Dir, keysDir), namespace: o.Namespace,
		client: &client{
			host: o.Host, port: o.Port, account: cmp.Or(o.Account, AccountDir),
			headerTimeout: headerTimeout, pingAfter: pingAfter, pingTimeout: pingTimeout,
		},
		log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)), want: latest.New[map[string][]string](nil),
		minBackoff: minBackoff, maxBackoff: maxBackoff, timeout: watchTimeout,
		slack: watchSlack, quiet: quietTime,
		states: map[string]state{},
	}
}

// String implements task.Task.
func (w *Watcher) String() string { return "watcher of Secrets" }

// Want replaces the set of wanted keys, by name of the Secret. Files of all remaining keys are
// removed. Names that [Check] refuses are ignored. Want does not block.
func (w *Watcher) Want(sources map[string][]string) {
	want := make(map[string][]string, len(sources))
	for source, keys := range sources {
		keys = slices.DeleteFunc(slices.Clone(keys), func(key string) bool { return Check(source, key) != nil })
		if slices.Sort(keys); len(keys) > 0 {
			want[source] = slices.Compact(keys)
		}
	}
	w.want.Set(want)
}

// Problem returns why files of a Secret's keys are missing or may be outdated. It returns "" if
// all files are current, or before the first answer of the API server.
func (w *Watcher) Problem(source string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.states[source].problem
}

// Explain returns why the file of a key is missing, or "" if the reason is unknown.
func (w *Watcher) Explain(file string) string { return w.Problem(filepath.Base(filepath.Dir(file))) }

// Stats returns the number of failed watches since the start, and the number of Secrets whose last
// watch failed, so that their state is unknown.
func (w *Watcher) Stats() (failures uint64, unknown int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.states {
		if s.failing {
			unknown++
		}
	}
	return w.failures, unknown
}

type running struct {
	keys   []string
	cancel context.CancelFunc
	done   chan struct{} // closed when the watch ended
}

func (r *running) stop() {
	r.cancel()
	<-r.done
}

// Run watches until ctx ends. It removes no file before the first Want.
func (w *Watcher) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watches := map[string]*running{}
	defer func() {
		for _, r := range watches {
			r.stop()
		}
	}()
	for {
		want, changed := w.want.Get()
		if want != nil {
			w.follow(ctx, cancel, want, watches)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// follow stops and starts watches to match the wanted keys. fail ends all watches.
func (w *Watcher) follow(
	ctx context.Context, fail context.CancelCauseFunc, want map[string][]string, watches map[string]*running,
) {
	for name, r := range watches {
		if !slices.Equal(r.keys, want[name]) {
			r.stop()
			delete(watches, name)
		}
		if want[name] == nil {
			w.mu.Lock()
			delete(w.states, name)
			w.mu.Unlock()
		}
	}
	// prune cannot race with a watch: the running watches own only wanted keys.
	if err := prune(w.dir, want); err != nil {
		w.log.Warn("failed to remove keys that are wanted no longer", "error", err)
	}
	for name, keys := range want {
		if watches[name] != nil {
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		r := &running{keys: keys, cancel: cancel, done: make(chan struct{})}
		watches[name] = r
		s := &source{Watcher: w, name: name, keys: keys}
		go func() {
			defer close(r.done)
			if err := task.Guard(ctx, "watch of Secret "+name, s.run); err != nil {
				fail(err)
			}
		}()
	}
}

type state struct {
	known   bool // the API server sent the state after the last failure
	failing bool
	problem string
}

// failed counts and records the failure of a watch, and warns of the first of a series.
func (w *Watcher) failed(name string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures++
	level := slog.LevelWarn
	if w.states[name].failing {
		level = slog.LevelDebug
	}
	w.states[name] = state{failing: true, problem: err.Error()}
	w.log.Log(context.Background(), level, "watch failed, retrying; keys of the Secret stay in use",
		"secret", name, "error", err)
}

// succeeded records that the state of a Secret is known, and its problem, "" if it is complete.
func (w *Watcher) succeeded(name, problem string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := state{known: true, problem: problem}
	if w.states[name] == now {
		return
	}
	w.states[name] = now
	if problem == "" {
		w.log.Info("Secret watched", "secret", name)
	} else {
		w.log.Warn("no password for gateways of the Secret", "secret", name, "reason", problem)
	}
}
