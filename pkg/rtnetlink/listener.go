package rtnetlink

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Listener receives netlink notifications, with one goroutine per socket.
type Listener struct {
	failed context.Context
	fail   context.CancelCauseFunc // the first failure counts

	conns []*netlink.Conn
	done  sync.WaitGroup
}

// NewListener returns a Listener without subscriptions.
func NewListener() *Listener {
	failed, fail := context.WithCancelCause(context.Background())
	return &Listener{failed: failed, fail: fail}
}

// Subscription selects the multicast groups of one socket and their handlers.
type Subscription struct {
	Protocol int // such as unix.NETLINK_ROUTE
	Groups   []uint32
	Buffer   int // for notifications; 0: the system's default
	// Prepare, unless nil, is called before the socket joins the groups.
	Prepare func(*netlink.Conn) error
	Handle  func(netlink.Message)
	// Overrun is called after the kernel dropped notifications. Any object may have changed.
	Overrun func()
}

// Listen subscribes in the network namespace of the calling thread. Errors include name.
func (l *Listener) Listen(name string, s Subscription) error {
	c, err := netlink.Dial(s.Protocol, nil)
	if err != nil {
		return fmt.Errorf("failed to subscribe to %s: %w", name, err)
	}
	l.conns = append(l.conns, c)
	if s.Buffer != 0 {
		// A buffer above the sysctl limit requires CAP_NET_ADMIN; overruns are more likely without it.
		_ = c.SetReadBuffer(s.Buffer)
	}
	if s.Prepare != nil {
		if err := s.Prepare(c); err != nil {
			return fmt.Errorf("failed to subscribe to %s: %w", name, err)
		}
	}
	for _, g := range s.Groups {
		if err := c.JoinGroup(g); err != nil {
			return fmt.Errorf("failed to subscribe to %s: group %d: %w", name, g, err)
		}
	}
	l.done.Go(func() {
		for {
			msgs, err := c.Receive()
			switch {
			case errors.Is(err, unix.ENOBUFS):
				// The receive buffer overflowed. The socket remains usable.
				s.Overrun()
				continue
			case err != nil:
				l.fail(fmt.Errorf("failed to receive %s notifications: %w", name, err))
				return
			}
			for _, m := range msgs {
				s.Handle(m)
			}
		}
	})
	return nil
}

// Failed returns a channel that is closed when a subscription fails, and by Close.
func (l *Listener) Failed() <-chan struct{} { return l.failed.Done() }

// Err returns the first failure once Failed is closed.
func (l *Listener) Err() error { return context.Cause(l.failed) }

// Close closes the sockets and waits for their goroutines.
func (l *Listener) Close() error {
	var errs []error
	for _, c := range l.conns {
		errs = append(errs, c.Close())
	}
	l.done.Wait()
	return errors.Join(errs...)
}
