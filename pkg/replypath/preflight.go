package replypath

import (
	"fmt"

	"golang.org/x/sys/unix"
)

const capabilityRemedy = `add NET_ADMIN to the container: securityContext: {capabilities: {add: ["NET_ADMIN"]}}`

// checkCapability returns an error if the process lacks CAP_NET_ADMIN.
func checkCapability() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData // version 3 has two words for 64 capabilities
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("failed to read the capabilities of this process: %w", err)
	}
	if data[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return fmt.Errorf("CAP_NET_ADMIN is missing; %s", capabilityRemedy)
	}
	return nil
}
