package dataplane

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/fastpath"
	"github.com/vipgate/vipgate/pkg/vip"
)

// withFastPath selects the fast path, and skips the test where it cannot work.
func (s *site) withFastPath() func(*Options) {
	s.t.Helper()
	if err := s.ns.Do(fastpath.Probe); err != nil {
		s.t.Skip(err)
	}
	return func(o *Options) { o.FastPath, o.Conntrack = FastPathAuto, ConntrackOff }
}

// attached reports whether a tcx program is attached to an interface.
func (s *site) attached(device string) bool {
	s.t.Helper()
	var result *link.QueryResult
	s.must(s.ns.Do(func() error {
		at, err := net.InterfaceByName(device)
		if err != nil {
			return err
		}
		result, err = link.QueryPrograms(link.QueryOptions{Target: at.Index, Attach: ebpf.AttachTCXIngress})
		return err
	}))
	return len(result.Programs) > 0
}

func TestFastPathFollowsConfirmedState(t *testing.T) {
	s := newSite(t)
	p := s.start(s.withFastPath())
	reason := func(what, want string) {
		t.Helper()
		s.eventually(what, func() bool {
			state := p.FastPath()
			on := want == ""
			return strings.Contains(state.Reason, want) && (state.Reason == "") == on && s.attached("eth1") == on
		})
	}
	reason("no configuration", kernelUnconfirmed)
	stream := siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving), siteTarget(2, plan.Serving))
	p.configure(stream)
	reason("a configuration", "")

	_, err := p.Hold(t.Context(), "a", 0)
	s.must(err)
	s.sh("nft delete element inet vipgate-lb maglev4/a { 7 }")
	reason("a hold", "held")
	_, err = p.Resume(t.Context(), "")
	s.must(err)
	reason("no hold", "")

	for withheld, want := range map[bool]int{false: 2, true: 1} {
		content, err := ask(t.Context(), p.Plane, "read the content", func(e *engine) (fastpath.Content, error) {
			return e.confirmed([len(vip.Families)]bool{vip.IPv4: withheld}), nil
		})
		if s.must(err); len(content.Streams) != 1 || len(content.Streams[0].VIPs) != want || len(content.Hops) != 3 {
			t.Errorf("with IPv4 withheld %t: %+v", withheld, content)
		}
	}

	// A new interface gets the program, too.
	s.sh("ip link add eth2 type veth peer name eth3")
	s.eventually("a new interface", func() bool { return s.attached("eth2") && s.attached("eth3") })

	p.stop()
	if s.attached("eth1") || s.attached("eth2") {
		t.Error("the program is attached after the end of the process")
	}
}

func TestFastPathDetachesAtDrift(t *testing.T) {
	s := newSite(t)
	p := s.start(s.withFastPath())
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving), siteTarget(2, plan.Serving)))
	s.eventually("the fast path", func() bool { return s.attached("eth1") })
	// Another process changes the same object until its repair is delayed.
	detached := false
	for end := time.Now().Add(patience); !detached && time.Now().Before(end); {
		s.sh("nft flush chain inet vipgate-lb stream/a")
		detached = strings.Contains(p.FastPath().Reason, "another process changed")
	}
	if !detached {
		t.Errorf("the fast path is attached while nftables differs: %+v", p.FastPath())
	}
	s.eventually("the repair", func() bool { return s.attached("eth1") && len(p.State().Load().Drift) == 0 })
}

func TestFastPathNeedsConntrackOff(t *testing.T) {
	s := newSite(t)
	p := s.start(func(o *Options) { o.FastPath = FastPathAuto })
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving)))
	if got := p.FastPath().Reason; got != errTracked.Error() || s.attached("eth1") {
		t.Errorf("with connection tracking: %q", got)
	}
}
