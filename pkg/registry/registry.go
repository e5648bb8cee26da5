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
	// DefaultGrace is the default grace period of targets after the end of their call.
	DefaultGrace = 5 * time.Second
	// DefaultQuota limits the targets of one SPIFFE ID. The targets of ten IDs fit into a neighbor
	// table of 1 024 entries, which all pods of a node share.
	DefaultQuota = 100
	// maxTargets limits the targets of all callers.
	maxTargets  = 100_000
	maxProblems = 20 // in State
	// expiryRound is the shortest time between two calls of expire.
	expiryRound = 10 * time.Millisecond
)

// Options configure a registry.
type Options struct {
	// Off refuses every registration, because the registry is not used as a source.
	Off bool
	// Allow authorizes SPIFFE IDs to register targets of streams. The operator is always authorized.
	Allow Allowances
	// Quota limits the targets of one SPIFFE ID, including draining ones. Default: DefaultQuota.
	Quota int
	// Grace is the time for which targets stay registered after their call ends. A call may request
	// less.
	Grace time.Duration
	// OnGone applies when the grace period expires: Drain offers a target as [targetset.Leaving] for
	// the stream's drain time, Drop removes it immediately, Hold (or "") keeps it until it is
	// deregistered.
	OnGone targetset.SourceGonePolicy
	// StateFile is the absolute path of the file that preserves registrations across a restart; "":
	// none.
	StateFile string
	Log       *slog.Logger
}

// Registry is the source of self-registered targets. It implements task.Task and is safe for
// concurrent use. A call that registers a target again within the grace period of the previous call
// does not change the offers.
type Registry struct {
	Options
	maxTargets int
	ready      chan struct{}
	changed    chan struct{} // holds a token: Take may return changes
	timed      chan struct{} // holds a token: a registration got a deadline
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
	ending  map[*registration]struct{}          // registrations with a DrainEnd
	dirty   map[string]struct{}                 // streams that changed since the last Take
	refused map[Refusal]uint64
	number  uint64 // of the newest registration
	// missing maps each stream of the state file to the names that are not registered yet. The entry
	// remains, empty, when all are registered.
	missing map[string]map[string]struct{}
	stopped bool
}

// streamConfig is the part of a stream's configuration that the registry uses.
type streamConfig struct {
	checked  bool
	families trench.Families
	drain    time.Duration
}

// New returns a registry with the registrations of the state file. The grace period of each begins
// now, provided that lb was down for less than that period. A corrupt state file is moved aside; a
// file that cannot be read is reported as a problem in [Registry.State].
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

// Ready returns a channel that is closed once Run handles the expiry of registrations.
func (r *Registry) Ready() <-chan struct{} { return r.ready }

// String implements task.Task.
func (r *Registry) String() string { return "target-registry" }

// Changed returns a channel that holds a token whenever [Registry.Take] may return changes.
func (r *Registry) Changed() <-chan struct{} { return r.changed }

// Configure sets the streams and the address policy of targets. Calls before the first Configure
// are refused. Registrations of a stream that is removed or loses its check are not offered until
// the stream or check is restored.
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

// Take returns the complete offers of each stream that changed since the previous Take, in the
// order of registration.
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

// Restored reports whether the state file had targets of the stream, and all of them have been
// registered since the start.
func (r *Registry) Restored(stream string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	missing, found := r.missing[stream]
	return found && len(missing) == 0
}

// Refused returns the number of refused calls since the start, by reason.
func (r *Registry) Refused() map[Refusal]uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.refused)
}

// touch marks the offers of a stream as changed. The caller holds mu.
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

// Run ends expired registrations until ctx ends, and then ends every call with Unavailable. It
// writes the state file during that time and once more at the end. It is called once.
func (r *Registry) Run(ctx context.Context) error {
	var writer sync.WaitGroup
	defer writer.Wait()
	if r.state != nil {
		writer.Go(func() { r.state.run(ctx, r.snapshot) })
	}
	// Refuse new calls. The registrations remain unchanged for the state file.
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
			wait = max(time.Until(next), expiryRound) // batch expirations that are close together
		}
		timer.Reset(wait)
	}
}

// list returns the first names in sorted order and the number of the rest.
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
