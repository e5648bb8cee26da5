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

// Listen is [net.Listen] that retries a port which the test has just closed: the port stays in
// use while this process starts another one, since between fork and exec the child has a copy of
// each file descriptor.
func Listen(network, address string) (net.Listener, error) {
	return listen(net.ListenConfig{}, network, address)
}

// Listen is [Listen] in the namespace.
func (n *NetNS) Listen(network, address string) (net.Listener, error) {
	return n.listen(net.ListenConfig{}, network, address)
}

func (n *NetNS) listen(c net.ListenConfig, network, address string) (l net.Listener, err error) {
	err = n.Do(func() (err error) {
		l, err = listen(c, network, address)
		return err
	})
	return l, err
}

func listen(c net.ListenConfig, network, address string) (net.Listener, error) {
	for deadline := time.Now().Add(portTimeout); ; time.Sleep(pollInterval) {
		l, err := c.Listen(context.Background(), network, address)
		if !errors.Is(err, unix.EADDRINUSE) || time.Now().After(deadline) {
			return l, err
		}
	}
}
