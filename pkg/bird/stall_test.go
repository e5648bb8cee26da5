package bird_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// A gateway that sends KEEPALIVEs and reads nothing keeps BIRD's hold timer running, and its
// kernel acknowledges the probes of the closed window: it must not keep a withdrawn VIP (RFC
// 9687).
func TestGatewayThatStopsReading(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4)
	gw := l.stallingGateway()
	p := newPod(t, l.Dev)
	vips := make([]vip.VIP, 5000) // more bytes of UPDATEs than both socket buffers of the test
	for i := range vips {
		vips[i] = vip.Require(fmt.Sprintf("20.%d.%d.1/32", i/256, i%256))
	}
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4)}, vips)
	p.Start()
	p.await("session", func(s bird.State) bool { return up("gateway-ipv4")(s) && s.Gateways[0].NoDelay })
	since := time.Now()
	p.Announce(announce.Announced, vips...)
	s := p.await("session lost", down("gateway-ipv4"))
	t.Logf("lost after %v: %s", time.Since(since).Round(time.Millisecond), s.Gateways[0].LastError)
	select {
	case err := <-gw:
		t.Logf("the gateway's connection: %v", err)
	case <-time.After(patience):
		t.Error("the gateway still sends KEEPALIVEs")
	}
}

// stallingGateway accepts one session and sends KEEPALIVEs, but reads nothing after it is up. The
// result receives the error that ended the connection.
func (l *link) stallingGateway() <-chan error {
	l.t.Helper()
	listener, err := l.listen(func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4096) })
	harness.Must(l.t, err)
	ended := make(chan error, 1)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		conn, err := listener.Accept()
		if err != nil {
			ended <- err
			return
		}
		defer conn.Close()
		ended <- keepAlive(conn, stop)
	})
	l.t.Cleanup(func() { close(stop); _ = listener.Close(); wg.Wait() })
	return ended
}

// keepAlive opens a session and sends KEEPALIVEs until the connection ends or stop is closed.
func keepAlive(conn net.Conn, stop <-chan struct{}) error {
	open, err := bgp.NewBGPOpenMessage(bgp.AS_TRANS, 3, netip.MustParseAddr("10.9.9.9"),
		[]bgp.OptionParameterInterface{bgp.NewOptionParameterCapability([]bgp.ParameterCapabilityInterface{
			bgp.NewCapMultiProtocol(bgp.RF_IPv4_UC), bgp.NewCapFourOctetASNumber(remoteAS),
		})})
	if err != nil {
		return err
	}
	for _, m := range []*bgp.BGPMessage{open, bgp.NewBGPKeepAliveMessage()} {
		b, err := m.Serialize()
		if err != nil {
			return err
		}
		if _, err := conn.Write(b); err != nil {
			return err
		}
	}
	// Two messages of the peer are its OPEN and the KEEPALIVE that confirms this one's.
	for range 2 {
		header := make([]byte, bgp.BGP_HEADER_LENGTH)
		if _, err := io.ReadFull(conn, header); err != nil {
			return err
		}
		length := int(header[16])<<8 | int(header[17])
		if _, err := io.CopyN(io.Discard, conn, int64(length-len(header))); err != nil {
			return err
		}
	}
	b, err := bgp.NewBGPKeepAliveMessage().Serialize()
	if err != nil {
		return err
	}
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if _, err := conn.Write(b); err != nil {
				return err
			}
		case <-stop:
			return nil
		}
	}
}

// listen listens at the gateway's IPv4 address and port.
func (l *link) listen(control func(fd int) error) (listener net.Listener, err error) {
	file, err := os.Open("/run/netns/" + l.Namespace)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread() // for good: the thread ends in the other namespace
		if err = unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
			return
		}
		config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
			if failed := c.Control(func(fd uintptr) { err = control(int(fd)) }); failed != nil {
				return failed
			}
			return err
		}}
		listener, err = config.Listen(context.Background(), "tcp",
			netip.AddrPortFrom(gatewayAddress(vip.IPv4), bgpPort).String())
	})
	wg.Wait()
	return listener, err
}
