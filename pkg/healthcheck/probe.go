package healthcheck

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// plan is the check of a stream, which its entries share. Its methods may be used by many
// goroutines at once.
type plan struct {
	trench.Check
	port uint16 // 0: there is nothing to check
	tls  tlsConfig
	body *regexp.Regexp // of HTTP
	// exchange checks a target over a connection until ctx ends; nil if the connection is the whole
	// check.
	exchange func(ctx context.Context, conn net.Conn, at netip.Addr) outcome
}

// newPlan panics if the body is not a regular expression, which the reader of the trench file
// checks.
func newPlan(check trench.Check) *plan {
	p := &plan{Check: check, port: check.TCP.Port}
	switch {
	case check.HTTP.Port != 0:
		p.port, p.exchange, p.body = check.HTTP.Port, p.exchangeHTTP, regexp.MustCompile(check.HTTP.Body)
		p.tls.TLSCheck = check.HTTP.TLS
	case check.GRPC.Port != 0:
		p.port, p.exchange = check.GRPC.Port, p.exchangeGRPC
		p.tls.TLSCheck, p.tls.protocols = check.GRPC.TLS, []string{"h2"}
	}
	return p
}

// subject is what is checked at addresses of a family, without timing, rise and fall.
func (p *plan) subject(f vip.Family) trench.Check {
	return trench.Check{TCP: p.TCP, HTTP: p.HTTP, GRPC: p.GRPC, Source4: p.source(f)}
}

// source is the address to check targets of a family from; the zero Addr leaves it to the kernel.
func (p *plan) source(f vip.Family) netip.Addr {
	if f == vip.IPv4 {
		return p.Source4
	}
	return p.Source6
}

// dialFunc opens a connection.
type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// dialFrom opens connections from an address, if it is valid. They are too short for keep-alives.
func dialFrom(source netip.Addr) dialFunc {
	d := &net.Dialer{KeepAlive: -1}
	d.SetMultipathTCP(false)
	if source.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, 0))
	}
	return d.DialContext
}

// probe makes one check of an address. It returns when ctx ends, at the timeout of the check.
func (p *plan) probe(ctx context.Context, dial dialFunc, at netip.Addr) outcome {
	var config *tls.Config
	if p.tls.On {
		var err error
		if config, err = p.tls.of(ctx, at); err != nil {
			return unavailable(err)
		}
	}
	conn, err := dial(ctx, "tcp", netip.AddrPortFrom(at, p.port).String())
	if err != nil {
		return p.failure(err)
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
			return p.handshakeFailure(config.ServerName, err)
		}
		conn = secure
	}
	if p.exchange == nil {
		return outcome{verdict: succeeded}
	}
	return p.exchange(ctx, conn, at)
}

// probe is one check of a target, with the state of the target when the check began.
type probe struct {
	entry *entry
	began time.Time
	plan  *plan
	ready bool
	// patient reports whether the target may still wait for a source address.
	patient bool
}

// run makes the check in the calling goroutine. A nil dial is the kernel.
func (p probe) run(ctx context.Context, dial dialFunc) outcome {
	limited, cancel := context.WithTimeout(ctx, p.plan.Timeout)
	defer cancel()
	if dial == nil {
		dial = dialFrom(p.plan.source(vip.FamilyOf(p.entry.Addr)))
	}
	o := p.plan.probe(limited, dial, p.entry.Addr)
	if o.verdict != succeeded && ctx.Err() != nil {
		return outcome{verdict: cancelled}
	}
	return o
}

type verdict uint8

const (
	succeeded verdict = iota
	failed
	notRun    // for lack of local resources: nothing is known of the target
	deferred  // for lack of a source address: to be run soon
	cancelled // the checker ends
)

// outcome is the result of a check; reason is "" when it succeeded.
type outcome struct {
	verdict verdict
	silent  bool // see [Health.Silent]
	reason  string
}

// unavailable is the outcome of a check that lacks a local resource.
func unavailable(err error) outcome {
	return outcome{verdict: notRun, reason: fmt.Sprintf("check not run: %v", err)}
}

// failure is the outcome of a check that ended with an error of a system call, a connection or a
// context.
func (p *plan) failure(err error) outcome {
	var errno syscall.Errno
	var call *os.SyscallError
	switch {
	case timedOut(err):
		return outcome{failed, true, fmt.Sprintf("port %d: no answer in %s", p.port, p.Timeout)}
	case errors.As(err, &call) && call.Syscall == "bind":
		// A source address that this machine does not have is no fault of the target.
		return unavailable(fmt.Errorf("source address: %w", call.Err))
	case !errors.As(err, &errno):
		return p.wrong("%v", err)
	}
	silent := false
	switch errno {
	case syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM:
		return unavailable(err)
	case syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.ENETDOWN, syscall.EHOSTDOWN, syscall.EADDRNOTAVAIL:
		silent = true // there is no neighbor entry, route, link or own address
	}
	return outcome{failed, silent, fmt.Sprintf("port %d: %v", p.port, errno)}
}

// broken is the outcome of a check whose connection ended before what it waited for. Other errors
// are described by prefix.
func (p *plan) broken(missing, prefix string, err error) outcome {
	var errno syscall.Errno
	switch {
	case timedOut(err):
		return p.wrong("connected, but %s in %s", missing, p.Timeout)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return p.wrong("closed the connection: %s", missing)
	case errors.As(err, &errno):
		return p.failure(err)
	}
	return p.wrong("%s%s", prefix, remark(err.Error()))
}

// wrong is the outcome of a check that failed although the target answered: the network works.
func (p *plan) wrong(format string, args ...any) outcome {
	return outcome{verdict: failed, reason: fmt.Sprintf("port %d: ", p.port) + fmt.Sprintf(format, args...)}
}

func timedOut(err error) bool {
	var timeout net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout()
}

// remark makes text from a target fit for a line of a log: short, and without characters that
// control a terminal.
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
