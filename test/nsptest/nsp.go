package nsptest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/stall"
)

// DefaultEntryTimeout is the NSP's default (NSP_ENTRY_TIMEOUT).
const DefaultEntryTimeout = 60 * time.Second

// Options configure an NSP.
type Options struct {
	// Credentials are the transport credentials of the server, for example [ServerCredentials].
	Credentials credentials.TransportCredentials
	// Listen opens a TCP listener; nil is [lab.Listen]. A test passes one that listens in another
	// network namespace.
	Listen func(network, address string) (net.Listener, error)
	// Address is where to listen; "" is an unused port of 127.0.0.1, the same after a restart.
	Address string
	// EntryTimeout is how long a target remains registered; 0 is DefaultEntryTimeout.
	EntryTimeout time.Duration
}

// NSP is the NSP of a trench. Attractors and targets survive a restart, as they do in the NSP's
// ConfigMap and database. It is safe for concurrent use.
type NSP struct {
	o          Options
	attractors *attractors
	targets    *targets
	behavior   latest.Value[behavior]
	requests   latest.Value[[]Request]

	mu     sync.Mutex
	server *running // nil while it is stopped
}

// behavior configures the answers to requests.
type behavior struct {
	delay   time.Duration
	hang    bool
	once    bool            // watches of attractors end after their first list
	release <-chan struct{} // holds each Register, unless nil
}

// running is one run of the server.
type running struct {
	server   *grpc.Server
	listener *stall.Listener
	served   chan error
	quit     context.CancelFunc
	notifier sync.WaitGroup
}

// New returns an NSP without attractors and targets. It is not started.
func New(o Options) *NSP {
	if o.Listen == nil {
		o.Listen = lab.Listen
	}
	if o.Address == "" {
		o.Address = "127.0.0.1:0"
	}
	if o.EntryTimeout == 0 {
		o.EntryTimeout = DefaultEntryTimeout
	}
	return &NSP{o: o, attractors: newAttractors(), targets: newTargets(o.EntryTimeout)}
}

// Start serves until Stop. After Stop it listens at the same address.
func (n *NSP) Start() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.server != nil {
		return errors.New("the NSP is already started")
	}
	l, err := n.o.Listen("tcp", n.o.Address)
	if err != nil {
		return fmt.Errorf("listen for the NSP: %w", err)
	}
	n.o.Address = l.Addr().String()
	// The NSP sets no keepalive policy: gRPC's default answers a client that pings an idle
	// connection more often than every 5 minutes with GOAWAY.
	r := &running{
		server: grpc.NewServer(grpc.Creds(n.o.Credentials)), listener: stall.Listen(l), served: make(chan error, 1),
	}
	nspv1.RegisterConfigurationManagerServer(r.server, &configurationManager{NSP: n})
	nspv1.RegisterTargetRegistryServer(r.server, &targetRegistry{NSP: n})
	ctx, cancel := context.WithCancel(context.Background())
	r.quit = cancel
	n.attractors.open(ctx)
	r.notifier.Go(func() { n.attractors.distribute(ctx) })
	n.targets.restore()
	go func() { r.served <- r.server.Serve(r.listener) }()
	n.server = r
	return nil
}

// Stop ends all streams and connections and closes the port. It does nothing when the NSP is not
// started.
func (n *NSP) Stop() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := n.server
	if r == nil {
		return nil
	}
	n.server = nil
	r.quit()
	r.server.Stop()
	r.notifier.Wait()
	n.targets.stop()
	if err := <-r.served; err != nil && !errors.Is(err, grpc.ErrServerStopped) { // stopped before Serve
		return fmt.Errorf("serve the NSP: %w", err)
	}
	return nil
}

// Addr returns the address at which the NSP listens, or listened before Stop.
func (n *NSP) Addr() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.o.Address
}

// Freeze stalls the NSP as SIGSTOP does, or continues it: connections stay open, the kernel
// accepts new ones, and the NSP does not answer. A restart ends it.
func (n *NSP) Freeze(frozen bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.server != nil {
		n.server.listener.Set(frozen)
	}
}

// Hang leaves each request that comes from now on without an answer, until Hang(false). Streams
// that are open continue.
func (n *NSP) Hang(hang bool) {
	n.behavior.Update(func(b behavior) behavior {
		b.hang = hang
		return b
	})
}

// EndWatches ends each watch of attractors after its first list, until EndWatches(false).
func (n *NSP) EndWatches(end bool) {
	n.behavior.Update(func(b behavior) behavior {
		b.once = end
		return b
	})
}

// Delay delays each answer, the first of a stream too.
func (n *NSP) Delay(d time.Duration) {
	n.behavior.Update(func(b behavior) behavior {
		b.delay = d
		return b
	})
}

// HoldRegister holds each Register until release is closed, and applies it even if its client
// canceled it.
func (n *NSP) HoldRegister(release <-chan struct{}) {
	n.behavior.Update(func(b behavior) behavior {
		b.release = release
		return b
	})
}

// behave records a request and returns when it may be answered, or with the error of ctx.
func (n *NSP) behave(ctx context.Context, r Request) error {
	r.At = time.Now()
	n.requests.Update(func(all []Request) []Request { return append(all, r) })
	for {
		b, changed := n.behavior.Get()
		if b.release != nil && r.Method == "Register" {
			<-b.release
			return nil
		}
		var due <-chan time.Time
		if !b.hang {
			if b.delay == 0 {
				return nil
			}
			due = time.After(b.delay)
		}
		select {
		case <-due:
			return nil
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Request is a request that the NSP received.
type Request struct {
	At     time.Time
	Method string        // such as Register
	Target *nspv1.Target // of the TargetRegistry
	// Attractor is the filter of WatchAttractor.
	Attractor *nspv1.Attractor
}

// Requests returns the requests of a method since the creation of the NSP, also those that it did
// not answer.
func (n *NSP) Requests(method string) (found []Request) {
	for _, r := range n.requests.Load() {
		if r.Method == method {
			found = append(found, r)
		}
	}
	return found
}
