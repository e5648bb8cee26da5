package replypath

import (
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/await"
)

// peer returns the peer with a link-layer address, or the zero value.
func peer(p *Path, mac string) Peer {
	for _, x := range p.Status().Peers {
		if x.MAC == mac {
			return x
		}
	}
	return Peer{}
}

// A failed trench pod does not disturb flows of the remaining pods, and flows that the application
// opens avoid it, as does an answer whose client only waits. Pods that return with a different
// link-layer or IP address are detected.
func TestPodsComeAndGo(t *testing.T) {
	t.Run("all", func(t *testing.T) { podsComeAndGo(t) })
	t.Run("subnets", func(t *testing.T) { podsComeAndGo(t, "172.16.0.0/25", "fd00:2::/121") })
}

// awaitPeers waits until trench pods are peers before their first packet, with subnets.
func (x *fixture) awaitPeers(p *Path, macs ...string) {
	x.Helper()
	for _, mac := range macs {
		await.True(x, "resolved trench pod", func() bool { return p.o.PeerSubnets == nil || peer(p, mac).Live })
	}
}

func podsComeAndGo(t *testing.T, subnets ...string) {
	x := newFixture(t, 3)
	for _, family := range []string{"ipv4", "ipv6"} {
		for key, value := range map[string]string{"ucast_solicit": "1", "mcast_solicit": "1", "retrans_time_ms": "100"} {
			x.must(x.target.Sysctl("net."+family+".neigh."+link+"."+key, value))
		}
	}
	o := x.options()
	o.PeerSubnets = pool(subnets...)
	p, _ := x.start(o)
	x.serve("80")
	x.complete(p)
	x.awaitPeers(p, podMAC(2, 0), podMAC(2, 1), podMAC(2, 2))
	var flows [3][]*flow
	for pod := range x.pods {
		x.via(pod)
		for _, v := range vips {
			flows[pod] = append(flows[pod], x.open("tcp", net.JoinHostPort(v, "80")))
		}
	}
	all := func(want ...bool) func() bool {
		return func() bool {
			for pod, live := range want {
				if y := peer(p, podMAC(2, pod)); y.Live != live || !y.Seen {
					return false
				}
			}
			return true
		}
	}
	await.True(t, "three live peers", all(true, true, true))
	for _, y := range p.Status().Peers {
		if mac, _ := net.ParseMAC(y.MAC); y.FWMark != fwmark(mac) || !y.Seen {
			t.Errorf("peer %+v, fwmark of its link address %d", y, fwmark(mac))
		}
	}

	// Flows that the application opens and that receive no reply.
	var sink net.PacketConn
	x.must(x.client.Do(func() (err error) {
		sink, err = net.ListenPacket("udp", ":9090")
		return err
	}))
	defer sink.Close()
	var silent []*flow
	for range 20 {
		f := x.openFrom(x.target, "udp", vips[0], "192.168.0.100:9090")
		silent = append(silent, f)
		_, err := f.Write([]byte("before"))
		x.must(err)
	}

	// Clients that wait for an answer, and the target's ends of their flows.
	var listener net.Listener
	x.must(x.target.Do(func() (err error) {
		listener, err = net.Listen("tcp", ":81")
		return err
	}))
	defer listener.Close()
	var waiting []*flow
	var answers []net.Conn
	for _, v := range vips {
		x.via(2)
		waiting = append(waiting, x.open("tcp", net.JoinHostPort(v, "81")))
		conn, err := listener.Accept()
		x.must(err)
		defer conn.Close()
		answers = append(answers, conn)
	}

	// Pod 2 fails.
	x.must(x.pods[2].IP("link", "set", "int0", "down"))
	await.True(t, "pod 2 is dead", all(true, true, false))
	for _, f := range append(flows[0], flows[1]...) {
		x.via(0)
		f.mustEcho(100)
	}
	for i, f := range waiting {
		_, err := answers[i].Write([]byte("late"))
		x.must(err)
		x.must(f.SetDeadline(time.Now().Add(5 * time.Second)))
		if _, err := io.ReadFull(f, make([]byte, len("late"))); err != nil {
			t.Errorf("an answer from %s after the loss of its pod: %v", f.RemoteAddr(), err)
		}
	}
	for _, f := range silent {
		_, err := f.Write([]byte("after"))
		x.must(err)
	}
	x.must(sink.SetReadDeadline(time.Now().Add(5 * time.Second)))
	for got, b := 0, make([]byte, 100); got < len(silent); {
		n, _, err := sink.ReadFrom(b)
		if err != nil {
			t.Errorf("%d of %d flows avoid the dead pod: %v", got, len(silent), err)
			break
		}
		if string(b[:n]) == "after" {
			got++
		}
	}
	clients := []string{"192.168.0.100", "fd00:1::100"}
	for i, v := range vips {
		x.listenUDP(x.client, clients[i], "8080")
		for range 20 {
			x.openFrom(x.target, "udp", v, net.JoinHostPort(clients[i], "8080")).mustEcho(100)
		}
	}
	for _, pod := range x.pods[:2] {
		x.sh(pod, "grep -q dport=8080 /proc/net/nf_conntrack")
	}

	// It returns with a different link-layer address; its flows continue.
	const mac = "02:00:00:00:aa:02"
	x.must(x.pods[2].IP("link", "set", "int0", "address", mac))
	x.must(x.pods[2].IP("link", "set", "int0", "up"))
	x.sh(x.pods[2], `ip addr replace fd00:2::3/64 dev int0 nodad; ip route replace 20.0.0.0/8 via 172.16.0.100
ip -6 route replace 2000::/16 via fd00:2::100`)
	x.awaitPeers(p, mac)
	x.via(2)
	for _, f := range flows[2] {
		f.mustEcho(100)
	}
	await.True(t, "another link address", func() bool { y := peer(p, mac); return y.Live && y.Seen })

	// The old link-layer address returns with the IP addresses of a new pod.
	x.must(x.pods[1].IP("link", "set", "int0", "down"))
	x.must(x.pods[1].IP("link", "set", "int0", "address", podMAC(2, 2)))
	x.must(x.pods[1].IP("link", "set", "int0", "up"))
	x.sh(x.pods[1], `ip addr flush dev int0 scope global; ip addr add 172.16.0.77/24 dev int0
ip addr add fd00:2::77/64 dev int0 nodad
ip route replace 20.0.0.0/8 via 172.16.0.100; ip -6 route replace 2000::/16 via fd00:2::100`)
	x.awaitPeers(p, podMAC(2, 2))
	x.via(1)
	for _, f := range append(flows[0], flows[1]...) {
		f.mustEcho(100)
	}
	await.True(t, "other addresses", func() bool {
		y := peer(p, podMAC(2, 2))
		return y.Live && strings.Contains(strings.Join(texts(y), " "), "172.16.0.77") && !peer(p, podMAC(2, 1)).Live
	})
}

func texts(p Peer) (list []string) {
	for _, a := range p.Addresses {
		list = append(list, a.String())
	}
	return list
}
