package feedback

import (
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/bpf"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// packet returns a packet of UDP with 4 bytes of payload.
func packet(source, destination netip.AddrPort) []byte {
	ports := []byte{
		byte(source.Port() >> 8), byte(source.Port()), byte(destination.Port() >> 8), byte(destination.Port()),
	}
	if source.Addr().Is4() {
		header := append([]byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0}, source.Addr().AsSlice()...)
		return append(append(header, destination.Addr().AsSlice()...), ports...)
	}
	header := append([]byte{0x60, 0, 0, 0, 0, 8, 17, 64}, source.Addr().AsSlice()...)
	return append(append(header, destination.Addr().AsSlice()...), ports...)
}

func TestParse(t *testing.T) {
	for _, c := range [][2]string{{"198.51.100.2:31000", "20.0.0.1:5000"}, {"[2001:db8::2]:31001", "[2000::1]:5000"}} {
		source, to := netip.MustParseAddrPort(c[0]), netip.MustParseAddrPort(c[1])
		whole := packet(source, to)
		if f, ok := parse(whole); !ok || f != (flow{source, to.Addr()}) {
			t.Errorf("%v: %+v, %v", c, f, ok)
		}
		for n := range len(whole) {
			if _, ok := parse(whole[:n]); ok {
				t.Errorf("%v: %d bytes are a packet", c, n)
			}
		}
		other := append([]byte(nil), whole...)
		other[map[byte]int{4: 9, 6: 6}[whole[0]>>4]] = 1 // ICMP
		if _, ok := parse(other); ok {
			t.Errorf("%v: ICMP has ports", c)
		}
	}
	fragment := packet(netip.MustParseAddrPort("198.51.100.2:31000"), netip.MustParseAddrPort("20.0.0.1:5000"))
	fragment[7] = 1
	if _, ok := parse(fragment); ok {
		t.Error("a later fragment has ports")
	}
}

func FuzzParse(f *testing.F) {
	f.Add(packet(netip.MustParseAddrPort("198.51.100.2:1"), netip.MustParseAddrPort("20.0.0.1:2")))
	f.Add(packet(netip.MustParseAddrPort("[2001:db8::2]:1"), netip.MustParseAddrPort("[2000::1]:2")))
	f.Fuzz(func(t *testing.T, data []byte) {
		if f, ok := parse(data); ok && (!f.source.IsValid() || !f.vip.IsValid()) {
			t.Errorf("%x: %+v", data, f)
		}
	})
}

func TestFilter(t *testing.T) {
	sources := []netip.Addr{
		netip.MustParseAddr("198.51.100.2"), netip.MustParseAddr("2001:db8::2"), netip.MustParseAddr("198.51.100.3"),
		netip.MustParseAddr("2001:db8::3"),
	}
	for from, want := range map[string]bool{
		"198.51.100.2": true, "198.51.100.3": true, "198.51.100.4": false,
		"2001:db8::2": true, "2001:db8::3": true, "2001:db8::4": false, "2001:db9::2": false,
	} {
		// The VM has no packet types: its program begins after the check of the type.
		vm, err := bpf.NewVM(filter(sources)[3:])
		harness.Must(t, err)
		to := "20.0.0.1:5000"
		if strings.Contains(from, ":") {
			to = "[2000::1]:5000"
		}
		n, err := vm.Run(packet(netip.AddrPortFrom(netip.MustParseAddr(from), 1), netip.MustParseAddrPort(to)))
		harness.Must(t, err)
		if (n > 0) != want {
			t.Errorf("%s: %d bytes", from, n)
		}
	}
	for _, none := range [][]netip.Addr{sources[:1], sources[1:2], nil} {
		_, err := bpf.Assemble(filter(none))
		harness.Check(t, err)
	}
	many := make([]netip.Addr, 60*maxSources)
	for i := range many {
		many[i] = netip.AddrFrom16([16]byte{0x20, 1, 14: byte(i >> 8), 15: byte(i)})
	}
	const most = 4096 // instructions, in the kernel
	if program := filter(many); len(program) > most {
		t.Errorf("60 probes need %d instructions", len(program))
	}
}

// The kernel passes packets of both families from the sources, and no others.
func TestSocket(t *testing.T) {
	if os.Geteuid() != 0 {
		lab.Skip(t, "NET_RAW, for packet sockets")
	}
	ns := lab.NewNetNS(t)
	harness.Must(t, ns.Do(func() error {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		watch := watcher{}
		defer watch.follow(nil)
		seen := make(chan flow, 8)
		watch.seen = func(f flow) { seen <- f }
		harness.Must(t, watch.follow([]netip.Addr{netip.MustParseAddr("127.0.0.2"), netip.IPv6Loopback()}))
		send := func(from, to string) {
			conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(from)),
				net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
			harness.Must(t, err)
			_, err = conn.Write([]byte("x"))
			harness.Must(t, err)
			harness.Must(t, conn.Close())
		}
		send("127.0.0.3:31000", "127.0.0.1:9")
		for _, c := range [][2]string{{"127.0.0.2:31001", "127.0.0.1:9"}, {"[::1]:31002", "[::1]:9"}} {
			send(c[0], c[1])
			want := flow{netip.MustParseAddrPort(c[0]), netip.MustParseAddrPort(c[1]).Addr()}
			select {
			case got := <-seen:
				if got != want {
					t.Errorf("%+v, want %+v", got, want)
				}
			case <-time.After(5 * time.Second):
				t.Errorf("no packet of %+v", want)
			}
		}
		return nil
	}))
}
