package readinessfile

import (
	"log/slog"
	"net/netip"
	"testing"
)

// BenchmarkWant measures the time of Want in the readiness loop when one of 10 000 VIPs changes.
func BenchmarkWant(b *testing.B) {
	w := NewWriter(b.TempDir(), slog.New(slog.DiscardHandler))
	var vips []netip.Addr
	for i := range 10_000 {
		vips = append(vips, netip.AddrFrom4([4]byte{20, 0, byte(i >> 8), byte(i)}))
	}
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		w.Want([]string{"a"}, vips[n%2:]...)
	}
}
