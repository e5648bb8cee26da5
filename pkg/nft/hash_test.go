package nft

import "testing"

// The first values are from lookup3.c, the origin of include/linux/jhash.h. The rest have lengths
// on each side of a block boundary and come from an independent implementation that adds byte by
// byte.
func TestJhash(t *testing.T) {
	const text = "Four score and seven years ago"
	for _, tt := range []struct {
		key        string
		seed, want uint32
	}{
		{"", 0, 0xdeadbeef},
		{"", 0xdeadbeef, 0xbd5b7dde},
		{text, 0, 0x17770551},
		{text, 1, 0xcd628161},
		{text[:1], 7, 0x9ce6538f},
		{text[:4], 7, 0xa9c60c81},
		{text[:5], 7, 0xbd02ff45},
		{text[:11], 7, 0x45b44c8c},
		{text[:12], 7, 0x69f279f1},
		{text[:13], 7, 0xae334571},
		{text[:24], 7, 0x7d007bba},
		{text[:25], 7, 0x91582bd1},
	} {
		if got := jhash([]byte(tt.key), tt.seed); got != tt.want {
			t.Errorf("%q, seed %#x: got %#x, want %#x", tt.key, tt.seed, got, tt.want)
		}
	}
}

func TestHashModulus(t *testing.T) {
	const text = "Four score and seven years ago" // hash 0x17770551
	for modulus, want := range map[uint32]uint32{1: 0, 10: 0, 11: 1, 1 << 31: 0x17770551 >> 1, 1<<32 - 1: 0x17770550} {
		if got := Hash([]byte(text), 0, modulus); got != want {
			t.Errorf("modulus %d: got %#x, want %#x", modulus, got, want)
		}
	}
}
