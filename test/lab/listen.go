package lab

import (
	"context"
	"errors"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// portTimeout bounds the wait for a port.
const portTimeout = 10 * time.Second

// listen listens on TCP in the network namespace of the calling thread. A port is still in use for
// a moment after its listener was closed while this process starts another one: between fork and
// exec the child has a copy of each file descriptor.
func listen(c net.ListenConfig, address string) (net.Listener, error) {
	for deadline := time.Now().Add(portTimeout); ; time.Sleep(pollInterval) {
		l, err := c.Listen(context.Background(), "tcp", address)
		if !errors.Is(err, unix.EADDRINUSE) || time.Now().After(deadline) {
			return l, err
		}
	}
}
