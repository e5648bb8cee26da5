package healthcheck

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxDatagram is how much of an answer is read.
const maxDatagram = 4 << 10

// query is one exchange of datagrams.
type query struct {
	request []byte
	// port is the local port of a request with a header of its own, that of SCTP; 0: of UDP.
	port uint16
	// answer judges a packet. final is false if the packet does not belong to the request: then o is
	// the outcome unless another one follows.
	answer func(packet []byte) (o outcome, final bool)
	// farewell is sent after success, if answer sets it.
	farewell []byte
}

func (plan *plan) newQuery() *query {
	switch {
	case plan.UDP.Port != 0:
		return &query{request: trench.Payload(plan.UDP.Send), answer: plan.answerUDP}
	case plan.NTP.Port != 0:
		return plan.queryNTP()
	case plan.SCTP.Port != 0:
		return plan.querySCTP()
	}
	return plan.queryDNS()
}

func (plan *plan) answerUDP(packet []byte) (o outcome, final bool) {
	if expected := trench.Payload(plan.UDP.Expect); !bytes.Contains(packet, expected) {
		return plan.wrong("the answer of %d bytes does not contain %s: %s", len(packet),
			remark(plan.UDP.Expect), remark(string(packet))), true
	}
	return outcome{verdict: succeeded}, true
}

// exchangeDatagrams performs a check over a connected socket of UDP, or of raw IP.
func (plan *plan) exchangeDatagrams(ctx context.Context, conn net.Conn) outcome {
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	query := plan.newQuery()
	if query.port != 0 {
		if err := onlyPort(conn, query.port); err != nil {
			return unavailable(err)
		}
	}
	var late outcome
	_, err := conn.Write(query.request)
	buffer := make([]byte, maxDatagram)
	for {
		var length int
		if err == nil {
			length, err = conn.Read(buffer)
		}
		if err == nil {
			judged, final := query.answer(buffer[:length])
			if final {
				if query.farewell != nil {
					_, _ = conn.Write(query.farewell) // the target forgets the association anyway
				}
				return judged
			}
			late = judged
			continue
		}
		if timedOut(err) && late.verdict == failed {
			return late
		}
		var other bool
		failure := plan.failure(err)
		if raw, ok := conn.(syscall.Conn); ok && !timedOut(err) {
			if control, errRaw := raw.SyscallConn(); errRaw == nil {
				_ = control.Control(func(fd uintptr) { failure, other = plan.icmpFailure(int(fd), query, failure) })
			}
		}
		if !other {
			return failure
		}
		err = nil // the error of a packet of another socket with the same addresses
	}
}

// ReportICMP makes a socket keep the ICMP errors that answer its packets: a failure then names their
// sender. A dial function of [Single.Run] calls it for every network but TCP.
func ReportICMP(fd int, family vip.Family) error {
	if family == vip.IPv4 {
		return os.NewSyscallError("setsockopt IP_RECVERR", unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVERR, 1))
	}
	err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1)
	return os.NewSyscallError("setsockopt IPV6_RECVERR", err)
}

// icmpFailure returns the outcome of a check for the ICMP error that the socket keeps; fallback
// without one. other reports that the error belongs to a packet of another socket.
func (plan *plan) icmpFailure(fd int, query *query, fallback outcome) (o outcome, other bool) {
	var packet [64]byte
	control := make([]byte, 256)
	length, controlLength, _, _, err := unix.Recvmsg(fd, packet[:], control, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
	if err != nil {
		return fallback, false
	}
	// A raw socket gets the errors of all packets between its addresses.
	if query.port != 0 && (length < 2 || binary.BigEndian.Uint16(packet[:]) != query.port) {
		return fallback, true
	}
	messages, err := unix.ParseSocketControlMessage(control[:controlLength])
	if err != nil {
		return fallback, false
	}
	for _, message := range messages {
		if text, refused, silent, ok := icmpError(message.Data); ok {
			failure := plan.wrong("%s", text)
			failure.refused, failure.silent = refused, silent
			return failure, false
		}
	}
	return fallback, false
}

// Origins of errors in struct sock_extended_err (linux/errqueue.h), and its size.
const (
	originICMP   = 2
	originICMPv6 = 3
	sizeExtended = 16
)

// icmpError parses a struct sock_extended_err with the address of the sender. refused reports that
// the target itself rejected the packet, silent that nothing shows that the packet reached it.
func icmpError(data []byte) (text string, refused, silent, ok bool) {
	if len(data) < sizeExtended || data[4] != originICMP && data[4] != originICMPv6 {
		return "", false, false, false
	}
	kind, code := data[5], data[6]
	names := map[[2]byte]string{
		{3, 0}: "network unreachable", {3, 1}: "host unreachable", {3, 2}: "protocol unreachable",
		{3, 3}: "port unreachable", {3, 9}: "administratively prohibited", {3, 10}: "administratively prohibited",
		{3, 13}: "administratively prohibited", {11, 0}: "time exceeded",
	}
	if data[4] == originICMPv6 {
		names = map[[2]byte]string{
			{1, 0}: "no route", {1, 1}: "administratively prohibited", {1, 3}: "address unreachable",
			{1, 4}: "port unreachable", {3, 0}: "time exceeded", {4, 1}: "unrecognized next header",
		}
	}
	name := names[[2]byte{kind, code}]
	switch name {
	case "port unreachable", "protocol unreachable", "unrecognized next header":
		refused = true
	case "administratively prohibited":
	case "":
		name, silent = fmt.Sprintf("type %d code %d", kind, code), true
	default:
		silent = true
	}
	text = "ICMP " + name
	// struct sockaddr_in or sockaddr_in6 follows, with the sender of the ICMP message.
	switch sender := data[sizeExtended:]; {
	case len(sender) >= unix.SizeofSockaddrInet4 && binary.NativeEndian.Uint16(sender) == unix.AF_INET:
		text += " from " + netip.AddrFrom4([4]byte(sender[4:8])).String()
	case len(sender) >= 24 && binary.NativeEndian.Uint16(sender) == unix.AF_INET6:
		text += " from " + netip.AddrFrom16([16]byte(sender[8:24])).String()
	}
	return text, refused, silent, true
}

func (plan *plan) probeDatagrams(ctx context.Context, dial dialFunc, to netip.Addr) outcome {
	address := netip.AddrPortFrom(to, plan.port).String()
	if plan.network == networkSCTP {
		address = to.String()
	}
	conn, err := dial(ctx, plan.network, address)
	if err != nil {
		if errors.Is(err, os.ErrPermission) && plan.network == networkSCTP {
			return unavailable(fmt.Errorf("raw socket: %w: the capability NET_RAW is missing", err))
		}
		return plan.failure(err)
	}
	defer conn.Close()
	return plan.exchangeDatagrams(ctx, conn)
}
