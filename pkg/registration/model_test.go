package registration

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/test/harness"
)

// answerOf is the scripted response of a load balancer to one Register call.
type answerOf struct {
	code   codes.Code    // final status
	accept bool          // send a message first
	after  time.Duration // duration of the call
	silent bool          // do nothing until the client ends the call
}

// scripted is a load balancer that responds by a script and records the start and end of calls.
type scripted struct {
	targetv1.UnimplementedTargetServiceServer
	answer     func() answerOf
	deregister codes.Code
	slow       time.Duration // until Deregister is answered
	drain      time.Duration
	removes    bool // it ends the call of the target after the drain

	mu      sync.Mutex
	calls   []call
	left    time.Time     // when Deregister came
	removed chan struct{} // closed after the drain
}

type call struct {
	answerOf
	began, ended time.Time
}

func (s *scripted) Register(_ *targetv1.RegisterRequest,
	stream grpc.ServerStreamingServer[targetv1.RegisterResponse],
) error {
	s.mu.Lock()
	c := call{answerOf: s.answer(), began: time.Now()}
	i := len(s.calls)
	s.calls = append(s.calls, c)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.calls[i].ended = time.Now()
		s.mu.Unlock()
	}()
	if c.accept {
		if err := stream.Send(&targetv1.RegisterResponse{}); err != nil {
			return err
		}
	}
	end := time.After(c.after)
	if c.silent {
		end = nil
	}
	select {
	case <-end:
		return grpcstatus.Error(c.code, "scripted")
	case <-s.removed:
		if c.accept {
			return nil
		}
		<-stream.Context().Done()
	case <-stream.Context().Done():
	}
	return stream.Context().Err()
}

func (s *scripted) Deregister(context.Context, *targetv1.DeregisterRequest) (*targetv1.DeregisterResponse, error) {
	s.mu.Lock()
	s.left = time.Now()
	s.mu.Unlock()
	time.Sleep(s.slow)
	if s.deregister != codes.OK {
		return nil, grpcstatus.Error(s.deregister, "scripted")
	}
	if s.removes {
		time.AfterFunc(s.drain, func() { close(s.removed) })
	}
	return &targetv1.DeregisterResponse{DrainFor: durationpb.New(s.drain)}, nil
}

// run runs a registration that leaves after a time, or whose context ends then. It returns when it
// was to end, when it ended, and its error.
func (s *scripted) run(t *testing.T, after time.Duration, interrupt bool,
) (r *Registration, left, ended time.Time, err error) {
	s.removed = make(chan struct{})
	listener, server := bufconn.Listen(1<<16), grpc.NewServer(grpc.WaitForHandlers(true))
	targetv1.RegisterTargetServiceServer(server, s)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:lb", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	harness.Must(t, err)
	r = &Registration{
		Conn:    NewConn(conn, "the load balancer", func(err error) error { return err }),
		Request: &targetv1.RegisterRequest{Stream: "s", Targets: []*targetv1.Target{{Name: "a"}}},
		Report:  func(string) {}, Persistent: true,
	}
	var was State
	r.Changed = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		is := r.State()
		if is.Phase == Registered && is.Err != nil || was.Phase >= Leaving && is.Phase < was.Phase ||
			is.Failures < was.Failures || is.Since.Before(was.Since) {
			t.Errorf("state %+v after %+v", is, was)
		}
		was = is
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	leave, end := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(end)
		err = r.Run(ctx, leave)
		ended = time.Now()
	}()
	time.Sleep(after)
	if left = time.Now(); interrupt {
		cancel()
	} else {
		close(leave)
	}
	<-end
	_ = conn.Close()
	server.Stop()
	if e := <-served; e != nil {
		t.Error(e)
	}
	return r, left, ended, err
}

// check compares the pauses between calls with the back-off: it doubles from min to max, with a
// fifth of jitter, for each kind of failure, and starts again after a call that was accepted.
func (s *scripted) check(t *testing.T) {
	t.Helper()
	unavailable, rejected := 0, 0
	for i, c := range s.calls {
		if !s.left.IsZero() && c.began.After(s.left) {
			t.Errorf("call %d began %v after the target was deregistered", i, c.began.Sub(s.left))
		}
		if i == len(s.calls)-1 {
			return
		}
		if c.accept {
			unavailable, rejected = 0, 0
		}
		count, shortest, longest := &unavailable, 50*time.Millisecond, 2*time.Second
		if c.code != codes.Unavailable && !c.silent {
			count, shortest, longest = &rejected, time.Second, 10*time.Second
		}
		want := min(shortest<<*count, longest)
		*count++
		pause := s.calls[i+1].began.Sub(c.ended)
		if pause < want*8/10 || pause > want*12/10 {
			t.Errorf("call %d of %+v: pause %v, want about %v", i+1, s.calls, pause, want)
		}
	}
}

// A registration is retried with back-off until leave, never afterwards. It ends when the load
// balancer reports the removal, or two seconds after the drain.
func TestRegistrationModel(t *testing.T) {
	for seed := range uint64(400) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			s := &scripted{drain: time.Duration(random.IntN(4)) * time.Second, removes: random.IntN(3) > 0}
			s.slow = time.Duration(random.IntN(4)) * time.Second
			s.deregister = []codes.Code{codes.OK, codes.OK, codes.OK, codes.Unavailable, codes.NotFound}[random.IntN(5)]
			failures := random.IntN(14)
			s.answer = func() answerOf {
				failures--
				a := answerOf{code: codes.Unavailable, after: time.Duration(random.IntN(3)) * time.Second}
				if random.IntN(4) == 0 {
					a.code = codes.FailedPrecondition
				}
				switch {
				case failures < 0: // a call that stays
					return answerOf{accept: true, after: 24 * time.Hour}
				case random.IntN(6) == 0:
					a.silent = true
				case random.IntN(3) == 0:
					a.accept = true
				}
				return a
			}
			interrupt := random.IntN(6) == 0
			r, left, ended, err := s.run(t, time.Duration(1+random.IntN(60_000))*time.Millisecond, interrupt)
			s.check(t)
			last := s.calls[len(s.calls)-1]
			registered := slices.ContainsFunc(s.calls, func(c call) bool { return c.accept })
			kept := last.accept && !last.ended.Before(left) && last.after == 24*time.Hour
			phase := r.State().Phase
			if interrupt {
				if err != nil || phase != Interrupted || ended != left || !s.left.IsZero() {
					t.Errorf("seed %d: interrupted, ended after %v with %v, phase %d", seed, ended.Sub(left), err, phase)
				}
				return
			}
			switch took := ended.Sub(left) - s.slow; {
			case s.deregister == codes.Unavailable && registered:
				if err == nil || phase != Interrupted || took != 0 {
					t.Errorf("seed %d: not deregistered, ended after %v with %v, phase %d", seed, took, err, phase)
				}
			case s.deregister != codes.OK:
				if err != nil || phase != Removed || took != 0 {
					t.Errorf("seed %d: nothing to deregister, ended after %v with %v, phase %d", seed, took, err, phase)
				}
			case kept && s.removes:
				if err != nil || phase != Removed || took != s.drain {
					t.Errorf("seed %d: removed after %v, ended after %v with %v, phase %d", seed, s.drain, took, err, phase)
				}
			case kept:
				if err == nil || phase != Interrupted || took != s.drain+2*time.Second {
					t.Errorf("seed %d: never removed, drain %v, ended after %v with %v, phase %d", seed, s.drain, took, err, phase)
				}
			default:
				var refused *RejectedError
				if took > 10*time.Second || errors.As(err, &refused) {
					t.Errorf("seed %d: without a call that stays, ended after %v with %v", seed, took, err)
				}
			}
		})
	}
}

// flaky is a resolver that fails at random and records the times of lookups.
type flaky struct {
	fail  func() bool
	asked []time.Time
	ok    []bool
}

func (f *flaky) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	fails := f.fail()
	f.asked, f.ok = append(f.asked, time.Now()), append(f.ok, !fails)
	if fails {
		return nil, errServer
	}
	return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
}

// A name is looked up once in an interval, after failures with back-off up to the interval.
func TestLookupPauses(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			resolver := &flaky{fail: func() bool { return random.IntN(4) > 0 }}
			n := &name{Address: Address{text: "lb.test:1", host: "lb.test", port: "1"}, resolver: resolver}
			ctx := harness.Context(t, 5*time.Minute)
			answers := make(chan answer)
			go n.follow(ctx, lookupInterval, answers)
			for ctx.Err() == nil {
				select {
				case <-answers:
				case <-ctx.Done():
				}
			}
			failures := 0
			for i, at := range resolver.asked[1:] {
				want, margin := lookupInterval, time.Duration(0)
				if resolver.ok[i] {
					failures = 0
				} else {
					want = min(minLookupDelay<<failures, lookupInterval)
					margin = want / 5
					failures++
				}
				if pause := at.Sub(resolver.asked[i]); pause < want-margin || pause > want+margin {
					t.Errorf("seed %d: %v after %d failures, want about %v", seed, pause, failures, want)
				}
			}
		})
	}
}
