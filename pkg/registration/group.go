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

const (
	// lookupInterval is the default of [GroupOptions].Interval.
	lookupInterval = 5 * time.Second
	// goneAnswers is the number of answers without the address of a load balancer at which the target
	// is registered until it is deregistered there: DNS has no proof, and mTLS guards only the load
	// balancers of a forged answer, not the ones that it leaves out.
	goneAnswers = 3
)

// GroupOptions configure a group.
type GroupOptions struct {
	// Registries, not empty, lists addresses of load balancers, and names that resolve to several.
	Registries []Address
	// Request announces one target.
	Request *targetv1.RegisterRequest
	// Source supplies the client's SVID. The caller runs it.
	Source *identity.Source
	// LB is the SPIFFE ID of the load balancers.
	LB spiffeid.ID
	// Report is called with a line for each change of a load balancer or a name, maybe concurrently.
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

type member struct {
	Registration
	from   Address // entry of Registries
	leave  chan struct{}
	cancel context.CancelFunc
	done   chan struct{}
	err    error // valid once done is closed

	// Owned by Run of the group.
	missing int  // successive answers without the address
	leaving bool // the address disappeared from the lookup
	over    bool // Run ended
}

// NewGroup returns a group.
func NewGroup(options GroupOptions) *Group {
	if options.Resolver == nil {
		options.Resolver = net.DefaultResolver
	}
	options.Interval = cmp.Or(options.Interval, lookupInterval)
	return &Group{
		GroupOptions: options, answers: make(chan answer), ended: make(chan struct{}, 1),
		members: map[string]*member{}, names: map[string]answer{},
	}
}

// Run keeps the target registered until leave is closed. It then deregisters the target at every
// load balancer and returns after the last removal. It returns when ctx ends. It is called once.
//
// The error lists the load balancers at which the target was not removed. Run also returns an error
// if another caller has registered the target at every load balancer.
func (group *Group) Run(ctx context.Context, leave <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	defer group.running.Wait()
	defer cancel()
	// The lookups end before the members leave, so that none is added in the meantime.
	following, unfollow := context.WithCancel(ctx)
	defer unfollow()
	for _, address := range group.Registries {
		if !address.fixed() {
			host := &name{Address: address, resolver: group.Resolver}
			group.running.Go(func() { host.follow(following, group.Interval, group.answers) })
		} else if err := group.take(ctx, answer{from: address, addresses: []Address{address}}); err != nil {
			return err
		}
	}
	for {
		select {
		case address := <-group.answers:
			if err := group.take(ctx, address); err != nil {
				return err
			}
		case <-group.ended:
			if over, err := group.collect(); over {
				return err
			}
		case <-leave:
			unfollow()
			return group.leave()
		case <-ctx.Done():
			return nil
		}
	}
}

// take registers the target at the new addresses of an answer, and deregisters it at addresses that
// no answer has any longer, at a load balancer that keeps the target after goneAnswers.
func (group *Group) take(ctx context.Context, answer answer) error {
	key := answer.from.String()
	group.mu.Lock()
	previous := group.names[key]
	// A failed lookup does not prove that a load balancer is gone: keep its registrations.
	if answer.err != nil {
		answer.addresses = previous.addresses
	}
	group.names[key] = answer
	group.mu.Unlock()
	group.changed()
	if answer.err != nil {
		// A name is looked up each Interval: report a repeated failure once.
		if previous.err == nil || previous.err.Error() != answer.err.Error() {
			group.Report(key, answer.err.Error()+"; registrations are kept")
		}
		return nil
	}
	// Only the goroutine of Run writes names and members, so it reads them without mu.
	wanted := map[string]bool{}
	for _, known := range group.names {
		for _, address := range known.addresses {
			wanted[address.String()] = true
		}
	}
	for address, member := range group.members {
		switch {
		case wanted[address]:
			member.missing = 0
		case member.leaving:
		case member.over:
			group.forget(address)
		case member.from != answer.from: // says nothing about the address
		default:
			if member.missing++; member.missing < goneAnswers && member.State().Phase == Registered {
				continue
			}
			group.Report(address, "no longer an address of "+member.from.String())
			member.leaving = true
			close(member.leave)
		}
	}
	for _, address := range answer.addresses {
		member := group.members[address.String()]
		// The address reappeared during the drain. Stop the old registration before the new one starts,
		// so that the two do not compete.
		if member != nil && member.leaving {
			member.cancel()
			<-member.done
			member = nil
		}
		if member == nil {
			if err := group.start(ctx, address, answer.from); err != nil {
				return err
			}
		}
	}
	return nil
}

func (group *Group) start(ctx context.Context, address, from Address) error {
	conn, err := Dial(address, group.Source, group.LB)
	if err != nil {
		return err
	}
	conn.name = "the load balancer"
	key := address.String()
	ctx, cancel := context.WithCancel(ctx)
	started := &member{
		Registration: Registration{
			Conn: conn, Request: group.Request, Persistent: true, Changed: group.changed,
			Report: func(line string) { group.Report(key, line) },
		},
		from: from, leave: make(chan struct{}), cancel: cancel, done: make(chan struct{}),
	}
	group.mu.Lock()
	group.members[key] = started
	group.mu.Unlock()
	group.running.Go(func() {
		started.err = started.Run(ctx, started.leave)
		if started.err != nil {
			started.Report(started.err.Error())
		}
		cancel()
		_ = conn.Close() // fails only if the connection is closed already
		close(started.done)
		latest.Wake(group.ended)
	})
	return nil
}

// collect handles members that ended. over reports whether every name has been resolved and all
// members have ended; err joins their errors.
func (group *Group) collect() (over bool, err error) {
	var errs []error
	// A name without an address yet may still gain a load balancer.
	over = !slices.ContainsFunc(group.Registries, func(entry Address) bool {
		return len(group.names[entry.String()].addresses) == 0
	})
	for address, member := range group.members {
		select {
		case <-member.done:
			if member.over = true; member.leaving {
				group.forget(address)
			} else if member.err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", address, member.err))
			}
		default:
			over = false
		}
	}
	return over, errors.Join(errs...)
}

func (group *Group) forget(address string) {
	group.mu.Lock()
	delete(group.members, address)
	group.mu.Unlock()
	group.changed()
}

// leave deregisters the target at all load balancers and waits for its removal.
func (group *Group) leave() error {
	for _, member := range group.members {
		if !member.leaving {
			close(member.leave)
		}
	}
	// Wait only after all were closed, so that the drain times overlap.
	var errs []error
	for address, member := range group.members {
		<-member.done
		_, rejected := errors.AsType[*RejectedError](member.err) // another caller has taken over the target
		if member.err != nil && !member.leaving && !rejected {
			errs = append(errs, fmt.Errorf("%s: %w", address, member.err))
		}
	}
	return errors.Join(errs...)
}

func (group *Group) changed() {
	group.Changes.Update(func(changes uint64) uint64 { return changes + 1 })
}
