// Package directory is a directory of readiness files as the readiness source of a frontend.
package directory

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Source is a directory of readiness files. Each scan renews the lease.
type Source struct {
	reader   *readinessfile.Reader
	inForce  *latest.Value[*change.InForce]
	drain    time.Duration
	instance string // identifies this start
	changed  chan struct{}

	mu      sync.Mutex
	pending readiness.Update

	// Owned by Run.
	published []readiness.VIPReadiness
	revision  uint64 // of the last published listing
	from      *change.InForce
}

// New returns a source that reads the directory of a reader, which its owner runs, for the VIPs in
// force. VIPs that leave the configuration keep their readiness for their drain, and those whose
// last stream leaves it drain for a time. instance identifies this start.
func New(r *readinessfile.Reader, inForce *latest.Value[*change.InForce], drain time.Duration, instance string,
) *Source {
	configure(r, inForce.Load().Config)
	return &Source{reader: r, inForce: inForce, drain: drain, instance: instance, changed: make(chan struct{}, 1)}
}

// String implements task.Task.
func (s *Source) String() string { return "directory-source" }

// Changed holds a token whenever Take may return a change.
func (s *Source) Changed() <-chan struct{} { return s.changed }

// Take returns the changes since the last Take. It does not block.
func (s *Source) Take() readiness.Update {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pending.Take()
}

// Run publishes listings until ctx ends.
func (s *Source) Run(ctx context.Context) error {
	inForce, changed := s.inForce.Get()
	for {
		listing, listingChanged := s.reader.Value().Get()
		// An unread directory must not be mistaken for an empty one.
		if listing.Scanned {
			s.Publish(time.Now(), listing, inForce)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-listingChanged:
		case <-changed:
			inForce, changed = s.inForce.Get()
			configure(s.reader, inForce.Config)
		}
	}
}

// configure sets the VIPs and streams for which readiness files count.
func configure(d *readinessfile.Reader, c *trench.Config) {
	var streams []string
	for _, st := range c.Streams {
		streams = append(streams, st.Name)
	}
	d.Configure(streams, c.Attractor.VIPs)
}

// Publish adds a changed listing to the pending update. An unchanged listing only renews the
// lease.
func (s *Source) Publish(now time.Time, l readinessfile.Listing, inForce *change.InForce) {
	changed := l.Revision != s.revision || inForce != s.from
	if changed {
		s.published = s.evaluate(now, l, inForce)
		s.revision, s.from = l.Revision, inForce
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.pending
	if changed {
		p.Position = readiness.Position{InstanceID: s.instance, Revision: p.Position.Revision + 1}
		p.Complete, p.Changed = true, slices.Clone(s.published)
		// Pending listings are merged: the latency counts from the first of them.
		if p.ReceivedAt.IsZero() {
			p.ReceivedAt = now
		}
	}
	p.Open, p.Synced, p.LastMessage, p.LeaseEnd = true, true, l.At, l.At.Add(readinessfile.MaxListingAge)
	p.Err = problem(l)
	latest.Wake(s.changed)
}

// evaluate returns the readiness of all VIPs. An unchanged state keeps its time.
func (s *Source) evaluate(now time.Time, l readinessfile.Listing,
	inForce *change.InForce,
) []readiness.VIPReadiness {
	streams := map[vip.VIP][]string{}
	for _, st := range inForce.Config.Streams {
		for _, v := range st.VIPs {
			streams[v] = append(streams[v], st.Name)
		}
	}
	published := make(map[vip.VIP]readiness.VIPReadiness, len(s.published))
	for _, r := range s.published {
		published[r.VIP] = r
	}
	all := make([]readiness.VIPReadiness, 0, len(inForce.Attractor.VIPs))
	for _, v := range inForce.Attractor.VIPs {
		was, known := published[v]
		if known && inForce.Kept[v] == change.Leaving {
			all = append(all, was)
			continue
		}
		ready, detail := l.Ready(v, streams[v])
		is := readiness.VIPReadiness{
			VIP: v, Detail: detail, Reason: readinessv1.VipReason_VIP_REASON_NO_READINESS_FILE, Since: now,
		}
		if ready {
			is.State, is.Reason = vip.Ready, readinessv1.VipReason_VIP_REASON_READINESS_FILE
			if !l.DrainEnd.IsZero() {
				is.State, is.DrainEnd = vip.Draining, l.DrainEnd
			}
		} else if inForce.Kept[v] == change.Ended && (was.State == vip.Ready || was.DrainEnd.After(now)) {
			is.State, is.Reason = vip.Draining, readinessv1.VipReason_VIP_REASON_LEAVING
			is.DrainEnd = cmp.Or(was.DrainEnd, now.Add(s.drain))
		}
		// Since is the start of the state, which a new detail does not change.
		if known && was.State == is.State {
			is.Since = was.Since
		}
		all = append(all, is)
	}
	return all
}

// problem returns the problem of the directory or of its files.
func problem(l readinessfile.Listing) error {
	if l.Gone {
		return l.Err
	}
	if len(l.Problems) > 0 {
		return errors.New("ignored readiness files: " + strings.Join(l.Problems, "; "))
	}
	return nil
}
