// Package speakerconfig renders the configuration of a BGP speaker that another program runs: the
// session with the frontend, which announces VIPs to it, and the sessions with the gateways.
package speakerconfig

import (
	"cmp"
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

//go:embed *.tmpl
var files embed.FS

var templates = template.Must(template.New("").Funcs(template.FuncMap{
	"sequence": func(i int) int { return 10 * (i + 1) },
	"seconds":  func(d time.Duration) int { return int(d / time.Second) },
}).ParseFS(files, "*.tmpl"))

// Kinds lists the kinds of speakers: the templates' names.
func Kinds() []string {
	var kinds []string
	for _, template := range templates.Templates() {
		if kind, is := strings.CutSuffix(template.Name(), ".tmpl"); is {
			kinds = append(kinds, kind)
		}
	}
	slices.Sort(kinds)
	return kinds
}

// Speaker is a speaker between a frontend and its gateways.
type Speaker struct {
	Trench     string         // its name
	Address    netip.AddrPort // of its session with the frontend
	AS         uint32
	Frontend   netip.Addr // the neighbor
	FrontendAS uint32
	// Listens is the port on which the frontend accepts the speaker's connection; 0 if the frontend
	// connects.
	Listens  uint16
	Password string // a placeholder; empty without TCP-MD5
	Gateways []trench.Gateway
	VIPs     []netip.Prefix
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
	if kind == frrK8s {
		if err := speaker.checkFRRK8s(); err != nil {
			return "", err
		}
	}
	var text strings.Builder
	if err := templates.ExecuteTemplate(&text, kind+".tmpl", speaker); err != nil {
		return "", fmt.Errorf("failed to render the configuration of %s: %w", kind, err)
	}
	return text.String(), nil
}

// LocalASN is AS in the type of a gateway's AS numbers.
func (speaker Speaker) LocalASN() int64 { return int64(speaker.AS) }

// Keepalive is the keepalive time of a gateway in seconds, a third of the hold time if left out.
func (speaker Speaker) Keepalive(gateway trench.Gateway) int {
	return int(cmp.Or(gateway.KeepaliveTime, gateway.HoldTime/3) / time.Second)
}
