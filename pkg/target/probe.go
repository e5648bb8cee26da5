package target

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"
)

// probe is one check of a target, as the target was when the check began.
type probe struct {
	entry   *entry
	began   time.Time
	address netip.AddrPort
	timeout time.Duration
}

type verdict uint8

const (
	succeeded verdict = iota
	failed
	unmade    // for lack of resources of ours: says nothing of the target
	cancelled // the checker ends
)

// outcome is what a check found; reason is "" when it succeeded.
type outcome struct {
	verdict verdict
	reason  string
}

// run opens a connection and resets it: a close would leave a socket in
// TIME_WAIT at each check.
func (p probe) run(ctx context.Context, dialer Dialer) outcome {
	dialing, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	conn, err := dialer.DialContext(dialing, "tcp", p.address.String())
	if err == nil {
		// What these two return matters to nobody: the target has answered, and
		// the connection is gone either way.
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		_ = conn.Close()
		return outcome{verdict: succeeded}
	}
	var timeout net.Error
	var errno syscall.Errno
	switch {
	case ctx.Err() != nil:
		return outcome{verdict: cancelled, reason: "cancelled"}
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return outcome{failed, fmt.Sprintf("port %d: no answer in %s", p.address.Port(), p.timeout)}
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOBUFS), errors.Is(err, syscall.ENOMEM):
		return outcome{unmade, fmt.Sprintf("check not made: %v", err)}
	case errors.As(err, &errno):
		return outcome{failed, fmt.Sprintf("port %d: %v", p.address.Port(), errno)}
	}
	return outcome{failed, fmt.Sprintf("port %d: %v", p.address.Port(), err)}
}
