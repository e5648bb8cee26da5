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
func readMessage(reader *bufio.Reader) (*bgp.BGPMessage, error) {
	var buf [bgp.BGP_MAX_MESSAGE_LENGTH]byte
	if _, err := io.ReadFull(reader, buf[:bgp.BGP_HEADER_LENGTH]); err != nil {
		return nil, err
	}
	var header bgp.BGPHeader
	if err := header.DecodeFromBytes(buf[:bgp.BGP_HEADER_LENGTH]); err != nil {
		return nil, fmt.Errorf("unreadable message: %w", err)
	}
	tooLong := header.Len > bgp.BGP_MAX_MESSAGE_LENGTH ||
		header.Type == bgp.BGP_MSG_KEEPALIVE && header.Len > bgp.BGP_HEADER_LENGTH
	if tooLong || header.Len < minLength[header.Type] {
		return nil, bgp.NewMessageError(bgp.BGP_ERROR_MESSAGE_HEADER_ERROR, bgp.BGP_ERROR_SUB_BAD_MESSAGE_LENGTH,
			binary.BigEndian.AppendUint16(nil, header.Len),
			fmt.Sprintf("message of type %d has invalid length %d", header.Type, header.Len))
	}
	body := buf[bgp.BGP_HEADER_LENGTH:header.Len]
	if _, err := io.ReadFull(reader, body); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	if header.Type == bgp.BGP_MSG_UPDATE {
		return &bgp.BGPMessage{Header: header, Body: &bgp.BGPUpdate{}}, nil
	}
	message, err := bgp.ParseBGPBody(&header, body)
	if err != nil {
		return nil, fmt.Errorf("unreadable message: %w", err)
	}
	return message, nil
}

// checkOpen validates the peer's OPEN and returns the session's hold time and families.
func checkOpen(open *bgp.BGPOpen, options Options) (
	hold time.Duration, families [len(vip.Families)]bool, err error,
) {
	peer := options.Speaker
	type supported = [len(vip.Families)]bool
	reject := func(subcode uint8, data []byte, format string, args ...any) (time.Duration, supported, error) {
		return 0, families, bgp.NewMessageError(bgp.BGP_ERROR_OPEN_MESSAGE_ERROR, subcode, data,
			fmt.Sprintf("%s "+format, append([]any{peer}, args...)...))
	}
	if open.Version != 4 {
		return reject(bgp.BGP_ERROR_SUB_UNSUPPORTED_VERSION_NUMBER, []byte{0, 4}, "speaks BGP version %d, not 4",
			open.Version)
	}
	// A capability may be in any of several parameters, and a parameter may hold several.
	var as4 *bgp.CapFourOctetASNumber
	offered := make(map[bgp.Family]bool)
	for _, parameter := range open.OptParams {
		if caps, ok := parameter.(*bgp.OptionParameterCapability); ok {
			for _, capability := range caps.Capability {
				switch capability := capability.(type) {
				case *bgp.CapFourOctetASNumber:
					as4 = capability
				case *bgp.CapMultiProtocol:
					offered[capability.CapValue] = true
				}
			}
		}
	}
	if as4 == nil {
		capability, _ := bgp.NewCapFourOctetASNumber(options.LocalAS).Serialize() // a constant form
		return reject(bgp.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY, capability,
			"does not support 4-octet AS numbers; remove `enable as4 off` from the session")
	}
	if as4.CapValue != options.PeerAS {
		return reject(bgp.BGP_ERROR_SUB_BAD_PEER_AS, nil, "has AS %d, expected AS %d", as4.CapValue, options.PeerAS)
	}
	if !open.ID.Is4() || open.ID.IsUnspecified() {
		return reject(bgp.BGP_ERROR_SUB_BAD_BGP_IDENTIFIER, nil, "has router id %s", open.ID)
	}
	for _, family := range vip.Families {
		// Our BIRD has both. Without the capability (RFC 4760 section 8) a session is of IPv4.
		families[family] = offered[codecFamily[family]] || len(offered) == 0 && family == vip.IPv4
		if !families[family] && peer == defaultSpeaker {
			capability, _ := bgp.NewCapMultiProtocol(codecFamily[family]).Serialize() // a constant form
			return reject(bgp.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY, capability, "has no %s channel in the session", family)
		}
	}
	// With a hold time of 0, BIRD would keep the routes of a hung process. RFC 4271 section 4.2
	// permits rejecting it.
	hold = time.Duration(open.HoldTime) * time.Second
	if hold < 3*time.Second {
		return reject(bgp.BGP_ERROR_SUB_UNACCEPTABLE_HOLD_TIME, nil,
			"offers a hold time of %s; at least 3s is required", hold)
	}
	return min(hold, options.HoldTime), families, nil
}
