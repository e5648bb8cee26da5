package nft

import (
	"encoding/binary"
	"math/bits"
)

// Hash returns the value of "jhash key mod modulus seed seed" (include/linux/jhash.h).
func Hash(key []byte, seed, modulus uint32) uint32 {
	return uint32(uint64(jhash(key, seed)) * uint64(modulus) >> 32)
}

// jhash returns Bob Jenkins' hash lookup3.
func jhash(key []byte, seed uint32) uint32 {
	a := 0xdeadbeef + uint32(len(key)) + seed
	b, c := a, a
	// step is a third of a round of __jhash_mix.
	step := func(x, y, z *uint32, by int) {
		*x -= *z
		*x ^= bits.RotateLeft32(*z, by)
		*z += *y
	}
	// Rotations of each block and of the rest, from include/linux/jhash.h.
	for ; len(key) > 12; key = key[12:] {
		a, b, c = a+word(key), b+word(key[4:]), c+word(key[8:])
		step(&a, &b, &c, 4)
		step(&b, &c, &a, 6)
		step(&c, &a, &b, 8)
		step(&a, &b, &c, 16)
		step(&b, &c, &a, 19)
		step(&c, &a, &b, 4)
	}
	// An empty key skips __jhash_final, as in the kernel.
	if len(key) == 0 {
		return c
	}
	var rest [12]byte
	// The kernel adds the remaining bytes in little-endian order, which equals zero padding.
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
