package healthcheck

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// named is a stream of n targets with another name.
func named(name string, n int, check trench.Check) trench.Stream {
	s := stream(n, check)
	s.Name = name
	return s
}

// reported formats an evaluation as STREAM/TARGET=STATE, sorted.
func reported(e Evaluation) []string {
	var s []string
	for _, h := range e.Changed {
		s = append(s, fmt.Sprintf("%s/%s=%v", h.Stream, h.Name, h.State))
	}
	for _, k := range e.Removed {
		s = append(s, fmt.Sprintf("%s/%s removed", k.Stream, k.Name))
	}
	slices.Sort(s)
	return s
}

func TestUpdateReplacesNamedStreams(t *testing.T) {
	withChecker(t, func(t *testing.T, _ *network, c *Checker) {
		c.Configure([]trench.Stream{named("a", 1, testCheck), named("b", 2, testCheck), named("c", 1, testCheck)})
		advance(2 * time.Second)
		c.Evaluate(time.Now())
		for _, step := range []struct {
			what    string
			changed []trench.Stream
			removed []string
			want    []string // immediately
		}{
			{"nothing", nil, nil, nil},
			{"the same again", []trench.Stream{named("b", 2, testCheck)}, nil, nil},
			{"one target more", []trench.Stream{named("b", 3, testCheck)}, nil, []string{"b/target-3=starting"}},
			{
				"two less",
				[]trench.Stream{named("b", 1, testCheck)},
				nil,
				[]string{"b/target-2 removed", "b/target-3 removed"},
			},
			{"a stream less", nil, []string{"c"}, []string{"c/target-1 removed"}},
			{"a stream less, again", nil, []string{"c"}, nil},
			{
				"a new stream",
				[]trench.Stream{named("d", 1, testCheck)},
				[]string{"none"},
				[]string{"d/target-1=ready"}, // as in stream a
			},
			{
				"moved to another stream",
				[]trench.Stream{named("d", 0, testCheck), named("e", 1, testCheck)},
				nil,
				[]string{"d/target-1 removed", "e/target-1=ready"},
			},
		} {
			c.Update(step.changed, step.removed)
			if got := reported(c.Evaluate(time.Now())); !slices.Equal(got, step.want) {
				t.Errorf("%s: reported %v, want %v", step.what, got, step.want)
			}
			advance(2 * time.Second)
			for _, h := range c.Evaluate(time.Now()).Changed {
				if h.State != Ready {
					t.Errorf("%s: then %s/%s is %v", step.what, h.Stream, h.Name, h.State)
				}
			}
		}
		if got := len(c.List()); got != 3 {
			t.Errorf("%d targets are left: %v", got, c.List())
		}
		c.Configure([]trench.Stream{named("b", 1, testCheck)})
		if got, want := reported(c.Evaluate(time.Now())),
			[]string{"a/target-1 removed", "e/target-1 removed"}; !slices.Equal(got, want) {
			t.Errorf("Configure reported %v, want %v", got, want)
		}
	})
}

func TestUpdateAsFirstConfiguration(t *testing.T) {
	withChecker(t, func(t *testing.T, _ *network, c *Checker) {
		c.Update([]trench.Stream{stream(1, testCheck)}, nil)
		if c.Evaluate(time.Now()).Synced {
			t.Fatal("synced before the first verdict")
		}
		advance(time.Second)
		if e := c.Evaluate(time.Now()); !e.Synced || len(e.Changed) != 1 || e.Changed[0].State != Ready {
			t.Fatalf("got %+v", e)
		}
	})
}

// A target is checked again if its check changes, not if only the timing changes.
func TestNewSubjectRestartsTarget(t *testing.T) {
	for _, tt := range []struct {
		what    string
		change  func(*trench.Check)
		restart bool
	}{
		{"interval", func(c *trench.Check) { c.Interval *= 2 }, false},
		{"timeout", func(c *trench.Check) { c.Timeout /= 2 }, false},
		{"rise and fall", func(c *trench.Check) { c.Rise, c.Fall = 7, 8 }, false},
		{"fast interval", func(c *trench.Check) { c.FastInterval = c.Interval / 2 }, false},
		{"the source of the other family", func(c *trench.Check) { c.Sources[0] = netip.MustParseAddr("fd00::9") }, false},
		{"the family of the target alone", func(c *trench.Check) { c.Families = trench.OnlyIPv4 }, false},
		{"source", func(c *trench.Check) { c.Sources[0] = netip.MustParseAddr("10.1.0.1") }, true},
		{"port", func(c *trench.Check) { c.TCP.Port++ }, true},
		{
			"kind", func(c *trench.Check) { c.HTTP = trench.HTTPCheck{Port: c.TCP.Port, Path: "/"}; c.TCP.Port = 0 },
			true,
		},
	} {
		t.Run(tt.what, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				c := New(Options{dial: newNetwork().DialContext, Log: discard})
				stop := run(t, c)
				c.Configure([]trench.Stream{stream(1, testCheck)})
				advance(time.Second)
				stop() // the remaining steps concern only the state
				c.Evaluate(time.Now())
				check := testCheck
				tt.change(&check)
				c.Update([]trench.Stream{stream(1, check)}, nil)
				c.Evaluate(time.Now())
				if restarted := len(c.edits) > 0; c.List()[0].State != Ready || restarted != tt.restart {
					t.Errorf("the target is %v, checked again: %v", c.List()[0].State, restarted)
				}
			})
		})
	}
}

func TestUncheckedAddressesAreIgnored(t *testing.T) {
	withChecker(t, func(t *testing.T, n *network, c *Checker) {
		v4, v6 := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
		both := trench.Stream{
			Name: "s", Check: testCheck,
			Targets: []trench.Target{{Name: "t", IPs: []netip.Addr{v4, v6}}},
		}
		only4, only6, none := both, both, both
		only4.Check.Families, only6.Check.Families, none.Check = trench.OnlyIPv4, trench.OnlyIPv6, trench.Check{}
		for _, step := range []struct {
			stream trench.Stream
			want   []netip.Addr
		}{
			{both, []netip.Addr{v4, v6}},
			{only4, []netip.Addr{v4}},
			{only6, []netip.Addr{v6}},
			{none, nil},
			{both, []netip.Addr{v4, v6}},
		} {
			c.Update([]trench.Stream{step.stream}, nil)
			advance(2 * time.Second)
			c.Evaluate(time.Now())
			var got []netip.Addr
			for _, h := range c.List() {
				if h.State != Ready {
					t.Errorf("%v is %v", h.Key, h.State)
				}
				got = append(got, h.Addr)
			}
			if !slices.Equal(got, step.want) {
				t.Errorf("targets are %v, want %v", got, step.want)
			}
		}
	})
}

func TestFastInterval(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		check := testCheck
		check.Interval, check.FastInterval, check.Rise, check.Fall = 10*time.Second, 200*time.Millisecond, 3, 3
		n := newNetwork()
		c, stop := start(t, Options{dial: n.DialContext})
		defer stop()
		c.Configure([]trench.Stream{stream(1, check)})
		advance(30 * time.Second)
		steady := func() {
			t.Helper()
			before := len(n.dialed())
			advance(time.Minute)
			if got := len(n.dialed()) - before; got < 6 || got > 7 {
				t.Errorf("%d checks in a steady minute at 10 s", got)
			}
		}
		// decided returns the time between the first check with the new outcome and the
		// change of the state.
		decided := func(want State) time.Duration {
			t.Helper()
			for before := len(n.dialed()); len(n.dialed()) == before; {
				advance(time.Millisecond)
			}
			first := time.Now()
			for c.List()[0].State != want {
				if time.Since(first) > time.Minute {
					t.Fatalf("never %v: %+v", want, c.List())
				}
				advance(time.Millisecond)
				c.Evaluate(time.Now())
			}
			return time.Since(first)
		}
		steady()
		for _, step := range []struct {
			err  error
			want State
		}{{errRefused, NotReady}, {nil, Ready}} {
			n.refuse("10.0.0.1", step.err)
			if took := decided(step.want); took < 350*time.Millisecond || took > 410*time.Millisecond {
				t.Errorf("%v after %v, want two fast intervals", step.want, took)
			}
			steady()
		}
		// It makes nothing overdue: that is by the interval.
		n.refuse("10.0.0.1", errRefused)
		for before := len(n.dialed()); len(n.dialed()) == before; {
			advance(time.Millisecond)
		}
		release := n.hang("10.0.0.1")
		defer release()
		advance(5 * time.Second)
		if c.Evaluate(time.Now()); c.List()[0].State != Ready {
			t.Errorf("after one failure and a hung check: %v", c.List()[0].State)
		}
	})
}

func TestFailuresReportAnswers(t *testing.T) {
	dialing := func(errno syscall.Errno) error {
		return &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", errno)}
	}
	for _, tt := range []struct {
		err     error
		verdict verdict
		silent  bool
		reason  string
	}{
		{context.DeadlineExceeded, failed, true, "port 5000: no answer in 500ms"},
		{&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, failed, true, "port 5000: no answer in 500ms"},
		{dialing(syscall.ETIMEDOUT), failed, true, "port 5000: no answer in 500ms"},
		{dialing(syscall.EHOSTUNREACH), failed, true, "port 5000: no route to host"},
		{dialing(syscall.ENETUNREACH), failed, true, "port 5000: network is unreachable"},
		{dialing(syscall.ENETDOWN), failed, true, "port 5000: network is down"},
		{dialing(syscall.EADDRNOTAVAIL), failed, true, "port 5000: cannot assign requested address"},
		{dialing(syscall.ECONNREFUSED), failed, false, "port 5000: connection refused"},
		{dialing(syscall.ECONNRESET), failed, false, "port 5000: connection reset by peer"},
		{errors.New("a wrong answer"), failed, false, "port 5000: a wrong answer"},
		{
			&net.OpError{Op: "dial", Err: os.NewSyscallError("bind", syscall.EADDRNOTAVAIL)},
			notRun, false, "check not run: source address: cannot assign requested address",
		},
		{os.NewSyscallError("socket", syscall.EMFILE), notRun, false, "check not run: socket: too many open files"},
		{
			os.NewSyscallError("connect", syscall.EAGAIN), notRun, false,
			"check not run: connect: resource temporarily unavailable",
		},
	} {
		want := outcome{
			verdict: tt.verdict, silent: tt.silent, reason: tt.reason, refused: errors.Is(tt.err, syscall.ECONNREFUSED),
		}
		if got := newPlan(testCheck).failure(tt.err); got != want {
			t.Errorf("%v is %+v, want %+v", tt.err, got, want)
		}
	}
}

// A real socket refuses a source address that this machine does not have.
func TestMissingSourceAddressIsNoVerdict(t *testing.T) {
	s := serve(t, "127.0.0.1:0")
	c, stop := start(t, Options{})
	defer stop()
	check := trench.Check{
		SingleCheck: trench.SingleCheck{
			TCP: trench.TCPCheck{Port: s.port()}, Interval: 10 * time.Millisecond, Timeout: 10 * time.Millisecond, Rise: 1,
			Fall: 1,
		},
		Sources: [2]netip.Addr{netip.MustParseAddr("192.0.2.1")},
	}
	target := []trench.Target{{Name: "a", IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}}}
	c.Configure([]trench.Stream{{Name: "s", Check: check, Targets: target}})
	follow(t, c, "being overdue", func(Evaluation) bool { return c.List()[0].State == Overdue })
	if got, want := c.List()[0].LastError,
		"check not run: source address: cannot assign requested address"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	check.Sources[0] = netip.MustParseAddr("127.0.0.77")
	c.Update([]trench.Stream{{Name: "s", Check: check, Targets: target}}, nil)
	follow(t, c, "being ready", func(Evaluation) bool { return c.List()[0].State == Ready })
}

// Even among many targets, a new target waits neither for their pace nor for its
// interval.
func TestAddedTargetIsReadySoon(t *testing.T) {
	withChecker(t, func(t *testing.T, _ *network, c *Checker) {
		c.Configure([]trench.Stream{named("others", 5000, testCheck)})
		advance(10 * time.Second)
		c.Evaluate(time.Now())
		for i := range 50 {
			added := time.Now()
			name := fmt.Sprintf("new-%d", i)
			c.Update([]trench.Stream{named(name, 1, testCheck)}, nil)
			for ready := false; !ready; {
				advance(500 * time.Microsecond)
				for _, h := range c.Evaluate(time.Now()).Changed {
					ready = ready || h.Stream == name && h.State == Ready
				}
				if took := time.Since(added); took > startRecheck+5*time.Millisecond {
					t.Fatalf("not ready after %v", took)
				}
			}
			advance(7 * time.Millisecond)
		}
	})
}

func TestHTTPAndGRPCInChecker(t *testing.T) {
	healthy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if host, _, _ := net.SplitHostPort(r.RemoteAddr); host != "127.0.0.77" {
			w.WriteHeader(http.StatusTeapot)
		}
	}))
	defer healthy.Close()
	port := uint16(healthy.Listener.Addr().(*net.TCPAddr).Port)
	check := testCheck
	check.TCP, check.HTTP = trench.TCPCheck{}, trench.HTTPCheck{Port: port, Path: "/", Status: "200"}
	check.Interval, check.Timeout = 20*time.Millisecond, patience
	c, stop := start(t, Options{})
	defer stop()
	target := []trench.Target{{Name: "a", IPs: []netip.Addr{loopback4}}}
	c.Configure([]trench.Stream{{Name: "s", Check: check, Targets: target}})
	follow(t, c, "a wrong answer", func(Evaluation) bool { return c.List()[0].State == NotReady })
	if h := c.List()[0]; h.LastError == "" {
		t.Errorf("got %+v", h)
	}
	check.Sources[0] = netip.MustParseAddr("127.0.0.77")
	c.Configure([]trench.Stream{{Name: "s", Check: check, Targets: target}})
	follow(t, c, "the right answer", func(Evaluation) bool { return c.List()[0].State == Ready })
	check.HTTP, check.GRPC = trench.HTTPCheck{}, trench.GRPCCheck{Port: port}
	c.Configure([]trench.Stream{{Name: "s", Check: check, Targets: target}})
	follow(t, c, "no gRPC there", func(Evaluation) bool { return strings.Contains(c.List()[0].LastError, "no gRPC here") })
}

func TestFewTargetsShareWakeUps(t *testing.T) {
	e := &entry{Health: Health{State: Ready}, plan: newPlan(trench.Check{
		SingleCheck: trench.SingleCheck{Interval: time.Second, Timeout: time.Second},
	})}
	grid := time.Unix(1_000_000_000, 0)
	began := grid.Add(300 * time.Microsecond)
	now := began.Add(time.Millisecond)
	if due := e.next(began, now, grid, false, true); !due.Equal(grid.Add(time.Second)) {
		t.Errorf("steady: %v after the last check", due.Sub(began))
	}
	for range 100 {
		due := e.next(began, now, grid, true, true)
		if due.UnixNano()%int64(sharedInstants) != 0 || !due.After(now) || due.Sub(now) > time.Second {
			t.Fatalf("first: %v after the verdict", due.Sub(now))
		}
	}
	e.State = Starting
	if due := e.next(began, now, grid, false, true); due.Equal(grid.Add(time.Second)) {
		t.Error("a target without a verdict waits for a shared instant")
	}
}

// Targets with a running check count, too: after a stall all checks run concurrently.
func TestManyChecksShareNoInstant(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		advance(time.Millisecond) // so that no slot begins with a second
		n := newNetwork()
		c, stop := start(t, Options{dial: n.DialContext})
		defer stop()
		check := testCheck
		check.Rise = 1
		c.Configure([]trench.Stream{stream(2*fewTargets, check)})
		advance(2 * check.Interval)
		n.mu.Lock()
		n.latency = check.Interval // longer than the timeout
		n.mu.Unlock()
		advance(3 * check.Interval)
		for _, d := range n.dialed()[2*fewTargets:] {
			if d.at.UnixNano()%int64(time.Second) == 0 {
				t.Fatalf("a check began at a whole second: %v", d.at)
			}
		}
	})
}

// A new target inherits the newest verdict on its address, unless it is overdue.
func TestNewestVerdictIsInherited(t *testing.T) {
	c := New(Options{Log: discard})
	now := time.Now()
	verdict := func(name string, state State, overdue bool) {
		for _, target := range c.streams[name] {
			member := target.members[0]
			member.State, member.overdue, member.alive = state, overdue, now
			c.judge(member, now)
		}
		now = now.Add(time.Millisecond)
	}
	c.Configure([]trench.Stream{named("a", 1, testCheck), named("b", 1, testCheck)})
	for i, tt := range []struct {
		stream  string
		state   State
		overdue bool
		want    State
	}{
		{"none", Starting, false, Starting},
		{"a", Ready, false, Ready},
		{"b", NotReady, false, NotReady},
		{"a", Ready, false, Ready},
		{"a", Ready, true, NotReady},
		{"b", NotReady, true, Starting},
		{"b", Ready, false, Ready},
	} {
		verdict(tt.stream, tt.state, tt.overdue)
		c.Update([]trench.Stream{named("c", 1, testCheck)}, nil)
		for key, target := range c.streams["c"] {
			if target.state != tt.want {
				t.Errorf("%d: %v is %v, want %v", i, key, target.state, tt.want)
			}
		}
		c.Update(nil, []string{"c"})
	}
}
