package healthcheck

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
)

// reply returns the answers to a request.
type reply func(request []byte) [][]byte

// serveUDP answers datagrams until the test ends.
func serveUDP(t *testing.T, at netip.Addr, answer reply) (port uint16) {
	t.Helper()
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, 0)))
	harness.Must(t, err)
	done := make(chan struct{})
	t.Cleanup(func() { _ = conn.Close(); <-done })
	go func() {
		defer close(done)
		buffer := make([]byte, maxDatagram)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(buffer)
			if err != nil {
				return
			}
			for _, packet := range answer(append([]byte(nil), buffer[:n]...)) {
				_, _ = conn.WriteToUDPAddrPort(packet, from)
			}
		}
	}()
	return conn.LocalAddr().(*net.UDPAddr).AddrPort().Port()
}

func fixed(texts ...string) reply {
	return func([]byte) (all [][]byte) {
		for _, text := range texts {
			all = append(all, []byte(text))
		}
		return all
	}
}

func silence([]byte) [][]byte { return nil }

// dnsReply answers a query with an rcode, and A records.
func dnsReply(code dnsmessage.RCode, change func(*dnsmessage.Message), records ...string) reply {
	return func(request []byte) [][]byte {
		var message dnsmessage.Message
		if message.Unpack(request) != nil {
			return nil
		}
		message.Response, message.RCode = true, code
		for _, record := range records {
			message.Answers = append(message.Answers, dnsmessage.Resource{
				Header: dnsmessage.ResourceHeader{Name: message.Questions[0].Name, Class: dnsmessage.ClassINET},
				Body:   &dnsmessage.AResource{A: netip.MustParseAddr(record).As4()},
			})
		}
		if change != nil {
			change(&message)
		}
		packet, _ := message.Pack()
		return [][]byte{packet}
	}
}

// ntpReply answers with a synchronized server's packet after a change.
func ntpReply(change func(packet []byte)) reply {
	return func(request []byte) [][]byte {
		packet := make([]byte, ntpSize)
		packet[0], packet[1] = 4<<3|ntpServer, 2
		binary.BigEndian.PutUint32(packet[4:], 1<<14) // root delay 250 ms
		binary.BigEndian.PutUint32(packet[8:], 1<<14)
		copy(packet[ntpOrigin:], request[ntpTransmit:])
		if change != nil {
			change(packet)
		}
		return [][]byte{packet}
	}
}

// datagramChecks runs a check over UDP by the connector and by a goroutine, in both families.
func datagramChecks(t *testing.T, answer reply, check trench.Check, want string) {
	t.Helper()
	for _, at := range loopbacks {
		port := serveUDP(t, at, answer)
		check.Interval, check.Rise, check.Fall = time.Second, 1, 1
		set := func(p *uint16) {
			if *p != 0 {
				*p = port
			}
		}
		set(&check.UDP.Port)
		set(&check.DNS.Port)
		set(&check.NTP.Port)
		expected := want
		if want != "" {
			expected = "port " + portString(port) + ": " + want
		}
		for name, run := range map[string]func(probe) outcome{
			"connector": func(p probe) outcome { return conclude(t, connecting(t), p) },
			"goroutine": func(p probe) outcome { return p.run(t.Context(), nil) },
		} {
			var got outcome
			inTime(func(limit time.Duration) bool {
				check.Timeout = limit
				e := &entry{Health: Health{Key: Key{Addr: at}}, plan: newPlan(check)}
				got = run(probe{path: e.path(nil), entry: e, began: time.Now(), plan: e.plan})
				return got.reason == expected && (got.verdict == succeeded) == (want == "")
			})
			if got.reason != expected || (got.verdict == succeeded) != (want == "") {
				t.Errorf("%s %s: %+v, want %q", at, name, got, expected)
			}
		}
	}
}

func TestUDPChecks(t *testing.T) {
	for name, tt := range map[string]struct {
		answer reply
		check  trench.UDPCheck
		want   string
	}{
		"any answer":      {fixed("x"), trench.UDPCheck{Send: "ping"}, ""},
		"an empty answer": {fixed(""), trench.UDPCheck{Send: "ping"}, ""},
		"bytes": {
			func(request []byte) [][]byte { return [][]byte{request} },
			trench.UDPCheck{Send: "hex:00ff10", Expect: "hex:ff10"},
			"",
		},
		"a wrong answer": {
			fixed("SIP/2.0 503"),
			trench.UDPCheck{Send: "OPTIONS", Expect: "SIP/2.0 200"},
			"the answer of 11 bytes does not contain SIP/2.0 200: SIP/2.0 503",
		},
		"silence": {silence, trench.UDPCheck{Send: "ping"}, "no answer in 100ms"},
	} {
		t.Run(name, func(t *testing.T) {
			tt.check.Port = 1
			datagramChecks(t, tt.answer, trench.Check{SingleCheck: trench.SingleCheck{UDP: tt.check}}, tt.want)
		})
	}
}

func TestDNSChecks(t *testing.T) {
	for name, tt := range map[string]struct {
		answer reply
		check  trench.DNSCheck
		want   string
	}{
		"an answer":        {dnsReply(0, nil, "192.0.2.1"), trench.DNSCheck{}, ""},
		"no record":        {dnsReply(0, nil), trench.DNSCheck{}, ""},
		"a wanted record":  {dnsReply(0, nil, "10.0.0.1", "192.0.2.1"), trench.DNSCheck{Answer: `^192\.0\.2\.1$`}, ""},
		"no wanted record": {dnsReply(0, nil), trench.DNSCheck{Answer: "."}, "the answer has no record"},
		"another record": {
			dnsReply(0, nil, "10.0.0.1"),
			trench.DNSCheck{Answer: "^192"},
			"no record of the answer matches; the first of 1 is 10.0.0.1",
		},
		"SERVFAIL":          {dnsReply(2, nil), trench.DNSCheck{}, "rcode SERVFAIL, wanted NOERROR"},
		"an unknown rcode":  {dnsReply(12, nil), trench.DNSCheck{}, "rcode 12, wanted NOERROR"},
		"a wanted NXDOMAIN": {dnsReply(3, nil), trench.DNSCheck{RCode: [4]string{"NOERROR", "NXDOMAIN"}}, ""},
		"a truncated answer": {
			dnsReply(0, func(m *dnsmessage.Message) { m.Truncated = true }),
			trench.DNSCheck{Answer: "."},
			"the answer is truncated: write transport: tcp",
		},
		"another identifier": {
			dnsReply(0, func(m *dnsmessage.Message) { m.ID++ }),
			trench.DNSCheck{},
			"an answer to another query",
		},
		"another question": {
			dnsReply(0, func(m *dnsmessage.Message) { m.Questions[0].Type = dnsmessage.TypeMX }),
			trench.DNSCheck{},
			"an answer to another query",
		},
		"the query itself": {
			func(request []byte) [][]byte { return [][]byte{request} },
			trench.DNSCheck{},
			"an answer to another query",
		},
		"the answer after one to another query": {func(request []byte) [][]byte {
			return append(dnsReply(2, func(m *dnsmessage.Message) { m.ID++ })(request), dnsReply(0, nil)(request)...)
		}, trench.DNSCheck{}, ""},
		"silence": {silence, trench.DNSCheck{}, "no answer in 100ms"},
		"no DNS": {
			fixed("x"),
			trench.DNSCheck{},
			"the answer is not DNS: unpacking header: id: insufficient data for base length type",
		},
	} {
		t.Run(name, func(t *testing.T) {
			tt.check.Port, tt.check.Name, tt.check.Type, tt.check.Transport = 1, "Example.org", "A", "udp"
			datagramChecks(t, tt.answer, trench.Check{SingleCheck: trench.SingleCheck{DNS: tt.check}}, tt.want)
		})
	}
}

// largeExpression has so many parts that it matches 4 KiB only.
const largeExpression = "ok$|^.{0,900}z"

// The records of an answer share the bytes that are matched.
func TestDNSMatchLimit(t *testing.T) {
	spaces := func(n int) string { return strings.Repeat(" ", n) }
	for name, tt := range map[string]struct {
		expression string
		records    []string
		want       verdict
	}{
		"within 4 KiB":                      {largeExpression, []string{spaces(4<<10-2) + "ok"}, succeeded},
		"beyond 4 KiB":                      {largeExpression, []string{spaces(4<<10-1) + "ok"}, failed},
		"record within 4 KiB":               {largeExpression, []string{spaces(4<<10 - 2), "ok"}, succeeded},
		"record beyond 4 KiB":               {largeExpression, []string{spaces(4<<10 - 1), "ok"}, failed},
		"empty record beyond 4 KiB":         {largeExpression + "|^$", []string{spaces(4 << 10), ""}, failed},
		"small expression in a long record": {"ok$", []string{spaces(40<<10) + "ok"}, succeeded},
		"small expression in a late record": {"ok$", []string{spaces(40 << 10), "ok"}, succeeded},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlan(trench.Check{SingleCheck: trench.SingleCheck{DNS: trench.DNSCheck{
				Port: 1, Name: "example.org", Type: "TXT", Transport: "tcp", Answer: tt.expression,
			}}})
			packet := dnsReply(0, func(message *dnsmessage.Message) {
				for _, text := range tt.records {
					var record dnsmessage.TXTResource
					for piece := range slices.Chunk([]byte(text), 255) {
						record.TXT = append(record.TXT, string(piece))
					}
					message.Answers = append(message.Answers, dnsmessage.Resource{
						Header: dnsmessage.ResourceHeader{Name: message.Questions[0].Name, Class: dnsmessage.ClassINET},
						Body:   &record,
					})
				}
			})
			query := p.queryDNS()
			if got, _ := query.answer(packet(query.request)[0]); got.verdict != tt.want {
				t.Errorf("%+v, want %v", got, tt.want)
			}
		})
	}
}

func TestDNSOverTCP(t *testing.T) {
	frame := func(answer reply) func(net.Conn) {
		return func(conn net.Conn) {
			buffer := make([]byte, maxDatagram)
			n, err := conn.Read(buffer)
			if err != nil || n < 2 {
				return
			}
			for _, packet := range answer(buffer[2:n]) {
				_, _ = conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(packet))), packet...))
			}
		}
	}
	for name, tt := range map[string]struct {
		serve func(net.Conn)
		want  string
	}{
		"an answer": {frame(dnsReply(0, nil, "192.0.2.1")), ""},
		"SERVFAIL":  {frame(dnsReply(2, nil)), "rcode SERVFAIL, wanted NOERROR"},
		"the end":   {frame(silence), "closed the connection: no answer"},
		"half": {func(conn net.Conn) {
			_, _ = conn.Read(make([]byte, 99))
			_, _ = conn.Write([]byte{1, 0, 7})
		}, "closed the connection: no end of the answer"},
	} {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, at netip.Addr) {
				port := serveRaw(t, at, tt.serve)
				p := newPlan(trench.Check{SingleCheck: trench.SingleCheck{Timeout: patience, DNS: trench.DNSCheck{
					Port: port, Name: "example.org.", Type: "A", Transport: "tcp", Answer: "^192",
				}}})
				got := ask(t, p, at, patience)
				if want := "port " + portString(port) + ": " + tt.want; tt.want != "" && got.reason != want ||
					tt.want == "" && got.verdict != succeeded {
					t.Errorf("%+v, want %q", got, tt.want)
				}
			})
		})
	}
}

func TestNTPChecks(t *testing.T) {
	for name, tt := range map[string]struct {
		change func([]byte)
		want   string
	}{
		"a synchronized server": {nil, ""},
		"stratum 16":            {func(p []byte) { p[1] = 16 }, "stratum 16"},
		"no clock": {
			func(p []byte) { p[0], p[1] = 3<<6|p[0], 0 },
			"unsynchronized (leap indicator 3), stratum 0",
		},
		"kiss-o'-death": {func(p []byte) { p[1] = 0; copy(p[12:], "RATE") }, "kiss-o'-death RATE"},
		"a client":      {func(p []byte) { p[0] = ntpClient }, "mode 3, wanted 4 (server)"},
		"a distant clock": {
			func(p []byte) { binary.BigEndian.PutUint32(p[8:], 1<<16) },
			"root distance 1.125s, wanted at most 500ms",
		},
		"another origin": {func(p []byte) { p[ntpOrigin]++ }, "an answer with another origin timestamp"},
	} {
		t.Run(name, func(t *testing.T) {
			check := trench.Check{
				SingleCheck: trench.SingleCheck{NTP: trench.NTPCheck{Port: 1, MaxDistance: 500 * time.Millisecond}},
			}
			datagramChecks(t, ntpReply(tt.change), check, tt.want)
		})
	}
	datagramChecks(t, fixed("x"), trench.Check{
		SingleCheck: trench.SingleCheck{NTP: trench.NTPCheck{Port: 1}},
	}, "an answer of 1 bytes, not NTP")
}

// A closed port is a failure without a wait, with the sender of the ICMP message.
func TestClosedUDPPort(t *testing.T) {
	for _, at := range loopbacks {
		conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, 0)))
		harness.Must(t, err)
		port := conn.LocalAddr().(*net.UDPAddr).AddrPort().Port()
		harness.Must(t, conn.Close())
		p := probing(at, 0, func(c *trench.Check) { c.UDP = trench.UDPCheck{Port: port, Send: "x"} })
		for name, got := range map[string]outcome{
			"connector": conclude(t, connecting(t), p), "goroutine": p.run(t.Context(), nil),
		} {
			want := "port " + portString(port) + ": ICMP port unreachable from " + at.String()
			if got.reason != want || !got.refused || got.silent {
				t.Errorf("%s %s: %+v, want %q", at, name, got, want)
			}
		}
	}
}

// A socket serves checks of several targets, and a late second answer reaches no later check.
func TestDatagramSocketsAreReused(t *testing.T) {
	twice := serveUDP(t, loopback4, fixed("good", "good", "good"))
	once := serveUDP(t, loopback4, fixed("bad"))
	k := connecting(t)
	for range 50 {
		for expect, port := range map[string]uint16{"good": twice, "bad": once} {
			check := trench.UDPCheck{Port: port, Send: "x", Expect: expect}
			o := conclude(t, k, probing(loopback4, 0, func(c *trench.Check) { c.UDP = check }))
			if o.verdict != succeeded {
				t.Fatal(o)
			}
		}
	}
	if len(k.sockets) != 1 {
		t.Errorf("%d sockets", len(k.sockets))
	}
}

func TestHTTPMethodAndHeaders(t *testing.T) {
	heads := make(chan string, 1)
	port := serveRaw(t, loopback4, func(conn net.Conn) {
		buffer := make([]byte, 4096)
		n, _ := conn.Read(buffer)
		heads <- string(buffer[:n])
		_, _ = conn.Write([]byte("HTTP/1.1 204 No Content\r\n\r\n"))
	})
	check := trench.HTTPCheck{Port: port, Method: "POST", Path: "/", Host: "h", Status: "204"}
	check.Headers = [8]string{"accept: text/plain", "X-Probe: 1"}
	if o := ask(t, newPlan(trench.Check{
		SingleCheck: trench.SingleCheck{Timeout: patience, HTTP: check},
	}), loopback4, patience); o.verdict != succeeded {
		t.Fatal(o)
	}
	want := "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nUser-Agent: vipgate-check\r\nContent-Length: 0\r\n" +
		"accept: text/plain\r\nX-Probe: 1\r\n\r\n"
	if head := <-heads; head != want {
		t.Errorf("\n got %q\nwant %q", head, want)
	}
}
