package announce

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/vip"
)

// minLength is the least length of messages (RFC 4271 section 6.1, RFC 7313 section 5).
var minLength = map[uint8]uint16{
	bgp.BGP_MSG_OPEN: 29, bgp.BGP_MSG_UPDATE: 23, bgp.BGP_MSG_NOTIFICATION: 21, bgp.BGP_MSG_ROUTE_REFRESH: 23,
}

// readMessage reads one BGP message. The body of an UPDATE is skipped: received routes are
// ignored. A protocol error of the peer is returned as *bgp.MessageError, which a NOTIFICATION
// reports (RFC 4271 section 6).
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
	// With a hold time of 0, BIRD would keep the routes of a hung process. RFC 4271 section 4.2
	// permits rejecting it.
	hold := time.Duration(m.HoldTime) * time.Second
	if hold < 3*time.Second {
		return reject(bgp.BGP_ERROR_SUB_UNACCEPTABLE_HOLD_TIME, nil,
			"BIRD's hold time is %s; at least 3s is required", hold)
	}
	return min(hold, o.HoldTime), nil
}
