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
type Single struct {
	plans     []*plan
	anyPasses bool
}

// NewSingle returns a check with valid expressions. Each of its members may take the timeout.
func NewSingle(check trench.Check, timeout time.Duration) (single Single) {
	single.plans, single.anyPasses = newPlans(check, nil)
	for _, plan := range single.plans {
		plan.Timeout = timeout
	}
	return single
}

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

// Run checks an address over connections of dial: with one member of the check after the other,
// until one decides. The address is also the name of the HTTP host and of the TLS server unless the
// check has another one. If dial returns an error of the system call bind, the check did not run.
func (single Single) Run(
	ctx context.Context, dial func(ctx context.Context, network, address string) (net.Conn, error), to netip.Addr,
) (result Result) {
	began := time.Now()
	for _, plan := range single.plans {
		limited, cancel := context.WithTimeout(ctx, plan.Timeout)
		o := plan.probe(limited, dial, to, to)
		cancel()
		result = Result{o.verdict == succeeded, o.verdict == notRun, plan.named(o.reason), time.Since(began)}
		if result.Passed == single.anyPasses {
			break
		}
	}
	return result
}
