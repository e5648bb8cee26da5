package bird

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// exportTime is how long BIRD may take to export announced VIPs to a gateway. 10 000 take 0.1 s.
	exportTime = 2 * time.Second
	// While too few VIPs are exported, their list is read after each change of a count, at most once
	// per listInterval, and otherwise once per maxListAge.
	listInterval, maxListAge = time.Second, 10 * time.Second
	// maxListed bounds the lines of BIRD's answer.
	maxListed = maxReplyLines / 2
)

// exportList holds the VIPs that BIRD exports to a gateway while it exports too few VIPs.
type exportList struct {
	since  time.Time // time of the first poll with too few exported VIPs
	read   time.Time // when vips was read; zero before the first read
	counts [2]int    // exported and announced VIPs at that time
	vips   vip.Set
}

// checkExports finds the gateways to which BIRD exports too few VIPs for longer than an export
// takes, and lists the exported VIPs.
func (supervisor *Supervisor) checkExports(ctx context.Context, at time.Time, gateways, before []GatewayState) {
	announced, was := supervisor.expect.Load(), byKey(before)
	// BIRD may not have loaded the desired exports yet.
	applied := map[string]Export{}
	for _, session := range supervisor.apply.current.input.Sessions {
		applied[session.Name] = session.Export
	}
	var short []*GatewayState
	for i := range gateways {
		gateway, old := &gateways[i], was[gateways[i].key()]
		gateway.Export = applied[gateway.Name]
		gateway.Announced = gateway.expected(announced)
		if !gateway.Up || gateway.Protocol != trench.BGP || gateway.Exported >= gateway.Announced {
			continue
		}
		if gateway.exports.since = at; old.Since.Equal(gateway.Since) && !old.exports.since.IsZero() {
			gateway.exports = old.exports
		}
		if at.Sub(gateway.exports.since) < exportTime {
			continue
		}
		gateway.Short = true
		short = append(short, gateway)
	}
	// A BIRD that answers slowly lists one gateway in a poll: the state must not become too old.
	slices.SortStableFunc(short, func(a, b *GatewayState) int { return a.exports.read.Compare(b.exports.read) })
	for n, gateway := range short {
		if n == 0 || time.Since(at) < pollInterval {
			supervisor.listExports(ctx, at, gateway)
		}
		gateway.Exports = gateway.exports.vips
	}
}

// listExports reads the VIPs that BIRD exports to a gateway, unless the last list is new enough.
func (supervisor *Supervisor) listExports(ctx context.Context, at time.Time, gateway *GatewayState) {
	x, counts := &gateway.exports, [2]int{gateway.Exported, gateway.Announced}
	age := at.Sub(x.read)
	if age < listInterval || counts == x.counts && age < maxListAge {
		return
	}
	x.read, x.counts = at, counts
	switch {
	case gateway.Exported == 0:
		x.vips = vip.Set{}
		return
	case gateway.Exported > maxListed:
		x.vips = nil
		return
	}
	reply, err := supervisor.command(ctx, "show route exported '"+gatewayPrefix+gateway.Name+"'")
	if err != nil {
		supervisor.options.Log.Warn("failed to read the VIPs that BIRD exports", "gateway", gateway.Name, "error", err)
		return
	}
	x.vips = parseRoutes(reply)
}

// parseRoutes returns the prefixes of the reply to `show route`.
func parseRoutes(reply Reply) vip.Set {
	routes := vip.Set{}
	for _, line := range reply {
		if routed, ok := RouteOf(line.Text); ok {
			routes[routed] = struct{}{}
		}
	}
	return routes
}

// RouteOf returns the VIP of a line of `show route` that begins a route.
func RouteOf(line string) (vip.VIP, bool) {
	first, _, _ := strings.Cut(line, " ")
	if !strings.Contains(first, "/") {
		return vip.VIP{}, false
	}
	routed, err := vip.Parse(first)
	return routed, err == nil
}

// ExportsProblem describes a gateway that does not receive every VIP, with the remedy.
func (gateway GatewayState) ExportsProblem() string {
	if gateway.Foreign {
		return fmt.Sprintf("receives %d of %d VIPs: the speaker does not export the others; does it accept them from "+
			"the frontend, with a next hop that it can resolve, and does its policy toward the gateway permit them?",
			gateway.Exported, gateway.Announced)
	}
	return fmt.Sprintf("receives %d of %d VIPs: BIRD does not export the others; did another process change "+
		"BIRD's configuration? `birdc \"show route noexport 'NBR-%s'\"`", gateway.Exported, gateway.Announced, gateway.Name)
}
