package announce

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

var bothFamilies = [...]bool{vip.IPv4: true, vip.IPv6: true}

func testOptions() Options {
	return Options{Peer: netip.MustParseAddrPort("127.0.0.1:1790"), PeerAS: 8103}.withDefaults()
}

func testEncoder(t testing.TB) *encoder {
	t.Helper()
	e, err := newEncoder(testOptions())
	harness.Must(t, err)
	return e
}

// fatal is the common interface of *testing.T and *rapid.T.
type fatal interface {
	Helper()
	Fatalf(string, ...any)
}

func encode(t fatal, e *encoder, want map[vip.VIP]Advertisement) []byte {
	t.Helper()
	var c changes
	for v, a := range want {
		c.add(v, Route{Advertisement: a})
	}
	b := e.appendUpdates(nil, &c, bothFamilies)
	if library := encodeWithLibrary(t, want); !bytes.Equal(b, library) {
		t.Fatalf("encoded as % x, by the library as % x", b, library)
	}
	return b
}

// overheadOf is the size of an UPDATE without prefixes.
func overheadOf(f vip.Family, a Advertisement) int {
	if a == Depreferred {
		return overhead[f][a] + 7 // a community
	}
	return overhead[f][a]
}

// encodeWithLibrary encodes the same UPDATEs as encode with the BGP library only.
func encodeWithLibrary(t fatal, want map[vip.VIP]Advertisement) (b []byte) {
	t.Helper()
	nextHop4, err := bgp.NewPathAttributeNextHop(testOptions().Local)
	if err != nil {
		t.Fatalf("%v", err)
	}
	common := []bgp.PathAttributeInterface{
		bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP),
		bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{
			bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, []uint32{LocalAS}),
		}),
	}
	message := func(f vip.Family, a Advertisement, prefixes []bgp.PathNLRI) *bgp.BGPMessage {
		attributes := slices.Clone(common)
		if f == vip.IPv4 {
			attributes = append(attributes, nextHop4)
		}
		if a == Depreferred {
			attributes = append(attributes, bgp.NewPathAttributeCommunities([]uint32{GracefulShutdown}))
		}
		switch {
		case f == vip.IPv4 && a == Withdrawn:
			return bgp.NewBGPUpdateMessage(prefixes, nil, nil)
		case f == vip.IPv4:
			return bgp.NewBGPUpdateMessage(nil, attributes, prefixes)
		case a == Withdrawn:
			unreach, err := bgp.NewPathAttributeMpUnreachNLRI(bgp.RF_IPv6_UC, prefixes)
			if err != nil {
				t.Fatalf("%v", err)
			}
			return bgp.NewBGPUpdateMessage(nil, []bgp.PathAttributeInterface{unreach}, nil)
		}
		reach, err := bgp.NewPathAttributeMpReachNLRI(bgp.RF_IPv6_UC, prefixes, nextHop6)
		if err != nil {
			t.Fatalf("%v", err)
		}
		return bgp.NewBGPUpdateMessage(nil, append([]bgp.PathAttributeInterface{reach}, attributes...), nil)
	}
	for _, a := range []Advertisement{Withdrawn, Depreferred, Announced} {
		for _, f := range vip.Families {
			var rest []bgp.PathNLRI
			for _, v := range slices.SortedFunc(maps.Keys(want), vip.Compare) {
				if v.Family() == f && want[v] == a {
					n, err := bgp.NewIPAddrPrefix(v.Prefix())
					if err != nil {
						t.Fatalf("%v", err)
					}
					rest = append(rest, bgp.PathNLRI{NLRI: n})
				}
			}
			for len(rest) > 0 {
				n, size := 0, overheadOf(f, a)
				for n < len(rest) && size+rest[n].NLRI.Len() <= bgp.BGP_MAX_MESSAGE_LENGTH {
					size += rest[n].NLRI.Len()
					n++
				}
				m, err := message(f, a, rest[:n]).Serialize()
				if err != nil {
					t.Fatalf("%v", err)
				}
				b, rest = append(b, m...), rest[n:]
			}
		}
	}
	return b
}

// split splits a stream into messages and decodes their bodies.
func split(t fatal, b []byte) []*bgp.BGPMessage {
	t.Helper()
	var ms []*bgp.BGPMessage
	for len(b) > 0 {
		m, err := bgp.ParseBGPMessage(b)
		if err != nil {
			t.Fatalf("undecodable message: %v", err)
		}
		if m.Header.Len > bgp.BGP_MAX_MESSAGE_LENGTH {
			t.Fatalf("message of %d bytes", m.Header.Len)
		}
		ms = append(ms, m)
		b = b[m.Header.Len:]
	}
	return ms
}

// applyUpdate applies an UPDATE to table, as a BGP speaker would.
func applyUpdate(t fatal, table map[vip.VIP]Advertisement, u *bgp.BGPUpdate) {
	t.Helper()
	set := func(prefixes []bgp.PathNLRI, a Advertisement) {
		for _, n := range prefixes {
			v, err := vip.FromPrefix(n.NLRI.(*bgp.IPAddrPrefix).Prefix)
			if err != nil {
				t.Fatalf("%v", err)
			}
			table[v] = a
		}
	}
	a := Announced
	for _, attr := range u.PathAttributes {
		if c, ok := attr.(*bgp.PathAttributeCommunities); ok && slices.Contains(c.Value, 0xffff0000) {
			a = Depreferred
		}
	}
	for _, attr := range u.PathAttributes {
		switch attr := attr.(type) {
		case *bgp.PathAttributeMpReachNLRI:
			set(attr.Value, a)
		case *bgp.PathAttributeMpUnreachNLRI:
			set(attr.Value, Withdrawn)
		}
	}
	set(u.WithdrawnRoutes, Withdrawn)
	set(u.NLRI, a)
}

func anyVIP() *rapid.Generator[vip.VIP] {
	return rapid.Custom(func(t *rapid.T) vip.VIP {
		var a netip.Addr
		if rapid.Bool().Draw(t, "ipv6") {
			b := [16]byte{0x20}
			copy(b[1:], rapid.SliceOfN(rapid.Byte(), 15, 15).Draw(t, "address"))
			a = netip.AddrFrom16(b)
		} else {
			b := [4]byte{20}
			copy(b[1:], rapid.SliceOfN(rapid.Byte(), 3, 3).Draw(t, "address"))
			a = netip.AddrFrom4(b)
		}
		p, err := a.Prefix(rapid.IntRange(8, a.BitLen()).Draw(t, "bits"))
		harness.Must(t, err)
		v, err := vip.FromPrefix(p)
		harness.Must(t, err)
		return v
	})
}

// checkUpdates returns a property: the encoded UPDATEs, decoded by a BGP codec, equal the
// decisions, and readMessage finds the same messages in them.
func checkUpdates(e *encoder) func(*rapid.T) {
	return func(t *rapid.T) {
		want := rapid.MapOfN(anyVIP(), rapid.SampledFrom([]Advertisement{Withdrawn, Depreferred, Announced}), 0,
			2000).Draw(t, "changes")
		written := encode(t, e, want)
		messages := split(t, written)
		got := make(map[vip.VIP]Advertisement)
		for _, m := range messages {
			applyUpdate(t, got, m.Body.(*bgp.BGPUpdate))
		}
		if !maps.Equal(got, want) {
			t.Fatalf("got %v, want %v", got, want)
		}
		read, err := readAll(bytes.NewReader(written))
		if !errors.Is(err, io.EOF) || !slices.EqualFunc(read, messages, func(a, b *bgp.BGPMessage) bool {
			return a.Header.Len == b.Header.Len && a.Header.Type == bgp.BGP_MSG_UPDATE
		}) {
			t.Fatalf("%d messages were read, %v; want %d", len(read), err, len(messages))
		}
	}
}

func TestUpdatesMatchDecisions(t *testing.T) { rapid.Check(t, checkUpdates(testEncoder(t))) }

func TestUpdateRoom(t *testing.T) {
	for communities, want := range map[int]Advertisement{1010: Announced, 1011: Announced, 1012: Withdrawn} {
		var logged bytes.Buffer
		options := testOptions()
		options.Log = slog.New(slog.NewTextHandler(&logged, nil))
		e, err := newEncoder(options)
		harness.Must(t, err)
		var c changes
		for _, v := range []string{"20.0.0.1/32", "20.0.0.2/32"} {
			attributes := Metrics{}.Attributes(make([]uint32, communities), nil)
			c.add(vip.Require(v), Route{Advertisement: Announced, Attributes: attributes})
		}
		got := map[vip.VIP]Advertisement{}
		for _, m := range split(t, e.appendUpdates(nil, &c, bothFamilies)) {
			applyUpdate(t, got, m.Body.(*bgp.BGPUpdate))
		}
		if !maps.Equal(got, map[vip.VIP]Advertisement{vip.Require("20.0.0.1/32"): want, vip.Require("20.0.0.2/32"): want}) {
			t.Errorf("%d communities: %v, want %s", communities, got, want)
		}
		const text = "no UPDATE has room for their attributes\" vips=2 first=20.0.0.1/32"
		if is := strings.Contains(logged.String(), text); is != (want == Withdrawn) {
			t.Errorf("%d communities: logged %q", communities, &logged)
		}
	}
}

// A VIP whose attributes leave no room is withdrawn, and the others are advertised: no number of
// communities makes the encoder loop, or an UPDATE too long.
func TestUpdatesWithoutRoom(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"eBGP": func(*Options) {},
		"iBGP": func(o *Options) { o.LocalAS, o.PeerAS, o.Speaker = 8103, 8103, "FRR" },
	} {
		t.Run(name, func(t *testing.T) {
			options := testOptions()
			change(&options)
			e, err := newEncoder(options)
			harness.Must(t, err)
			rapid.Check(t, func(t *rapid.T) {
				vips := rapid.SliceOfNDistinct(anyVIP(), 1, 50, rapid.ID[vip.VIP]).Draw(t, "VIPs")
				// Three of four are near the limit: 4 bytes of a community are more than one prefix of IPv4.
				numbers := rapid.OneOf(rapid.IntRange(985, 1020), rapid.IntRange(0, 20_000), rapid.IntRange(1000, 1015),
					rapid.IntRange(1000, 1015)).Draw(t, "communities")
				route := Route{
					Advertisement: rapid.SampledFrom([]Advertisement{Depreferred, Announced}).Draw(t, "advertisement"),
					Prepend:       uint8(rapid.IntRange(0, 10).Draw(t, "prepend")),
					Attributes: Metrics{MED: rapid.Uint32().Draw(t, "MED")}.Attributes(make([]uint32, numbers),
						make([]LargeCommunity, rapid.IntRange(0, 1).Draw(t, "large"))),
				}
				var c changes
				sizes := map[vip.VIP]int{}
				for _, v := range vips {
					c.add(v, route)
					group := group{groupKey: groupKey{v.Family(), route}}
					sizes[v] = len(e.appendUpdate(nil, group, e.constant(group), route.Attributes, []vip.VIP{v}, encodedLen(v)))
				}
				got := map[vip.VIP]Advertisement{}
				for _, m := range split(t, e.appendUpdates(nil, &c, bothFamilies)) {
					applyUpdate(t, got, m.Body.(*bgp.BGPUpdate))
				}
				// The encoder reserves a byte for the length of MP_REACH_NLRI, and six for the path of eBGP.
				const reserve = 7
				for v, size := range sizes {
					advertisement, ok := got[v]
					if !ok || advertisement == Withdrawn && size <= bgp.BGP_MAX_MESSAGE_LENGTH-reserve {
						t.Errorf("%s of %d bytes is %s, %v", v, size, advertisement, ok)
					}
				}
			})
		})
	}
}

// MP_REACH_NLRI and MP_UNREACH_NLRI have a long length above 255 bytes; encode compares with the
// library.
func TestAttributeLengthBoundary(t *testing.T) {
	e := testEncoder(t)
	for _, a := range []Advertisement{Withdrawn, Depreferred, Announced} {
		for whole := 10; whole < 16; whole++ {
			for size := 1; size <= 16; size++ {
				p, err := numbered(1).Prefix().Addr().Prefix(8 * size)
				harness.Must(t, err)
				v, err := vip.FromPrefix(p)
				harness.Must(t, err)
				want := map[vip.VIP]Advertisement{v: a}
				for i := range whole {
					want[numbered(2*i+3)] = a
				}
				encode(t, e, want)
			}
		}
	}
}

func TestUpdatesAreFull(t *testing.T) {
	e := testEncoder(t)
	for _, f := range vip.Families {
		for _, a := range []Advertisement{Withdrawn, Depreferred, Announced} {
			t.Run(f.String()+" "+a.String(), func(t *testing.T) {
				want := make(map[vip.VIP]Advertisement)
				for i := int(f); len(want) < 3000; i += 2 {
					want[numbered(i)] = a
				}
				ms := split(t, encode(t, e, want))
				size := 5 // bytes of one prefix
				if f == vip.IPv6 {
					size = 17
				}
				if body := int(ms[0].Header.Len) - overheadOf(f, a); body%size != 0 {
					t.Errorf("%d bytes of prefixes, want a multiple of %d", body, size)
				}
				for _, m := range ms[:len(ms)-1] {
					if free := bgp.BGP_MAX_MESSAGE_LENGTH - int(m.Header.Len); free >= size {
						t.Errorf("%d bytes are free where a prefix takes %d", free, size)
					}
				}
				if most := 3000*size/(bgp.BGP_MAX_MESSAGE_LENGTH-100) + 1; len(ms) > most {
					t.Errorf("%d messages, want at most %d", len(ms), most)
				}
			})
		}
	}
}

func TestWithdrawalsComeFirst(t *testing.T) {
	ms := split(t, encode(t, testEncoder(t), map[vip.VIP]Advertisement{
		vip.Require("20.0.0.1/32"): Announced, vip.Require("20.0.0.2/32"): Withdrawn, vip.Require("20.0.0.3/32"): Depreferred,
		vip.Require("2000::1/128"): Announced, vip.Require("2000::2/128"): Withdrawn, vip.Require("2000::3/128"): Depreferred,
	}))
	var order []Advertisement
	for _, m := range ms {
		got := make(map[vip.VIP]Advertisement)
		applyUpdate(t, got, m.Body.(*bgp.BGPUpdate))
		for _, a := range got {
			order = append(order, a)
		}
	}
	want := []Advertisement{Withdrawn, Withdrawn, Depreferred, Depreferred, Announced, Announced}
	if !slices.Equal(order, want) {
		t.Fatalf("got %v, want %v", order, want)
	}
}

func TestOpenCapabilities(t *testing.T) {
	open := split(t, testEncoder(t).open)[0].Body.(*bgp.BGPOpen)
	if open.Version != 4 || open.MyAS != bgp.AS_TRANS || open.HoldTime != 3 ||
		open.ID != netip.MustParseAddr("127.0.0.2") {
		t.Errorf("got %+v", open)
	}
	var got []bgp.ParameterCapabilityInterface
	for _, p := range open.OptParams {
		got = append(got, p.(*bgp.OptionParameterCapability).Capability...)
	}
	var codes []bgp.BGPCapabilityCode
	for _, c := range got {
		codes = append(codes, c.Code())
	}
	want := []bgp.BGPCapabilityCode{
		bgp.BGP_CAP_MULTIPROTOCOL, bgp.BGP_CAP_MULTIPROTOCOL, bgp.BGP_CAP_FOUR_OCTET_AS_NUMBER, bgp.BGP_CAP_ROUTE_REFRESH,
	}
	if diff := cmp.Diff(want, codes); diff != "" {
		t.Errorf("capabilities: %s", diff)
	}
	if as := got[2].(*bgp.CapFourOctetASNumber).CapValue; as != LocalAS {
		t.Errorf("AS %d", as)
	}
}

func TestCheckOpen(t *testing.T) {
	both := []bgp.Family{bgp.RF_IPv4_UC, bgp.RF_IPv6_UC}
	tests := []struct {
		name     string
		change   func(*bgp.BGPOpen)
		as       uint32
		families []bgp.Family
		subcode  uint8 // 0 means accepted
	}{
		{name: "good", as: 8103, families: both},
		{name: "wrong AS", as: 8104, families: both, subcode: bgp.BGP_ERROR_SUB_BAD_PEER_AS},
		{name: "no 4-octet AS", families: both, subcode: bgp.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY},
		{name: "no IPv6", as: 8103, families: both[:1], subcode: bgp.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY},
		{name: "no IPv4", as: 8103, families: both[1:], subcode: bgp.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY},
		{
			name: "hold time 0 would end the lease", as: 8103, families: both, change: func(o *bgp.BGPOpen) { o.HoldTime = 0 },
			subcode: bgp.BGP_ERROR_SUB_UNACCEPTABLE_HOLD_TIME,
		},
		{
			name: "hold time 2", as: 8103, families: both, change: func(o *bgp.BGPOpen) { o.HoldTime = 2 },
			subcode: bgp.BGP_ERROR_SUB_UNACCEPTABLE_HOLD_TIME,
		},
		{
			name: "version 3", as: 8103, families: both, change: func(o *bgp.BGPOpen) { o.Version = 3 },
			subcode: bgp.BGP_ERROR_SUB_UNSUPPORTED_VERSION_NUMBER,
		},
		{
			name: "no router id", as: 8103, families: both, change: func(o *bgp.BGPOpen) { o.ID = netip.IPv4Unspecified() },
			subcode: bgp.BGP_ERROR_SUB_BAD_BGP_IDENTIFIER,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			open := openMessage(t, tt.as, 90, tt.families...).Body.(*bgp.BGPOpen)
			if tt.change != nil {
				tt.change(open)
			}
			hold, _, err := checkOpen(open, testOptions())
			if tt.subcode == 0 {
				if err != nil || hold != 3*time.Second {
					t.Fatalf("got %s, %v; want the smaller hold time, 3s", hold, err)
				}
				return
			}
			var p *bgp.MessageError
			if !errors.As(err, &p) || p.TypeCode != bgp.BGP_ERROR_OPEN_MESSAGE_ERROR || p.SubTypeCode != tt.subcode {
				t.Fatalf("got %v, want OPEN error %d", err, tt.subcode)
			}
		})
	}
}

// openMessage returns a peer's OPEN; AS 0 omits the 4-octet AS capability.
func openMessage(t fatal, as uint32, hold uint16, families ...bgp.Family) *bgp.BGPMessage {
	t.Helper()
	var caps []bgp.ParameterCapabilityInterface
	for _, f := range families {
		caps = append(caps, bgp.NewCapMultiProtocol(f))
	}
	if as != 0 {
		caps = append(caps, bgp.NewCapFourOctetASNumber(as))
	}
	m, err := bgp.NewBGPOpenMessage(uint16(as), hold, netip.MustParseAddr("192.0.2.1"),
		[]bgp.OptionParameterInterface{bgp.NewOptionParameterCapability(caps)})
	if err != nil {
		t.Fatalf("%v", err)
	}
	return m
}

// VIPs with the same communities share UPDATEs, which are full; others have UPDATEs of their own.
// Each VIP may have a policy of its own: the table is sent under the lock that KEEPALIVEs need.
func TestManyRoutes(t *testing.T) {
	const count = 20_000
	var all []Change
	for i := range count {
		attributes := Metrics{}.Attributes([]uint32{uint32(i)}, nil)
		all = append(all, Change{VIP: numbered(i), Route: Route{Advertisement: Announced, Attributes: attributes}})
	}
	grouped, compared := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
	for range 3 {
		var c changes
		begin := time.Now()
		for _, change := range all {
			c.add(change.VIP, change.Route)
		}
		grouped = min(grouped, time.Since(begin))
		for i, group := range c.groups {
			if len(c.groups) != count || len(group.vips) != 1 || group.vips[0] != numbered(i) {
				t.Fatalf("%d of %d groups: %+v", i, len(c.groups), group)
			}
		}
		c.reset()
		if c.add(numbered(1), all[1].Route); len(c.groups) != 1 {
			t.Fatalf("%d groups after a reset", len(c.groups))
		}
		begin = time.Now()
		byRoute := map[Route][]vip.VIP{}
		for _, change := range all {
			byRoute[change.Route] = append(byRoute[change.Route], change.VIP)
		}
		compared = min(compared, time.Since(begin))
	}
	t.Logf("%d routes are grouped in %v, a map of them takes %v", count, grouped, compared)
	if ratio := float64(grouped) / float64(compared); ratio > 10 {
		t.Errorf("grouped in %.0f times the time of a map", ratio)
	}
}

func TestCommunitiesGroupUpdates(t *testing.T) {
	e := testEncoder(t)
	attributes := Metrics{}.Attributes([]uint32{64512<<16 | 100}, []LargeCommunity{{64512, 1, 2}})
	var c changes
	want := map[string]string{}
	for i := range 3000 {
		v, route := numbered(i), Route{Advertisement: Announced}
		if want[v.String()] = ""; i%3 > 0 {
			route.Attributes, want[v.String()] = attributes, "64512:100 64512:1:2"
		}
		c.add(v, route)
	}
	got, messages := map[string]string{}, split(t, e.appendUpdates(nil, &c, bothFamilies))
	for _, m := range messages {
		update := m.Body.(*bgp.BGPUpdate)
		var communities []string
		prefixes := update.NLRI
		for _, attribute := range update.PathAttributes {
			switch a := attribute.(type) {
			case *bgp.PathAttributeCommunities:
				for _, community := range a.Value {
					communities = append(communities, fmt.Sprintf("%d:%d", community>>16, community&0xffff))
				}
			case *bgp.PathAttributeLargeCommunities:
				for _, community := range a.Values {
					communities = append(communities, community.String())
				}
			case *bgp.PathAttributeMpReachNLRI:
				prefixes = a.Value
			}
		}
		for _, prefix := range prefixes {
			got[prefix.NLRI.String()] = strings.Join(communities, " ")
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("%d VIPs differ from %d", len(got), len(want))
	}
	// Two families, with and without communities; 1 000 VIPs of IPv6 take 5 messages.
	if len(messages) > 14 {
		t.Errorf("%d messages", len(messages))
	}
}
