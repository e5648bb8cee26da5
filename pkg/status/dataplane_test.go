package status

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
)

func goodDataPlane() *lbv1.DataPlaneStatus {
	return &lbv1.DataPlaneStatus{
		Mode: "nftables", Conntrack: "on", WantedRevision: 7, AppliedRevision: 7,
		Streams: []*lbv1.DataPlaneStream{{
			Name: "stream-a-1", Size: 1009, Seed: 1, Vips: 2, Match: []string{"tcp/80", "tcp/443"}, UnmatchedPackets: 12,
			Targets: []*lbv1.DataPlaneTarget{
				{
					Name: "target-1", Number: 5000, Addresses: []string{"172.16.1.1", "fd00::1"}, State: "serving",
					EntriesIpv4: 505, EntriesIpv6: 505, Packets: 12345,
				},
				{
					Name: "target-2", Number: 5001, Addresses: []string{"172.16.1.2", "fd00::2"}, State: "serving",
					EntriesIpv4: 504, EntriesIpv6: 504, Packets: 6789,
				},
			},
		}},
	}
}

func badDataPlane() *lbv1.DataPlaneStatus {
	d := goodDataPlane()
	d.Conntrack, d.WantedRevision = "off", 9
	d.Error, d.Failures = "records: no space left on device", 3
	d.HeldBack = []string{"stream stream-a-2 (ipv4): until the frontend withdraws 1 VIP"}
	d.Problems = []*adminv1.Problem{
		{
			Object: "VIP 20.0.0.3/32", Detail: "is an address of eth0", Remedy: "ip address del 20.0.0.3/32 dev eth0",
			Vips: []string{"20.0.0.3/32"},
		},
		{Object: "stream stream-a-3", Detail: "has VIP 20.0.0.1/32 as well, which stream-a-1 serves"},
	}
	d.Drift = []*lbv1.DataPlaneDrift{
		{
			Object: "rule fwmark 5003 (IPv4)", Stream: "stream-a-1", Target: "target-4", Detail: "is missing",
			Since: before(90 * time.Second),
		},
		{
			Object: "map maglev4/stream-a-1", Stream: "stream-a-1", Detail: "12 entries lead elsewhere",
			Since: before(time.Second),
		},
	}
	s := d.Streams[0]
	s.ProblemIpv4, s.ProblemIpv6 = "10 entries are missing", "a rule is missing"
	s.Targets = append(s.Targets,
		&lbv1.DataPlaneTarget{
			Name: "target-3", Number: 5002, State: "draining", Addresses: []string{"172.16.1.3"},
			DrainEnd: timestamppb.New(now.Add(4 * time.Second)), Packets: 5,
		},
		&lbv1.DataPlaneTarget{Name: "target-4", Number: 5003, State: "drifted", Addresses: []string{"172.16.1.4"}},
	)
	d.Streams = append(d.Streams, &lbv1.DataPlaneStream{
		Name:    "stream-gone",
		Targets: []*lbv1.DataPlaneTarget{{Name: "x", Number: 5004, State: "removing"}},
	})
	d.Unread = "context deadline exceeded"
	return d
}

func TestDataPlane(t *testing.T) {
	for name, d := range map[string]*lbv1.DataPlaneStatus{
		"lb-dataplane-good": goodDataPlane(),
		"lb-dataplane-bad":  badDataPlane(),
	} {
		t.Run(name, func(t *testing.T) {
			s := goodLB()
			s.DataPlane = d
			wantGolden(t, name+".golden", LB(s, now))
		})
	}
}

func TestDataPlaneWithLooseConntrack(t *testing.T) {
	s := goodLB()
	s.DataPlane = goodDataPlane()
	s.DataPlane.Conntrack = "loose"
	want := "loose: established flows stay with their target, with replies through any pod\n"
	if !strings.Contains(LB(s, now), want) {
		t.Errorf("want %q in\n%s", want, LB(s, now))
	}
}

func TestFastPath(t *testing.T) {
	s := goodLB()
	s.DataPlane = goodDataPlane()
	for want, fast := range map[string]*lbv1.FastPathStatus{
		"detached: the data plane is held\n": {Reason: "the data plane is held"},
		"detached: no interface; not to tun0: it is not an Ethernet interface\n": {
			Reason:     "no interface",
			Interfaces: []*lbv1.FastPathInterface{{Name: "tun0", Reason: "it is not an Ethernet interface"}},
		},
		"attached to ext, int0; not to tun0: it is not an Ethernet interface\n": {Interfaces: []*lbv1.FastPathInterface{
			{Name: "ext"}, {Name: "int0"}, {Name: "tun0", Reason: "it is not an Ethernet interface"},
		}},
	} {
		s.DataPlane.FastPath = fast
		if got := LB(s, now); !strings.Contains(got, want) {
			t.Errorf("want %q in\n%s", want, got)
		}
	}
}

func TestEventsOfTheLoadBalancer(t *testing.T) {
	wantGolden(t, "lb-events.golden", LBEventLog().All([]*adminv1.Event{
		{Time: before(time.Minute), Sequence: 1, Object: "20.0.0.1/32", To: "ready", Reason: "targets_ready"},
		{
			Time: before(time.Second), Sequence: 2, Object: "rule fwmark 5003 (IPv4)", To: "drift",
			Detail: "is missing", Stream: "stream-a-1", Target: "target-4",
		},
		{},
	}))
	if got := LBEventLog().All(nil); got != "no events\n" {
		t.Errorf("%q", got)
	}
}
