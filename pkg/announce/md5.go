package announce

import (
	"crypto/rand"
	"fmt"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxPassword is TCP_MD5SIG_MAXKEYLEN of linux/tcp.h.
const maxPassword = unix.TCP_MD5SIG_MAXKEYLEN

// NewPassword returns a random TCP-MD5 key of at least 128 bits. It has only letters and digits, so
// that it needs no quoting in BIRD's configuration.
func NewPassword() string { return rand.Text() }

// ProbeMD5 returns nil if the kernel supports TCP-MD5 signatures (TCP_MD5SIG, RFC 2385). Without
// them, use Options.Password "".
func ProbeMD5() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return fmt.Errorf("failed to probe the kernel for TCP-MD5: %w", os.NewSyscallError("socket", err))
	}
	defer unix.Close(fd)
	if err := setKey(fd, "probe", netip.AddrFrom4([4]byte{127, 0, 0, 1})); err != nil {
		return fmt.Errorf("failed to probe the kernel for TCP-MD5: %w", err)
	}
	return nil
}

// signWith returns a net.Dialer.Control that signs the connection to peer. The key must be set
// before connect, since the SYN is signed, too.
func signWith(password string, peer netip.Addr) func(string, string, syscall.RawConn) error {
	return func(_, _ string, raw syscall.RawConn) error {
		var set error
		if err := raw.Control(func(fd uintptr) { set = setKey(int(fd), password, peer) }); err != nil {
			return err
		}
		return set
	}
}

func setKey(fd int, password string, peer netip.Addr) error {
	sig := unix.TCPMD5Sig{Keylen: uint16(len(password))}
	if peer.Is4() {
		sig.Addr.Family = unix.AF_INET
		// struct sockaddr_in after its family: port (2 bytes, ignored), address.
		addr := peer.As4()
		copy(sig.Addr.Data[2:], addr[:])
	} else {
		sig.Addr.Family = unix.AF_INET6
		// struct sockaddr_in6 after its family: port, flow label (4 bytes), address.
		addr := peer.As16()
		copy(sig.Addr.Data[6:], addr[:])
	}
	copy(sig.Key[:], password)
	return os.NewSyscallError("setsockopt TCP_MD5SIG",
		unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG, &sig))
}
