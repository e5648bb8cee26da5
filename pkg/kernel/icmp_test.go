package kernel

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// uploadSize is more than the buffers of both sockets hold.
const uploadSize = 8 << 20

// upload sends uploadSize bytes from the client to a VIP and returns how many have arrived.
func (x *topology) upload(t *testing.T, v vip.VIP) (received int64) {
	t.Helper()
	to := v.Prefix().Addr()
	var l net.Listener
	must(t, x.target.Do(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(to, 0).String())
		return err
	}))
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			received, err = io.Copy(io.Discard, c)
			_ = c.Close()
		}
		done <- err
	}()
	must(t, x.gateway.Do(func() error {
		from := netip.AddrPortFrom(clients[v.Family()], 0)
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(from), Timeout: patience}
		c, err := d.Dial("tcp", l.Addr().String())
		if err != nil {
			return err
		}
		err = c.SetDeadline(time.Now().Add(patience))
		if err == nil {
			_, err = c.Write(make([]byte, uploadSize))
		}
		return errors.Join(err, c.Close())
	}))
	must(t, <-done)
	return received
}

// The pod's link toward the targets has a smaller MTU than its link toward the gateways. The ICMP
// error must leave by a gateway, with or without a default route in the pod.
func TestPacketTooBigLeavesByGateway(t *testing.T) {
	for _, primary := range []bool{true, false} {
		t.Run(map[bool]string{true: "default route of the pod", false: "no default route"}[primary], func(t *testing.T) {
			t.Parallel()
			x := newTopology(t)
			x.openGateway(t)
			if !primary {
				x.pod.Shell(t, "ip route del default; ip -6 route del default")
			}
			must(t, x.pod.IP("link", "set", "int0", "mtu", "1400"))
			r := start(t, x.pod, testOptions(t))
			r.Configure(allVIPs())
			r.waitConfirmed(t, allVIPs()...)
			for _, v := range forwardedVIPs {
				if n := x.upload(t, v); n != uploadSize {
					t.Errorf("%s: %d of %d bytes", v, n, uploadSize)
				}
			}
			for _, family := range []string{"-4", "-6"} {
				// Without this the transfer caused no ICMP error.
				if routes := x.gateway.Shell(t, "ip "+family+" route show table all cache"); !strings.Contains(routes, "mtu 1400") {
					t.Errorf("ip %s: the client has learned no path MTU: %s", family, routes)
				}
			}
			x.wantNoLeak(t)
		})
	}
}

// A client that traces the route to a VIP sees the pod.
func TestTimeExceededLeavesByGateway(t *testing.T) {
	t.Parallel()
	x := startTopology(t)
	for _, v := range forwardedVIPs {
		level, hops, errs := unix.IPPROTO_IP, unix.IP_TTL, unix.IP_RECVERR
		if v.Family() == vip.IPv6 {
			level, hops, errs = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_RECVERR
		}
		d := net.Dialer{
			LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(clients[v.Family()], 0)),
			Control: func(_, _ string, c syscall.RawConn) (err error) {
				control := c.Control(func(fd uintptr) {
					err = errors.Join(unix.SetsockoptInt(int(fd), level, hops, 1), unix.SetsockoptInt(int(fd), level, errs, 1))
				})
				return errors.Join(control, err)
			},
		}
		must(t, x.gateway.Do(func() error {
			c, err := d.Dial("udp", netip.AddrPortFrom(v.Prefix().Addr(), 33434).String())
			if err != nil {
				return err
			}
			defer c.Close()
			if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
				return err
			}
			if _, err := c.Write([]byte("probe")); err != nil {
				return err
			}
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.EHOSTUNREACH) {
				t.Errorf("%s: %v, want an ICMP error", v, err)
			}
			return nil
		}))
	}
	x.wantNoLeak(t)
}
