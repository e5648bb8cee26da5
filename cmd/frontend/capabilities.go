package main

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// raiseCapabilities makes all capabilities that this process may have effective. The file of the
// image has them as permitted only (`+p`): with `+ep`, exec fails in a container that allows fewer,
// such as one with --speaker=external, which needs none.
func raiseCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var now [2]unix.CapUserData // version 3 has two words for 64 capabilities
	if err := unix.Capget(&header, &now[0]); err != nil {
		return fmt.Errorf("failed to read the capabilities: %w", err)
	}
	wanted := now
	for i := range wanted {
		wanted[i].Effective = wanted[i].Permitted
	}
	if wanted == now {
		return nil
	}
	// Capabilities belong to threads, and the runtime has started some. Programs with cgo cannot do
	// this; those of releases have none.
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET,
		uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&wanted)), 0)
	if errno != 0 {
		return fmt.Errorf("failed to raise the capabilities of the file: %w", errno)
	}
	return nil
}
