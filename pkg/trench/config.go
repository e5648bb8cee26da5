package trench

import (
	"cmp"
	"crypto/sha256"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// MaxVIPs is the maximum number of VIPs of an attractor, the largest number that the benchmarks
// cover. Reading a set of 50 000 ranges from the kernel takes 0.1 s, and the lb applies a new
// file of that size within its lease, even on a busy machine.
const MaxVIPs = 50_000

// MaxMatch is the maximum number of ports in the match of a stream. Each port counts once per
// protocol.
const MaxMatch = 100

// MaxEarlier is the maximum number of earlier sets of targets of a stream.
const MaxEarlier = 4

// MaxDrainTime is the longest drain time of a target.
const MaxDrainTime = time.Hour

// Config is the configuration of a trench: what lb checks and what frontend advertises.
//
// Defaults are filled in. A Config is immutable and can be shared.
//
// The tags of these types describe the file, for the reader, [Validate], the writer and
// docs/trench.schema.json, where the first paragraphs of the comments are the descriptions:
//
//	yaml      name of the field; "required" if the file must have it
//	remedy    what to write if it is missing, or an empty list
//	default   value of a field that is left out
//	min, max  bounds of a number or a duration, or of each number in a list; for other lists, max is
//	          the maximum number of items
//	form      syntax of a text: its name in forms
//	empty     what to remove instead of writing an empty list or mapping; without it, a list may be
//	          empty
//	null      effect of removing an object that may also be {}
//	loopback  allowed if an address may be a loopback address
//	oneof     group of fields of which an object has exactly one
//	only      protocol of the gateways that have the field
//
// BFD: the multiplier has 8 bits (RFC 5880 section 4.1); below 10 ms, BFD in user space mistakes a
// busy node for a dead link.
type Config struct {
	// Name of the trench.
	Trench string `yaml:"trench,required" form:"name" remedy:"write the name of the trench"`
	// The VIPs that the frontend advertises, and the gateways they are advertised to.
	Attractor Attractor `yaml:"attractor,required" remedy:"write its name, vips and gateways"`
	// The streams that the load balancer serves. A VIP is ready when at least one stream that serves
	// it has minReady ready targets of the VIP's family.
	Streams []Stream `yaml:"streams" max:"10000"` // in the order of the file
	// The percentage of the VIPs in force that a new file may remove without a confirmation; 100 never
	// asks for one.
	MaxRemoval int `yaml:"maxRemoval" min:"1" max:"100" default:"50"`
	// The identifiers of held removals that may take effect, from the status of lb or frontend, with
	// commas between them.
	Confirm string `yaml:"confirm" form:"confirmation"`
	// Whether the writer of the file lets one pod after another change. A frontend then does not wait
	// for its own time before it restarts the session of the only gateway of a family.
	OnePodAtATime bool `yaml:"onePodAtATime"`

	// Digest is the SHA-256 of the file that the configuration was read from, by which its watcher
	// recognizes it; zero without a file.
	Digest [sha256.Size]byte
}

// Attractor is VIPs, and the gateways they are advertised to.
type Attractor struct {
	// Name of the attractor.
	Name string `yaml:"name,required" form:"name" remedy:"write the name of the attractor"`
	// VIPs, [] for none. No two overlap, since the wider one would attract the traffic of the narrower
	// one while that is withdrawn.
	VIPs []vip.VIP `yaml:"vips,required" max:"50000"`
	// Interface toward the gateways. The default is --external-interface of the frontend.
	Interface string `yaml:"interface" form:"interface"`
	// The external routers. Write one for each family of a router that has both.
	Gateways []Gateway `yaml:"gateways"`
	// What BGP gateways learn about the VIPs besides the path: communities and preferences.
	Policies []Policy `yaml:"policies"`
}

// Gateway is an external router that speaks BGP with the frontend and gets the VIPs of one family
// or of both, or one that has static routes to them and follows a BFD session.
type Gateway struct {
	// Name of the gateway, unique, not BFD. BIRD's session is called NBR-<name>.
	Name string `yaml:"name,required" form:"name" remedy:"write a name for the gateway"`
	// Unicast address, unique; not loopback, not IPv6 link-local, not in a VIP.
	Address netip.Addr `yaml:"address"` // without a zone
	// attractor.interface, instead of an address: BGP over link-local addresses with the only router on
	// the link, which router advertisements or neighbor discovery show.
	Interface string `yaml:"interface" form:"interface" only:"bgp"`
	// bgp, or static: the gateway has static routes to the VIPs, and withdraws them while its BFD
	// session is down. A static gateway has a name, an address and bfd only; those with bfd have the
	// same values, and one without cannot be withdrawn.
	Protocol Protocol `yaml:"protocol" default:"bgp"`
	// Local AS number. The default is 8103.
	LocalASN int64 `yaml:"localASN" min:"1" max:"4294967294" only:"bgp"`
	// AS number of the gateway; the same number as localASN makes it iBGP. The default is 4248829953.
	RemoteASN int64 `yaml:"remoteASN" min:"1" max:"4294967294" only:"bgp"`
	// Local TCP port, not --lb-bgp-port. The default is 10179.
	LocalPort int `yaml:"localPort" min:"1" max:"65535" only:"bgp"`
	// TCP port of the gateway. The default is 10179.
	RemotePort int `yaml:"remotePort" min:"1" max:"65535" only:"bgp"`
	// BGP hold time in whole seconds. The default is 3 s.
	HoldTime time.Duration `yaml:"holdTime" min:"3s" max:"65535s" only:"bgp"`
	// Time between KEEPALIVEs in whole seconds, at most a third of holdTime. 0s: a third of holdTime.
	KeepaliveTime time.Duration `yaml:"keepaliveTime" min:"0s" max:"21845s" only:"bgp"`
	// Time between attempts to connect in whole seconds. 0s: 5 s.
	ConnectRetryTime time.Duration `yaml:"connectRetryTime" min:"0s" max:"65535s" only:"bgp"`
	// Families of the VIPs and routes in the session: ipv4, ipv6, both (RFC 4760), or own: that of the
	// address, and both with interface.
	Families SessionFamilies `yaml:"families" default:"own" only:"bgp"`
	// Hops to the gateway; 2 for one router in between. 0: the gateway is on the link.
	Multihop int `yaml:"multihop" min:"0" max:"255" only:"bgp"`
	// Accepts only packets that crossed no router (RFC 5082, TTL 255), or fewer than multihop. The
	// gateway needs it, too.
	TTLSecurity bool `yaml:"ttlSecurity" only:"bgp"`
	// Guards the session, or the routes of a static gateway, by BFD; {} takes the defaults. Left out: no
	// BFD.
	BFD *BFD `yaml:"bfd" null:"for no BFD"`
	// Absolute path of the file with the TCP-MD5 password. While it is missing or refused the gateway
	// has no session.
	PasswordFile string `yaml:"passwordFile" form:"password file" only:"bgp"` // "" without a password
}

// Policy is path attributes of VIPs by their state. A state that is left out has those of ready,
// without localPreference while de-preferred. A change is one UPDATE for each VIP.
type Policy struct {
	// VIPs of the attractor, each in one policy. Left out: all VIPs without a policy of their own.
	VIPs []vip.VIP `yaml:"vips" empty:"the field for all other VIPs"`
	// While the VIP is announced.
	Ready Attributes `yaml:"ready"`
	// While it drains; with GRACEFUL_SHUTDOWN and a worse path, too.
	Draining *Attributes `yaml:"draining"`
	// While the load balancer does not answer, in the grace period.
	Unknown *Attributes `yaml:"unknown"`
	// While it is the last resort of its stream; as draining.
	Backup *Attributes `yaml:"backup"`
}

// Attributes is path attributes of a route (RFC 4271, RFC 1997, RFC 8092).
type Attributes struct {
	// Communities such as 64512:100, and large ones such as 64512:1:100.
	Communities []string `yaml:"communities" form:"community" max:"20"`
	// MULTI_EXIT_DISC; the lower, the better, among routes of one AS. 0: none.
	MED int64 `yaml:"med" min:"0" max:"4294967295"`
	// How often the local AS number is added to the path toward another AS.
	Prepend int `yaml:"prepend" min:"0" max:"10"`
	// LOCAL_PREF toward gateways of the same AS; the higher, the better. 0: the default of 100.
	LocalPreference int64 `yaml:"localPreference" min:"0" max:"4294967295"`
	// Mbit/s of link bandwidth (an extended community) per ready target: routers weigh pods. 0: none.
	TargetBandwidth int `yaml:"targetBandwidth" min:"0" max:"100"`
}

// Has reports whether VIPs of a family are advertised to the gateway.
func (g Gateway) Has(family vip.Family) bool {
	switch g.Families {
	case OwnFamily:
		return g.Interface != "" || g.Address.IsValid() && vip.FamilyOf(g.Address) == family
	case SessionIPv4:
		return family == vip.IPv4
	case SessionIPv6:
		return family == vip.IPv6
	default:
		return true
	}
}

// FamilyList lists the families of the gateway.
func (g Gateway) FamilyList() []vip.Family {
	return slices.DeleteFunc(slices.Clone(vip.Families[:]), func(family vip.Family) bool { return !g.Has(family) })
}

// Keepalive is the keepalive time in seconds, a third of the hold time if left out.
func (g Gateway) Keepalive() int {
	return int(cmp.Or(g.KeepaliveTime, g.HoldTime/3) / time.Second)
}

// Retry is the time between attempts to connect in seconds.
func (g Gateway) Retry() int { return int(cmp.Or(g.ConnectRetryTime, 2*time.Second) / time.Second) }

// MinTTL is the least TTL of a packet between the gateway and the pod.
func (g Gateway) MinTTL() int { return 256 - max(1, g.Multihop) }

// Peer returns the address of the gateway, or its interface while the address is unknown.
func (g Gateway) Peer() string {
	if g.Address.IsValid() {
		return g.Address.String()
	}
	return g.Interface
}

// SessionFamilies are the address families of a BGP session. The zero value is OwnFamily.
type SessionFamilies uint8

// The choices.
const (
	OwnFamily SessionFamilies = iota // the family of the address, both without one
	SessionBoth
	SessionIPv4
	SessionIPv6
)

// String returns "own", "both", "ipv4" or "ipv6", as in the file.
func (f SessionFamilies) String() string { return f.Names()[f] }

// Names lists the families as written in the file.
func (SessionFamilies) Names() []string { return []string{"own", "both", "ipv4", "ipv6"} }

// Protocol is how a gateway learns the VIPs that it routes to the frontend. The zero value is BGP.
type Protocol uint8

// The protocols.
const (
	BGP Protocol = iota
	Static
)

// String returns "bgp" or "static", as in the file.
func (p Protocol) String() string { return p.Names()[p] }

// Names lists the protocols as written in the file.
func (Protocol) Names() []string { return []string{"bgp", "static"} }

// BFD is Bidirectional Forwarding Detection (RFC 5880) of the gateway.
type BFD struct {
	// Least time between packets that vipgate sends.
	MinTx time.Duration `yaml:"minTx" min:"10ms" max:"1m" default:"300ms"`
	// Least time between packets that vipgate accepts.
	MinRx time.Duration `yaml:"minRx" min:"10ms" max:"1m" default:"300ms"`
	// How many packets may be lost.
	Multiplier int `yaml:"multiplier" min:"1" max:"255" default:"3"`
}

// Stream is VIPs served by a group of targets.
type Stream struct {
	// Name of the stream, unique.
	Name string `yaml:"name,required" form:"name" remedy:"write a name for the stream"`
	// VIPs of the attractor. Several streams may serve the same one.
	VIPs []vip.VIP `yaml:"vips,required" remedy:"write its VIPs" empty:"the stream"` // at least one
	// How many targets of a VIP's family must be ready.
	MinReady int `yaml:"minReady" min:"1" max:"1000000" default:"1"`
	// How the targets are checked. May be left out when the file has no targets of the stream.
	Check Check `yaml:"check" remedy:"write one of tcp, http, grpc, udp, dns, ntp, sctp, any, all, such as tcp: {port: 5000}" empty:"the field"`
	// How long a target that leaves keeps the flows it has.
	DrainTime time.Duration `yaml:"drainTime" min:"0s" max:"1h" default:"5s"`
	// What happens to VIPs that were ready while fewer than minReady targets are: withdrawn, or
	// depreferred: they stay advertised with the worst preference, and flows go to targets that fail
	// their checks if no other is left.
	LastResort LastResort `yaml:"lastResort" default:"withdrawn"`
	// How the flows of the stream are spread over its targets. Left out, or {}: the defaults.
	Maglev Maglev `yaml:"maglev"`
	// The packets that the data plane forwards in addition to ICMP; it drops all other packets to the
	// VIPs. Left out: all packets are forwarded.
	//
	// No two have a port of a protocol in common, and all of them have MaxMatch ports at most.
	Match []Match `yaml:"match" max:"100" remedy:"write protocols and ports" empty:"the field to forward all packets"`
	// Earlier sets of targets whose flows may still be open, the most important first: a new pod
	// finds the targets of flows that gateways move to it. Names that are no target have no effect.
	Earlier []Generation `yaml:"earlier" max:"4"`
	// Endpoints of the application.
	//
	// No two share an address, and each has one of a family that is checked.
	Targets []Target `yaml:"targets"`
}

// Generation is a set of targets that a stream had.
type Generation struct {
	// Names of the targets that got new flows.
	Targets []string `yaml:"targets,required" form:"name" remedy:"write the names of the targets" empty:"the entry"`
}

// LastResort is the fate of VIPs whose targets fail. The zero value is Withdrawn.
type LastResort uint8

// The fates.
const (
	Withdrawn LastResort = iota
	Depreferred
)

// String returns "withdrawn" or "depreferred", as in the file.
func (l LastResort) String() string { return l.Names()[l] }

// Names lists the fates as written in the file.
func (LastResort) Names() []string { return []string{"withdrawn", "depreferred"} }

// Maglev is the Maglev table that spreads the flows of a stream over its targets. All pods of the
// trench must have the same values: a flow that moves between pods with different values changes its target.
type Maglev struct {
	// Entries of the table, a prime number. The more, the more evenly are flows spread, and the fewer
	// move when a target comes or goes; at least 100 for each target is good.
	Size uint32 `yaml:"size" min:"101" max:"131071" default:"1009"`
	// Seed of the hashes of flows and of names.
	Seed uint32 `yaml:"seed" min:"1" max:"4294967295" default:"1"`
}

// Match is packets of any of the protocols to any of the ports.
type Match struct {
	// Protocols: tcp, udp, sctp.
	Protocols []string `yaml:"protocols,required" form:"transport" remedy:"write a list such as [tcp]" empty:"the entry"`
	// Destination ports.
	Ports []uint16 `yaml:"ports,required" min:"1" max:"65535" remedy:"write a list such as [80, 443]" empty:"the entry"`
}

// Target is one endpoint of an application.
type Target struct {
	// Name of the target, unique in its stream.
	Name string `yaml:"name,required" form:"name" remedy:"write a name for the target"`
	// At most one address of a family, unique in the stream, none of them in a VIP. A loopback
	// address is this host, without a data plane.
	IPs []netip.Addr `yaml:"ips,required" max:"2" loopback:"allowed" remedy:"write its addresses" empty:"the target"`
	// Announces the target's end: it gets no new flows from now on, and leaves after the drainTime.
	Terminating bool `yaml:"terminating"`
}

// Families are the address families of a check. The zero value is both.
type Families uint8

// The choices.
const (
	BothFamilies Families = iota
	OnlyIPv4
	OnlyIPv6
)

// String returns "both", "ipv4" or "ipv6", as in the file.
func (f Families) String() string { return f.Names()[f] }

// Names lists the Families as written in the file.
func (Families) Names() []string { return []string{"both", "ipv4", "ipv6"} }

// Has reports whether the family is checked.
func (f Families) Has(family vip.Family) bool {
	return f == BothFamilies || (f == OnlyIPv4) == (family == vip.IPv4)
}

// Via is the path of a check. The zero value selects the default path.
type Via uint8

// The paths.
const (
	ViaDefault Via = iota
	ViaVIP
	ViaAddress
)

// String returns "vip" or "address", as in the file, or "".
func (v Via) String() string { return v.Names()[v] }

// Names lists the paths as written in the file.
func (Via) Names() []string { return []string{"", "vip", "address"} }

// ToVIP reports whether checks use the path to VIPs, with or without a data plane.
func (v Via) ToVIP(dataPlane bool) bool { return v == ViaVIP || v == ViaDefault && dataPlane }
