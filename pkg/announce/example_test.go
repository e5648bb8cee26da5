package announce_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/vip"
)

// The gate posts its decisions and sends heartbeats. Here a minimal BGP peer replaces BIRD.
func Example() {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer listener.Close()
	received := make(chan string, 1)
	go func() { received <- receive(listener) }()

	a := announce.New(announce.Options{
		Peer: netip.MustParseAddrPort(listener.Addr().String()), PeerAS: 64512,
		Local: netip.MustParseAddr("127.0.0.1"),
	})
	a.Post(announce.Batch{Revision: 1, Changes: []announce.Change{
		{VIP: vip.Require("20.0.0.1/32"), Route: announce.Route{Advertisement: announce.Announced}},
	}})
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()

	beat := time.NewTicker(announce.MaxHeartbeatAge / 4)
	defer beat.Stop()
	for waiting := true; waiting; {
		a.Heartbeat(time.Now())
		select {
		case prefix := <-received:
			fmt.Println("the peer received", prefix)
			waiting = false
		case <-beat.C:
		}
	}
	stop()
	<-ended
	// Output: the peer received 20.0.0.1/32
}

// receive accepts one session and returns the first prefix of its first UPDATE.
func receive(listener net.Listener) string {
	conn, err := listener.Accept()
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	r := bufio.NewReader(conn)
	for {
		m, err := read(r)
		if err != nil {
			return err.Error()
		}
		switch body := m.Body.(type) {
		case *bgp.BGPOpen:
			err = answer(conn)
		case *bgp.BGPUpdate:
			return body.NLRI[0].NLRI.String()
		}
		if err != nil {
			return err.Error()
		}
	}
}

// answer sends the OPEN of AS 64512 and the first KEEPALIVE.
func answer(w io.Writer) error {
	capabilities := []bgp.ParameterCapabilityInterface{
		bgp.NewCapMultiProtocol(bgp.RF_IPv4_UC), bgp.NewCapMultiProtocol(bgp.RF_IPv6_UC), bgp.NewCapFourOctetASNumber(64512),
	}
	open, err := bgp.NewBGPOpenMessage(64512, 3, netip.MustParseAddr("192.0.2.1"),
		[]bgp.OptionParameterInterface{bgp.NewOptionParameterCapability(capabilities)})
	if err != nil {
		return err
	}
	for _, m := range []*bgp.BGPMessage{open, bgp.NewBGPKeepAliveMessage()} {
		b, err := m.Serialize()
		if err != nil {
			return err
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	return nil
}

func read(r io.Reader) (*bgp.BGPMessage, error) {
	header := make([]byte, bgp.BGP_HEADER_LENGTH)
	if _, err := io.ReadFull(r, header); err != nil {
		return nil, err
	}
	var h bgp.BGPHeader
	if err := h.DecodeFromBytes(header); err != nil {
		return nil, err
	}
	body := make([]byte, int(h.Len)-len(header))
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, err
	}
	return bgp.ParseBGPBody(&h, body)
}
