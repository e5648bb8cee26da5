package dashboard

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/pods"
)

const (
	// interval is the time between two questions to a pod without events, which are asked earlier.
	interval = 2 * time.Second
	// staleAfter is the age at which an answer is old.
	staleAfter = 3 * interval
	// goneFor is the time for which a pod that left the trench stays listed.
	goneFor = time.Minute
	// maxEvents is the number of kept events.
	maxEvents = 300
)

// Dashboard asks the pods of a trench and serves what they answer.
type Dashboard struct {
	source  pods.Source
	path    string // secret part of the URL
	state   latest.Value[state]
	readers atomic.Int32  // open pages
	wake    chan struct{} // asks the pods now
}

// state is the state of the trench. It is not changed once it is published.
type state struct {
	err    error // of the search for pods
	pods   []pod
	events []event
}

type pod struct {
	name     string
	problems []string // of the last question
	gone     time.Time
	frontend answer[*frontendv1.Status]
	lb       answer[*lbv1.Status]
}

// answer is the last answer of a program.
type answer[S any] struct {
	status S
	at     time.Time // zero without an answer
	failed bool      // a later question has no answer
}

// collector is the state that only the goroutine of [Dashboard.collect] uses.
type collector struct {
	*Dashboard
	group     sync.WaitGroup
	found     chan members
	answered  chan pods.Pod
	searching bool
	asking    map[string]bool
	pods      map[string]pod
	err       error // of the last search
}

type members struct {
	list []pods.Member
	err  error
}

// collect asks the pods until ctx ends.
func (d *Dashboard) collect(ctx context.Context) {
	c := &collector{
		Dashboard: d, found: make(chan members), answered: make(chan pods.Pod), asking: map[string]bool{},
		pods: map[string]pod{},
	}
	defer c.group.Wait()
	events := make(chan []pods.Event)
	c.group.Go(func() { d.follow(ctx, events) })
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			c.search(ctx)
		case <-d.wake:
			c.search(ctx)
		case batch := <-events:
			d.state.Update(func(s state) state {
				s.events = merge(s.events, batch, time.Now())
				return s
			})
			c.search(ctx)
		case found := <-c.found:
			c.searching = false
			c.err = found.err
			c.ask(ctx, found)
			c.publish()
		case answered := <-c.answered:
			delete(c.asking, answered.Name)
			c.take(answered, time.Now())
			c.publish()
		}
	}
}

// follow reads the events of all pods. It fails only before the first event.
func (d *Dashboard) follow(ctx context.Context, events chan<- []pods.Event) {
	for ctx.Err() == nil {
		_ = pods.Follow(ctx, d.source, func(batch []pods.Event) error { // the search reports the error
			select {
			case events <- slices.Clone(batch):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		select {
		case <-ctx.Done():
		case <-time.After(interval):
		}
	}
}

// search lists the pods in the background while a page is open.
func (c *collector) search(ctx context.Context) {
	if c.searching || c.readers.Load() == 0 {
		return
	}
	c.searching = true
	c.group.Go(func() {
		list, err := c.source.Members(ctx)
		send(ctx, c.found, members{list, err})
	})
}

// ask asks each pod that has answered the question before.
func (c *collector) ask(ctx context.Context, found members) {
	if found.err != nil {
		return
	}
	now := time.Now()
	for name, p := range c.pods {
		isMember := slices.ContainsFunc(found.list, func(m pods.Member) bool { return m.Name == name })
		switch {
		case isMember:
			p.gone = time.Time{}
		case p.gone.IsZero():
			p.gone = now
		}
		c.pods[name] = p
		if !isMember && now.Sub(p.gone) > goneFor {
			delete(c.pods, name)
		}
	}
	for _, member := range found.list {
		if _, known := c.pods[member.Name]; !known {
			c.pods[member.Name] = pod{name: member.Name}
		}
		if c.asking[member.Name] {
			continue
		}
		c.asking[member.Name] = true
		c.group.Go(func() {
			list, err := pods.List(ctx, one{c.source, member})
			if err == nil { // otherwise ctx ended
				send(ctx, c.answered, list[0])
			}
		})
	}
}

// one is a source of one pod, whose delay is not that of other pods.
type one struct {
	pods.Source
	member pods.Member
}

func (o one) Members(context.Context) ([]pods.Member, error) { return []pods.Member{o.member}, nil }

// take keeps the answers of a pod.
func (c *collector) take(answered pods.Pod, now time.Time) {
	p := c.pods[answered.Name]
	p.name, p.problems = answered.Name, answered.Problems
	if p.frontend.failed = answered.Frontend == nil; !p.frontend.failed {
		p.frontend.status, p.frontend.at = answered.Frontend, now
	}
	if p.lb.failed = answered.LB == nil; !p.lb.failed {
		p.lb.status, p.lb.at = answered.LB, now
	}
	c.pods[answered.Name] = p
}

func (c *collector) publish() {
	list := slices.SortedFunc(maps.Values(c.pods), func(a, b pod) int { return strings.Compare(a.name, b.name) })
	c.state.Update(func(s state) state {
		s.pods, s.err = list, c.err
		return s
	})
}

func send[T any](ctx context.Context, to chan<- T, value T) {
	select {
	case to <- value:
	case <-ctx.Done():
	}
}
