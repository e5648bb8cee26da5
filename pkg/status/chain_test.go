package status

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
)

const chainVIP = "20.0.0.1/32"

// chainLB and chainFrontend are the statuses of a pod in which the VIP is fine.
func chainLB(now time.Time) *lbv1.Status {
	return &lbv1.Status{
		Vips: []*lbv1.VipStatus{{Vip: chainVIP, Readiness: readyVIP(now)}},
		Streams: []*lbv1.StreamStatus{{
			Name: "stream-a", Vips: []string{chainVIP}, MinReady: 1, Targets: []*lbv1.TargetStatus{
				{Name: "target-1", Address: "172.16.1.1", State: "ready"},
				{Name: "target-1", Address: "fd00:16::1", State: "ready"},
			},
		}},
		Watchers: []*lbv1.WatcherStatus{{}},
		DataPlane: &lbv1.DataPlaneStatus{
			AppliedRevision: 7, Streams: []*lbv1.DataPlaneStream{{Name: "stream-a"}},
		},
	}
}

func readyVIP(now time.Time) *readinessv1.VipReadiness {
	return &readinessv1.VipReadiness{
		State: readinessv1.VipState_VIP_STATE_READY, Reason: readinessv1.VipReason_VIP_REASON_TARGETS_READY,
		Since: timestamppb.New(now.Add(-time.Minute)),
	}
}

func chainFrontend(now time.Time) *frontendv1.Status {
	return &frontendv1.Status{
		Gating: true, Bird: &frontendv1.BirdStatus{Pid: 1, Version: "2.0.12", Since: timestamppb.New(now)},
		LoadBalancer: &frontendv1.LoadBalancerStatus{
			Freshness: frontendv1.Freshness_FRESHNESS_LIVE, Synced: true, Position: &readinessv1.Position{InstanceId: "A"},
		},
		Gateways: []*frontendv1.GatewayStatus{
			{Name: "gw-1", Address: "10.0.0.1", Up: true, Export: "full"},
			{Name: "gw-2", Address: "10.0.0.2", Up: true, Export: "full"},
			{Name: "gw-6", Address: "fd00::1", Up: true},
		},
		Vips: []*frontendv1.VipStatus{{
			Vip: chainVIP, Advertisement: readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED,
			Reason: readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY, Gateways: []string{"gw-1", "gw-2"},
			Readiness: readyVIP(now), Since: timestamppb.New(now.Add(-time.Minute)),
		}},
		Conditions: []*adminv1.Condition{
			{Name: "SourceRouting/ipv4", Serving: true}, {Name: "RouteBack/ipv4", Serving: true}, {Name: "RouteBack/ipv6"},
		},
	}
}

// Each planted cause is named at its step, with a remedy; no other step is blamed but those that
// follow from it.
func TestChainNamesCauses(t *testing.T) {
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	withdrawn := func(f *frontendv1.Status, reason readinessv1.AdvertisementReason) {
		f.Vips[0].Advertisement, f.Vips[0].Reason = readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN, reason
		f.Vips[0].Gateways = nil
	}
	for name, c := range map[string]struct {
		plant func(lb *lbv1.Status, f *frontendv1.Status)
		want  string // the first broken step
		good  bool
	}{
		"nothing": {func(*lbv1.Status, *frontendv1.Status) {}, "", true},
		"no VIP": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.Vips = nil
		}, "trench file of lb  the file in force", false},
		"refused file": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.Vips, lb.ConfigurationError = nil, "line 7: no such field"
		}, "the file on disk is refused: line 7", false},
		"no stream": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.Streams = nil
		}, "stream  no stream has the VIP", false},
		"no target": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.Streams[0].Targets = nil
		}, "0 of 0 ready, needs 1", false},
		"too few targets": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.Streams[0].MinReady = 2
		}, "1 of 1 ready, needs 2", false},
		"failing target": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.Streams[0].Targets[0].State, lb.Streams[0].Targets[0].LastError = "not ready", "connection refused"
		}, "0 of 1 ready, needs 1; target-1 at 172.16.1.1 is not ready: connection refused", false},
		"drained target": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.Streams[0].Targets[0].State, lb.Streams[0].Targets[0].DrainCause = "drained", "by an operator"
		}, "target-1 at 172.16.1.1 is drained: by an operator", false},
		"other family": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.Streams[0].Targets[1].State = "not ready"
			lb.DataPlane.Streams[0].ProblemIpv6 = "forwarding is off"
		}, "", true},
		"forwarding": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.DataPlane.Streams[0].ProblemIpv4 = "forwarding is off"
		}, "data plane of stream-a  forwarding is off", false},
		"kernel": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.DataPlane.Error = "no permission"
		}, "data plane  no permission", false},
		"problem of the VIP": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.DataPlane.Problems = []*adminv1.Problem{
				{Object: "table", Detail: "taken", Remedy: "remove it", Vips: []string{chainVIP}},
			}
		}, "data plane  table: taken", false},
		"problem of another VIP": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.DataPlane.Problems = []*adminv1.Problem{{Object: "table", Detail: "taken", Vips: []string{"20.0.0.2/32"}}}
		}, "", true},
		"drift": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.DataPlane.Drift = []*lbv1.DataPlaneDrift{{Object: "rule", Detail: "missing"}}
		}, "another process changed rule: missing", false},
		"not ready": {func(lb *lbv1.Status, f *frontendv1.Status) {
			lb.Vips[0].Readiness.State = readinessv1.VipState_VIP_STATE_NOT_READY
			lb.Vips[0].Readiness.Reason = readinessv1.VipReason_VIP_REASON_NOT_CHECKED
		}, "readiness  not ready since 1m", false},
		"no watcher": {func(lb *lbv1.Status, _ *frontendv1.Status) {
			lb.Watchers = nil
		}, "readiness socket  no frontend is connected", false},
		"not at the frontend": {func(_ *lbv1.Status, f *frontendv1.Status) {
			f.Vips = nil
		}, "trench file of frontend", false},
		"leaves": {func(_ *lbv1.Status, f *frontendv1.Status) {
			f.Vips[0].Advertisement = readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED
			f.Vips[0].Reason = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_DRAINED
			f.Leaving, f.Vips = f.Vips, nil
		}, "gate  de-preferred since 1m", false},
		"lease": {func(_ *lbv1.Status, f *frontendv1.Status) {
			f.LoadBalancer.Freshness = frontendv1.Freshness_FRESHNESS_LOST
			withdrawn(f, readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_LOST)
		}, "lease  LOST", false},
		"never seen": {func(_ *lbv1.Status, f *frontendv1.Status) {
			f.LoadBalancer, f.Vips[0].Readiness = &frontendv1.LoadBalancerStatus{Error: "no such file"}, nil
			withdrawn(f, readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NEVER_SEEN)
		}, "lease  never seen, last error: no such file", false},
		"no gating": {func(_ *lbv1.Status, f *frontendv1.Status) {
			f.Gating, f.LoadBalancer = false, nil
		}, "", true},
		"drained": {func(_ *lbv1.Status, f *frontendv1.Status) {
			withdrawn(f, readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_DRAINED)
		}, "gate  withdrawn since 1m0s: An operator asked", false},
		"de-preferred": {func(_ *lbv1.Status, f *frontendv1.Status) {
			f.Vips[0].Advertisement = readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED
			f.Vips[0].Reason = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_DRAINING
		}, "gate  de-preferred since", false},
		"no BIRD": {func(_ *lbv1.Status, f *frontendv1.Status) {
			f.Bird = &frontendv1.BirdStatus{Error: "exit status 1"}
		}, "BIRD  does not run", false},
		"gateways down": {func(_ *lbv1.Status, f *frontendv1.Status) {
			for _, gateway := range f.Gateways {
				gateway.Up, gateway.State, gateway.LastError = false, "Active", "Received: Bad peer AS"
			}
			withdrawn(f, readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY)
		}, "gate  withdrawn", false},
		"one gateway down": {func(_ *lbv1.Status, f *frontendv1.Status) {
			f.Gateways[1].Up, f.Gateways[1].State, f.Vips[0].Gateways = false, "Connect", []string{"gw-1"}
		}, "gateway  gw-2 is down since -, Connect", true},
		"drained gateway": {func(_ *lbv1.Status, f *frontendv1.Status) {
			f.Gateways[0].Drained, f.Vips[0].Gateways = true, []string{"gw-2"}
		}, "gw-1 is up since - and does not receive the VIP, drained by an operator", true},
		"no gateway of the family": {func(_ *lbv1.Status, f *frontendv1.Status) {
			f.Gateways, f.Vips[0].Gateways = f.Gateways[2:], nil
		}, "no gateway of the VIP's family", false},
		"way back": {func(_ *lbv1.Status, f *frontendv1.Status) {
			f.Conditions[1].Serving, f.Conditions[1].Detail = false, "no gateway sends a route"
		}, "RouteBack/ipv4  no gateway sends a route", false},
		"way back is unknown without a gateway": {func(_ *lbv1.Status, f *frontendv1.Status) {
			withdrawn(f, readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY)
		}, "gate  withdrawn", false},
		"source routing": {func(_ *lbv1.Status, f *frontendv1.Status) {
			f.Conditions[0].Serving, f.Conditions[0].Detail = false, "operation not permitted"
		}, "SourceRouting/ipv4  operation not permitted", false},
	} {
		t.Run(name, func(t *testing.T) {
			lb, f := proto.CloneOf(chainLB(now)), proto.CloneOf(chainFrontend(now))
			c.plant(lb, f)
			chain := &Chain{VIP: chainVIP}
			chain.LBSteps(lb, now)
			chain.FrontendSteps(f, now)
			text := chain.Text()
			if strings.Contains(text, "announces a route") && !strings.Contains(text, "receives the VIP") {
				t.Errorf("the way back is called good without a gateway:\n%s", text)
			}
			if chain.Good() != c.good {
				t.Errorf("good: %t\n%s", chain.Good(), text)
			}
			var broken []string
			for _, step := range chain.Steps {
				if !step.Good {
					broken = append(broken, step.Name+"  "+step.Text)
					if step.Next == "" {
						t.Errorf("no remedy at %s", step.Name)
					}
				}
			}
			first := ""
			if len(broken) > 0 {
				first = broken[0]
			}
			if !strings.Contains(first, c.want) && !strings.Contains(text, c.want) || (c.want == "") != (first == "") {
				t.Errorf("the first broken step is %q, want %q:\n%s", first, c.want, text)
			}
		})
	}
	chain := &Chain{VIP: chainVIP, Unasked: "lb was not asked"}
	chain.FrontendSteps(chainFrontend(now), now)
	if text, err := chain.JSON(); err != nil || !strings.Contains(text, `"unasked": "lb was not asked"`) {
		t.Error(text, err)
	}
	t.Log("\n" + chain.Text())
}

// The remedy of a gateway follows from its state and its last error, whatever changed before.
func TestRemedyOfChangedGateway(t *testing.T) {
	changing := "changing: local AS, password file, hold time"
	for _, c := range []struct {
		gateway *frontendv1.GatewayStatus
		want    string
		silent  bool
	}{
		{&frontendv1.GatewayStatus{Protocol: "static", State: "Down", Change: changing}, "configure BFD", true},
		{&frontendv1.GatewayStatus{Protocol: "bgp", State: "Active", Change: changing}, "correct its address", true},
		{&frontendv1.GatewayStatus{
			Protocol: "bgp", State: "Idle", LastError: "Unacceptable hold time: 0", Change: changing,
		}, "give the router a hold time", false},
		{&frontendv1.GatewayStatus{
			Protocol: "bgp", State: "Active", LastError: "Connection refused", Change: "change pending: hold time",
		}, "apply-now", false},
		{&frontendv1.GatewayStatus{Protocol: "bgp", State: "Active", Change: "leaving, 1 s left"}, "birdc", false},
	} {
		if got := gatewayRemedy(c.gateway); !strings.Contains(got, c.want) || isSilent(c.gateway) != c.silent {
			t.Errorf("%v: %s; silent: %v, want %s; %v", c.gateway, got, isSilent(c.gateway), c.want, c.silent)
		}
	}
}

// An application of another protocol closes the connection, resets it if it did not read the
// request, or answers.
func TestRemedyOfUnfitCheck(t *testing.T) {
	for _, e := range []string{
		"port 80: closed the connection: no answer", "port 80: connection reset by peer",
		"port 80: the answer is not HTTP/1.1: malformed HTTP response \"hello\"", "port 53: the answer is not DNS: x",
	} {
		if got := targetRemedy("s", &lbv1.TargetStatus{State: "not ready", LastError: e}); got != unfitCheck {
			t.Errorf("%s: %s", e, got)
		}
	}
}
