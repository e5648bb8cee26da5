package midstream

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// BenchmarkApply changes a tenth of the slots of one stream.
func BenchmarkApply(b *testing.B) {
	for _, count := range []int{1, 100} {
		b.Run(fmt.Sprint(count), func(b *testing.B) {
			ns := lab.NewNetNS(b)
			var conn *nft.Conn
			harness.Must(b, ns.Do(func() (err error) {
				conn, err = nft.Dial()
				return err
			}))
			defer conn.Close()
			content := func(first int) (all Streams) {
				for _, family := range vip.Families {
					address := netip.MustParseAddr([]string{"172.16.1.1", "fd00:16::1"}[family])
					for i := range count {
						stream := Stream{Name: fmt.Sprint("stream-", i), Size: 1009, Seed: 1, FWMarks: map[uint32]plan.LinkAddress{}}
						for target := range 10 {
							stream.FWMarks[uint32(5000+10*i+target)] = plan.LinkAddress{2, 0, 0, byte(i), 1, byte(target)}
						}
						stream.Asked[0] = map[uint32]netip.Addr{}
						from := 0
						if i == 0 {
							from = first
						}
						for slot := from; slot < from+800; slot++ {
							stream.Asked[0][uint32(slot)] = address
						}
						all[family] = append(all[family], stream)
					}
				}
				return all
			}
			known := content(0)
			if _, err := Apply(conn, 0xffffff, known, Streams{}); err != nil {
				b.Fatal(err)
			}
			other := content(100)
			for _, family := range vip.Families {
				copy(other[family][1:], known[family][1:]) // the engine keeps the maps of unchanged streams
			}
			for b.Loop() {
				if _, err := Apply(conn, 0xffffff, other, known); err != nil {
					b.Fatal(err)
				}
				known, other = other, known
			}
		})
	}
}
