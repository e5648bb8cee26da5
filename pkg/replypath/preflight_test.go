package replypath

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
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
	messages := desired{device: 1, link: "net0", pool: pool("20.0.0.0/24")}.write(&objects{})
	for step, want := range map[string]string{
		"add chain netdev vipgate-target egress":       "Linux 5.16 or newer with CONFIG_NETFILTER_EGRESS",
		"add chain netdev vipgate-target ingress":      "CONFIG_NF_TABLES_NETDEV",
		"add chain arp vipgate-target output":          "CONFIG_NF_TABLES_ARP",
		"add table arp vipgate-target":                 "CONFIG_NF_TABLES_ARP",
		"add rule to chain inet vipgate-target output": "CONFIG_NFT_NUMGEN",
	} {
		found := false
		for _, s := range messages.steps {
			found = found || s == step
		}
		if got := problemOf("nftables", &stepError{step, unix.ENOENT}); !found || !strings.Contains(got.Remedy, want) {
			t.Errorf("%s, sent %v: %+v", step, found, got)
		}
	}
	if p := problemOf("nftables", &stepError{"add table inet vipgate-target", unix.EPERM}); p.Remedy != capabilityRemedy {
		t.Errorf("%+v", p)
	}
}
