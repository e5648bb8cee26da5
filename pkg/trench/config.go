package trench

import (
	"fmt"
	"net/netip"
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

// Config is what a trench file says, with the defaults filled in. It is not changed once created,
// so that it can be shared.
type Config struct {
	// Trench is the name of the trench.
	Trench string
	// Attractor is what the frontend serves.
	Attractor Attractor
	// Streams are what the load balancer serves, in the order of the file.
	Streams []Stream
}

// Attractor is a set of VIPs and the gateways they are advertised to.
type Attractor struct {
	Name string
	// VIPs do not overlap, and stand in the order of the file.
	VIPs []vip.VIP
	// Gateways have distinct names and addresses. For the family of each there is at least one VIP.
	Gateways []Gateway
}

// Gateway is an external router that speaks BGP with the frontend.
type Gateway struct {
	// Name is 1 to 60 characters out of A-Z a-z 0-9 _ . -
	Name string
	// Address is the gateway's unicast address, without a zone.
	Address netip.Addr
	// LocalASN and RemoteASN are the AS numbers of the two sides.
	LocalASN, RemoteASN uint32
	// LocalPort and RemotePort are the TCP ports of the two sides.
	LocalPort, RemotePort uint16
	// HoldTime is a whole number of seconds from [MinHoldTime] to [MaxHoldTime].
	HoldTime time.Duration
	// BFD is nil when the session is not guarded by BFD.
	BFD *BFD
	// PasswordFile is the absolute path of the file with the TCP-MD5 password, or "" when the
	// session has none.
	PasswordFile string
}

// Family returns the address family of the session. VIPs of this family only are advertised over
// it.
func (g Gateway) Family() vip.Family { return vip.FamilyOf(g.Address) }

// BFD is how a session is guarded by Bidirectional Forwarding Detection (RFC 5880).
type BFD struct {
	// MinTx and MinRx lie between [MinBFDInterval] and [MaxBFDInterval].
	MinTx, MinRx time.Duration
	// Multiplier is how many packets may be lost, at least 1.
	Multiplier uint8
}

// Stream is VIPs served by a group of targets.
type Stream struct {
	Name string
	// VIPs are VIPs of the attractor, at least one.
	VIPs []vip.VIP
	// MinReady is how many targets of a VIP's family must be ready for the VIP to be ready, at
	// least 1.
	MinReady int
	// Check reports whether a target is ready. It is the zero Check when the file has none, which
	// it may when it has no targets either.
	Check Check
	// DrainTime is how long a target that leaves keeps the flows it has, from 0 to [MaxDrainTime].
	DrainTime time.Duration
	// Maglev says how flows are spread over the targets.
	Maglev Maglev
	// Targets have distinct names, and no address belongs to two of them. Each has an address of a
	// family that is checked.
	Targets []Target
}

// Maglev is the table that spreads the flows of a stream over its targets. All pods of a trench
// must have the same, since a flow that moves between pods with others changes its target.
type Maglev struct {
	// Size is the number of entries, a prime number from [MinMaglevSize] to [MaxMaglevSize].
	Size uint32
	// Seed is that of the hashes of flows and of names, never 0.
	Seed uint32
}

// Check is how the targets of a stream are checked. One of TCP, HTTP and GRPC has a port, unless it
// is the zero Check, which checks nothing. Checks are comparable.
type Check struct {
	TCP  TCPCheck
	HTTP HTTPCheck
	GRPC GRPCCheck
	// FastInterval is the time between checks while a change is about to be decided: from the first
	// outcome that speaks against the state until rise or fall. At most Interval, which is the
	// default.
	FastInterval time.Duration
	// Source4 and Source6 are the addresses to check from; the zero Addr leaves the choice to the
	// kernel.
	Source4, Source6 netip.Addr
	// Families are the families whose addresses are checked. The addresses of the other family of a
	// target are taken to be as those.
	Families Families
	// Interval is the time from the start of one check to the start of the next, from
	// [MinCheckInterval] to [MaxCheckInterval].
	Interval time.Duration
	// Timeout is how long a check may take, from [MinCheckTimeout] to Interval.
	Timeout time.Duration
	// Rise is how many checks in a row must succeed before a target is ready, Fall how many must
	// fail before it no longer is: 1 to [MaxRiseFall].
	Rise, Fall int
}

// TCPCheck succeeds when a TCP connection to the port can be opened.
type TCPCheck struct {
	Port uint16
}

// HTTPCheck succeeds when a GET is answered with a wanted status and body.
type HTTPCheck struct {
	Port uint16
	// Path begins with "/" and may have a query.
	Path string
	// Host is sent as the Host header; "" sends the target's address.
	Host string
	// Status is a list of numbers and ranges, as in "200-399,404": see [HTTPCheck.Wants].
	Status string
	// Body is a regular expression (RE2) that the first 64 KiB of the body must match; "" takes
	// any.
	Body string
	TLS  TLSCheck
}

// GRPCCheck succeeds when grpc.health.v1 answers SERVING.
type GRPCCheck struct {
	Port uint16
	// Service is the name to ask for; "" is the whole server.
	Service string
	TLS     TLSCheck
}

// TLSCheck says how a check speaks TLS.
type TLSCheck struct {
	// On is false for plaintext.
	On bool
	// ServerName is asked for and verified; "" takes the target's address.
	ServerName string
	// CAFile is the absolute path of the PEM file with the authorities; "" takes the system's.
	CAFile string
	// Insecure takes any certificate.
	Insecure bool
}

// Families says which address families are meant. The zero value means both.
type Families uint8

// The choices.
const (
	BothFamilies Families = iota
	OnlyIPv4
	OnlyIPv6
)

// Has reports whether the family is meant.
func (f Families) Has(family vip.Family) bool {
	return f == BothFamilies || (f == OnlyIPv4) == (family == vip.IPv4)
}

// Target is one endpoint of an application.
type Target struct {
	Name string
	// IPs are its addresses, one or two, at most one of a family.
	IPs []netip.Addr
	// Terminating announces its end: it gets no new flows from now on.
	Terminating bool
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
		LocalASN:   8103,
		RemoteASN:  4248829953,
		LocalPort:  10179,
		RemotePort: 10179,
		HoldTime:   3 * time.Second,
	}
}

// Validate refuses defaults that a gateway could not say itself.
func (d Defaults) Validate() error {
	for _, asn := range []struct {
		name  string
		value uint32
	}{{"local", d.LocalASN}, {"remote", d.RemoteASN}} {
		if problem := checkASN(asn.value); problem != "" {
			return fmt.Errorf("default %s AS number %s", asn.name, problem)
		}
	}
	if d.LocalPort == 0 || d.RemotePort == 0 {
		return fmt.Errorf("default BGP ports %d (local) and %d (remote): a port lies between 1 and 65535", d.LocalPort, d.RemotePort)
	}
	if problem := checkHoldTime(d.HoldTime); problem != "" {
		return fmt.Errorf("default hold time %s", problem)
	}
	return nil
}

// Defaults of a gateway's bfd, of a stream, and of its maglev and check.
const (
	defaultBFDInterval   = 300 * time.Millisecond
	defaultBFDMultiplier = 3
	defaultMinReady      = 1
	defaultCheckInterval = time.Second
	defaultCheckTimeout  = 500 * time.Millisecond
	defaultRise          = 2
	defaultFall          = 3
	defaultDrainTime     = 5 * time.Second
	defaultMaglevSize    = 1009
	defaultMaglevSeed    = 1
	defaultPath          = "/"
	defaultStatus        = "200-399"
)
