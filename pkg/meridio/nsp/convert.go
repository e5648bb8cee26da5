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
	"time"

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
func (o *Options) convert(list *nspv1.Attractor) (c converted, err error) {
	if err := o.Defaults.Validate(); err != nil {
		return converted{}, err
	}
	config := &trench.Config{Trench: o.Trench, Attractor: trench.Attractor{Name: o.Attractor}}
	refuse := func(kind, name, problem string) {
		c.refused = append(c.refused, Refusal{kind, name, short(problem)})
	}
	// names holds the names of the objects by their positions in the lists of the configuration.
	names := map[string][]string{}
	for _, object := range list.GetVips() {
		prefix, err := vip.Parse(object.GetAddress())
		if err != nil {
			refuse(KindVIP, object.GetName(), err.Error())
			continue
		}
		config.Attractor.VIPs = append(config.Attractor.VIPs, prefix)
		names[KindVIP] = append(names[KindVIP], object.GetName())
	}
	for _, object := range list.GetGateways() {
		gateway, err := o.gateway(object)
		if err != nil {
			refuse(KindGateway, object.GetName(), err.Error())
			continue
		}
		config.Attractor.Gateways = append(config.Attractor.Gateways, gateway)
		names[KindGateway] = append(names[KindGateway], object.GetName())
	}
	config = config.Complete(o.Defaults)

	problems := map[place]string{}
	at := func(path string) string {
		where, _ := placeOf(path)
		return where.kind + " " + quoteName(names[where.kind][where.position])
	}
	for _, problem := range trench.Validate(config) {
		where, field := placeOf(problem.Path)
		if where.kind == "" {
			return converted{}, fmt.Errorf("%s: %s: %s", o, problem.Path, problem.Message(at))
		}
		text := strings.TrimPrefix(field+" "+problem.Message(at), " ")
		if before := problems[where]; before != "" {
			text = before + "; " + text
		}
		problems[where] = text
	}
	for where, problem := range problems {
		refuse(where.kind, names[where.kind][where.position], problem)
	}
	// Without the refused objects no problem remains: a problem belongs to the later object of a
	// conflict, or to the narrower VIP.
	config.Attractor.VIPs = without(config.Attractor.VIPs, KindVIP, problems)
	config.Attractor.Gateways = without(config.Attractor.Gateways, KindGateway, problems)
	slices.SortFunc(c.refused, func(a, b Refusal) int {
		return cmp.Or(-cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Problem, b.Problem))
	})
	c.Config = config
	return c, nil
}

// place is the position of an object in a list of the configuration.
type place struct {
	kind     string
	position int
}

// placeOf returns the object that has the value at a path, and the field in the object. The kind is
// empty for a value that belongs to no object.
func placeOf(path string) (where place, field string) {
	for kind, list := range map[string]string{KindVIP: "attractor.vips", KindGateway: "attractor.gateways"} {
		if i, rest, ok := trench.Item(path, list); ok {
			return place{kind, i}, rest
		}
	}
	return place{}, ""
}

// without returns the objects that have no problem.
func without[T any](list []T, kind string, problems map[place]string) (kept []T) {
	for i, object := range list {
		if problems[place{kind, i}] == "" {
			kept = append(kept, object)
		}
	}
	return kept
}

// gateway converts a gateway. A field that is 0 is left out, so that its default applies. The error
// states a problem that a configuration cannot have.
func (o *Options) gateway(object *nspv1.Gateway) (gateway trench.Gateway, err error) {
	gateway.Name = object.GetName()
	if prefix, errPrefix := netip.ParsePrefix(object.GetAddress()); errPrefix == nil {
		gateway.Address = prefix.Addr()
	} else if gateway.Address, err = netip.ParseAddr(object.GetAddress()); err != nil {
		return gateway, fmt.Errorf("address is %s: write an IP address such as 169.254.100.150",
			quoteName(object.GetAddress()))
	}
	switch family := object.GetIpFamily(); {
	case family != "" && family != "ipv4" && family != "ipv6":
		return gateway, fmt.Errorf("ipFamily is %s: write ipv4 or ipv6", quoteName(family))
	case family != "" && family != vip.FamilyOf(gateway.Address).String():
		return gateway, fmt.Errorf("ipFamily is %s, but address is %s: change one of them", family, gateway.Address)
	}
	auth := bgpAuth(object)
	if auth != nil {
		if err := secret.Check(auth.GetKeySource(), auth.GetKeyName()); err != nil {
			return gateway, fmt.Errorf("bgpAuth: %w", err)
		}
		if o.Keys == nil {
			return gateway, errors.New("bgpAuth names a Secret, but this frontend reads none: remove bgpAuth")
		}
	}
	if object.GetBfd() {
		spec := object.GetBfdSpec()
		gateway.BFD = &trench.BFD{
			MinTx: time.Duration(spec.GetMinTx()) * time.Millisecond, MinRx: time.Duration(spec.GetMinRx()) * time.Millisecond,
			Multiplier: int(spec.GetMultiplier()),
		}
	}
	switch protocol := object.GetProtocol(); protocol {
	case trench.Static.String():
		// Meridio's objects may have BGP defaults even if the protocol is static.
		gateway.Protocol = trench.Static
		return gateway, nil
	case "", trench.BGP.String():
	default:
		return gateway, fmt.Errorf("protocol is %q: write bgp or static", short(protocol))
	}
	gateway.LocalASN, gateway.RemoteASN = int64(object.GetLocalAsn()), int64(object.GetRemoteAsn())
	gateway.LocalPort, gateway.RemotePort = int(object.GetLocalPort()), int(object.GetRemotePort())
	gateway.HoldTime = time.Duration(object.GetHoldTime()) * time.Second
	if auth != nil {
		gateway.PasswordFile = o.Keys.File(auth.GetKeySource(), auth.GetKeyName())
	}
	return gateway, nil
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
