package dataplane

import (
	"strings"
	"testing"

	"github.com/google/nftables/expr"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// Issue 5: "Neighbour state is watched". The first failure may be seen by a look that has another reason, such as
// the plane's own changes that are reported back; the second one is only seen if it is heard of, since nothing
// else happens, and the next look at everything is a minute away.
func TestANeighbourThatFailsAgainIsOutAgain(t *testing.T) {
	for _, x := range []struct {
		family vip.Family
		addr   string
	}{{vip.IPv4, "10.1.0.12"}, {vip.IPv6, "fd01::c"}} {
		t.Run(x.family.String(), func(t *testing.T) {
			s := newSite(t)
			p := s.start()
			p.configure(siteStream("a", bothVIPs, siteTarget(1, Serving, Serving), siteTarget(2, Serving, Serving)))
			for range 3 {
				s.sh("ip neigh replace " + x.addr + " dev eth1 lladdr 02:00:00:00:00:12 nud reachable; ip neigh replace " + x.addr + " dev eth1 nud failed")
				p.wait("t2 out of the table", func(s State) bool { return serves(s, "a", x.family, "t1") && len(s.Unreachable) == 1 })
				s.sh("ip neigh replace " + x.addr + " dev eth1 lladdr 02:00:00:00:00:12 nud permanent")
				p.wait("t2 in the table", func(s State) bool { return serves(s, "a", x.family, "t1", "t2") && len(s.Unreachable) == 0 })
			}
		})
	}
}

// Issue 5: "a kernel without nft_hash". What the kernel lacks it refuses, as it refuses this expression.
func TestWhatTheKernelRefusesIsSeenAndLeavesNothing(t *testing.T) {
	ns := lab.NewNetNS(t)
	f := openFabric(t, ns, Options{})
	hash := expr.Hash{SourceRegister: register(0), DestRegister: register(0), Length: 4, Modulus: 2, Seed: 1, Type: expr.HashTypeJenkins}
	if err := f.probe(&hash); err != nil {
		t.Errorf("a kernel with nft_hash refuses it: %v", err)
	}
	hash.Modulus = 0
	if f.probe(&hash) == nil {
		t.Error("an expression that the kernel refuses is taken for one that it has")
	}
	refused := f.lacks(
		kernelPart{"nft_ct", "the kernel cannot ask connection tracking", &expr.Ct{Key: expr.CtKeyMARK, Register: register(0)}},
		kernelPart{"nft_hash", "the kernel cannot hash flows", &hash},
	)
	if len(refused) != 1 || refused[0].Object != "nft_hash" || refused[0].Remedy != "modprobe nft_hash" || !strings.HasPrefix(refused[0].Detail, "the kernel cannot hash flows: ") {
		t.Errorf("what the kernel refuses is told as %+v", refused)
	}
	if problems := f.lacksModules(); len(problems) > 0 {
		t.Errorf("problems %+v", problems)
	}
	if out := run(t, ns, "nft list tables"); strings.TrimSpace(out) != "" {
		t.Errorf("the probes left %s", out)
	}
}
