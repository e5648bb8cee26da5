package bird

import (
	"crypto/sha256"
	"net/netip"
	"os"
)

// RouterID derives a BGP router ID from the pod's UID (POD_UID) or else the machine ID, and the
// host name. BIRD fails to start without one on a host that has no IPv4 address.
func RouterID() netip.Addr {
	seed := os.Getenv("POD_UID")
	if seed == "" {
		if b, err := os.ReadFile("/etc/machine-id"); err == nil {
			seed = string(b)
		}
	}
	if name, err := os.Hostname(); err == nil {
		seed += name
	}
	sum := sha256.Sum256([]byte("vipgate router id " + seed))
	// Every value but 0.0.0.0 is allowed (RFC 6286). The first byte is below 127: the ID never
	// looks like a loopback or multicast address.
	return netip.AddrFrom4([4]byte{1 + sum[0]%126, sum[1], sum[2], sum[3] | 1})
}
