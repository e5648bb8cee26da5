package replypath

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/test/growth"
)

// Hosts that sent packets, and those that did not, while all, none or one of them are neighbors.
func TestGrowth(t *testing.T) {
	for name, left := range map[string]time.Duration{"peers": peerTimeout, "silent hosts": neighborTimeout / 2} {
		growth.Check(t, name, 1000, maxPeers/2, func(_ *testing.T, n int) func() {
			known := &peers{learned: map[uint32]learned{}}
			var entries []rtnetlink.Neighbor
			for i := range n {
				mac := net.HardwareAddr{2, 0, 0, 0, byte(i >> 8), byte(i)}
				known.learned[fwmark(mac)] = learned{mac: mac, left: left}
				entries = append(entries, rtnetlink.Neighbor{
					Addr: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), MAC: mac, State: unix.NUD_REACHABLE,
				})
			}
			return func() {
				for _, list := range [][]rtnetlink.Neighbor{entries, nil, entries[:1]} {
					known.update(list)
					known.live()
					known.dead()
					known.gone(time.Now())
				}
			}
		})
	}
}
