package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/traffic"
)

// farClient is a namespace, connected to the gateway through a router by a link with a small MTU.
type farClient struct {
	*lab.NetNS
	// addrs are the client's addresses: enough per family for every download to use an address for
	// which no target has cached a path MTU.
	addrs []netip.Addr
}

const (
	smallMTU  = 1300
	bulkPort  = 9000
	bulkSize  = 256 << 10
	downloads = 12 // per family

	targetMTU  = 1280 // minimum MTU of IPv6
	uploadPort = 9001
	uploadSize = 2 << 20
)

func newFarClient(t *testing.T, gateway *lab.NetNS) *farClient {
	t.Helper()
	router, client := lab.NewNetNS(t), &farClient{NetNS: lab.NewNetNS(t)}
	var own []string
	for n := range downloads {
		own = append(own, fmt.Sprintf("198.51.100.%d/24", n+10), fmt.Sprintf("2001:db8:1::%x/64", n+16))
	}
	for _, p := range own {
		client.addrs = append(client.addrs, netip.MustParsePrefix(p).Addr())
	}
	harness.Must(t, errors.Join(
		lab.Veth(client.NetNS, "far0", router, "client0"),
		lab.Veth(router, "near0", gateway, "far0"),
		client.Addr("far0", own...),
		router.Addr("client0", "198.51.100.1/24", "2001:db8:1::1/64"),
		router.Addr("near0", "198.51.101.2/24", "2001:db8:2::2/64"),
		gateway.Addr("far0", "198.51.101.1/24", "2001:db8:2::1/64"),
		router.Sysctl("net.ipv4.ip_forward", "1"), router.Sysctl("net.ipv6.conf.all.forwarding", "1"),
		router.Batch(fmt.Sprintf("link set near0 mtu %d", smallMTU), "route add 0.0.0.0/0 via 198.51.101.1",
			"route add ::/0 via 2001:db8:2::1"),
		gateway.Batch(fmt.Sprintf("link set far0 mtu %d", smallMTU), "route add 198.51.100.0/24 via 198.51.101.2",
			"route add 2001:db8:1::/64 via 2001:db8:2::2"),
		client.Batch("route add 0.0.0.0/0 via 198.51.100.1", "route add ::/0 via 2001:db8:1::1"),
	))
	return client
}

// serve makes a target handle every connection to a port.
func serve(t *testing.T, a *lab.App, port int, handle func(net.Conn)) {
	t.Helper()
	var done sync.WaitGroup
	t.Cleanup(done.Wait)
	l, err := a.NS.Listen("tcp", fmt.Sprintf(":%d", port))
	harness.Must(t, err)
	t.Cleanup(func() { l.Close() })
	done.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			done.Go(func() {
				defer conn.Close()
				if conn.SetDeadline(time.Now().Add(waitTimeout)) == nil {
					handle(conn)
				}
			})
		}
	})
}

// sendBulk sends the data of a download. Errors are ignored because the client detects missing
// data.
func sendBulk(conn net.Conn) { _, _ = conn.Write(make([]byte, bulkSize)) }

// receiveBulk confirms a complete upload.
func receiveBulk(conn net.Conn) {
	if n, err := io.Copy(io.Discard, conn); err == nil && n == uploadSize {
		_, _ = conn.Write([]byte{1})
	}
}

// dial connects to a VIP.
func (c *farClient) dial(ctx context.Context, from, vip netip.Addr, port uint16) (conn net.Conn, err error) {
	err = c.Do(func() error {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice()}, Timeout: waitTimeout}
		conn, err = d.DialContext(ctx, "tcp", netip.AddrPortFrom(vip, port).String())
		if err == nil {
			err = conn.SetDeadline(time.Now().Add(waitTimeout))
		}
		return err
	})
	return conn, err
}

// upload sends uploadSize bytes to a VIP and waits until a target has received them.
func (c *farClient) upload(ctx context.Context, from, vip netip.Addr) error {
	conn, err := c.dial(ctx, from, vip, uploadPort)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.Write(make([]byte, uploadSize))
	if err == nil {
		err = conn.(*net.TCPConn).CloseWrite()
	}
	if err == nil {
		_, err = io.ReadFull(conn, make([]byte, 1))
	}
	if err != nil {
		return fmt.Errorf("upload from %s to %s: %w", from, vip, err)
	}
	return nil
}

// download receives all data from a VIP.
func (c *farClient) download(ctx context.Context, from, vip netip.Addr) error {
	conn, err := c.dial(ctx, from, vip, bulkPort)
	if err != nil {
		return err
	}
	defer conn.Close()
	n, err := io.Copy(io.Discard, conn)
	if err == nil && n != bulkSize {
		err = errors.New("the connection ended early")
	}
	if err != nil {
		return fmt.Errorf("%s from %s: %d of %d bytes: %w", from, vip, n, bulkSize, err)
	}
	return nil
}

// ICMP errors reach the target that sent the quoted packet, so path MTU discovery through a VIP
// works. The gateway hashes its errors over the pods: half of them arrive at the pod that does not
// forward the flow. The errors of the pods themselves reach the client.
func TestPathMTUDiscoveryThroughVIP(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{
		"conntrack on": {"--conntrack=on"}, "conntrack off": {"--conntrack=off"},
		"conntrack loose": {"--conntrack=loose"}, "fast path": fastPathFlags,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "fast path" {
				requireFastPath(t)
			}
			ctx, trench := openTrench(t, traffic.Options{Targets: 4, LB: flags})
			client := newFarClient(t, trench.Gateway)
			for _, a := range trench.Targets {
				serve(t, a, bulkPort, sendBulk)
				serve(t, a, uploadPort, receiveBulk)
			}
			all := func(transfer func(ctx context.Context, from, vip netip.Addr) error) {
				errs := make(chan error, len(client.addrs))
				for _, from := range client.addrs {
					vip := trench.VIPs[0]
					if from.Is6() {
						vip = trench.VIPs[1]
					}
					go func() { errs <- transfer(ctx, from, vip) }()
				}
				for range client.addrs {
					harness.Check(t, <-errs)
				}
			}
			// The test is only valid if the link was too small for the packets.
			learned := func(mtu int, hosts ...*lab.NetNS) {
				for _, family := range []string{"-4", "-6"} {
					n := 0
					for _, host := range hosts {
						out, err := host.Run(ctx, "ip", family, "route", "show", "table", "all", "cache")
						harness.Must(t, err)
						n += strings.Count(out, fmt.Sprintf("mtu %d", mtu))
					}
					if n == 0 {
						t.Errorf("ip %s: no host has learned a path MTU of %d", family, mtu)
					}
				}
			}
			all(client.download)
			var targets []*lab.NetNS
			for _, a := range trench.Targets {
				targets = append(targets, a.NS)
			}
			learned(smallMTU, targets...)

			for _, pod := range trench.Pods {
				harness.Must(t, pod.Namespace().IP("link", "set", lab.Internal, "mtu", fmt.Sprint(targetMTU)))
			}
			all(client.upload)
			learned(targetMTU, client.NetNS)
		})
	}
}
