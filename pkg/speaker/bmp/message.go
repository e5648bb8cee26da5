package bmp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	protocolVersion = 3  // RFC 7854 section 4.1
	headerLength    = 6  // version, 4-octet length, type
	peerLength      = 42 // per-peer header, section 4.2
	// maxMessage bounds a message: a Peer Up message holds two OPEN messages and TLVs, the others
	// hold at most one BGP message of 65 535 bytes (RFC 8654).
	maxMessage = 256 << 10
	// maxDescription bounds the part of the speaker's description that is kept.
	maxDescription = 100
)

// Types of messages, RFC 7854 section 4.1.
const (
	routeMonitoring = iota
	statisticsReport
	peerDown
	peerUp
	initiation
	termination
	routeMirroring
)

// Flags of the per-peer header: RFC 7854 section 4.2, RFC 8671 section 4.
const (
	flagIPv6       = 0x80
	flagPostPolicy = 0x40
	flagAdjRIBOut  = 0x10
)

// locRIB is the peer type of RFC 9069, which is not a peer.
const locRIB = 3

var errShort = errors.New("message too short")

// readMessage reads a message into buffer, which it may replace. The body is valid until the next.
func readMessage(r *bufio.Reader, buffer *[]byte) (kind byte, body []byte, err error) {
	var header [headerLength]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, nil, err
	}
	if header[0] != protocolVersion {
		return 0, nil, fmt.Errorf("BMP version %d, want %d", header[0], protocolVersion)
	}
	length := binary.BigEndian.Uint32(header[1:])
	if length < headerLength || length > maxMessage {
		return 0, nil, fmt.Errorf("message of %d bytes, want %d to %d", length, headerLength, maxMessage)
	}
	if need := int(length - headerLength); cap(*buffer) < need {
		*buffer = make([]byte, need)
	}
	body = (*buffer)[:length-headerLength]
	if _, err := io.ReadFull(r, body); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	return header[5], body, nil
}

// peerKey identifies a peer of the speaker. Peers of several VRFs may have the same address.
type peerKey struct {
	kind          byte
	distinguisher [8]byte
	address       netip.Addr
}

// parsePeer parses a per-peer header and returns the rest of the body.
func parsePeer(body []byte) (key peerKey, flags byte, rest []byte, err error) {
	if len(body) < peerLength {
		return peerKey{}, 0, nil, errShort
	}
	key.kind, flags = body[0], body[1]
	copy(key.distinguisher[:], body[2:])
	key.address = netip.AddrFrom16([16]byte(body[10:]))
	if flags&flagIPv6 == 0 {
		key.address = netip.AddrFrom4([4]byte(body[22:]))
	}
	return key, flags, body[peerLength:], nil
}

// parseInitiation returns the speaker's description, or its name.
func parseInitiation(body []byte) (string, error) {
	const sysDescr, sysName = 1, 2 // RFC 7854 section 4.4
	var texts [3]string
	for len(body) > 0 {
		if len(body) < 4 {
			return "", errShort
		}
		kind, length := binary.BigEndian.Uint16(body), int(binary.BigEndian.Uint16(body[2:]))
		if body = body[4:]; len(body) < length {
			return "", errShort
		}
		if kind == sysDescr || kind == sysName {
			texts[kind] = printable(body[:min(length, maxDescription)])
		}
		body = body[length:]
	}
	if texts[sysDescr] != "" {
		return texts[sysDescr], nil
	}
	return texts[sysName], nil
}

// printable replaces all bytes but printable ASCII, since the text reaches logs and terminals.
func printable(text []byte) string {
	clean := make([]byte, len(text))
	for i, b := range text {
		if clean[i] = b; b < ' ' || b > '~' {
			clean[i] = '?'
		}
	}
	return string(clean)
}

// negotiated describes a session by its two OPEN messages.
type negotiated struct {
	families [len(vip.Families)]bool
	// addPath reports whether the speaker sends several paths of one prefix (RFC 7911).
	addPath [len(vip.Families)]bool
}

var codes = [len(vip.Families)]bgp.Family{vip.IPv4: bgp.RF_IPv4_UC, vip.IPv6: bgp.RF_IPv6_UC}

// parsePeerUp parses the body of a Peer Up message after its per-peer header.
func parsePeerUp(body []byte) (negotiated, error) {
	const addresses = 16 + 2 + 2 // local address, both ports
	if len(body) < addresses {
		return negotiated{}, errShort
	}
	sent, body, err := parseOpen(body[addresses:])
	if err != nil {
		return negotiated{}, fmt.Errorf("malformed sent OPEN: %w", err)
	}
	received, _, err := parseOpen(body)
	if err != nil {
		return negotiated{}, fmt.Errorf("malformed received OPEN: %w", err)
	}
	var session negotiated
	for _, family := range vip.Families {
		session.families[family] = sent.families[codes[family]] && received.families[codes[family]]
		session.addPath[family] = sent.addPath[codes[family]]&bgp.BGP_ADD_PATH_SEND != 0 &&
			received.addPath[codes[family]]&bgp.BGP_ADD_PATH_RECEIVE != 0
	}
	return session, nil
}

type capabilities struct {
	families map[bgp.Family]bool
	addPath  map[bgp.Family]bgp.BGPAddPathMode
}

// parseOpen parses the OPEN message at the start of data and returns the rest.
func parseOpen(data []byte) (capabilities, []byte, error) {
	message, rest, err := parseBGP(data)
	if err != nil {
		return capabilities{}, nil, err
	}
	open, ok := message.Body.(*bgp.BGPOpen)
	if !ok {
		return capabilities{}, nil, fmt.Errorf("BGP message of type %d", message.Header.Type)
	}
	c := capabilities{families: map[bgp.Family]bool{}, addPath: map[bgp.Family]bgp.BGPAddPathMode{}}
	for _, parameter := range open.OptParams {
		list, ok := parameter.(*bgp.OptionParameterCapability)
		if !ok {
			continue
		}
		for _, capability := range list.Capability {
			switch capability := capability.(type) {
			case *bgp.CapMultiProtocol:
				c.families[capability.CapValue] = true
			case *bgp.CapAddPath:
				for _, tuple := range capability.Tuples {
					c.addPath[tuple.Family] = tuple.Mode
				}
			}
		}
	}
	// Without the capability the session has IPv4 (RFC 4760 section 8).
	if len(c.families) == 0 {
		c.families[bgp.RF_IPv4_UC] = true
	}
	return c, rest, nil
}

// parseBGP parses the BGP message at the start of data and returns the rest.
func parseBGP(data []byte) (*bgp.BGPMessage, []byte, error) {
	if len(data) < bgp.BGP_HEADER_LENGTH {
		return nil, nil, errShort
	}
	length := int(binary.BigEndian.Uint16(data[16:]))
	if length < bgp.BGP_HEADER_LENGTH || length > len(data) {
		return nil, nil, fmt.Errorf("BGP message of %d bytes in %d bytes", length, len(data))
	}
	message, err := bgp.ParseBGPMessage(data[:length], &bgp.MarshallingOption{ExtendedMessage: true})
	if err != nil {
		return nil, nil, fmt.Errorf("malformed BGP message: %w", err)
	}
	return message, data[length:], nil
}

// Reasons of a Peer Down message, RFC 7854 section 4.9.
const (
	downSent = 1 + iota
	downEvent
	downReceived
	downClosed
	downDeconfigured
)

// parsePeerDown parses the body of a Peer Down message after its per-peer header. gone reports
// whether the speaker no longer has the peer.
func parsePeerDown(body []byte) (reason string, gone bool, err error) {
	if len(body) < 1 {
		return "", false, errShort
	}
	switch code, data := body[0], body[1:]; code {
	case downSent, downReceived:
		message, _, err := parseBGP(data)
		if err != nil {
			return "", false, err
		}
		notification, ok := message.Body.(*bgp.BGPNotification)
		if !ok {
			return "", false, fmt.Errorf("BGP message of type %d", message.Header.Type)
		}
		who := "the speaker"
		if code == downReceived {
			who = "the gateway"
		}
		return fmt.Sprintf("%s sent NOTIFICATION %s", who,
			bgp.NewNotificationErrorCode(notification.ErrorCode, notification.ErrorSubcode)), false, nil
	case downEvent:
		if len(data) < 2 {
			return "", false, errShort
		}
		// FRR sends event 0.
		if event := binary.BigEndian.Uint16(data); event != 0 {
			return fmt.Sprintf("the speaker closed the session after event %d of RFC 4271 section 8.1", event), false, nil
		}
		return "the speaker closed the session", false, nil
	case downClosed:
		return "the connection ended without a NOTIFICATION", false, nil
	case downDeconfigured:
		return "", true, nil
	default:
		return fmt.Sprintf("reason %d", code), false, nil
	}
}

// routes are the changes of one UPDATE message. One without changes marks the end of the initial
// transfer of its families.
type routes struct {
	families             [len(vip.Families)]bool
	announced, withdrawn []vip.VIP
}

// parseUpdate parses an UPDATE message without ADD-PATH. Prefixes that cannot be VIPs, such as a
// default route, are left out.
func parseUpdate(data []byte) (routes, error) {
	message, _, err := parseBGP(data)
	if err != nil {
		return routes{}, err
	}
	update, ok := message.Body.(*bgp.BGPUpdate)
	if !ok {
		return routes{}, fmt.Errorf("BGP message of type %d", message.Header.Type)
	}
	var r routes
	r.announced = appendVIPs(r.announced, update.NLRI)
	r.withdrawn = appendVIPs(r.withdrawn, update.WithdrawnRoutes)
	r.families[vip.IPv4] = len(update.NLRI)+len(update.WithdrawnRoutes)+len(update.PathAttributes) == 0
	for _, attribute := range update.PathAttributes {
		switch attribute := attribute.(type) {
		case *bgp.PathAttributeMpReachNLRI:
			r.add(bgp.NewFamily(attribute.AFI, attribute.SAFI), attribute.Value, &r.announced)
		case *bgp.PathAttributeMpUnreachNLRI:
			r.add(bgp.NewFamily(attribute.AFI, attribute.SAFI), attribute.Value, &r.withdrawn)
		}
	}
	if len(update.NLRI)+len(update.WithdrawnRoutes) > 0 {
		r.families[vip.IPv4] = true
	}
	return r, nil
}

func (r *routes) add(family bgp.Family, list []bgp.PathNLRI, to *[]vip.VIP) {
	for _, f := range vip.Families {
		if codes[f] == family {
			r.families[f] = true
			*to = appendVIPs(*to, list)
		}
	}
}

func appendVIPs(vips []vip.VIP, list []bgp.PathNLRI) []vip.VIP {
	for _, nlri := range list {
		if prefix, ok := nlri.NLRI.(*bgp.IPAddrPrefix); ok {
			if v, err := vip.FromPrefix(prefix.Prefix); err == nil {
				vips = append(vips, v)
			}
		}
	}
	return vips
}
