package gatewayconfig

import (
	"embed"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"text/template"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Kinds lists the kinds of routers.
func Kinds() []string { return []string{"frr", "bird", "gobgp", "junos"} }

// Router is a router that has one or more gateways of a trench.
type Router struct {
	Name     string // the host name
	ID       netip.Addr
	Sessions []Session
	// Routes are the prefixes that the router sends to the pods.
	Routes []netip.Prefix
	// VIPs are the only prefixes that the router accepts; every prefix if empty.
	VIPs []netip.Prefix
}

// Session is the session of a gateway with a pod, or with each pod of a subnet. In the gateway,
// "local" is the pod's side.
type Session struct {
	trench.Gateway
	Pods     netip.Prefix
	Password string // empty without TCP-MD5
	Index    int    // in Router.Sessions, set by Text
}

// DefaultRoutes returns the default routes of both families.
func DefaultRoutes() []netip.Prefix {
	return []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
}

// Placeholders of a password, and of the router's interface toward the pod.
const placeholder, device = "SECRET", "INTERFACE"

// linkLocal holds the addresses of the pod of an unnumbered gateway.
var linkLocal = netip.MustParsePrefix("fe80::/10")

// Of returns the router that has these gateways, which pods at some addresses or subnets call.
func Of(config *trench.Config, gateways []trench.Gateway, pods []netip.Prefix) (Router, error) {
	router := Router{Name: gateways[0].Name, ID: netip.AddrFrom4([4]byte{192, 0, 2, 1}), Routes: DefaultRoutes()}
	for _, gateway := range slices.Backward(gateways) {
		if gateway.Address.Is4() {
			router.ID = gateway.Address
		}
	}
	for _, v := range config.Attractor.VIPs {
		router.VIPs = append(router.VIPs, v.Prefix())
	}
	for _, gateway := range gateways {
		count, pods := len(router.Sessions), pods
		if gateway.Interface != "" {
			pods = []netip.Prefix{linkLocal}
		}
		for _, prefix := range pods {
			if gateway.Interface == "" && prefix.Addr().Is4() != gateway.Address.Is4() {
				continue
			}
			session := Session{Gateway: gateway, Pods: prefix}
			if gateway.PasswordFile != "" {
				session.Password = placeholder
			}
			router.Sessions = append(router.Sessions, session)
		}
		if len(router.Sessions) == count {
			return Router{}, fmt.Errorf("gateway %s: no %s address of a pod; name the pods' addresses or their subnet",
				gateway.Name, vip.FamilyOf(gateway.Address))
		}
	}
	return router, nil
}

//go:embed *.tmpl
var files embed.FS

// templates are parsed on use, not at each start of a program.
func templates() *template.Template {
	return template.Must(template.New("").Funcs(template.FuncMap{
		"seconds": func(d time.Duration) int { return int(d / time.Second) },
		"ms":      func(d time.Duration) int { return max(1, int(d/time.Millisecond)) },
		"add":     func(a, b int) int { return a + b },
	}).ParseFS(files, "*.tmpl"))
}

// Text returns the configuration for a kind of router.
func (router Router) Text(kind string) (string, error) {
	if !slices.Contains(Kinds(), kind) {
		return "", fmt.Errorf("unknown kind of router %q; use one of %s", kind, strings.Join(Kinds(), ", "))
	}
	router.Sessions = slices.Clone(router.Sessions)
	var first *Session // over BGP
	for i := range router.Sessions {
		session := &router.Sessions[i]
		session.Index = i
		if kind == "gobgp" && session.Static() {
			return "", fmt.Errorf("gateway %s is static, and gobgpd has no BFD; use another router", session.Name)
		}
		if session.Unnumbered() && kind == "junos" {
			return "", fmt.Errorf("gateway %s has no address, and there is no text of Junos for that; "+
				"write the gateway's address", session.Name)
		}
		if session.Static() && session.IsSubnet() {
			return "", fmt.Errorf("gateway %s is static: a route has the address of a pod as its next hop; name the "+
				"pods' addresses instead of %s", session.Name, session.Pods)
		}
		if kind == "gobgp" && session.IsSubnet() && session.Password != "" {
			return "", fmt.Errorf("gateway %s has a password, with which gobgpd accepts no session from a subnet; name "+
				"the pods' addresses instead of %s", session.Name, session.Pods)
		}
		if session.Static() {
			continue
		}
		if first == nil {
			first = session
		}
		// FRR and GoBGP have one number for all sessions.
		if session.RemoteASN != first.RemoteASN || session.RemotePort != first.RemotePort {
			return "", fmt.Errorf("gateways %s and %s differ in remoteASN or remotePort, so they are not one router; "+
				"name them in separate commands", first.Name, session.Name)
		}
	}
	var text strings.Builder
	if err := templates().ExecuteTemplate(&text, kind+".tmpl", router); err != nil {
		return "", fmt.Errorf("failed to render the configuration of %s: %w", kind, err)
	}
	return text.String(), nil
}

// Static reports whether the gateway has static routes instead of a BGP session.
func (session Session) Static() bool { return session.Protocol == trench.Static }

// Unnumbered reports whether the gateway has no address.
func (session Session) Unnumbered() bool { return session.Interface != "" }

// Device is the name of the router's interface toward the pod, a placeholder.
func (session Session) Device() string { return device }

// Hops is the number of links to the pod.
func (session Session) Hops() int { return max(1, session.Multihop) }

// Extended reports whether IPv4 routes have IPv6 next hops (RFC 8950).
func (session Session) Extended() bool { return !session.Address.Is4() && session.Has(vip.IPv4) }

// IsSubnet reports whether the pods' addresses are unknown.
func (session Session) IsSubnet() bool { return !session.Unnumbered() && !session.Pods.IsSingleIP() }

// Pod is the address of the pod.
func (session Session) Pod() netip.Addr { return session.Pods.Addr() }

// Group is the name of the session in the router's configuration.
func (session Session) Group() string { return fmt.Sprintf("trench%d", session.Index) }

// Peer is the name of FRR's neighbor: the pod's address, or a peer group.
func (session Session) Peer() string {
	if session.Unnumbered() {
		return device
	}
	if session.IsSubnet() {
		return session.Group()
	}
	return session.Pod().String()
}

// Section is the section of GoBGP's file that describes the pods.
func (session Session) Section() string {
	if session.IsSubnet() {
		return "peer-groups"
	}
	return "neighbors"
}

// BGP lists the sessions over BGP.
func (router Router) BGP() []Session {
	return slices.DeleteFunc(slices.Clone(router.Sessions), Session.Static)
}

// Gateways lists the first session of each gateway.
func (router Router) Gateways() []Session {
	return slices.CompactFunc(slices.Clone(router.Sessions), func(a, b Session) bool { return a.Name == b.Name })
}

// Guarded lists the first session of each gateway with BFD.
func (router Router) Guarded() []Session {
	return slices.DeleteFunc(router.Gateways(), func(session Session) bool { return session.BFD == nil })
}

// Names lists the names of the gateways.
func (router Router) Names() string {
	var names []string
	for _, session := range router.Gateways() {
		names = append(names, session.Name)
	}
	return strings.Join(names, ", ")
}

// StaticBFD is the BFD of static gateways, which have the same; nil without one.
func (router Router) StaticBFD() *trench.BFD {
	for _, session := range router.Guarded() {
		if session.Static() {
			return session.BFD
		}
	}
	return nil
}

// Listen lists the router's addresses of BGP sessions, each once; none for any address.
func (router Router) Listen() []netip.Addr {
	var list []netip.Addr
	for _, session := range router.BGP() {
		if session.Unnumbered() {
			return nil
		}
		if !slices.Contains(list, session.Address) {
			list = append(list, session.Address)
		}
	}
	return list
}

// Family is the part of a router for one address family.
type Family struct {
	Number      int // 4 or 6
	BGP, Static []Session
	Routes      []netip.Prefix // of Router
	VIPs        []netip.Prefix // of Router
	// Limit is the number of routes above which the router ends a session; 0 for none.
	Limit int
}

// Ranges returns the VIPs as entries of FRR's prefix lists.
func (family Family) Ranges() []vip.Range { return vip.Ranges(family.VIPs) }

// Channels lists the families of a session.
func (router Router) Channels(session Session) []Family {
	return slices.DeleteFunc(router.Families(), func(family Family) bool {
		return !slices.ContainsFunc(family.BGP, func(other Session) bool { return other.Index == session.Index })
	})
}

// Advertises reports whether the router makes itself known to pods by router advertisements.
func (router Router) Advertises() bool {
	return slices.ContainsFunc(router.Sessions, Session.Unnumbered)
}

// IsMultihop reports whether a pod is not on the link.
func (router Router) IsMultihop() bool {
	return slices.ContainsFunc(router.Sessions, func(session Session) bool { return session.Multihop > 0 })
}

// minLimit leaves room for VIPs that are new in the trench file.
const minLimit = 100

// Families lists the address families that have sessions.
func (router Router) Families() []Family {
	var families []Family
	for i, n := range []int{4, 6} {
		isNot := func(prefix netip.Prefix) bool { return prefix.Addr().Is4() != (n == 4) }
		family := Family{
			Number: n, Routes: slices.DeleteFunc(slices.Clone(router.Routes), isNot),
			VIPs: slices.DeleteFunc(slices.Clone(router.VIPs), isNot),
		}
		if len(router.VIPs) > 0 {
			family.Limit = max(minLimit, 2*len(family.VIPs))
		}
		for _, session := range router.Sessions {
			switch {
			case !session.Has(vip.Families[i]):
			case session.Static():
				family.Static = append(family.Static, session)
			default:
				family.BGP = append(family.BGP, session)
			}
		}
		if len(family.BGP)+len(family.Static) > 0 {
			families = append(families, family)
		}
	}
	return families
}
