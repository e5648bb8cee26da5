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
func (gate *Gate) Attract() [len(vip.Families)]Attraction { return gate.attraction }

// count replaces the contribution of entry, which has its previous decision, to the attraction.
func (gate *Gate) count(entry *entry, configured bool, attracts Advertisement) {
	attraction := &gate.attraction[entry.vip.Family()]
	attraction.add(entry.decision.Reason != NotConfigured, entry.attracts, -1)
	attraction.add(configured, attracts, 1)
	entry.attracts = attracts
}

func (attraction *Attraction) add(configured bool, advertisement Advertisement, n int) {
	if configured {
		attraction.Configured += n
	}
	switch advertisement {
	case Announced:
		attraction.Announced += n
	case Depreferred:
		attraction.Depreferred += n
	case Withdrawn:
	}
}
