package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Option changes how long IPv6 addresses stay tentative. The default is the kernel's duplicate
// address detection (RFC 4862), as in a pod: 1 to 2 s after a link comes up.
type Option uint8

const (
	// WithoutDAD makes the addresses of a namespace's interfaces usable immediately, the link-local
	// ones included. It is for hosts that the test does not examine.
	WithoutDAD Option = iota + 1
	// QuickDAD shortens the detection in the pods of a lab to some 20 ms, and the lab waits for it. It
	// is for tests that start a pod in order to examine something else: there are some 200 of them.
	QuickDAD
)

// quickRetransmission is the time after which an address is not tentative any more, in ms.
const quickRetransmission = "20"

// shortenDAD shortens duplicate address detection on an interface that is down, with QuickDAD.
func (n *NetNS) shortenDAD(dev string) error {
	if !n.quickDAD {
		return nil
	}
	return errors.Join(n.Sysctl("net.ipv6.conf."+dev+".router_solicitation_delay", "0"),
		n.Sysctl("net.ipv6.neigh."+dev+".retrans_time_ms", quickRetransmission))
}

// awaitDAD waits for the end of a shortened detection and restores the default timing, by which the
// kernel probes neighbors, too.
func (n *NetNS) awaitDAD(dev string) error {
	if !n.quickDAD {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	return errors.Join(
		Eventually(ctx, 5*time.Millisecond, func() error {
			tentative, err := n.tentative(dev)
			if err == nil && len(tentative) > 0 {
				err = fmt.Errorf("duplicate address detection continues in %s: %v", n.name, tentative)
			}
			return err
		}),
		n.Sysctl("net.ipv6.conf."+dev+".router_solicitation_delay", "1"),
		n.Sysctl("net.ipv6.neigh."+dev+".retrans_time_ms", "1000"),
	)
}

// tentative returns the addresses of an interface that are tentative, from if_inet6: address, three
// numbers, flags in hexadecimal digits, interface.
func (n *NetNS) tentative(dev string) (addresses []string, err error) {
	err = n.Do(func() error {
		list, err := os.ReadFile("/proc/thread-self/net/if_inet6")
		if err != nil {
			return fmt.Errorf("addresses in %s: %w", n.name, err)
		}
		for line := range strings.Lines(string(list)) {
			fields := strings.Fields(line)
			flags, err := strconv.ParseUint(fields[4], 16, 32)
			if err != nil {
				return fmt.Errorf("addresses in %s: %w", n.name, err)
			}
			if fields[5] == dev && flags&unix.IFA_F_TENTATIVE != 0 {
				addresses = append(addresses, fields[0])
			}
		}
		return nil
	})
	return addresses, err
}
