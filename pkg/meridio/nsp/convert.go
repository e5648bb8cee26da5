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
func (refusal Refusal) String() string {
	return fmt.Sprintf("%s %s: %s", refusal.Kind, quoteName(refusal.Name), refusal.Problem)
}

// Refusals lists the refused objects of a list whose remaining objects are in force.
type Refusals []Refusal

// maxLines is the maximum number of objects in an error.
const maxLines = 100

// Error returns one line per object.
func (refusals Refusals) Error() string {
	lines := make([]string, 0, maxLines+1)
	for _, refusal := range refusals[:min(len(refusals), maxLines)] {
		lines = append(lines, refusal.String())
	}
	if more := len(refusals) - maxLines; more > 0 {
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

var plainName = regexp.MustCompile(`^[!-~]{1,100}$`)

// quoteName quotes a name that is not readable in a line of text.
func quoteName(name string) string {
	if plainName.MatchString(name) {
		return name
	}
	return strconv.Quote(short(name))
}

// short truncates text of another process.
func short(text string) string {
	const enough = 300 // bytes
	if len(text) <= enough {
		return text
	}
	return strings.ToValidUTF8(text[:enough], "") + "…"
}

// pick returns the attractor that the options name, or an empty one if the response does not
// contain it. VIPs and gateways are sorted, so that equal attractors compare equal. A response
// may contain further attractors, and may split the objects of one attractor into several.
func (options *Options) pick(attractors []*nspv1.Attractor) *nspv1.Attractor {
	picked := &nspv1.Attractor{Name: options.Attractor, Trench: &nspv1.Trench{Name: options.Trench}}
	for _, attractor := range attractors {
		// The NSP returns an attractor without a trench to the clients of each trench.
		if name := attractor.GetTrench().GetName(); attractor.GetName() == options.Attractor &&
			(name == options.Trench || name == "") {
			picked.Vips = append(picked.Vips, attractor.GetVips()...)
			picked.Gateways = append(picked.Gateways, attractor.GetGateways()...)
		}
	}
	slices.SortStableFunc(picked.Vips, compareObjects[*nspv1.Vip])
	slices.SortStableFunc(picked.Gateways, compareObjects[*nspv1.Gateway])
	return picked
}

// compareObjects compares objects by name and address.
func compareObjects[T interface {
	GetName() string
	GetAddress() string
}](a, b T) int {
	return cmp.Or(cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetAddress(), b.GetAddress()))
}

// converted is the configuration of an attractor, and the refused objects.
type converted struct {
	*trench.Config
	refused Refusals
}

// convert returns the configuration of an attractor without the refused objects. It returns an
// error if the list as a whole is invalid.
func (options *Options) convert(list *nspv1.Attractor) (result converted, err error) {
	if err := options.Defaults.Validate(); err != nil {
		return converted{}, err
	}
	config := &trench.Config{
		Trench: options.Trench, Attractor: trench.Attractor{Name: options.Attractor}, MaxRemoval: options.MaxRemoval,
	}
	refuse := func(kind, name, problem string) {
		result.refused = append(result.refused, Refusal{kind, name, short(problem)})
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
		gateway, err := options.gateway(object)
		if err != nil {
			refuse(KindGateway, object.GetName(), err.Error())
			continue
		}
		config.Attractor.Gateways = append(config.Attractor.Gateways, gateway)
		names[KindGateway] = append(names[KindGateway], object.GetName())
	}
	config = config.Complete(options.Defaults)

	// An object has one refusal with all its problems.
	problems := map[place]string{}
	describe := func(path string) string {
		where, _ := placeOf(path)
		return where.kind + " " + quoteName(names[where.kind][where.position])
	}
	for _, problem := range trench.Validate(config) {
		where, field := placeOf(problem.Path)
		if where.kind == "" {
			return converted{}, fmt.Errorf("%s: %s: %s", options, problem.Path, problem.Message(describe))
		}
		text := strings.TrimPrefix(field+" "+problem.Message(describe), " ")
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
	slices.SortFunc(result.refused, func(a, b Refusal) int {
		return cmp.Or(-cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Problem, b.Problem))
	})
	result.Config = config
	return result, nil
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
		if position, rest, ok := trench.Item(path, list); ok {
			return place{kind, position}, rest
		}
	}
	return place{}, ""
}

// without returns the objects that have no problem.
func without[T any](list []T, kind string, problems map[place]string) (kept []T) {
	for position, object := range list {
		if problems[place{kind, position}] == "" {
			kept = append(kept, object)
		}
	}
	return kept
}

// gateway converts a gateway. A field that is 0 is left out, so that its default applies. The error
// states a problem that a configuration cannot have.
func (options *Options) gateway(object *nspv1.Gateway) (gateway trench.Gateway, err error) {
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
		if options.Keys == nil {
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
		// The file may not exist yet; until then the gateway has no session.
		gateway.PasswordFile = options.Keys.File(auth.GetKeySource(), auth.GetKeyName())
	}
	return gateway, nil
}

// secrets maps Secrets to their keys that hold passwords of the gateways in force.
func secrets(gateways []*nspv1.Gateway, inForce *trench.Config) map[string][]string {
	named := map[string]bool{}
	for _, gateway := range inForce.Attractor.Gateways {
		named[gateway.Name] = gateway.PasswordFile != ""
	}
	keys := map[string][]string{}
	for _, gateway := range gateways {
		source, key := bgpAuth(gateway).GetKeySource(), bgpAuth(gateway).GetKeyName()
		if named[gateway.GetName()] && source != "" && !slices.Contains(keys[source], key) {
			keys[source] = append(keys[source], key)
		}
	}
	return keys
}

// bgpAuth returns the Secret and the key of a gateway's password, or nil without a password. As in
// Meridio, a gateway has no password if bgpAuth has no names, or if its protocol is static.
func bgpAuth(g *nspv1.Gateway) *nspv1.Gateway_BgpAuth {
	auth := g.GetBgpAuth()
	if g.GetProtocol() == trench.Static.String() || auth.GetKeySource() == "" && auth.GetKeyName() == "" {
		return nil
	}
	return auth
}
