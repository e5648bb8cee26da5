package frontend

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	vipA = vip.Require("20.0.0.1/32")
	vipB = vip.Require("20.0.0.2/32")
)

const settle = 200 * time.Millisecond

// reporterFixture is a reporter with a scripted announcer and scripted gateways.
type reporterFixture struct {
	*reporter
	state   *latest.Value[announce.State]
	confirm func(context.Context) error

	mu      sync.Mutex
	reports map[vip.VIP]reported
}

func startReporter(t *testing.T) *reporterFixture {
	r := &reporterFixture{state: latest.New(announce.State{Established: true}), reports: map[vip.VIP]reported{}}
	r.confirm = func(context.Context) error { return nil }
	r.reporter = newReporter(r.state, nil, settle, func(list []reported) {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, x := range list {
			r.reports[x.VIP] = x
		}
	})
	r.reporter.confirm = func(ctx context.Context) error { return r.confirm(ctx) }
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = r.Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return r
}

// pass advances the clock of the bubble.
func pass(d time.Duration) { <-time.After(d) }

func (r *reporterFixture) decide(revision uint64, v vip.VIP, from, to gate.Advertisement, reason gate.Reason) {
	r.decided(decisions{Revision: revision, Changes: []gate.Change{{
		VIP: v, From: gate.Decision{Advertisement: from}, To: gate.Decision{Advertisement: to, Reason: reason},
	}}})
}

func (r *reporterFixture) written(revision uint64) {
	r.state.Set(announce.State{Established: true, Written: revision})
}

func (r *reporterFixture) of(v vip.VIP) (reported, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	x, ok := r.reports[v]
	return x, ok
}

func (r *reporterFixture) want(t *testing.T, v vip.VIP, a gate.Advertisement, unconfirmed bool) {
	t.Helper()
	synctest.Wait()
	if got, ok := r.of(v); !ok || got.Advertisement != a || got.Unconfirmed != unconfirmed {
		t.Fatalf("reported %v (%t) for %s, want %v, unconfirmed %t", got, ok, v, a, unconfirmed)
	}
}

func TestWithdrawnReportedAfterSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		confirmed := make(chan struct{})
		r.confirm = func(ctx context.Context) error {
			select {
			case <-confirmed:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		r.decide(1, vipA, gate.Withdrawn, gate.Announced, gate.Ready)
		r.want(t, vipA, gate.Announced, false)
		r.decide(2, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		pass(100 * time.Millisecond)
		r.want(t, vipA, gate.Announced, false) // not written
		r.written(2)
		pass(100 * time.Millisecond)
		r.want(t, vipA, gate.Announced, false) // not confirmed
		close(confirmed)
		pass(settle - time.Millisecond)
		r.want(t, vipA, gate.Announced, false) // not settled
		pass(time.Millisecond)
		r.want(t, vipA, gate.Withdrawn, false)
	})
}

func TestUnconfirmedWithdrawalIsMarked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		r.confirm = func(ctx context.Context) error { <-ctx.Done(); return errors.New("unseen") }
		r.decide(1, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		r.written(1)
		pass(confirmTimeout + settle)
		r.want(t, vipA, gate.Withdrawn, true)
	})
}

func TestRiseCancelsWithdrawal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		r.written(1)
		r.decide(1, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		r.decide(1, vipB, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		pass(settle / 2)
		r.decide(2, vipA, gate.Withdrawn, gate.Announced, gate.Ready)
		pass(2 * settle) // B waits for the next round if the round of A began first
		r.want(t, vipA, gate.Announced, false)
		r.want(t, vipB, gate.Withdrawn, false)
	})
}

// An UPDATE that was written before the decision may still announce the VIP.
func TestOlderUpdateConfirmsNoWithdrawal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		r.decide(1, vipA, gate.Withdrawn, gate.Announced, gate.Ready)
		r.written(1)
		r.decide(2, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		pass(settle + confirmTimeout/2)
		r.want(t, vipA, gate.Announced, false)
		r.written(2)
		pass(settle - time.Millisecond)
		r.want(t, vipA, gate.Announced, false)
		pass(time.Millisecond)
		r.want(t, vipA, gate.Withdrawn, false)
	})
}

// The last of several UPDATEs confirms all VIPs that wait together.
func TestWithdrawalsWaitForTheNewest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		r.written(1)
		r.decide(1, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		pass(settle / 2) // the next decisions are of another round
		var last vip.VIP
		for i := range 10 {
			last = vip.Require(fmt.Sprintf("20.0.1.%d/32", i))
			r.decide(uint64(2+i), last, gate.Withdrawn, gate.Announced, gate.Ready)
			r.decide(uint64(2+i), last, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		}
		r.written(10)
		pass(confirmTimeout / 2)
		r.want(t, last, gate.Announced, false)
		r.written(11)
		pass(settle)
		r.want(t, last, gate.Withdrawn, false)
	})
}

func TestSettleTimesOverlap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		r.written(2)
		r.decide(1, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		r.decide(1, vipB, gate.Withdrawn, gate.Announced, gate.Ready)
		pass(settle / 2)
		r.decide(2, vipB, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		pass(settle / 2)
		r.want(t, vipA, gate.Withdrawn, false)
		r.want(t, vipB, gate.Announced, false)
		pass(settle / 2)
		r.want(t, vipB, gate.Withdrawn, false)
	})
}

func TestWithdrawalAfterARiseSettlesForItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		r.written(1)
		r.decide(1, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		pass(settle / 2)
		r.decide(2, vipA, gate.Withdrawn, gate.Announced, gate.Ready)
		r.decide(3, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		r.written(2)
		pass(settle) // the settle time of the first withdrawal has expired
		r.want(t, vipA, gate.Announced, false)
		r.written(3)
		pass(settle - time.Millisecond)
		r.want(t, vipA, gate.Announced, false)
		pass(time.Millisecond)
		r.want(t, vipA, gate.Withdrawn, false)
	})
}

func TestAnotherReasonDoesNotDelayAWithdrawal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		r.written(1)
		r.decide(1, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		pass(settle / 2)
		r.decide(2, vipA, gate.Withdrawn, gate.Withdrawn, gate.NoGateway)
		pass(settle / 2)
		r.want(t, vipA, gate.Withdrawn, false)
		if got, _ := r.of(vipA); got.Reason != gate.NoGateway {
			t.Fatalf("reported the old reason %v", got.Reason)
		}
	})
}

func TestFlushWaitsForReports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		r.written(1)
		r.decide(1, vipA, gate.Announced, gate.Withdrawn, gate.Stopping)
		begin := time.Now()
		if err := r.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(begin); waited != settle {
			t.Fatalf("waited %v, want %v", waited, settle)
		}
		r.want(t, vipA, gate.Withdrawn, false)
	})
}

func TestFlushReturnsAfterReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		send := r.send
		r.send = func(m []reported) {
			if len(m) > 0 && r.idle.Load() {
				t.Error("idle before the withdrawal is reported")
			}
			send(m)
		}
		r.written(1)
		r.decide(1, vipA, gate.Announced, gate.Withdrawn, gate.Stopping)
		if err := r.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.want(t, vipA, gate.Withdrawn, false)
	})
}

// BIRD drops every VIP with the loopback session, so a withdrawal does not wait for a write.
func TestWithdrawnWithoutSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		r.state.Set(announce.State{})
		r.decide(7, vipA, gate.Announced, gate.Withdrawn, gate.NotAccepted)
		pass(settle + time.Millisecond)
		r.want(t, vipA, gate.Withdrawn, false)
	})
}
