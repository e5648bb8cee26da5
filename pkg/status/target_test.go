package status

import (
	"testing"
	"time"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
)

func goodTarget() *targetadminv1.Status {
	return &targetadminv1.Status{
		Version: "v0.2.0", Pool: []string{"20.0.0.0/24", "2000::/64"}, Interface: "net1", Dropped: 3,
		Complete: true, Since: before(time.Minute), Repairs: 1,
		Conditions: []*adminv1.Condition{{Name: "Readiness", Serving: true}, {Name: "ReplyPath", Serving: true}},
		Peers: []*targetadminv1.Peer{
			{
				Mac: "02:00:00:00:00:01", Addresses: []string{"172.16.0.1", "fd00::1"}, Fwmark: 0x1234567,
				Seen: true, Live: true, Flows: 12,
			},
			{Mac: "02:00:00:00:00:02", Fwmark: 0x89},
		},
	}
}

func registered(state, problem string) *targetadminv1.Registration {
	return &targetadminv1.Registration{
		Stream: "web", Name: "web-1", Addresses: []string{"172.16.1.1"}, Registry: "lb.trench-a:7790",
		Lb: "10.0.0.1:7790", State: state, Since: before(time.Second), Error: problem,
	}
}

func TestTarget(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*targetadminv1.Status)
		good   bool
	}{
		"good": {func(*targetadminv1.Status) {}, true},
		"bad": {func(s *targetadminv1.Status) {
			s.Complete, s.FlowsError = false, "failed to list connection tracking entries: timeout"
			s.Problems = []*adminv1.Problem{
				{Object: "interface net1", Detail: "does not exist", Remedy: "attach the pod to the network of the targets"},
				{Object: "route 20.0.0.0/24", Detail: "no such device"},
			}
			s.Conditions = []*adminv1.Condition{{Name: "Readiness"}, {Name: "ReplyPath", Detail: "interface net1"}}
			s.Registrations = append(s.Registrations, registered("READY", ""), registered("", "connection refused"))
		}, false},
		"starting": {func(s *targetadminv1.Status) {
			s.Complete, s.Since, s.Peers, s.Repairs = false, nil, nil, 0
			s.Conditions = []*adminv1.Condition{
				{Name: "Readiness"}, {Name: "ReplyPath", Detail: "the kernel state was not read yet"},
			}
		}, false},
		"registered": {func(s *targetadminv1.Status) {
			s.Registrations = append(s.Registrations, registered("READY", ""))
		}, true},
		"not-registered": {func(s *targetadminv1.Status) {
			s.Registrations = append(s.Registrations, registered("", "no route to host"))
		}, false},
		"add-alone": {func(s *targetadminv1.Status) {
			s.Reset()
			s.Version, s.Registrations = "v0.2.0", append(s.Registrations, registered("STARTING", "not checked yet"))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := goodTarget()
			c.change(s)
			text, good := Target(s, now)
			if good != c.good {
				t.Errorf("good: %v", good)
			}
			wantGolden(t, "target-"+name+".golden", text)
		})
	}
}
