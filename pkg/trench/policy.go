package trench

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/vipgate/vipgate/pkg/vip"
)

// The announcer passes MED, prepends, LOCAL_PREF and the link bandwidth to BIRD as large
// communities of its AS number with these functions, because BIRD takes no such attribute from a
// session with another AS, and the link bandwidth contains the AS number toward a gateway. No
// gateway receives them.
const (
	PolicyAS           = 4_200_000_000
	MEDFunction        = 1
	PrependFunction    = 2
	PreferenceFunction = 3
	BandwidthFunction  = 4 // with the bits of an IEEE float, in bytes per second
)

const communityRemedy = "write two numbers up to 65535 such as 64512:100, or three up to 4294967295 such as " +
	"64512:1:100"

// Community is a community of two or three numbers (RFC 1997, RFC 8092).
type Community []uint32

// ParseCommunity parses a community of a valid configuration.
func ParseCommunity(text string) (community Community, ok bool) {
	parts := strings.Split(text, ":")
	for _, part := range parts {
		number, err := strconv.ParseUint(part, 10, map[bool]int{true: 16, false: 32}[len(parts) == 2])
		if err != nil {
			return nil, false
		}
		community = append(community, uint32(number))
	}
	return community, len(parts) == 2 || len(parts) == 3
}

// checkCommunity rejects numbers that are too large, and the communities that vipgate sets.
func checkCommunity(text string) Problem {
	community, ok := ParseCommunity(text)
	switch {
	case !ok:
		return newProblem("is "+Quote(text), communityRemedy)
	case len(community) == 2 && community[0] == 65535 && community[1] == 0:
		return newProblem("is GRACEFUL_SHUTDOWN (RFC 8326), which vipgate sets while a VIP drains", "remove it")
	case len(community) == 3 && community[0] == PolicyAS && community[1] >= MEDFunction &&
		community[1] <= BandwidthFunction:
		return newProblem(fmt.Sprintf("is %s, which vipgate reserves for its own attributes", text),
			"take another number")
	}
	return Problem{}
}

// checkPolicies reports VIPs of policies that the attractor lacks, or that two policies have.
func (attractor *Attractor) checkPolicies(result *validation, path string) {
	var vips []vip.VIP
	var places []func() string
	rest := -1
	for i, policy := range attractor.Policies {
		field := within(path, "vips")(i)
		if len(policy.VIPs) == 0 && rest >= 0 {
			result.conflict(index(path, i), index(path, rest), "has no vips, as the policy",
				"write the VIPs of all policies but one")
		} else if len(policy.VIPs) == 0 {
			rest = i
		}
		for nth, served := range policy.VIPs {
			vips, places = append(vips, served), append(places, func() string { return index(field, nth) })
			result.inAttractor(index(field, nth), served)
		}
	}
	unique(result, "VIP", vips, func(i int) string { return places[i]() })
}
