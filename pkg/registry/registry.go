package registry

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
)

// Defaults of the registry.
const (
	// DefaultGrace is how long targets outlive the call that registered them.
	DefaultGrace = 5 * time.Second
	// DefaultQuota is how many targets one SPIFFE ID may register: ten IDs fit into a neighbor
	// table of 1 024 entries, which all pods of a node share.
	DefaultQuota = 100
	// maxTargets is how many targets all together may register.
	maxTargets  = 100_000
	maxProblems = 20 // in State
	// expiryRound is the least time between two rounds of expirations.
	expiryRound = 10 * time.Millisecond
)

// Options configure a registry.
type Options struct {
	// Off refuses every registration: the registry is no source.
	Off bool
	// Allow is which SPIFFE IDs may register targets of which streams. The operator may in any
	// case.
	Allow Allowances
	// Quota is how many targets one SPIFFE ID may have, with those that drain. Default:
	// DefaultQuota.
	Quota int
	// Grace is how long targets outlive their call at most, and unless the call asks for less.
	Grace time.Duration
	// OnGone is what happens after that: Drain offers a target as [targetset.Leaving] for the
	// stream's drain time, Drop removes it at once, Hold (or "") keeps it until it is deregistered.
	OnGone targetset.SourceGonePolicy
	// StateFile is where registrations survive a restart, an absolute path; "": they do not.
	StateFile string
	Log       *slog.Logger
}

// Registry is the source of the targets that register themselves. It implements task.Task. All
// methods may be called from any goroutine. A call that registers a name again within the grace of
// the previous one changes nothing in what is offered.
type Registry struct {
	Options
	maxTargets int
	ready      chan struct{}
	changed    chan struct{} // of size 1: Take may return something
	timed      chan struct{} // of size 1: a registration got an end
	stop       chan struct{} // closed when the registry stops
	since      time.Time
	state      *stateFile // nil: none
	throttle   logs.Throttle

	mu      sync.Mutex
	streams map[string]streamConfig // nil before the first Configure
	policy  targetset.AddressPolicy
	members map[string]map[string]*registration // by stream and name
	count   int                                 // of registrations
	users   map[at]*registration                // by address
	owned   map[caller]int                      // registrations by owner
	calls   map[caller]int                      // handlers by caller
	ending  map[*registration]struct{}          // those with an end
	dirty   map[string]struct{}                 // streams that changed since the last Take
	refused map[Refusal]uint64
	number  uint64 // of the newest registration
	// missing are by stream the names of the state file that are not registered yet, also none: all are.
	missing map[string]map[string]struct{}
	stopped bool
}

// streamConfig is the part of a stream's configuration that matters here.
type streamConfig struct {
	checked  bool
	families trench.Families
	drain    time.Duration
}

// New returns a registry with the registrations of the state file, each as if its call had just
// ended, provided that lb was away for less than its grace. A corrupt state file is moved aside; a
// file that cannot be read is a problem in [Registry.State], and no error.
func New(o Options) *Registry {
	o.Quota = cmp.Or(o.Quota, DefaultQuota)
	o.OnGone = cmp.Or(o.OnGone, targetset.Hold)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	r := &Registry{
		Options: o, maxTargets: maxTargets, since: time.Now(), ready: make(chan struct{}), stop: make(chan struct{}),
		changed: make(chan struct{}, 1), timed: make(chan struct{}, 1),
		members: map[string]map[string]*registration{}, users: map[at]*registration{},
		owned: map[caller]int{}, calls: map[caller]int{}, ending: map[*registration]struct{}{},
		dirty: map[string]struct{}{}, refused: map[Refusal]uint64{}, missing: map[string]map[string]struct{}{},
	}
	if o.StateFile != "" {
		r.state = &stateFile{
			path: o.StateFile, log: o.Log, wanted: make(chan struct{}, 1),
			retry: backoff.Backoff{Min: stampEvery, Max: maxStateBackoff},
		}
		r.restore(time.Now())
	}
	return r
}

// Ready is closed once ends of registrations are noticed.
func (r *Registry) Ready() <-chan struct{} { return r.ready }

// String names the task.
func (r *Registry) String() string { return "target-registry" }

// Changed wakes the caller of [Registry.Take]. Wake-ups conflate.
func (r *Registry) Changed() <-chan struct{} { return r.changed }

// Configure sets the streams, and which addresses targets may have. Calls before the first
// Configure are refused. Registrations for a stream that is removed, or has no check any more, are
// not offered until it is back.
func (r *Registry) Configure(streams []trench.Stream, policy targetset.AddressPolicy) {
	known := make(map[string]streamConfig, len(streams))
	for _, s := range streams {
		known[s.Name] = streamConfig{s.Check != (trench.Check{}), s.Check.Families, s.DrainTime}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for stream := range r.members {
		if r.streams[stream].checked != known[stream].checked || r.streams == nil {
			r.touch(stream)
		}
	}
	r.streams, r.policy = known, policy
}

// Take returns what changed since the last Take: by stream all that is offered, in the order of
// registration.
func (r *Registry) Take() targetset.Offers {
	r.mu.Lock()
	defer r.mu.Unlock()
	offers := make(targetset.Offers, len(r.dirty))
	for stream := range r.dirty {
		offers[stream] = nil
		if r.streams[stream].checked {
			for _, reg := range slices.SortedFunc(maps.Values(r.members[stream]), (*registration).compare) {
				offers[stream] = append(offers[stream], reg.Offer)
			}
		}
	}
	clear(r.dirty)
	return offers
}

// State describes the source.
func (r *Registry) State() targetset.SourceState {
	r.mu.Lock()
	targets, callers := r.count, len(r.owned)
	var problems []string
	for stream, members := range r.members {
		problem := "stream " + stream + " is not in the trench file"
		switch known, ok := r.streams[stream]; {
		case r.streams == nil || known.checked:
			continue
		case ok:
			problem = "stream " + stream + " has no check"
		}
		verb := "are"
		if len(members) == 1 {
			verb = "is"
		}
		problems = append(problems, fmt.Sprintf("%s: %s %s not used (%s)",
			problem, plural(len(members), "registered target"), verb, list(maps.Keys(members), 3)))
	}
	r.mu.Unlock()
	slices.Sort(problems)
	if more := len(problems) - maxProblems; more > 0 {
		problems = append(problems[:maxProblems], fmt.Sprintf("and %d more streams", more))
	}
	if r.state != nil {
		if err := r.state.failed.Load(); err != nil {
			problems = append(problems, fmt.Sprintf("registrations will not survive a restart: %v", err))
		}
	}
	return targetset.SourceState{
		Name: targetset.OriginRegistry.String(), Live: true, Since: r.since, OnGone: r.OnGone, Problems: problems,
		Detail: fmt.Sprintf("%s of %s, %d each at most", plural(targets, "target"), plural(callers, "caller"), r.Quota),
	}
}

// Restored reports whether the state file had targets of the stream, and each has been registered
// since the start.
func (r *Registry) Restored(stream string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	missing, found := r.missing[stream]
	return found && len(missing) == 0
}

// Refused returns how many calls were refused since the start, by the reason.
func (r *Registry) Refused() map[Refusal]uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.refused)
}

// touch notes that the offers of a stream changed. It is called with mu held.
func (r *Registry) touch(stream string) {
	r.dirty[stream] = struct{}{}
	latest.Wake(r.changed)
}

// save requests a write of the state file.
func (r *Registry) save() {
	if r.state != nil {
		latest.Wake(r.state.wanted)
	}
}

// Run ends registrations that are due until ctx ends, then every call, with Unavailable. It writes
// the state file, also a last time. It is called once.
func (r *Registry) Run(ctx context.Context) error {
	var writer sync.WaitGroup
	defer writer.Wait()
	if r.state != nil {
		writer.Go(func() { r.state.run(ctx, r.snapshot) })
	}
	// Refuses new calls. The registrations remain as they are, for the next start.
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.stopped = true
		close(r.stop)
	}()
	close(r.ready)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.timed:
		case <-timer.C:
		}
		wait := time.Minute
		if next := r.expire(time.Now()); !next.IsZero() {
			wait = max(time.Until(next), expiryRound) // so that expirations close together share a round
		}
		timer.Reset(wait)
	}
}

// list lists the first names in order.
func list(names iter.Seq[string], most int) string {
	sorted := slices.Sorted(names)
	if more := len(sorted) - most; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(sorted[:most], ", "), more)
	}
	return strings.Join(sorted, ", ")
}

// plural returns "1 target" or "2 targets".
func plural(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}
