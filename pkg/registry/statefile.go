package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/targetset"
)

const (
	// stampEvery is how often the state file is touched, so that the next process
	// knows until when this one lived.
	stampEvery = time.Second
	// writeGap is the least time between two writes: what comes meanwhile is
	// written together.
	writeGap = 100 * time.Millisecond
	// maxStateBackoff is the longest wait before a write that failed is tried again.
	maxStateBackoff = 30 * time.Second
	stateVersion    = 1
)

// stateFile keeps the registrations for the next process. It is written by a
// goroutine of the registry that no call waits for. A registration that was
// answered and is not yet written when the machine dies is lost; its caller, whose
// call died as well, registers it again.
//
// How long the load balancer was away is the time since the last stamp, in wall
// time: up to stampEvery too long. A clock that was set back makes it shorter, at
// least 0, so that registrations come back once more; one that was set forward
// makes it longer, so that callers have to register again. Neither outlives the
// grace that begins with the start.
type stateFile struct {
	path   string
	log    *slog.Logger
	wanted chan struct{} // of size 1: there is something to write

	mu       sync.Mutex
	failed   error // why the last read, write or stamp failed; nil when it did not
	failures int   // in a row
}

// stateDocument is the content of a state file.
type stateDocument struct {
	Version       int                 `json:"version"`
	Registrations []savedRegistration `json:"registrations"`
}

// savedRegistration is one registration in the state file.
type savedRegistration struct {
	Stream    string       `json:"stream"`
	Name      string       `json:"name"`
	Addresses []netip.Addr `json:"addresses"`
	// Owner is a SPIFFE ID or "operator".
	Owner string `json:"owner"`
	// Grace is a duration such as "5s".
	Grace string `json:"grace"`
	// Held says that it stays without a call.
	Held bool `json:"held,omitempty"`
	// Drain and DrainEnd, in wall time, are those of a target that terminates.
	Drain    string     `json:"drain,omitempty"`
	DrainEnd *time.Time `json:"drain_end,omitempty"`
	Cause    string     `json:"cause,omitempty"`
}

func newStateFile(path string, log *slog.Logger) *stateFile {
	return &stateFile{path: path, log: log, wanted: make(chan struct{}, 1)}
}

// problems says what is wrong with the file.
func (s *stateFile) problems() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed == nil {
		return nil
	}
	return []string{fmt.Sprintf("registrations will not survive a restart: %v", s.failed)}
}

// note remembers how the last attempt went and says how long to wait for the next.
func (s *stateFile) note(err error) (wait time.Duration) {
	s.mu.Lock()
	before := s.failures
	s.failed = err
	if err == nil {
		s.failures = 0
	} else {
		s.failures++
		wait = min(stampEvery<<min(s.failures-1, 10), maxStateBackoff)
	}
	s.mu.Unlock()
	switch {
	case err != nil && before == 0:
		s.log.Error("registrations will not survive a restart", "error", err)
	case err == nil && before > 0:
		s.log.Info("registrations survive a restart again", "file", s.path, "failed_writes", before)
	}
	return wait
}

// run writes what snapshot returns whenever that is wanted, stamps the file, and
// does both a last time when ctx ends.
func (s *stateFile) run(ctx context.Context, snapshot func() stateDocument) {
	ticker := time.NewTicker(stampEvery)
	defer ticker.Stop()
	gap := time.NewTimer(0)
	defer gap.Stop()
	wanted := s.wanted // nil while a write has to wait for the gap
	attempt := func() {
		if wait := s.write(snapshot()); wait > 0 {
			latest.Wake(s.wanted)
			gap.Reset(wait)
		} else {
			gap.Reset(writeGap)
		}
		wanted = nil
	}
	for {
		select {
		case <-ctx.Done():
			select {
			case <-s.wanted:
				s.write(snapshot())
			default:
				s.stamp()
			}
			return
		case <-wanted:
			attempt()
		case <-gap.C:
			wanted = s.wanted
		case <-ticker.C:
			s.stamp()
		}
	}
}

// write writes the file and says how long to wait before the next attempt if that
// failed.
func (s *stateFile) write(d stateDocument) (wait time.Duration) {
	err := durable.Write(s.path, d)
	if err == nil {
		s.stamp() // by our clock, whatever that of the file system says
	}
	return s.note(err)
}

// stamp tells the next process that this one lives. A file that cannot be stamped
// is written again.
func (s *stateFile) stamp() {
	now := time.Now()
	if err := os.Chtimes(s.path, now, now); err != nil {
		latest.Wake(s.wanted)
	}
}

// snapshot returns what is to be written.
func (r *Registry) snapshot() stateDocument {
	now := time.Now()
	r.mu.Lock()
	list := make([]registration, 0, len(r.targets))
	for _, reg := range r.targets {
		list = append(list, *reg)
	}
	r.mu.Unlock()
	slices.SortFunc(list, func(a, b registration) int { return cmp.Compare(a.number, b.number) })
	d := stateDocument{Version: stateVersion, Registrations: make([]savedRegistration, 0, len(list))}
	for _, reg := range list {
		s := savedRegistration{
			Stream: reg.Stream, Name: reg.ID.Name, Addresses: reg.ips, Owner: reg.owner.String(), Grace: reg.grace.String(),
			Held: reg.call == nil && reg.lifecycle == targetset.Active && reg.end.IsZero(), Cause: reg.cause,
		}
		if reg.lifecycle == targetset.Terminating {
			// By the two clocks of now: the end is on the monotonic one.
			end := now.Round(0).Add(reg.end.Sub(now))
			s.Drain, s.DrainEnd = reg.drain.String(), &end
		}
		d.Registrations = append(d.Registrations, s)
	}
	return d
}

// restore takes over what the process before left. It is called before anything else.
func (r *Registry) restore(now time.Time) {
	var d stateDocument
	stamped, found, err := durable.Read(r.state.path, &d)
	var list []*registration
	if err == nil && found {
		if list, err = d.parse(); err != nil {
			err = fmt.Errorf("%s %w: %w", r.state.path, durable.ErrCorrupt, err)
		}
	}
	switch {
	case errors.Is(err, durable.ErrCorrupt):
		durable.SetAside(r.state.path, err, now, r.Log)
		r.save()
		return
	case err != nil:
		r.state.note(err)
		return
	case !found:
		r.save() // at once, so that a disk that cannot be written to is known
		return
	}
	away := max(0, now.Round(0).Sub(stamped))
	lost := 0
	for i, reg := range list {
		if !r.revive(reg, d.Registrations[i], now, away) {
			lost++
		}
	}
	r.Log.Info("registrations of the process before are taken over until they come back", "file", r.state.path, "targets", len(list)-lost, "given_up", lost, "away_for", away)
	r.save()
}

// revive takes over one registration and reports whether it counts still.
func (r *Registry) revive(reg *registration, s savedRegistration, now time.Time, away time.Duration) bool {
	if !r.allows(reg.owner, reg.Stream) || r.targets[reg.ID] != nil {
		return false
	}
	switch {
	case s.DrainEnd != nil:
		left := min(s.DrainEnd.Sub(now.Round(0)), reg.drain)
		if left <= 0 {
			return false
		}
		r.add(reg)
		reg.lifecycle = targetset.Terminating
		r.endAt(reg, now.Add(left))
	case s.Held, away >= reg.grace && r.OnGone == targetset.Hold:
		r.add(reg)
		reg.cause = causeEnded
	case away >= reg.grace:
		return false
	default:
		r.add(reg)
		reg.cause = ""
		r.endAt(reg, now.Add(reg.grace))
	}
	return true
}

// parse makes sense of a document, or of nothing in it.
func (d stateDocument) parse() ([]*registration, error) {
	if d.Version != stateVersion {
		return nil, fmt.Errorf("version %d is not %d", d.Version, stateVersion)
	}
	list := make([]*registration, 0, len(d.Registrations))
	for i, s := range d.Registrations {
		reg, err := s.parse()
		if err != nil {
			return nil, fmt.Errorf("registration %d: %w", i, err)
		}
		list = append(list, reg)
	}
	return list, nil
}

func (s savedRegistration) parse() (*registration, error) {
	for _, name := range []string{s.Stream, s.Name} {
		if err := targetset.CheckName(name); err != nil {
			return nil, err
		}
	}
	if err := checkAddresses(s.Addresses); err != nil {
		return nil, err
	}
	reg := &registration{ID: targetset.ID{Stream: s.Stream, Name: s.Name}, announced: announced{name: s.Name, ips: s.Addresses}, cause: s.Cause}
	if s.Owner != operatorName {
		id, err := spiffeid.FromString(s.Owner)
		if err != nil {
			return nil, fmt.Errorf("owner: %w", err)
		}
		reg.owner = caller{id}
	}
	var err error
	if reg.grace, err = time.ParseDuration(s.Grace); err != nil || reg.grace < 0 {
		return nil, fmt.Errorf("grace %q is no duration", s.Grace)
	}
	if s.DrainEnd != nil {
		if reg.drain, err = time.ParseDuration(s.Drain); err != nil || reg.drain < 0 {
			return nil, fmt.Errorf("drain %q is no duration", s.Drain)
		}
	}
	return reg, nil
}
