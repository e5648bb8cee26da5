package frontend

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// speaker says of VIPs whether they are ready: the load balancer, or a directory
// of readiness files in its stead.
type speaker interface {
	// Changed holds a token whenever Take may return something new.
	Changed() <-chan struct{}
	// Take returns everything said since the last Take. It never waits.
	Take() readiness.Update
}

// directorySpeaker speaks for a readiness directory. Each look at the directory
// renews the lease of its words; nobody is reported to.
type directorySpeaker struct {
	directory *readinessfile.Reader
	config    *latest.Value[trench.Loaded]
	instance  string // of this start
	changed   chan struct{}
	ready     chan struct{}

	mu      sync.Mutex
	pending readiness.Update

	// Of Run only.
	said     map[vip.VIP]readiness.VIPReadiness
	revision uint64 // of the listing that was said last
	from     *trench.Config
}

func newDirectorySpeaker(d *readinessfile.Reader, config *latest.Value[trench.Loaded], instance string) *directorySpeaker {
	return &directorySpeaker{
		directory: d, config: config, instance: instance, changed: make(chan struct{}, 1), ready: make(chan struct{}),
		said: map[vip.VIP]readiness.VIPReadiness{},
	}
}

func (s *directorySpeaker) String() string           { return "directory-speaker" }
func (s *directorySpeaker) Ready() <-chan struct{}   { return s.ready }
func (s *directorySpeaker) Changed() <-chan struct{} { return s.changed }

// Take implements speaker.
func (s *directorySpeaker) Take() readiness.Update {
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.pending
	s.pending.Complete, s.pending.Changed, s.pending.Removed, s.pending.ReceivedAt = false, nil, nil, time.Time{}
	return u
}

// Run speaks until ctx ends.
func (s *directorySpeaker) Run(ctx context.Context) error {
	close(s.ready)
	loaded, loadedChanged := s.config.Get()
	for {
		listing, listingChanged := s.directory.Value().Get()
		if listing.Scanned {
			s.say(time.Now(), listing, loaded.Config)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-listingChanged:
		case <-loadedChanged:
			loaded, loadedChanged = s.config.Get()
			s.directory.Configure(directoryNames(loaded.Config))
		}
	}
}

// directoryNames are what readiness files may be about.
func directoryNames(c *trench.Config) readinessfile.Names {
	n := readinessfile.Names{VIPs: c.Attractor.VIPs}
	for _, st := range c.Streams {
		n.Streams = append(n.Streams, st.Name)
	}
	return n
}

// say makes words of a listing.
func (s *directorySpeaker) say(now time.Time, l readinessfile.Listing, c *trench.Config) {
	changed, removed := map[vip.VIP]readiness.VIPReadiness{}, vip.Set{}
	first := s.from == nil
	if first || l.Revision != s.revision || c != s.from {
		changed, removed = s.compare(now, l, c)
		s.revision, s.from = l.Revision, c
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.pending
	if first || len(changed)+len(removed) > 0 {
		p.Position = readiness.Position{InstanceID: s.instance, Revision: p.Position.Revision + 1}
		if p.ReceivedAt.IsZero() {
			p.ReceivedAt = now
		}
	}
	p.Complete = p.Complete || first
	for v, r := range changed {
		if p.Changed == nil {
			p.Changed = map[vip.VIP]readiness.VIPReadiness{}
		}
		p.Changed[v] = r
		delete(p.Removed, v)
	}
	for v := range removed {
		if p.Removed == nil {
			p.Removed = vip.Set{}
		}
		p.Removed[v] = struct{}{}
		delete(p.Changed, v)
	}
	p.Open, p.Synced, p.LastMessage, p.LeaseEnd = true, true, l.At, l.At.Add(readinessfile.MaxListingAge)
	p.Err = directoryTrouble(l)
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// compare returns what the listing says otherwise than what was said.
func (s *directorySpeaker) compare(now time.Time, l readinessfile.Listing, c *trench.Config) (changed map[vip.VIP]readiness.VIPReadiness, removed vip.Set) {
	changed, removed = map[vip.VIP]readiness.VIPReadiness{}, vip.Set{}
	streams := map[vip.VIP][]string{}
	for _, st := range c.Streams {
		for _, v := range st.VIPs {
			streams[v] = append(streams[v], st.Name)
		}
	}
	configured := vip.NewSet(c.Attractor.VIPs...)
	for v := range s.said {
		if !configured.Has(v) {
			removed[v] = struct{}{}
			delete(s.said, v)
		}
	}
	for v := range configured {
		ready, why := l.Ready(v, streams[v])
		is := readiness.VIPReadiness{VIP: v, Detail: why, Reason: readinessv1.VipReason_VIP_REASON_NO_READINESS_FILE, Since: now}
		switch {
		case ready && !l.DrainEnd.IsZero():
			is.State, is.DrainEnd, is.Reason = readiness.Draining, l.DrainEnd, readinessv1.VipReason_VIP_REASON_READINESS_FILE
		case ready:
			is.State, is.Reason = readiness.Ready, readinessv1.VipReason_VIP_REASON_READINESS_FILE
		}
		was, known := s.said[v]
		if known && was.State == is.State {
			is.Since = was.Since
			if was.Detail == is.Detail && was.DrainEnd.Equal(is.DrainEnd) {
				continue
			}
		}
		s.said[v], changed[v] = is, is
	}
	return changed, removed
}

// directoryTrouble is what is wrong with a directory, or with files in it.
func directoryTrouble(l readinessfile.Listing) error {
	if l.Gone {
		return l.Err
	}
	if len(l.Problems) > 0 {
		return errors.New("readiness files that are not taken: " + strings.Join(l.Problems, "; "))
	}
	return nil
}

// streamProblem says why the load balancer's word, or that of the readiness
// directory, is not to be had; "" while it is.
func (p *process) streamProblem(lb lbState) string {
	lastMessage := p.observer.lease.Load().LastMessage
	if p.directory == nil {
		return lbProblem(lb, lastMessage)
	}
	l := p.directory.Value().Load()
	switch {
	case lb.Freshness == gate.Live && (!l.Gone || l.Everything):
		return ""
	case l.Gone:
		return l.Err.Error()
	case lastMessage.IsZero():
		return "the readiness directory " + p.Directory.Path + " was not read yet"
	}
	return fmt.Sprintf("the readiness directory %s was last read %v ago: does its file system hang, or is the node starved of CPU?",
		p.Directory.Path, time.Since(lastMessage).Round(time.Second))
}
