package plan

import (
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Place names a target in the desired state.
type Place struct{ Stream, Target string }

// Places holds places by the addresses of their targets.
type Places map[[len(vip.Families)]netip.Addr][]Place

// Take removes and returns a place with the addresses of a target; with own one of its stream.
func (places Places) Take(target InstalledTarget, own bool) (to Place, found bool) {
	list := places[target.IPs]
	i := slices.IndexFunc(list, func(to Place) bool { return !own || to.Stream == target.Stream })
	if i < 0 {
		return Place{}, false
	}
	to = list[i]
	places[target.IPs] = slices.Delete(list, i, i+1)
	return to, true
}

// AddressesOf returns the addresses of each target of a stream; none of a nil stream.
func AddressesOf(stream *Stream) map[string][len(vip.Families)]netip.Addr {
	addresses := map[string][len(vip.Families)]netip.Addr{}
	for i := 0; stream != nil && i < len(stream.Targets); i++ {
		addresses[stream.Targets[i].Name] = ByFamily(stream.Targets[i].IPs)
	}
	return addresses
}
