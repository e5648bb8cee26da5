package rtnetlink

import (
	"fmt"
	"testing"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

func TestNeighborTablesInANamespace(t *testing.T) {
	ns, peer := lab.NewNetNS(t), lab.NewNetNS(t)
	must(t, lab.Veth(ns, "eth0", peer, "eth0"))
	ns.Shell(t, "for i in 1 2 3; do ip neigh add 10.9.0.$i lladdr 02:00:00:00:00:01 dev eth0; "+
		"ip neigh add fd09::$i lladdr 02:00:00:00:00:01 dev eth0; done")
	must(t, ns.Do(func() error {
		c, err := Dial()
		if err != nil {
			return err
		}
		defer c.Close()
		tables, err := c.NeighborTables()
		for f, name := range map[vip.Family]string{vip.IPv4: "arp_cache", vip.IPv6: "ndisc_cache"} {
			var limit, entries uint32
			shown := ns.Shell(t, "ip -s ntable show name "+name+" | grep -oE -m2 'thresh3 [0-9]+|entries [0-9]+'")
			if _, err := fmt.Sscanf(shown, "thresh3 %d\nentries %d", &limit, &entries); err != nil {
				return fmt.Errorf("ip shows %q: %w", shown, err)
			}
			// Other namespaces share the table and may change it concurrently.
			const others = 100_000
			if x := tables[f]; x.Limit != limit || x.Entries < 3 || x.Entries > entries+others {
				t.Errorf("%s: %+v, ip shows %q", f, x, shown)
			}
		}
		return err
	}))
}
