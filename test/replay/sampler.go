package main

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

const (
	// requestTimeout is below the first retransmission of a SYN, which would hide its loss.
	requestTimeout = 900 * time.Millisecond
	// calm is how long every request is answered before an incident.
	calm = 300 * time.Millisecond
	// canaryTick is the interval of the timer whose lateness shows a busy machine.
	canaryTick = 5 * time.Millisecond
)

// sampler sends requests until it is stopped, and keeps their outcomes.
type sampler struct {
	fixture    *fixture
	interval   time.Duration
	generators []*load.Generator
	end        context.CancelFunc
	canary     sync.WaitGroup

	mu       sync.Mutex
	requests []outcome
	late     time.Duration // the largest lateness of the canary
}

// startSampler starts clients of each gateway, and waits until all requests are answered. The
// caller stops it also after an error.
func (fx *fixture) startSampler(ctx context.Context, interval time.Duration) (*sampler, error) {
	s := &sampler{fixture: fx, interval: interval}
	ctx, s.end = context.WithCancel(ctx)
	s.canary.Go(func() { s.watchLateness(ctx) })
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	for i, ns := range []*lab.NetNS{fx.Gateway, fx.Second} {
		g, err := load.Start(ctx, s.clients(i, ns))
		if err != nil {
			return s, err
		}
		s.generators = append(s.generators, g)
		for answered := false; !answered; {
			sleep(bound, calm)
			phase, err := g.Take(bound)
			if err != nil {
				return s, err
			}
			answered = phase.Failed == 0 && phase.Answered > 0
		}
	}
	return s, nil
}

// clients sends a request through a gateway to each VIP in each interval.
func (s *sampler) clients(gateway int, ns *lab.NetNS) load.Config {
	c := load.Config{
		Rate: len(vips) * int(time.Second/s.interval), Timeout: requestTimeout, Inside: ns.Do,
		Observe: func(o load.Outcome) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.requests = append(s.requests,
				outcome{o.Sent, o.To.Addr(), gateway, o.Err, errors.Is(o.Err, syscall.ENETUNREACH)})
		},
	}
	for _, vip := range vips {
		c.Requests = append(c.Requests, netip.AddrPortFrom(vip, lab.RequestPort))
	}
	return c
}

// watchLateness measures how late timers fire.
func (s *sampler) watchLateness(ctx context.Context) {
	for before := time.Now(); sleep(ctx, canaryTick); before = time.Now() {
		s.mu.Lock()
		s.late = max(s.late, time.Since(before)-canaryTick)
		s.mu.Unlock()
	}
}

// stop ends the sending, waits for open requests, and returns the record from a moment on.
func (s *sampler) stop(begin time.Time) (*record, error) {
	end := time.Now()
	var wg sync.WaitGroup
	for _, g := range s.generators {
		wg.Go(func() { g.Stop(context.Background()) })
	}
	wg.Wait()
	s.end()
	s.canary.Wait()
	r := &record{begin: begin, end: end, updates: s.fixture.lost, requests: s.requests, interval: s.interval}
	for g, router := range s.fixture.Routers {
		trace, err := router.Trace()
		if err != nil {
			return nil, err
		}
		for _, u := range trace {
			r.updates = append(r.updates, update{u.At, g, u.Session, u.Prefix.Addr(), u.Withdrawn})
		}
	}
	slices.SortStableFunc(r.updates, func(a, b update) int { return a.at.Compare(b.at) })
	return r, nil
}

// sleep waits, and reports whether ctx did not end first.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
