package bird

import (
	"context"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// exportTime is how long BIRD may take to export the announced VIPs to a gateway. 10 000 VIPs
	// take 0.1 s.
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
func (s *Supervisor) checkExports(ctx context.Context, at time.Time, gateways, before []GatewayState) {
	announced, was := s.expect.Load(), byName(before)
	for i := range gateways {
		g, old := &gateways[i], was[gateways[i].Name]
		g.Announced = announced[g.Family]
		if !g.Up || g.Protocol != trench.BGP || g.Exported >= g.Announced {
			continue
		}
		if g.exports.since = at; old.Since.Equal(g.Since) && !old.exports.since.IsZero() {
			g.exports = old.exports
		}
		if at.Sub(g.exports.since) < exportTime {
			continue
		}
		g.Short = true
		s.listExports(ctx, at, g)
		g.Exports = g.exports.vips
	}
}

// listExports reads the VIPs that BIRD exports to a gateway, unless the last list is new enough.
func (s *Supervisor) listExports(ctx context.Context, at time.Time, g *GatewayState) {
	x, counts := &g.exports, [2]int{g.Exported, g.Announced}
	age := at.Sub(x.read)
	if age < listInterval || counts == x.counts && age < maxListAge {
		return
	}
	x.read, x.counts = at, counts
	switch {
	case g.Exported == 0:
		x.vips = vip.Set{}
		return
	case g.Exported > maxListed:
		x.vips = nil
		return
	}
	reply, err := s.command(ctx, "show route exported '"+gatewayPrefix+g.Name+"'")
	if err != nil {
		s.options.Log.Warn("failed to read the VIPs that BIRD exports", "gateway", g.Name, "error", err)
		return
	}
	x.vips = parseRoutes(reply)
}

// parseRoutes returns the prefixes of the reply to `show route`.
func parseRoutes(r Reply) vip.Set {
	routes := vip.Set{}
	for _, l := range r {
		first, _, _ := strings.Cut(l.Text, " ")
		if !strings.Contains(first, "/") {
			continue
		}
		if v, err := vip.Parse(first); err == nil {
			routes[v] = struct{}{}
		}
	}
	return routes
}
