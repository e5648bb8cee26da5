package healthcheck

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/pion/sctp"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// serveSCTP answers INITs to an address over a raw socket, until the test ends.
func serveSCTP(t *testing.T, at netip.Addr, answer reply) {
	t.Helper()
	conn, err := net.ListenIP(networkSCTP, &net.IPAddr{IP: at.AsSlice()})
	if os.Geteuid() != 0 {
		lab.Skip(t, "raw sockets need root")
	}
	harness.Must(t, err)
	var serving sync.WaitGroup
	t.Cleanup(func() { _ = conn.Close(); serving.Wait() })
	serving.Go(func() {
		buffer := make([]byte, maxDatagram)
		for {
			n, from, err := conn.ReadFromIP(buffer)
			if err != nil {
				return
			}
			if n < sctpHeader+sizeINIT || buffer[sctpHeader] != chunkINIT {
				continue
			}
			for _, packet := range answer(append([]byte(nil), buffer[:n]...)) {
				_, _ = conn.WriteToIP(packet, from)
			}
		}
	})
}

// sctpReply answers an INIT with a chunk; skew is added to the verification tag.
func sctpReply(chunk byte, skew uint32, body []byte) reply {
	return func(request []byte) [][]byte {
		from, to := binary.BigEndian.Uint16(request[2:]), binary.BigEndian.Uint16(request)
		tag := binary.BigEndian.Uint32(request[sctpHeader+chunkHeader:])
		return [][]byte{sctpPacket(from, to, tag+skew, chunk, body)}
	}
}

var initACK = []byte{0, 0, 0, 7, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1}

func TestSCTPChecks(t *testing.T) {
	for name, tt := range map[string]struct {
		answer reply
		want   string
	}{
		"INIT ACK":                 {sctpReply(chunkINITACK, 0, initACK), ""},
		"ABORT":                    {sctpReply(chunkABORT, 0, nil), "ABORT"},
		"no tag":                   {sctpReply(chunkINITACK, 0, make([]byte, 16)), "INIT ACK without a tag"},
		"another chunk":            {sctpReply(3, 0, initACK), "chunk type 3, wanted INIT ACK"},
		"another verification tag": {sctpReply(chunkINITACK, 1, initACK), "an answer with another verification tag"},
		"a wrong CRC32c": {func(request []byte) [][]byte {
			packet := sctpReply(chunkINITACK, 0, initACK)(request)
			packet[0][9]++
			return packet
		}, "an answer with a wrong CRC32c"},
		"silence": {silence, "no answer in 100ms"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, at := range []netip.Addr{netip.MustParseAddr("127.0.0.2"), loopback6} {
				serveSCTP(t, at, tt.answer)
				want := "port 2905: " + tt.want
				if tt.want == "" {
					want = ""
				}
				var got outcome
				inTime(func(limit time.Duration) bool {
					p := newPlan(trench.Check{
						SingleCheck: trench.SingleCheck{Timeout: limit, SCTP: trench.SCTPCheck{Port: 2905}},
					})
					got = p.probe(harness.Context(t, limit), path{to: at}.dial, at, at)
					return got.reason == want
				})
				if got.reason != want {
					t.Errorf("%s: %+v, want %q", at, got, want)
				}
			}
		})
	}
}

// Nothing receives SCTP at an address: the kernel answers, unless it has SCTP itself.
func TestNoSCTP(t *testing.T) {
	if os.Geteuid() != 0 {
		lab.Skip(t, "raw sockets need root")
	}
	at := netip.MustParseAddr("127.0.0.3")
	p := newPlan(trench.Check{SingleCheck: trench.SingleCheck{Timeout: patience, SCTP: trench.SCTPCheck{Port: 2905}}})
	got := p.probe(harness.Context(t, patience), path{to: at, source: loopback4}.dial, at, at)
	want := "port 2905: ICMP protocol unreachable from 127.0.0.3"
	if got.reason != want && got.reason != "port 2905: ABORT" {
		t.Errorf("%+v, want %q", got, want)
	}
}

// TestSCTPOfPion exchanges the query with another implementation of SCTP.
func TestSCTPOfPion(t *testing.T) {
	near, far := net.Pipe()
	var serving sync.WaitGroup
	defer serving.Wait()
	defer near.Close()
	serving.Go(func() {
		// The ABORT ends the association before it is established, and Close the connection.
		if association, err := sctp.ServerWithOptions(sctp.WithNetConn(far)); err == nil {
			_ = association.Close()
		}
	})
	p := newPlan(trench.Check{SingleCheck: trench.SingleCheck{Timeout: patience, SCTP: trench.SCTPCheck{Port: 2905}}})
	query := p.querySCTP()
	_, err := near.Write(query.request)
	harness.Must(t, err)
	harness.Must(t, near.SetReadDeadline(time.Now().Add(patience)))
	buffer := make([]byte, maxDatagram)
	length, err := near.Read(buffer)
	harness.Must(t, err)
	if o, final := query.answer(buffer[:length]); o.verdict != succeeded || !final || query.farewell == nil {
		t.Fatal(o, final)
	}
	_, err = near.Write(query.farewell)
	harness.Must(t, err)
}
