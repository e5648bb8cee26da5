package meridio2

import (
	"context"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

func TestGateNames(t *testing.T) {
	if a, b := GateOf(vip.IPv4), GateOf(vip.IPv6); a != "meridio-2.nordix.org/ipv4-connectivity" ||
		b != "meridio-2.nordix.org/ipv6-connectivity" {
		t.Error(a, b)
	}
}

func TestHoldTime(t *testing.T) {
	start := time.Now()
	at := func(d time.Duration) time.Time { return start.Add(d) }
	a, b := session{name: "a"}, session{name: "b"}
	again := session{name: "a", since: start}
	type step struct {
		at        time.Duration
		up        []session
		connected bool
		again     time.Duration // 0: after a change
	}
	for name, steps := range map[string][]step{
		"up for 3 s": {
			{0, []session{a}, false, 3 * time.Second},
			{2999 * time.Millisecond, []session{a}, false, 3 * time.Second},
			{3 * time.Second, []session{a}, true, 0},
		},
		"down at once": {
			{0, []session{a}, false, 3 * time.Second},
			{3 * time.Second, []session{a}, true, 0},
			{4 * time.Second, nil, false, 0},
			{4 * time.Second, []session{a}, false, 7 * time.Second},
		},
		"break between two states": {
			{0, []session{a}, false, 3 * time.Second},
			{2 * time.Second, []session{again}, false, 5 * time.Second},
			{3 * time.Second, []session{again}, false, 5 * time.Second},
			{5 * time.Second, []session{again}, true, 0},
		},
		"other gateway": {
			{0, []session{a}, false, 3 * time.Second},
			{time.Second, []session{a, b}, false, 3 * time.Second},
			{2 * time.Second, []session{b}, false, 4 * time.Second},
			{4 * time.Second, []session{b}, true, 0},
		},
		"other gateway while connected": {
			{0, []session{a}, false, 3 * time.Second},
			{3 * time.Second, []session{a}, true, 0},
			{4 * time.Second, []session{a, b}, true, 0},
			{5 * time.Second, []session{b}, true, 0},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var f family
			for _, s := range steps {
				next := f.observe(at(s.at), s.up)
				want := time.Time{}
				if s.again != 0 {
					want = at(s.again)
				}
				if f.connected != s.connected || !next.Equal(want) {
					t.Errorf("at %v: connected %t, again %v, want %+v", s.at, f.connected, next.Sub(start), s)
				}
			}
		})
	}
}

func TestRestartWhileConnected(t *testing.T) {
	f := family{adopted: true, connected: true}
	if f.observe(time.Now(), []session{{name: "a"}}); !f.connected {
		t.Error("a gateway that is up is no longer connected after a restart")
	}
	f = family{adopted: true, connected: true}
	if f.observe(time.Now(), nil); f.connected {
		t.Error("connected without a gateway")
	}
}

func TestSessionsOfFamily(t *testing.T) {
	since := timestamppb.New(time.Unix(1, 0))
	s := &frontendv1.Status{Gateways: []*frontendv1.GatewayStatus{
		{Name: "v4", Address: "169.254.1.1", Up: true, Since: since},
		{Name: "down", Address: "169.254.1.2", Since: since},
		{Name: "v6", Address: "fd00::1", Up: true, Since: since},
		{Name: "none", Address: "gateway", Up: true},
	}}
	for family, want := range map[vip.Family]string{vip.IPv4: "v4", vip.IPv6: "v6"} {
		if up := sessions(s, family); len(up) != 1 || up[0].name != want || !up[0].since.Equal(since.AsTime()) {
			t.Errorf("%v: %+v", family, up)
		}
	}
	if up := sessions(nil, vip.IPv4); len(up) != 0 {
		t.Error(up)
	}
}

func TestConditionNamesTheCause(t *testing.T) {
	for want, c := range map[string]corev1.PodCondition{
		reasonUp:          (&family{connected: true}).condition("x", nil),
		reasonDown:        (&family{}).condition("x", nil),
		reasonHold:        (&family{seen: map[session]time.Time{{}: {}}}).condition("x", nil),
		reasonUnreachable: (&family{}).condition("x", context.DeadlineExceeded),
	} {
		if c.Reason != want || c.Message == "" || (c.Status == corev1.ConditionTrue) != (want == reasonUp) {
			t.Errorf("%s: %+v", want, c)
		}
	}
}
