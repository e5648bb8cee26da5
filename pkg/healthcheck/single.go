package healthcheck

import (
	"context"
	"net"
	"net/netip"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// Single performs one check at a time, without a schedule, rise and fall: of a VIP, from beyond the
// gateways. Its methods are safe for concurrent use.
type Single struct{ plan *plan }

// NewSingle returns a check whose body, if it has one, is a valid regular expression.
func NewSingle(check trench.Check) Single { return Single{newPlan(check)} }

// Result is the outcome of a single check.
type Result struct {
	// Passed reports whether the target answered as wanted.
	Passed bool
	// NotRun reports whether the check could not run, for lack of a source address or of another
	// resource of this host: it says nothing about the target.
	NotRun bool
	Reason string // "" if Passed
	Took   time.Duration
}

// Run checks an address over connections of dial, until the timeout of the check. The address is
// also the name of the HTTP host and of the TLS server unless the check has another one. If dial
// returns an error of the system call bind, the check did not run.
func (single Single) Run(
	ctx context.Context, dial func(ctx context.Context, network, address string) (net.Conn, error), to netip.Addr,
) Result {
	ctx, cancel := context.WithTimeout(ctx, single.plan.Timeout)
	defer cancel()
	began := time.Now()
	o := single.plan.probe(ctx, dial, to, to)
	return Result{o.verdict == succeeded, o.verdict == notRun, o.reason, time.Since(began)}
}
