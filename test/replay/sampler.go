package main

import (
	"context"
	"errors"
	"fmt"
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
	directInterval = 100 * time.Millisecond
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

	mu               sync.Mutex
	requests, direct []outcome
	late             time.Duration // the largest lateness of the canary
}

// startSampler starts clients of each gateway, and of each pod directly.
func (fx *fixture) startSampler(ctx context.Context, interval time.Duration) (*sampler, error) {
	s := &sampler{fixture: fx, interval: interval}
	ctx, s.end = context.WithCancel(ctx)
	s.canary.Go(func() { s.watchLateness(ctx) })
	for g, ns := range []*lab.NetNS{fx.Gateway, fx.Second} {
		if err := s.start(ctx, ns, interval, g, &s.requests); err != nil {
			return s, err
		}
	}
	for pod, ns := range fx.direct {
		if err := s.start(ctx, ns, directInterval, pod, &s.direct); err != nil {
			return s, err
		}
	}
	return s, nil
}

// start sends a request from a namespace to each VIP in each interval.
func (s *sampler) start(ctx context.Context, ns *lab.NetNS, interval time.Duration, from int, to *[]outcome) error {
	c := load.Config{
		Rate: len(vips) * int(time.Second/interval), Timeout: requestTimeout, Inside: ns.Do,
		Observe: func(o load.Outcome) {
			s.mu.Lock()
			defer s.mu.Unlock()
			reason := ""
			if o.Err != nil {
				reason = o.Err.Error()
			}
			*to = append(*to, outcome{
				sent: o.Sent, vip: o.To.Addr(), from: from, failed: o.Err != nil,
				noRoute: errors.Is(o.Err, syscall.ENETUNREACH), reason: reason,
			})
		},
	}
	for _, vip := range vips {
		c.Requests = append(c.Requests, netip.AddrPortFrom(vip, lab.RequestPort))
	}
	g, err := load.Start(ctx, c)
	if err == nil {
		s.generators = append(s.generators, g)
	}
	return err
}

// watchLateness measures how late timers fire.
func (s *sampler) watchLateness(ctx context.Context) {
	for ctx.Err() == nil {
		before := time.Now()
		sleep(ctx, canaryTick)
		s.mu.Lock()
		s.late = max(s.late, time.Since(before)-canaryTick)
		s.mu.Unlock()
	}
}

// waitCalm waits until every request of the last while is answered.
func (s *sampler) waitCalm(ctx context.Context) error {
	const while = 300 * time.Millisecond
	return lab.Eventually(ctx, pollInterval, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		latest := time.Now().Add(-requestTimeout)
		for from := range gateways {
			for _, vip := range vips {
				answered := 0
				for _, o := range slices.Backward(s.requests) {
					if o.sent.Before(latest.Add(-while)) {
						break
					}
					if o.vip != vip || o.from != from {
						continue
					}
					if o.failed {
						return fmt.Errorf("requests for %s through gateway %d fail", vip, from+1)
					}
					answered++
				}
				if answered < int(while/s.interval) {
					return fmt.Errorf("%d requests for %s through gateway %d are answered", answered, vip, from+1)
				}
			}
		}
		return nil
	})
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
	r := &record{begin: begin, end: end, requests: s.requests, direct: s.direct, interval: s.interval}
	for g, router := range s.fixture.Routers {
		trace, err := router.Trace()
		if err != nil {
			return nil, err
		}
		for _, u := range trace {
			r.updates = append(r.updates, update{u.At, g, u.Session, u.Prefix.Addr(), u.Withdrawn})
		}
	}
	r.updates = append(r.updates, s.fixture.lost...)
	slices.SortStableFunc(r.updates, func(a, b update) int { return a.at.Compare(b.at) })
	return r, nil
}

// sleep waits, and reports whether ctx did not end first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
