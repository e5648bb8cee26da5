package journal

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// serve serves the events of a journal.
func serve(t *testing.T) (*Journal, adminv1.EventServiceClient) {
	t.Helper()
	f := newFixture(t, slog.LevelError)
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	adminv1.RegisterEventServiceServer(server, f.Journal)
	listener := bufconn.Listen(64 << 10)
	harness.Serve(t, server, listener)
	conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, conn.Close()) })
	return f.Journal, adminv1.NewEventServiceClient(conn)
}

// record records a change of one VIP.
func record(j *Journal, v vip.VIP) {
	changes := j.Begin(1)
	changes.Add(v, Transition{From: "announced", To: "withdrawn"}, "")
	j.Record(time.Now(), readiness.Position{}, changes)
}

type eventStream struct {
	t *testing.T
	grpc.ServerStreamingClient[adminv1.WatchEventsResponse]
	instance       string
	upTo, lost     uint64
	first, numbers []uint64
}

func watchEvents(t *testing.T, c adminv1.EventServiceClient, r *adminv1.WatchEventsRequest) *eventStream {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	s, err := c.WatchEvents(ctx, r)
	harness.Must(t, err)
	stream := &eventStream{t: t, ServerStreamingClient: s}
	stream.next()
	stream.first = slices.Clone(stream.numbers)
	return stream
}

// next takes a message.
func (s *eventStream) next() {
	s.t.Helper()
	m, err := s.Recv()
	harness.Must(s.t, err)
	s.instance, s.upTo, s.lost = m.GetInstanceId(), m.GetUpTo(), s.lost+m.GetLost()
	if len(m.GetEvents()) > maxEventsPerMessage {
		s.t.Errorf("a message has %d events", len(m.GetEvents()))
	}
	for _, e := range m.GetEvents() {
		s.numbers = append(s.numbers, e.GetSequence())
	}
}

// until takes messages until the event with that number arrives.
func (s *eventStream) until(number uint64) {
	s.t.Helper()
	for s.upTo < number {
		s.next()
	}
}

func TestWatchersReceiveEachEventOnce(t *testing.T) {
	j, c := serve(t)
	const before, after = 600, 400
	for range before {
		j.Note("x")
	}
	s := watchEvents(t, c, &adminv1.WatchEventsRequest{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range after {
			j.Note("y")
		}
	}()
	s.until(before + after)
	<-done
	if s.instance != "this-one" || s.lost != 0 || len(s.numbers) != before+after {
		t.Fatalf("%d events of %s, %d lost", len(s.numbers), s.instance, s.lost)
	}
	for i, n := range s.numbers {
		if n != uint64(i+1) {
			t.Fatalf("event %d came at place %d", n, i+1)
		}
	}
}

func TestWatchersResume(t *testing.T) {
	j, c := serve(t)
	if s := watchEvents(t, c, &adminv1.WatchEventsRequest{}); len(s.first) != 0 {
		t.Errorf("%v though nothing happened", s.first)
	}
	for range maxEvents + 50 {
		j.Note("x")
	}
	last, vipA := uint64(maxEvents+50), numbered(2)
	record(j, vipA)
	j.Note("z")
	for _, tt := range []struct {
		name       string
		request    *adminv1.WatchEventsRequest
		from, lost uint64
		count      int
	}{
		{"new", &adminv1.WatchEventsRequest{}, 53, 0, maxEventsPerMessage},
		{"the newest", &adminv1.WatchEventsRequest{Limit: 3}, last, 0, 3},
		{"continues", &adminv1.WatchEventsRequest{InstanceId: "this-one", After: last}, last + 1, 0, 2},
		{"nothing new", &adminv1.WatchEventsRequest{InstanceId: "this-one", After: last + 2}, 0, 0, 0},
		{
			"away for long", &adminv1.WatchEventsRequest{InstanceId: "this-one", After: 10}, 53, 42,
			maxEventsPerMessage,
		},
		{
			"of another frontend", &adminv1.WatchEventsRequest{InstanceId: "other", After: last}, 53, 0,
			maxEventsPerMessage,
		},
		{
			"a number that never was", &adminv1.WatchEventsRequest{InstanceId: "this-one", After: last + 1000}, 0, 0,
			0,
		},
		{"one VIP", &adminv1.WatchEventsRequest{Vip: vipA.String()}, last + 1, 0, 1},
		{"one VIP, the newest", &adminv1.WatchEventsRequest{Vip: vipA.String(), Limit: 1}, last + 1, 0, 1},
		{"another VIP", &adminv1.WatchEventsRequest{Vip: numbered(1).String()}, 0, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := watchEvents(t, c, tt.request)
			if len(s.first) != tt.count || s.lost != tt.lost || (tt.count > 0 && s.first[0] != tt.from) {
				t.Errorf("got %d events %v, %d lost; want %d from %d, %d lost", len(s.first), s.first, s.lost,
					tt.count, tt.from, tt.lost)
			}
		})
	}
	// Events after a number that was never assigned are not lost.
	s := watchEvents(t, c, &adminv1.WatchEventsRequest{InstanceId: "this-one", After: last + 1000})
	j.Note("later")
	if m, err := s.Recv(); err != nil || len(m.GetEvents()) != 1 || m.GetEvents()[0].GetDetail() != "later" {
		t.Errorf("after a number that never was: %v, %v", m, err)
	}
	bad, err := c.WatchEvents(t.Context(), &adminv1.WatchEventsRequest{Vip: "20.0.0.1"})
	if err == nil {
		_, err = bad.Recv()
	}
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("an address for a VIP: %v", err)
	}
}

// A request for an unknown VIP fails with the name of the VIP, instead of returning no events.
func TestEventsOfUnknownVIP(t *testing.T) {
	j, c := serve(t)
	gone, unknown := numbered(7), numbered(8)
	record(j, gone)
	for v, want := range map[vip.VIP]codes.Code{numbered(1): codes.OK, gone: codes.OK, unknown: codes.NotFound} {
		if _, err := c.ListEvents(t.Context(), &adminv1.ListEventsRequest{Vip: v.String()}); status.Code(err) != want {
			t.Errorf("listing of %s: %v, want %v", v, err, want)
		}
		s, err := c.WatchEvents(t.Context(), &adminv1.WatchEventsRequest{Vip: v.String()})
		if err == nil {
			_, err = s.Recv()
		}
		if status.Code(err) != want {
			t.Errorf("watch of %s: %v, want %v", v, err, want)
		}
	}
	// A client that continues with another frontend waits, because the VIP may be added later.
	watchEvents(t, c, &adminv1.WatchEventsRequest{Vip: unknown.String(), InstanceId: "another"})
}

// A blocked reader does not delay the frontend. When it reads again, it receives the number of
// lost events and then the remaining events.
func TestSlowWatcherReceivesGap(t *testing.T) {
	j, c := serve(t)
	slow := watchEvents(t, c, &adminv1.WatchEventsRequest{})
	long := fmt.Sprintf("%01000d", 0) // more than the windows of the transport hold
	const many = 5 * maxEvents
	for range many {
		j.Note(long) // returns, or the test hangs
	}
	quick := watchEvents(t, c, &adminv1.WatchEventsRequest{Limit: 1})
	if len(quick.first) != 1 || quick.first[0] != many {
		t.Errorf("beside a slow reader another one got %v", quick.first)
	}
	slow.until(many)
	if slow.lost == 0 || uint64(len(slow.numbers))+slow.lost != many {
		t.Errorf("%d events came and %d were lost of %d", len(slow.numbers), slow.lost, many)
	}
	if !slices.IsSorted(slow.numbers) || len(slices.Compact(slow.numbers)) != len(slow.numbers) {
		t.Error("events are out of order, or came twice")
	}
}

// One text that is not UTF-8 does not make all events unreadable.
func TestEventsAreUTF8(t *testing.T) {
	j, c := serve(t)
	j.Add(&adminv1.Event{Detail: "answered \xd0"}, &adminv1.Event{Detail: "next"})
	watchEvents(t, c, &adminv1.WatchEventsRequest{}).until(2)
}
