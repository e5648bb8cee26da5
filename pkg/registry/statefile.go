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
	// changed holds a token once failed is nil, or no longer: the state of the registry changed.
	changed chan struct{}
}

type stateDocument struct {
	Version       int                 `json:"version"`
	Registrations []savedRegistration `json:"registrations"`
}

type savedRegistration struct {
	// Not an embedded targetset.ID, whose MarshalText would be the text of the whole struct.
	Stream    string           `json:"stream"`
	Name      string           `json:"name"`
	Addresses []netip.Addr     `json:"addresses"`
	Owner     string           `json:"owner"` // a SPIFFE ID or "operator"
	Grace     durable.Duration `json:"grace"`
	Held      bool             `json:"held,omitempty"` // kept by Hold after its grace period
	Drain     durable.Duration `json:"drain,omitzero"`
	DrainEnd  time.Time        `json:"drain_end,omitzero"` // in wall time; zero unless it drains
	Cause     string           `json:"cause,omitempty"`
}

// note records the result of an attempt, and logs a change between success and failure.
func (file *stateFile) note(err error) {
	failing := file.failed.Load() != nil
	switch {
	case err != nil && !failing:
		file.log.Error("registrations will not survive a restart", "error", err)
	case err == nil && failing:
		file.log.Info("registrations survive a restart again", "file", file.path)
	}
	if file.failed.Set(err); failing != (err != nil) {
		latest.Wake(file.changed)
	}
}

// run writes a snapshot for each request and stamps the file periodically. When ctx ends, it
// writes a pending snapshot or stamps the file once more.
func (file *stateFile) run(ctx context.Context, snapshot func() stateDocument) {
	due := time.After(tick.Until(time.Now(), stampEvery))
	gap := time.After(0)
	wanted := file.wanted // nil until the gap after the previous write has passed
	for {
		select {
		case <-ctx.Done():
			select {
			case <-file.wanted:
				file.write(snapshot())
			default:
				file.stamp()
			}
			return
		case <-wanted:
			wanted = nil
			gap = time.After(file.write(snapshot()))
		case <-gap:
			wanted = file.wanted
		case <-due:
			due = time.After(tick.Until(time.Now(), stampEvery))
			file.stamp()
		}
	}
}

// write writes the file and returns the delay until the next write.
func (file *stateFile) write(document stateDocument) (wait time.Duration) {
	err := durable.Write(file.path, document)
	file.note(err)
	if err != nil {
		// Retry after the returned delay: run does not receive from wanted before.
		latest.Wake(file.wanted)
		return file.retry.Next()
	}
	file.retry.Reset()
	file.stamp() // with the local clock, from which the clock of a file server may differ
	return writeGap
}

// stamp sets the mtime of the file to the current time. If that fails, the file is written again.
func (file *stateFile) stamp() {
	now := time.Now()
	if err := os.Chtimes(file.path, now, now); err != nil {
		latest.Wake(file.wanted)
	}
}

func (registry *Registry) snapshot() stateDocument {
	now := time.Now()
	// Copy under the lock, sort and encode without it: calls must not wait for the disk.
	registry.mu.Lock()
	all := make([]*registration, 0, registry.count)
	for _, members := range registry.members {
		for _, reg := range members {
			saved := *reg
			all = append(all, &saved)
		}
	}
	registry.mu.Unlock()
	slices.SortFunc(all, (*registration).compare) // restore assigns numbers in this order
	document := stateDocument{Version: stateVersion, Registrations: make([]savedRegistration, 0, len(all))}
	for _, reg := range all {
		saved := savedRegistration{
			Stream: reg.stream, Name: reg.Name, Addresses: reg.IPs, Owner: reg.Owner,
			Grace: durable.Duration(reg.grace), Cause: reg.Cause,
			Held: reg.call == nil && reg.Lifecycle == targetset.Active && reg.DrainEnd.IsZero(),
		}
		if reg.Lifecycle != targetset.Active {
			// DrainEnd has a monotonic reading, which is valid in this process only. Add the remaining
			// time to the wall clock.
			saved.Drain, saved.DrainEnd = durable.Duration(reg.drain), now.Round(0).Add(reg.DrainEnd.Sub(now))
		}
		document.Registrations = append(document.Registrations, saved)
	}
	return document
}

// restore restores the registrations of the previous process. Only New calls it, so mu is not held.
func (registry *Registry) restore(now time.Time) {
	var document stateDocument
	stamped, found, err := durable.Read(registry.state.path, &document)
	if err == nil && found && document.Version != stateVersion {
		err = fmt.Errorf("%s %w: version %d is not %d", registry.state.path, durable.ErrCorrupt, document.Version,
			stateVersion)
	}
	list := make([]*registration, len(document.Registrations))
	for index, saved := range document.Registrations {
		var owner caller
		var errOwner error
		if saved.Owner != operatorName {
			owner.id, errOwner = spiffeid.FromString(saved.Owner)
		}
		errParse := errors.Join(
			targetset.ID{Stream: saved.Stream, Name: saved.Name}.Check(), checkAddresses(saved.Addresses), errOwner)
		if err == nil && errParse != nil {
			err = fmt.Errorf("%s %w: registration %d: %w", registry.state.path, durable.ErrCorrupt, index, errParse)
		}
		list[index] = &registration{
			Offer:  targetset.Offer{Name: saved.Name, IPs: saved.Addresses, Owner: saved.Owner},
			stream: saved.Stream, owner: owner,
			grace: time.Duration(saved.Grace), drain: time.Duration(saved.Drain),
		}
	}
	switch {
	case errors.Is(err, durable.ErrCorrupt):
		durable.SetAside(registry.state.path, err, now, registry.Log)
	case err != nil:
		registry.state.note(err)
		return
	case found:
		// The wall clock may have been set back since the stamp.
		away := max(0, now.Round(0).Sub(stamped))
		for index, reg := range list {
			registry.revive(reg, document.Registrations[index], now, away)
		}
		registry.Log.Info("registrations of the previous process restored until their callers return",
			"file", registry.state.path, "targets", registry.count, "given_up", len(list)-registry.count, "away_for", away)
	}
	registry.save() // immediately, to detect an unwritable disk at the start
}

// revive restores one registration unless it has expired or is no longer authorized.
func (registry *Registry) revive(reg *registration, saved savedRegistration, now time.Time, away time.Duration) {
	if !registry.allows(reg.owner, reg.stream) || registry.members[reg.stream][reg.Name] != nil {
		return
	}
	gone := away >= reg.grace
	if !saved.DrainEnd.IsZero() {
		left := min(saved.DrainEnd.Sub(now.Round(0)), reg.drain)
		if left <= 0 {
			return
		}
		reg.Lifecycle = targetset.Terminating
		if saved.Cause == causes[targetset.Leaving] {
			reg.Lifecycle = targetset.Leaving
		}
		reg.Cause = saved.Cause
		registry.endAt(reg, now.Add(left))
		registry.add(reg)
		return
	}
	if registry.missing[reg.stream] == nil {
		registry.missing[reg.stream] = map[string]struct{}{}
	}
	registry.missing[reg.stream][reg.Name] = struct{}{} // removed by add
	if saved.Held || gone && registry.OnGone == targetset.Hold {
		reg.Cause = causes[targetset.Leaving]
	} else if gone {
		return
	} else {
		registry.endAt(reg, now.Add(reg.grace))
	}
	registry.add(reg)
}
