package healthcheck

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// networkSCTP is the network of a raw socket of package net for SCTP (protocol 132).
const networkSCTP = "ip:132"

// Chunks of SCTP (RFC 9260 section 3.2), and their sizes.
const (
	sctpHeader    = 12
	chunkHeader   = 4
	chunkINIT     = 1
	chunkINITACK  = 2
	chunkABORT    = 6
	sizeINIT      = 20
	reflected     = 1 // flag of ABORT: the verification tag is that of the packet that it answers
	receiveWindow = 64 << 10
	minSCTPPort   = 32768 // the first of sctpPorts ephemeral ports
	sctpPorts     = 28232
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sctpPacket returns an SCTP packet with one chunk.
func sctpPacket(from, to uint16, tag uint32, chunk byte, body []byte) []byte {
	packet := binary.BigEndian.AppendUint16(nil, from)
	packet = binary.BigEndian.AppendUint16(packet, to)
	packet = binary.BigEndian.AppendUint32(packet, tag)
	packet = append(packet, 0, 0, 0, 0, chunk, 0)
	packet = binary.BigEndian.AppendUint16(packet, uint16(chunkHeader+len(body)))
	packet = append(packet, body...)
	// The CRC32c is in the byte order of its bits (RFC 9260 appendix A).
	binary.LittleEndian.PutUint32(packet[8:], crc32.Checksum(packet, castagnoli))
	return packet
}

// querySCTP returns an INIT, which INIT ACK answers without a state in the target, and the ABORT
// that follows: it ends the entries of connection tracking on the path.
func (plan *plan) querySCTP() *query {
	port, tag := uint16(minSCTPPort+rand.IntN(sctpPorts)), rand.Uint32N(1<<32-1)+1
	body := binary.BigEndian.AppendUint32(nil, tag)
	body = binary.BigEndian.AppendUint32(body, receiveWindow)
	body = append(body, 0, 1, 0, 1) // one stream in each direction
	body = binary.BigEndian.AppendUint32(body, rand.Uint32())
	query := &query{request: sctpPacket(port, plan.port, 0, chunkINIT, body), port: port}
	query.answer = func(packet []byte) (outcome, bool) {
		judged, final, peer := plan.answerSCTP(port, tag, packet)
		if judged.verdict == succeeded {
			query.farewell = sctpPacket(port, plan.port, peer, chunkABORT, nil)
		}
		return judged, final
	}
	return query
}

// answerSCTP judges a packet to a port, after an INIT with this initiate tag. peer is the tag of
// the target. A raw IPv4 socket includes the IP header.
func (plan *plan) answerSCTP(port uint16, tag uint32, packet []byte) (o outcome, final bool, peer uint32) {
	// Without an IPv4 header the first byte may be 0x45 as well, as a part of the target's port.
	if len(packet) > 20 && packet[0]>>4 == 4 && packet[9] == unix.IPPROTO_SCTP {
		if header := int(packet[0]&15) * 4; header >= 20 && header < len(packet) && !plan.sctpPorts(packet, port) {
			packet = packet[header:]
		}
	}
	if len(packet) < sctpHeader+chunkHeader || !plan.sctpPorts(packet, port) {
		return plan.wrong("an answer that is not SCTP"), false, 0
	}
	// The sum is computed with zeros in its place.
	sum := crc32.Update(crc32.Checksum(packet[:8], castagnoli), castagnoli, make([]byte, 4))
	if crc32.Update(sum, castagnoli, packet[sctpHeader:]) != binary.LittleEndian.Uint32(packet[8:]) {
		return plan.wrong("an answer with a wrong CRC32c"), false, 0
	}
	verification, chunk := binary.BigEndian.Uint32(packet[4:]), packet[sctpHeader:]
	mirrored := chunk[0] == chunkABORT && chunk[1]&reflected != 0 && verification == 0
	if verification != tag && !mirrored {
		return plan.wrong("an answer with another verification tag"), false, 0
	}
	switch chunk[0] {
	case chunkINITACK:
		if len(chunk) < sizeINIT || binary.BigEndian.Uint32(chunk[4:]) == 0 {
			return plan.wrong("INIT ACK without a tag"), true, 0
		}
		return outcome{verdict: succeeded}, true, binary.BigEndian.Uint32(chunk[4:])
	case chunkABORT:
		refused := plan.wrong("ABORT")
		refused.refused = true
		return refused, true, 0
	}
	return plan.wrong("chunk type %d, wanted INIT ACK", chunk[0]), true, 0
}

// sctpPorts reports whether a packet has the ports of an answer.
func (plan *plan) sctpPorts(packet []byte, port uint16) bool {
	return binary.BigEndian.Uint16(packet) == plan.port && binary.BigEndian.Uint16(packet[2:]) == port
}

// onlyPort makes a raw socket ignore the packets to other ports: a raw socket gets all packets
// between its addresses, and all targets of a stream have one address, the VIP.
func onlyPort(conn net.Conn, port uint16) error {
	raw, ok := conn.(syscall.Conn)
	if !ok {
		return nil
	}
	control, err := raw.SyscallConn()
	if err != nil {
		return fmt.Errorf("raw socket: %w", err)
	}
	filter := []unix.SockFilter{
		{Code: unix.BPF_LDX | unix.BPF_B | unix.BPF_MSH, K: 0}, // the length of the IPv4 header
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_IND, K: 2},
	}
	if local, ok := conn.LocalAddr().(*net.IPAddr); ok && local.IP.To4() == nil {
		filter = []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 2}}
	}
	filter = append(filter,
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(port), Jf: 1},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: maxDatagram},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K})
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	errControl := control.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program)
	})
	if errControl != nil {
		return errControl
	}
	return os.NewSyscallError("setsockopt SO_ATTACH_FILTER", err)
}
