package announce

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/tick"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

var (
	vipA = vip.Require("20.0.0.1/32")
	vipB = vip.Require("20.0.0.2/32")
	vipC = vip.Require("2000::1/128")
)

type advertisements map[vip.VIP]Advertisement

// list returns the advertisements as changes, in random order.
func (as advertisements) list() []Change {
	changes := make([]Change, 0, len(as))
	for v, a := range as {
		changes = append(changes, Change{v, Route{Advertisement: a}})
	}
	return changes
}

// inBubble runs a test in simulated time with an announcer whose peers are sent to the channel.
func inBubble(t *testing.T, test func(t *testing.T, a *Announcer, peers <-chan *peer)) {
	synctest.Test(t, func(t *testing.T) {
		a := New(testOptions())
		test(t, a, pipePeers(t, a))
	})
}

func TestHandshakeThenTable(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		var causes []time.Time
		a.options.OnWritten = func(cause, _ time.Time, _ uint64) { causes = append(causes, cause) }
		a.Post(Batch{
			Changes: advertisements{vipA: Announced, vipB: Withdrawn, vipC: Depreferred}.list(), Revision: 7,
			Cause: time.Now(),
		})
		run(t, a)
		p := <-peers
		p.establish(3)
		p.expectUpdates(2, advertisements{vipA: Announced, vipC: Depreferred})
		s := awaitState(t, a, "written", func(s State) bool { return s.Written == 7 })
		if !s.Established || s.Announced4 != 1 || s.Announced6 != 1 || s.Sessions != 1 || s.LastError != nil {
			t.Errorf("got %+v", s)
		}
		if len(causes) != 1 || !causes[0].IsZero() {
			t.Errorf("causes %v: a full announcement has none", causes)
		}
	})
}

func TestOneDecisionIsOneWrite(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		run(t, a)
		p := <-peers
		p.establish(3)
		awaitState(t, a, "established", func(s State) bool { return s.Established })
		before := p.writes.Load()
		change := advertisements{}
		want := advertisements{}
		for i := range 6000 { // more than one UPDATE of each family
			change[numbered(i)] = Advertisement(i / 2 % 3)
			if i/2%3 != 0 {
				want[numbered(i)] = Advertisement(i / 2 % 3)
			}
		}
		a.Post(Batch{Changes: change.list(), Revision: 1})
		for len(p.table) < len(want) {
			p.expect(bgp.BGP_MSG_UPDATE)
		}
		p.expectUpdates(0, want)
		if n := p.writes.Load() - before; n != 1 {
			t.Errorf("%d writes", n)
		}
	})
}

func TestOnlyChangesAreSent(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		a.Post(Batch{Changes: advertisements{vipA: Announced, vipC: Announced}.list(), Revision: 1})
		run(t, a)
		p := <-peers
		p.establish(3)
		p.expectUpdates(2, advertisements{vipA: Announced, vipC: Announced})
		// No change: nothing is sent, but the revision is reported as written.
		a.Post(Batch{Changes: advertisements{vipA: Announced, vipB: Withdrawn}.list(), Revision: 2})
		awaitState(t, a, "revision 2", func(s State) bool { return s.Written == 2 })
		p.noUpdates(4500 * time.Millisecond)
		a.Post(Batch{Changes: advertisements{vipA: Announced, vipC: Withdrawn}.list(), Revision: 3})
		p.expectUpdates(1, advertisements{vipA: Announced, vipC: Withdrawn})
		s := awaitState(t, a, "revision 3", func(s State) bool { return s.Written == 3 })
		if s.Announced4 != 1 || s.Announced6 != 0 {
			t.Errorf("counts %d and %d", s.Announced4, s.Announced6)
		}
	})
}

func TestPostsMergeForSlowPeer(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		var causes []time.Time
		a.options.OnWritten = func(cause, _ time.Time, _ uint64) { causes = append(causes, cause) }
		run(t, a)
		p := <-peers
		p.establish(3)
		awaitState(t, a, "established", func(s State) bool { return s.Established })
		start := time.Now()
		a.Post(Batch{Changes: advertisements{vipA: Announced}.list(), Revision: 1, Cause: start})
		synctest.Wait() // the write of revision 1 now waits for the peer to read
		for i := range 1000 {
			a.Post(Batch{
				Changes: advertisements{vipB: Announced, vipC: Advertisement(1 + i%2)}.list(), Revision: uint64(2 + i),
				Cause: start.Add(time.Duration(1+i) * time.Millisecond),
			})
		}
		a.Post(Batch{Changes: advertisements{vipB: Withdrawn, vipA: Withdrawn}.list(), Revision: 2000})
		p.expectUpdates(1, advertisements{vipA: Announced})
		p.expectUpdates(2, advertisements{vipA: Withdrawn, vipC: Announced})
		awaitState(t, a, "the last revision", func(s State) bool { return s.Written == 2000 })
		if len(causes) != 2 || !causes[0].Equal(start) || !causes[1].Equal(start.Add(time.Millisecond)) {
			t.Errorf("causes %v: want that of the first, then the oldest of the merged", causes)
		}
	})
}

func TestKeepaliveNeedsFreshHeartbeat(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		runWithoutHeartbeats(t, a)
		stopBeats := sendHeartbeats(a)
		t.Cleanup(stopBeats)
		p := <-peers
		p.establish(30)
		awaitState(t, a, "established", func(s State) bool { return s.Established })
		start := time.Now()
		p.expect(bgp.BGP_MSG_KEEPALIVE)
		if d := time.Since(start); d != time.Second { // the local hold time of 3 s is the smaller one
			t.Errorf("KEEPALIVE after %s, want a third of the hold time", d)
		}
		stopBeats()
		stopped := time.Now()
		p.send(bgp.NewBGPKeepAliveMessage())
		for {
			p.conn.SetReadDeadline(stopped.Add(2500 * time.Millisecond))
			if _, err := p.read(); err != nil {
				break
			}
			if d := time.Since(stopped); d > MaxHeartbeatAge {
				t.Fatalf("KEEPALIVE %s after the last beat", d)
			}
		}
		// The heartbeat itself triggers the overdue messages.
		a.Heartbeat(time.Now())
		start = time.Now()
		p.expect(bgp.BGP_MSG_KEEPALIVE)
		if d := time.Since(start); d != 0 {
			t.Errorf("the overdue KEEPALIVE took %s after the beat", d)
		}
		p.conn.Close()
	})
}

func TestOldHeartbeatIsIgnored(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		runWithoutHeartbeats(t, a)
		a.Heartbeat(time.Now().Add(-MaxHeartbeatAge))
		synctest.Wait()
		if s := a.State().Load(); s.Attempts != 0 {
			t.Fatalf("connected for a beat that was too old: %+v", s)
		}
	})
}

func TestHungGateIsNotAnnouncedAgain(t *testing.T) {
	tests := map[string]func(p *peer, gateAges func()){
		"hung before the peer's OPEN": func(p *peer, gateAges func()) {
			p.expect(bgp.BGP_MSG_OPEN)
			gateAges()
			p.send(openMessage(p.t, 8103, 3, bgp.RF_IPv4_UC, bgp.RF_IPv6_UC))
			p.send(bgp.NewBGPKeepAliveMessage())
		},
		"hung before the peer's KEEPALIVE": func(p *peer, gateAges func()) {
			p.open(3)
			p.expect(bgp.BGP_MSG_KEEPALIVE)
			gateAges()
			p.send(bgp.NewBGPKeepAliveMessage())
		},
	}
	for name, handshake := range tests {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
				a.Post(Batch{Changes: advertisements{vipA: Announced}.list(), Revision: 1})
				runWithoutHeartbeats(t, a)
				a.Heartbeat(time.Now())
				p := <-peers
				handshake(p, func() { <-time.After(MaxHeartbeatAge) })
				harness.Must(t, p.conn.SetReadDeadline(time.Now().Add(2*time.Second)))
				if m, err := p.read(); err == nil {
					t.Fatalf("a hung gate is announced: %+v", m.Body)
				}
				if s := a.State().Load(); s.Sessions != 0 {
					t.Errorf("a session that was not announced counts as established: %+v", s)
				}
				a.Heartbeat(time.Now())
				p.expect(bgp.BGP_MSG_KEEPALIVE)
				p.expectUpdates(1, advertisements{vipA: Announced})
			})
		})
	}
}

func TestNoConnectionWithoutHeartbeat(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		runWithoutHeartbeats(t, a)
		a.Heartbeat(time.Now())
		p := <-peers
		p.establish(3)
		<-time.After(MaxHeartbeatAge)
		p.conn.Close()
		select {
		case <-peers:
			t.Fatal("connected for a hung gate")
		case <-time.After(time.Minute):
		}
		a.Heartbeat(time.Now())
		<-peers
	})
}

func TestPostDuringHandshake(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		run(t, a)
		p := <-peers
		p.open(3)
		a.Post(Batch{Changes: advertisements{vipA: Announced}.list(), Revision: 1})
		synctest.Wait()
		p.expect(bgp.BGP_MSG_KEEPALIVE)
		a.Post(Batch{Changes: advertisements{vipB: Announced}.list(), Revision: 2})
		synctest.Wait()
		p.send(bgp.NewBGPKeepAliveMessage())
		p.expectUpdates(1, advertisements{vipA: Announced, vipB: Announced})
		awaitState(t, a, "revision 2", func(s State) bool { return s.Written == 2 })
	})
}

func TestReconnectAnnouncesTable(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		a.Post(Batch{Changes: advertisements{vipA: Announced, vipB: Announced}.list(), Revision: 1})
		run(t, a)
		p := <-peers
		p.establish(3)
		p.expectUpdates(1, advertisements{vipA: Announced, vipB: Announced})
		p.send(bgp.NewBGPNotificationMessage(bgp.BGP_ERROR_CEASE, bgp.BGP_ERROR_SUB_ADMINISTRATIVE_RESET, nil))
		s := awaitState(t, a, "down", func(s State) bool { return !s.Established && s.Sessions == 1 })
		reset := bgp.NewNotificationErrorCode(6, 4).String()
		if !strings.HasSuffix(s.LastError.Error(), reset) || s.Written != 0 || s.Announced4 != 0 {
			t.Errorf("got %+v", s)
		}
		a.mu.Lock()
		if a.session != nil {
			t.Error("Post still writes to the session")
		}
		a.mu.Unlock()
		a.Post(Batch{Changes: advertisements{vipA: Withdrawn, vipC: Announced}.list(), Revision: 2})
		p = <-peers
		p.establish(3)
		p.expectUpdates(2, advertisements{vipB: Announced, vipC: Announced})
		awaitState(t, a, "revision 2", func(s State) bool { return s.Written == 2 && s.Sessions == 2 })
	})
}

func TestSilentPeerHoldTime(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		run(t, a)
		p := <-peers
		p.establish(3)
		awaitState(t, a, "established", func(s State) bool { return s.Established })
		start := time.Now()
		p.expectEnd(bgp.BGP_ERROR_HOLD_TIMER_EXPIRED, 0)
		if d := time.Since(start); d != 3*time.Second {
			t.Errorf("given up after %s", d)
		}
		awaitState(t, a, "down", func(s State) bool {
			return s.LastError != nil && strings.Contains(s.LastError.Error(), "silent")
		})
	})
}

func TestPeerMessagesResetHoldTimer(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		run(t, a)
		p := <-peers
		p.establish(3)
		awaitState(t, a, "established", func(s State) bool { return s.Established })
		for i := range 20 {
			for start := time.Now(); time.Since(start) < 2900*time.Millisecond; {
				p.conn.SetReadDeadline(start.Add(2900 * time.Millisecond))
				if m, err := p.read(); err == nil && m.Header.Type != bgp.BGP_MSG_KEEPALIVE {
					t.Fatalf("got %+v", m.Body)
				}
			}
			if i%2 == 0 {
				p.send(bgp.NewBGPKeepAliveMessage())
			} else {
				p.send(bgp.NewEndOfRib(bgp.RF_IPv6_UC))
			}
		}
		if s := a.State().Load(); s.Sessions != 1 || !s.Established {
			t.Errorf("got %+v", s)
		}
	})
}

func TestHoldTimeAfterMessages(t *testing.T) {
	for _, apart := range []int{100, 600, 900, 1000, 1950} {
		t.Run(fmt.Sprintf("%d ms", apart), func(t *testing.T) {
			inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
				<-time.After(300 * time.Millisecond)
				run(t, a)
				p := <-peers
				p.establish(3)
				go io.Copy(io.Discard, p.conn)
				for range 5 {
					<-time.After(time.Duration(apart) * time.Millisecond)
					p.send(bgp.NewBGPKeepAliveMessage())
				}
				start := time.Now()
				awaitState(t, a, "the end", func(s State) bool { return s.Sessions == 1 && !s.Established })
				if d := time.Since(start); d != 3*time.Second {
					t.Errorf("the session ended %s after the last message", d)
				}
			})
		})
	}
}

func TestKeepalivesAtCommonInstants(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		<-time.After(300 * time.Millisecond)
		a.Heartbeat(time.Now())
		runWithoutHeartbeats(t, a)
		p := <-peers
		p.establish(3)
		// The interval equals that of an idle controller: a KEEPALIVE waits for its heartbeat.
		done := make(chan struct{})
		defer close(done)
		go func() {
			for {
				select {
				case <-time.After(tick.Until(time.Now(), time.Second)):
					a.Heartbeat(time.Now())
				case <-done:
					return
				}
			}
		}()
		for i := range 5 {
			p.send(bgp.NewBGPKeepAliveMessage())
			p.expect(bgp.BGP_MSG_KEEPALIVE)
			if now := time.Now(); now.UnixNano()%int64(time.Second) != 0 {
				t.Errorf("KEEPALIVE %d at %s", i, now)
			}
		}
	})
}

func TestStarvedHoldTimerIsExtended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer ours.Close()
		defer theirs.Close()
		s := newSession(New(testOptions()), testEncoder(t), ours)
		s.phase, s.hold = established, 3*time.Second
		s.holdTimer = time.NewTimer(time.Hour)
		s.holdDue = time.Now().Add(-2 * starvedAfter)
		if err := s.expire(); err != nil {
			t.Fatalf("a timer that fired late ended the session: %v", err)
		}
		if start := time.Now(); (<-s.holdTimer.C).Sub(start) != starvedGrace {
			t.Errorf("the grace was %s", time.Since(start))
		}
		// The waiting message resets the hold timer and allows an extension again.
		harness.Must(t, s.receive(received{message: bgp.NewBGPKeepAliveMessage(), at: time.Now()}))
		<-time.After(s.hold + 2*starvedAfter)
		if err := s.expire(); err != nil {
			t.Fatalf("starved for the second time: %v", err)
		}
		var p *bgp.MessageError
		if err := s.expire(); !errors.As(err, &p) || p.TypeCode != bgp.BGP_ERROR_HOLD_TIMER_EXPIRED {
			t.Fatalf("got %v at the second time", err)
		}
	})
}

func TestSlowReaderTimeout(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		run(t, a)
		p := <-peers
		p.establish(30)
		awaitState(t, a, "established", func(s State) bool { return s.Established })
		start := time.Now()
		a.Post(Batch{Changes: advertisements{vipA: Announced}.list(), Revision: 1})
		s := awaitState(t, a, "down", func(s State) bool { return !s.Established && s.Sessions == 1 })
		if d := time.Since(start); d != writeTimeout {
			t.Errorf("given up after %s", d)
		}
		if s.Written != 0 || !strings.Contains(s.LastError.Error(), "failed to write") {
			t.Errorf("got %+v", s)
		}
		p = <-peers
		p.establish(30)
		p.expectUpdates(1, advertisements{vipA: Announced})
	})
}

func TestProtocolErrorsAreNotified(t *testing.T) {
	header := bytes.Repeat([]byte{0xff}, 16)
	open := func(t *testing.T) []byte {
		b, err := openMessage(t, 8103, 3, bgp.RF_IPv4_UC, bgp.RF_IPv6_UC).Serialize()
		harness.Must(t, err)
		return b
	}
	tests := []struct {
		name          string
		established   bool
		send          func(*testing.T) []byte
		code, subcode uint8
	}{
		{
			"garbage instead of OPEN", false, func(*testing.T) []byte { return []byte("HTTP/1.1 400 Bad Request\r\n\r\n") }, 1,
			1,
		},
		{"garbage later", true, func(*testing.T) []byte { return bytes.Repeat([]byte{0}, 5000) }, 1, 1},
		{"length below the header", true, func(*testing.T) []byte {
			return append(header[:16:16], 0, 18, bgp.BGP_MSG_KEEPALIVE)
		}, 1, 2},
		{
			"length over 4096", true, func(*testing.T) []byte { return append(header[:16:16], 0x10, 1, bgp.BGP_MSG_UPDATE) },
			1, 2,
		},
		{"KEEPALIVE with a body", true, func(*testing.T) []byte { return newMessage(bgp.BGP_MSG_KEEPALIVE, 1) }, 1, 2},
		{"unknown type", true, func(*testing.T) []byte { return newMessage(77) }, 1, 3},
		{"OPEN cut short", false, func(t *testing.T) []byte { b := open(t); b[17]--; b[28]--; return b[:len(b)-1] }, 1, 2},
		{"OPEN of another AS", false, func(t *testing.T) []byte {
			b, err := openMessage(t, 8104, 3, bgp.RF_IPv4_UC, bgp.RF_IPv6_UC).Serialize()
			harness.Must(t, err)
			return b
		}, 2, 2},
		{"KEEPALIVE before OPEN", false, func(*testing.T) []byte { return newMessage(bgp.BGP_MSG_KEEPALIVE) }, 5, 1},
		{"UPDATE before OPEN", false, func(*testing.T) []byte { return newMessage(bgp.BGP_MSG_UPDATE, 0, 0, 0, 0) }, 5, 1},
		{"OPEN twice", false, func(t *testing.T) []byte { return append(open(t), open(t)...) }, 5, 2},
		{"OPEN when established", true, open, 5, 3},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
				run(t, a)
				p := <-peers
				if tt.established {
					p.establish(3)
					awaitState(t, a, "established", func(s State) bool { return s.Established })
				} else {
					p.expect(bgp.BGP_MSG_OPEN)
				}
				// In the background: the announcer may close before it has read everything.
				sent := make(chan struct{})
				go func() {
					defer close(sent)
					p.conn.Write(tt.send(t))
				}()
				p.expectEnd(tt.code, tt.subcode)
				<-sent
				awaitState(t, a, "an error", func(s State) bool { return !s.Established && s.LastError != nil })
				// The next connection is served.
				p = <-peers
				p.establish(3)
				awaitState(t, a, "established", func(s State) bool { return s.Established })
			})
		})
	}
}

func TestRetryBackoff(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		run(t, a)
		want := []time.Duration{20, 40, 80, 160, 250, 250, 250}
		p := <-peers
		for i, w := range want {
			p.conn.Close()
			start := time.Now()
			p = <-peers
			if d := time.Since(start); d != w*time.Millisecond {
				t.Errorf("retry %d after %s, want %d ms", i, d, w)
			}
		}
		p.establish(30)
		awaitState(t, a, "established", func(s State) bool { return s.Established && s.Attempts == 8 && s.Sessions == 1 })
		for range 2 { // a second between them makes the session stable
			p.expect(bgp.BGP_MSG_KEEPALIVE)
		}
		p.conn.Close()
		start := time.Now()
		<-peers
		if d := time.Since(start); d != minBackoff {
			t.Errorf("retry after a good session took %s", d)
		}
	})
}

func TestStopFlushesThenSendsCease(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		a.Post(Batch{Changes: advertisements{vipA: Announced, vipC: Announced}.list(), Revision: 1})
		stop := run(t, a)
		p := <-peers
		p.establish(3)
		p.expectUpdates(2, advertisements{vipA: Announced, vipC: Announced})
		awaitState(t, a, "revision 1", func(s State) bool { return s.Written == 1 })
		before := p.writes.Load()
		a.Post(Batch{Changes: advertisements{vipA: Withdrawn, vipC: Withdrawn}.list(), Revision: 2})
		go stop()
		p.expectUpdates(2, advertisements{vipA: Withdrawn, vipC: Withdrawn})
		p.expectEnd(bgp.BGP_ERROR_CEASE, bgp.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN)
		stop()
		if n := p.writes.Load() - before; n > 2 {
			t.Errorf("%d writes", n)
		}
		if s := a.State().Load(); s.Established || s.Announced4 != 0 || s.LastError != nil {
			t.Errorf("got %+v", s)
		}
	})
}

func TestStopFlushError(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		stop := run(t, a)
		p := <-peers
		p.establish(3)
		awaitState(t, a, "established", func(s State) bool { return s.Established })
		stop() // the peer does not read
		s := a.State().Load()
		if s.Established || s.LastError == nil || !strings.Contains(s.LastError.Error(), "failed to write") {
			t.Errorf("got %+v", s)
		}
	})
}

func TestStopInEveryState(t *testing.T) {
	tests := map[string]func(t *testing.T, peers <-chan *peer){
		"before a connection": func(*testing.T, <-chan *peer) {},
		"before our OPEN was read": func(_ *testing.T, peers <-chan *peer) {
			<-peers
		},
		"before the peer's OPEN": func(_ *testing.T, peers <-chan *peer) {
			p := <-peers
			p.expect(bgp.BGP_MSG_OPEN)
		},
		"before the peer's KEEPALIVE": func(_ *testing.T, peers <-chan *peer) {
			p := <-peers
			p.open(3)
			p.expect(bgp.BGP_MSG_KEEPALIVE)
		},
		"with a peer that does not read": func(_ *testing.T, peers <-chan *peer) {
			p := <-peers
			p.establish(3)
		},
		"while waiting to retry": func(_ *testing.T, peers <-chan *peer) {
			p := <-peers
			p.conn.Close()
		},
	}
	for name, reach := range tests {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
				stop := run(t, a)
				reach(t, peers)
				synctest.Wait()
				start := time.Now()
				stop()
				if d := time.Since(start); d > 2*writeTimeout {
					t.Errorf("stopping took %s", d)
				}
			})
		})
	}
}

func TestRouteRefresh(t *testing.T) {
	inBubble(t, func(t *testing.T, a *Announcer, peers <-chan *peer) {
		a.Post(Batch{Changes: advertisements{vipA: Announced, vipC: Depreferred}.list(), Revision: 1})
		run(t, a)
		p := <-peers
		p.establish(3)
		p.expectUpdates(2, advertisements{vipA: Announced, vipC: Depreferred})
		clear(p.table)
		p.send(bgp.NewBGPRouteRefreshMessage(bgp.AFI_IP6, 0, bgp.SAFI_UNICAST))
		p.expectUpdates(1, advertisements{vipC: Depreferred})
		p.send(bgp.NewBGPRouteRefreshMessage(bgp.AFI_L2VPN, 0, bgp.SAFI_EVPN))
		p.noUpdates(4500 * time.Millisecond)
	})
}

func TestInvalidOptions(t *testing.T) {
	tests := map[string]struct {
		change func(*Options)
		want   string
	}{
		"no peer":        {func(o *Options) { o.Peer = Options{}.Peer }, "is not an address of the family"},
		"our own AS":     {func(o *Options) { o.PeerAS = LocalAS }, "peer AS"},
		"hold time 1s":   {func(o *Options) { o.HoldTime = time.Second }, "hold time"},
		"hold time 3.5s": {func(o *Options) { o.HoldTime = 3500 * time.Millisecond }, "hold time"},
		"long password":  {func(o *Options) { o.Password = strings.Repeat("x", 81) }, "at most 80"},
		"zero local":     {func(o *Options) { o.Local = netip.IPv4Unspecified() }, "local address"},
		"IPv6 local":     {func(o *Options) { o.Local = vipC.Prefix().Addr() }, "of the family of"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			o := testOptions()
			tt.change(&o)
			err := New(o).Run(t.Context())
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "xxx") {
				t.Fatalf("got %v, want %q", err, tt.want)
			}
		})
	}
}
