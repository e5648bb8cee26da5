package frontend

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/trench"
)

// announcerProblem returns why BIRD does not accept VIPs, with the remedy, or "". Static gateways
// do not need the announcer.
func (p *process) announcerProblem(now time.Time) string {
	isBGP := func(g trench.Gateway) bool { return g.Protocol == trench.BGP }
	loaded := p.Source.Value().Load()
	if p.announcer.Up().Load().Accepted(now) ||
		loaded.Generation > 0 && !slices.ContainsFunc(loaded.Config.Attractor.Gateways, isBGP) {
		return ""
	}
	if p.External != nil {
		return p.externalProblem(p.announcer.State().Load().LastError)
	}
	return loopbackProblem(netip.AddrPortFrom(bird.LoopbackBIRD, p.Options.BIRD.LoopbackPort), p.bird.State().Load(),
		p.announcer.State().Load().LastError, endpoint.PortOwner)
}

// lostPackets lists the errors of a connection whose packets are lost.
var lostPackets = []error{
	context.DeadlineExceeded, os.ErrDeadlineExceeded, syscall.ETIMEDOUT, syscall.EPERM, syscall.EHOSTUNREACH,
	syscall.ENETUNREACH,
}

// loopbackProblem returns why the session with BIRD is down, by BIRD or the announcer's last error.
func loopbackProblem(at netip.AddrPort, b bird.State, err error, owner func(netip.AddrPort) string) string {
	switch {
	// The cause comes first: without BIRD the announcer has an error, too.
	case birdProblem(b) != "":
		return "no session with BIRD: " + birdProblem(b)
	case b.Loopback == bird.NoLoopbackSocket:
		problem := fmt.Sprintf("BIRD cannot listen on %s", at)
		// A process in another container of the pod hides its PID; see endpoint.PortOwner.
		if name := owner(at); name != "" {
			problem += ": " + name + " does"
		}
		return problem + "; stop that process, or set --lb-bgp-port to a free port"
	case b.Loopback == bird.LoopbackDisabled:
		return fmt.Sprintf("BIRD's protocol %s is disabled; run `birdc enable %[1]s`", bird.LoopbackName)
	case err == nil:
		return fmt.Sprintf("no session with BIRD on %s yet", at)
	}
	remedy := "see the logs of the frontend and of BIRD"
	switch {
	case slices.ContainsFunc(lostPackets, func(lost error) bool { return errors.Is(err, lost) }):
		remedy = "does a firewall drop it? Check `nft list ruleset` and that lo is up"
	case errors.Is(err, syscall.ECONNREFUSED):
		remedy = "BIRD listens again within 30 s; see its log"
	}
	return fmt.Sprintf("%v; %s", err, remedy)
}
