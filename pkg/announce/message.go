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

// nextHop6 is the next hop of IPv6 VIPs, discard-only (RFC 6666): BIRD 2.0.12 requires a global
// address on an IPv4 session, and its import filter replaces the next hop.
var nextHop6 = netip.AddrFrom16([16]byte{0x01, 0x00, 15: 1})

// minLength is the least length of messages (RFC 4271 section 6.1, RFC 7313 section 5).
var minLength = map[uint8]uint16{
	bgp.BGP_MSG_OPEN: 29, bgp.BGP_MSG_UPDATE: 23, bgp.BGP_MSG_NOTIFICATION: 21, bgp.BGP_MSG_ROUTE_REFRESH: 23,
}

// readMessage reads one BGP message. The body of an UPDATE is skipped: received routes are ignored.
// An error of the peer is a *bgp.MessageError, which a NOTIFICATION answers (RFC 4271 section 6).
func readMessage(r *bufio.Reader) (*bgp.BGPMessage, error) {
	var buf [bgp.BGP_MAX_MESSAGE_LENGTH]byte
	if _, err := io.ReadFull(r, buf[:bgp.BGP_HEADER_LENGTH]); err != nil {
		return nil, err
	}
	var h bgp.BGPHeader
	if err := h.DecodeFromBytes(buf[:bgp.BGP_HEADER_LENGTH]); err != nil {
		return nil, fmt.Errorf("unreadable message: %w", err)
	}
	tooLong := h.Len > bgp.BGP_MAX_MESSAGE_LENGTH || h.Type == bgp.BGP_MSG_KEEPALIVE && h.Len > bgp.BGP_HEADER_LENGTH
	if tooLong || h.Len < minLength[h.Type] {
		return nil, bgp.NewMessageError(bgp.BGP_ERROR_MESSAGE_HEADER_ERROR, bgp.BGP_ERROR_SUB_BAD_MESSAGE_LENGTH,
			binary.BigEndian.AppendUint16(nil, h.Len),
			fmt.Sprintf("message of type %d has invalid length %d", h.Type, h.Len))
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
		return nil, fmt.Errorf("unreadable message: %w", err)
	}
	return m, nil
}

// checkOpen validates the peer's OPEN and returns the session's hold time.
func checkOpen(m *bgp.BGPOpen, o Options) (time.Duration, error) {
	reject := func(subcode uint8, data []byte, format string, args ...any) (time.Duration, error) {
		return 0, bgp.NewMessageError(bgp.BGP_ERROR_OPEN_MESSAGE_ERROR, subcode, data, fmt.Sprintf(format, args...))
	}
	if m.Version != 4 {
		return reject(bgp.BGP_ERROR_SUB_UNSUPPORTED_VERSION_NUMBER, []byte{0, 4}, "BIRD speaks BGP version %d, not 4",
			m.Version)
	}
	var as4 *bgp.CapFourOctetASNumber
	families := make(map[bgp.Family]bool)
	for _, p := range m.OptParams {
		if caps, ok := p.(*bgp.OptionParameterCapability); ok {
			for _, c := range caps.Capability {
				switch c := c.(type) {
				case *bgp.CapFourOctetASNumber:
					as4 = c
				case *bgp.CapMultiProtocol:
					families[c.CapValue] = true
				}
			}
		}
	}
	if as4 == nil {
		capability, _ := bgp.NewCapFourOctetASNumber(LocalAS).Serialize() // a constant form
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
		if !families[codecFamily[f]] {
			capability, _ := bgp.NewCapMultiProtocol(codecFamily[f]).Serialize() // a constant form
			return reject(bgp.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY, capability, "BIRD's session has no %s channel", f)
		}
	}
	// With 0, BIRD would keep the routes of a hung process. RFC 4271 section 4.2 permits rejecting it.
	hold := time.Duration(m.HoldTime) * time.Second
	if hold < 3*time.Second {
		return reject(bgp.BGP_ERROR_SUB_UNACCEPTABLE_HOLD_TIME, nil,
			"BIRD's hold time is %s; at least 3s is required", hold)
	}
	return min(hold, o.HoldTime), nil
}

var codecFamily = [len(vip.Families)]bgp.Family{vip.IPv4: bgp.RF_IPv4_UC, vip.IPv6: bgp.RF_IPv6_UC}

// encoder encodes the messages to send. Parts that do not change are encoded once.
type encoder struct {
	open      []byte
	keepalive []byte
	// attributes of an announcing UPDATE, without the reachability.
	attributes [len(vip.Families)][Announced + 1][]bgp.PathAttributeInterface
}

// overhead is the size of an UPDATE without prefixes.
var overhead = [len(vip.Families)][Announced + 1]int{
	vip.IPv4: {Withdrawn: 23, Depreferred: 50, Announced: 43},
	vip.IPv6: {Withdrawn: 30, Depreferred: 68, Announced: 61},
}

func newEncoder(o Options) (*encoder, error) {
	nextHop4, err := bgp.NewPathAttributeNextHop(o.Local)
	if err != nil {
		return nil, fmt.Errorf("failed to encode NEXT_HOP: %w", err)
	}
	origin := bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP)
	path := bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{
		bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, []uint32{LocalAS}),
	})
	shutdown := bgp.NewPathAttributeCommunities([]uint32{gracefulShutdown})
	e := &encoder{}
	e.attributes[vip.IPv4][Announced] = []bgp.PathAttributeInterface{origin, path, nextHop4}
	e.attributes[vip.IPv4][Depreferred] = []bgp.PathAttributeInterface{origin, path, nextHop4, shutdown}
	e.attributes[vip.IPv6][Announced] = []bgp.PathAttributeInterface{origin, path}
	e.attributes[vip.IPv6][Depreferred] = []bgp.PathAttributeInterface{origin, path, shutdown}

	capabilities := bgp.NewOptionParameterCapability([]bgp.ParameterCapabilityInterface{
		bgp.NewCapMultiProtocol(bgp.RF_IPv4_UC),
		bgp.NewCapMultiProtocol(bgp.RF_IPv6_UC),
		bgp.NewCapFourOctetASNumber(LocalAS),
		// Without it BIRD restarts the session when its import filter changes.
		bgp.NewCapRouteRefresh(),
	})
	open, err := bgp.NewBGPOpenMessage(bgp.AS_TRANS, uint16(o.HoldTime/time.Second), o.Local,
		[]bgp.OptionParameterInterface{capabilities})
	if err != nil {
		return nil, fmt.Errorf("failed to create OPEN: %w", err)
	}
	var errOpen, errKeepalive error
	e.open, errOpen = open.Serialize()
	e.keepalive, errKeepalive = bgp.NewBGPKeepAliveMessage().Serialize()
	return e, errors.Join(errOpen, errKeepalive)
}

// changes are the changes of one write, by what shares UPDATEs.
type changes [len(vip.Families)][Announced + 1][]bgp.PathNLRI

func (c *changes) add(v vip.VIP, a Advertisement) {
	f := v.Family()
	c[f][a] = append(c[f][a], nlri(v.Prefix()))
}

func nlri(p netip.Prefix) bgp.PathNLRI {
	n, _ := bgp.NewIPAddrPrefix(p) // fails only for a prefix that is invalid
	return bgp.PathNLRI{NLRI: n}
}

// updates encodes c in the fewest UPDATEs, withdrawals first.
func (e *encoder) updates(c *changes) ([]byte, error) {
	var buf []byte
	for _, a := range [...]Advertisement{Withdrawn, Depreferred, Announced} {
		for _, f := range vip.Families {
			for rest := c[f][a]; len(rest) > 0; {
				n, size := 0, overhead[f][a]
				for n < len(rest) && size+rest[n].NLRI.Len() <= bgp.BGP_MAX_MESSAGE_LENGTH {
					size += rest[n].NLRI.Len()
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
