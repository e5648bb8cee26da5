package frontend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// serveEvents serves the events of an observer.
func serveEvents(t *testing.T) (*observer, frontendv1.FrontendServiceClient) {
	t.Helper()
	o, _ := testObserver()
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	vips := []vip.VIP{vipA, vipB, numbered(200)}
	config := trench.NewWatcher("/nowhere", trench.Defaults{},
		&trench.Config{Attractor: trench.Attractor{VIPs: vips}}, slog.New(slog.DiscardHandler))
	frontendv1.RegisterFrontendServiceServer(server, &admin{process: &process{
		Options: Options{Source: config}, observer: o, instance: "this-one",
	}})
	listener := bufconn.Listen(64 << 10)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn,
			error,
		) {
			return listener.DialContext(ctx)
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return o, frontendv1.NewFrontendServiceClient(conn)
}

func eventsAfter(e *events, after uint64) []event {
	found, _, _ := e.page(after, maxEvents, func(event) bool { return true })
	return found
}

type eventStream struct {
	t *testing.T
	grpc.ServerStreamingClient[frontendv1.WatchEventsResponse]
	instance       string
	upTo, lost     uint64
	first, numbers []uint64
}

func watchEvents(t *testing.T, c frontendv1.FrontendServiceClient, r *frontendv1.WatchEventsRequest) *eventStream {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	s, err := c.WatchEvents(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	stream := &eventStream{t: t, ServerStreamingClient: s}
	stream.next()
	stream.first = slices.Clone(stream.numbers)
	return stream
}

// next takes a message.
func (s *eventStream) next() {
	s.t.Helper()
	m, err := s.Recv()
	if err != nil {
		s.t.Fatal(err)
	}
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
	o, c := serveEvents(t)
	const before, after = 600, 400
	for range before {
		o.note("x")
	}
	s := watchEvents(t, c, &frontendv1.WatchEventsRequest{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range after {
			o.note("y")
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
	o, c := serveEvents(t)
	if s := watchEvents(t, c, &frontendv1.WatchEventsRequest{}); len(s.first) != 0 {
		t.Errorf("%v though nothing happened", s.first)
	}
	for range maxEvents + 50 {
		o.note("x")
	}
	last := uint64(maxEvents + 50)
	o.decided(decisions{Changes: []gate.Change{change(vipA, gate.Withdrawn, gate.Announced, gate.Ready)}})
	o.drain()
	o.note("z")
	for _, tt := range []struct {
		name       string
		request    *frontendv1.WatchEventsRequest
		from, lost uint64
		count      int
	}{
		{"new", &frontendv1.WatchEventsRequest{}, 53, 0, maxEventsPerMessage},
		{"the newest", &frontendv1.WatchEventsRequest{Limit: 3}, last, 0, 3},
		{"continues", &frontendv1.WatchEventsRequest{InstanceId: "this-one", After: last}, last + 1, 0, 2},
		{"nothing new", &frontendv1.WatchEventsRequest{InstanceId: "this-one", After: last + 2}, 0, 0, 0},
		{
			"away for long", &frontendv1.WatchEventsRequest{InstanceId: "this-one", After: 10}, 53, 42,
			maxEventsPerMessage,
		},
		{
			"of another frontend", &frontendv1.WatchEventsRequest{InstanceId: "other", After: last}, 53, 0,
			maxEventsPerMessage,
		},
		{
			"a number that never was", &frontendv1.WatchEventsRequest{InstanceId: "this-one", After: last + 1000}, 0, 0,
			0,
		},
		{"one VIP", &frontendv1.WatchEventsRequest{Vip: vipA.String()}, last + 1, 0, 1},
		{"one VIP, the newest", &frontendv1.WatchEventsRequest{Vip: vipA.String(), Limit: 1}, last + 1, 0, 1},
		{"another VIP", &frontendv1.WatchEventsRequest{Vip: vipB.String()}, 0, 0, 0},
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
	s := watchEvents(t, c, &frontendv1.WatchEventsRequest{InstanceId: "this-one", After: last + 1000})
	o.note("later")
	if m, err := s.Recv(); err != nil || len(m.GetEvents()) != 1 || m.GetEvents()[0].GetDetail() != "later" {
		t.Errorf("after a number that never was: %v, %v", m, err)
	}
	bad, err := c.WatchEvents(t.Context(), &frontendv1.WatchEventsRequest{Vip: "20.0.0.1"})
	if err == nil {
		_, err = bad.Recv()
	}
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("an address for a VIP: %v", err)
	}
}

// A script with an accidentally empty list of VIPs drains nothing.
func TestDrainOfNothing(t *testing.T) {
	_, c := serveEvents(t)
	for _, r := range []*frontendv1.DrainRequest{{}, {All: true, Vips: []string{vipA.String()}}} {
		if _, err := c.Drain(t.Context(), r); status.Code(err) != codes.InvalidArgument {
			t.Errorf("drain of %v: %v", r, err)
		}
	}
}

// The response to a drain lists the drained VIPs, the VIPs that are still de-preferred, and the
// end of the drain.
func TestDrainAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, _ := testObserver()
		c, _ := newReadyController(o, gate.New(gate.Options{DrainTime: time.Second, NoFlapBackoff: true}))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Run(ctx) }()
		<-c.ready
		synctest.Wait()
		if !c.tryUpdate() {
			t.Fatal("the controller does not wait")
		}
		config := trench.NewWatcher("/nowhere", trench.Defaults{},
			&trench.Config{Attractor: trench.Attractor{VIPs: []vip.VIP{vipA, vipB}}}, slog.New(slog.DiscardHandler))
		a := &admin{process: &process{Options: Options{Source: config}, observer: o, controller: c}}
		a.process.Log = slog.New(slog.DiscardHandler)
		want := func(step string, r *frontendv1.DrainResponse, err error, drained, draining string, until time.Time) {
			t.Helper()
			if err != nil || strings.Join(r.GetDrained(), " ") != drained || strings.Join(r.GetDraining(), " ") != draining ||
				r.GetUntil().AsTime().Sub(until) != 0 && !until.IsZero() || r.GetUntil() != nil && until.IsZero() {
				t.Errorf("%s: %v, %v", step, r, err)
			}
		}
		none := time.Time{}
		r, err := a.Drain(ctx, &frontendv1.DrainRequest{Vips: []string{vipB.String()}})
		want("the first", r, err, vipB.String(), vipB.String(), time.Now().Add(time.Second))
		<-time.After(2 * time.Second)
		r, err = a.Drain(ctx, &frontendv1.DrainRequest{Vips: []string{vipA.String()}})
		want("the second, after the first", r, err, vipA.String()+" "+vipB.String(), vipA.String(),
			time.Now().Add(time.Second))
		<-time.After(2 * time.Second)
		r, err = a.Drain(ctx, &frontendv1.DrainRequest{All: true})
		want("again, after the drain time", r, err, vipA.String()+" "+vipB.String(), "", none)
		u, err := a.Undrain(ctx, &frontendv1.UndrainRequest{Vips: []string{vipB.String()}})
		if err != nil || len(u.GetDrained()) != 1 || u.GetDrained()[0] != vipA.String() {
			t.Errorf("undrained: %v, %v", u, err)
		}
		cancel()
		<-ended
	})
}

// A request for an unknown VIP fails with the name of the VIP, instead of returning no events.
func TestEventsOfUnknownVIP(t *testing.T) {
	o, c := serveEvents(t)
	gone, unknown := numbered(7), numbered(8)
	o.decided(decisions{Changes: []gate.Change{change(gone, gate.Announced, gate.Withdrawn, gate.NotConfigured)}})
	o.drain()
	for v, want := range map[vip.VIP]codes.Code{vipB: codes.OK, gone: codes.OK, unknown: codes.NotFound} {
		if _, err := c.ListEvents(t.Context(), &frontendv1.ListEventsRequest{Vip: v.String()}); status.Code(err) != want {
			t.Errorf("listing of %s: %v, want %v", v, err, want)
		}
		s, err := c.WatchEvents(t.Context(), &frontendv1.WatchEventsRequest{Vip: v.String()})
		if err == nil {
			_, err = s.Recv()
		}
		if status.Code(err) != want {
			t.Errorf("watch of %s: %v, want %v", v, err, want)
		}
	}
	// A client that continues with another frontend waits, because the VIP may be added later.
	watchEvents(t, c, &frontendv1.WatchEventsRequest{Vip: unknown.String(), InstanceId: "another"})
}

// A blocked reader does not delay the frontend. When it reads again, it receives the number of
// lost events and then the remaining events.
func TestSlowWatcherReceivesGap(t *testing.T) {
	o, c := serveEvents(t)
	slow := watchEvents(t, c, &frontendv1.WatchEventsRequest{})
	long := fmt.Sprintf("%01000d", 0) // more than the windows of the transport hold
	const many = 5 * maxEvents
	for range many {
		o.note(long) // returns, or the test hangs
	}
	quick := watchEvents(t, c, &frontendv1.WatchEventsRequest{Limit: 1})
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

func TestGatewaySessionEvents(t *testing.T) {
	t0 := time.Unix(100, 0)
	up := func(at time.Time) bird.GatewayState {
		return bird.GatewayState{Name: "g", Up: true, Since: at, State: "Established"}
	}
	down := bird.GatewayState{Name: "g", State: "Active", LastError: "Received: Cease", Since: t0.Add(time.Second)}
	state := func(pid int, g ...bird.GatewayState) bird.State {
		return bird.State{Alive: pid != 0, PID: pid, Version: "2.0.12", Gateways: g}
	}
	for _, tt := range []struct {
		name    string
		was, is bird.State
		want    string
	}{
		{"start", bird.State{}, state(7, down), "BIRD 2.0.12 runs with pid 7, restarts: 0"},
		{"still down", state(7, down), state(7, down), ""},
		{"up", state(7, down), state(7, up(t0)), "g true"},
		{"still up", state(7, up(t0)), state(7, up(t0)), ""},
		{"lost", state(7, up(t0)), state(7, down), "g false Active (Received: Cease)"},
		{
			"lost for a moment", state(7, up(t0)), state(7, up(t0.Add(time.Second))),
			"g false session lost and re-established, g true",
		},
		{"BIRD is gone", state(7, up(t0)), state(0, up(t0)), "BIRD: BIRD does not run, g false BIRD does not run"},
		{"removed", state(7, up(t0)), state(7), ""},
		{
			"refuses", state(7),
			bird.State{Alive: true, PID: 7, ConfigErr: errors.New("line 3")},
			"BIRD keeps an older configuration: line 3",
		},
		{
			"takes it",
			bird.State{Alive: true, PID: 7, ConfigErr: errors.New("line 3")},
			state(7),
			"BIRD loaded the desired configuration",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := ""
			for _, e := range sessionEvents(tt.was, tt.is) {
				if got != "" {
					got += ", "
				}
				switch {
				case e.Gateway == "":
					got += e.Detail
				case e.GatewayUp:
					got += e.Gateway + " true"
				default:
					got += e.Gateway + " false " + e.Detail
				}
			}
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestEventsNameTheCause(t *testing.T) {
	o, _ := testObserver()
	asked := 0
	o.causes.reason = func(r gate.Reason, f vip.Family) string {
		asked++
		return fmt.Sprint(r, " ", f)
	}
	o.decided(decisions{Changes: []gate.Change{
		change(vipA, gate.Announced, gate.Withdrawn, gate.NoGateway),
		change(vipB, gate.Announced, gate.Withdrawn, gate.NoGateway),
	}})
	o.drain()
	all := eventsAfter(&o.state.events, 0)
	if len(all) != 2 || all[0].Detail != "no_gateway ipv4" {
		t.Errorf("events %+v", all)
	}
	if families := 1 + int(vipA.Family()^vipB.Family()); asked != families {
		t.Errorf("asked %d times for %d families", asked, families)
	}
}

func TestMergedDecisionsAreRecorded(t *testing.T) {
	o, _ := testObserver()
	flip := decisions{Changes: []gate.Change{change(vipB, gate.Announced, gate.Withdrawn, gate.LBNotReady)}}
	for range 3 {
		o.decided(flip)
	}
	o.queued = maxQueued + 3 // as if that many waited
	o.decided(flip)
	o.drain()
	all := eventsAfter(&o.state.events, 0)
	// The three earlier decisions were merged into one event; the later decision has its own.
	if len(all) != 3 || !strings.Contains(all[0].Detail, fmt.Sprintf("%d earlier changes were merged", maxQueued+2)) {
		t.Errorf("events %+v", all)
	}
}
