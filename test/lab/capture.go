package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Packet is an IP packet that was seen on an interface.
type Packet struct {
	Outgoing bool // sent by this end of the wire
	Src, Dst netip.Addr
	Protocol uint8  // RFC 790 number, such as 17 for UDP
	SrcPort  uint16 // TCP and UDP only
	DstPort  uint16
}

// Capture captures the packets of an interface as they are on the link, independent of rules and
// routes.
type Capture struct {
	file *os.File
	done chan struct{}

	mu      sync.Mutex
	packets []Packet
	changed chan struct{} // closed at the next packet
}

// NewCapture captures until the test ends.
func NewCapture(t TB, ns *NetNS, dev string) *Capture {
	t.Helper()
	c, err := StartCapture(ns, dev)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("%v", err)
		}
	})
	return c
}

// StartCapture captures on an interface of the namespace. The caller closes it.
func StartCapture(ns *NetNS, dev string) (*Capture, error) {
	c := &Capture{done: make(chan struct{}), changed: make(chan struct{})}
	err := ns.Do(func() error {
		link, err := net.InterfaceByName(dev)
		if err != nil {
			return err
		}
		// Network byte order, as the kernel expects the protocol of a packet socket.
		all := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		c.file = os.NewFile(uintptr(fd), "capture "+dev)
		return os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Index}))
	})
	if err != nil {
		if c.file != nil {
			err = errors.Join(err, c.file.Close())
		}
		return nil, fmt.Errorf("capture on %s in %s: %w", dev, ns.Name(), err)
	}
	raw, err := c.file.SyscallConn()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("capture on %s in %s: %w", dev, ns.Name(), err), c.file.Close())
	}
	go func() {
		defer close(c.done)
		buf := make([]byte, 64<<10)
		for {
			var n int
			var from unix.Sockaddr
			var errRecv error
			err := raw.Read(func(fd uintptr) bool {
				n, from, errRecv = unix.Recvfrom(int(fd), buf, 0)
				return errRecv != unix.EAGAIN
			})
			if err != nil {
				return // closed
			}
			ll, ok := from.(*unix.SockaddrLinklayer)
			if errRecv != nil || !ok {
				continue // the interface went down or away; it may come back
			}
			if p, ok := parsePacket(buf[:n]); ok {
				p.Outgoing = ll.Pkttype == unix.PACKET_OUTGOING
				c.add(p)
			}
		}
	}()
	return c, nil
}

func (c *Capture) add(p Packet) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.packets = append(c.packets, p)
	close(c.changed)
	c.changed = make(chan struct{})
}

// parsePacket reads an IP packet without its link-layer header.
func parsePacket(b []byte) (Packet, bool) {
	var p Packet
	var payload []byte
	switch {
	case len(b) >= 20 && b[0]>>4 == 4 && len(b) >= int(b[0]&0xf)*4:
		p.Src, p.Dst, p.Protocol = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:])), b[9]
		payload = b[int(b[0]&0xf)*4:]
	case len(b) >= 40 && b[0]>>4 == 6:
		p.Src, p.Dst, p.Protocol = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:])), b[6]
		payload = b[40:]
	default:
		return p, false
	}
	if (p.Protocol == unix.IPPROTO_TCP || p.Protocol == unix.IPPROTO_UDP) && len(payload) >= 4 {
		p.SrcPort, p.DstPort = binary.BigEndian.Uint16(payload), binary.BigEndian.Uint16(payload[2:])
	}
	return p, true
}

// Packets returns the packets captured so far.
func (c *Capture) Packets() []Packet {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Packet(nil), c.packets...)
}

// Count returns how many of the packets seen so far match.
func (c *Capture) Count(match func(Packet) bool) int {
	n := 0
	for _, p := range c.Packets() {
		if match(p) {
			n++
		}
	}
	return n
}

// Wait waits until a matching packet was seen, also one seen before the call.
func (c *Capture) Wait(ctx context.Context, match func(Packet) bool) error {
	next := 0
	for {
		c.mu.Lock()
		fresh, changed := c.packets[next:], c.changed
		c.mu.Unlock()
		for _, p := range fresh {
			if match(p) {
				return nil
			}
		}
		next += len(fresh)
		select {
		case <-ctx.Done():
			return fmt.Errorf("no such packet on the wire: %w", ctx.Err())
		case <-changed:
		}
	}
}

// Close ends the capture and waits for it.
func (c *Capture) Close() error {
	err := c.file.Close()
	<-c.done
	return err
}
