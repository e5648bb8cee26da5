package trench

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// LoopbackASN is the AS number of vipgate's own BGP speaker, which talks to BIRD over the loopback
// interface. No gateway may use it on either side.
const LoopbackASN uint32 = 4200000000

// MaxVIPs is how many VIPs an attractor may have: the largest number that the benchmarks cover. The
// kernel reads a set of 50 000 ranges back in 0.1 s, and the lb takes a new file of that size
// within its lease, also on a busy machine.
const MaxVIPs = 50_000

// Bounds of what the file may say. Hold time: RFC 4271 section 4.2. BFD: the multiplier is 8 bits
// (RFC 5880 section 4.1); under 10 ms BFD in user space takes a busy node for a dead link.
const (
	MinHoldTime      = 3 * time.Second
	MaxHoldTime      = 65535 * time.Second
	MinBFDInterval   = 10 * time.Millisecond
	MaxBFDInterval   = time.Minute
	MinCheckInterval = 10 * time.Millisecond
	MaxCheckInterval = time.Hour
	MinCheckTimeout  = time.Millisecond
	MaxRiseFall      = 100
	MaxDrainTime     = time.Hour
	MinMaglevSize    = 101
	MaxMaglevSize    = 131071
)

// Config is the configuration of a trench: what lb checks and what frontend advertises.
//
// Defaults are filled in. A Config never changes, so that it can be shared. The first paragraphs of
// the comments of these types and their fields are the descriptions in docs/trench.schema.json.
type Config struct {
	Trench string // Name of the trench.
	// What the frontend serves: VIPs, and the gateways they are advertised to.
	Attractor Attractor
	// What the load balancer serves. A VIP is ready when at least one stream that serves it has
	// minReady ready targets of the VIP's family.
	Streams []Stream // in the order of the file
}

// Attractor is VIPs, and the gateways they are advertised to.
type Attractor struct {
	Name string // Name of the attractor.
	// VIPs, [] for none. No two overlap, since the wider one would attract the traffic of the narrower
	// one while that is withdrawn.
	VIPs []vip.VIP // in the order of the file
	// The external routers. Write one for each family of a router that has both.
	Gateways []Gateway
}

// Gateway is an external router that speaks BGP with the frontend. It gets the VIPs of the family
// of its address.
type Gateway struct {
	// Name of the gateway, unique, not BFD. BIRD's session is called NBR-<name>.
	Name string // 1 to 60 characters out of A-Z a-z 0-9 _ . -
	// Unicast address, unique; not loopback, not IPv6 link-local, not in a VIP. The attractor has a
	// VIP of its family.
	Address  netip.Addr // without a zone
	LocalASN uint32     // Local AS number. The default is --local-as of the frontend.
	// AS number of the gateway; the same number as localASN makes it iBGP. The default is --remote-as
	// of the frontend.
	RemoteASN uint32
	// Local TCP port, not --lb-bgp-port. The default is --bgp-local-port of the frontend.
	LocalPort uint16
	// TCP port of the gateway. The default is --bgp-remote-port of the frontend.
	RemotePort uint16
	// BGP hold time in whole seconds. The default is --bgp-hold-time of the frontend.
	HoldTime time.Duration
	BFD      *BFD // Guards the session by BFD; {} takes the defaults. Left out: no BFD.
	// Absolute path of the file with the TCP-MD5 password. While it is missing or refused the gateway
	// has no session.
	PasswordFile string // "" without a password
}

// Family returns the address family of the session. VIPs of this family only are advertised over
// it.
func (g Gateway) Family() vip.Family { return vip.FamilyOf(g.Address) }

// BFD is Bidirectional Forwarding Detection (RFC 5880) of the gateway's session.
type BFD struct {
	MinTx      time.Duration // Least time between packets that vipgate sends.
	MinRx      time.Duration // Least time between packets that vipgate accepts.
	Multiplier uint8         // How many packets may be lost.
}

// Stream is VIPs served by a group of targets.
type Stream struct {
	Name string // Name of the stream, unique.
	// VIPs of the attractor. Several streams may serve the same one.
	VIPs     []vip.VIP // at least one
	MinReady int       // How many targets of a VIP's family must be ready.
	// How the targets are checked. May be left out when the file has no targets of the stream.
	Check     Check         // the zero Check when it is left out
	DrainTime time.Duration // How long a target that leaves keeps the flows it has.
	// How the flows of the stream are spread over its targets. Left out, or {}: the defaults.
	Maglev Maglev
	// Endpoints of the application.
	Targets []Target // no two share an address, and each has one of a family that is checked
}

// Maglev is the Maglev table that spreads the flows of a stream over its targets. All pods of the
// trench must have the same values: a flow that moves between pods with others changes its target.
type Maglev struct {
	// Entries of the table, a prime number. The more, the more evenly are flows spread, and the fewer
	// move when a target comes or goes; at least 100 for each target is good.
	Size uint32
	Seed uint32 // Seed of the hashes of flows and of names.
}

// Check is how the targets of a stream are checked.
//
// One of TCP, HTTP and GRPC has a port, unless it is the zero Check, which checks nothing. Checks
// are comparable.
type Check struct {
	TCP      TCPCheck      // Opens a TCP connection.
	HTTP     HTTPCheck     // Sends an HTTP request.
	GRPC     GRPCCheck     // Asks the gRPC health service, grpc.health.v1.
	Interval time.Duration // Time from the start of one check to the start of the next.
	// The same while a change is about to be decided: from the first outcome that speaks against the
	// state until rise or fall. The default is the interval.
	FastInterval time.Duration
	// How long a check may take, not more than the interval; left out, also not more than the
	// interval.
	Timeout time.Duration
	Rise    int // How many checks in a row must succeed before a target is ready.
	Fall    int // How many checks in a row must fail before a target is no longer ready.
	// Whose addresses are checked: ipv4, ipv6 or both. An address of the other family is as ready as
	// the target's checked one.
	Families Families
	// Source4 and Source6 are the addresses to check from; the zero Addr leaves the choice to the
	// kernel.
	Source4, Source6 netip.Addr
}

// TCPCheck succeeds when a TCP connection to the port can be opened.
type TCPCheck struct {
	Port uint16 // TCP port to connect to.
}

// HTTPCheck succeeds when a GET is answered with a wanted status and body. A redirect is an answer
// and not followed.
type HTTPCheck struct {
	Port uint16 // TCP port to connect to.
	Path string // What is asked for; may have a query.
	Host string // Host header. The default is the target's address with the port.
	// Wanted status: numbers and ranges between 200 and 599, such as 200-399,404.
	Status string // see [HTTPCheck.Wants]
	// Regular expression (RE2) that the first 64 KiB of the body must match anywhere. Left out: any
	// body.
	Body string
	TLS  TLSCheck // Speaks TLS; {} takes the defaults. Left out: plaintext.
}

// Wants reports whether Status names the status of an answer.
func (c HTTPCheck) Wants(status int) bool {
	for part := range strings.SplitSeq(c.Status, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		if !isRange {
			hi = lo
		}
		// All have three digits, so that text and numbers have the same order.
		if s := strconv.Itoa(status); lo <= s && s <= hi {
			return true
		}
	}
	return false
}

// GRPCCheck succeeds when grpc.health.v1 answers SERVING.
type GRPCCheck struct {
	Port    uint16   // TCP port to connect to.
	Service string   // Service to ask for. Left out: the whole server.
	TLS     TLSCheck // Speaks TLS; {} takes the defaults. Left out: plaintext.
}

// TLSCheck is how a check speaks TLS, 1.2 or newer.
type TLSCheck struct {
	On bool // On is false for plaintext.
	// Name that is asked for and that the certificate must have. The default is the target's address.
	ServerName string
	// Absolute path of the PEM file with the authorities, read again when it changes. The default are
	// the system's.
	CAFile   string
	Insecure bool // Takes any certificate; without caFile.
}

// Target is one endpoint of an application.
type Target struct {
	Name string // Name of the target, unique in its stream.
	// At most one address of a family, unique in the stream, none of them in a VIP.
	IPs []netip.Addr // one or two
	// Announces the target's end: it gets no new flows from now on, and leaves after the drainTime.
	Terminating bool
}

// Families are the address families of a check. The zero value is both.
type Families uint8

// The choices.
const (
	BothFamilies Families = iota
	OnlyIPv4
	OnlyIPv6
)

// familyNames are the Families as in the file.
var familyNames = []string{"both", "ipv4", "ipv6"}

// String returns "both", "ipv4" or "ipv6", as in the file.
func (f Families) String() string { return familyNames[f] }

// Has reports whether the family is meant.
func (f Families) Has(family vip.Family) bool {
	return f == BothFamilies || (f == OnlyIPv4) == (family == vip.IPv4)
}

// Defaults are the values of what a gateway does not say.
type Defaults struct {
	LocalASN, RemoteASN   uint32
	LocalPort, RemotePort uint16
	HoldTime              time.Duration
}

// DefaultDefaults returns Meridio's numbers (docs/architecture.md#names-and-numbers-of-meridio).
func DefaultDefaults() Defaults {
	return Defaults{
		LocalASN: 8103, RemoteASN: 4248829953,
		LocalPort: 10179, RemotePort: 10179,
		HoldTime: 3 * time.Second,
	}
}

// Validate refuses defaults that a gateway could not have in the file.
func (d Defaults) Validate() error {
	for i, asn := range []uint32{d.LocalASN, d.RemoteASN} {
		if problem := checkASN(asn); problem != "" {
			return fmt.Errorf("default %s AS number %s", []string{"local", "remote"}[i], problem)
		}
	}
	if d.LocalPort == 0 || d.RemotePort == 0 {
		return fmt.Errorf("default BGP ports %d (local) and %d (remote): a port lies between 1 and 65535",
			d.LocalPort, d.RemotePort)
	}
	if problem := checkHoldTime(d.HoldTime); problem != "" {
		return fmt.Errorf("default hold time %s", problem)
	}
	return nil
}
