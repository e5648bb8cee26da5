package announce

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/vip"
)

// gracefulShutdown is the well-known community 65535:0 (RFC 8326 section 4.1).
const gracefulShutdown = 65535 << 16

// nextHop6 is the next hop of IPv6 VIPs: a discard-only address (RFC 6666). BIRD 2.0.12 requires a
// global address on an IPv4 session (it rejects ::, link-local and IPv4-mapped ones) and need not
// resolve it: its import filter makes the route a blackhole, and its export sets next hop self. The
// next hop of IPv4 VIPs is Options.Local.
var nextHop6 = netip.AddrFrom16([16]byte{0x01, 0x00, 15: 1})

// protocolError is an error of the peer that is answered by a NOTIFICATION (RFC 4271 section 6).
type protocolError struct {
	code, subcode uint8
	data          []byte
	reason        string
}

func (e *protocolError) Error() string { return e.reason }

// Notification is a NOTIFICATION message (RFC 4271 section 4.5) from the peer.
type Notification struct {
	Code, Subcode uint8
}

// Error returns code and subcode as numbers and text.
func (n *Notification) Error() string {
	return "BIRD sent NOTIFICATION " + bgp.NewNotificationErrorCode(n.Code, n.Subcode).String()
}

// readMessage reads one BGP message. The body of an UPDATE is skipped: received routes are ignored.
func readMessage(r *bufio.Reader) (*bgp.BGPMessage, error) {
	var buf [bgp.BGP_MAX_MESSAGE_LENGTH]byte
	if _, err := io.ReadFull(r, buf[:bgp.BGP_HEADER_LENGTH]); err != nil {
		return nil, err
	}
	var h bgp.BGPHeader
	if err := h.DecodeFromBytes(buf[:bgp.BGP_HEADER_LENGTH]); err != nil {
		return nil, fromCodec(err)
	}
	if !validLength(h.Type, int(h.Len)) {
		return nil, &protocolError{
			code: bgp.BGP_ERROR_MESSAGE_HEADER_ERROR, subcode: bgp.BGP_ERROR_SUB_BAD_MESSAGE_LENGTH,
			data:   binary.BigEndian.AppendUint16(nil, h.Len),
			reason: fmt.Sprintf("message of type %d has invalid length %d", h.Type, h.Len),
		}
	}
	body := buf[bgp.BGP_HEADER_LENGTH:h.Len]
	if _, err := io.ReadFull(r, body); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	if h.Type == bgp.BGP_MSG_UPDATE {
		return &bgp.BGPMessage{Header: h, Body: &bgp.BGPUpdate{}}, nil
	}
	m, err := bgp.ParseBGPBody(&h, body)
	if err != nil {
		return nil, fromCodec(err)
	}
	return m, nil
}

// validLength reports whether a message of the type may have that length (RFC 4271 section 6.1, RFC
// 7313 section 5). Unknown types are rejected later.
func validLength(kind uint8, length int) bool {
	least := bgp.BGP_HEADER_LENGTH
	switch kind {
	case bgp.BGP_MSG_OPEN:
		least = 29
	case bgp.BGP_MSG_UPDATE, bgp.BGP_MSG_ROUTE_REFRESH:
		least = 23
	case bgp.BGP_MSG_NOTIFICATION:
		least = 21
	case bgp.BGP_MSG_KEEPALIVE:
		return length == least
	}
	return length >= least && length <= bgp.BGP_MAX_MESSAGE_LENGTH
}

func fromCodec(err error) error {
	var m *bgp.MessageError
	if !errors.As(err, &m) {
		return err
	}
	return &protocolError{
		code: m.TypeCode, subcode: m.SubTypeCode, data: m.Data,
		reason: "unreadable message: " + m.Message,
	}
}

// checkOpen validates the peer's OPEN and returns the session's hold time.
func checkOpen(m *bgp.BGPOpen, o Options) (time.Duration, error) {
	reject := func(subcode uint8, data []byte, format string, args ...any) (time.Duration, error) {
		return 0, &protocolError{
			code: bgp.BGP_ERROR_OPEN_MESSAGE_ERROR, subcode: subcode, data: data,
			reason: fmt.Sprintf(format, args...),
		}
	}
	if m.Version != 4 {
		return reject(bgp.BGP_ERROR_SUB_UNSUPPORTED_VERSION_NUMBER, []byte{0, 4}, "BIRD speaks BGP version %d, not 4",
			m.Version)
	}
	var as4 *bgp.CapFourOctetASNumber
	families := make(map[bgp.Family]bool)
	for _, p := range m.OptParams {
		caps, ok := p.(*bgp.OptionParameterCapability)
		if !ok {
			continue
		}
		for _, c := range caps.Capability {
			switch c := c.(type) {
			case *bgp.CapFourOctetASNumber:
				as4 = c
			case *bgp.CapMultiProtocol:
				families[c.CapValue] = true
			}
		}
	}
	if as4 == nil {
		capability, _ := bgp.NewCapFourOctetASNumber(o.LocalAS).Serialize() // a constant form
		return reject(bgp.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY, capability,
			"BIRD does not support 4-octet AS numbers; remove `enable as4 off` from the session")
	}
	if as4.CapValue != o.PeerAS {
		return reject(bgp.BGP_ERROR_SUB_BAD_PEER_AS, nil, "BIRD has AS %d, expected AS %d", as4.CapValue, o.PeerAS)
	}
	if !m.ID.Is4() || m.ID.IsUnspecified() {
		return reject(bgp.BGP_ERROR_SUB_BAD_BGP_IDENTIFIER, nil, "BIRD's router id is %s", m.ID)
	}
	for _, f := range vip.Families {
		if !families[codecFamily(f)] {
			capability, _ := bgp.NewCapMultiProtocol(codecFamily(f)).Serialize() // a constant form
			return reject(bgp.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY, capability, "BIRD's session has no %s channel", f)
		}
	}
	// A hold time of 0 would disable the lease: BIRD would keep the routes of a hung process. RFC
	// 4271 section 4.2 permits rejecting it.
	hold := time.Duration(m.HoldTime) * time.Second
	if hold < 3*time.Second {
		return reject(bgp.BGP_ERROR_SUB_UNACCEPTABLE_HOLD_TIME, nil, "BIRD's hold time is %s; at least 3s is required", hold)
	}
	return min(hold, o.HoldTime), nil
}

func codecFamily(f vip.Family) bgp.Family {
	if f == vip.IPv4 {
		return bgp.RF_IPv4_UC
	}
	return bgp.RF_IPv6_UC
}

// encoder encodes the messages to send. Parts that do not change are encoded once.
type encoder struct {
	open      []byte
	keepalive []byte
	// attributes of an announcing UPDATE, without the reachability.
	attributes [len(vip.Families)][Announced + 1][]bgp.PathAttributeInterface
	// room is the number of prefix bytes that fit into one UPDATE of the kind.
	room [len(vip.Families)][Announced + 1]int
}

func newEncoder(o Options) (*encoder, error) {
	e := &encoder{}
	var err error
	if e.open, err = encodeOpen(o); err != nil {
		return nil, fmt.Errorf("failed to encode OPEN: %w", err)
	}
	if e.keepalive, err = bgp.NewBGPKeepAliveMessage().Serialize(); err != nil {
		return nil, fmt.Errorf("failed to encode KEEPALIVE: %w", err)
	}
	nextHop4, err := bgp.NewPathAttributeNextHop(o.Local)
	if err != nil {
		return nil, fmt.Errorf("failed to encode NEXT_HOP: %w", err)
	}
	origin := bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP)
	path := bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{
		bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, []uint32{o.LocalAS}),
	})
	shutdown := bgp.NewPathAttributeCommunities([]uint32{gracefulShutdown})
	e.attributes[vip.IPv4][Announced] = []bgp.PathAttributeInterface{origin, path, nextHop4}
	e.attributes[vip.IPv4][Depreferred] = []bgp.PathAttributeInterface{origin, path, nextHop4, shutdown}
	e.attributes[vip.IPv6][Announced] = []bgp.PathAttributeInterface{origin, path}
	e.attributes[vip.IPv6][Depreferred] = []bgp.PathAttributeInterface{origin, path, shutdown}

	probe := [len(vip.Families)]netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, 1}), 32),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8}), 128),
	}
	for _, f := range vip.Families {
		for a := Withdrawn; a <= Announced; a++ {
			n := nlri(probe[f])
			m, err := e.message(f, a, []bgp.PathNLRI{n}).Serialize()
			if err != nil {
				return nil, fmt.Errorf("failed to encode UPDATE: %w", err)
			}
			e.room[f][a] = bgp.BGP_MAX_MESSAGE_LENGTH - len(m) + n.NLRI.Len()
			if f == vip.IPv6 {
				e.room[f][a]-- // the longer length field of an attribute over 255 bytes
			}
		}
	}
	return e, nil
}

func encodeOpen(o Options) ([]byte, error) {
	as := uint16(bgp.AS_TRANS)
	if o.LocalAS <= 65535 {
		as = uint16(o.LocalAS)
	}
	m, err := bgp.NewBGPOpenMessage(as, uint16(o.HoldTime/time.Second), o.RouterID, []bgp.OptionParameterInterface{
		bgp.NewOptionParameterCapability([]bgp.ParameterCapabilityInterface{
			bgp.NewCapMultiProtocol(bgp.RF_IPv4_UC),
			bgp.NewCapMultiProtocol(bgp.RF_IPv6_UC),
			bgp.NewCapFourOctetASNumber(o.LocalAS),
			// Without it BIRD restarts the session when its import filter changes.
			bgp.NewCapRouteRefresh(),
		}),
	})
	if err != nil {
		return nil, err
	}
	return m.Serialize()
}

// changes are the changes of one write by family and advertisement, so that prefixes with equal
// attributes share UPDATEs.
type changes [len(vip.Families)][Announced + 1][]bgp.PathNLRI

func (c *changes) add(v vip.VIP, a Advertisement) {
	f := v.Family()
	c[f][a] = append(c[f][a], nlri(v.Prefix()))
}

func nlri(p netip.Prefix) bgp.PathNLRI {
	n, _ := bgp.NewIPAddrPrefix(p) // fails only for a prefix that is invalid
	return bgp.PathNLRI{NLRI: n}
}

// appendUpdates appends the fewest UPDATEs for c to buf, withdrawals first.
func (e *encoder) appendUpdates(buf []byte, c *changes) ([]byte, error) {
	for _, a := range [...]Advertisement{Withdrawn, Depreferred, Announced} {
		for _, f := range vip.Families {
			rest := c[f][a]
			for len(rest) > 0 {
				n, used := 0, 0
				for n < len(rest) && used+rest[n].NLRI.Len() <= e.room[f][a] {
					used += rest[n].NLRI.Len()
					n++
				}
				m, err := e.message(f, a, rest[:n]).Serialize()
				if err != nil {
					return nil, fmt.Errorf("failed to encode UPDATE of %d prefixes: %w", n, err)
				}
				buf = append(buf, m...)
				rest = rest[n:]
			}
		}
	}
	return buf, nil
}

func (e *encoder) message(f vip.Family, a Advertisement, prefixes []bgp.PathNLRI) *bgp.BGPMessage {
	attributes := e.attributes[f][a]
	switch {
	case f == vip.IPv4 && a == Withdrawn:
		return bgp.NewBGPUpdateMessage(prefixes, nil, nil)
	case f == vip.IPv4:
		return bgp.NewBGPUpdateMessage(nil, attributes, prefixes)
	case a == Withdrawn:
		unreach, _ := bgp.NewPathAttributeMpUnreachNLRI(bgp.RF_IPv6_UC, prefixes)
		return bgp.NewBGPUpdateMessage(nil, []bgp.PathAttributeInterface{unreach}, nil)
	default:
		reach, _ := bgp.NewPathAttributeMpReachNLRI(bgp.RF_IPv6_UC, prefixes, nextHop6)
		// RFC 7606 section 5.1: MP_REACH_NLRI goes first.
		return bgp.NewBGPUpdateMessage(nil, append([]bgp.PathAttributeInterface{reach}, attributes...), nil)
	}
}

func notification(code, subcode uint8, data []byte) ([]byte, error) {
	return bgp.NewBGPNotificationMessage(code, subcode, data).Serialize()
}
