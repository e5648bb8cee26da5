package replypath

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nft"
)

func TestNamesMissingCapability(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "setpriv", "--bounding-set", "-net_admin", os.Args[0])
	cmd.Env = append(os.Environ(), victimPool+"=20.0.0.0/24")
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "CAP_NET_ADMIN is missing; add NET_ADMIN") {
		t.Errorf("got %s, %v", out, err)
	}
}

// The kernel of the test supports all features; these messages fail on kernels without them.
func TestNamesMissingKernelOption(t *testing.T) {
	sent := map[string]bool{}
	for _, table := range (desired{link: "net0", pool: pool("20.0.0.0/24")}).tables() {
		sent["add table "+table.String()] = true
		for _, chain := range table.Chains {
			sent["add chain "+table.String()+" "+chain.Name] = true
			sent["add rule to chain "+table.String()+" "+chain.Name] = true
		}
	}
	for step, want := range map[string]string{
		"add chain netdev vipgate-target egress":       "Linux 5.16 or newer with CONFIG_NETFILTER_EGRESS",
		"add chain netdev vipgate-target ingress":      "CONFIG_NF_TABLES_NETDEV",
		"add chain arp vipgate-target output":          "CONFIG_NF_TABLES_ARP",
		"add table arp vipgate-target":                 "CONFIG_NF_TABLES_ARP",
		"add rule to chain inet vipgate-target output": "CONFIG_NFT_NUMGEN",
	} {
		words := strings.SplitN(step, " ", 3)
		err := &nft.Error{Operation: words[0] + " " + words[1], Object: words[2], Err: unix.ENOENT}
		if got := problemOf("nftables", err); !sent[step] || !strings.Contains(got.Remedy, want) {
			t.Errorf("%s, sent %v: %+v", step, sent[step], got)
		}
	}
	err := &nft.Error{Operation: "add table", Object: "inet vipgate-target", Err: unix.EPERM}
	if p := problemOf("nftables", err); p.Remedy != capabilityRemedy {
		t.Errorf("%+v", p)
	}
}
