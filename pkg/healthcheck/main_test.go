package healthcheck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var _ task.Task = (*Checker)(nil)

// network opens connections, which it decides by address.
type network struct {
	mu      sync.Mutex
	refused map[string]error // by address, without or with the port
	hung    map[string]chan struct{}
	dials   []dial
	open    int
	maxOpen int
	// latency is how long a connection takes.
	latency time.Duration
}

type dial struct {
	at      time.Time
	address string
}

func newNetwork() *network {
	return &network{refused: make(map[string]error), hung: make(map[string]chan struct{})}
}

var errRefused = errors.New("refused")

func (n *network) DialContext(ctx context.Context, _, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	n.dials = append(n.dials, dial{time.Now(), address})
	n.open++
	n.maxOpen = max(n.maxOpen, n.open)
	hung, latency := n.hung[host], n.latency
	if hung == nil {
		hung = n.hung[address]
	}
	n.mu.Unlock()
	defer func() { n.mu.Lock(); n.open--; n.mu.Unlock() }()
	if hung != nil {
		<-hung // a checker that hangs does not look at its context either
		return nil, errRefused
	}
	if latency > 0 {
		select {
		case <-time.After(latency):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	n.mu.Lock()
	err = cmp.Or(n.refused[host], n.refused[address])
	n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	near, far := net.Pipe()
	_ = far.Close()
	return near, nil
}

func (n *network) refuse(host string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.refused[host] = err
}

func (n *network) dialed() []dial {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]dial(nil), n.dials...)
}

// hang makes checks of host hang until the returned function is called.
func (n *network) hang(host string) (release func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := make(chan struct{})
	n.hung[host] = c
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.hung[host] == c {
			delete(n.hung, host)
		}
		close(c)
	}
}

var discard = slog.New(slog.DiscardHandler)

// start runs a new checker until the returned function is called.
func start(t *testing.T, o Options) (*Checker, func()) {
	t.Helper()
	if o.Log == nil {
		o.Log = discard
	}
	c := New(o)
	return c, run(t, c)
}

// run runs a checker until the returned function is called.
func run(t *testing.T, c *Checker) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- task.Guard(ctx, c.String(), c.Run) }()
	<-c.Ready()
	return func() {
		cancel()
		harness.Check(t, <-done)
	}
}

// rerun runs a checker that was stopped.
func rerun(t *testing.T, c *Checker) (stop func()) {
	t.Helper()
	c.ready = make(chan struct{})
	return run(t, c)
}

var testCheck = trench.Check{
	SingleCheck: trench.SingleCheck{
		TCP: trench.TCPCheck{Port: 5000}, Interval: time.Second, Timeout: 500 * time.Millisecond, Rise: 2, Fall: 3,
	},
}

// Configure replaces all streams.
func (c *Checker) Configure(streams []trench.Stream) {
	c.mu.Lock()
	removed := maps.Clone(c.streams)
	c.mu.Unlock()
	for _, s := range streams {
		delete(removed, s.Name)
	}
	c.Update(streams, slices.Collect(maps.Keys(removed)))
}

// stream makes a stream of n targets with the addresses 10.0.0.1 and on.
func stream(n int, check trench.Check) trench.Stream {
	s := trench.Stream{Name: "stream-a", MinReady: 1, Check: check}
	a := netip.MustParseAddr("10.0.0.0")
	for i := range n {
		a = a.Next()
		s.Targets = append(s.Targets, trench.Target{Name: fmt.Sprintf("target-%d", i+1), IPs: []netip.Addr{a}})
	}
	return s
}

// states returns the state of each target by its name.
func states(list []Health) map[string]State {
	m := make(map[string]State)
	for _, h := range list {
		m[h.Name] = h.State
	}
	return m
}

// inBubble runs the test on a fake clock.
func inBubble(t *testing.T, f func(*testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// withChecker is inBubble with a running checker of a network.
func withChecker(t *testing.T, f func(*testing.T, *network, *Checker)) {
	t.Helper()
	inBubble(t, func(t *testing.T) {
		n := newNetwork()
		c, stop := start(t, Options{dial: n.DialContext})
		defer stop()
		f(t, n, c)
	})
}

// advance lets the fake clock run on and everything settle.
func advance(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// drain takes the wake-up of Changed and reports whether there was one.
func drain(c *Checker) bool {
	select {
	case <-c.Changed():
		return true
	default:
		return false
	}
}
