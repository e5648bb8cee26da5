package bird

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// The tests in this file run the polling loop against a fake BIRD in a synctest bubble, so that
// every time is exact.

// fakeBIRD answers on a control socket.
type fakeBIRD struct {
	mu       sync.Mutex
	until    time.Time                  // the fake is silent until then
	garble   func(answer string) string // replaces an answer; "" drops the connection
	requests []time.Time
	dials    int
	wg       sync.WaitGroup
	up       bool
	pid      int         // of the server of the socket; 42, the process, when 0
	exported []string    // VIPs, with up
	lists    []time.Time // requests for exported
	version  string      // 2.0.12 when empty
	reloads  []string    // commands that reload a protocol
	bfd      string      // answer to "show bfd sessions"
	noBFD    bool        // no such answer
	// configure is called when BIRD loads a configuration; nil: it is not.
	configure func()
}

func (f *fakeBIRD) with(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeBIRD) answer(command string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, time.Now())
	text := "0000 \n"
	switch {
	case command == "":
		text = "0001 BIRD " + cmp.Or(f.version, "2.0.12") + " ready.\n"
	case strings.HasPrefix(command, "configure \"") && f.configure != nil:
		f.configure()
	case command == "show bfd sessions":
		if text = f.bfd; f.noBFD {
			return ""
		}
	case strings.HasPrefix(command, "reload"):
		f.reloads = append(f.reloads, command)
	case strings.HasPrefix(command, "show protocols") && f.up:
		text = fmt.Sprintf("1002-NBR-a BGP --- up 05:27:00 Established\n1006-  BGP state: Established\n"+
			"  Channel ipv4\n    State: UP\n     Routes: 0 imported, %d exported\n0000 \n", len(f.exported))
	case command == "show route exported 'NBR-a'":
		f.lists = append(f.lists, time.Now())
		text = "1007-Table master4:\n"
		for _, v := range f.exported {
			text += " " + v + "          blackhole [LB 18:03:30.911] * (200) [i]\n"
		}
		text += "0000 \n"
	case strings.HasPrefix(command, "show protocols"):
		text = "1002-device1 Device --- up 05:27:00\n0000 \n"
	}
	if f.garble != nil && command != "" {
		text = f.garble(text)
	}
	return text
}

// wait blocks while the fake is silent.
func (f *fakeBIRD) wait(done <-chan struct{}) {
	for {
		var left time.Duration
		f.with(func() { left = time.Until(f.until) })
		if left <= 0 {
			return
		}
		select {
		case <-time.After(left):
		case <-done:
			return
		}
	}
}

func (f *fakeBIRD) dial(ctx context.Context, _ string) (*Client, error) {
	f.with(func() { f.dials++ })
	ours, theirs := net.Pipe()
	done := make(chan struct{})
	f.wg.Go(func() {
		// Commands that arrive while the fake is silent wait, as in a socket buffer.
		defer theirs.Close()
		in := bufio.NewReader(theirs)
		for command := ""; ; {
			f.wait(done)
			text := f.answer(strings.TrimSpace(command))
			if text == "" {
				return
			}
			if _, err := theirs.Write([]byte(text)); err != nil {
				return
			}
			var err error
			if command, err = in.ReadString('\n'); err != nil {
				return
			}
		}
	})
	c, err := newClient(ctx, &closing{ours, done, sync.Once{}})
	if err != nil {
		return nil, errors.Join(err, ours.Close())
	}
	f.with(func() { c.PID = cmp.Or(f.pid, 42) })
	return c, nil
}

// closing notifies the fake that its client has closed.
type closing struct {
	net.Conn
	done chan struct{}
	once sync.Once
}

func (c *closing) Close() error {
	c.once.Do(func() { close(c.done) })
	return c.Conn.Close()
}

// watched is a supervisor whose loop runs against a fake BIRD.
type watched struct {
	*Supervisor
	bird   *fakeBIRD
	ended  chan struct{}
	err    error // valid once ended is closed
	cancel func()
}

// watch starts the loop in a bubble. The gateways have these hold times.
func watch(t *testing.T, f *fakeBIRD, holds ...time.Duration) *watched {
	t.Helper()
	s := NewSupervisor(Options{Dir: t.TempDir(), Socket: "unused"})
	s.dial = f.dial
	var v resolution
	for i, h := range holds {
		g := trench.Gateway{
			Name: string(rune('a' + i)), Address: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}),
			HoldTime: h,
		}
		v.gateways = append(v.gateways, g)
		v.input.Sessions = append(v.input.Sessions, Session{Gateway: g})
	}
	v.generation, v.content = 1, []byte("configuration")
	s.resolver.result.Set(v)
	s.apply.current = v
	ctx, cancel := context.WithCancel(t.Context())
	w := &watched{Supervisor: s, bird: f, ended: make(chan struct{}), cancel: cancel}
	p := &process{cmd: &exec.Cmd{Process: &os.Process{Pid: 42}}, exited: make(chan struct{}), since: time.Now()}
	go func() {
		defer close(w.ended)
		w.err = s.serve(ctx, p)
		s.disconnect()
	}()
	t.Cleanup(func() { cancel(); <-w.ended; f.wg.Wait() })
	synctest.Wait()
	return w
}

// watchIdle watches a BIRD whose session is up, in a bubble, after the fast polls of the start.
func watchIdle(t *testing.T, f func(*testing.T, *fakeBIRD, *watched)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		bird := &fakeBIRD{up: true}
		w := watch(t, bird, 3*time.Second)
		w.skipFastPolls()
		f(t, bird, w)
	})
}

// skipFastPolls waits until the fast polls of the start are over.
func (w *watched) skipFastPolls() { w.after(fastDuration + pollInterval) }

// after lets time pass in the bubble.
func (w *watched) after(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// next lets time pass until just before the next poll of an idle loop.
func (w *watched) next() {
	at := w.State().Load().At
	w.after(time.Until(at.Add(pollInterval)) - time.Millisecond)
}

func TestShortSilenceChangesNothing(t *testing.T) {
	for _, silence := range []time.Duration{time.Second, 1900 * time.Millisecond} {
		for _, phase := range []time.Duration{0, 500 * time.Millisecond, 998 * time.Millisecond} {
			t.Run(fmt.Sprintf("%s, %s after a poll", silence, phase), func(t *testing.T) {
				watchIdle(t, func(t *testing.T, f *fakeBIRD, w *watched) {
					w.next()
					w.after(2*time.Millisecond + phase)
					f.with(func() { f.until = time.Now().Add(silence) })
					for end := time.Now().Add(silence + 3*time.Second); time.Now().Before(end); w.after(10 * time.Millisecond) {
						s := w.State().Load()
						if !s.Alive || !s.Gateways[0].Up {
							t.Fatalf("state %+v", s)
						}
						// The gate accepts it for three seconds (gate.MaxSessionAge).
						if age := time.Since(s.At); age >= 3*time.Second {
							t.Fatalf("the state is %v old", age)
						}
					}
				})
			})
		}
	}
}

func TestHangDetection(t *testing.T) {
	for _, tt := range []struct {
		loopback      time.Duration
		holds         []time.Duration
		silent, limit time.Duration // silent: to the end of the command that is under way
	}{
		{0, nil, commandTimeout, 4 * time.Second},
		{3 * time.Second, []time.Duration{3 * time.Second}, commandTimeout, 4 * time.Second},
		{9 * time.Second, []time.Duration{time.Minute, 6 * time.Second}, 3*commandTimeout + 2*retryInterval, 7 * time.Second},
		{4 * time.Second, []time.Duration{time.Minute, time.Hour}, 2*commandTimeout + retryInterval, 10 * time.Second},
	} {
		t.Run(fmt.Sprint(tt.loopback, tt.holds), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeBIRD{}
				w := watch(t, f, tt.holds...)
				w.options.LoopbackHoldTime = tt.loopback
				w.skipFastPolls()
				w.next()
				f.with(func() { f.until = time.Now().Add(time.Hour) })
				w.after(time.Millisecond)
				begin := time.Now() // of the poll that is not answered
				w.after(tt.silent - time.Millisecond)
				if s := w.State().Load(); !s.Alive || s.Err != nil {
					t.Fatalf("after %v: %+v", time.Since(begin), s)
				}
				w.after(time.Millisecond)
				if s := w.State().Load(); s.Alive || !errors.Is(s.Err, errHung) || !strings.Contains(s.Err.Error(), "BIRD_HUNG") {
					t.Fatalf("after %v: %+v", time.Since(begin), s)
				}
				<-w.ended
				if !errors.Is(w.err, errHung) {
					t.Errorf("the loop ended with %v", w.err)
				}
				if took := time.Since(begin); took < tt.limit || took > tt.limit+retryInterval {
					t.Errorf("given up after %v, want %v", took, tt.limit)
				}
			})
		})
	}
}

func TestRecoveredBIRDIsKept(t *testing.T) {
	watchIdle(t, func(t *testing.T, f *fakeBIRD, w *watched) {
		w.next()
		f.with(func() { f.until = time.Now().Add(3500 * time.Millisecond) })
		w.after(3 * time.Second)
		if s := w.State().Load(); s.Alive {
			t.Fatalf("state %+v", s)
		}
		w.after(time.Second)
		if s := w.State().Load(); !s.Alive || s.Err != nil || !s.Gateways[0].Up {
			t.Fatalf("state %+v", s)
		}
		// The next silence is measured from its own start.
		w.next()
		f.with(func() { f.until = time.Now().Add(3500 * time.Millisecond) })
		w.after(10 * time.Second)
		if s := w.State().Load(); !s.Alive {
			t.Fatalf("state %+v", s)
		}
	})
}

func TestBrokenConnectionIsNoHang(t *testing.T) {
	for name, garble := range map[string]func(string) string{
		"dropped":    func(string) string { return "" },
		"garbage":    func(string) string { return "garbage\n" },
		"no command": func(string) string { return " continues nothing\n" },
	} {
		t.Run(name, func(t *testing.T) {
			watchIdle(t, func(t *testing.T, f *fakeBIRD, w *watched) {
				w.next()
				once, dials := true, f.dials
				f.with(func() {
					f.garble = func(a string) string {
						if once {
							once = false
							return garble(a)
						}
						return a
					}
				})
				for range 100 {
					w.after(10 * time.Millisecond)
					if s := w.State().Load(); !s.Alive || !s.Gateways[0].Up {
						t.Fatalf("state %+v", s)
					}
				}
				if f.dials != dials+1 {
					t.Errorf("%d new connections, want 1", f.dials-dials)
				}
				// Only a persistent failure counts as a BIRD that does not answer.
				f.with(func() { f.garble = garble })
				<-w.ended
				if s := w.State().Load(); s.Alive || !errors.Is(s.Err, errHung) || !errors.Is(w.err, errHung) {
					t.Errorf("loop %v, state %+v", w.err, s)
				}
				if n := f.dials - dials; n > 200 {
					t.Errorf("%d connections in %v", n, minHang)
				}
			})
		})
	}
}

func TestEmptyReplyIsNotNoSession(t *testing.T) {
	for _, answer := range []string{"0006 Shutting down\n", "9001 syntax error\n"} {
		watchIdle(t, func(t *testing.T, f *fakeBIRD, w *watched) {
			f.with(func() { f.garble = func(string) string { return answer } })
			w.after(pollInterval)
			if s := w.State().Load(); s.Alive || s.Err == nil || errors.Is(s.Err, errHung) {
				t.Errorf("after %q: %+v", answer, s)
			}
			f.with(func() { f.garble = nil })
			w.after(pollInterval)
			if s := w.State().Load(); !s.Alive || s.Err != nil || !s.Gateways[0].Up {
				t.Errorf("after %q and a good answer: %+v", answer, s)
			}
		})
	}
}

// Without an answer the last BFD states count for a while; an answer without the session does not.
func TestNoBFDAnswerIsNoLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const header = "1020-NBR-BFD:\n"
		bird := &fakeBIRD{up: true, bfd: header + " 192.0.2.1 eth0 Up 10:00:00.000 0.300 0.900\n0000 \n"}
		w := watch(t, bird, 3*time.Second)
		result := w.resolver.result.Load()
		result.gateways, result.input.Sessions = slices.Clone(result.gateways), slices.Clone(result.input.Sessions)
		result.gateways[0].BFD, result.input.Sessions[0].BFD = &trench.BFD{}, &trench.BFD{}
		w.resolver.result.Set(result)
		w.skipFastPolls()
		wants := func(when, want string) {
			t.Helper()
			if s := w.State().Load(); !s.Alive || s.Gateways[0].BFD != want {
				t.Errorf("%s: BFD state %q, want %q; alive %v, %v", when, s.Gateways[0].BFD, want, s.Alive, s.Err)
			}
		}
		wants("answered", "Up")
		bird.with(func() { bird.noBFD = true })
		w.after(maxHang / 2)
		wants("not answered", "Up")
		w.after(maxHang)
		wants("not answered for long", "")
		bird.with(func() { bird.noBFD = false })
		w.after(commandTimeout + pollInterval)
		wants("answered again", "Up")
		bird.with(func() { bird.bfd = header + "0000 \n" })
		w.after(pollInterval)
		wants("without the session", "")
	})
}

// late is a connection whose reads fail long after their deadline, as in a process that was not
// scheduled.
type late struct {
	net.Conn
	by time.Duration
}

func (l *late) Read([]byte) (int, error) {
	<-time.After(l.by)
	return 0, os.ErrDeadlineExceeded
}

func TestOwnStarvationIsNotSilence(t *testing.T) {
	watchIdle(t, func(t *testing.T, f *fakeBIRD, w *watched) {
		w.cancel()
		<-w.ended
		ours, theirs := net.Pipe()
		defer theirs.Close()
		go func() { _, _ = bufio.NewReader(theirs).ReadString('\n') }()
		s := w.Supervisor
		s.client = &Client{conn: ours, reader: bufio.NewReader(&late{ours, 8 * time.Second})}
		_, err := s.command(context.Background(), "show status")
		if !errors.Is(err, errStarved) || s.hung() {
			t.Fatalf("after 8 s without us: %v, hung %v", err, s.hung())
		}
		s.observeFailed(err)
		if state := s.State().Load(); !state.Alive {
			t.Errorf("state %+v", state)
		}
		if _, err := s.command(context.Background(), "show status"); err != nil || !s.unansweredSince.IsZero() {
			t.Errorf("the next command: %v", err)
		}
		s.disconnect()
	})
}

// A BIRD that never answers counts as hung although this process is starved again and again.
func TestStarvationEndsNoHang(t *testing.T) {
	watchIdle(t, func(t *testing.T, _ *fakeBIRD, w *watched) {
		w.cancel()
		<-w.ended
		s := w.Supervisor
		for commands := 0; !s.hung(); commands++ {
			if commands > int(minHang/commandTimeout) {
				t.Fatalf("not hung after %d commands without an answer", commands)
			}
			ours, theirs := net.Pipe()
			defer theirs.Close()
			go func() { _, _ = bufio.NewReader(theirs).ReadString('\n') }()
			s.client = &Client{conn: ours, reader: bufio.NewReader(&late{ours, commandTimeout + time.Second})}
			_, err := s.command(context.Background(), "show status")
			if !errors.Is(err, errStarved) {
				t.Fatal(err)
			}
			s.observeFailed(err)
			if state := s.State().Load(); state.Alive == s.hung() {
				t.Errorf("hung %v, state %+v", s.hung(), state)
			}
		}
		s.disconnect()
	})
}

func TestLogLineTriggersPoll(t *testing.T) {
	watchIdle(t, func(t *testing.T, f *fakeBIRD, w *watched) {
		w.next()
		f.with(func() { f.up = false })
		begin := time.Now()
		w.event(parseEvent("2026-11-21 05:27:17.675 <TRACE> NBR-a: State changed to stop"))
		synctest.Wait()
		if s := w.State().Load(); s.Gateways[0].Up || !time.Now().Equal(begin) {
			t.Errorf("the loss was not seen at once: %+v", s)
		}
	})
}

func TestFastPollsOnlyWhileExpecting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeBIRD{up: true}
		w := watch(t, f, 3*time.Second)
		polls := func(d time.Duration) int {
			n := 0
			f.with(func() { n = len(f.requests) })
			w.after(d)
			f.with(func() { n = len(f.requests) - n })
			return n
		}
		w.skipFastPolls()
		if n := polls(10 * time.Second); n != 10 {
			t.Errorf("%d polls in 10 idle seconds", n)
		}
		w.Expect(1, 0) // which this BIRD never exports
		if n := polls(10 * time.Second); n < 900 || n > 1100 {
			t.Errorf("%d polls in 10 s, of which 5 are fast", n)
		}
		w.Expect(0, 0)
		if n := polls(10 * time.Second); n > 10+2*fastExtra {
			t.Errorf("%d polls although the state is as expected", n)
		}
		ctx := harness.Context(t, 500*time.Millisecond)
		harness.Check(t, w.Confirm(ctx))
		w.Expect(0, 1) // of a family without a session: nothing to wait for
		harness.Check(t, w.Confirm(ctx))
		w.Expect(1, 0)
		if err := w.Confirm(ctx); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "1 IPv4") {
			t.Errorf("confirmed what is not exported: %v", err)
		}
	})
}

func TestConfirmWaitsForFreshPoll(t *testing.T) {
	watchIdle(t, func(t *testing.T, f *fakeBIRD, w *watched) {
		f.with(func() { f.until = time.Now().Add(time.Hour) })
		ctx := harness.Context(t, 500*time.Millisecond)
		if err := w.Confirm(ctx); err == nil {
			t.Error("a poll before the call confirmed something")
		}
	})
}

// A poll that began before the call does not count toward the confirmation.
func TestConfirmCountsPollsAfterCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewSupervisor(Options{})
		s.Expect(1, 0)
		poll := func() {
			<-time.After(fastInterval)
			s.state.Set(State{
				PID: 42, Alive: true, At: time.Now(),
				Gateways: []GatewayState{{Family: vip.IPv4, Up: true, Exported: 1}},
			})
			synctest.Wait()
		}
		poll()
		confirmed := make(chan error, 1)
		go func() { confirmed <- s.Confirm(t.Context()) }()
		synctest.Wait()
		for n := range fastExtra {
			poll()
			if len(confirmed) > 0 {
				t.Fatalf("confirmed by %d polls after the call", n+1)
			}
		}
		if poll(); len(confirmed) == 0 {
			t.Fatalf("not confirmed by %d polls", fastExtra+1)
		}
		harness.Check(t, <-confirmed)
	})
}

func TestConfirmWaitsForHungBIRD(t *testing.T) {
	watchIdle(t, func(t *testing.T, f *fakeBIRD, w *watched) {
		f.with(func() { f.until = time.Now().Add(time.Hour) })
		w.after(pollInterval + commandTimeout + time.Millisecond)
		// BIRD runs and holds its sessions, but the exported routes are unknown.
		if s := w.State().Load(); s.Alive || s.PID == 0 {
			t.Fatalf("state %+v", s)
		}
		ctx := harness.Context(t, 500*time.Millisecond)
		if err := w.Confirm(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a hung BIRD confirmed something: %v", err)
		}
	})
}

func TestSlowReplyHasRequestTime(t *testing.T) {
	watchIdle(t, func(t *testing.T, f *fakeBIRD, w *watched) {
		w.next()
		begin := time.Now().Add(time.Millisecond)
		// Shorter than the delay after which the loop polls again immediately.
		f.with(func() { f.until = begin.Add(starved - 100*time.Millisecond) })
		w.after(starved)
		if s := w.State().Load(); !s.At.Equal(begin) {
			t.Errorf("an answer to a question of %v ago is dated %v ago", time.Since(begin), time.Since(s.At))
		}
	})
}

// sessionsValid returns how long the gate takes a state of the sessions as valid.
func sessionsValid() time.Duration {
	now, all := time.Now(), gate.New(gate.Options{})
	all.Gateways(gate.Gateways{At: now, Up: [2]bool{true, true}})
	return all.Deadline(now).Sub(now)
}

// The longest answers that are in time, each at the worst moment: after an idle loop's longest wait,
// and after an answer that came too early to be recorded.
func TestStateIsNeverTooOld(t *testing.T) {
	for _, tt := range []struct{ after, first time.Duration }{
		{880 * time.Millisecond, 0}, {0, 1}, {0, 90 * time.Millisecond}, {0, 250 * time.Millisecond},
	} {
		watchIdle(t, func(t *testing.T, f *fakeBIRD, w *watched) {
			w.next()
			if tt.after > 0 {
				w.after(time.Millisecond + tt.after)
				w.trigger() // the next poll is at the second after the next one
				w.after(pollInterval)
				f.with(func() { f.until = time.Now().Add(pollInterval - tt.after + commandTimeout - 10*time.Millisecond) })
			} else {
				f.with(func() {
					f.until = time.Now().Add(tt.first)
					f.garble = func(text string) string {
						f.garble, f.until = nil, time.Now().Add(commandTimeout-10*time.Millisecond)
						return text
					}
				})
				w.ExportRoutes()
			}
			for range 500 {
				w.after(pollInterval / 100)
				s := w.State().Load()
				if last := min(time.Since(s.At), time.Since(s.Answered)); !s.Alive || last >= sessionsValid() {
					t.Fatalf("%+v: BIRD answers: %v, the last time %v ago", tt, s.Alive, last)
				}
			}
		})
	}
}

// BIRD answers several requests between two polls slowly, and is never silent.
func TestSlowAnswersKeepStateValid(t *testing.T) {
	watchIdle(t, func(t *testing.T, f *fakeBIRD, w *watched) {
		f.with(func() {
			f.garble = func(text string) string {
				f.until = time.Now().Add(commandTimeout - pollInterval/5) // for the next request
				return text
			}
		})
		for range 200 {
			w.ExportRoutes()
			w.after(pollInterval / 10)
			s := w.State().Load()
			if last := min(time.Since(s.At), time.Since(s.Answered)); !s.Alive || last >= sessionsValid() {
				t.Fatalf("BIRD answers: %v, the last time %v ago", s.Alive, last)
			}
		}
	})
}

// A BIRD lists what it exports to many gateways, slowly: the newest state and answer are never too
// old for the gate, which takes answers after a poll for maxRenewal of pkg/frontend at most.
func TestManySlowListsKeepStateValid(t *testing.T) {
	const maxRenewal = 6800 * time.Millisecond
	each := 700 * time.Millisecond
	for _, sessions := range []int{1, 2, 16, 17} {
		if sessions == 17 {
			each = pollInterval + 1
		}
		synctest.Test(t, func(t *testing.T) {
			f := &fakeBIRD{up: true}
			var holds []time.Duration
			var table strings.Builder
			for i := range sessions {
				holds = append(holds, 90*time.Second)
				fmt.Fprintf(&table, "1002-NBR-%c BGP --- up 05:27:00 Established\n1006-  BGP state: Established\n  Channel ipv4\n"+
					"    State: UP\n     Routes: 0 imported, 1 exported\n", 'a'+i)
			}
			w := watch(t, f, holds...)
			listed := 0
			f.with(func() {
				f.garble = func(text string) string {
					f.until = time.Now().Add(each)
					if strings.Contains(text, "1002-NBR-a") {
						return table.String() + "0000 \n"
					}
					listed++
					return text
				}
			})
			w.Expect(2, 0)
			w.after(10 * time.Second)
			for range 600 {
				w.after(100 * time.Millisecond)
				s := w.State().Load()
				at := s.At.Add(max(0, min(s.Answered.Sub(s.At), maxRenewal)))
				if !s.Alive || time.Since(at) >= sessionsValid() {
					t.Fatalf("%d sessions: alive %v, the state is %v old", sessions, s.Alive, time.Since(at))
				}
			}
			for _, gateway := range w.State().Load().Gateways {
				if gateway.exports.read.IsZero() {
					t.Errorf("%d sessions: exports to %s were not listed in %d lists", sessions, gateway.Name, listed)
				}
			}
		})
	}
}

// A BIRD of another program takes the socket after the connection ended.
func TestForeignProcessAfterConnectionEnded(t *testing.T) {
	watchIdle(t, func(t *testing.T, f *fakeBIRD, w *watched) {
		loaded := 0
		f.with(func() {
			f.configure = func() { loaded++ }
			f.pid, f.garble = 43, func(string) string { f.garble = nil; return "" } // ends the connection
		})
		w.after(commandTimeout + pollInterval)
		if s := w.State().Load(); s.Alive || !strings.Contains(fmt.Sprint(s.Err), "process 43 serves") {
			t.Errorf("the word of another process was taken: %+v", s)
		}
		w.after(minHang)
		s := w.State().Load()
		select {
		case <-w.ended:
		default:
			t.Fatalf("the silent BIRD does not count as hung: %+v", s)
		}
		if !errors.Is(w.err, errHung) || s.Alive || loaded > 0 {
			t.Errorf("the loop ended with %v, %+v, and loaded %d configurations into another BIRD", w.err, s, loaded)
		}
	})
}

func TestForeignProcessOnControlSocket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeBIRD{up: true, pid: 43}
		w := watch(t, f, 3*time.Second)
		w.after(startTimeout - time.Millisecond)
		if s := w.State().Load(); s.Alive || len(s.Gateways) != 0 {
			t.Fatalf("the word of another process was taken: %+v", s)
		}
		<-w.ended
		if w.err == nil || !strings.Contains(w.err.Error(), "BIRD did not open its control socket") {
			t.Errorf("the loop ended with %v", w.err)
		}
	})
}

func TestConfirmWithoutBIRD(t *testing.T) {
	s := NewSupervisor(Options{})
	s.Expect(3, 3)
	harness.Check(t, s.Confirm(t.Context()))
}

func TestExports(t *testing.T) {
	up := func(f vip.Family, n int) GatewayState { return GatewayState{Family: f, Up: true, Exported: n} }
	down := GatewayState{Family: vip.IPv4, Exported: 7}
	for i, tt := range []struct {
		gateways []GatewayState
		want     [len(vip.Families)]int
		ok       bool
	}{
		{nil, [...]int{1, 2}, true},
		{[]GatewayState{down}, [...]int{1, 2}, true},
		{[]GatewayState{up(vip.IPv4, 1), up(vip.IPv6, 2), down}, [...]int{1, 2}, true},
		{[]GatewayState{up(vip.IPv4, 1), up(vip.IPv4, 0)}, [...]int{1, 2}, false},
		{[]GatewayState{up(vip.IPv6, 1)}, [...]int{1, 2}, false},
		{[]GatewayState{up(vip.IPv4, 2)}, [...]int{1, 2}, false}, // not withdrawn yet
	} {
		if got := exports(tt.gateways, tt.want); got != tt.ok {
			t.Errorf("%d: %v", i, got)
		}
	}
}

func TestPollAtHoldTimerExpiry(t *testing.T) {
	now := time.Now()
	session := func(left time.Duration) map[string]Protocol {
		return map[string]Protocol{
			"a": {State: "up", BGPState: "Established", HoldTimer: left, HasHoldTimer: true},
			"b": {State: "up", BGPState: "Established", HoldTimer: time.Minute, HasHoldTimer: true},
			"c": {State: "start", BGPState: "OpenSent", HoldTimer: 0, HasHoldTimer: true},
		}
	}
	var h holdTimers
	if got := h.wait(now); got != pollInterval {
		t.Errorf("without sessions: %v", got)
	}
	h.observe(now, session(2*time.Second))
	if got := h.wait(now); got != pollInterval {
		t.Errorf("2 s left: %v", got)
	}
	h.observe(now, session(300*time.Millisecond))
	if got := h.wait(now); got != 301*time.Millisecond {
		t.Errorf("300 ms left: %v", got)
	}
	h.observe(now, session(0))
	if got := h.wait(now); got != fastInterval {
		t.Errorf("over: %v", got)
	}
	h.observe(now.Add(fastDuration), session(0))
	if got := h.wait(now.Add(fastDuration + time.Second)); got != pollInterval {
		t.Errorf("over for long: %v", got)
	}
}
