package gate

import "github.com/vipgate/vipgate/pkg/vip"

// Attraction counts the VIPs of a family that would be advertised if a gateway of the family were
// always up. Static gateways follow it, so it must not depend on their state.
type Attraction struct {
	Configured  int // VIPs of the attractor
	Announced   int // of them, would be announced
	Depreferred int // of them, would be de-preferred
}

// Attract returns the attraction of each family as of the last Evaluate. Its cost does not depend
// on the number of VIPs.
func (g *Gate) Attract() [len(vip.Families)]Attraction { return g.attraction }

// count replaces the contribution of e, whose decision is still the previous one, to the
// attraction.
func (g *Gate) count(e *entry, configured bool, attracts Advertisement) {
	d := &g.attraction[e.vip.Family()]
	d.add(e.decision.Reason != NotConfigured, e.attracts, -1)
	d.add(configured, attracts, 1)
	e.attracts = attracts
}

func (d *Attraction) add(configured bool, a Advertisement, n int) {
	if configured {
		d.Configured += n
	}
	switch a {
	case Announced:
		d.Announced += n
	case Depreferred:
		d.Depreferred += n
	case Withdrawn:
	}
}
