package serving

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/growth"
)

// holding returns the shortest time of an evaluation that holds all VIPs of a stream, whose targets
// all got other names while lb was away; or, with restarted false, which all failed.
func holding(vips, targets int, restarted bool) (least time.Duration) {
	const was, is = "old-%d", "new-%d"
	state := plan.State{VIPs: map[vip.VIP]string{}, Streams: map[string]*plan.StreamState{"s": {}}, Revision: 7}
	state.Streams["s"].Serving[vip.IPv4] = map[string]struct{}{}
	s := trench.Stream{Name: "s", MinReady: 1, DrainTime: time.Minute}
	s.Check.TCP.Port = 1
	for i := range vips {
		v := vip.Require(fmt.Sprintf("20.0.%d.%d/32", i>>8, i&255))
		s.VIPs, state.VIPs[v] = append(s.VIPs, v), "s"
	}
	var members []targetset.Member
	var ready, failed []healthcheck.Health
	for i := range targets {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		name := fmt.Sprintf(is, i)
		members = append(members, targetset.Member{Name: name, IPs: []netip.Addr{a}, Draining: healthcheck.Ready})
		health := healthcheck.Health{Key: healthcheck.Key{Stream: "s", Name: name, Addr: a}, State: healthcheck.Ready}
		ready = append(ready, health)
		health.State = healthcheck.NotReady
		failed = append(failed, health)
		if restarted {
			name = fmt.Sprintf(was, i)
		}
		state.Streams["s"].Serving[vip.IPv4][name] = struct{}{}
	}
	e := New(Options{DataPlane: true, WithdrawTime: time.Hour})
	now := time.Now()
	config := &trench.Config{Attractor: trench.Attractor{VIPs: s.VIPs}, Streams: []trench.Stream{s}}
	e.Configure(now, config, func(string) []targetset.Member { return members })
	e.Confirm(state)
	e.Evaluate(now, healthcheck.Evaluation{Changed: ready})
	frontend := Frontend{
		Report:   readiness.Report{Connected: true},
		Reported: func(vip.VIP) (readiness.VIPReport, bool) { return readiness.VIPReport{}, false },
	}
	if !restarted {
		e.Forward(now, frontend)
		e.Evaluate(now, healthcheck.Evaluation{Changed: failed})
	}
	for range 10 {
		began := time.Now()
		e.Forward(now, frontend)
		if took := time.Since(began); least == 0 || took < least {
			least = took
		}
	}
	return least
}

// The targets of a stream are searched once for all VIPs, and not by each other.
func TestHoldOfManyVIPsAndTargets(t *testing.T) {
	for _, tt := range []struct {
		name            string
		vips, few, many int
		restarted       bool
	}{
		{"VIPs after a restart", 4096, 16, 1024, true},
		{"targets that fail", 1, 256, 8192, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			few, many := holding(tt.vips, tt.few, tt.restarted), holding(tt.vips, tt.many, tt.restarted)
			growth := float64(tt.many) / float64(tt.few)
			t.Logf("%d targets: %v, %d targets: %v", tt.few, few, tt.many, many)
			if ratio := float64(many) / float64(few); ratio > 2.5*growth || tt.vips > 1 && ratio > growth/4 {
				t.Errorf("%.0f times as many targets take %.1f times as long", growth, ratio)
			}
		})
	}
}

// An edit, verdicts of all targets, their forwarding and its confirmation, and an edit that removes
// them again.
func TestGrowth(t *testing.T) {
	for _, dimension := range growth.Dimensions[:3] {
		growth.Check(t, dimension.Name, dimension.Few/2, dimension.Many, func(t *testing.T, n int) func() {
			config, members := dimension.Of(n).Trench(), map[string][]targetset.Member{}
			for _, stream := range config.Streams {
				for _, target := range stream.Targets {
					next := targetset.Member{Name: target.Name, IPs: target.IPs, Draining: healthcheck.Ready}
					members[stream.Name] = append(members[stream.Name], next)
				}
			}
			return func() {
				p := startPlaneRig(t, config, members)
				for _, state := range []healthcheck.State{healthcheck.Ready, healthcheck.NotReady, healthcheck.Ready} {
					var changed []healthcheck.Health
					for stream, list := range members {
						for _, target := range list {
							for _, address := range target.IPs {
								key := healthcheck.Key{Stream: stream, Name: target.Name, Addr: address}
								changed = append(changed, healthcheck.Health{Key: key, State: state})
							}
						}
					}
					p.evaluate(changed...)
					p.confirm()
					p.reports(config.Attractor.VIPs...)
					p.e.Targets()
					p.e.Ready()
				}
				p.configure(&trench.Config{})
				p.confirm()
			}
		})
	}
}
