package bird

import "golang.org/x/sys/unix"

// linuxCapabilities lists the capabilities that BIRD requires to manage kernel routes, bind sockets
// to an interface, and listen on a port below 1024.
var linuxCapabilities = []int{unix.CAP_NET_ADMIN, unix.CAP_NET_BIND_SERVICE, unix.CAP_NET_RAW}

// secbitNoAmbient is SECBIT_NO_CAP_AMBIENT_RAISE (linux/securebits.h).
const secbitNoAmbient = 1 << 6

// ambientCapabilities returns the subset of linuxCapabilities that this process has. BIRD inherits
// them unless its executable has file capabilities. If BIRD has a capability that this process
// lacks, it is not dumpable, so this process cannot set TCP_NODELAY on its sockets.
func ambientCapabilities() []uintptr {
	bits, err := unix.PrctlRetInt(unix.PR_GET_SECUREBITS, 0, 0, 0, 0)
	if err != nil || bits&secbitNoAmbient != 0 {
		return nil
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData // version 3 has two words for 64 capabilities
	if unix.Capget(&header, &sets[0]) != nil {
		return nil
	}
	var list []uintptr
	for _, capability := range linuxCapabilities {
		if sets[capability/32].Permitted&(1<<(capability%32)) != 0 {
			list = append(list, uintptr(capability))
		}
	}
	return list
}
