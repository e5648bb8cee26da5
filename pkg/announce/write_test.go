package announce

import (
	"maps"
	"net"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/test/harness"
)

// deadlineConn keeps the deadline of writes, and waits longer: the peer may be slow.
type deadlineConn struct {
	*net.TCPConn
	write time.Time
}

func (c *deadlineConn) SetWriteDeadline(t time.Time) error {
	if c.write = t; !t.IsZero() {
		t = t.Add(waitLimit)
	}
	return c.TCPConn.SetWriteDeadline(t)
}

// writerOf returns an announcer with an announced session that no goroutine serves, and its peer.
// The socket buffer holds at least size bytes while the peer does not read.
func writerOf(t *testing.T, size int) (*Announcer, *session, *peer) {
	t.Helper()
	l, addr := listen(t)
	conn, err := net.Dial("tcp4", addr.String())
	harness.Must(t, err)
	t.Cleanup(func() { conn.Close() })
	harness.Must(t, conn.(*net.TCPConn).SetWriteBuffer(size))
	p := accept(t, l)
	harness.Must(t, p.conn.(*net.TCPConn).SetReadBuffer(size))
	a := New(testOptions())
	s := newSession(a, testEncoder(t), &deadlineConn{TCPConn: conn.(*net.TCPConn)})
	s.phase = established
	harness.Must(t, s.announceAll())
	return a, s, p
}

func TestPostWritesAtOnce(t *testing.T) {
	a, _, p := writerOf(t, 1<<20)
	change := advertisements{}
	for i := range 3000 {
		change[numbered(i)] = Announced
	}
	a.Post(Batch{Changes: change.list(), Revision: 1})
	if s := a.State().Load(); s.Written != 1 || s.Announced4 != 1500 || s.Announced6 != 1500 {
		t.Errorf("got %+v", s)
	}
	for len(p.table) < len(change) {
		p.expect(bgp.BGP_MSG_UPDATE)
	}
	p.expectUpdates(0, change)
	a.Post(Batch{Changes: []Change{{numbered(0), Route{Advertisement: Withdrawn}}}, Revision: 2})
	p.expect(bgp.BGP_MSG_UPDATE)
	change[numbered(0)] = Withdrawn
	p.expectUpdates(0, change)
	a.Heartbeat(time.Now())
	if len(a.wake) != 0 {
		t.Error("the session's goroutine was woken")
	}
}

// The session's goroutine writes the bytes that do not fit the socket, in order: the rest of the
// UPDATE, its own message, and the changes posted during the write.
func TestRestOfPostIsWritten(t *testing.T) {
	a, s, p := writerOf(t, 16<<10)
	all, want := advertisements{}, advertisements{}
	for i := range 20_000 {
		all[numbered(i)], want[numbered(i)] = Announced, Announced
	}
	a.Post(Batch{Changes: all.list(), Revision: 1})
	if st := a.State().Load(); !s.owned || len(s.rest) == 0 || st.Written != 0 {
		t.Fatalf("%d bytes are left, owned %v, state %+v", len(s.rest), s.owned, st)
	}
	if len(a.wake) != 1 {
		t.Error("the session's goroutine was not woken")
	}
	for i := range 10 {
		a.Post(Batch{Changes: []Change{{numbered(i), Route{Advertisement: Withdrawn}}}, Revision: uint64(2 + i)})
		want[numbered(i)] = Withdrawn
	}
	sent := make(chan error, 1)
	go func() { sent <- s.send(s.encoder.keepalive) }()
	for len(p.table) < len(all) {
		p.expect(bgp.BGP_MSG_UPDATE)
	}
	p.expectUpdates(0, all)
	p.expect(bgp.BGP_MSG_KEEPALIVE)
	p.expectUpdates(2, want)
	harness.Must(t, <-sent)
	if st := a.State().Load(); s.owned || st.Written != 11 || st.Announced4 != 10_000-5 {
		t.Errorf("owned %v, state %+v", s.owned, st)
	}
	if d := s.conn.(*deadlineConn).write; !d.IsZero() {
		t.Errorf("the writes of Post have the deadline %v", d)
	}
	// After yield, Post writes to the socket.
	a.Post(Batch{Changes: []Change{{numbered(0), Route{Advertisement: Depreferred}}}, Revision: 12})
	want[numbered(0)] = Depreferred
	p.expectUpdates(1, want)
}

func TestStopWritesRestBeforeCease(t *testing.T) {
	a, s, p := writerOf(t, 16<<10)
	all := advertisements{}
	for i := range 20_000 {
		all[numbered(i)] = Announced
	}
	a.Post(Batch{Changes: all.list(), Revision: 1})
	a.Post(Batch{Changes: []Change{{numbered(0), Route{Advertisement: Withdrawn}}}, Revision: 2})
	stopped := make(chan error, 1)
	go func() { stopped <- s.stop() }()
	p.expectNotification(bgp.BGP_ERROR_CEASE, bgp.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN)
	harness.Must(t, <-stopped)
	all[numbered(0)] = Withdrawn
	if !maps.Equal(p.table, all) {
		t.Errorf("the peer has %d of %d VIPs, the first %v", len(p.table), len(all), p.table[numbered(0)])
	}
	a.Post(Batch{Changes: []Change{{numbered(1), Route{Advertisement: Withdrawn}}}, Revision: 3})
	if st := a.State().Load(); st.Written != 2 {
		t.Errorf("changes after the Cease: %+v", st)
	}
}

func TestPostAfterReset(t *testing.T) {
	a, s, p := writerOf(t, 128<<10)
	harness.Must(t, p.conn.(*net.TCPConn).SetLinger(0))
	p.conn.Close()
	rev := uint64(0)
	for s.failure == nil { // until the reset has arrived
		rev++
		a.Post(Batch{Changes: []Change{{vipA, Route{Advertisement: Advertisement(rev % 3)}}}, Revision: rev})
	}
	if a.State().Load().Written == rev {
		t.Error("a failed write counts as written")
	}
	if err := s.send(nil); err == nil || !s.failed {
		t.Errorf("a failed write of Post ended with %v, failed %v", err, s.failed)
	}
	a.Post(Batch{Changes: []Change{{vipA, Route{Advertisement: Announced}}}, Revision: rev + 1})
	if a.State().Load().Written == rev+1 {
		t.Error("written to a session that has failed")
	}
}

// VIPs that leave the configuration are withdrawn once and never posted again.
func TestWithdrawnVIPsAreRemoved(t *testing.T) {
	for name, session := range map[string]bool{"session": true, "no session": false} {
		t.Run(name, func(t *testing.T) {
			table := newTable()
			var c changes
			post := func(revision, from, to int, as Advertisement) {
				b := Batch{Revision: uint64(revision)}
				for i := from; i < to; i++ {
					b.Changes = append(b.Changes, Change{numbered(i), Route{Advertisement: as}})
				}
				table.post(b, session)
				c.reset()
				table.takeChanges(&c)
			}
			for i := range 500 {
				post(i, 100*i, 100*(i+1), Announced)
				if i > 0 {
					post(i, 100*(i-1), 100*i, Withdrawn)
				}
				if n := len(table.adverts); n > minWithdrawn+300 {
					t.Fatalf("%d VIPs are stored", n)
				}
			}
			for i := 100 * 499; i < 100*500; i++ {
				if table.adverts[numbered(i)].to.Advertisement != Announced {
					t.Fatalf("%s was removed", numbered(i))
				}
			}
			// Withdrawn VIPs stay in the table up to the limit.
			for i := range 5 {
				post(i, 0, 3000, Announced)
				post(i, 0, 3000, Withdrawn)
			}
			before := table.adverts[numbered(0)]
			post(0, 0, 3000, Announced)
			if table.adverts[numbered(0)] != before {
				t.Error("a VIP that came again was stored again")
			}
		})
	}
}

func TestPostAllocatesNothingPerVIP(t *testing.T) {
	a, s, p := writerOf(t, 4<<20)
	go func() { // until the connection ends
		for b := make([]byte, 1<<20); ; {
			if _, err := p.conn.Read(b); err != nil {
				return
			}
		}
	}()
	batch := Batch{Changes: toAll(1000, Announced)}
	flip := func() {
		batch.Revision++
		for i := range batch.Changes {
			batch.Changes[i].Advertisement = Announced - batch.Changes[i].Advertisement
		}
		a.Post(batch)
	}
	flip()
	// The batch fits the socket buffer: the reading goroutine may not be scheduled before the write.
	if n := testing.AllocsPerRun(10, flip); n > 3 {
		t.Errorf("%v allocations for %d changes", n, len(batch.Changes))
	}
	if st := a.State().Load(); s.owned || st.Written != batch.Revision {
		t.Errorf("revision %d of %d was written", st.Written, batch.Revision)
	}
}
