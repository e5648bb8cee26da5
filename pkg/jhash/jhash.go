// Package jhash implements the kernel's hash of bytes (include/linux/jhash.h), as used by
// nftables.
package jhash

import (
	"encoding/binary"
	"math/bits"
)

// Sum returns the hash of key: Bob Jenkins' lookup3.
func Sum(key []byte, seed uint32) uint32 {
	a := 0xdeadbeef + uint32(len(key)) + seed
	b, c := a, a
	step := func(x, y, z *uint32, by int) {
		*x -= *z
		*x ^= bits.RotateLeft32(*z, by)
		*z += *y
	}
	for ; len(key) > 12; key = key[12:] {
		a, b, c = a+word(key), b+word(key[4:]), c+word(key[8:])
		step(&a, &b, &c, 4)
		step(&b, &c, &a, 6)
		step(&c, &a, &b, 8)
		step(&a, &b, &c, 16)
		step(&b, &c, &a, 19)
		step(&c, &a, &b, 4)
	}
	if len(key) == 0 {
		return c
	}
	var rest [12]byte
	copy(rest[:], key)
	a, b, c = a+word(rest[:]), b+word(rest[4:]), c+word(rest[8:])
	last := func(x, y *uint32, by int) {
		*x ^= *y
		*x -= bits.RotateLeft32(*y, by)
	}
	last(&c, &b, 14)
	last(&a, &c, 11)
	last(&b, &a, 25)
	last(&c, &b, 16)
	last(&a, &c, 4)
	last(&b, &a, 14)
	last(&c, &b, 24)
	return c
}

func word(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }

// Scale maps a hash to 0..n-1 as nftables does for "jhash … mod n".
func Scale(hash, n uint32) uint32 { return uint32(uint64(hash) * uint64(n) >> 32) }
