package kernel

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// MayProbe tells whether this process may have the kernel ask neighbours at once,
// which takes CAP_NET_ADMIN. Without it [Neighbours] has only the carrier, and
// what neighbours answer by themselves.
func MayProbe() (bool, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData // version 3 has two words for 64 capabilities
	if err := unix.Capget(&header, &data[0]); err != nil {
		return false, fmt.Errorf("read our capabilities: %w", err)
	}
	return data[0].Effective&(1<<unix.CAP_NET_ADMIN) != 0, nil
}
