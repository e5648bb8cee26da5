package healthcheck

import (
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/vipgate/vipgate/pkg/trench"
)

// An answer has an outcome with a reason of bounded length, or succeeds.
func wantOutcome(t *testing.T, o outcome) {
	t.Helper()
	if (o.verdict == succeeded) != (o.reason == "") || o.verdict > failed || len(o.reason) > 2000 {
		t.Errorf("%+v", o)
	}
}

func FuzzUDPAnswer(f *testing.F) {
	f.Add("hex:00ff", []byte{0, 0xff})
	f.Add("ok", []byte("not o"))
	f.Fuzz(func(t *testing.T, expect string, packet []byte) {
		p := newPlan(trench.Check{
			SingleCheck: trench.SingleCheck{UDP: trench.UDPCheck{Port: 1, Send: "x", Expect: expect}},
		})
		o, _ := p.answerUDP(packet)
		wantOutcome(t, o)
	})
}

func FuzzDNSAnswer(f *testing.F) {
	p := newPlan(trench.Check{SingleCheck: trench.SingleCheck{DNS: trench.DNSCheck{
		Port: 1, Name: "example.org", Type: "A", Transport: "udp", Answer: "^1",
	}}})
	query := p.queryDNS()
	for _, records := range [][]string{nil, {"10.0.0.1"}, {"192.0.2.1", "1.1.1.1"}} {
		for _, code := range []dnsmessage.RCode{0, 2, 15} {
			packet := dnsReply(code, nil, records...)(query.request)[0]
			packet[0], packet[1] = 0, 1
			f.Add(packet)
		}
	}
	f.Fuzz(func(t *testing.T, packet []byte) {
		o, _ := p.answerDNS(1, packet)
		wantOutcome(t, o)
		var message dnsmessage.Message
		if o.verdict == succeeded && message.Unpack(packet) == nil && (!message.Response || message.RCode != 0) {
			t.Errorf("%+v", message)
		}
	})
}

func FuzzNTPAnswer(f *testing.F) {
	p := newPlan(trench.Check{SingleCheck: trench.SingleCheck{NTP: trench.NTPCheck{Port: 1, MaxDistance: 1 << 30}}})
	request := make([]byte, ntpSize)
	f.Add(ntpReply(nil)(request)[0])
	f.Add(ntpReply(func(packet []byte) { packet[1] = 0; copy(packet[12:], "RATE") })(request)[0])
	f.Fuzz(func(t *testing.T, packet []byte) {
		o, _ := p.answerNTP([8]byte{}, packet)
		wantOutcome(t, o)
		if o.verdict == succeeded && (packet[0]&7 != ntpServer || packet[1] == 0 || packet[1] > 15 || packet[0]>>6 == 3) {
			t.Errorf("%x", packet)
		}
	})
}

func FuzzSCTPAnswer(f *testing.F) {
	p := newPlan(trench.Check{SingleCheck: trench.SingleCheck{SCTP: trench.SCTPCheck{Port: 2905}}})
	packet := sctpPacket(2905, 40000, 7, chunkINITACK, initACK)
	f.Add(packet)
	f.Add(append([]byte{0x45, 0, 0, 0, 0, 0, 0, 0, 1, 132, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2}, packet...))
	f.Add(sctpPacket(2905, 40000, 7, chunkABORT, nil))
	f.Fuzz(func(t *testing.T, packet []byte) {
		o, _, peer := p.answerSCTP(40000, 7, packet)
		wantOutcome(t, o)
		if (o.verdict == succeeded) != (peer != 0) {
			t.Errorf("%+v with tag %d", o, peer)
		}
	})
}

func FuzzICMPError(f *testing.F) {
	f.Add([]byte{
		111, 0, 0, 0, originICMP, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 172, 16, 1, 7, 0, 0, 0, 0, 0, 0, 0, 0,
	})
	f.Add([]byte{111, 0, 0, 0, originICMPv6, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		text, refused, silent, ok := icmpError(data)
		if ok != (text != "") || refused && silent {
			t.Error(text, refused, silent, ok)
		}
	})
}
