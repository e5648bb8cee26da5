package healthcheck

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"
	"unique"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// plan is the check of a stream, which its entries share. Its methods are safe for concurrent use.
type plan struct {
	trench.Check // of one kind
	// name is the path of a member, such as "any[0].http"; "" for the only check.
	name string
	port uint16 // 0: there is nothing to check
	// of lists the VIPs that are checked in place of a target's own address, vips their first
	// addresses by family. Both are empty if the target's own address is checked.
	of   []vip.VIP
	vips [len(vip.Families)][]netip.Addr
	tls  tlsConfig
	// body returns the expression of HTTP and DNS, and how many bytes it may match. It compiles on
	// first use, which does not delay an Update.
	body   func() (*regexp.Regexp, int)
	fields string // header fields of HTTP requests, each with its end
	// network is "tcp", "udp" or networkSCTP.
	network string
	// exchange checks a target over a TCP connection until ctx ends; nil if the connection is the
	// whole check. Over datagrams newQuery has the check.
	exchange func(ctx context.Context, conn net.Conn, at netip.Addr) outcome
	subjects [len(vip.Families)]subject
	lineages [len(vip.Families)]lineage
}

// newPlans returns the plans of the members of a check. Known ones are kept where they are equal: a
// new one visits all VIPs.
func newPlans(check trench.Check, vips []vip.VIP, known ...*plan) (plans []*plan, anyPasses bool) {
	members, anyPasses := check.Members()
	for i, member := range members {
		name := ""
		if kind := check.Kind(); kind == "any" || kind == "all" {
			name = fmt.Sprintf("%s[%d].%s", kind, i, member.Kind())
		}
		if i < len(known) && known[i].Check == member && known[i].name == name &&
			slices.Equal(known[i].of, vips) {
			plans = append(plans, known[i])
			continue
		}
		plan := newPlan(member, vips...)
		plan.name = name
		plans = append(plans, plan)
	}
	return plans, anyPasses
}

// newPlan returns the plan of a check of one kind. vips lists the VIPs of the stream if they are
// checked in place of addresses.
func newPlan(check trench.Check, vips ...vip.VIP) *plan {
	p := &plan{Check: check, port: check.TCP.Port, network: "tcp", of: vips, vips: firstAddresses(vips)}
	p.body = sync.OnceValues(func() (*regexp.Regexp, int) {
		return trench.CompileBody(cmp.Or(check.HTTP.Body, check.DNS.Answer))
	})
	switch {
	case check.HTTP.Port != 0:
		p.port, p.exchange = check.HTTP.Port, p.exchangeHTTP
		p.tls.TLSCheck, p.fields = check.HTTP.TLS, headerFields(check.HTTP)
	case check.GRPC.Port != 0:
		p.port, p.exchange = check.GRPC.Port, p.exchangeGRPC
		p.tls.TLSCheck, p.tls.protocols = check.GRPC.TLS, []string{"h2"}
	case check.DNS.Port != 0:
		p.port, p.network = check.DNS.Port, check.DNS.Transport
		if p.network == "tcp" {
			p.exchange = p.exchangeDNS
		}
	case check.UDP.Port != 0:
		p.port, p.network = check.UDP.Port, "udp"
	case check.NTP.Port != 0:
		p.port, p.network = check.NTP.Port, "udp"
	case check.SCTP.Port != 0:
		p.port, p.network = check.SCTP.Port, networkSCTP
	}
	single := unique.Make(check.Untimed())
	for _, family := range vip.Families {
		p.subjects[family] = subject{single, len(p.vips[family]) > 0, p.Source(family)}
		all := []checked{{subject: p.subjects[family]}}
		for i, a := range p.vips[family] {
			all = append(all[:i], checked{p.subjects[family], a})
		}
		p.lineages[family] = lineage{unique.Make(fmt.Sprint(p.vips[family])), all}
	}
	return p
}

// firstAddresses returns the first addresses of VIPs by family.
func firstAddresses(vips []vip.VIP) (first [len(vip.Families)][]netip.Addr) {
	for _, v := range vips {
		first[v.Family()] = append(first[v.Family()], v.Prefix().Addr())
	}
	return first
}

// subject is a check of a family without timing, rise and fall. If it changes, the state of a
// target is obsolete. Many are compared, so it is small.
type subject struct {
	check  unique.Handle[trench.SingleCheck]
	vip    bool // the check is via vip
	source netip.Addr
}

// checked is a subject with one of the VIPs that are checked; the zero Addr without VIPs.
type checked struct {
	subject
	address netip.Addr
}

// lineage has all VIPs that are checked: targets of an address and a lineage have the same verdict.
type lineage struct {
	vips    unique.Handle[string]
	checked []checked
}

// named returns the reason of a failure with the name of the member that failed.
func (plan *plan) named(reason string) string {
	if plan.name == "" || reason == "" {
		return reason
	}
	return plan.name + ": " + reason
}

// connects reports whether a connector runs the check, without a goroutine.
func (plan *plan) connects() bool { return plan.exchange == nil && plan.network != networkSCTP }

type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// path is how a connection reaches a target.
type path struct {
	to     netip.Addr // the target's own address, or one of a VIP
	source netip.Addr // zero: of the kernel's choice
	vip    bool       // to is one of a VIP
	fwmark uint32     // leads to the target; 0 with its own address
}

// hops is the hop limit toward a VIP: a target that lacks the VIP but forwards packets must not pass
// the check on to another target.
const hops = 1

func limitHops(fd int, f vip.Family) error {
	if f == vip.IPv4 {
		return os.NewSyscallError("setsockopt IP_TTL", unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, hops))
	}
	err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, hops)
	return os.NewSyscallError("setsockopt IPV6_UNICAST_HOPS", err)
}

func setFWMark(fd int, fwmark uint32) error {
	return os.NewSyscallError(setMark, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(fwmark)))
}

const setMark = "setsockopt SO_MARK"

// dial opens a connection. It is too short for keep-alives.
func (t path) dial(ctx context.Context, network, address string) (net.Conn, error) {
	d := &net.Dialer{KeepAlive: -1}
	d.SetMultipathTCP(false)
	if source := netip.AddrPortFrom(t.source, 0); t.source.IsValid() {
		switch network {
		case "tcp":
			d.LocalAddr = net.TCPAddrFromAddrPort(source)
		case "udp":
			d.LocalAddr = net.UDPAddrFromAddrPort(source)
		default:
			d.LocalAddr = &net.IPAddr{IP: t.source.AsSlice()}
		}
	}
	d.Control = func(_, _ string, c syscall.RawConn) (err error) {
		errControl := c.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PRIORITY, trench.CheckPriority)
			family := vip.FamilyOf(t.to)
			if network != "tcp" {
				err = ReportICMP(int(fd), family)
			}
			if err == nil && t.vip {
				err = errors.Join(limitHops(int(fd), family), setFWMark(int(fd), t.fwmark))
			}
		})
		return errors.Join(err, errControl)
	}
	return d.DialContext(ctx, network, address)
}

// probe performs one check of the target whose own address is at, over a connection to address to.
// It returns at the latest when ctx ends, at the timeout of the check.
func (plan *plan) probe(ctx context.Context, dial dialFunc, at, to netip.Addr) outcome {
	if plan.network != "tcp" {
		return plan.probeDatagrams(ctx, dial, to)
	}
	var config *tls.Config
	if plan.tls.On {
		var err error
		if config, err = plan.tls.of(ctx, at); err != nil {
			return unavailable(err)
		}
	}
	conn, err := dial(ctx, "tcp", netip.AddrPortFrom(to, plan.port).String())
	if err != nil {
		return plan.failure(err)
	}
	defer conn.Close()
	if tcp, ok := conn.(*net.TCPConn); ok {
		// The close is then a reset, which leaves no socket in TIME_WAIT on either side. Without it
		// the connection is closed as usual.
		_ = tcp.SetLinger(0)
	}
	if config != nil {
		secure := tls.Client(conn, config)
		if err := secure.HandshakeContext(ctx); err != nil {
			return plan.handshakeFailure(config.ServerName, err)
		}
		conn = secure
	}
	if plan.exchange == nil {
		return outcome{verdict: succeeded}
	}
	return plan.exchange(ctx, conn, at)
}

// probe is one check of a target, with the state of the target when the check began.
type probe struct {
	path
	entry *entry
	began time.Time
	plan  *plan
	ready bool
	// patient reports whether the target may still wait for a source address or a route.
	patient bool
	// routings is Checker.routings when the check began.
	routings uint64
}

// run performs the check in the calling goroutine. With a nil dial it uses the path of the probe.
func (p probe) run(ctx context.Context, dial dialFunc) outcome {
	limited, cancel := context.WithTimeout(ctx, p.plan.Timeout)
	defer cancel()
	if dial == nil {
		dial = p.dial
	}
	o := p.plan.probe(limited, dial, p.entry.Addr, p.to)
	if o.verdict != succeeded && ctx.Err() != nil {
		return outcome{verdict: cancelled}
	}
	return o
}

type verdict uint8

const (
	succeeded verdict = iota
	failed
	notRun    // for lack of local resources: no verdict on the target
	deferred  // for lack of a source address: to be run soon
	unrouted  // for lack of a fwmark that leads to the target: to be run once there is one
	starved   // failed, noticed late by this process: to be run again
	cancelled // the checker ends
)

// outcome is the result of a check; reason is "" when it succeeded.
type outcome struct {
	verdict verdict
	silent  bool // no answer at all: a timeout, or no route, link or neighbor entry
	reason  string
	refused bool // the connection
}

// unavailable is the outcome of a check that lacks a local resource.
func unavailable(err error) outcome {
	return outcome{verdict: notRun, reason: fmt.Sprintf("check not run: %v", err)}
}

// failure is the outcome of a check that an error of a system call or a context ended.
func (plan *plan) failure(err error) outcome {
	var errno syscall.Errno
	var call *os.SyscallError
	switch {
	case errors.Is(err, syscall.EAGAIN): // of UDP: no port is left
		return unavailable(err)
	case timedOut(err):
		return outcome{
			verdict: failed, silent: true,
			reason: fmt.Sprintf("port %d: no answer in %s", plan.port, plan.Timeout),
		}
	case errors.As(err, &call) && call.Syscall == "bind":
		// The configured source address is missing on this machine; the target may be healthy.
		return unavailable(fmt.Errorf("source address: %w", call.Err))
	case call != nil && call.Syscall == setMark:
		return unavailable(call)
	case !errors.As(err, &errno):
		return plan.wrong("%v", err)
	}
	silent := false
	switch errno {
	case syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM:
		return unavailable(err)
	case syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.ENETDOWN, syscall.EHOSTDOWN, syscall.EADDRNOTAVAIL:
		silent = true // no neighbor entry, route, link or source address
	}
	return outcome{
		verdict: failed, silent: silent, reason: fmt.Sprintf("port %d: %v", plan.port, errno),
		refused: errno == syscall.ECONNREFUSED,
	}
}

// broken returns the outcome of a check whose connection ended before the expected data; missing
// names it. prefix introduces errors that do not come from the connection.
func (plan *plan) broken(missing, prefix string, err error) outcome {
	var errno syscall.Errno
	switch {
	case timedOut(err):
		return plan.wrong("connected, but %s in %s", missing, plan.Timeout)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return plan.wrong("closed the connection: %s", missing)
	case errors.As(err, &errno):
		return plan.failure(err)
	}
	return plan.wrong("%s%s", prefix, remark(err.Error()))
}

// wrong is the outcome of a check that failed although the target answered: the network works.
func (plan *plan) wrong(format string, args ...any) outcome {
	return outcome{verdict: failed, reason: fmt.Sprintf("port %d: ", plan.port) + fmt.Sprintf(format, args...)}
}

func timedOut(err error) bool {
	var timeout net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout()
}

// remark sanitizes text from a target for a log line: it truncates the text and quotes characters
// that control a terminal.
func remark(s string) string {
	const enough = 120
	for i := range s {
		if i >= enough {
			s = s[:i] + "…"
			break
		}
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(c rune) bool { return !strconv.IsPrint(c) }) {
		return strconv.Quote(s)
	}
	return s
}
