package midstream

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/pion/sctp"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// rawConn carries SCTP packets of two addresses: this kernel may have no SCTP.
type rawConn struct{ *net.IPConn }

func (conn rawConn) Read(buffer []byte) (int, error) {
	n, _, err := conn.ReadFromIP(buffer) // without the header of IPv4
	return n, err
}

// rawSCTP returns the packets between two addresses.
func (x *fixture) rawSCTP(ns *lab.NetNS, local, remote netip.Addr) net.Conn {
	x.t.Helper()
	var conn *net.IPConn
	network := map[bool]string{true: "ip4:132", false: "ip6:132"}[local.Is4()]
	harness.Must(x.t, ns.Do(func() (err error) {
		conn, err = net.DialIP(network, &net.IPAddr{IP: local.AsSlice()}, &net.IPAddr{IP: remote.AsSlice()})
		return err
	}))
	x.t.Cleanup(func() { _ = conn.Close() })
	return rawConn{conn}
}

// serveSCTP answers each message of a client with the number of the target.
func (x *fixture) serveSCTP(number int, family vip.Family, client netip.Addr) {
	conn := x.rawSCTP(x.targets[number-1], vips[family], client)
	go func() {
		association, err := sctp.ServerWithOptions(sctp.WithNetConn(conn))
		if err != nil {
			return // the client chose another target
		}
		x.t.Cleanup(func() { _ = association.Close() })
		stream, err := association.AcceptStream()
		for buffer := make([]byte, 1500); err == nil; {
			if _, err = stream.Read(buffer); err == nil {
				_, err = fmt.Fprint(stream, number)
			}
		}
	}()
}

// dialSCTP opens an association from an address of its own: the port is always 5000.
func (x *fixture) dialSCTP(family vip.Family, client netip.Addr) *sctp.Stream {
	x.t.Helper()
	harness.Must(x.t, x.client.Addr("eth0", netip.PrefixFrom(client, client.BitLen()).String()))
	for number := range x.targets {
		x.serveSCTP(number+1, family, client)
	}
	association, err := sctp.ClientWithOptions(sctp.WithNetConn(x.rawSCTP(x.client, client, vips[family])))
	harness.Must(x.t, err)
	x.t.Cleanup(func() { _ = association.Close() })
	stream, err := association.OpenStream(1, sctp.PayloadTypeWebRTCBinary)
	harness.Must(x.t, err)
	return stream
}

func askSCTP(stream *sctp.Stream) (string, error) {
	if err := stream.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprint(stream, "?"); err != nil {
		return "", err
	}
	buffer := make([]byte, 1500)
	n, err := stream.Read(buffer)
	return string(buffer[:n]), errors.Join(err, stream.SetReadDeadline(time.Time{})) // ends its goroutine
}

// An SCTP association keeps its target in every mode; a new one gets the current target.
func TestMovedAssociationsKeepTheirTarget(t *testing.T) {
	for _, mode := range []Mode{{}, {Returning: true}} {
		for _, asking := range []asking{second, threeWay, everyone} {
			x := newFixtureBy(t, asking, mode.Returning)
			host := byte(10)
			for _, family := range vip.Families {
				for target := 1; target <= 2 || asking != second && target == 3; target++ {
					name := fmt.Sprintf("%s target %d, %s asked, returning %t", family, target, asking, mode.Returning)
					t.Run(name, func(t *testing.T) {
						addresses := []netip.Addr{}
						for range 2 {
							host++
							addresses = append(addresses, [...]netip.Addr{
								netip.AddrFrom4([4]byte{10, 9, 0, host}), netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x09, 15: host}),
							}[family])
						}
						want := fmt.Sprint(target)
						x.forward(uint32(4999 + target))
						association := x.dialSCTP(family, addresses[0])
						for range 3 {
							if got, err := askSCTP(association); got != want || err != nil {
								t.Fatalf("%q, %v", got, err)
							}
							x.move()
						}
						if got, err := askSCTP(x.dialSCTP(family, addresses[1])); got != "1" || err != nil {
							t.Errorf("a new association: %q, %v", got, err)
						}
					})
				}
			}
		}
	}
}
