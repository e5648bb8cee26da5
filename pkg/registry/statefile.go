package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/tick"
)

const (
	// stampEvery is the interval at which the state file is touched. The next process reads from its
	// mtime when this process ended.
	stampEvery = time.Second
	// writeGap is the shortest time between two writes. Changes within it share a write.
	writeGap = 100 * time.Millisecond
	// maxStateBackoff is the longest wait before a failed write is retried.
	maxStateBackoff = 30 * time.Second
	stateVersion    = 1
)

// stateFile stores the registrations for the next process. Calls do not wait for its writes: a
// crash of the machine loses unwritten registrations, and their callers register again. The
// downtime of lb is the wall-clock time since the last stamp. If the clock was set back in
// between, expired registrations are restored; if it was set forward, valid ones are dropped.
// Either error lasts at most for the grace period that begins with the start.
type stateFile struct {
	path   string
	log    *slog.Logger
	wanted chan struct{} // holds a token: a write is pending
	retry  backoff.Backoff
	failed latest.Value[error] // of the last read or write; nil if it succeeded
}

// stateDocument is the content of a state file.
type stateDocument struct {
	Version       int                 `json:"version"`
	Registrations []savedRegistration `json:"registrations"`
}

// savedRegistration is one registration in the state file.
type savedRegistration struct {
	targetset.ID
	Addresses []netip.Addr     `json:"addresses"`
	Owner     string           `json:"owner"` // a SPIFFE ID or "operator"
	Grace     durable.Duration `json:"grace"`
	Held      bool             `json:"held,omitempty"` // kept by Hold after its grace period
	Drain     durable.Duration `json:"drain,omitzero"`
	DrainEnd  time.Time        `json:"drain_end,omitzero"` // in wall time; zero unless it drains
	Cause     string           `json:"cause,omitempty"`
}

// note records the result of an attempt, and logs a change between success and failure.
func (s *stateFile) note(err error) {
	switch failing := s.failed.Load() != nil; {
	case err != nil && !failing:
		s.log.Error("registrations will not survive a restart", "error", err)
	case err == nil && failing:
		s.log.Info("registrations survive a restart again", "file", s.path)
	}
	s.failed.Set(err)
}

// run writes a snapshot for each request and stamps the file periodically. When ctx ends, it
// writes a pending snapshot or stamps the file once more.
func (s *stateFile) run(ctx context.Context, snapshot func() stateDocument) {
	due := time.NewTimer(tick.Until(time.Now(), stampEvery))
	defer due.Stop()
	gap := time.NewTimer(0)
	defer gap.Stop()
	wanted := s.wanted // nil until the gap after the previous write has passed
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
			wanted = nil
			gap.Reset(s.write(snapshot()))
		case <-gap.C:
			wanted = s.wanted
		case <-due.C:
			due.Reset(tick.Until(time.Now(), stampEvery))
			s.stamp()
		}
	}
}

// write writes the file and returns the delay until the next write.
func (s *stateFile) write(d stateDocument) (wait time.Duration) {
	err := durable.Write(s.path, d)
	s.note(err)
	if err != nil {
		// Retry after the returned delay: run does not receive from wanted before.
		latest.Wake(s.wanted)
		return s.retry.Next()
	}
	s.retry.Reset()
	s.stamp() // with the local clock, from which the clock of a file server may differ
	return writeGap
}

// stamp sets the mtime of the file to the current time. If that fails, the file is written again.
func (s *stateFile) stamp() {
	now := time.Now()
	if err := os.Chtimes(s.path, now, now); err != nil {
		latest.Wake(s.wanted)
	}
}

// snapshot returns the content of the state file.
func (r *Registry) snapshot() stateDocument {
	now := time.Now()
	r.mu.Lock()
	all := make([]*registration, 0, r.count)
	for _, members := range r.members {
		for _, reg := range members {
			saved := *reg
			all = append(all, &saved)
		}
	}
	r.mu.Unlock()
	slices.SortFunc(all, (*registration).compare) // restore assigns numbers in this order
	d := stateDocument{Version: stateVersion, Registrations: make([]savedRegistration, 0, len(all))}
	for _, reg := range all {
		s := savedRegistration{
			ID: reg.id(), Addresses: reg.IPs, Owner: reg.Owner, Grace: durable.Duration(reg.grace), Cause: reg.Cause,
			Held: reg.call == nil && reg.Lifecycle == targetset.Active && reg.DrainEnd.IsZero(),
		}
		if reg.Lifecycle != targetset.Active {
			// DrainEnd has a monotonic reading, which is valid in this process only. Add the remaining
			// time to the wall clock.
			s.Drain, s.DrainEnd = durable.Duration(reg.drain), now.Round(0).Add(reg.DrainEnd.Sub(now))
		}
		d.Registrations = append(d.Registrations, s)
	}
	return d
}

// restore restores the registrations of the previous process. Only New calls it, so mu is not held.
func (r *Registry) restore(now time.Time) {
	var d stateDocument
	stamped, found, err := durable.Read(r.state.path, &d)
	if err == nil && found && d.Version != stateVersion {
		err = fmt.Errorf("%s %w: version %d is not %d", r.state.path, durable.ErrCorrupt, d.Version, stateVersion)
	}
	list := make([]*registration, len(d.Registrations))
	for i, s := range d.Registrations {
		var owner caller
		var errOwner error
		if s.Owner != operatorName {
			owner.id, errOwner = spiffeid.FromString(s.Owner)
		}
		if errParse := errors.Join(s.ID.Check(), checkAddresses(s.Addresses), errOwner); err == nil && errParse != nil {
			err = fmt.Errorf("%s %w: registration %d: %w", r.state.path, durable.ErrCorrupt, i, errParse)
		}
		list[i] = &registration{
			Offer: targetset.Offer{Name: s.Name, IPs: s.Addresses, Owner: s.Owner}, stream: s.Stream, owner: owner,
			grace: time.Duration(s.Grace), drain: time.Duration(s.Drain),
		}
	}
	switch {
	case errors.Is(err, durable.ErrCorrupt):
		durable.SetAside(r.state.path, err, now, r.Log)
	case err != nil:
		r.state.note(err)
		return
	case found:
		away := max(0, now.Round(0).Sub(stamped))
		for i, reg := range list {
			r.revive(reg, d.Registrations[i], now, away)
		}
		r.Log.Info("registrations of the previous process restored until their callers return",
			"file", r.state.path, "targets", r.count, "given_up", len(list)-r.count, "away_for", away)
	}
	r.save() // immediately, to detect an unwritable disk at the start
}

// revive restores one registration unless it has expired or is no longer authorized.
func (r *Registry) revive(reg *registration, s savedRegistration, now time.Time, away time.Duration) {
	if !r.allows(reg.owner, reg.stream) || r.members[reg.stream][reg.Name] != nil {
		return
	}
	gone := away >= reg.grace
	if !s.DrainEnd.IsZero() {
		left := min(s.DrainEnd.Sub(now.Round(0)), reg.drain)
		if left <= 0 {
			return
		}
		reg.Lifecycle = targetset.Terminating
		if s.Cause == causes[targetset.Leaving] {
			reg.Lifecycle = targetset.Leaving
		}
		reg.Cause = s.Cause
		r.endAt(reg, now.Add(left))
		r.add(reg)
		return
	}
	if r.missing[reg.stream] == nil {
		r.missing[reg.stream] = map[string]struct{}{}
	}
	r.missing[reg.stream][reg.Name] = struct{}{} // removed by add
	if s.Held || gone && r.OnGone == targetset.Hold {
		reg.Cause = causes[targetset.Leaving]
	} else if gone {
		return
	} else {
		r.endAt(reg, now.Add(reg.grace))
	}
	r.add(reg)
}
