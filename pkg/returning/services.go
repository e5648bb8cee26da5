package returning

import (
	"encoding/binary"

	"github.com/google/nftables/expr"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Code points of pool 2, for local use (RFC 2474, section 6).
const (
	// Ask marks a packet that the target may return. AskStep is added for each earlier target of the
	// slot that has returned it before, and three times while all targets are asked.
	Ask     = 0b000011
	AskStep = 0b000100
	// Back is added by the target.
	Back = 0b010000
	// Steps selects the bits of the steps, Bits all bits.
	Steps = 0b001100
	Bits  = 0b111111
)

// field returns the first two bytes of a header with a code point at its place (RFC 791, RFC 8200).
func field(family vip.Family, point uint16) []byte {
	return binary.BigEndian.AppendUint16(nil, point<<[...]int{2, 6}[family])
}

// Has matches packets by the bits of their code point. It changes a register.
func Has(family vip.Family, bits, want uint16, register uint32) []expr.Any {
	return []expr.Any{
		&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Len: 2, DestRegister: register},
		&expr.Bitwise{
			SourceRegister: register, DestRegister: register, Len: 2, Mask: field(family, bits), Xor: field(family, 0),
		},
		&expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: field(family, want)},
	}
}

// Set writes bits of the code point. It changes a register.
func Set(family vip.Family, bits, to uint16, register uint32) []expr.Any {
	keep := field(family, bits)
	for i := range keep {
		keep[i] = ^keep[i]
	}
	write := &expr.Payload{
		OperationType: expr.PayloadWrite, Base: expr.PayloadBaseNetworkHeader, Len: 2, SourceRegister: register,
	}
	if family == vip.IPv4 {
		const checksumAt = 10 // RFC 791
		write.CsumType, write.CsumOffset = expr.CsumTypeInet, checksumAt
	}
	return []expr.Any{
		&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Len: 2, DestRegister: register},
		&expr.Bitwise{
			SourceRegister: register, DestRegister: register, Len: 2, Mask: keep, Xor: field(family, to),
		},
		write,
	}
}
