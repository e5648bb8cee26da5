package feedback

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"syscall"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// flow identifies a path of a probe: packets from a source address and port to the address of a VIP.
type flow struct {
	source netip.AddrPort
	vip    netip.Addr
}

// snapLength is how many bytes of a packet are read: an IP header and the ports.
const snapLength = 64

// packets reads the packets of probes before nftables and the fast path, which may drop them.
type packets struct{ file *os.File }

// open returns a socket for packets from the sources.
func open(sources []netip.Addr) (*packets, error) {
	program, err := bpf.Assemble(filter(sources))
	if err != nil {
		return nil, fmt.Errorf("failed to assemble the filter for packets of probes: %w", err)
	}
	// A socket without a protocol receives nothing before the filter is attached.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("failed to create a socket for packets of probes, which needs NET_RAW: %w", err)
	}
	file := os.NewFile(uintptr(fd), "packets of probes")
	instructions := make([]unix.SockFilter, len(program))
	for i, raw := range program {
		instructions[i] = unix.SockFilter{Code: raw.Op, Jt: raw.Jt, Jf: raw.Jf, K: raw.K}
	}
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{
		Len: uint16(len(instructions)), Filter: &instructions[0],
	})
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})})
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("failed to receive packets of probes: %w", err), file.Close())
	}
	return &packets{file}, nil
}

// read calls seen with each packet until the socket is closed.
func (p *packets) read(seen func(flow)) {
	buffer := make([]byte, snapLength)
	for {
		n, err := p.file.Read(buffer)
		switch {
		case err == nil:
			if f, ok := parse(buffer[:n]); ok {
				seen(f)
			}
		case !errors.Is(err, syscall.ENETDOWN): // an interface left
			return
		}
	}
}

func (p *packets) close() { _ = p.file.Close() } // fails only if it is closed already

// filter returns a program that accepts packets to this host from the sources. Of IPv6 addresses it
// compares a hash of the words (FNV), so that 60 probes fit into the 4 096 instructions of a
// program: [Feedback.sees] compares the whole address.
func filter(sources []netip.Addr) []bpf.Instruction {
	const version4Source, version6Source = 12, 8 // offsets in the header (RFC 791, RFC 8200)
	const prime = 16777619
	accept, reject := bpf.RetConstant{Val: snapLength}, bpf.RetConstant{}
	of4 := []bpf.Instruction{bpf.LoadAbsolute{Off: version4Source, Size: 4}}
	of6 := []bpf.Instruction{bpf.LoadAbsolute{Off: version6Source, Size: 4}}
	for i := range uint32(3) {
		of6 = append(of6, bpf.ALUOpConstant{Op: bpf.ALUOpMul, Val: prime}, bpf.TAX{},
			bpf.LoadAbsolute{Off: version6Source + 4*(i+1), Size: 4}, bpf.ALUOpX{Op: bpf.ALUOpAdd})
	}
	for _, source := range sources {
		of, hash := &of6, uint32(0)
		if source.Is4() {
			of = &of4
		}
		for word := range slices.Chunk(source.AsSlice(), 4) {
			hash = hash*prime + binary.BigEndian.Uint32(word)
		}
		*of = append(*of, bpf.JumpIf{Cond: bpf.JumpEqual, Val: hash, SkipFalse: 1}, accept)
	}
	of4, of6 = append(of4, reject), append(of6, reject)
	program := []bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtType},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.PACKET_HOST, SkipTrue: 1},
		reject,
		bpf.LoadAbsolute{Off: 0, Size: 1},
		bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 4, SkipTrue: 3},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 6, SkipTrue: 1},
		reject,
		bpf.Jump{Skip: uint32(len(of4))},
	}
	return append(append(program, of4...), of6...)
}

// parse returns the flow of a packet of TCP, UDP or SCTP, whose headers begin with the ports.
func parse(packet []byte) (f flow, ok bool) {
	if len(packet) == 0 {
		return f, false
	}
	var source, destination netip.Addr
	var protocol byte
	var payload int
	switch packet[0] >> 4 {
	case 4:
		const fragmentOffset = 0x1fff
		if payload = int(packet[0]&0xf) * 4; payload < 20 || len(packet) < payload+4 ||
			binary.BigEndian.Uint16(packet[6:])&fragmentOffset != 0 {
			return f, false
		}
		protocol = packet[9]
		source, destination = netip.AddrFrom4([4]byte(packet[12:])), netip.AddrFrom4([4]byte(packet[16:]))
	case 6:
		if payload = 40; len(packet) < payload+4 {
			return f, false
		}
		protocol = packet[6]
		source, destination = netip.AddrFrom16([16]byte(packet[8:])), netip.AddrFrom16([16]byte(packet[24:]))
	}
	switch protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
		port := binary.BigEndian.Uint16(packet[payload:])
		return flow{netip.AddrPortFrom(source, port), destination}, true
	}
	return f, false
}
