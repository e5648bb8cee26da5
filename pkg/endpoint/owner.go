package endpoint

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// PortOwner returns the process that listens on a TCP address or on its wildcard address, such as
// "process 12 (nc)". It returns "another process" if the PID is hidden, as in another container of
// the pod, and "" if no process listens.
func PortOwner(a netip.AddrPort) string {
	var inodes []string
	for _, name := range []string{"tcp", "tcp6"} {
		table, err := os.ReadFile("/proc/net/" + name)
		if err == nil {
			inodes = append(inodes, listeners(table, a)...)
		}
	}
	if len(inodes) == 0 {
		return ""
	}
	// The link /proc/PID/fd/N of a socket has this text.
	for i, inode := range inodes {
		inodes[i] = "socket:[" + inode + "]"
	}
	descriptors, _ := filepath.Glob("/proc/[0-9]*/fd/[0-9]*") // fails only for a bad pattern
	for _, fd := range descriptors {
		if to, err := os.Readlink(fd); err != nil || !slices.Contains(inodes, to) {
			continue
		}
		process := filepath.Dir(filepath.Dir(fd))
		name, err := os.ReadFile(filepath.Join(process, "comm"))
		if err != nil {
			continue // the process has ended
		}
		return fmt.Sprintf("process %s (%s)", filepath.Base(process), bytes.TrimSpace(name))
	}
	return "another process"
}

// explainListen adds the port and its owner to the error of a listener whose port is in use.
func explainListen(addr string, err error) error {
	at, parseErr := netip.ParseAddrPort(addr) // fails for a host name
	if !errors.Is(err, syscall.EADDRINUSE) || parseErr != nil {
		return err
	}
	return fmt.Errorf("port %d is used by %s: %w; stop it, or set another port",
		at.Port(), cmp.Or(PortOwner(at), "another process"), err)
}

// listeners returns the inodes of the sockets in /proc/net/tcp or tcp6 that listen on an address.
func listeners(table []byte, a netip.AddrPort) []string {
	const stateListen = "0A"
	var inodes []string
	lines := bufio.NewScanner(bytes.NewReader(table))
	for lines.Scan() {
		// "sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode …"
		words := strings.Fields(lines.Text())
		if len(words) < 10 || words[3] != stateListen {
			continue
		}
		address, port, _ := strings.Cut(words[1], ":")
		n, err := strconv.ParseUint(port, 16, 16)
		if err != nil || uint16(n) != a.Port() {
			continue
		}
		// The address consists of 32-bit words in host byte order; only wildcards and IPv4 are compared.
		if strings.Trim(address, "0") == "" || a.Addr().IsUnspecified() ||
			len(address) == 8 && address == hexWord(a.Addr()) {
			inodes = append(inodes, words[9])
		}
	}
	return inodes
}

// hexWord returns an IPv4 address as /proc/net/tcp shows it.
func hexWord(a netip.Addr) string {
	if !a.Is4() {
		return ""
	}
	b := a.As4()
	return fmt.Sprintf("%08X", binary.NativeEndian.Uint32(b[:]))
}
