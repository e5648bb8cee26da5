package fwstate

import (
	"strings"
	"testing"

	"github.com/google/nftables/expr"

	"github.com/vipgate/vipgate/test/lab"
)

// A kernel without nft_hash rejects the rule like this expression.
func TestRefusedWriteLeavesNothing(t *testing.T) {
	ns := lab.NewNetNS(t)
	f := openConn(t, ns, Config{Conntrack: ConntrackLoose})
	hash := expr.Hash{
		SourceRegister: Register(0), DestRegister: Register(0), Length: 4, Modulus: 2, Seed: 1,
		Type: expr.HashTypeJenkins,
	}
	if err := f.probeExpression(&hash); err != nil {
		t.Errorf("a kernel with nft_hash refuses it: %v", err)
	}
	hash.Modulus = 0
	if f.probeExpression(&hash) == nil {
		t.Error("an expression that the kernel refuses is taken for one that it has")
	}
	refused := f.missing(
		kernelFeature{
			"nft_ct", "the kernel cannot ask connection tracking",
			&expr.Ct{Key: expr.CtKeyMARK, Register: Register(0)},
		},
		kernelFeature{"nft_hash", "the kernel cannot hash flows", &hash},
	)
	if len(refused) != 1 || refused[0].Object != "nft_hash" || refused[0].Remedy != "modprobe nft_hash" ||
		!strings.HasPrefix(refused[0].Detail, "the kernel cannot hash flows: ") {
		t.Errorf("what the kernel refuses is reported as %+v", refused)
	}
	if problems := f.MissingModules(); len(problems) > 0 {
		t.Errorf("problems %+v", problems)
	}
	if out := ns.Shell(t, "nft list tables"); strings.TrimSpace(out) != "" {
		t.Errorf("the probes left %s", out)
	}
}
