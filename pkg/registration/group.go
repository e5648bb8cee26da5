package registration

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/latest"
)

// lookupInterval is the default of [GroupOptions].Interval.
const lookupInterval = 5 * time.Second

// GroupOptions configure a group.
type GroupOptions struct {
	// Registries lists addresses of load balancers, and names that resolve to several. It must not be
	// empty.
	Registries []Address
	// Request announces one target.
	Request *targetv1.RegisterRequest
	// Source supplies the client's SVID. The caller runs it.
	Source *identity.Source
	// LB is the SPIFFE ID of the load balancers.
	LB spiffeid.ID
	// Report is called with a line of text for each change of a load balancer or a name. Calls may be
	// concurrent.
	Report func(registry, line string)
	// Resolver looks up names. Default: net.DefaultResolver.
	Resolver Resolver
	// Interval is the time between two lookups of a name. Default: 5 s.
	Interval time.Duration
}

// Group keeps one target registered at every load balancer of a list.
type Group struct {
	GroupOptions
	// Changes is replaced whenever Status may have changed.
	Changes latest.Value[uint64]

	running sync.WaitGroup
	answers chan answer
	ended   chan struct{} // holds a token: a member ended

	mu      sync.Mutex
	members map[string]*member // by address
	names   map[string]answer  // by registry; a failed lookup keeps the addresses
}

// member is the registration at one load balancer.
type member struct {
	Registration
	from   Address // entry of Registries
	leave  chan struct{}
	cancel context.CancelFunc
	done   chan struct{}
	err    error // valid once done is closed

	// Owned by Run of the group.
	leaving bool // the address disappeared from the lookup
	over    bool // Run ended
}

// NewGroup returns a group.
func NewGroup(o GroupOptions) *Group {
	if o.Resolver == nil {
		o.Resolver = net.DefaultResolver
	}
	o.Interval = cmp.Or(o.Interval, lookupInterval)
	return &Group{
		GroupOptions: o, answers: make(chan answer), ended: make(chan struct{}, 1),
		members: map[string]*member{}, names: map[string]answer{},
	}
}

// Run keeps the target registered until leave is closed. It then deregisters the target at every
// load balancer and returns after the last removal. It returns immediately when ctx ends. It is
// called once.
//
// The error lists the load balancers at which the target was not removed. Run also returns an error
// if another caller has registered the target at every load balancer.
func (g *Group) Run(ctx context.Context, leave <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	defer g.running.Wait()
	defer cancel()
	following, unfollow := context.WithCancel(ctx)
	defer unfollow()
	for _, a := range g.Registries {
		if !a.fixed() {
			n := &name{Address: a, resolver: g.Resolver}
			g.running.Go(func() { n.follow(following, g.Interval, g.answers) })
		} else if err := g.take(ctx, answer{from: a, addresses: []Address{a}}); err != nil {
			return err
		}
	}
	for {
		select {
		case a := <-g.answers:
			if err := g.take(ctx, a); err != nil {
				return err
			}
		case <-g.ended:
			if over, err := g.collect(); over {
				return err
			}
		case <-leave:
			unfollow()
			return g.leave()
		case <-ctx.Done():
			return nil
		}
	}
}

// take registers the target at the new addresses of an answer, and deregisters it at addresses that
// no answer has any longer.
func (g *Group) take(ctx context.Context, a answer) error {
	key := a.from.String()
	g.mu.Lock()
	previous := g.names[key]
	if a.err != nil {
		a.addresses = previous.addresses
	}
	g.names[key] = a
	g.mu.Unlock()
	g.changed()
	if a.err != nil {
		if previous.err == nil || previous.err.Error() != a.err.Error() {
			g.Report(key, a.err.Error()+"; registrations are kept")
		}
		return nil
	}
	// Only the goroutine of Run writes names and members, so it reads them without mu.
	wanted := map[string]bool{}
	for _, n := range g.names {
		for _, address := range n.addresses {
			wanted[address.String()] = true
		}
	}
	for address, m := range g.members {
		switch {
		case wanted[address] || m.leaving:
		case m.over:
			g.forget(address)
		default:
			g.Report(address, "no longer an address of "+m.from.String())
			m.leaving = true
			close(m.leave)
		}
	}
	for _, address := range a.addresses {
		m := g.members[address.String()]
		// The address reappeared during the drain. Stop the old registration before the new one starts,
		// so that the two do not compete.
		if m != nil && m.leaving {
			m.cancel()
			<-m.done
			m = nil
		}
		if m == nil {
			if err := g.start(ctx, address, a.from); err != nil {
				return err
			}
		}
	}
	return nil
}

// start registers the target at an address.
func (g *Group) start(ctx context.Context, address, from Address) error {
	conn, err := Dial(address, g.Source, g.LB)
	if err != nil {
		return err
	}
	conn.name = "the load balancer"
	key := address.String()
	ctx, cancel := context.WithCancel(ctx)
	m := &member{
		Registration: Registration{
			Conn: conn, Request: g.Request, Persistent: true, Changed: g.changed,
			Report: func(line string) { g.Report(key, line) },
		},
		from: from, leave: make(chan struct{}), cancel: cancel, done: make(chan struct{}),
	}
	g.mu.Lock()
	g.members[key] = m
	g.mu.Unlock()
	g.running.Go(func() {
		m.err = m.Run(ctx, m.leave)
		if m.err != nil {
			m.Report(m.err.Error())
		}
		cancel()
		_ = conn.Close() // fails only if the connection is closed already
		close(m.done)
		latest.Wake(g.ended)
	})
	return nil
}

// collect handles members that ended. over reports whether every name has been resolved and all
// members have ended; err joins their errors.
func (g *Group) collect() (over bool, err error) {
	var errs []error
	over = !slices.ContainsFunc(g.Registries, func(a Address) bool { return len(g.names[a.String()].addresses) == 0 })
	for address, m := range g.members {
		select {
		case <-m.done:
			if m.over = true; m.leaving {
				g.forget(address)
			} else if m.err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", address, m.err))
			}
		default:
			over = false
		}
	}
	return over, errors.Join(errs...)
}

// forget removes a member that ended.
func (g *Group) forget(address string) {
	g.mu.Lock()
	delete(g.members, address)
	g.mu.Unlock()
	g.changed()
}

// leave deregisters the target at all load balancers and waits for its removal.
func (g *Group) leave() error {
	for _, m := range g.members {
		if !m.leaving {
			close(m.leave)
		}
	}
	var errs []error
	for address, m := range g.members {
		<-m.done
		var rejected *RejectedError // another caller has taken over the target
		if m.err != nil && !m.leaving && !errors.As(m.err, &rejected) {
			errs = append(errs, fmt.Errorf("%s: %w", address, m.err))
		}
	}
	return errors.Join(errs...)
}

func (g *Group) changed() { g.Changes.Update(func(n uint64) uint64 { return n + 1 }) }
