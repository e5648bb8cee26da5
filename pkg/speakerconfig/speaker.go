// Package speakerconfig renders the configuration of a BGP speaker that another program runs: the
// session with the frontend, which announces VIPs to it, and the sessions with the gateways.
package speakerconfig

import (
	"embed"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"text/template"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

//go:embed *.tmpl
var files embed.FS

// templates are parsed on use, not at each start of a program.
func templates() *template.Template {
	return template.Must(template.New("").Funcs(template.FuncMap{
		"sequence": func(i int) int { return 10 * (i + 1) },
		"ms":       func(d time.Duration) int { return max(1, int(d/time.Millisecond)) },
		"seconds":  func(d time.Duration) int { return int(d / time.Second) },
	}).ParseFS(files, "*.tmpl"))
}

// Kinds lists the kinds of speakers.
func Kinds() []string { return []string{"bird", "frr", frrK8s, "gobgp"} }

// Speaker is a speaker between a frontend and its gateways.
type Speaker struct {
	Trench     string         // its name
	Address    netip.AddrPort // of its session with the frontend
	AS         uint32
	Frontend   netip.Addr // the neighbor
	FrontendAS uint32
	// Listens is the port on which the frontend accepts the speaker's connection; 0 if it connects.
	Listens  uint16
	Password string // a placeholder; empty without TCP-MD5
	Gateways []trench.Gateway
	VIPs     []netip.Prefix
	// Prepends reports whether a policy lengthens paths.
	Prepends bool
	RouterID netip.Addr     // needed by GoBGP
	BMP      netip.AddrPort // where the speaker sends BMP; zero for nowhere
}

// Placeholder of the passwords, which are not in the trench file.
const Placeholder = "SECRET"

// Family is the part of a speaker for one address family.
type Family struct {
	Number   int // 4 or 6
	VIPs     []netip.Prefix
	Default  netip.Prefix
	Gateways []trench.Gateway // BGP only
}

// Ranges returns the VIPs as entries of FRR's prefix lists.
func (family Family) Ranges() []vip.Range { return vip.Ranges(family.VIPs) }

// Families lists both address families.
func (speaker Speaker) Families() []Family {
	families := []Family{
		{Number: 4, Default: netip.PrefixFrom(netip.IPv4Unspecified(), 0)},
		{Number: 6, Default: netip.PrefixFrom(netip.IPv6Unspecified(), 0)},
	}
	for i, family := range vip.Families {
		for _, prefix := range speaker.VIPs {
			if prefix.Addr().Is4() == (family == vip.IPv4) {
				families[i].VIPs = append(families[i].VIPs, prefix)
			}
		}
		for _, gateway := range speaker.BGP() {
			if gateway.Has(family) {
				families[i].Gateways = append(families[i].Gateways, gateway)
			}
		}
	}
	return families
}

// BGP lists the gateways with a session.
func (speaker Speaker) BGP() []trench.Gateway {
	return slices.DeleteFunc(slices.Clone(speaker.Gateways),
		func(gateway trench.Gateway) bool { return gateway.Protocol == trench.Static })
}

// Text returns the configuration for a kind of speaker.
func (speaker Speaker) Text(kind string) (string, error) {
	for _, gateway := range speaker.Gateways {
		if gateway.Protocol == trench.Static {
			return "", fmt.Errorf("gateway %s is static, which only BIRD of the frontend serves; use --speaker=bird",
				gateway.Name)
		}
	}
	check := map[string]func() error{"gobgp": speaker.checkGoBGP, frrK8s: speaker.checkFRRK8s}[kind]
	if check != nil {
		if err := check(); err != nil {
			return "", err
		}
	}
	var text strings.Builder
	if err := templates().ExecuteTemplate(&text, kind+".tmpl", speaker); err != nil {
		return "", fmt.Errorf("failed to render the configuration of %s: %w", kind, err)
	}
	return text.String(), nil
}

// LocalASN is AS in the type of a gateway's AS numbers.
func (speaker Speaker) LocalASN() int64 { return int64(speaker.AS) }

// checkGoBGP refuses what gobgpd cannot do.
func (speaker Speaker) checkGoBGP() error {
	if !speaker.RouterID.Is4() {
		return errors.New("GoBGP needs a router ID; write --router-id, an IPv4 address of the node")
	}
	for _, gateway := range speaker.Gateways {
		switch {
		case gateway.Interface != "":
			return fmt.Errorf("gateway %s has no address, and there is no text of GoBGP for that; write the gateway's address",
				gateway.Name)
		case gateway.LocalASN != speaker.LocalASN():
			return fmt.Errorf("gateway %s expects AS %d, and the speaker has AS %d; write the speaker's as localASN",
				gateway.Name, gateway.LocalASN, speaker.AS)
		case speaker.Listens == 0 && gateway.LocalPort != int(speaker.Address.Port()):
			return fmt.Errorf("the frontend connects to port %d, and localPort of gateway %s is %d, but gobgpd listens on "+
				"one port; write the same", speaker.Address.Port(), gateway.Name, gateway.LocalPort)
		}
	}
	return nil
}

// Reflects reports whether VIPs go from iBGP to iBGP.
func (speaker Speaker) Reflects() bool {
	return speaker.AS == speaker.FrontendAS && slices.ContainsFunc(speaker.Gateways, func(gateway trench.Gateway) bool {
		return gateway.LocalASN == gateway.RemoteASN
	})
}

// Replaces reports whether the speaker replaces the frontend's AS in paths.
func (speaker Speaker) Replaces() bool { return speaker.AS != speaker.FrontendAS }

// HasBFD reports whether a gateway has BFD.
func (speaker Speaker) HasBFD() bool {
	return slices.ContainsFunc(speaker.Gateways, func(gateway trench.Gateway) bool { return gateway.BFD != nil })
}

// HasProfile reports whether FRR needs a BFD profile for a gateway: for other times than its own, or
// over several hops, where it drops packets with a TTL below 254.
func (speaker Speaker) HasProfile(gateway trench.Gateway) bool {
	own := trench.BFD{MinTx: 300 * time.Millisecond, MinRx: 300 * time.Millisecond, Multiplier: 3}
	return gateway.BFD != nil && (*gateway.BFD != own || gateway.Multihop > 0)
}

// Profiles lists the gateways with a BFD profile of FRR.
func (speaker Speaker) Profiles() []trench.Gateway {
	return slices.DeleteFunc(speaker.BGP(), func(gateway trench.Gateway) bool { return !speaker.HasProfile(gateway) })
}

// Times counts to the longest prepend of a policy.
func (speaker Speaker) Times() []int { return []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10} }

// Has reports whether the session with a gateway has IPv4 (4) or IPv6 (6).
func (speaker Speaker) Has(gateway trench.Gateway, number int) bool {
	return gateway.Has(map[int]vip.Family{4: vip.IPv4, 6: vip.IPv6}[number])
}
