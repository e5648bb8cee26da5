package bird

import (
	"crypto/sha256"
	"net/netip"
	"os"
)

// RouterID derives a BGP router id from who we are: the pod's UID (POD_UID), else
// the machine's id, else the host's name. BIRD finds none on a host without
// IPv4, and does not say so beforehand.
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
	// Anything but 0.0.0.0 is allowed (RFC 6286); the first byte keeps it from
	// looking like an address in use.
	return netip.AddrFrom4([4]byte{1 + sum[0]%126, sum[1], sum[2], sum[3] | 1})
}
