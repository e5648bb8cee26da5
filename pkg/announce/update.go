package announce

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/vip"
)

// gracefulShutdown is the well-known community 65535:0 (RFC 8326 section 4.1).
const gracefulShutdown = 65535 << 16

// nextHop6 is the next hop of IPv6 VIPs, discard-only (RFC 6666): BIRD 2.0.12 requires a global
// address on an IPv4 session, and its import filter replaces the next hop.
var nextHop6 = netip.AddrFrom16([16]byte{0x01, 0x00, 15: 1})

var codecFamily = [len(vip.Families)]bgp.Family{vip.IPv4: bgp.RF_IPv4_UC, vip.IPv6: bgp.RF_IPv6_UC}

// changes holds the changes of one write, by family and advertisement: each group shares UPDATEs.
type changes [len(vip.Families)][Announced + 1][]vip.VIP

func (c *changes) add(v vip.VIP, a Advertisement) {
	f := v.Family()
	c[f][a] = append(c[f][a], v)
}

// reset removes all changes and keeps their memory.
func (c *changes) reset() {
	for f := range c {
		for a := range c[f] {
			c[f][a] = c[f][a][:0]
		}
	}
}

// encoder encodes the messages to send. Parts that do not change are encoded once.
type encoder struct {
	open      []byte
	keepalive []byte
	header    []byte // of an UPDATE, without its length
	parts     [len(vip.Families)][Announced + 1]parts
}

// parts are the constant parts of an UPDATE.
type parts struct {
	// reach is the value of MP_REACH_NLRI or MP_UNREACH_NLRI before the prefixes (RFC 4760).
	reach     []byte
	reachType bgp.BGPAttrType
	// attributes are the other path attributes.
	attributes []byte
}

// overhead is the size of an UPDATE without prefixes.
var overhead = [len(vip.Families)][Announced + 1]int{
	vip.IPv4: {Withdrawn: 23, Depreferred: 50, Announced: 43},
	vip.IPv6: {Withdrawn: 30, Depreferred: 68, Announced: 61},
}

// attributeHeader is the size of a path attribute's flags, type and short length.
const attributeHeader = 3

func newEncoder(o Options) (*encoder, error) {
	nextHop4, err := bgp.NewPathAttributeNextHop(o.Local)
	if err != nil {
		return nil, fmt.Errorf("failed to encode NEXT_HOP: %w", err)
	}
	// The library cannot encode the attribute without a prefix: ::/0 adds one byte, which constant
	// removes.
	prefix, err := bgp.NewIPAddrPrefix(netip.PrefixFrom(netip.IPv6Unspecified(), 0))
	if err != nil {
		return nil, fmt.Errorf("failed to encode a prefix: %w", err)
	}
	prefixes := []bgp.PathNLRI{{NLRI: prefix}}
	reach, err := bgp.NewPathAttributeMpReachNLRI(bgp.RF_IPv6_UC, prefixes, nextHop6)
	if err != nil {
		return nil, fmt.Errorf("failed to encode MP_REACH_NLRI: %w", err)
	}
	unreach, err := bgp.NewPathAttributeMpUnreachNLRI(bgp.RF_IPv6_UC, prefixes)
	if err != nil {
		return nil, fmt.Errorf("failed to encode MP_UNREACH_NLRI: %w", err)
	}
	var errs []error
	encoded := func(attributes ...bgp.PathAttributeInterface) (list []byte) {
		for _, attribute := range attributes {
			b, err := attribute.Serialize()
			list, errs = append(list, b...), append(errs, err)
		}
		return list
	}
	// constant returns an attribute's value without the prefix. The header is omitted, too, because
	// its length field depends on the prefixes.
	constant := func(attribute bgp.PathAttributeInterface) []byte {
		b := encoded(attribute)
		if len(b) <= attributeHeader {
			return nil // not encoded
		}
		return b[attributeHeader : len(b)-1]
	}
	origin := bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP)
	path := bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{
		bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, []uint32{LocalAS}),
	})
	shutdown := bgp.NewPathAttributeCommunities([]uint32{gracefulShutdown})
	reach6 := parts{reachType: bgp.BGP_ATTR_TYPE_MP_REACH_NLRI, reach: constant(reach)}
	e := &encoder{}
	e.parts[vip.IPv4][Announced].attributes = encoded(origin, path, nextHop4)
	e.parts[vip.IPv4][Depreferred].attributes = encoded(origin, path, nextHop4, shutdown)
	e.parts[vip.IPv6][Announced], e.parts[vip.IPv6][Depreferred] = reach6, reach6
	e.parts[vip.IPv6][Announced].attributes = encoded(origin, path)
	e.parts[vip.IPv6][Depreferred].attributes = encoded(origin, path, shutdown)
	e.parts[vip.IPv6][Withdrawn] = parts{
		reachType: bgp.BGP_ATTR_TYPE_MP_UNREACH_NLRI, reach: constant(unreach),
	}

	capabilities := bgp.NewOptionParameterCapability([]bgp.ParameterCapabilityInterface{
		bgp.NewCapMultiProtocol(bgp.RF_IPv4_UC),
		bgp.NewCapMultiProtocol(bgp.RF_IPv6_UC),
		bgp.NewCapFourOctetASNumber(LocalAS),
		// Without route refresh BIRD restarts the session when its import filter changes.
		bgp.NewCapRouteRefresh(),
	})
	open, err := bgp.NewBGPOpenMessage(bgp.AS_TRANS, uint16(o.HoldTime/time.Second), o.Local,
		[]bgp.OptionParameterInterface{capabilities})
	if err != nil {
		return nil, fmt.Errorf("failed to create OPEN: %w", err)
	}
	var errOpen, errKeepalive, errHeader error
	e.open, errOpen = open.Serialize()
	e.keepalive, errKeepalive = bgp.NewBGPKeepAliveMessage().Serialize()
	e.header, errHeader = (&bgp.BGPHeader{Type: bgp.BGP_MSG_UPDATE}).Serialize()
	return e, errors.Join(append(errs, errOpen, errKeepalive, errHeader)...)
}

// appendUpdates sorts c and encodes it in the fewest UPDATEs, withdrawals first. BIRD inserts
// sorted prefixes in less than half of the time (3.0 instead of 7.6 ms for 10 000).
func (e *encoder) appendUpdates(b []byte, c *changes) []byte {
	for _, a := range [...]Advertisement{Withdrawn, Depreferred, Announced} {
		for _, f := range vip.Families {
			slices.SortFunc(c[f][a], vip.Compare)
			for rest := c[f][a]; len(rest) > 0; {
				n, size, room := 0, 0, bgp.BGP_MAX_MESSAGE_LENGTH-overhead[f][a]
				for n < len(rest) && size+encodedLen(rest[n]) <= room {
					size += encodedLen(rest[n])
					n++
				}
				b = e.appendUpdate(b, f, a, rest[:n], size)
				rest = rest[n:]
			}
		}
	}
	return b
}

// appendUpdate encodes one UPDATE (RFC 4271 section 4.3) with prefixes of size bytes.
func (e *encoder) appendUpdate(b []byte, f vip.Family, a Advertisement, prefixes []vip.VIP, size int) []byte {
	p := &e.parts[f][a]
	start := len(b)
	b = append(b, e.header...)
	switch {
	case f == vip.IPv4 && a == Withdrawn:
		b = appendPrefixes(binary.BigEndian.AppendUint16(b, uint16(size)), prefixes)
		b = append(b, 0, 0) // no path attributes
	case f == vip.IPv4:
		b = binary.BigEndian.AppendUint16(append(b, 0, 0), uint16(len(p.attributes)))
		b = appendPrefixes(append(b, p.attributes...), prefixes)
	default:
		b = append(b, 0, 0)
		lengthAt := len(b)
		b = append(b, 0, 0)
		// RFC 7606 section 5.1: MP_REACH_NLRI is the first attribute.
		if value := len(p.reach) + size; value > 255 {
			flags := bgp.BGP_ATTR_FLAG_OPTIONAL | bgp.BGP_ATTR_FLAG_EXTENDED_LENGTH
			b = binary.BigEndian.AppendUint16(append(b, byte(flags), byte(p.reachType)), uint16(value))
		} else {
			b = append(b, byte(bgp.BGP_ATTR_FLAG_OPTIONAL), byte(p.reachType), byte(value))
		}
		b = appendPrefixes(append(b, p.reach...), prefixes)
		b = append(b, p.attributes...)
		binary.BigEndian.PutUint16(b[lengthAt:], uint16(len(b)-lengthAt-2))
	}
	binary.BigEndian.PutUint16(b[start+markerLength:], uint16(len(b)-start))
	return b
}

// markerLength is the length of a header's marker, which precedes the length field.
const markerLength = 16

// encodedLen returns the length of an encoded prefix: one length byte and the significant bytes.
func encodedLen(v vip.VIP) int { return 1 + (v.Prefix().Bits()+7)/8 }

func appendPrefixes(b []byte, vips []vip.VIP) []byte {
	for _, v := range vips {
		p := v.Prefix()
		n := (p.Bits() + 7) / 8
		b = append(b, byte(p.Bits()))
		if p.Addr().Is4() {
			a := p.Addr().As4()
			b = append(b, a[:n]...)
		} else {
			a := p.Addr().As16()
			b = append(b, a[:n]...)
		}
	}
	return b
}

func notification(code, subcode uint8, data []byte) ([]byte, error) {
	return bgp.NewBGPNotificationMessage(code, subcode, data).Serialize()
}
