package kernel

import (
	"fmt"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

func TestNeighborTablesInANamespace(t *testing.T) {
	ns, peer := lab.NewNetNS(t), lab.NewNetNS(t)
	must(t, lab.Veth(ns, "eth0", peer, "eth0"))
	run(t, ns, "for i in 1 2 3; do ip neigh add 10.9.0.$i lladdr 02:00:00:00:00:01 dev eth0; ip neigh add fd09::$i lladdr 02:00:00:00:00:01 dev eth0; done")
	must(t, ns.Do(func() error {
		tables, err := NeighborTables()
		for f, name := range map[vip.Family]string{vip.IPv4: "arp_cache", vip.IPv6: "ndisc_cache"} {
			shown := strings.Fields(run(t, ns, "ip ntable show name "+name+" | grep -om1 'thresh3 [0-9]*'"))
			if x := tables[f]; x.Entries < 3 || len(shown) != 2 || fmt.Sprint(x.Limit) != shown[1] {
				t.Errorf("%s: %+v, ip shows %q", f, x, shown)
			}
		}
		return err
	}))
}
