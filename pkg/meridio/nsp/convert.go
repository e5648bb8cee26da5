package nsp

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/meridio/secret"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Kinds of objects.
const (
	KindVIP     = "VIP"
	KindGateway = "gateway"
)

// Refusal is a VIP or gateway of the NSP that is not in force.
type Refusal struct {
	Kind, Name string
	// Problem describes the error and the remedy.
	Problem string
}

// String returns the kind, the name and the problem.
func (r Refusal) String() string {
	return fmt.Sprintf("%s %s: %s", r.Kind, quoteName(r.Name), r.Problem)
}

// Refusals lists the refused objects of a list whose remaining objects are in force.
type Refusals []Refusal

// maxLines is the maximum number of objects in an error.
const maxLines = 100

// Error returns one line per object.
func (r Refusals) Error() string {
	lines := make([]string, 0, maxLines+1)
	for _, x := range r[:min(len(r), maxLines)] {
		lines = append(lines, x.String())
	}
	if more := len(r) - maxLines; more > 0 {
		lines = append(lines, fmt.Sprintf("%d more objects are refused", more))
	}
	return strings.Join(lines, "\n")
}

// ByKind counts the objects of each kind.
func (r Refusals) ByKind() map[string]int {
	counts := map[string]int{KindVIP: 0, KindGateway: 0}
	for _, x := range r {
		counts[x.Kind]++
	}
	return counts
}

// err returns r as an error, or nil if it is empty.
func (r Refusals) err() error {
	if len(r) == 0 {
		return nil
	}
	return r
}

var plainName = regexp.MustCompile(`^[!-~]{1,100}$`)

// quoteName quotes a name that is not readable in a line of text.
func quoteName(s string) string {
	if plainName.MatchString(s) {
		return s
	}
	return strconv.Quote(short(s))
}

// short truncates text of another process.
func short(s string) string {
	const enough = 300 // bytes
	if len(s) <= enough {
		return s
	}
	return strings.ToValidUTF8(s[:enough], "") + "…"
}

// pick returns the attractor that the options name, or an empty one if the response does not
// contain it. VIPs and gateways are sorted, so that equal attractors compare equal. A response
// may contain further attractors, and may split the objects of one attractor into several.
func (o *Options) pick(attractors []*nspv1.Attractor) *nspv1.Attractor {
	picked := &nspv1.Attractor{Name: o.Attractor, Trench: &nspv1.Trench{Name: o.Trench}}
	for _, a := range attractors {
		// The NSP returns an attractor without a trench to the clients of each trench.
		if name := a.GetTrench().GetName(); a.GetName() == o.Attractor && (name == o.Trench || name == "") {
			picked.Vips = append(picked.Vips, a.GetVips()...)
			picked.Gateways = append(picked.Gateways, a.GetGateways()...)
		}
	}
	slices.SortStableFunc(picked.Vips, func(a, b *nspv1.Vip) int {
		return cmp.Or(cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetAddress(), b.GetAddress()))
	})
	slices.SortStableFunc(picked.Gateways, func(a, b *nspv1.Gateway) int {
		return cmp.Or(cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetAddress(), b.GetAddress()))
	})
	return picked
}

// converted is the configuration of an attractor, and the refused objects.
type converted struct {
	*trench.Config
	refused Refusals
}

// convert returns the configuration of an attractor without the refused objects. It returns an
// error if the list as a whole is invalid.
func (o *Options) convert(a *nspv1.Attractor) (c converted, err error) {
	vips, refused := distinct(a.GetVips())
	c.refused = refused
	gateways := slices.DeleteFunc(slices.Clone(a.GetGateways()), func(g *nspv1.Gateway) bool {
		if problem := o.checkGateway(g); problem != "" {
			c.refused = append(c.refused, Refusal{KindGateway, g.GetName(), problem})
			return true
		}
		return false
	})
	// Parse repeatedly, and remove the objects with problems each time: the parser reports a limited
	// number of problems.
	for {
		d := document{vips: vips, gateways: gateways}
		var problems *trench.Errors
		c.Config, err = trench.Parse(o.String(), d.write(o), o.Defaults)
		switch {
		case err == nil:
			slices.SortStableFunc(c.refused, func(a, b Refusal) int {
				return cmp.Or(-cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
			})
			return c, nil
		case !errors.As(err, &problems):
			return converted{}, err
		}
		found := d.refusals(problems.Problems)
		if len(found) == 0 {
			return converted{}, err
		}
		keep := func(kind string, i int) bool { _, is := found[place{kind, i}]; return !is }
		for _, at := range sortedPlaces(found) {
			c.refused = append(c.refused, found[at])
		}
		vips, gateways = filter(vips, KindVIP, keep), filter(gateways, KindGateway, keep)
	}
}

// distinct returns the valid VIPs that no other VIP contains, and the refusals. The trench file
// has the same rule, but its reader reports at most 100 problems.
func distinct(list []*nspv1.Vip) (kept []*nspv1.Vip, refused Refusals) {
	type object struct {
		*nspv1.Vip
		prefix vip.VIP
	}
	var objects []object
	bad := map[*nspv1.Vip]bool{}
	refuse := func(v *nspv1.Vip, problem string) {
		bad[v] = true
		refused = append(refused, Refusal{KindVIP, v.GetName(), problem})
	}
	for _, v := range list {
		prefix, err := vip.Parse(v.GetAddress())
		if err != nil {
			refuse(v, short(err.Error()))
			continue
		}
		objects = append(objects, object{v, prefix})
	}
	// A prefix sorts after the prefixes that contain it.
	slices.SortStableFunc(objects, func(a, b object) int { return vip.Compare(a.prefix, b.prefix) })
	var last object // the last accepted VIP
	for _, x := range objects {
		switch {
		case last.Vip == nil || !last.prefix.Overlaps(x.prefix):
			last = x
		case last.prefix == x.prefix:
			refuse(x.Vip, fmt.Sprintf("VIP %s appears twice, first in VIP %s: remove one of them", x.prefix,
				quoteName(last.GetName())))
		default:
			refuse(x.Vip, fmt.Sprintf("VIP %s lies in the VIP %s of VIP %s: remove one of them", x.prefix, last.prefix,
				quoteName(last.GetName())))
		}
	}
	kept = slices.DeleteFunc(slices.Clone(list), func(v *nspv1.Vip) bool { return bad[v] })
	return kept, refused
}

// filter returns the objects for which keep returns true.
func filter[T any](list []T, kind string, keep func(kind string, i int) bool) []T {
	var kept []T
	for i, x := range list {
		if keep(kind, i) {
			kept = append(kept, x)
		}
	}
	return kept
}

// checkGateway returns why a gateway is invalid, by the rules that the trench file cannot
// express, or "" if it is valid.
func (o *Options) checkGateway(g *nspv1.Gateway) string {
	address, err := gatewayAddress(g)
	if err != nil {
		return err.Error()
	}
	switch family := g.GetIpFamily(); {
	case family != "" && family != "ipv4" && family != "ipv6":
		return fmt.Sprintf("ipFamily is %s: write ipv4 or ipv6", quoteName(family))
	case family != "" && family != vip.FamilyOf(address).String():
		return fmt.Sprintf("ipFamily is %s, but address is %s: change one of them", family, address)
	}
	if auth := bgpAuth(g); auth != nil {
		if err := secret.Check(auth.GetKeySource(), auth.GetKeyName()); err != nil {
			return "bgpAuth: " + err.Error()
		}
		if o.Keys == nil {
			return "bgpAuth names a Secret, but this frontend reads none: remove bgpAuth"
		}
	}
	return ""
}

// gatewayAddress returns the address of a gateway without its optional prefix length.
func gatewayAddress(g *nspv1.Gateway) (netip.Addr, error) {
	p, err := netip.ParsePrefix(g.GetAddress())
	if err == nil {
		return p.Addr(), nil
	}
	a, err := netip.ParseAddr(g.GetAddress())
	if err != nil {
		return netip.Addr{}, fmt.Errorf("address is %s: write an IP address such as 169.254.100.150",
			quoteName(g.GetAddress()))
	}
	return a, nil
}

// secrets maps Secrets to their keys that hold passwords of the gateways in force.
func secrets(gateways []*nspv1.Gateway, inForce *trench.Config) map[string][]string {
	named := map[string]bool{}
	for _, g := range inForce.Attractor.Gateways {
		named[g.Name] = g.PasswordFile != ""
	}
	keys := map[string][]string{}
	for _, g := range gateways {
		source, key := bgpAuth(g).GetKeySource(), bgpAuth(g).GetKeyName()
		if named[g.GetName()] && source != "" && !slices.Contains(keys[source], key) {
			keys[source] = append(keys[source], key)
		}
	}
	return keys
}
