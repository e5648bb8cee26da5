package healthcheck

import (
	"net"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
)

const heartbeat = 375 * time.Millisecond

// stalled runs a test with a target that is ready, and a function that lets a time pass without any
// check.
func stalled(t *testing.T, test func(t *testing.T, n *network, c *Checker, stall func(time.Duration))) {
	inBubble(t, func(t *testing.T) {
		n := newNetwork()
		c := New(Options{dial: n.DialContext, Log: discard, Heartbeat: heartbeat})
		check := testCheck
		check.Fall = 1
		c.Configure([]trench.Stream{stream(1, check)})
		stop := run(t, c)
		defer func() { stop() }()
		for range 10 {
			c.Evaluate(time.Now())
			advance(heartbeat)
		}
		if c.Evaluate(time.Now()); c.List()[0].State != Ready {
			t.Fatalf("at the start: %+v", c.List())
		}
		test(t, n, c, func(d time.Duration) {
			stop()
			advance(d)
			stop = func() {}
			if got := c.Evaluate(time.Now()).Stalled; got != d-heartbeat {
				t.Errorf("a stall of %v is %v late", d, got)
			}
			stop = rerun(t, c)
		})
	})
}

// A target is not overdue after a stall of this process, however long, nor after the next ones.
func TestOwnStallIsNotOverdue(t *testing.T) {
	stalled(t, func(t *testing.T, _ *network, c *Checker, stall func(time.Duration)) {
		for _, d := range []time.Duration{2 * time.Second, 3 * time.Second, time.Minute, time.Hour} {
			stall(d)
			for range 20 {
				advance(100 * time.Millisecond)
				if e := c.Evaluate(time.Now()); len(e.Changed) != 0 {
					t.Fatalf("after a stall of %v: %+v", d, e)
				}
			}
		}
	})
}

// A stall does not shorten the wait of an edit for the verdicts of its check.
func TestStallDuringEdit(t *testing.T) {
	stalled(t, func(t *testing.T, n *network, c *Checker, stall func(time.Duration)) {
		next := stream(2, testCheck)
		c.Update([]trench.Stream{next}, nil)
		advance(time.Second)
		c.Evaluate(time.Now())
		next.Check.TCP.Port = 2
		c.Update([]trench.Stream{named("b", 1, next.Check)}, nil) // target-1 shares its verdict
		advance(heartbeat)
		c.Evaluate(time.Now())
		release := n.hang("10.0.0.2:2")
		c.Update([]trench.Stream{next}, nil)
		advance(heartbeat)
		c.Evaluate(time.Now())
		release()
		synctest.Wait()
		stall(maxWait)
		if state := states(c.List())["target-2"]; state != Ready || len(c.Held()) > 0 {
			t.Errorf("after the stall: %v, held %v", state, c.Held())
		}
		advance(time.Second)
		if c.Evaluate(time.Now()); states(c.List())["target-2"] != Ready || len(c.edits) > 0 {
			t.Errorf("in the end: %+v, %d edits", c.List(), len(c.edits))
		}
	})
}

// A target whose checks do not run is overdue after a stall: in time if the evaluations run, and
// after as many heartbeats as fit into that time if each of them is late.
func TestStallsDelayOverdueByTheirLength(t *testing.T) {
	for _, test := range []struct {
		name  string
		every time.Duration
		want  time.Duration // at most
	}{
		{"timely evaluations", heartbeat, 2500*time.Millisecond + heartbeat},
		{"late evaluations", 10 * time.Second, 8 * 10 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			stalled(t, func(t *testing.T, n *network, c *Checker, stall func(time.Duration)) {
				release := n.hang("10.0.0.1")
				defer release()
				stall(3 * time.Second)
				since := time.Now()
				for c.List()[0].State != Overdue {
					if advance(test.every); time.Since(since) > test.want {
						t.Fatalf("%v after the stall: %+v", time.Since(since), c.Evaluate(time.Now()))
					}
					c.Evaluate(time.Now())
				}
			})
		})
	}
}

// The first failure that is noticed late does not count, even with a fall of 1: its check is
// repeated immediately. The next one counts, however late.
func TestLateFailureIsRepeated(t *testing.T) {
	stalled(t, func(t *testing.T, n *network, c *Checker, _ func(time.Duration)) {
		// started lets the next check start, which hangs until the result is called.
		started := func() (release func()) {
			release = n.hang("10.0.0.1")
			for before := len(n.dialed()); len(n.dialed()) == before; {
				advance(10 * time.Millisecond)
			}
			return release
		}
		want := func(when string, state State) {
			t.Helper()
			synctest.Wait()
			if c.Evaluate(time.Now()); c.List()[0].State != state {
				t.Errorf("%s: %+v", when, c.List())
			}
		}
		late := testCheck.Timeout + starvedAfter + time.Millisecond
		release, before := started(), len(n.dialed())
		advance(late)
		release()
		want("a late failure and a success", Ready)
		if c.List()[0].LastError != "" || len(n.dialed()) != before+1 {
			t.Errorf("after %d more checks: %+v", len(n.dialed())-before, c.List())
		}
		release = started()
		advance(late)
		again := n.hang("10.0.0.1")
		release()
		want("a late failure", Ready)
		advance(late)
		again()
		want("two late failures", NotReady)
		advance(3 * time.Second)
		want("successes", Ready)
		release = started()
		advance(testCheck.Timeout)
		release()
		want("a failure in time", NotReady)
	})
}

// An answer that arrived in time counts, however late it is read.
func TestAnswerPrecedesTimeout(t *testing.T) {
	server, err := net.ListenUDP("udp", &net.UDPAddr{IP: loopback4.AsSlice()})
	harness.Must(t, err)
	defer server.Close()
	port := server.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	k := connecting(t)
	began := time.Now()
	p := probing(loopback4, 0, func(check *trench.Check) {
		check.TCP, check.UDP = trench.TCPCheck{}, trench.UDPCheck{Port: port, Send: "ping", Expect: "pong"}
	})
	if _, ended := k.start(p); ended {
		t.Fatal("the check ended without an answer")
	}
	buffer := make([]byte, 16)
	_, from, err := server.ReadFromUDPAddrPort(buffer)
	harness.Must(t, err)
	_, err = server.WriteToUDPAddrPort([]byte("pong"), from)
	harness.Must(t, err)
	for fd := range k.sockets { // the answer is in the socket's buffer
		_, err := unix.Poll([]unix.PollFd{{Fd: fd, Events: unix.POLLIN}}, int(patience/time.Millisecond))
		harness.Must(t, err)
	}
	reported := k.collect(began.Add(time.Hour), func(_ probe, o outcome) {
		if o.verdict != succeeded {
			t.Errorf("an hour after the timeout: %+v", o)
		}
	})
	if reported != 1 {
		t.Errorf("%d outcomes", reported)
	}
}
