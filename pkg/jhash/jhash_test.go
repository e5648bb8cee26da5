package jhash

import "testing"

// The values are those of include/linux/jhash.h.
func TestSum(t *testing.T) {
	for key, want := range map[string]uint32{"": 0xdeadbeef} {
		if got := Sum([]byte(key), 0); got != want {
			t.Errorf("%q: got %#x, want %#x", key, got, want)
		}
	}
	if Scale(1<<31, 10) != 5 {
		t.Error("scale")
	}
}
