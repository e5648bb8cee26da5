package replypath

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/lab"
)

// BenchmarkReply measures an ICMP echo request and its reply in the target's kernel: veth handles
// both in the system call that sends the request. "own" is an address of the interface, "rules" the
// alternative with a policy rule and a routing table for each peer.
func BenchmarkReply(b *testing.B) {
	for _, kind := range []string{"own", "path", "rules"} {
		for _, peers := range []int{1, 3, 200} {
			b.Run(fmt.Sprintf("%s/peers=%d", kind, peers), func(b *testing.B) { benchmarkReply(b, kind, peers) })
		}
	}
}

func benchmarkReply(b *testing.B, kind string, peers int) {
	x := &fixture{TB: b, target: lab.NewNetNS(b, lab.WithoutDAD)}
	other := lab.NewNetNS(b, lab.WithoutDAD)
	x.must(lab.Veth(x.target, link, other, "wire"))
	x.must(x.target.IP("link", "set", link, "address", "02:00:00:00:04:00"))
	x.must(x.target.Addr(link, "172.16.0.100/16"))
	vip := netip.MustParseAddr(vips[0])
	switch kind {
	case "own":
		vip = netip.MustParseAddr("172.16.0.100")
		x.sh(x.target, `nft 'table inet t { chain c { type filter hook input priority 0; ct state new; }; }'
ip neigh add 172.16.0.1 lladdr 02:00:00:09:00:00 dev net0; ip route add default via 172.16.0.1`)
	case "path":
		p, _ := x.start(x.options())
		x.complete(p)
	case "rules":
		x.sh(x.target, rulesForEach(peers))
	}
	var frames [][]byte
	for i := range peers {
		_, request := echoRequest(netip.MustParseAddr(fmt.Sprintf("10.9.%d.1", i)), vip)
		frame := slices.Concat(net.HardwareAddr{2, 0, 0, 0, 4, 0}, mac(i))
		frames = append(frames, append(binary.BigEndian.AppendUint16(frame, unix.ETH_P_IP), request...))
	}
	fd := -1
	x.must(other.Do(func() error {
		i, err := net.InterfaceByName("wire")
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: i.Index})
	}))
	defer func() { _ = unix.Close(fd) }()
	i := 0
	for b.Loop() {
		if _, err := unix.Write(fd, frames[i%peers]); err != nil {
			b.Fatal(err)
		}
		i++
	}
	var sent int
	out := x.sh(x.target, "awk '/net0:/ {print $11}' /proc/net/dev")
	if _, err := fmt.Sscan(out, &sent); err != nil || sent < i*99/100 {
		b.Errorf("%d replies to %d requests, %v", sent, i, err)
	}
}

// rulesForEach is the alternative as a shell script.
func rulesForEach(peers int) string {
	var s, elements strings.Builder
	s.WriteString(`ip route add local 20.0.0.0/24 dev lo
ip neigh add 172.16.1.0 lladdr 02:00:00:09:00:00 dev net0
ip rule add from 20.0.0.0/24 lookup 9999 priority 80; ip route add default via 172.16.1.0 dev net0 table 9999
`)
	for i := range peers {
		fmt.Fprintf(&s, "ip neigh replace 172.16.1.%d lladdr %s dev net0\n", i, mac(i))
		fmt.Fprintf(&s, "ip rule add fwmark %d lookup %d priority 70\n", i+1, 10000+i)
		fmt.Fprintf(&s, "ip route add default via 172.16.1.%d dev net0 table %d\n", i, 10000+i)
		fmt.Fprintf(&elements, "%s : %d,", mac(i), i+1)
	}
	fmt.Fprintf(&s, `nft 'table inet alternative {
  map peers { type ether_addr : mark; elements = { %s }; }
  chain prerouting { type filter hook prerouting priority mangle;
    ip daddr 20.0.0.0/24 ct mark set ether saddr map @peers; }
  chain output { type route hook output priority mangle; ip saddr 20.0.0.0/24 meta mark set ct mark; }
}'
`, elements.String())
	return s.String()
}
