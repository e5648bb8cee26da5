package load

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
)

// waitTimeout bounds every wait of these tests.
const waitTimeout = 30 * time.Second

// testServers is a server with a port for requests and one for flows, on both families.
type testServers struct {
	*Server
	requests, flows []netip.AddrPort
}

func newTestServers(t *testing.T, name string) *testServers {
	t.Helper()
	s := &testServers{Server: NewServer(name)}
	t.Cleanup(func() { must(t, s.Abort()) })
	for _, host := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, addr := listen(t, host)
		s.ServeRequests(l)
		s.requests = append(s.requests, addr)
		l, addr = listen(t, host)
		s.ServeFlows(l)
		s.flows = append(s.flows, addr)
	}
	return s
}

// twiceHost is the address for a port that is opened twice: no other socket of the machine uses
// this address, so none takes the port in between.
const twiceHost = "127.0.0.2:0"

func listen(t *testing.T, host string) (net.Listener, netip.AddrPort) {
	t.Helper()
	l, err := net.Listen("tcp", host)
	must(t, err)
	return l, netip.MustParseAddrPort(l.Addr().String())
}

// custom serves flows with a function of the test until the test ends.
func custom(t *testing.T, serve func(net.Conn)) netip.AddrPort {
	t.Helper()
	l, addr := listen(t, "127.0.0.1:0")
	var work sync.WaitGroup
	work.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			work.Go(func() {
				defer conn.Close()
				serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		work.Wait()
	})
	return addr
}

func start(t *testing.T, c Config) (*Generator, context.Context) {
	t.Helper()
	ctx := harness.Context(t, waitTimeout)
	g, err := Start(ctx, c)
	must(t, err)
	t.Cleanup(func() { g.Stop(ctx) })
	return g, ctx
}

var must = harness.Must

func TestNoLoss(t *testing.T) {
	one, two := newTestServers(t, "target-1"), newTestServers(t, "target-2")
	g, ctx := start(t, Config{
		Requests: append(one.requests, two.requests...), Rate: 200,
		FlowsTo: append(one.flows, two.flows...), Flows: 8, Downloads: 4,
	})
	must(t, g.WaitFlows(ctx))
	must(t, g.WaitTargets(ctx, "target-1", "target-2"))
	first, err := g.Take(ctx)
	must(t, err)
	must(t, g.WaitAnswered(ctx, 20))
	_, err = g.Wait(ctx, func(r Result) error {
		for _, f := range r.Flows {
			if f.Exchanges < 2 {
				return fmt.Errorf("no exchange yet: %+v", f)
			}
		}
		return nil
	})
	must(t, err)
	last := g.Stop(ctx)
	for _, r := range []Result{first, last} {
		if r.Lost() != nil || r.Sent == 0 || r.Sent != r.Answered || r.Sent != r.ByTarget["target-1"]+r.ByTarget["target-2"] {
			t.Errorf("sent, answered and by target do not agree:\n%v%v", r, r.ByTarget)
		}
		if got := fmt.Sprint(r.Targets()); got != "map[target-1:4 target-2:4]" {
			t.Errorf("flows are served by %s", got)
		}
		for _, f := range r.Flows {
			if f.Exchanges == 0 || f.LongestGap == 0 {
				t.Errorf("a flow without exchanges: %+v", f)
			}
		}
	}
	if g.Live() != 0 {
		t.Errorf("%d flows outlive the generator", g.Live())
	}
}

func TestRefusedRequests(t *testing.T) {
	s := newTestServers(t, "target-1")
	g, ctx := start(t, Config{Requests: s.requests, Rate: 100})
	must(t, g.WaitAnswered(ctx, 10))
	before, err := g.Take(ctx)
	must(t, err)
	must(t, s.Refuse())
	_, err = g.Wait(ctx, func(r Result) error {
		if r.Failed < 15 {
			return fmt.Errorf("%d failed", r.Failed)
		}
		return nil
	})
	must(t, err)
	after := g.Stop(ctx)
	if before.Failed > 0 || after.Sent != after.Answered+after.Failed {
		t.Errorf("failed before: %d; after: %v", before.Failed, after)
	}
	// The kernel resets connections that it still held when the listener was closed.
	refused := func(f Failure) bool { return f.Stage == "connect" && strings.Contains(f.Err, "refused") }
	if n := len(after.Failures); n != maxFailures || !slices.ContainsFunc(after.Failures, refused) {
		t.Errorf("%d failures: %v", n, after.Failures)
	}
	if after.Lost() == nil {
		t.Error("nothing counts as lost")
	}
}

func TestRequestTimeout(t *testing.T) {
	silent := custom(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	g, ctx := start(t, Config{Requests: []netip.AddrPort{silent}, Rate: 50, Timeout: 100 * time.Millisecond})
	_, err := g.Wait(ctx, func(r Result) error { // a busy machine may need the time to connect
		if !slices.ContainsFunc(r.Failures, func(f Failure) bool { return f.Stage == "answer" }) {
			return fmt.Errorf("none failed for want of an answer: %v", r)
		}
		return nil
	})
	must(t, err)
	r, err := g.Take(ctx)
	must(t, err)
	if r.Answered > 0 || r.Failed != r.Sent {
		t.Errorf("%v", r)
	}
}

func TestBrokenFlowTarget(t *testing.T) {
	one, two := newTestServers(t, "target-1"), newTestServers(t, "target-2")
	g, ctx := start(t, Config{FlowsTo: append(one.flows, two.flows...), Flows: 8, Pace: 5 * time.Millisecond})
	must(t, g.WaitFlows(ctx))
	_, err := g.Take(ctx)
	must(t, err)
	must(t, one.Abort())
	_, err = g.Wait(ctx, func(Result) error {
		if n := g.Live(); n != 4 {
			return fmt.Errorf("%d flows live", n)
		}
		return nil
	})
	must(t, err)
	r, err := g.Take(ctx)
	must(t, err)
	if stayed, left := r.Broken("target-1"); stayed != 0 || left != 4 {
		t.Errorf("%d flows of target-2 broke and %d of target-1:\n%v", stayed, left, r)
	}
	if r.Lost("target-1") != nil || r.Lost() == nil {
		t.Errorf("lost when target-1 left: %v, when it stayed: %v", r.Lost("target-1"), r.Lost())
	}
	next, err := g.Take(ctx)
	must(t, err)
	if got := fmt.Sprint(next.Targets()); got != "map[target-2:4]" || next.Lost() != nil {
		t.Errorf("in the next phase live %s:\n%v", got, next)
	}
}

func TestRedialOfBrokenFlows(t *testing.T) {
	one, two := newTestServers(t, "target-1"), newTestServers(t, "target-2")
	// At the address of the flows, first target-1 answers, then target-2.
	both := []*testServers{one, two}
	var mu sync.Mutex
	l, addr := listen(t, twiceHost)
	mu.Lock()
	both[0].ServeFlows(l)
	mu.Unlock()
	g, ctx := start(t, Config{FlowsTo: []netip.AddrPort{addr}, Flows: 2, Redial: true})
	must(t, g.WaitFlows(ctx))
	must(t, one.Abort())
	l, err := net.Listen("tcp", addr.String())
	must(t, err)
	two.ServeFlows(l)
	_, err = g.Wait(ctx, func(r Result) error {
		if n := r.Targets()["target-2"]; n != 2 {
			return fmt.Errorf("target-2 serves %d flows: %v", n, r.Failures)
		}
		return nil
	})
	must(t, err)
	r := g.Stop(ctx)
	if stayed, left := r.Broken("target-1"); stayed != 0 || left != 2 || len(r.Flows) != 4 {
		t.Errorf("%d and %d flows broke of %d", stayed, left, len(r.Flows))
	}
	if f := r.Flows; f[0].Target != "target-1" || f[0].Broken == "" || f[1].Target != "target-2" || f[1].Broken != "" ||
		f[1].Number != 0 {
		t.Errorf("not in order: %+v", f)
	}
}

func TestGapBelongsToPhaseOfItsStart(t *testing.T) {
	const gap = 300 * time.Millisecond
	held, release := make(chan struct{}), make(chan struct{})
	addr := custom(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		for n := 1; ; n++ {
			line, err := in.ReadString('\n')
			if err != nil {
				return
			}
			if n == 5 {
				close(held)
				<-release
			}
			fmt.Fprintf(c, "target-1 %s", line)
		}
	})
	g, ctx := start(t, Config{FlowsTo: []netip.AddrPort{addr}, Flows: 1, Pace: 5 * time.Millisecond})
	select {
	case <-held:
	case <-ctx.Done():
		t.Fatal("the fifth frame never came")
	}
	var released time.Time
	var releasing sync.WaitGroup
	releasing.Go(func() {
		defer close(release)
		_, _ = g.Wait(ctx, func(r Result) error { // until Take has begun the next phase
			if len(r.Flows) > 0 {
				return fmt.Errorf("the first phase lasts")
			}
			return nil
		})
		<-time.After(gap)
		released = time.Now()
	})
	first, err := g.Take(ctx)
	must(t, err)
	releasing.Wait()
	if got := first.LongestGap(); got < gap || first.Flows[0].Exchanges != 5 {
		t.Errorf("the longest gap is %v, want %v at least; %+v", got, gap, first.Flows)
	}
	second := g.Stop(ctx)
	if second.Flows[0].LongestGap > time.Since(released) {
		t.Errorf("the gap is in the next phase, too: %+v", second.Flows)
	}
}

func TestFlowBreakReasons(t *testing.T) {
	for _, test := range []struct {
		name    string
		silence time.Duration // 0 is longer than any answer takes
		serve   func(in *bufio.Reader, c net.Conn)
		want    string
	}{
		{"silent", 200 * time.Millisecond, func(in *bufio.Reader, _ net.Conn) { _, _ = io.Copy(io.Discard, in) }, "timeout"},
		{"another", 0, func(in *bufio.Reader, c net.Conn) {
			line, _ := in.ReadString('\n')
			fmt.Fprintf(c, "target-2 %s", line)
			_, _ = io.Copy(io.Discard, in)
		}, "in the place of"},
		{"wrong frame", 0, func(in *bufio.Reader, c net.Conn) {
			fmt.Fprint(c, "target-1 77\n")
			_, _ = io.Copy(io.Discard, in)
		}, "was answered"},
		{"end", 0, func(in *bufio.Reader, _ net.Conn) {
			_, _ = in.ReadString('\n') // closing with unread bytes is a reset
		}, "EOF"},
	} {
		t.Run(test.name, func(t *testing.T) {
			addr := custom(t, func(c net.Conn) {
				in := bufio.NewReader(c)
				line, _ := in.ReadString('\n')
				fmt.Fprintf(c, "target-1 %s", line)
				test.serve(in, c)
			})
			g, ctx := start(t, Config{FlowsTo: []netip.AddrPort{addr}, Flows: 1, Silence: test.silence})
			r, err := g.Wait(ctx, func(r Result) error {
				if stayed, _ := r.Broken(); stayed != 1 {
					return fmt.Errorf("%d broke", stayed)
				}
				return nil
			})
			must(t, err)
			if !strings.Contains(r.Flows[0].Broken, test.want) {
				t.Errorf("it broke by %q, want %q", r.Flows[0].Broken, test.want)
			}
		})
	}
}

func TestUnopenedFlowIsRetried(t *testing.T) {
	l, addr := listen(t, twiceHost)
	must(t, l.Close())
	g, ctx := start(t, Config{FlowsTo: []netip.AddrPort{addr}, Flows: 1})
	_, err := g.Wait(ctx, func(r Result) error {
		if r.Unopened < 2 {
			return fmt.Errorf("%d tries", r.Unopened)
		}
		return nil
	})
	must(t, err)
	again, err := net.Listen("tcp", addr.String())
	must(t, err)
	s := newTestServers(t, "target-1")
	s.ServeFlows(again)
	must(t, g.WaitFlows(ctx))
	if r := g.Stop(ctx); r.Lost() != nil {
		t.Error(r.Lost())
	}
}

func TestStopDeadline(t *testing.T) {
	silent := custom(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	s := newTestServers(t, "target-1")
	g, ctx := start(
		t, Config{Requests: []netip.AddrPort{silent}, Rate: 100, Timeout: MaxTimeout, FlowsTo: s.flows, Flows: 2},
	)
	must(t, g.WaitFlows(ctx))
	_, err := g.Wait(ctx, func(r Result) error {
		if r.Sent == 0 {
			return fmt.Errorf("nothing is sent")
		}
		return nil
	})
	must(t, err)
	short, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := g.Take(short); err == nil {
		t.Error("the fate of a request that is open counts as known")
	}
	g.Stop(short)
}

func TestGeneratorLimits(t *testing.T) {
	s := newTestServers(t, "target-1")
	for _, c := range []Config{
		{Requests: s.requests, Rate: MaxRate + 1},
		{Requests: s.requests, Rate: -1},
		{FlowsTo: s.flows, Flows: MaxFlows + 1},
		{Requests: s.requests, Rate: 1, For: 2 * MaxTime},
		{Requests: s.requests, Rate: 1, Timeout: time.Hour},
		{Requests: s.requests},
		{Rate: 1, Flows: 1},
	} {
		if g, err := Start(t.Context(), c); err == nil {
			g.Stop(t.Context())
			t.Errorf("%+v is accepted", c)
		}
	}
	const rate, length = 100, 500 * time.Millisecond
	g, ctx := start(t, Config{Requests: s.requests, Rate: rate, For: length, FlowsTo: s.flows, Flows: 2})
	_, err := g.Wait(ctx, func(r Result) error {
		if n := g.Live(); r.Sent == 0 || n > 0 {
			return fmt.Errorf("%d flows live", n)
		}
		return nil
	})
	must(t, err)
	// On a busy machine the generator ends late.
	if r := g.Stop(ctx); r.Sent > int(rate*r.Took.Seconds())+1 || r.Lost() != nil {
		t.Errorf("%d requests in %v at %d/s; %v", r.Sent, r.Took, rate, r.Lost())
	}
}

func TestSocketsInNamespace(t *testing.T) {
	s := newTestServers(t, "target-1")
	var mu sync.Mutex
	made := 0
	inside := func(fn func() error) error {
		mu.Lock()
		made++
		mu.Unlock()
		return fn()
	}
	g, ctx := start(t, Config{Requests: s.requests, Rate: 50, FlowsTo: s.flows, Flows: 2, Inside: inside})
	must(t, g.WaitFlows(ctx))
	must(t, g.WaitAnswered(ctx, 4))
	r := g.Stop(ctx)
	if r.Lost() != nil || made != 1+r.Sent+2 {
		t.Errorf("a sysctl and %d sockets for %d requests and 2 flows; %v", made-1, r.Sent, r.Lost())
	}
	refused := fmt.Errorf("no way in")
	closed := func(func() error) error { return refused }
	if _, err := Start(t.Context(), Config{Requests: s.requests, Rate: 50, Inside: closed}); !errors.Is(err, refused) {
		t.Errorf("started without a way in: %v", err)
	}
	first := true
	closed = func(fn func() error) error {
		if first {
			first = false
			return fn()
		}
		return refused
	}
	g, ctx = start(t, Config{Requests: s.requests, Rate: 50, Inside: closed})
	_, err := g.Wait(ctx, func(r Result) error {
		if r.Failed == 0 {
			return fmt.Errorf("none failed")
		}
		return nil
	})
	must(t, err)
	if r := g.Stop(ctx); !strings.Contains(r.Failures[0].Err, refused.Error()) {
		t.Errorf("failures: %v", r.Failures)
	}
}

func TestShutdownAnswersAccepted(t *testing.T) {
	s := newTestServers(t, "target-1")
	conn, err := net.Dial("tcp", s.requests[0].String())
	must(t, err)
	defer conn.Close()
	// Accepted, with half a request.
	half := len(request) / 2
	_, err = io.WriteString(conn, request[:half])
	must(t, err)
	ctx := harness.Context(t, waitTimeout)
	for {
		if n, _ := s.Connections(); n == 1 {
			break
		}
		runtime.Gosched()
	}
	done := make(chan error, 1)
	go func() { done <- s.Shutdown(ctx) }()
	_, err = io.WriteString(conn, request[half:])
	must(t, err)
	body, err := io.ReadAll(conn)
	if err != nil || !strings.HasSuffix(string(body), "target-1\n") {
		t.Errorf("answer %q, %v", body, err)
	}
	must(t, <-done)
	if requests, flows := s.Connections(); requests+flows > 0 {
		t.Errorf("%d and %d connections are open", requests, flows)
	}
}
