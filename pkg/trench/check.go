package trench

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	intern "unique" // unique is a function of this package

	"github.com/vipgate/vipgate/pkg/vip"
)

const checkKinds = "tcp, http, grpc, udp, dns, ntp, sctp"

// MaxMembers is the maximum number of checks of which one or all must pass.
const MaxMembers = 4

// Members are the checks of which one or all must pass. Equal ones are stored once: the lists of a
// stream would take six times as much memory as the rest of it, although few streams have any.
type Members struct {
	list intern.Handle[[MaxMembers]SingleCheck]
}

// MembersOf returns the first checks of a list, at most MaxMembers, as members.
func MembersOf(checks ...SingleCheck) Members {
	var list [MaxMembers]SingleCheck
	if copy(list[:], checks); list == ([MaxMembers]SingleCheck{}) {
		return Members{}
	}
	return Members{intern.Make(list)}
}

// List returns the checks; those behind the last one are zero.
func (members Members) List() (list [MaxMembers]SingleCheck) {
	if members != (Members{}) {
		list = members.list.Value()
	}
	return list
}

// Check is how the targets of a stream are checked.
//
// One of the kinds has a port, or any or all has members, unless it is the zero Check, which checks
// nothing. Checks are comparable.
type Check struct {
	SingleCheck
	// Checks of which one must pass. Each has a verdict of its own; fields that one leaves out, such
	// as interval, are those of the whole check.
	Any Members `yaml:"any" oneof:"kind" max:"4" remedy:"write checks such as {tcp: {port: 5000}}" empty:"the field"`
	// Checks that must all pass, as in any.
	All Members `yaml:"all" oneof:"kind" max:"4" remedy:"write checks such as {tcp: {port: 5000}}" empty:"the field"`
	// Slow start: how long a target that becomes ready counts less in the weights of policies, from a
	// tenth to a whole target. The first ready targets of a stream count fully. 0s: not.
	Warmup time.Duration `yaml:"warmup" min:"0s" max:"1h"`
	// Whose addresses are checked: ipv4, ipv6 or both. An address of the other family is as ready as
	// the target's checked one.
	Families Families `yaml:"families" default:"both"`
	// The path of a check. vip: the path of traffic, with the target's fwmark to one of the stream's
	// VIPs after the other; needs the data plane. address: to the target's own address. Left out: vip
	// with a data plane, address without.
	Via Via `yaml:"via"`
	// Addresses to check from, at most one of a family, none of them in a VIP. Left out: as the kernel
	// chooses; via vip, the address from which the gateways are reached.
	Sources [2]netip.Addr `yaml:"source" max:"2" remedy:"write the addresses to check from" empty:"the field"`
}

// SingleCheck is one check of a target. Exactly one of its kinds has a port.
type SingleCheck struct {
	// Opens a TCP connection.
	TCP TCPCheck `yaml:"tcp" oneof:"kind"`
	// Sends an HTTP request.
	HTTP HTTPCheck `yaml:"http" oneof:"kind"`
	// Asks the gRPC health service, grpc.health.v1.
	GRPC GRPCCheck `yaml:"grpc" oneof:"kind"`
	// Sends a datagram.
	UDP UDPCheck `yaml:"udp" oneof:"kind"`
	// Sends a DNS query.
	DNS DNSCheck `yaml:"dns" oneof:"kind"`
	// Asks an NTP server for its time.
	NTP NTPCheck `yaml:"ntp" oneof:"kind"`
	// Begins an SCTP association.
	SCTP SCTPCheck `yaml:"sctp" oneof:"kind"`
	// Time from the start of one check to the start of the next.
	Interval time.Duration `yaml:"interval" min:"10ms" max:"1h" default:"1s"`
	// The same while a change is about to be decided: from the first outcome that speaks against the
	// state until rise or fall. The default is the interval.
	FastInterval time.Duration `yaml:"fastInterval" min:"10ms" max:"1h"`
	// How long a check may take, not more than the interval; left out, also not more than the
	// interval.
	Timeout time.Duration `yaml:"timeout" min:"1ms" max:"1h" default:"500ms"`
	// How many checks in a row must succeed before a target is ready.
	Rise int `yaml:"rise" min:"1" max:"100" default:"2"`
	// How many checks in a row must fail before a target is no longer ready.
	Fall int `yaml:"fall" min:"1" max:"100" default:"3"`
}

// CheckPriority is the SO_PRIORITY of the sockets of checks, by which the data plane identifies
// them. Its low 4 bits, for bands, are 0 as by default. Without a data plane it may be refused.
const CheckPriority = 0x76670000

// Members returns the checks of a target, each as a Check of one kind, and reports whether one of
// them must pass, instead of all. A check of one kind is its only member.
func (check *Check) Members() (members []Check, anyPasses bool) {
	one := *check
	one.Any, one.All, one.Warmup = Members{}, Members{}, 0
	for _, list := range []Members{check.Any, check.All} {
		for _, member := range list.List() {
			if member != (SingleCheck{}) {
				one.SingleCheck = member
				members = append(members, one)
			}
		}
	}
	if len(members) == 0 {
		return []Check{one}, false
	}
	return members, check.Any != Members{}
}

// Untimed returns the check without timing, rise and fall, which affect no verdict.
func (single SingleCheck) Untimed() SingleCheck {
	single.Interval, single.FastInterval, single.Timeout, single.Rise, single.Fall = 0, 0, 0, 0, 0
	return single
}

// Source returns the address to check from for a family; the zero Addr lets the kernel choose.
func (c Check) Source(f vip.Family) netip.Addr {
	for _, a := range c.Sources {
		if a.IsValid() && vip.FamilyOf(a) == f {
			return a
		}
	}
	return netip.Addr{}
}

// TCPCheck succeeds when a TCP connection to the port can be opened.
type TCPCheck struct {
	// TCP port to connect to.
	Port uint16 `yaml:"port,required" min:"1" max:"65535" remedy:"write the TCP port to connect to"`
}

// HTTPCheck succeeds when a request is answered with a wanted status and body. A redirect is an
// answer and not followed.
type HTTPCheck struct {
	// TCP port to connect to.
	Port uint16 `yaml:"port,required" min:"1" max:"65535" remedy:"write the TCP port to connect to"`
	// Method of the request.
	Method string `yaml:"method" form:"method" default:"GET"`
	// Path of the request; may have a query.
	Path string `yaml:"path" form:"request" default:"/"`
	// Host header. The default is the target's address with the port.
	Host string `yaml:"host" form:"host"`
	// More header fields, such as "Accept: text/plain".
	Headers [8]string `yaml:"headers" form:"header" max:"8" remedy:"write header fields" empty:"the field"`
	// Wanted status: numbers and ranges between 200 and 599, such as 200-399,404.
	Status string `yaml:"status" form:"status" default:"200-399"` // see [HTTPCheck.Wants]
	// Regular expression (RE2) that the first 64 KiB of the body must match anywhere, or the first
	// 4 KiB if the expression is large. Left out: any body.
	Body string `yaml:"body" form:"body"`
	// Speaks TLS; {} takes the defaults. Left out: plaintext.
	TLS TLSCheck `yaml:"tls" null:"for plaintext"`
}

// Wants reports whether Status includes the status of a response.
func (c HTTPCheck) Wants(status int) bool {
	for part := range strings.SplitSeq(c.Status, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		if !isRange {
			hi = lo
		}
		// All have three digits, so strings and numbers have the same order.
		if s := strconv.Itoa(status); lo <= s && s <= hi {
			return true
		}
	}
	return false
}

// GRPCCheck succeeds when grpc.health.v1 answers SERVING.
type GRPCCheck struct {
	// TCP port to connect to.
	Port uint16 `yaml:"port,required" min:"1" max:"65535" remedy:"write the TCP port to connect to"`
	// Service to ask for. Left out: the whole server.
	Service string `yaml:"service" form:"service"`
	// Speaks TLS; {} takes the defaults. Left out: plaintext.
	TLS TLSCheck `yaml:"tls" null:"for plaintext"`
}

// UDPCheck succeeds when a datagram is answered. ICMP port unreachable is a failure.
type UDPCheck struct {
	// UDP port to send to.
	Port uint16 `yaml:"port,required" min:"1" max:"65535" remedy:"write the UDP port to send to"`
	// Datagram to send: text, or bytes as hex:00ff.
	Send string `yaml:"send,required" form:"payload" remedy:"write what to send"` // see [Payload]
	// Text or bytes that the answer must contain. Left out: any answer.
	Expect string `yaml:"expect" form:"payload"`
}

// DNSCheck succeeds when a query is answered with a wanted rcode and answer.
type DNSCheck struct {
	// Port to send to.
	Port uint16 `yaml:"port,required" min:"1" max:"65535" remedy:"write the port of the DNS server"`
	// Name to ask for.
	Name string `yaml:"name,required" form:"domain" remedy:"write the name to ask for"`
	// Type to ask for: A, AAAA, CNAME, MX, NS, PTR, SOA, SRV or TXT.
	Type string `yaml:"type" form:"record type" default:"A"`
	// Wanted rcodes. Left out: NOERROR.
	RCode [4]string `yaml:"rcode" form:"rcode" max:"4" remedy:"write rcodes" empty:"the field for NOERROR"`
	// Regular expression (RE2) that the data of a record of the answer section must match anywhere,
	// such as ^192\.0\.2\.1$. Left out: any answer.
	Answer string `yaml:"answer" form:"body"`
	// Transport of the query: udp or tcp.
	Transport string `yaml:"transport" form:"dns transport" default:"udp"`
	// Asks for recursion, as clients of a resolver do.
	Recursion bool `yaml:"recursion"`
}

// NTPCheck succeeds when a synchronized NTP server answers.
type NTPCheck struct {
	// UDP port to send to.
	Port uint16 `yaml:"port,required" min:"1" max:"65535" remedy:"write the UDP port, such as 123"`
	// Bound of the root distance: half of the round trip to the reference clock, and the error.
	MaxDistance time.Duration `yaml:"maxDistance" min:"1ms" max:"16s" default:"1.5s"`
}

// SCTPCheck succeeds when INIT is answered with INIT ACK. No association is established.
type SCTPCheck struct {
	// SCTP port to send to.
	Port uint16 `yaml:"port,required" min:"1" max:"65535" remedy:"write the SCTP port"`
}

// TLSCheck is how a check speaks TLS, 1.2 or newer.
type TLSCheck struct {
	// On is false for plaintext.
	On bool
	// Name that is asked for and that the certificate must have. The default is the target's address.
	ServerName string `yaml:"serverName" form:"server name"`
	// Absolute path of the PEM file with the authorities, read again when it changes. The default are
	// the system's.
	CAFile string `yaml:"caFile" form:"CA file"`
	// Takes any certificate; without caFile.
	Insecure bool `yaml:"insecure"`
	// Absolute path of the PEM file with a client certificate and its intermediates, read again
	// when it changes. Left out: none is presented.
	CertFile string `yaml:"certFile" form:"certificate file"`
	// The same of its private key.
	KeyFile string `yaml:"keyFile" form:"key file"`
}

// Kind returns the kind of the check as in the file, such as "tcp" or "any", or "" without one.
func (check *Check) Kind() string { return cmp.Or(append(kindsOf(check), "")...) }

// Kind returns the kind of the check as in the file, such as "tcp", or "" without one.
func (single *SingleCheck) Kind() string { return cmp.Or(append(kindsOf(single), "")...) }

// kindsOf lists the kinds that are set, of which a check has exactly one.
func kindsOf[Kinds Check | SingleCheck](check *Kinds) (kinds []string) {
	value := reflect.ValueOf(check).Elem()
	for _, field := range FieldsOf(value.Type()) {
		if field.Tag.Get("oneof") != "" && !value.FieldByIndex(field.index).IsZero() {
			kinds = append(kinds, field.Key)
		}
	}
	return kinds
}

// oneKind reports a check that does not have exactly one of the kinds in names.
func (result *validation) oneKind(path string, kinds []string, names string) {
	if len(kinds) == 0 {
		result.report(path, "has none of "+names, "write one of them, such as tcp: {port: 5000}")
	}
	for _, kind := range kinds[min(1, len(kinds)):] {
		result.report(member(path, kind), "conflicts with "+kinds[0], "write only one of "+names)
	}
}

func (check *Check) check(result *validation, path string) {
	result.oneKind(path, kindsOf(check), checkKinds+", any, all")
	check.checkFields(result, path)
	for key, list := range map[string]Members{"any": check.Any, "all": check.All} {
		members := list.List()
		for i, single := range members {
			if first := slices.Index(members[:], single); first < i && single != (SingleCheck{}) {
				result.conflict(index(member(path, key), i), index(member(path, key), first), "is the check",
					"remove one of them or change it")
			}
		}
	}
	place := func(i int) string { return index(member(path, "source"), i) }
	for i, source := range check.Sources {
		if source.IsValid() && !check.Families.Has(vip.FamilyOf(source)) {
			result.report(place(i), fmt.Sprintf("is %s, but families is %s, so that nothing would be checked from it", source,
				check.Families), "remove it, or write families: both")
		}
	}
	result.onePerFamily(check.Sources[:], "checks of a family come from one",
		"what comes from a VIP is sent to the gateways, write "+
			"an address of the load balancer's own", place)
}

func (single *SingleCheck) check(result *validation, path string) {
	result.oneKind(path, kindsOf(single), checkKinds)
	single.checkFields(result, path)
}

func (single *SingleCheck) checkFields(result *validation, path string) {
	longer := func(key string, duration time.Duration) {
		if duration > single.Interval {
			result.report(member(path, key), fmt.Sprintf("is %s, longer than the interval of %s", duration, single.Interval),
				"write at most the interval")
		}
	}
	longer("fastInterval", single.FastInterval)
	longer("timeout", single.Timeout)
	if single.HTTP.Method == "HEAD" && single.HTTP.Body != "" {
		result.report(member(path, "http.body"), "conflicts with method: HEAD, whose answer has none", "remove one of them")
	}
	unique(result, "header field", single.HTTP.Headers[:],
		func(i int) string { return index(member(path, "http.headers"), i) })
	unique(result, "rcode", single.DNS.RCode[:], func(i int) string { return index(member(path, "dns.rcode"), i) })
}

func (settings *TLSCheck) check(result *validation, path string) {
	if settings.Insecure && settings.CAFile != "" {
		result.report(member(path, "caFile"), "conflicts with insecure: true, which takes any certificate",
			"remove one of them")
	}
	if (settings.CertFile == "") != (settings.KeyFile == "") {
		given, missing := "certFile", "keyFile"
		if settings.CertFile == "" {
			given, missing = missing, given
		}
		result.report(member(path, given), "needs "+missing+", the other half of the client certificate",
			"write both, or none")
	}
}

// Payload returns the bytes of a text in the form of [UDPCheck.Send].
func Payload(text string) []byte {
	if digits, isHex := strings.CutPrefix(text, hexPrefix); isHex {
		payload, _ := hex.DecodeString(digits)
		return payload
	}
	return []byte(text)
}

const hexPrefix = "hex:"

func checkPayload(text string) Problem {
	digits, isHex := strings.CutPrefix(text, hexPrefix)
	if _, err := hex.DecodeString(digits); isHex && (err != nil || digits == "") {
		return newProblem("is "+Quote(text)+", not bytes in pairs of hexadecimal digits", "write bytes such as hex:00ff")
	}
	if len(text) > 1000 { // the pattern counts characters
		return newProblem(fmt.Sprintf("has %d bytes", len(text)), "write 1000 at most")
	}
	return Problem{}
}

func checkDomain(name string) Problem {
	if length := len(strings.TrimSuffix(name, ".")); length > 253 {
		return newProblem(fmt.Sprintf("has %d characters", length), "a name has 253 at most (RFC 1035)")
	}
	return Problem{}
}

// checkHeader rejects header fields that the check itself sends.
func checkHeader(field string) Problem {
	name, _, _ := strings.Cut(field, ":")
	switch strings.ToLower(name) {
	case "host":
		return newProblem("is "+Quote(field), "write the field host")
	case "connection", "content-length", "transfer-encoding", "upgrade":
		return newProblem("is "+Quote(field)+", which the check sets", "remove it")
	}
	return Problem{}
}
