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
	// starvedAfter is the delay beyond which this process counts as starved of CPU time.
	starvedAfter = 50 * time.Millisecond
)

// Options configure a registry.
type Options struct {
	// Off refuses every registration, because the registry is not used as a source.
	Off bool
	// Allow authorizes SPIFFE IDs to register targets of streams. The operator is always authorized.
	Allow Allowances
	// Quota limits the targets of one SPIFFE ID, including draining ones. Default: DefaultQuota.
	Quota int
	// Grace is how long targets stay registered after their call ends. A call may request less.
	Grace time.Duration
	// OnGone applies when the grace period expires: Drain offers a target as [targetset.Leaving] for
	// the stream's drain time, Drop removes it, Hold (or "") keeps it until it is deregistered.
	OnGone targetset.SourceGonePolicy
	// StateFile is the absolute path of the file that keeps registrations over a restart; "": none.
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
	changed    chan struct{} // holds a token: Take or State may return changes
	timed      chan struct{} // holds a token: the next expiry may be due earlier
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
func New(options Options) *Registry {
	options.Quota = cmp.Or(options.Quota, DefaultQuota)
	options.OnGone = cmp.Or(options.OnGone, targetset.Hold)
	if options.Log == nil {
		options.Log = slog.New(slog.DiscardHandler)
	}
	registry := &Registry{
		Options: options, maxTargets: maxTargets, since: time.Now(), ready: make(chan struct{}), stop: make(chan struct{}),
		changed: make(chan struct{}, 1), timed: make(chan struct{}, 1),
		members: map[string]map[string]*registration{}, users: map[at]*registration{},
		owned: map[caller]int{}, calls: map[caller]int{}, ending: map[*registration]struct{}{},
		dirty: map[string]struct{}{}, refused: map[Refusal]uint64{}, missing: map[string]map[string]struct{}{},
	}
	if options.StateFile != "" {
		registry.state = &stateFile{
			path: options.StateFile, log: options.Log, wanted: make(chan struct{}, 1), changed: registry.changed,
			retry: backoff.Backoff{Min: stampEvery, Max: maxStateBackoff},
		}
		registry.restore(time.Now())
	}
	return registry
}

// Ready returns a channel that is closed once Run handles the expiry of registrations.
func (registry *Registry) Ready() <-chan struct{} { return registry.ready }

// String implements task.Task.
func (registry *Registry) String() string { return "target-registry" }

// Changed returns a channel that holds a token whenever [Registry.Take], or the problems of
// [Registry.State], may have changed.
func (registry *Registry) Changed() <-chan struct{} { return registry.changed }

// Configure sets the streams and the address policy of targets. Calls before the first Configure
// are refused. Registrations of a stream that is removed or loses its check are not offered until
// the stream or check is restored.
func (registry *Registry) Configure(streams []trench.Stream, policy targetset.AddressPolicy) {
	known := make(map[string]streamConfig, len(streams))
	for _, stream := range streams {
		known[stream.Name] = streamConfig{stream.Check != (trench.Check{}), stream.Check.Families, stream.DrainTime}
	}
	registry.mu.Lock()
	defer registry.mu.Unlock()
	// Only the check decides whether registrations are offered.
	for stream := range registry.members {
		if registry.streams[stream].checked != known[stream].checked || registry.streams == nil {
			registry.touch(stream)
		}
	}
	if registry.streams == nil {
		latest.Wake(registry.timed)
	}
	registry.streams, registry.policy = known, policy
}

// Take returns all offers of each stream that changed since the last Take, by registration.
func (registry *Registry) Take() targetset.Offers {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	offers := make(targetset.Offers, len(registry.dirty))
	for stream := range registry.dirty {
		offers[stream] = nil
		if registry.streams[stream].checked {
			for _, reg := range slices.SortedFunc(maps.Values(registry.members[stream]), (*registration).compare) {
				offers[stream] = append(offers[stream], reg.Offer)
			}
		}
	}
	clear(registry.dirty)
	return offers
}

// State describes the source.
func (registry *Registry) State() targetset.SourceState {
	registry.mu.Lock()
	targets, callers := registry.count, len(registry.owned)
	var problems []string
	for stream, members := range registry.members {
		problem := "stream " + stream + " is not in the trench file"
		switch known, ok := registry.streams[stream]; {
		// Before the first Configure no stream is known, which is not a problem.
		case registry.streams == nil || known.checked:
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
	registry.mu.Unlock()
	// The map has no order, and equal problems must compare as equal.
	slices.Sort(problems)
	if more := len(problems) - maxProblems; more > 0 {
		problems = append(problems[:maxProblems], fmt.Sprintf("and %d more streams", more))
	}
	if registry.state != nil {
		if err := registry.state.failed.Load(); err != nil {
			problems = append(problems, fmt.Sprintf("registrations will not survive a restart: %v", err))
		}
	}
	return targetset.SourceState{
		Name: targetset.OriginRegistry.String(), Live: true, Since: registry.since, OnGone: registry.OnGone,
		Problems: problems,
		Detail: fmt.Sprintf("%s of %s, %d each at most", plural(targets, "target"), plural(callers, "caller"),
			registry.Quota),
	}
}

// Restored reports whether the state file had targets of the stream, and all of them have been
// registered since the start.
func (registry *Registry) Restored(stream string) bool {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	missing, found := registry.missing[stream]
	return found && len(missing) == 0
}

// Refused returns the number of refused calls since the start, by reason.
func (registry *Registry) Refused() map[Refusal]uint64 {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	return maps.Clone(registry.refused)
}

// touch marks the offers of a stream as changed. The caller holds mu.
func (registry *Registry) touch(stream string) {
	registry.dirty[stream] = struct{}{}
	latest.Wake(registry.changed)
}

// save requests a write of the state file.
func (registry *Registry) save() {
	if registry.state != nil {
		latest.Wake(registry.state.wanted)
	}
}

// Run ends expired registrations until ctx ends, and then ends every call with Unavailable. It
// writes the state file during that time and once more at the end. It is called once.
func (registry *Registry) Run(ctx context.Context) error {
	var writer sync.WaitGroup
	defer writer.Wait()
	if registry.state != nil {
		writer.Go(func() { registry.state.run(ctx, registry.snapshot) })
	}
	// Refuse new calls. The registrations remain unchanged for the state file.
	defer func() {
		registry.mu.Lock()
		defer registry.mu.Unlock()
		registry.stopped = true
		close(registry.stop)
	}()
	// From here on grace periods expire.
	close(registry.ready)
	timer := time.After(0)
	var due time.Time // of the next expiry
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-registry.timed:
		case <-timer:
		}
		wait, now, late := time.Minute, time.Now(), time.Duration(0)
		if !due.IsZero() {
			late = now.Sub(due)
		}
		if due = registry.expire(now, late); !due.IsZero() {
			wait = max(time.Until(due), expiryRound) // batch expirations that are close together
		}
		timer = time.After(wait)
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
func plural(count int, what string) string {
	if count != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", count, what)
}
