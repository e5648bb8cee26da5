package lb

import (
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// While duplicate address detection runs on the address of the gateways' network, the kernel
// chooses ::1 for packets to a gateway; no target could reply to checks from there.
func TestAddressTowardIsNeverTentative(t *testing.T) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	pod, peer := lab.NewNetNS(t), lab.NewNetNS(t)
	must(lab.Veth(pod, "external", peer, "pod"))
	must(pod.Sysctl("net.ipv6.conf.external.dad_transmits", "1000")) // seconds: the test ends before
	must(pod.IP("addr", "add", "fd00:1::2/64", "dev", "external"))
	must(pod.IP("addr", "add", "169.254.100.2/24", "dev", "external"))
	toward := func(gateway string) (local netip.Addr) {
		must(pod.Do(func() error {
			local = addressToward(netip.MustParseAddr(gateway))
			return nil
		}))
		return local
	}
	if a := toward("fd00:1::1"); a.IsValid() {
		t.Errorf("while the address is tentative: %s", a)
	}
	must(pod.IP("addr", "del", "fd00:1::2/64", "dev", "external"))
	must(pod.IP("addr", "add", "fd00:1::2/64", "dev", "external", "nodad"))
	for gateway, want := range map[string]string{
		"fd00:1::1": "fd00:1::2", "169.254.100.1": "169.254.100.2", "::1": "::1",
	} {
		if a := toward(gateway); a != netip.MustParseAddr(want) {
			t.Errorf("toward %s: %s instead of %s", gateway, a, want)
		}
	}
}
