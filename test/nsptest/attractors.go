package nsptest

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/latest"
)

// buffer is the capacity of the NSP's channels, of events and for each watcher. A watcher that
// does not read fills its channel; then the distribution waits for it.
const buffer = 10

// attractors holds the attractors of the NSP and their watchers.
type attractors struct {
	events      chan struct{}
	distributed latest.Value[int] // events that every watcher's channel took

	mu       sync.Mutex
	list     []*nspv1.Attractor
	watchers map[*watcher]bool
	end      context.Context // of the running server
}

// watcher is a WatchAttractor call.
type watcher struct {
	filter *nspv1.Attractor
	lists  chan []*nspv1.Attractor
}

func newAttractors() *attractors {
	return &attractors{events: make(chan struct{}, buffer), watchers: map[*watcher]bool{}, end: context.Background()}
}

func (a *attractors) open(end context.Context) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.end = end
}

// SetAttractors replaces the attractors and sends each watcher its list. An attractor without a
// trench matches no filter.
func (n *NSP) SetAttractors(list ...*nspv1.Attractor) {
	copied := make([]*nspv1.Attractor, 0, len(list))
	for _, a := range list {
		copied = append(copied, proto.CloneOf(a))
	}
	n.attractors.mu.Lock()
	n.attractors.list = copied
	n.attractors.mu.Unlock()
	n.Event()
}

// Event sends each watcher its list, as the NSP does when any resource of the trench changes: most
// lists are the same as before. It waits while the distribution of earlier events is blocked, and
// has no effect on a stopped NSP.
func (n *NSP) Event() {
	n.attractors.mu.Lock()
	end := n.attractors.end
	n.attractors.mu.Unlock()
	select {
	case n.attractors.events <- struct{}{}:
	case <-end.Done():
	}
}

// WaitDistributed waits until the number of events that no watcher blocks any more, since the
// creation of the NSP, is at least count.
func (n *NSP) WaitDistributed(ctx context.Context, count int) error {
	return n.attractors.distributed.Wait(ctx, func(d int) bool { return d >= count })
}

// Distributed returns the number of events that were distributed to every watcher.
func (n *NSP) Distributed() int { return n.attractors.distributed.Load() }

// Watchers returns the number of open WatchAttractor streams.
func (n *NSP) Watchers() int {
	n.attractors.mu.Lock()
	defer n.attractors.mu.Unlock()
	return len(n.attractors.watchers)
}

// distribute sends the lists of each event to the watchers, one after the other, until ctx ends.
func (a *attractors) distribute(ctx context.Context) {
	for {
		select {
		case <-a.events:
		case <-ctx.Done():
			return
		}
		a.mu.Lock()
		watchers := make([]*watcher, 0, len(a.watchers))
		for w := range a.watchers {
			watchers = append(watchers, w)
		}
		a.mu.Unlock()
		for _, w := range watchers {
			a.mu.Lock()
			list := a.matching(w.filter)
			a.mu.Unlock()
			// The NSP waits without limit, even if the watcher has gone in the meantime.
			select {
			case w.lists <- list:
			case <-ctx.Done():
				return
			}
		}
		a.distributed.Update(func(n int) int { return n + 1 })
	}
}

// add registers a watcher, whose first list is the current one.
func (a *attractors) add(w *watcher) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.watchers[w] = true
	w.lists <- a.matching(w.filter) // its first list: the channel is empty
}

func (a *attractors) remove(w *watcher) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.watchers, w)
}

// matching returns the attractors of a filter; the caller holds mu. As in the NSP an empty name
// matches each, and nothing matches without a trench.
func (a *attractors) matching(filter *nspv1.Attractor) []*nspv1.Attractor {
	var found []*nspv1.Attractor
	for _, x := range a.list {
		if x.GetTrench() != nil && filter.GetTrench() != nil && same(x.GetName(), filter.GetName()) &&
			same(x.GetTrench().GetName(), filter.GetTrench().GetName()) {
			found = append(found, x)
		}
	}
	return found
}

func same(a, b string) bool { return a == "" || b == "" || a == b }

type configurationManager struct {
	nspv1.UnimplementedConfigurationManagerServer
	*NSP
}

// WatchAttractor implements nsp.v1.
func (c *configurationManager) WatchAttractor(filter *nspv1.Attractor,
	stream grpc.ServerStreamingServer[nspv1.AttractorResponse],
) error {
	if err := c.behave(stream.Context(), Request{Method: "WatchAttractor", Attractor: filter}); err != nil {
		return err
	}
	w := &watcher{filter: filter, lists: make(chan []*nspv1.Attractor, buffer)}
	c.attractors.add(w)
	defer c.attractors.remove(w)
	for {
		select {
		case list := <-w.lists:
			if err := stream.Send(&nspv1.AttractorResponse{Attractors: list}); err != nil {
				return err
			}
			if c.behavior.Load().once {
				return nil
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}
