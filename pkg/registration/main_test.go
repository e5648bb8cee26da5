package registration

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/registrytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// errServer is the error of a failing DNS server, errNone the error for a name without an address.
var (
	errServer = &net.DNSError{Err: "server misbehaving", IsTemporary: true}
	errNone   = &net.DNSError{Err: "no such host", IsNotFound: true}
)

// dns answers lookups by family. A family without an answer has no address.
type dns struct {
	mu      sync.Mutex
	answers map[string][]netip.Addr
	err     error
	asked   map[string]int
	forged  int // how many lookups get 127.0.0.9
}

func (d *dns) LookupNetIP(_ context.Context, network, _ string) ([]netip.Addr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.asked == nil {
		d.asked = map[string]int{}
	}
	d.asked[network]++
	switch {
	case d.err != nil:
		return nil, d.err
	case d.forged > 0:
		d.forged--
		return []netip.Addr{netip.MustParseAddr("127.0.0.9")}, nil
	case len(d.answers[network]) == 0:
		return nil, errNone
	}
	return slices.Clone(d.answers[network]), nil
}

// set sets the answer of a family, and an error for both.
func (d *dns) set(network string, err error, ips ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.answers, d.err = map[string][]netip.Addr{}, err
	for _, ip := range ips {
		d.answers[network] = append(d.answers[network], netip.MustParseAddr(ip))
	}
}

// waitForLookups waits until lookups that began after the call have ended.
func (d *dns) waitForLookups(t *testing.T, network string) {
	t.Helper()
	count := func() int {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.asked[network]
	}
	before := count()
	// The answer before the last one was taken.
	await.True(t, "lookups", func() bool { return count() >= before+3 })
}

// fixture has load balancers at addresses of the loopback network and one port.
type fixture struct {
	t      *testing.T
	ca     *identitytest.CA
	source *identity.Source
	port   string
	dns    dns
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{t: t, ca: identitytest.NewCA(t, "example.org")}
	f.source = f.ca.Source(f.ca.SVID(f.ca.ID("/app"), time.Hour))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	t.Cleanup(func() { _ = l.Close() }) // it reserves the port
	if _, f.port, err = net.SplitHostPort(l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	return f
}

// lb serves a registry at an address.
func (f *fixture) lb(host string, drainTime time.Duration) (r *registrytest.Registry, stop func()) {
	f.t.Helper()
	r = registrytest.New(f.t, f.ca, drainTime)
	_, stop = r.Serve("tcp", net.JoinHostPort(host, f.port), false)
	return r, stop
}

// running is a running group.
type running struct {
	*Group
	t     *testing.T
	leave chan struct{}
	end   context.CancelFunc
	ended chan error

	mu    sync.Mutex
	lines []string
}

// start runs a group with the registries HOST at the port of the fixture.
func (f *fixture) start(hosts ...string) *running {
	f.t.Helper()
	r := &running{t: f.t, leave: make(chan struct{}), ended: make(chan error, 1)}
	o := GroupOptions{
		Request: &targetv1.RegisterRequest{
			Stream: "s", Targets: []*targetv1.Target{{Name: "a", Addresses: []string{"10.0.0.1"}}},
		},
		Source: f.source, LB: f.ca.ID("/lb"), Resolver: &f.dns, Interval: 10 * time.Millisecond, Report: r.report,
	}
	for _, host := range hosts {
		a, err := ParseAddress(net.JoinHostPort(host, f.port))
		harness.Must(f.t, err)
		o.Registries = append(o.Registries, a)
	}
	r.Group = NewGroup(o)
	ctx, end := context.WithCancel(context.Background())
	r.end = end
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.ended <- r.Run(ctx, r.leave)
	}()
	f.t.Cleanup(func() {
		end()
		<-done
		if f.t.Failed() {
			f.t.Logf("reported\n%s\nstatus %v", r.text(), r.Status())
		}
	})
	return r
}

func (r *running) report(registry, line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, registry+": "+line)
}

func (r *running) text() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.lines, "\n")
}

// want waits for a status: "HOST STATE" of each load balancer.
func (r *running) want(want ...string) {
	r.t.Helper()
	var got []string
	await.True(r.t, fmt.Sprintf("the status %q", want), func() bool {
		got = nil
		for _, s := range r.Status() {
			host, _, _ := net.SplitHostPort(s.GetLb())
			got = append(got, strings.TrimSpace(host+" "+s.GetState()))
		}
		return slices.Equal(got, want)
	})
}

func (r *running) wantReport(part string) {
	r.t.Helper()
	await.True(r.t, fmt.Sprintf("a report %q", part), func() bool { return strings.Contains(r.text(), part) })
}

// wantEnd waits for the end and returns its error.
func (r *running) wantEnd() error {
	r.t.Helper()
	return await.Receive(r.t, "the end of the group", r.ended)
}

// states waits until the target has the given states at a load balancer.
func wantStates(t *testing.T, lb *registrytest.Registry, want ...healthcheck.State) {
	t.Helper()
	await.True(t, fmt.Sprintf("the states %v", want), func() bool { return slices.Equal(lb.States(), want) })
}
