package registry

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Defaults of the registry.
const (
	// DefaultGrace is how long targets outlive the call that registered them.
	DefaultGrace = 5 * time.Second
	// DefaultQuota is how many targets one SPIFFE ID may register: ten IDs
	// fit into a neighbor table of 1 024 entries, which all pods of a node share.
	DefaultQuota = 100
	// DefaultTargets is how many targets all together may register.
	DefaultTargets = 100_000
)

// MaxTargetsPerCall is how many targets one Register or Deregister may name.
const MaxTargetsPerCall = 1000

// Options configure a registry.
type Options struct {
	// Off refuses every registration: no source uses the registry.
	Off bool
	// Allow says which SPIFFE IDs may register targets of which streams. What the
	// operator may do does not depend on it.
	Allow Allowances
	// Quota is how many targets one SPIFFE ID may have, with those that drain.
	// Default: DefaultQuota.
	Quota int
	// MaxTargets bounds the targets of all callers. Default: DefaultTargets.
	MaxTargets int
	// Grace is how long targets outlive their call at most, and unless the call
	// asks for less. 0 is none at all.
	Grace time.Duration
	// OnGone is what happens after that.
	OnGone targetset.GonePolicy
	// StateFile is where registrations survive a restart, an absolute path; "":
	// they do not.
	StateFile string
	Log       *slog.Logger
}

// Registry is the source of the targets that register themselves. It implements
// task.Task. All methods may be called from any goroutine, and none waits for the
// network or the disk.
//
// A registration lives as long as its call, plus its grace; then OnGone says what
// happens: Drain offers it as [Leaving] for the stream's drain time, Drop lets
// it go at once, Hold keeps it until it is deregistered or registered again. A call
// that takes a name over within the grace changes nothing in what is offered.
type Registry struct {
	Options
	ready   chan struct{}
	changed chan struct{} // of size 1: Take has something to tell
	timed   chan struct{} // of size 1: ending has something new
	stop    chan struct{} // closed when the registry stops
	since   time.Time
	state   *stateFile // nil: none

	mu      sync.Mutex
	streams map[string]streamConfig // nil before the first Configure
	policy  targetset.AddressPolicy
	targets map[targetset.ID]*registration
	members map[string]map[string]*registration // the same by stream and name
	users   map[at]*registration                // the same by their addresses
	owned   map[caller]int                      // targets by owner
	calls   map[caller]int                      // handlers by caller
	ending  map[*registration]struct{}          // those with an end
	dirty   map[string]struct{}                 // streams that changed since the last Take
	refused map[Refusal]uint64
	number  uint64 // of the newest registration
	stopped bool
}

// streamConfig is what the registry knows of a stream.
type streamConfig struct {
	checked  bool
	families trench.Families
	drain    time.Duration
}

// New returns a registry with what the state file has: each registration as
// if its call had just ended, provided that the load balancer was away for less
// than its grace. A state file that makes no sense is moved aside; one that cannot
// be read is a problem that [Registry.State] tells, and no error.
func New(o Options) (*Registry, error) {
	if o.Grace < 0 || o.Quota < 0 || o.MaxTargets < 0 {
		return nil, fmt.Errorf("registry: grace %v, quota %d and limit %d must not be negative", o.Grace, o.Quota, o.MaxTargets)
	}
	if o.OnGone > targetset.Drop {
		return nil, fmt.Errorf("registry: %v: use hold, drain or drop", o.OnGone)
	}
	o.Quota, o.MaxTargets = cmp.Or(o.Quota, DefaultQuota), cmp.Or(o.MaxTargets, DefaultTargets)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	r := &Registry{
		Options: o,
		ready:   make(chan struct{}),
		changed: make(chan struct{}, 1),
		timed:   make(chan struct{}, 1),
		stop:    make(chan struct{}),
		since:   time.Now(),
		targets: map[targetset.ID]*registration{},
		members: map[string]map[string]*registration{},
		users:   map[at]*registration{},
		owned:   map[caller]int{},
		calls:   map[caller]int{},
		ending:  map[*registration]struct{}{},
		dirty:   map[string]struct{}{},
		refused: map[Refusal]uint64{},
	}
	if o.StateFile != "" {
		r.state = newStateFile(o.StateFile, o.Log)
		r.restore(time.Now())
	}
	return r, nil
}

// Ready is closed once ends of registrations are noticed.
func (r *Registry) Ready() <-chan struct{} { return r.ready }

// String names the task.
func (r *Registry) String() string { return "target-registry" }

// Authorizes reports whether the ID may register targets of any stream, for the
// authorizer of the TLS handshake.
func (r *Registry) Authorizes(id spiffeid.ID) bool { return r.Allow.Authorizes(id) }

// Changed wakes the caller of [Registry.Take]. Wake-ups conflate.
func (r *Registry) Changed() <-chan struct{} { return r.changed }

// Configure says which streams there are and which addresses targets may have.
// Calls before the first Configure are refused. Registrations for a stream that is
// gone, or has no check any more, are not offered until it is back.
func (r *Registry) Configure(streams []trench.Stream, policy targetset.AddressPolicy) {
	known := make(map[string]streamConfig, len(streams))
	for _, s := range streams {
		known[s.Name] = streamConfig{checked: s.Check != (trench.Check{}), families: s.Check.Families, drain: s.DrainTime}
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

// Take returns what changed since the last Take: by stream all that is offered, in
// the order of registration.
func (r *Registry) Take() targetset.Offers {
	r.mu.Lock()
	defer r.mu.Unlock()
	offers := make(targetset.Offers, len(r.dirty))
	for stream := range r.dirty {
		list := make([]*registration, 0, len(r.members[stream]))
		if r.streams[stream].checked {
			for _, reg := range r.members[stream] {
				list = append(list, reg)
			}
		}
		slices.SortFunc(list, func(a, b *registration) int { return cmp.Compare(a.number, b.number) })
		offered := make([]targetset.Offer, len(list))
		for i, reg := range list {
			offered[i] = reg.offer()
		}
		offers[stream] = offered
	}
	clear(r.dirty)
	return offers
}

// maxStreamProblems is how many problems of one kind State lists.
const maxStreamProblems = 20

// State describes the source.
func (r *Registry) State() targetset.SourceState {
	s := targetset.SourceState{Name: "registry", Live: true, Since: r.since, OnGone: r.OnGone}
	r.mu.Lock()
	targets, callers := len(r.targets), len(r.owned)
	var lost []string
	for stream, members := range r.members {
		switch known, ok := r.streams[stream]; {
		case r.streams == nil || known.checked:
		case !ok:
			lost = append(lost, fmt.Sprintf("stream %s is not in the trench file: %s not used (%s)", stream, plural(len(members), "registered target", "is", "are"), some(members)))
		default:
			lost = append(lost, fmt.Sprintf("stream %s has no check: %s not used (%s)", stream, plural(len(members), "registered target", "is", "are"), some(members)))
		}
	}
	r.mu.Unlock()
	slices.Sort(lost)
	if len(lost) > maxStreamProblems {
		lost = append(lost[:maxStreamProblems], fmt.Sprintf("and %d more streams", len(lost)-maxStreamProblems))
	}
	if r.state != nil {
		lost = append(lost, r.state.problems()...)
	}
	s.Detail = fmt.Sprintf("%s of %s, %d each at most", plural(targets, "target"), plural(callers, "caller"), r.Quota)
	s.Problems = lost
	return s
}

// Refused returns how many calls were refused since the start, by the reason.
func (r *Registry) Refused() map[Refusal]uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	counts := make(map[Refusal]uint64, len(r.refused))
	for why, n := range r.refused {
		counts[why] = n
	}
	return counts
}

// touch notes that what is offered for a stream changed. It is called with mu held.
func (r *Registry) touch(stream string) {
	r.dirty[stream] = struct{}{}
	latest.Wake(r.changed)
}

// save has the state written. It is called with mu held.
func (r *Registry) save() {
	if r.state != nil {
		latest.Wake(r.state.wanted)
	}
}

// expiryRound is the least time between two rounds of expirations: those within it
// happen together.
const expiryRound = 10 * time.Millisecond

// Run ends what is due until ctx ends, then every call, with Unavailable. It keeps
// the state file, and waits for what is being written. It is called once.
func (r *Registry) Run(ctx context.Context) error {
	var writer sync.WaitGroup
	defer writer.Wait()
	if r.state != nil {
		writer.Go(func() { r.state.run(ctx, r.snapshot) })
	}
	defer r.shut()
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
		const idle = time.Minute
		wait := idle
		if next := r.expire(time.Now()); !next.IsZero() {
			wait = max(time.Until(next), expiryRound)
		}
		timer.Reset(wait)
	}
}

// shut ends all calls and refuses new ones. What they registered is left as it is,
// for the next start.
func (r *Registry) shut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopped = true
	close(r.stop)
}

// existing names the streams that the caller may use, for people.
func (r *Registry) existing(who caller) string {
	const most = 10
	var names []string
	for name, s := range r.streams {
		if s.checked && r.allows(who, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	switch {
	case len(names) == 0:
		return "there are none yet"
	case len(names) > most:
		return strings.Join(names[:most], ", ") + fmt.Sprintf(" and %d more", len(names)-most)
	}
	return strings.Join(names, ", ")
}

// has reports whether the check of a stream looks at an address of the target.
func (g streamConfig) has(t announced) bool {
	for _, a := range t.ips {
		if g.families.Has(vip.FamilyOf(a)) {
			return true
		}
	}
	return false
}

// some names a few targets.
func some(members map[string]*registration) string {
	const most = 3
	names := make([]string, 0, len(members))
	for name := range members {
		names = append(names, name)
	}
	slices.Sort(names)
	if len(names) > most {
		names = append(names[:most], "…")
	}
	return strings.Join(names, ", ")
}

// plural is "1 target", "2 targets", with the word that follows.
func plural(n int, what string, follow ...string) string {
	s := fmt.Sprintf("%d %s", n, what)
	if n != 1 {
		s += "s"
	}
	if len(follow) == 2 {
		if n == 1 {
			return s + " " + follow[0]
		}
		return s + " " + follow[1]
	}
	return s
}
