package returning

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Later returns the conditions, of which one is enough, for packets that may belong to a flow that
// began before: TCP segments without SYN (RFC 9293), and SCTP packets without INIT (RFC 9260). They
// change a register.
func Later(register uint32) [][]expr.Any {
	const flags, flagSYN = 13, 0x02
	tcp := append(protocol(unix.IPPROTO_TCP, register),
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: flags, Len: 1, DestRegister: register},
		&expr.Bitwise{SourceRegister: register, DestRegister: register, Len: 1, Mask: []byte{flagSYN}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: []byte{0}})
	return [][]expr.Any{tcp, LaterSCTP(register)}
}

// LaterSCTP returns the condition of [Later] for SCTP. An INIT is the only chunk of its packet.
func LaterSCTP(register uint32) []expr.Any {
	const chunk, initChunk = 12, 1
	return append(protocol(unix.IPPROTO_SCTP, register),
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: chunk, Len: 1, DestRegister: register},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: register, Data: []byte{initChunk}})
}

func protocol(number byte, register uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register},
		&expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: []byte{number}},
	}
}
