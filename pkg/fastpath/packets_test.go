package fastpath

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/returning"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// The object is of this source. make lint compiles it again where clang 14 exists.
func TestObjectIsCurrent(t *testing.T) {
	source, err := os.ReadFile("fastpath.c")
	harness.Must(t, err)
	want, err := os.ReadFile("fastpath.c.sha256")
	harness.Must(t, err)
	sum := sha256.Sum256(source)
	if got := hex.EncodeToString(sum[:]); !strings.HasPrefix(string(want), got) {
		t.Error("fastpath.c changed: run go generate ./pkg/fastpath with clang 14")
	}
}

// frame returns a frame with ports 1000 and 80 from a client to the first VIP of contentOf.
func frame(family vip.Family, protocol byte, edit func(ip []byte)) []byte {
	transport := make([]byte, 32)
	binary.BigEndian.PutUint32(transport, 1000<<16|80)
	if protocol == unix.IPPROTO_TCP {
		transport[12] = 5 << 4
	}
	ip := make([]byte, 20, 72)
	etherType := uint16(unix.ETH_P_IP)
	if family == vip.IPv4 {
		ip[0], ip[8], ip[9] = 0x45, 64, protocol
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+len(transport)))
		copy(ip[12:], netip.MustParseAddr("10.0.0.1").AsSlice())
		copy(ip[16:], netip.MustParseAddr("20.0.0.0").AsSlice())
	} else {
		etherType = unix.ETH_P_IPV6
		ip = ip[:40]
		ip[0], ip[6], ip[7] = 0x60, protocol, 64
		binary.BigEndian.PutUint16(ip[4:], uint16(len(transport)))
		copy(ip[8:], netip.MustParseAddr("fd00::1").AsSlice())
		copy(ip[24:], netip.MustParseAddr("2000::").AsSlice())
	}
	ip = append(ip, transport...)
	if edit != nil {
		edit(ip)
	}
	return append(binary.BigEndian.AppendUint16(make([]byte, 12), etherType), ip...)
}

// services sets the code point of a packet.
func services(ip []byte, point uint16) {
	shift := map[byte]int{4: 2, 6: 6}[ip[0]>>4]
	binary.BigEndian.PutUint16(ip, binary.BigEndian.Uint16(ip)|point<<shift)
}

// checksum returns the sum of an IPv4 header, 0xffff if its checksum is right.
func checksum(ip []byte) uint32 {
	sum := uint32(0)
	for at := 0; at < 20; at += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[at:]))
	}
	return sum&0xffff + sum>>16
}

// Packets that may belong to a flow of an earlier target are marked. Besides, only their hop limit
// changes.
func TestMarkedPackets(t *testing.T) {
	f := newFixture(t)
	content := contentOf(f.links[1].Index, 1)
	content.Hops[Target{5000, vip.IPv6}] = Hop{netip.MustParseAddr("fd00::2"), f.links[1].Index, 1500}
	content.Streams[0].Match = nil
	for _, family := range vip.Families {
		for name, c := range map[string]struct {
			protocol, flags byte
			asks, want      bool
		}{
			"later segment":                {unix.IPPROTO_TCP, 0x10, true, true},
			"first segment":                {unix.IPPROTO_TCP, 0x02, true, false},
			"no segment":                   {unix.IPPROTO_UDP, 0, true, false},
			"later packet of SCTP":         {unix.IPPROTO_SCTP, 0, true, true},
			"INIT of SCTP":                 {unix.IPPROTO_SCTP, 1, true, false},
			"later segment of other slots": {unix.IPPROTO_TCP, 0x10, false, false},
		} {
			content.Streams[0].Asks = func(vip.Family, uint32) bool { return c.asks }
			f.apply(content)
			sent := frame(family, c.protocol, func(ip []byte) {
				if at := len(ip) - 32; c.protocol == unix.IPPROTO_SCTP {
					ip[at+12] = c.flags // the type of the first chunk
				} else {
					ip[at+13] = c.flags
				}
				services(ip, 0b101110)
				ip[1] |= 1 // ECN in IPv4
				if family == vip.IPv4 {
					binary.BigEndian.PutUint16(ip[10:], ^uint16(checksum(ip)))
				}
			})
			got := make([]byte, len(sent))
			harness.Must(t, f.ns.Do(func() error {
				result, err := f.current.Fastpath.Run(&ebpf.RunOptions{Data: bytes.Clone(sent), DataOut: got})
				if result != 7 { // TCX_REDIRECT
					t.Errorf("%s, %s: the program returned %d", family, name, int32(result))
				}
				return err
			}))
			want := bytes.Clone(sent[14:])
			want[[...]int{8, 7}[family]]--
			if c.want {
				shift := [...]int{2, 6}[family]
				binary.BigEndian.PutUint16(want, binary.BigEndian.Uint16(want)&^(0b111111<<shift)|returning.Ask<<shift)
			}
			if family == vip.IPv4 {
				if sum := checksum(got[14:]); sum != 0xffff {
					t.Errorf("%s: the header has the sum %x", name, sum)
				}
				copy(want[10:], got[14+10:14+12])
			}
			if !bytes.Equal(got[14:], want) {
				t.Errorf("%s, %s: % x, want % x", family, name, got[14:], want)
			}
		}
	}
}

// The program takes a packet only if nftables would forward it without a special case.
func TestTakenPackets(t *testing.T) {
	f := newFixture(t)
	content := contentOf(f.links[1].Index, 1)
	content.Hops[Target{5000, vip.IPv6}] = Hop{netip.MustParseAddr("fd00::2"), f.links[1].Index, 1500}
	content.Streams[0].Match = []plan.Port{
		{Protocol: plan.TCP, Number: 80}, {Protocol: plan.UDP, Number: 80}, {Protocol: plan.SCTP, Number: 80},
	}
	f.apply(content)
	takes := func(data []byte) (taken bool) {
		t.Helper()
		before, err := f.Counters()
		harness.Must(t, err)
		harness.Must(t, f.ns.Do(func() error {
			result, err := f.current.Fastpath.Run(&ebpf.RunOptions{Data: data})
			taken = result == 7 // TCX_REDIRECT
			if !taken && int32(result) != -1 {
				t.Errorf("the program returned %d", int32(result))
			}
			return err
		}))
		after, err := f.Counters()
		harness.Must(t, err)
		if (after[5000].Packets == before[5000].Packets+1) != taken {
			t.Errorf("taken: %t, counted %v after %v", taken, after, before)
		}
		return taken
	}
	for _, family := range vip.Families {
		for _, protocol := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
			if !takes(frame(family, protocol, nil)) {
				t.Errorf("%s: a packet of protocol %d is not taken", family, protocol)
			}
		}
		if takes(frame(family, unix.IPPROTO_ICMP, nil)) {
			t.Errorf("%s: another protocol is taken", family)
		}
	}

	cases := map[string][]func(ip []byte){
		"other version":        {func(ip []byte) { ip[0] = 0x65 }, func(ip []byte) { ip[0] = 0x40 }},
		"options":              {func(ip []byte) { ip[0] = 0x46 }, func(ip []byte) { ip[6] = unix.IPPROTO_DSTOPTS }},
		"fragment":             {func(ip []byte) { ip[6] = 0x20 }, func(ip []byte) { ip[6] = unix.IPPROTO_FRAGMENT }},
		"last fragment":        {func(ip []byte) { ip[7] = 1 }, nil},
		"hop limit 1":          {func(ip []byte) { ip[8] = 1 }, func(ip []byte) { ip[7] = 1 }},
		"hop limit 0":          {func(ip []byte) { ip[8] = 0 }, func(ip []byte) { ip[7] = 0 }},
		"other VIP":            {func(ip []byte) { ip[19] = 9 }, func(ip []byte) { ip[39] = 9 }},
		"wide VIP":             {func(ip []byte) { ip[17] = 1 }, nil},
		"port of no match":     {func(ip []byte) { ip[23] = 81 }, func(ip []byte) { ip[43] = 81 }},
		"ports in the padding": {func(ip []byte) { ip[3] = 23 }, func(ip []byte) { ip[5] = 3 }},
		"header in padding":    {func(ip []byte) { ip[3] = 39 }, func(ip []byte) { ip[5] = 19 }},
		"truncated":            {func(ip []byte) { ip[3]++ }, func(ip []byte) { ip[5]++ }},
		"jumbo":                {func(ip []byte) { ip[3] = 0 }, func(ip []byte) { ip[5] = 0 }},
		"unspecified source":   {func(ip []byte) { clear(ip[12:16]) }, func(ip []byte) { clear(ip[8:24]) }},
		"loopback source":      {func(ip []byte) { ip[12] = 127 }, func(ip []byte) { clear(ip[8:23]) }},
		"multicast source":     {func(ip []byte) { ip[12] = 224 }, func(ip []byte) { ip[8] = 0xff }},
		"returned by a target": {func(ip []byte) { services(ip, returning.Ask|returning.Back) }, func(ip []byte) {
			services(ip, returning.Ask|returning.Back|returning.AskStep)
		}},
		"link-local source": {nil, func(ip []byte) { ip[8], ip[9] = 0xfe, 0x80 }},
	}
	for name, edits := range cases {
		protocol := byte(unix.IPPROTO_TCP)
		if name == "ports in the padding" {
			protocol = unix.IPPROTO_UDP // a TCP header is longer
		}
		for _, family := range vip.Families {
			if edit := edits[family]; edit != nil && takes(frame(family, protocol, edit)) {
				t.Errorf("%s: %s: the packet is taken", family, name)
			}
		}
	}

	padded := append(frame(vip.IPv4, unix.IPPROTO_TCP, nil), make([]byte, 20)...)
	before, err := f.Counters()
	harness.Must(t, err)
	if !takes(padded) {
		t.Error("a packet with padding is not taken")
	}
	if after, err := f.Counters(); err != nil || after[5000].Bytes-before[5000].Bytes != 52 {
		t.Errorf("bytes with padding: %v after %v, %v", after, before, err)
	}
	whole := frame(vip.IPv4, unix.IPPROTO_TCP, nil)
	// The kernel refuses test runs of frames without a complete IP header.
	for length := 34; length < len(whole); length++ {
		if takes(bytes.Clone(whole[:length])) {
			t.Errorf("a frame of %d bytes of %d is taken", length, len(whole))
		}
	}
	binary.BigEndian.PutUint16(whole[12:], unix.ETH_P_8021AD)
	if takes(whole) {
		t.Error("a frame of another EtherType is taken")
	}
	large := frame(vip.IPv4, unix.IPPROTO_UDP, func(ip []byte) { binary.BigEndian.PutUint16(ip[2:], 1501) })
	if takes(append(large, make([]byte, 1501+14-len(large))...)) {
		t.Error("a packet above the MTU is taken")
	}
}
