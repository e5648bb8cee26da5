package frontend

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

// readinessSource is the load balancer's stream or a directory of readiness files.
type readinessSource interface {
	// Changed holds a token whenever Take may return a change.
	Changed() <-chan struct{}
	// Take returns the changes since the last Take. It does not block.
	Take() readiness.Update
}

// directorySource is a directory of readiness files. Each scan renews the lease.
type directorySource struct {
	reader   *readinessfile.Reader
	config   *latest.Value[trench.Loaded]
	instance string // identifies this start
	changed  chan struct{}

	mu      sync.Mutex
	pending readiness.Update

	// Owned by Run.
	published []readiness.VIPReadiness
	revision  uint64 // of the last published listing
	from      *trench.Config
}

func newDirectorySource(r *readinessfile.Reader, config *latest.Value[trench.Loaded],
	instance string,
) *directorySource {
	configureDirectory(r, config.Load().Config)
	return &directorySource{reader: r, config: config, instance: instance, changed: make(chan struct{}, 1)}
}

func (s *directorySource) String() string           { return "directory-source" }
func (s *directorySource) Changed() <-chan struct{} { return s.changed }

func (s *directorySource) Take() readiness.Update {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pending.Take()
}

// Run publishes listings until ctx ends.
func (s *directorySource) Run(ctx context.Context) error {
	loaded, loadedChanged := s.config.Get()
	for {
		listing, listingChanged := s.reader.Value().Get()
		// An unread directory must not be mistaken for an empty one.
		if listing.Scanned {
			s.publish(time.Now(), listing, loaded.Config)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-listingChanged:
		case <-loadedChanged:
			loaded, loadedChanged = s.config.Get()
			configureDirectory(s.reader, loaded.Config)
		}
	}
}

// configureDirectory sets the VIPs and streams for which readiness files count.
func configureDirectory(d *readinessfile.Reader, c *trench.Config) {
	var streams []string
	for _, st := range c.Streams {
		streams = append(streams, st.Name)
	}
	d.Configure(streams, c.Attractor.VIPs)
}

// publish adds a changed listing to the pending update. An unchanged listing only renews the
// lease.
func (s *directorySource) publish(now time.Time, l readinessfile.Listing, c *trench.Config) {
	changed := s.from == nil || l.Revision != s.revision || c != s.from
	if changed {
		s.published = s.evaluate(now, l, c)
		s.revision, s.from = l.Revision, c
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
	p.Err = directoryProblem(l)
	latest.Wake(s.changed)
}

// evaluate returns the readiness of all VIPs. An unchanged state keeps its time.
func (s *directorySource) evaluate(now time.Time, l readinessfile.Listing,
	c *trench.Config,
) []readiness.VIPReadiness {
	streams := map[vip.VIP][]string{}
	for _, st := range c.Streams {
		for _, v := range st.VIPs {
			streams[v] = append(streams[v], st.Name)
		}
	}
	published := make(map[vip.VIP]readiness.VIPReadiness, len(s.published))
	for _, r := range s.published {
		published[r.VIP] = r
	}
	all := make([]readiness.VIPReadiness, 0, len(c.Attractor.VIPs))
	for _, v := range c.Attractor.VIPs {
		ready, detail := l.Ready(v, streams[v])
		is := readiness.VIPReadiness{
			VIP: v, Detail: detail, Reason: readinessv1.VipReason_VIP_REASON_NO_READINESS_FILE, Since: now,
		}
		if ready {
			is.State, is.Reason = vip.Ready, readinessv1.VipReason_VIP_REASON_READINESS_FILE
			if !l.DrainEnd.IsZero() {
				is.State, is.DrainEnd = vip.Draining, l.DrainEnd
			}
		}
		// Since is the start of the state, which a new detail does not change.
		if was, known := published[v]; known && was.State == is.State {
			is.Since = was.Since
		}
		all = append(all, is)
	}
	return all
}

// directoryProblem returns the problem of the directory or of its files.
func directoryProblem(l readinessfile.Listing) error {
	if l.Gone {
		return l.Err
	}
	if len(l.Problems) > 0 {
		return errors.New("ignored readiness files: " + strings.Join(l.Problems, "; "))
	}
	return nil
}

// streamProblem returns why the readiness source supplies no valid readiness, or "".
func (p *process) streamProblem(lb lbState) string {
	lastMessage := p.observer.lease.Load().LastMessage
	if p.directory == nil {
		return lbProblem(lb, lastMessage)
	}
	l := p.directory.reader.Value().Load()
	switch {
	case lb.Freshness == gate.Live && (!l.Gone || l.Everything):
		return ""
	case l.Gone:
		return l.Err.Error()
	case lastMessage.IsZero():
		return "readiness directory " + p.Directory.Path + " not read yet"
	}
	return fmt.Sprintf("readiness directory %s was last read %v ago: "+
		"its file system hangs, or the node is starved of CPU",
		p.Directory.Path, time.Since(lastMessage).Round(time.Second))
}
