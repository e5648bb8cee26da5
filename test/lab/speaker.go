package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Numbers of BGP (RFC 4271 unless another RFC is named).
const (
	bgpHeader     = 19
	bgpMaxMessage = 4096
	bgpOpen       = 1
	bgpUpdate     = 2
	bgpNotify     = 3
	bgpKeepalive  = 4
	bgpRefresh    = 5 // RFC 2918

	attrOrigin      = 1
	attrASPath      = 2
	attrNextHop     = 3
	attrMED         = 4
	attrLocalPref   = 5
	attrCommunities = 8  // RFC 1997
	attrMPReach     = 14 // RFC 4760
	attrMPUnreach   = 15

	capMP      = 1  // RFC 5492, RFC 4760
	capRefresh = 2  // RFC 2918
	capAS4     = 65 // RFC 6793

	asTrans = 23456 // RFC 6793

	notifyOpen  = 2
	notifyHold  = 4
	notifyCease = 6
	ceaseDown   = 2 // Administrative Shutdown (RFC 4486)
	ceaseReset  = 4 // Administrative Reset
	ceaseClash  = 7 // Connection Collision Resolution

	afiIPv4, afiIPv6, safiUnicast = 1, 2, 1
)

// openTimeout bounds the handshake.
const openTimeout = 10 * time.Second

// speaker is the receiver's end of one connection.
type speaker struct {
	r     *Receiver
	conn  net.Conn
	local netip.Addr
	// table holds the peer's announced prefixes; nil after the session ended. The receiver's lock
	// guards it.
	table map[netip.Prefix]*Attributes

	as4    bool // both sides use 4-octet AS numbers
	peerAS uint32

	write sync.Mutex
	ended error // why the speaker ended the connection; under write
}

// run serves the connection until its end.
func (s *speaker) run() {
	var alive sync.WaitGroup
	stop := make(chan struct{})
	at, err := s.serve(func(every time.Duration) {
		alive.Go(func() { s.keepAlive(every, stop) })
	})
	close(stop)
	s.conn.Close()
	alive.Wait()
	s.write.Lock()
	if s.ended != nil {
		err = s.ended
	}
	s.write.Unlock()
	s.r.down(s, at, err)
}

const (
	// receivePause is the silence of the peer after which its messages are decoded. Decoding them
	// earlier would delay the timestamps of later messages, and take a processor from the peer.
	receivePause = time.Millisecond
	// maxReceive bounds the delay of decoding for a peer that never pauses.
	maxReceive = 250 * time.Millisecond
)

// arrival is the time at which the bytes of a buffer before an offset were read.
type arrival struct {
	end int
	at  time.Time
}

// receive appends to the first have bytes of a buffer: it reads once, or with burst until the
// peer pauses. An error after some bytes is left to the next call.
func (s *speaker) receive(buf []byte, have int, hold time.Duration, burst bool) (read []arrival, err error) {
	deadline := time.Now().Add(hold)
	for have < len(buf) {
		err := s.conn.SetReadDeadline(deadline)
		if err == nil {
			var n int
			n, err = s.conn.Read(buf[have:])
			have += n
		}
		at := time.Now()
		if err != nil && read == nil {
			return []arrival{{have, at}}, err
		}
		if err != nil {
			break
		}
		read = append(read, arrival{have, at})
		if !burst || at.Sub(read[0].at) > maxReceive {
			break
		}
		deadline = at.Add(receivePause)
	}
	return read, nil
}

// serve performs the handshake and reads until the connection ends; it returns the time and the
// reason of the end. start is called once the session is up.
func (s *speaker) serve(start func(every time.Duration)) (time.Time, error) {
	buf := make([]byte, 1<<20)
	var (
		have   int
		hold   = openTimeout
		state  = bgpOpen // the message that is expected
		routes []PrefixUpdate
	)
	for {
		read, err := s.receive(buf, have, hold, state == bgpUpdate)
		at := read[0].at
		if err != nil {
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				s.notify(notifyHold, 0)
			}
			return at, err
		}
		have = read[len(read)-1].end
		rest := buf[:have]
		store := func() {
			if len(routes) > 0 {
				s.r.store(s, at, routes)
			}
			routes = routes[:0]
		}
		for len(rest) >= bgpHeader {
			size := int(binary.BigEndian.Uint16(rest[16:]))
			if size < bgpHeader || size > bgpMaxMessage {
				return at, fmt.Errorf("BGP message of %d bytes", size)
			}
			if len(rest) < size {
				break
			}
			kind, body := int(rest[18]), rest[bgpHeader:size]
			rest = rest[size:]
			for have-len(rest) > read[0].end {
				store()
				read = read[1:]
				at = read[0].at
			}
			switch {
			case kind == bgpNotify:
				store()
				return at, fmt.Errorf("NOTIFICATION %v", body)
			case state == bgpOpen && kind == bgpOpen:
				seconds, err := s.open(body)
				if err != nil {
					s.notify(notifyOpen, 0)
					return at, err
				}
				hold = time.Duration(seconds) * time.Second
				state = bgpKeepalive
			case state == bgpKeepalive && kind == bgpKeepalive:
				if !s.r.up(s, at) {
					s.notify(notifyCease, ceaseClash)
					return at, errors.New("there is a session already")
				}
				if err := s.sendInitialRoutes(); err != nil {
					return at, err
				}
				start(hold / 3)
				state = bgpUpdate
			case state == bgpUpdate && kind == bgpUpdate:
				if routes, err = s.update(body, routes); err != nil {
					return at, err
				}
			case state == bgpUpdate && kind == bgpRefresh:
				if err := s.sendInitialRoutes(); err != nil {
					return at, err
				}
			case state == bgpUpdate && kind == bgpKeepalive:
			default:
				return at, fmt.Errorf("BGP message of type %d where %d is expected", kind, state)
			}
		}
		store()
		have = copy(buf, rest)
	}
}

// open reads an OPEN, answers it, and returns the hold time.
func (s *speaker) open(body []byte) (seconds int, err error) {
	if len(body) < 10 || body[0] != 4 || len(body) != 10+int(body[9]) {
		return 0, errors.New("malformed OPEN")
	}
	s.peerAS = uint32(binary.BigEndian.Uint16(body[1:]))
	seconds = int(binary.BigEndian.Uint16(body[3:]))
	if seconds < 3 {
		return 0, fmt.Errorf("hold time %d s", seconds)
	}
	for params := body[10:]; len(params) > 0; {
		if len(params) < 2 || len(params) < 2+int(params[1]) {
			return 0, errors.New("malformed parameters of an OPEN")
		}
		kind, caps := params[0], params[2:2+int(params[1])]
		params = params[2+int(params[1]):]
		// Parameter 2 contains the capabilities (RFC 5492).
		for kind == 2 && len(caps) > 0 {
			if len(caps) < 2 || len(caps) < 2+int(caps[1]) {
				return 0, errors.New("malformed capabilities of an OPEN")
			}
			if caps[0] == capAS4 && caps[1] == 4 {
				s.as4, s.peerAS = true, binary.BigEndian.Uint32(caps[2:])
			}
			caps = caps[2+int(caps[1]):]
		}
	}
	// The 2-octet AS field holds AS_TRANS if the number does not fit (RFC 6793).
	short := s.r.config.AS
	if short > 0xffff {
		short = asTrans
	}
	id := s.r.config.RouterID.As4()
	caps := []byte{capMP, 4, 0, afiIPv4, 0, safiUnicast, capMP, 4, 0, afiIPv6, 0, safiUnicast, capRefresh, 0, capAS4, 4}
	caps = binary.BigEndian.AppendUint32(caps, s.r.config.AS)
	answer := binary.BigEndian.AppendUint16([]byte{4}, uint16(short))
	answer = binary.BigEndian.AppendUint16(answer, uint16(s.r.config.HoldSeconds))
	answer = append(answer, id[:]...)
	answer = append(answer, byte(2+len(caps)), 2, byte(len(caps)))
	answer = append(answer, caps...)
	if err := s.send(message(bgpOpen, answer), message(bgpKeepalive, nil)); err != nil {
		return 0, err
	}
	return min(seconds, s.r.config.HoldSeconds), nil
}

// sendInitialRoutes sends the default route, if any, and the end of RIB (RFC 4724).
func (s *speaker) sendInitialRoutes() error {
	unreach := []byte{0x80, attrMPUnreach, 3, 0, afiIPv6, safiUnicast}
	end := message(bgpUpdate, updateBody(nil, nil))
	if s.local.Is6() {
		end = message(bgpUpdate, updateBody(unreach, nil))
	}
	if !s.r.config.Default {
		return s.send(end)
	}
	attrs := []byte{0x40, attrOrigin, 1, 0}
	own := s.r.config.AS
	switch {
	case s.peerAS == own:
		attrs = append(attrs, 0x40, attrASPath, 0, 0x40, attrLocalPref, 4, 0, 0, 0, 100)
	case s.as4:
		attrs = append(attrs, 0x40, attrASPath, 6, 2, 1)
		attrs = binary.BigEndian.AppendUint32(attrs, own)
	default:
		if own > 0xffff {
			own = asTrans
		}
		attrs = append(attrs, 0x40, attrASPath, 4, 2, 1)
		attrs = binary.BigEndian.AppendUint16(attrs, uint16(own))
	}
	if s.local.Is4() {
		attrs = append(attrs, 0x40, attrNextHop, 4)
		attrs = append(attrs, s.local.AsSlice()...)
		return s.send(message(bgpUpdate, updateBody(attrs, []byte{0})), end)
	}
	attrs = append(attrs, 0x80, attrMPReach, 22, 0, afiIPv6, safiUnicast, 16)
	attrs = append(attrs, s.local.AsSlice()...)
	attrs = append(attrs, 0, 0) // reserved, then ::/0
	return s.send(message(bgpUpdate, updateBody(attrs, nil)), end)
}

// update reads an UPDATE and appends its routes.
func (s *speaker) update(body []byte, routes []PrefixUpdate) ([]PrefixUpdate, error) {
	malformed := errors.New("malformed UPDATE")
	if len(body) < 2 {
		return routes, malformed
	}
	n := int(binary.BigEndian.Uint16(body))
	if len(body) < 4+n {
		return routes, malformed
	}
	withdrawn, body := body[2:2+n], body[2+n:]
	n = int(binary.BigEndian.Uint16(body))
	if len(body) < 2+n {
		return routes, malformed
	}
	attrs, nlri := body[2:2+n], body[2+n:]
	routes, err := appendPrefixes(routes, withdrawn, false, nil)
	if err != nil {
		return routes, err
	}
	said := &Attributes{}
	var reach, unreach []byte
	for len(attrs) > 0 {
		head := 3
		if attrs[0]&0x10 != 0 { // extended length
			head = 4
		}
		if len(attrs) < head {
			return routes, malformed
		}
		n := int(attrs[2])
		if head == 4 {
			n = int(binary.BigEndian.Uint16(attrs[2:]))
		}
		if len(attrs) < head+n {
			return routes, malformed
		}
		kind, value := attrs[1], attrs[head:head+n]
		attrs = attrs[head+n:]
		switch kind {
		case attrASPath:
			said.ASPath = s.asPath(value)
		case attrCommunities:
			for ; len(value) >= 4; value = value[4:] {
				said.Communities = append(said.Communities, binary.BigEndian.Uint32(value))
			}
		case attrLocalPref:
			if len(value) == 4 {
				said.LocalPref = binary.BigEndian.Uint32(value)
			}
		case attrMED:
			if len(value) == 4 {
				said.MED = binary.BigEndian.Uint32(value)
			}
		case attrMPReach:
			// AFI 2, SAFI 1, next hop with its length 1, reserved 1, prefixes.
			if len(value) < 5 || len(value) < 5+int(value[3]) {
				return routes, malformed
			}
			reach = value[5+int(value[3]):]
			if !isIPv6(value) {
				return routes, errors.New("an UPDATE of another family than IPv6 unicast")
			}
		case attrMPUnreach:
			if len(value) < 3 || !isIPv6(value) {
				return routes, malformed
			}
			unreach = value[3:]
		}
	}
	if routes, err = appendPrefixes(routes, unreach, true, nil); err != nil {
		return routes, err
	}
	if routes, err = appendPrefixes(routes, reach, true, said); err != nil {
		return routes, err
	}
	return appendPrefixes(routes, nlri, false, said)
}

func isIPv6(value []byte) bool {
	return binary.BigEndian.Uint16(value) == afiIPv6 && value[2] == safiUnicast
}

// asPath reads the segments of an AS_PATH.
func (s *speaker) asPath(value []byte) []uint32 {
	width := 2
	if s.as4 {
		width = 4
	}
	var path []uint32
	for len(value) >= 2 {
		n := int(value[1])
		value = value[2:]
		for ; n > 0 && len(value) >= width; n-- {
			if s.as4 {
				path = append(path, binary.BigEndian.Uint32(value))
			} else {
				path = append(path, uint32(binary.BigEndian.Uint16(value)))
			}
			value = value[width:]
		}
	}
	return path
}

// appendPrefixes reads prefixes (RFC 4271 section 4.3); without attributes they
// are withdrawn.
func appendPrefixes(routes []PrefixUpdate, b []byte, six bool, said *Attributes) ([]PrefixUpdate, error) {
	for len(b) > 0 {
		bits := int(b[0])
		n := (bits + 7) / 8
		var a netip.Addr
		switch {
		case len(b) < 1+n:
			return routes, errors.New("a prefix is cut off")
		case six && bits <= 128:
			var full [16]byte
			copy(full[:], b[1:1+n])
			a = netip.AddrFrom16(full)
		case !six && bits <= 32:
			var full [4]byte
			copy(full[:], b[1:1+n])
			a = netip.AddrFrom4(full)
		default:
			return routes, fmt.Errorf("a prefix of %d bits", bits)
		}
		routes = append(routes,
			PrefixUpdate{Prefix: netip.PrefixFrom(a, bits), Withdrawn: said == nil, Attributes: said})
		b = b[1+n:]
	}
	return routes, nil
}

// updateBody returns the body of an UPDATE that withdraws nothing.
func updateBody(attrs, nlri []byte) []byte {
	b := binary.BigEndian.AppendUint16([]byte{0, 0}, uint16(len(attrs)))
	return append(append(b, attrs...), nlri...)
}

// message puts the header before a body.
func message(kind byte, body []byte) []byte {
	b := make([]byte, 16, bgpHeader+len(body))
	for i := range b {
		b[i] = 0xff
	}
	b = binary.BigEndian.AppendUint16(b, uint16(bgpHeader+len(body)))
	return append(append(b, kind), body...)
}

// send writes messages with one write.
func (s *speaker) send(messages ...[]byte) error {
	var all []byte
	for _, m := range messages {
		all = append(all, m...)
	}
	s.write.Lock()
	defer s.write.Unlock()
	if s.ended != nil {
		return s.ended
	}
	return s.put(all)
}

// put writes; the lock is held.
func (s *speaker) put(b []byte) error {
	if err := s.conn.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	_, err := s.conn.Write(b)
	return err
}

// notify sends a NOTIFICATION. A write error is ignored, since the connection ends anyway.
func (s *speaker) notify(code, sub byte) { _ = s.send(message(bgpNotify, []byte{code, sub})) }

// end ends the connection with a Cease. Its reader does the rest.
func (s *speaker) end(cease byte, reason error) {
	s.write.Lock()
	defer s.write.Unlock()
	if s.ended == nil {
		s.ended = reason
		_ = s.put(message(bgpNotify, []byte{notifyCease, cease}))
		s.conn.Close()
	}
}

// keepAlive sends KEEPALIVEs until stop is closed or the connection ends.
func (s *speaker) keepAlive(every time.Duration, stop <-chan struct{}) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if s.send(message(bgpKeepalive, nil)) != nil {
				return
			}
		case <-stop:
			return
		}
	}
}
