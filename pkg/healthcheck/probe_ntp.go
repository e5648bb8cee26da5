package healthcheck

import (
	"crypto/rand"
	"encoding/binary"
	"strings"
	"time"
)

// Sizes and offsets of an NTP packet (RFC 5905 section 7.3).
const (
	ntpSize     = 48
	ntpOrigin   = 24
	ntpTransmit = 40
	ntpClient   = 4<<3 | 3 // version 4, mode 3
	ntpServer   = 4        // the mode
	maxStratum  = 15
)

// queryNTP asks for the time. The transmit timestamp is random: only the server can repeat it.
func (plan *plan) queryNTP() *query {
	request := make([]byte, ntpSize)
	request[0] = ntpClient
	_, _ = rand.Read(request[ntpTransmit:]) // never fails
	return &query{request: request, answer: func(packet []byte) (outcome, bool) {
		return plan.answerNTP([8]byte(request[ntpTransmit:]), packet)
	}}
}

// answerNTP judges an answer to a request with this transmit timestamp.
func (plan *plan) answerNTP(sent [8]byte, packet []byte) (o outcome, final bool) {
	if len(packet) < ntpSize {
		return plan.wrong("an answer of %d bytes, not NTP", len(packet)), true
	}
	if origin := packet[ntpOrigin:]; [8]byte(origin[:8]) != sent {
		return plan.wrong("an answer with another origin timestamp"), false
	}
	leap, mode, stratum := packet[0]>>6, packet[0]&7, packet[1]
	switch {
	case mode != ntpServer:
		return plan.wrong("mode %d, wanted 4 (server)", mode), true
	// A server without a clock sends both, and only one of them may say so.
	case leap == 3:
		return plan.wrong("unsynchronized (leap indicator 3), stratum %d", stratum), true
	case stratum == 0:
		return plan.wrong("kiss-o'-death %s", remark(strings.TrimRight(string(packet[12:16]), "\x00"))), true
	case stratum > maxStratum:
		return plan.wrong("stratum %d", stratum), true
	}
	distance := shortFormat(packet[4:])/2 + shortFormat(packet[8:])
	if distance > plan.NTP.MaxDistance {
		return plan.wrong("root distance %s, wanted at most %s", distance.Round(time.Millisecond),
			plan.NTP.MaxDistance), true
	}
	return outcome{verdict: succeeded}, true
}

// shortFormat returns a time in the short format of NTP: 16 bits of seconds, 16 of their fraction.
func shortFormat(data []byte) time.Duration {
	return time.Duration(binary.BigEndian.Uint32(data)) * time.Second >> 16
}
