package change

import (
	"slices"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Reset lists the changed parameters that make BIRD restart the session with a gateway
// (docs/bird.md#configuration), such as "hold time". It is empty if the session stays up, and for
// a gateway that is static before and after the change.
func Reset(was, is trench.Gateway) (parameters []string) {
	if was.Protocol == trench.Static && is.Protocol == trench.Static {
		return nil
	}
	for _, parameter := range []struct {
		name    string
		changed bool
	}{
		{"name", was.Name != is.Name},
		{"address", was.Address != is.Address},
		{"interface", was.Interface != is.Interface},
		{"protocol", was.Protocol != is.Protocol},
		{"local AS", was.LocalASN != is.LocalASN},
		{"remote AS", was.RemoteASN != is.RemoteASN},
		{"local port", was.LocalPort != is.LocalPort},
		{"remote port", was.RemotePort != is.RemotePort},
		{"families", !slices.Equal(was.FamilyList(), is.FamilyList())},
		{"multihop", was.Multihop != is.Multihop},
		{"TTL security", was.TTLSecurity != is.TTLSecurity},
		{"hold time", was.HoldTime != is.HoldTime},
		{"keepalive time", was.KeepaliveTime != is.KeepaliveTime},
		{"connect retry time", was.ConnectRetryTime != is.ConnectRetryTime},
		{"password file", was.PasswordFile != is.PasswordFile},
	} {
		if parameter.changed {
			parameters = append(parameters, parameter.name)
		}
	}
	return parameters
}

// Successor returns the gateway that replaces one of an earlier configuration: the gateway with
// its name, else the new one with its address. BIRD cannot have both at the same time.
func Successor(was trench.Gateway, old, next []trench.Gateway) (successor trench.Gateway, found bool) {
	named := func(name string) func(trench.Gateway) bool {
		return func(gateway trench.Gateway) bool { return gateway.Name == name }
	}
	if i := slices.IndexFunc(next, named(was.Name)); i >= 0 {
		return next[i], true
	}
	i := slices.IndexFunc(next, func(gateway trench.Gateway) bool {
		// The old address of an unnumbered gateway may be learned.
		same := gateway.Interface == was.Interface && (was.Interface != "" || gateway.Address == was.Address)
		return same && !slices.ContainsFunc(old, named(gateway.Name))
	})
	if i < 0 {
		return trench.Gateway{}, false
	}
	return next[i], true
}

// Restarts lists the gateways that stay and whose session restarts when next is applied.
func Restarts(old, next []trench.Gateway) (names []string) {
	for _, was := range old {
		if is, found := Successor(was, old, next); found && len(Reset(was, is)) > 0 {
			names = append(names, was.Name)
		}
	}
	return names
}

// RestartsLast lists the gateways of old whose session restarts although old has no other gateway
// of their family. Such a change leaves the family without a session for about a second, so pods
// must make it one after another.
func RestartsLast(old, next []trench.Gateway) []string {
	var count [len(vip.Families)]int
	families := map[string][]vip.Family{}
	for _, gateway := range old {
		families[gateway.Name] = gateway.FamilyList()
		for _, family := range families[gateway.Name] {
			count[family]++
		}
	}
	return slices.DeleteFunc(Restarts(old, next), func(name string) bool {
		return !slices.ContainsFunc(families[name], func(family vip.Family) bool { return count[family] < 2 })
	})
}
