package availability

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Each input of a Watch has one effect on the lease, the state and the stream.
func TestWatchOfStates(t *testing.T) {
	begin := time.Now()
	up, down, renamed := state{true, "up"}, state{false, "down"}, state{true, "up, renamed"}
	var published []readiness.FallbackState
	w := view{
		client:  NewClient(ClientOptions{Interval: time.Second, Within: 2 * time.Second}),
		vips:    []vip.VIP{vip.Require("20.0.0.1/32")},
		publish: func(s readiness.FallbackState) error { published = append(published, s); return nil },
	}
	message, probe := w.received, w.probed
	other := func(answer) error { return w.reconfigured() }
	const none = -1
	for i, step := range []struct {
		input func(answer) error
		state state
		err   error
		lease int  // seconds since the begin at which the lease began; none: nothing is published
		vips  bool // the states are published
		since int  // seconds since the begin
		ends  bool // the stream
	}{
		{other, up, nil, none, false, 0, false}, // 0: no state yet
		{message, down, nil, 1, true, 1, false},
		{probe, down, nil, 2, false, 1, false},
		{message, down, nil, 3, false, 1, false}, // 3: a repeated message is a sign of life
		{message, up, nil, 4, true, 4, false},
		{message, renamed, nil, 5, true, 4, false}, // 5: another detail of the same state
		{probe, up, nil, 6, false, 4, false},
		{probe, up, errLate, none, false, 4, false},
		{other, up, nil, 6, true, 4, false}, // 8: other VIPs renew no lease
		{probe, up, nil, 9, false, 4, false},
		{probe, down, nil, none, false, 4, false},
		{probe, up, nil, 11, false, 4, false}, // 11: ends the series of contradictions
		{probe, down, nil, none, false, 4, false},
		{message, down, nil, 13, true, 13, false}, // 13: as the probe had reported
		{probe, up, nil, none, false, 13, false},
		{probe, down, errLate, none, false, 13, false}, // 15: a late answer is none
		{probe, up, nil, none, false, 13, true},
	} {
		published = nil
		err := step.input(answer{state: step.state, at: begin.Add(time.Duration(i) * time.Second), err: step.err})
		if (err != nil) != step.ends || len(published) != min(step.lease+1, 1) {
			t.Fatalf("%d: %v, published %+v", i, err, published)
		}
		if len(published) == 0 {
			continue
		}
		p, want := published[0], begin.Add(time.Duration(step.lease+3)*time.Second)
		if !p.LeaseEnd.Equal(want) || (p.VIPs != nil) != step.vips {
			t.Errorf("%d: lease end %v, want %v, %d VIPs", i, p.LeaseEnd.Sub(begin), want.Sub(begin), len(p.VIPs))
		}
		for _, r := range p.VIPs {
			ready := r.State == vip.Ready
			if since := r.Since.Sub(begin); ready != w.current.available || since != time.Duration(step.since)*time.Second {
				t.Errorf("%d: %v since %v, want since %d s", i, r.State, since, step.since)
			}
		}
	}
}
