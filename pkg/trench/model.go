package trench

import (
	"slices"
	"time"
)

// mapping describes one mapping of the file. The reader knows from it what the fields are, what to
// write for one that is missing, and the bounds of numbers and durations; docs/trench.schema.json
// is generated from the same tables.
type mapping struct {
	name    string // in the schema
	meaning string // for people
	fields  []field
	// oneOf are fields of which the file has exactly one.
	oneOf []string
	// entails names a list, and the field that must be there when that has items.
	entails [2]string
}

// field is one field of a mapping.
type field struct {
	name    string
	meaning string
	// remedy says what to write when the field is missing; a field without one may be left out.
	remedy string
	// initial is the value of a field that is left out, as it would be written; nil for none.
	initial any
	// is what the field holds: a text, a boolean, a whole, a span, a list or a *mapping.
	is any
}

// text is a scalar whose form the reader checks by code.
type text int

const (
	nameText text = iota
	vipText
	gatewayText // an address
	targetText  // an address
	protocolText
	pathText
	asnText // a number without some
	requestText
	hostText
	statusText
	bodyText
	serviceText
	serverText
	sourceText // an address
	familiesText
)

// boolean is true or false.
type boolean struct{}

// whole is a whole number between lo and hi.
type whole struct{ lo, hi uint32 }

// span is a duration between lo and hi. Where below names another field, that one's value is the
// upper bound in messages.
type span struct {
	lo, hi time.Duration
	below  string
}

// bounds writes the bounds for people.
func (s span) bounds() string {
	if s.below != "" {
		return words(s.lo) + " to the " + s.below
	}
	return words(s.lo) + " to " + words(s.hi)
}

// list is a list of min to max items, all different; max is 0 for any number.
type list struct {
	of       any
	min, max int
}

func (m *mapping) names() []string {
	names := make([]string, len(m.fields))
	for i, f := range m.fields {
		names[i] = f.name
	}
	return names
}

func (m *mapping) has(name string) bool {
	return slices.ContainsFunc(m.fields, func(f field) bool { return f.name == name })
}

// field returns the description of a field of this mapping.
func (m *mapping) field(name string) field {
	i := slices.IndexFunc(m.fields, func(f field) bool { return f.name == name })
	return m.fields[i] // a field that is not described is an error of the reader, which every test shows
}

// The bounds of numbers.
var (
	anyPort = whole{1, 65535}
	anyASN  = whole{1, 4294967294}
)

// The mappings of the file. They are never changed.
var (
	fileMapping = &mapping{
		meaning: "The configuration of a trench: what lb checks and what frontend advertises.",
		fields: []field{
			{name: "trench", is: nameText, remedy: "write the name of the trench", meaning: "Name of the trench."},
			{name: "attractor", is: attractorMapping, remedy: "write its name, vips and gateways", meaning: "What the frontend serves: VIPs, and the gateways they are advertised to."},
			{name: "streams", is: list{of: streamMapping}, meaning: "What the load balancer serves. A VIP is ready when at least one stream that serves it has minReady ready targets of the VIP's family."},
		},
	}
	attractorMapping = &mapping{
		name: "attractor", meaning: "VIPs, and the gateways they are advertised to.",
		fields: []field{
			{name: "name", is: nameText, remedy: "write the name of the attractor", meaning: "Name of the attractor."},
			{name: "vips", is: list{of: vipText, max: MaxVIPs}, remedy: "write a list of VIPs such as [20.0.0.1/32], or [] for none", meaning: "VIPs, [] for none. No two overlap, since the wider one would attract the traffic of the narrower one while that is withdrawn."},
			{name: "gateways", is: list{of: gatewayMapping}, meaning: "The external routers. Write one for each family of a router that has both."},
		},
	}
	gatewayMapping = &mapping{
		name: "gateway", meaning: "An external router that speaks BGP with the frontend. It gets the VIPs of the family of its address.",
		fields: []field{
			{name: "name", is: nameText, remedy: "write a name for the gateway", meaning: "Name of the gateway, unique, not BFD. BIRD's session is called NBR-<name>."},
			{name: "address", is: gatewayText, remedy: "write the gateway's IP address", meaning: "Unicast address, unique; not loopback, not IPv6 link-local, not in a VIP. The attractor has a VIP of its family."},
			{name: "protocol", is: protocolText, initial: "bgp", meaning: "Only bgp so far."},
			{name: "localASN", is: asnText, initial: DefaultDefaults().LocalASN, meaning: "Local AS number. The default is --local-as of the frontend."},
			{name: "remoteASN", is: asnText, initial: DefaultDefaults().RemoteASN, meaning: "AS number of the gateway; the same number as localASN makes it iBGP. The default is --remote-as of the frontend."},
			{name: "localPort", is: anyPort, initial: DefaultDefaults().LocalPort, meaning: "Local TCP port, not --lb-bgp-port. The default is --bgp-local-port of the frontend."},
			{name: "remotePort", is: anyPort, initial: DefaultDefaults().RemotePort, meaning: "TCP port of the gateway. The default is --bgp-remote-port of the frontend."},
			{name: "holdTime", is: span{lo: MinHoldTime, hi: MaxHoldTime}, initial: DefaultDefaults().HoldTime, meaning: "BGP hold time in whole seconds. The default is --bgp-hold-time of the frontend."},
			{name: "bfd", is: bfdMapping, meaning: "Guards the session by BFD; {} takes the defaults. Left out: no BFD."},
			{name: "passwordFile", is: pathText, meaning: "Absolute path of the file with the TCP-MD5 password. While it is missing or refused the gateway has no session."},
		},
	}
	bfdMapping = &mapping{
		name: "bfd", meaning: "Bidirectional Forwarding Detection (RFC 5880) of the gateway's session.",
		fields: []field{
			{name: "minTx", is: span{lo: MinBFDInterval, hi: MaxBFDInterval}, initial: defaultBFDInterval, meaning: "Least time between packets that vipgate sends."},
			{name: "minRx", is: span{lo: MinBFDInterval, hi: MaxBFDInterval}, initial: defaultBFDInterval, meaning: "Least time between packets that vipgate accepts."},
			{name: "multiplier", is: whole{1, 255}, initial: defaultBFDMultiplier, meaning: "How many packets may be lost."},
		},
	}
	streamMapping = &mapping{
		name: "stream", meaning: "VIPs served by a group of targets.",
		fields: []field{
			{name: "name", is: nameText, remedy: "write a name for the stream", meaning: "Name of the stream, unique."},
			{name: "vips", is: list{of: vipText, min: 1}, remedy: "write the VIPs that the stream serves", meaning: "VIPs of the attractor. Several streams may serve the same one."},
			{name: "minReady", is: whole{1, 1_000_000}, initial: defaultMinReady, meaning: "How many targets of a VIP's family must be ready."},
			{name: "check", is: checkMapping, meaning: "How the targets are checked. May be left out when the file has no targets of the stream."},
			{name: "drainTime", is: span{lo: 0, hi: MaxDrainTime}, initial: defaultDrainTime, meaning: "How long a target that leaves keeps the flows it has."},
			{name: "maglev", is: maglevMapping, meaning: "How the flows of the stream are spread over its targets. Left out, or {}: the defaults."},
			{name: "targets", is: list{of: targetMapping}, meaning: "Endpoints of the application."},
		},
		entails: [2]string{"targets", "check"},
	}
	maglevMapping = &mapping{
		name: "maglev", meaning: "The Maglev table that spreads the flows of a stream over its targets. All pods of the trench must have the same values: a flow that moves between pods with others changes its target.",
		fields: []field{
			{name: "size", is: whole{MinMaglevSize, MaxMaglevSize}, initial: defaultMaglevSize, meaning: "Entries of the table, a prime number. The more, the more evenly are flows spread, and the fewer move when a target comes or goes; at least 100 for each target is good."},
			{name: "seed", is: whole{1, 4294967295}, initial: defaultMaglevSeed, meaning: "Seed of the hashes of flows and of names."},
		},
	}
	checkMapping = &mapping{
		name: "check", meaning: "How the targets of a stream are checked.",
		fields: []field{
			{name: "tcp", is: tcpMapping, meaning: "Opens a TCP connection."},
			{name: "http", is: httpMapping, meaning: "Sends an HTTP request."},
			{name: "grpc", is: grpcMapping, meaning: "Asks the gRPC health service, grpc.health.v1."},
			{name: "interval", is: span{lo: MinCheckInterval, hi: MaxCheckInterval}, initial: defaultCheckInterval, meaning: "Time from the start of one check to the start of the next."},
			{name: "fastInterval", is: span{lo: MinCheckInterval, hi: MaxCheckInterval, below: "interval"}, meaning: "The same while a change is about to be decided: from the first outcome that speaks against the state until rise or fall. The default is the interval."},
			{name: "timeout", is: span{lo: MinCheckTimeout, hi: MaxCheckInterval, below: "interval"}, initial: defaultCheckTimeout, meaning: "How long a check may take, not more than the interval; left out, also not more than the interval."},
			{name: "rise", is: whole{1, MaxRiseFall}, initial: defaultRise, meaning: "How many checks in a row must succeed before a target is ready."},
			{name: "fall", is: whole{1, MaxRiseFall}, initial: defaultFall, meaning: "How many checks in a row must fail before a target is no longer ready."},
			{name: "families", is: familiesText, initial: "both", meaning: "Whose addresses are checked: ipv4, ipv6 or both. An address of the other family is as ready as the target's checked one."},
			{name: "source", is: list{of: sourceText, min: 1, max: 2}, meaning: "Addresses to check from, at most one of a family, none of them in a VIP. Left out: as the kernel chooses."},
		},
		oneOf: []string{"tcp", "http", "grpc"},
	}
	tcpMapping = &mapping{
		name: "tcp", meaning: "Succeeds when a TCP connection to the port can be opened.",
		fields: []field{
			{name: "port", is: anyPort, remedy: "write the TCP port to connect to", meaning: "TCP port to connect to."},
		},
	}
	httpMapping = &mapping{
		name: "http", meaning: "Succeeds when a GET is answered with a wanted status and body. A redirect is an answer and not followed.",
		fields: []field{
			{name: "port", is: anyPort, remedy: "write the TCP port to connect to", meaning: "TCP port to connect to."},
			{name: "path", is: requestText, initial: defaultPath, meaning: "What is asked for; may have a query."},
			{name: "host", is: hostText, meaning: "Host header. The default is the target's address with the port."},
			{name: "status", is: statusText, initial: defaultStatus, meaning: "Wanted status: numbers and ranges between 200 and 599, such as 200-399,404."},
			{name: "body", is: bodyText, meaning: "Regular expression (RE2) that the first 64 KiB of the body must match anywhere. Left out: any body."},
			{name: "tls", is: tlsMapping, meaning: "Speaks TLS; {} takes the defaults. Left out: plaintext."},
		},
	}
	grpcMapping = &mapping{
		name: "grpc", meaning: "Succeeds when grpc.health.v1 answers SERVING.",
		fields: []field{
			{name: "port", is: anyPort, remedy: "write the TCP port to connect to", meaning: "TCP port to connect to."},
			{name: "service", is: serviceText, meaning: "Service to ask for. Left out: the whole server."},
			{name: "tls", is: tlsMapping, meaning: "Speaks TLS; {} takes the defaults. Left out: plaintext."},
		},
	}
	tlsMapping = &mapping{
		name: "tls", meaning: "How a check speaks TLS, 1.2 or newer.",
		fields: []field{
			{name: "serverName", is: serverText, meaning: "Name that is asked for and that the certificate must have. The default is the target's address."},
			{name: "caFile", is: pathText, meaning: "Absolute path of the PEM file with the authorities, read again when it changes. The default are the system's."},
			{name: "insecure", is: boolean{}, initial: false, meaning: "Takes any certificate; without caFile."},
		},
	}
	targetMapping = &mapping{
		name: "target", meaning: "One endpoint of an application.",
		fields: []field{
			{name: "name", is: nameText, remedy: "write a name for the target", meaning: "Name of the target, unique in its stream."},
			{name: "ips", is: list{of: targetText, min: 1, max: 2}, remedy: "write the target's addresses", meaning: "At most one address of a family, unique in the stream, none of them in a VIP."},
			{name: "terminating", is: boolean{}, initial: false, meaning: "Announces the target's end: it gets no new flows from now on, and leaves after the drainTime."},
		},
	}
)
