package healthcheck

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// plan is the check of a stream as it is carried out. The entries of the stream
// share it.
type plan struct {
	trench.Check
	prober prober // nil for TCP
}

// prober carries out checks that are more than a connection. It may be used by
// many goroutines at once.
type prober interface {
	// probe checks one address by connections that dial opens. It returns when ctx
	// ends, which is at the timeout of the check, and leaves nothing behind.
	probe(ctx context.Context, dial dialFunc, at netip.Addr) outcome
}

// dialFunc opens a connection from the source address of a check.
type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

func newPlan(check trench.Check) *plan {
	p := &plan{Check: check}
	switch {
	case check.HTTP.Port != 0:
		p.prober = newHTTPProber(check)
	case check.GRPC.Port != 0:
		p.prober = newGRPCProber(check)
	}
	return p
}

// subject is what is checked at an address, without how often and how patiently.
type subject struct {
	tcp    trench.TCPCheck
	http   trench.HTTPCheck
	grpc   trench.GRPCCheck
	source netip.Addr
}

func (p *plan) subject(f vip.Family) subject {
	return subject{p.TCP, p.HTTP, p.GRPC, p.source(f)}
}

// source is the address to check targets of a family from; the zero Addr leaves
// it to the kernel.
func (p *plan) source(f vip.Family) netip.Addr {
	if f == vip.IPv4 {
		return p.Source4
	}
	return p.Source6
}

// port is where the check connects to; 0 when there is nothing to check.
func (p *plan) port() uint16 {
	switch {
	case p.HTTP.Port != 0:
		return p.HTTP.Port
	case p.GRPC.Port != 0:
		return p.GRPC.Port
	}
	return p.TCP.Port
}

// probe is one check of a target, as the target was when the check began.
type probe struct {
	entry *entry
	began time.Time
	plan  *plan
	// ready: the target is. patient: it may still wait for a source address.
	ready, patient bool
}

type verdict uint8

const (
	succeeded verdict = iota
	failed
	unmade    // for lack of local resources: says nothing of the target
	deferred  // for lack of a source address: to run soon
	cancelled // the checker ends
)

// outcome is what a check found; reason is "" when it succeeded.
type outcome struct {
	verdict verdict
	// silent says that a check failed because nothing answered; see [Health.Silent].
	silent bool
	reason string
}

// run makes the check with connections of the dialer, or with ones of package
// net when that is nil.
func (p probe) run(ctx context.Context, dialer Dialer) outcome {
	probing, cancel := context.WithTimeout(ctx, p.plan.Timeout)
	defer cancel()
	if dialer == nil {
		dialer = dialerFrom(p.plan.source(vip.FamilyOf(p.entry.Addr)))
	}
	var o outcome
	if p.plan.prober != nil {
		o = p.plan.prober.probe(probing, dialer.DialContext, p.entry.Addr)
	} else {
		o = p.plan.connect(probing, dialer.DialContext, p.entry.Addr)
	}
	if o.verdict != succeeded && ctx.Err() != nil {
		return outcome{verdict: cancelled, reason: "cancelled"}
	}
	return o
}

// dialerFrom opens connections from an address, if it is valid. They live too
// briefly for keep-alives.
func dialerFrom(source netip.Addr) *net.Dialer {
	d := &net.Dialer{KeepAlive: -1}
	d.SetMultipathTCP(false)
	if source.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, 0))
	}
	return d
}

// connect opens a connection and resets it: a close would leave a socket in
// TIME_WAIT at each check.
func (p *plan) connect(ctx context.Context, dial dialFunc, at netip.Addr) outcome {
	conn, err := dial(ctx, "tcp", netip.AddrPortFrom(at, p.TCP.Port).String())
	if err != nil {
		return failure(&p.Check, p.TCP.Port, err)
	}
	// What these two return does not matter: the target has answered, and the
	// connection is gone either way.
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
	return outcome{verdict: succeeded}
}

// failure is the outcome of a check that ended with an error of a system call, a
// connection or a context. A prober that knows better words for its own errors
// asks for those of these three only.
func failure(check *trench.Check, port uint16, err error) outcome {
	var timeout net.Error
	var errno syscall.Errno
	var call *os.SyscallError
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return outcome{failed, true, fmt.Sprintf("port %d: no answer in %s", port, check.Timeout)}
	case errors.As(err, &call) && call.Syscall == "bind":
		// A source address that this machine does not have is no fault of the target.
		return outcome{unmade, false, fmt.Sprintf("check not run: source address: %v", call.Err)}
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOBUFS), errors.Is(err, syscall.ENOMEM):
		return outcome{unmade, false, fmt.Sprintf("check not run: %v", err)}
	case errors.As(err, &errno):
		return outcome{failed, noWay(errno), fmt.Sprintf("port %d: %v", port, errno)}
	}
	return outcome{failed, false, fmt.Sprintf("port %d: %v", port, err)}
}

// noWay reports whether an error of connect says that there is no way to the
// target, be it for lack of a neighbour, a route, a link or an own address.
func noWay(e syscall.Errno) bool {
	switch e {
	case syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.ENETDOWN, syscall.EHOSTDOWN, syscall.EADDRNOTAVAIL:
		return true
	}
	return false
}
