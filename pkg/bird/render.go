package bird

import (
	"bytes"
	"cmp"
	_ "embed"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/turns"
	"github.com/vipgate/vipgate/pkg/vip"
)

// The loopback session (docs/adr/0001-loopback-bgp.md). Both AS numbers are private (RFC 6996). The
// import filter empties the AS path, so gateways do not receive them and may use the same numbers.
const (
	LoopbackAS     = 4200000000 // the announcer's AS
	LoopbackPeerAS = 4200000001 // BIRD's AS
	LoopbackName   = "LB"
	gatewayPrefix  = "NBR-"
	// egressPrefix is as long as gatewayPrefix: BIRD 2.0.12 limits names to 64 characters.
	egressPrefix = "EGR-"
	bfdName      = "NBR-BFD"
	radvName     = "RADV"
)

// The addresses of the loopback session: BIRD's and the announcer's.
var (
	LoopbackBIRD      = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	LoopbackAnnouncer = netip.AddrFrom4([4]byte{127, 0, 0, 2})
)

// Export is how VIPs are exported to one gateway. A change does not reset the session. The values
// are ordered: of two reasons the larger value wins.
type Export uint8

// The exports.
const (
	ExportFull        Export = iota // as the announcer sends them
	ExportDepreferred               // with GRACEFUL_SHUTDOWN and a longer path
	ExportNone                      // not at all
)

// String returns the export in lower case.
func (export Export) String() string { return [...]string{"full", "depreferred", "none"}[export] }

// Session is one gateway session in the configuration.
type Session struct {
	trench.Gateway
	turns.Path
	Password string // validated by ParsePassword
	Export   Export
}

// IsStatic reports whether the gateway has static routes instead of a BGP session.
func (session Session) IsStatic() bool { return session.Protocol == trench.Static }

// Channels lists the families that BIRD's session has. IPv6 over an IPv4 session needs a next hop.
func (session Session) Channels() (channels []channel) {
	for i, family := range vip.Families {
		if session.lacks(family) || !session.Has(family) {
			continue
		}
		overIPv4 := session.Address.Is4()
		is := channel{Number: []int{4, 6}[i], Extended: family == vip.IPv4 && !overIPv4}
		if family == vip.IPv6 && overIPv4 {
			is.NextHop = session.Local6
		}
		channels = append(channels, is)
	}
	return channels
}

// lacks reports whether the session has no next hop for VIPs of a family.
func (session Session) lacks(family vip.Family) bool {
	return family == vip.IPv6 && session.Address.Is4() && !session.Local6.IsValid() && !session.IsStatic()
}

// channel is the part of a session for one family.
type channel struct {
	Number   int
	Extended bool       // IPv6 next hops for IPv4 (RFC 8950)
	NextHop  netip.Addr // of VIPs; zero: an address of the session
}

// Number is 4 or 6, the family of the address.
func (session Session) Number() int {
	if session.Address.Is4() {
		return 4
	}
	return 6
}

// Attracts reports whether BIRD has the session. A static gateway has none while it drains.
func (session Session) Attracts() bool {
	return !session.IsStatic() || session.BFD == nil || session.Export == ExportFull
}

// nextHops holds the default routes of a family via VRRP addresses.
type nextHops struct {
	Name      string
	Family    int
	Addresses []netip.Addr
}

func (input renderInput) nextHops() []nextHops {
	var list []nextHops
	for i, family := range vip.Families {
		isOther := func(a netip.Addr) bool { return vip.FamilyOf(a) != family }
		if own := slices.DeleteFunc(slices.Clone(input.VRRP), isOther); len(own) > 0 {
			list = append(list, nextHops{vrrpName(family), []int{4, 6}[i], own})
		}
	}
	return list
}

type renderInput struct {
	Options
	Interface string // toward the gateways
	Sessions  []Session
	// Advertise makes the pod known to unnumbered gateways, by router advertisements.
	Advertise bool
	// VIPs are rejected from gateways: a reflected VIP must not win over the announcer's.
	VIPs []vip.VIP
}

// heldDown returns the addresses of static gateways whose BFD packets need a lease.
func (input renderInput) heldDown() []netip.Addr {
	var list []netip.Addr
	for _, session := range input.Sessions {
		if session.Protocol == trench.Static && session.BFD != nil {
			list = append(list, session.Address)
		}
	}
	return list
}

// vrrpName returns the name of the protocol for a family's default routes via VRRP addresses.
func vrrpName(f vip.Family) string {
	if f == vip.IPv6 {
		return "VRRP6"
	}
	return "VRRP4"
}

// maskedPassword replaces secrets in output.
const maskedPassword = "********"

// Masked returns the input without secrets.
func (input renderInput) Masked() renderInput {
	if input.Password != "" {
		input.Password = maskedPassword
	}
	input.Sessions = slices.Clone(input.Sessions)
	for i := range input.Sessions {
		if input.Sessions[i].Password != "" {
			input.Sessions[i].Password = maskedPassword
		}
	}
	return input
}

//go:embed bird.conf.tmpl
var configurationText string

var configuration = template.Must(template.New("bird.conf").Funcs(template.FuncMap{
	"default": rtnetlink.DefaultPrefix,
	"retry":   func(d time.Duration) time.Duration { return cmp.Or(d, 5*time.Second) },
	"seconds": func(d time.Duration) int { return max(1, int(d/time.Second)) },
	"ms":      func(d time.Duration) int { return max(1, int(d/time.Millisecond)) },
}).Parse(configurationText))

// render returns the configuration of BIRD 2.0.12 to 3.x, with secrets unless the input is masked.
func render(input renderInput) ([]byte, error) {
	logFile := ""
	if input.LogFileSize > 0 {
		logFile = cmp.Or(input.LogFile, filepath.Join(input.Dir, "bird.log"))
	}
	// Next hops contain the interface as a symbol in single quotes.
	if strings.ContainsRune(input.Interface, '\'') {
		return nil, fmt.Errorf("failed to render BIRD's configuration: name %q of the interface contains a quote",
			input.Interface)
	}
	for what, name := range map[string]string{"interface": input.Interface, "log file": logFile} {
		if strings.ContainsFunc(name, breaksQuoting) {
			return nil, fmt.Errorf("failed to render BIRD's configuration: name %q of the %s contains "+
				"a quote, a wildcard or a control character", name, what)
		}
	}
	input.ImportLimit = cmp.Or(input.ImportLimit, DefaultImportLimit)
	input.LoopbackHoldTime = cmp.Or(input.LoopbackHoldTime, minHoldTime)
	var set [len(vip.Families)][]string
	for _, v := range input.VIPs {
		// "+" also matches more specific prefixes, but not covering prefixes such as a default route.
		set[v.Family()] = append(set[v.Family()], v.String()+"+")
	}
	data := struct {
		renderInput
		LogFile, VIP4, VIP6 string
		BFD, Static         bool
		Multihop            bool
		StaticBFD           *trench.BFD
		NextHops            []nextHops
		Families            []int
		BIRD, Announcer     netip.Addr
		BIRDAS, AnnouncerAS uint32
		// Names and prefixes of names of protocols.
		LoopbackName, BFDName, RADVName, GatewayPrefix, EgressPrefix string
		// Functions of large communities, see [trench.PolicyAS].
		MED, Prepend, Preference, Bandwidth int
		Prepends                            []int
	}{
		renderInput: input, LogFile: logFile,
		VIP4: strings.Join(set[vip.IPv4], ", "), VIP6: strings.Join(set[vip.IPv6], ", "),
		BFD:      slices.ContainsFunc(input.Sessions, func(s Session) bool { return s.BFD != nil }),
		Multihop: slices.ContainsFunc(input.Sessions, func(s Session) bool { return s.Multihop > 0 }),
		Families: []int{4, 6},
		Static:   len(input.VRRP) > 0 || slices.ContainsFunc(input.Sessions, Session.IsStatic),
		NextHops: input.nextHops(),
		BIRD:     LoopbackBIRD, Announcer: LoopbackAnnouncer, BIRDAS: LoopbackPeerAS, AnnouncerAS: LoopbackAS,
		LoopbackName: LoopbackName, BFDName: bfdName, RADVName: radvName,
		GatewayPrefix: gatewayPrefix, EgressPrefix: egressPrefix,
		MED: trench.MEDFunction, Prepend: trench.PrependFunction, Preference: trench.PreferenceFunction,
		Bandwidth: trench.BandwidthFunction,
		Prepends:  []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10},
	}
	for _, session := range input.Sessions {
		if session.IsStatic() && session.BFD != nil {
			data.StaticBFD = session.BFD // package trench rejects differing BFD parameters
		}
	}
	var out bytes.Buffer
	if err := configuration.Execute(&out, data); err != nil {
		return nil, fmt.Errorf("failed to render BIRD's configuration: %w", err)
	}
	return out.Bytes(), nil
}

// breaksQuoting reports whether c is unsafe in a quoted string: BIRD 2.0.12 has no escapes, and
// it interprets interface names as patterns.
func breaksQuoting(c rune) bool { return c < ' ' || c == 0x7f || strings.ContainsRune(`"*?[\`, c) }
