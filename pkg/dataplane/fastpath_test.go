package dataplane

import (
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/fastpath"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// withFastPath selects the fast path, and skips the test where it cannot work.
func (s *site) withFastPath() func(*Options) {
	s.t.Helper()
	if err := s.ns.Do(fastpath.Probe); err != nil {
		lab.Skip(s.t, err.Error())
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

// sizes returns the sizes in the records of the program that is attached to an interface; 0 is a
// suspended stream.
func (s *site) sizes(device string) (sizes []uint32) {
	s.t.Helper()
	s.must(s.ns.Do(func() error {
		at, err := net.InterfaceByName(device)
		if err != nil {
			return err
		}
		result, err := link.QueryPrograms(link.QueryOptions{Target: at.Index, Attach: ebpf.AttachTCXIngress})
		if err != nil {
			return err
		}
		program, err := ebpf.NewProgramFromID(result.Programs[0].ID)
		if err != nil {
			return err
		}
		defer program.Close()
		info, err := program.Info()
		if err != nil {
			return err
		}
		ids, _ := info.MapIDs()
		for _, id := range ids {
			found, err := ebpf.NewMapFromID(id)
			if err != nil {
				return err
			}
			defer found.Close()
			if details, err := found.Info(); err != nil || details.Name != "records" {
				continue
			}
			var record [4]uint32 // offset, size, seed, match
			for index := range uint32(2) {
				if err := found.Lookup(index, &record); err != nil {
					return err
				}
				sizes = append(sizes, record[1])
			}
		}
		return nil
	}))
	return sizes
}

// Before nftables change and until the change is read back, packets of the stream continue to
// nftables.
func TestFastPathIsSuspendedDuringChange(t *testing.T) {
	s := newSite(t)
	p := s.start(s.withFastPath())
	one, two := siteTarget(1, plan.Serving, plan.Serving), siteTarget(2, plan.Serving, plan.Serving)
	p.configure(siteStream("a", bothVIPs, one, two))
	follows := func() bool { return s.attached("eth1") && slices.Equal(s.sizes("eth1"), []uint32{103, 103}) }
	s.eventually("the fast path", follows)
	during := map[string][]uint32{}
	before := afterStep
	onStep := func(do func(string)) {
		_, err := ask(t.Context(), p.Plane, "watch the steps", func(*engine) (any, error) { afterStep = do; return nil, nil })
		s.must(err)
	}
	onStep(func(step string) {
		if step == "routes" || step == "written" || step == "read-back" {
			during[step] = s.sizes("eth1")
		}
	})
	p.configure(siteStream("a", bothVIPs, one))
	s.eventually("the next table", follows)
	onStep(before)
	for _, step := range []string{"routes", "written", "read-back"} {
		if !slices.Equal(during[step], []uint32{0, 0}) {
			t.Errorf("after the step %s the sizes are %v", step, during[step])
		}
	}
}
