package file

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/pkg/trench"
)

// judge compiles the schema on disk, as an editor does.
func judge(t testing.TB) *jsonschema.Schema {
	t.Helper()
	s, err := jsonschema.NewCompiler().Compile(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// instance converts YAML to JSON as an editor does: aliases are followed, and scalars have the
// types of YAML 1.2. Some YAML has no JSON form.
func instance(data []byte) (any, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return nil, err
	}
	v, err := jsonValue(&doc)
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return jsonschema.UnmarshalJSON(bytes.NewReader(b))
}

func jsonValue(n *yaml.Node) (v any, err error) {
	switch n.Kind {
	case yaml.DocumentNode:
		return jsonValue(n.Content[0])
	case yaml.AliasNode:
		return jsonValue(n.Alias)
	case yaml.SequenceNode:
		l := make([]any, len(n.Content))
		for i, c := range n.Content {
			if l[i], err = jsonValue(c); err != nil {
				return nil, err
			}
		}
		return l, nil
	case yaml.MappingNode:
		m := map[string]any{}
		for i := 0; i < len(n.Content); i += 2 {
			key := n.Content[i]
			if key.Kind == yaml.AliasNode {
				key = key.Alias
			}
			if key.Kind != yaml.ScalarNode {
				return nil, errors.New("a key that is no scalar")
			}
			if m[key.Value], err = jsonValue(n.Content[i+1]); err != nil {
				return nil, err
			}
		}
		return m, nil
	}
	switch n.ShortTag() {
	case "!!null", "!!bool", "!!int", "!!float":
		err := n.Decode(&v)
		return v, err
	}
	return n.Value, nil
}

// fullTLS sets each field of the TLS of a check.
const fullTLS = "tls: {serverName: sni.example.org, caFile: /etc/ca.pem, certFile: /etc/c.pem, keyFile: /etc/c.key, " +
	"insecure: false}"

// every sets each field to a value other than its default. Each example replaces a part of it.
const every = `trench: trench-a
maxRemoval: 75
confirm: v1f3a5b7c
onePodAtATime: true
attractor:
  name: attractor-a-1
  interface: ext-vlan
  vips: [20.0.0.1/32, "2000::1/128"]
  gateways:
    - {name: gw4, address: 169.254.100.150, protocol: bgp, localASN: 64512, remoteASN: 64513,
       localPort: 179, remotePort: 1179, holdTime: 9s, ttlSecurity: true,
       keepaliveTime: 1s, connectRetryTime: 9s, families: both, multihop: 0,
       bfd: {minTx: 100ms, minRx: 200ms, multiplier: 5}, passwordFile: /etc/key}
    - {name: gw6, address: "fd00:100::150"}
  policies:
    - {vips: ['20.0.0.1/32'], ready: {communities: ["64512:100", "64512:1:2"], med: 50, prepend: 3,
       localPreference: 200, targetBandwidth: 10}, draining: {med: 60}, unknown: {med: 70}, backup: {med: 80}}
    - {ready: {communities: [65535:65281]}}
streams:
  - {name: s1, vips: [20.0.0.1/32], minReady: 2,
     check: {tcp: {port: 5000}, interval: 2s, fastInterval: 100ms, timeout: 300ms, rise: 1, fall: 4}, drainTime: 7s,
     match: [{protocols: [tcp], ports: [80, 443]}, {protocols: [udp], ports: [53]}], maglev: {size: 10007, seed: 7},
     targets: [{name: t1, ips: [172.16.1.1, "fd00::1"]}]}
  - {name: s2, vips: ["2000::1/128"],
     check: {http: {port: 8080, path: "/healthz?full=1", host: "example.org:8443", status: "200-299,404", body: "^ok$",
                    method: POST, headers: ["Accept: text/plain"],
                    ` + fullTLS + `},
             families: ipv6, source: ["fd00::9"]},
     targets: [{name: t2, ips: ["fd00::2"], terminating: true}]}
  - {name: s3, vips: [20.0.0.1/32], check: {grpc: {port: 9090, service: pkg.Service, tls: {insecure: true}}}}
  - {name: s4, vips: [20.0.0.1/32], check: {dns: {port: 53, name: example.org, type: AAAA, rcode: [NXDOMAIN],
                                                  answer: "^fd", transport: tcp, recursion: true}}}
  - {name: s5, vips: [20.0.0.1/32], check: {udp: {port: 5060, send: "hex:00ff", expect: pong}}}
  - {name: s6, vips: [20.0.0.1/32], check: {ntp: {port: 123, maxDistance: 2s}}}
  - {name: s7, vips: [20.0.0.1/32], check: {sctp: {port: 2905}}}
  - name: s8
    vips: [20.0.0.1/32]
    check: {any: [{http: {port: 8081}, interval: 3s, fastInterval: 150ms, timeout: 200ms, rise: 3, fall: 5},
                  {udp: {port: 9, send: x}}], warmup: 30s}
  - {name: s9, vips: [20.0.0.1/32], check: {all: [{tcp: {port: 5001}}], interval: 5s}}
`

const firstCheck = "check: {tcp: {port: 5000}, interval: 2s, fastInterval: 100ms, timeout: 300ms, rise: 1, fall: 4}, "

const everyMatch = "match: [{protocols: [tcp], ports: [80, 443]}, {protocols: [udp], ports: [53]}], "

// verdict states which of reader and schema accept an example.
type verdict int

const (
	taken   verdict = iota // accepted by both
	refused                // rejected by both
	// onlySchema: rejected by the reader only. The schema cannot compare several fields, or the
	// error is lost in the conversion to JSON.
	onlySchema
)

func TestSchemaAndReaderAgree(t *testing.T) {
	s := judge(t)
	tried := map[string]bool{}
	for _, tt := range []struct {
		field    string // path mapping.field
		old, new string // replaced in every
		want     verdict
	}{
		{"", "", "", taken},
		{"", every, "{}", refused},
		{"", every, "[]", refused},
		{"", every, "trench: a\nattractor: {name: a, vips: []}\n", taken},
		{"", "trench: ", "tench: ", refused},
		{".trench", "trench-a", "123", taken},
		{".trench", "trench-a", "1.5", taken},
		{".trench", "trench-a", "true", taken},
		{".trench", "trench-a", "'123'", taken},
		{".trench", "trench-a", "", refused},
		{".trench", "trench-a", "null", refused},
		{".trench", "trench-a", "''", refused},
		{".trench", "trench-a", "[a]", refused},
		{".trench", "trench-a", "a b", refused},
		{".trench", "trench-a", "ä", refused},
		{".trench", "trench-a", strings.Repeat("a", 60), taken},
		{".trench", "trench-a", strings.Repeat("a", 61), refused},
		{".trench", "trench-a", "1e-3", taken},
		{".trench", "trench-a", "1e+3", onlySchema}, // a name has no +, and the JSON number loses the sign
		{".attractor", "attractor:\n", "attractr:\n", refused},
		{".attractor", every, "trench: a\nattractor: []\n", refused},
		{".maxRemoval", "75", "100", taken},
		{".maxRemoval", "75", "'100'", taken},
		{".maxRemoval", "75", "101", refused},
		{".maxRemoval", "75", "0", refused},
		{".confirm", "v1f3a5b7c", "t00000000,v1f3a5b7c", taken},
		{".confirm", "v1f3a5b7c", "1f3a5b7c", refused},
		{".confirm", "v1f3a5b7c", "", refused},
		{".onePodAtATime", "true", "false", taken},
		{".onePodAtATime", "true", "1", refused},
		{".streams", every[strings.Index(every, "streams:"):], "streams: []\n", taken},
		{".streams", every[strings.Index(every, "streams:"):], "streams:\n", refused},
		{".streams", every[strings.Index(every, "streams:"):], "streams: {}\n", refused},
		{"attractor.name", "  name: attractor-a-1\n", "", refused},
		{"attractor.name", "attractor-a-1", "a/b", refused},
		{"attractor.interface", "interface: ext-vlan", "interface: eth0.100", taken},
		{"attractor.interface", "interface: ext-vlan", "interface: abcdefghijklmno", taken},
		{"attractor.interface", "interface: ext-vlan", "interface: abcdefghijklmnop", refused},
		{"attractor.interface", "interface: ext-vlan", "interface: 1234567890123456", onlySchema}, // a number in JSON,
		{"attractor.interface", "interface: ext-vlan", "interface: e th", refused},
		{"attractor.interface", "interface: ext-vlan", "interface: eth*", refused},
		{"attractor.interface", "interface: ext-vlan", "interface: ..", onlySchema},
		{"attractor.vips", `[20.0.0.1/32, "2000::1/128"]`, "20.0.0.1/32", refused},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 20.0.0.1/32, "`, refused},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 30.0.0.0/24, 30.0.1.0/25, "`, taken},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, "2000::2:0/112", "2000::1.2.3.4/128", "`, taken},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 20.0.0.2, "`, refused},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 0.0.0.0/0, "`, refused},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, "::/0", "`, refused},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 20.0.0.256/32, "`, refused},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 20.0.0.2/33, "`, refused},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 20.0.0.02/32, "`, refused},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, "2000::2/129", "`, refused},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 17, "`, refused},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, null, "`, refused},
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 20.0.0.0/24, "`, onlySchema},     // overlap
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, "2000:0::1/128", "`, onlySchema}, // another spelling
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 30.0.0.1/24, "`, onlySchema},     // host bits set
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 127.0.0.1/32, "`, onlySchema},    // loopback
		{"attractor.gateways", "  gateways:", "  gateways: {}\n  gatways:", refused},
		{"gateway.name", "name: gw4", "name: BFD", refused},
		{"gateway.name", "name: gw4, ", "", refused},
		{"gateway.name", "name: gw4", "name: gw6", onlySchema}, // twice
		{"gateway.address", "169.254.100.150", "gateway.example.org", refused},
		{"gateway.address", "169.254.100.150", "169.254.100.150/24", refused},
		{"gateway.address", "169.254.100.150", "'fe80::1%eth0'", refused},
		{"gateway.address", "169.254.100.150", "224.0.0.1", onlySchema},
		{"gateway.protocol", "protocol: bgp", "protocol: static", onlySchema}, // conflicts with trench.BGP fields
		{"gateway.protocol", "protocol: bgp", "protocol: ospf", refused},
		{"gateway.protocol", "protocol: bgp", "protocol: BGP", refused},
		{"gateway.protocol", "protocol: bgp", `protocol: "bgp"`, taken},
		{"gateway.localASN", "localASN: 64512", "localASN: 1", taken},
		{"gateway.localASN", "localASN: 64512", "localASN: '64512'", taken},
		{"gateway.localASN", "localASN: 64512", "localASN: 0", refused},
		{"gateway.localASN", "localASN: 64512", "localASN: 1.5", refused},
		{"gateway.localASN", "localASN: 64512", "localASN: 4294967295", refused},
		{"gateway.localASN", "localASN: 64512", "localASN: 4294967294", taken},
		{"gateway.localASN", "localASN: 64512", "localASN: 23456", refused},
		{"gateway.localASN", "localASN: 64512", "localASN: 65535", refused},
		{"gateway.localASN", "localASN: 64512", "localASN: 65535", refused},
		{"gateway.localASN", "localASN: 64512", "localASN: AS64512", refused},
		{"gateway.localASN", "localASN: 64512", "localASN: '0064512'", refused},
		{"gateway.localASN", "localASN: 64512", "localASN: 0xFC00", onlySchema}, // a number in JSON
		{"gateway.localASN", "localASN: 64512", "localASN: 64512.0", onlySchema},
		{"gateway.localASN", "localASN: 64512", "localASN: '4294967295'", onlySchema}, // no bounds within quotes
		{"gateway.remoteASN", "remoteASN: 64513", "remoteASN: -1", refused},
		{"gateway.remoteASN", "remoteASN: 64513", "remoteASN: 64512", taken},
		{"gateway.localPort", "localPort: 179", "localPort: 0", refused},
		{"gateway.localPort", "localPort: 179", "localPort: 65535", taken},
		{"gateway.remotePort", "remotePort: 1179", "remotePort: 65536", refused},
		{"gateway.remotePort", "remotePort: 1179", "remotePort: null", refused},
		{"gateway.holdTime", "holdTime: 9s", "holdTime: 9", refused},
		{"gateway.holdTime", "holdTime: 9s", "holdTime: 9 s", refused},
		{"gateway.holdTime", "holdTime: 9s", "holdTime: 0h1m30.0s", taken},
		{"gateway.holdTime", "holdTime: 9s", "holdTime: +3.s", taken},
		{"gateway.holdTime", "holdTime: 9s", "holdTime: -9s", refused},
		{"gateway.holdTime", "holdTime: 9s", "holdTime: 2s", onlySchema},
		{"gateway.bfd", "bfd: {minTx: 100ms, minRx: 200ms, multiplier: 5}", "bfd: {}", taken},
		{"gateway.bfd", "bfd: {minTx: 100ms, minRx: 200ms, multiplier: 5}", "bfd:", refused},
		{"gateway.bfd", "bfd: {minTx: 100ms, minRx: 200ms, multiplier: 5}", "bfd: true", refused},
		{"gateway.passwordFile", "/etc/key", "key", refused},
		{"gateway.passwordFile", "/etc/key", "/", refused},
		{"gateway.passwordFile", "/etc/key", "''", refused},
		{"gateway.passwordFile", "/etc/key", "/..", refused},
		{"bfd.minTx", "minTx: 100ms", "minTx: 100000µs", taken},
		{"bfd.minTx", "minTx: 100ms", "minTx: fast", refused},
		{"bfd.minTx", "minTx: 100ms", "minTx: 1ms", onlySchema},
		{"bfd.minRx", "minRx: 200ms", "minRx: .2s", taken},
		{"bfd.minRx", "minRx: 200ms", "minRX: 200ms", refused},
		{"bfd.multiplier", "multiplier: 5", "multiplier: 256", refused},
		{"bfd.multiplier", "multiplier: 5", "multiplier: 255", taken},
		{"stream.name", "name: s1, ", "", refused},
		{"stream.vips", "vips: [20.0.0.1/32], ", "vips: [], ", refused},
		{"stream.vips", "vips: [20.0.0.1/32], ", "", refused},
		{"stream.vips", "vips: [20.0.0.1/32], ", "vips: [20.0.0.9/32], ", onlySchema}, // not a VIP of the attractor
		{"stream.minReady", "minReady: 2", "minReady: 0", refused},
		{"stream.minReady", "minReady: 2", "minReady: 1000000", taken},
		{"stream.minReady", "minReady: 2", "minReady: 1000001", refused},
		{"stream.check", firstCheck, "", refused},
		{"stream.check", "check: {grpc: {port: 9090, service: pkg.Service, tls: {insecure: true}}}", "", taken},
		{"stream.check", "check: {grpc: {port: 9090, service: pkg.Service, tls: {insecure: true}}}", "targets: []", taken},
		{"stream.check", "check: {grpc: {port: 9090, service: pkg.Service, tls: {insecure: true}}}", "check:", refused},
		{"gateway.ttlSecurity", "ttlSecurity: true", "ttlSecurity: false", taken},
		{"gateway.interface", `{name: gw6, address: "fd00:100::150"}`, "{name: gw6}", onlySchema},
		{"gateway.interface", `address: "fd00:100::150"`, "interface: ext-vlan", taken},
		{"gateway.interface", `address: "fd00:100::150"`, "interface: eth0", taken},
		{"gateway.interface", `address: "fd00:100::150"`, "interface: eth*", refused},
		{"gateway.keepaliveTime", "keepaliveTime: 1s", "keepaliveTime: 4s", onlySchema},
		{"gateway.keepaliveTime", "keepaliveTime: 1s", "keepaliveTime: 0s", taken},
		{"gateway.connectRetryTime", "connectRetryTime: 9s", "connectRetryTime: 9", refused},
		{"gateway.families", "families: both, multihop", "families: ipv6, multihop", taken},
		{"gateway.families", "families: both, multihop", "families: all, multihop", refused},
		{"gateway.multihop", "multihop: 0", "multihop: 2", onlySchema}, // with both families
		{"gateway.multihop", "multihop: 0", "multihop: 256", refused},
		{"gateway.ttlSecurity", "ttlSecurity: true", "ttlSecurity: 1", refused},
		{"attractor.policies", "policies:", "policies: []\n  policy:", refused},
		{"policy.vips", "- {vips: ['20.0.0.1/32'], ready", "- {vips: [], ready", refused},
		{"policy.vips", "- {vips: ['20.0.0.1/32'], ready", "- {vips: [20.0.0.9/32], ready", onlySchema}, // of no attractor
		{"policy.vips", "- {vips: ['20.0.0.1/32'], ready", "- {ready", onlySchema},                      // two for all others
		{"policy.ready", "- {ready: {", "- {ready: [], draining: {", refused},
		{"policy.draining", "draining: {med: 60}", "draining: {}", taken},
		{"policy.draining", "draining: {med: 60}", "draining: 60", refused},
		{"policy.unknown", "unknown: {med: 70}", "unknown: {mde: 70}", refused},
		{"policy.backup", "backup: {med: 80}", "backup: {med: 80, prepend: '2'}", taken},
		{"attributes.communities", "64512:1:2", "64512:1:2:3", refused},
		{"attributes.communities", "64512:1:2", "65536:2", onlySchema},
		{"attributes.communities", "64512:1:2", "65535:0", onlySchema},
		{"attributes.communities", "64512:1:2", "4200000000:4:7", onlySchema},
		{"attributes.med", "med: 60", "med: 0", taken},
		{"attributes.med", "med: 60", "med: '0'", taken},
		{"attributes.med", "med: 60", "med: 4294967296", refused},
		{"attributes.prepend", "prepend: 3", "prepend: 11", refused},
		{"attributes.localPreference", "localPreference: 200", "localPreference: -1", refused},
		{"attributes.targetBandwidth", "targetBandwidth: 10", "targetBandwidth: 101", refused},
		{"stream.lastResort", "drainTime: 7s", "drainTime: 7s, lastResort: depreferred", taken},
		{"stream.lastResort", "drainTime: 7s", "drainTime: 7s, lastResort: withdrawn", taken},
		{"stream.lastResort", "drainTime: 7s", "drainTime: 7s, lastResort: announced", refused},
		{"stream.drainTime", "drainTime: 7s", "drainTime: 0s", taken},
		{"stream.drainTime", "drainTime: 7s", "drainTime: +0.0s", taken},
		{"stream.drainTime", "drainTime: 7s", "drainTime: 60m", taken},
		{"stream.drainTime", "drainTime: 7s", "drainTime: 0", refused},
		{"stream.drainTime", "drainTime: 7s", "drainTime: '0'", refused},
		{"stream.drainTime", "drainTime: 7s", "drainTime: -0s", refused},
		{"stream.drainTime", "drainTime: 7s", "drainTime: 61m", onlySchema},
		{"stream.maglev", "maglev: {size: 10007, seed: 7}", "maglev: {}", taken},
		{"stream.maglev", "maglev: {size: 10007, seed: 7}", "maglev:", refused},
		{"stream.maglev", "maglev: {size: 10007, seed: 7}", "maglev: 10007", refused},
		{"stream.maglev", "maglev: {size: 10007, seed: 7}", "maglev: {size: 10007, sed: 7}", refused},
		{"maglev.size", "size: 10007", "size: 101", taken},
		{"maglev.size", "size: 10007", "size: 131071", taken},
		{"maglev.size", "size: 10007", "size: '131071'", taken},
		{"maglev.size", "size: 10007", "size: 100", refused},
		{"maglev.size", "size: 10007", "size: 131072", refused},
		{"maglev.size", "size: 10007", "size: 10008", onlySchema}, // not a prime number
		{"maglev.seed", "seed: 7", "seed: 1", taken},
		{"maglev.seed", "seed: 7", "seed: 4294967295", taken},
		{"maglev.seed", "seed: 7", "seed: 0", refused},
		{"maglev.seed", "seed: 7", "seed: 4294967296", refused},
		{"stream.match", everyMatch, "", taken},
		{"stream.match", everyMatch, "match: [], ", refused},
		{"stream.match", everyMatch, "match:\n, ", refused},
		{"stream.match", everyMatch, "match: {protocols: [tcp], ports: [80]}, ", refused},
		{"stream.match", everyMatch, "match: [{protocols: [tcp], ports: [80]}, {protocols: [tcp], ports: [80]}], ", refused},
		{"match.ports", "protocols: [udp], ports: [53]", "protocols: [tcp], ports: [80]", onlySchema}, // twice
		{"stream.match", everyMatch, "match: [{protocols: [tcp], ports: [" + manyPorts(100) + "]}], ", taken},
		{"stream.match", everyMatch, "match: [{protocols: [tcp], ports: [" + manyPorts(101) + "]}], ", onlySchema},
		{"stream.earlier", everyMatch, "earlier: [{targets: [a, b.c]}, {targets: [d]}], ", taken},
		{"stream.earlier", everyMatch, "earlier: [], ", taken},
		{"stream.earlier", everyMatch, "earlier: {targets: [a]}, ", refused},
		{"stream.earlier", everyMatch, "earlier: [" + strings.Repeat("{targets: [a]}, ", 5) + "], ", refused},
		{"generation.targets", everyMatch, "earlier: [{}], ", refused},
		{"generation.targets", everyMatch, "earlier: [{targets: []}], ", refused},
		{"generation.targets", everyMatch, "earlier: [{targets: [a/b]}], ", refused},
		{"match.protocols", "protocols: [tcp], ", "", refused},
		{"match.protocols", "protocols: [tcp]", "protocols: tcp", refused},
		{"match.protocols", "protocols: [tcp]", "protocols: []", refused},
		{"match.protocols", "protocols: [tcp]", "protocols: [tcp, udp, sctp]", taken},
		{"match.protocols", "protocols: [tcp]", "protocols: [tcp, tcp]", refused},
		{"match.protocols", "protocols: [tcp]", "protocols: [TCP]", refused},
		{"match.protocols", "protocols: [tcp]", "protocols: [6]", refused},
		{"match.ports", ", ports: [80, 443]", "", refused},
		{"match.ports", "ports: [80, 443]", "ports: 80", refused},
		{"match.ports", "ports: [80, 443]", "ports: []", refused},
		{"match.ports", "ports: [80, 443]", "ports: [1, '65535']", taken},
		{"match.ports", "ports: [80, 443]", "ports: [0]", refused},
		{"match.ports", "ports: [80, 443]", "ports: [65536]", refused},
		{"match.ports", "ports: [80, 443]", "ports: [80-90]", refused},
		{"match.ports", "ports: [80, 443]", "ports: [80, 80]", refused},
		{"stream.targets", "targets: [{", "targets: [], targts: [{", refused},
		{"stream.targets", `targets: [{name: t1, ips: [172.16.1.1, "fd00::1"]}]`, "targets: []", taken},
		{"check.tcp", "tcp: {port: 5000}, ", "", refused},
		{"check.tcp", "tcp: {port: 5000}", "http: {port: 5000}", taken},
		{"check.tcp", "tcp: {port: 5000}", "tcp: {port: 5000}, http: {port: 5000}", refused},
		{"check.http", "http: {port: 8080,", "http: {", refused},
		{"check.http", "tcp: {port: 5000}", "http:", refused},
		{"check.grpc", "tcp: {port: 5000}", "grpc: {port: 5000}", taken},
		{"check.grpc", "tcp: {port: 5000}", "grpc: {}", refused},
		{"check.grpc", "grpc: {port: 9090", "grpc: {port: 9090}, http: {port: 9090", refused},
		{"check.udp", "tcp: {port: 5000}", "udp: {port: 5000, send: x}", taken},
		{"check.udp", "tcp: {port: 5000}", "udp: {port: 5000}", refused},
		{"check.dns", "tcp: {port: 5000}", "dns: {port: 5000, name: .}", taken},
		{"check.dns", "tcp: {port: 5000}", "dns: {port: 5000}", refused},
		{"check.ntp", "tcp: {port: 5000}", "ntp: {port: 5000}", taken},
		{"check.ntp", "tcp: {port: 5000}", "ntp: {}", refused},
		{"check.sctp", "tcp: {port: 5000}", "sctp: {port: 5000}", taken},
		{"check.sctp", "tcp: {port: 5000}", "tcp: {port: 5000}, sctp: {port: 5000}", refused},
		{"check.any", "any: [", "all: [{tcp: {port: 1}}], any: [", refused},
		{"check.any", "{udp: {port: 9, send: x}}", "{udp: {port: 9, send: x}, warmup: 1s}", refused},
		{"check.any", "{udp: {port: 9, send: x}}", "{any: [{tcp: {port: 1}}]}", refused},
		{"check.any", "{udp: {port: 9, send: x}}", "{}", refused},
		{"check.any", "{udp: {port: 9, send: x}}", "{tcp: {port: 1}}, {tcp: {port: 2}}, {tcp: {port: 3}}", taken},
		{
			"check.any", "{udp: {port: 9, send: x}}",
			"{tcp: {port: 1}}, {tcp: {port: 2}}, {tcp: {port: 3}}, {tcp: {port: 4}}", refused,
		},
		{"check.all", "[{tcp: {port: 5001}}]", "[]", refused},
		{"check.all", "[{tcp: {port: 5001}}]", "{tcp: {port: 5001}}", refused},
		{"check.all", "[{tcp: {port: 5001}}]", "[{tcp: {port: 5001}}, {tcp: {port: 5001}}]", refused},
		{"check.all", "[{tcp: {port: 5001}}]", "[{tcp: {port: 1}}, {tcp: {port: 1}, interval: 5s}]", onlySchema},
		{"check.all", "interval: 5s", "interval: 400ms, timeout: 500ms", onlySchema},
		{"check.warmup", "warmup: 30s", "warmup: 0s", taken},
		{"check.warmup", "warmup: 30s", "warmup: 30", refused},
		{"check.warmup", "warmup: 30s", "warmup: 2h", onlySchema},
		{"single.tcp", "tcp: {port: 5001}", "tcp: {}", refused},
		{"single.http", "http: {port: 8081}", "http: {port: 8081}, tcp: {port: 1}", refused},
		{"single.http", "http: {port: 8081}, ", "", refused},
		{"single.grpc", "tcp: {port: 5001}", "grpc: {port: 1}", taken},
		{"single.udp", "udp: {port: 9, send: x}", "udp: {port: 9}", refused},
		{"single.dns", "tcp: {port: 5001}", "dns: {port: 53, name: .}", taken},
		{"single.ntp", "tcp: {port: 5001}", "ntp: {port: 123}", taken},
		{"single.sctp", "tcp: {port: 5001}", "sctp: {port: 1}", taken},
		{"single.interval", "interval: 3s", "interval: 2h", onlySchema},
		{"single.fastInterval", "fastInterval: 150ms", "fastInterval: 4s", onlySchema},
		{"single.timeout", "timeout: 200ms", "timeout: 4s", onlySchema},
		{"single.rise", "rise: 3", "rise: 0", refused},
		{"single.fall", "fall: 5", "fall: 101", refused},
		{"check.fastInterval", "fastInterval: 100ms", "fastInterval: 2s", taken},
		{"check.fastInterval", "fastInterval: 100ms", "fastInterval: 100", refused},
		{"check.fastInterval", "fastInterval: 100ms", "fastInterval: 3s", onlySchema},
		{"check.fastInterval", "fastInterval: 100ms", "fastInterval: 1ms", onlySchema},
		{"check.families", "families: ipv6", "families: IPv6", refused},
		{"check.families", "families: ipv6", "families: 6", refused},
		{"check.families", "families: ipv6", "families: both", taken},
		{"check.families", "families: ipv6, source: [\"fd00::9\"]", "families: ipv4", onlySchema}, // target without IPv4
		{"check.via", "families: ipv6", "families: ipv6, via: address", taken},
		{"check.via", "families: ipv6", "families: ipv6, via: both", refused},
		{"check.source", `["fd00::9"]`, "['::1']", onlySchema},
		{"check.source", `["fd00::9"]`, "[]", refused},
		{"check.source", `["fd00::9"]`, "'fd00::9'", refused},
		{"check.source", `["fd00::9"]`, "['fd00::9', 'fd00::9']", refused},
		{"check.source", `["fd00::9"]`, "['fd00::9', '10.0.0.1', 'fd00::8']", refused},
		{"check.source", `["fd00::9"]`, "['fd00::9', 'fd00::8']", onlySchema},  // two of a family
		{"check.source", `["fd00::9"]`, "['fd00::9', '10.0.0.1']", onlySchema}, // the family is not checked
		{"check.source", `["fd00::9"]`, "['ff02::1']", onlySchema},
		{"check.source", `["fd00::9"]`, "['2000::1']", onlySchema}, // in a VIP
		{"http.port", "http: {port: 8080", "http: {port: 0", refused},
		{"http.path", `"/healthz?full=1"`, "/", taken},
		{"http.path", `"/healthz?full=1"`, "/a%20b//c|d~", taken},
		{"http.path", `"/healthz?full=1"`, "healthz", refused},
		{"http.path", `"/healthz?full=1"`, `""`, refused},
		{"http.path", `"/healthz?full=1"`, `"/a b"`, refused},
		{"http.path", `"/healthz?full=1"`, `"/a#b"`, refused},
		{"http.path", `"/healthz?full=1"`, `"/ä"`, refused},
		{"http.path", `"/healthz?full=1"`, "/" + strings.Repeat("a", 999), taken},
		{"http.path", `"/healthz?full=1"`, "/" + strings.Repeat("a", 1000), refused},
		{"http.path", `"/healthz?full=1"`, "/%zz", onlySchema},
		{"http.host", `"example.org:8443"`, "1.5", taken},
		{"http.host", `"example.org:8443"`, "10.0.0.1", taken},
		{"http.host", `"example.org:8443"`, "'[fd00::1]:80'", taken},
		{"http.host", `"example.org:8443"`, "'[fd00::1]'", taken},
		{"http.host", `"example.org:8443"`, "'fd00::1'", refused},
		{"http.host", `"example.org:8443"`, "'[example.org]:80'", refused},
		{"http.host", `"example.org:8443"`, "'example.org:'", refused},
		{"http.host", `"example.org:8443"`, "'example.org:080'", refused},
		{"http.host", `"example.org:8443"`, "':80'", refused},
		{"http.host", `"example.org:8443"`, "'example.org:65536'", refused},
		{"http.host", `"example.org:8443"`, `"a\r\nb: c"`, refused},
		{"http.host", `"example.org:8443"`, "büro.example", refused},
		{"http.status", `"200-299,404"`, "200", taken},
		{"http.status", `"200-299,404"`, "'200'", taken},
		{"http.status", `"200-299,404"`, "200-599", taken},
		{"http.status", `"200-299,404"`, "199", refused},
		{"http.status", `"200-299,404"`, "600", refused},
		{"http.status", `"200-299,404"`, "200.5", refused},
		{"http.status", `"200-299,404"`, "200-", refused},
		{"http.status", `"200-299,404"`, `"200, 404"`, refused},
		{"http.status", `"200-299,404"`, "2xx", refused},
		{"http.status", `"200-299,404"`, "[200]", refused},
		{"http.status", `"200-299,404"`, `"` + strings.Repeat("200,", 19) + `200"`, taken},
		{"http.status", `"200-299,404"`, `"` + strings.Repeat("200,", 20) + `200"`, refused},
		{"http.status", `"200-299,404"`, "299-200", onlySchema},
		{"http.status", `"200-299,404"`, "0x12c", onlySchema}, // a number in JSON
		{"http.body", `"^ok$"`, "true", taken},
		{"http.body", `"^ok$"`, `"a\nb"`, taken},
		{"http.body", `"^ok$"`, "''", refused},
		{"http.body", `"^ok$"`, "null", refused},
		{"http.body", `"^ok$"`, strings.Repeat("ä", 1000), taken},
		{"http.body", `"^ok$"`, strings.Repeat("a", 1001), refused},
		{"http.body", `"^ok$"`, "'a('", onlySchema},
		{"http.method", "method: POST", "method: OPTIONS", taken},
		{"http.method", "method: POST", "method: post", refused},
		{"http.method", "method: POST", "method: CONNECT", refused},
		{"http.method", "method: POST", "method: HEAD", onlySchema}, // conflicts with body
		{"http.headers", `["Accept: text/plain"]`, `["X-A:1", "X-A: 2"]`, taken},
		{"http.headers", `["Accept: text/plain"]`, "['X-A: 1', 'X-A: 1']", refused},
		{"http.headers", `["Accept: text/plain"]`, `["X-A: 1\r\nX-B: 2"]`, refused},
		{"http.headers", `["Accept: text/plain"]`, "['X A: 1']", refused},
		{"http.headers", `["Accept: text/plain"]`, "[]", refused},
		{
			"http.headers", `["Accept: text/plain"]`,
			"['A: 1', 'A: 2', 'A: 3', 'A: 4', 'A: 5', 'A: 6', 'A: 7', 'A: 8', 'A: 9']", refused,
		},
		{"http.headers", `["Accept: text/plain"]`, "['Host: a']", onlySchema},
		{"http.headers", `["Accept: text/plain"]`, "['content-length: 1']", onlySchema},
		{"dns.port", "dns: {port: 53", "dns: {port: 0", refused},
		{"dns.name", "name: example.org, type", "name: _sip._udp.example.org., type", taken},
		{"dns.name", "name: example.org, type", "name: a..b, type", refused},
		{"dns.name", "name: example.org, type", "name: " + strings.Repeat("a", 64) + ", type", refused},
		{"dns.name", "name: example.org, type", "name: " + strings.Repeat("a.", 126) + "a, type", taken},
		{"dns.name", "name: example.org, type", "name: " + strings.Repeat("a.", 127) + "a, type", onlySchema},
		{"dns.name", "name: example.org, type", "name: 'a b', type", refused},
		{"dns.type", "type: AAAA", "type: SRV", taken},
		{"dns.type", "type: AAAA", "type: ANY", refused},
		{"dns.rcode", "[NXDOMAIN]", "[NOERROR, SERVFAIL]", taken},
		{"dns.rcode", "[NXDOMAIN]", "[NOERROR, NOERROR]", refused},
		{"dns.rcode", "[NXDOMAIN]", "NOERROR", refused},
		{"dns.rcode", "[NXDOMAIN]", "[OK]", refused},
		{"dns.answer", `"^fd"`, "'a('", onlySchema},
		{"dns.transport", "transport: tcp", "transport: tls", refused},
		{"dns.recursion", "recursion: true", "recursion: 'false'", taken},
		{"udp.port", "udp: {port: 5060", "udp: {port: 65536", refused},
		{"udp.send", `"hex:00ff"`, "ping", taken},
		{"udp.send", `"hex:00ff"`, "hex:0", onlySchema},
		{"udp.send", `"hex:00ff"`, "''", refused},
		{"udp.send", `"hex:00ff"`, strings.Repeat("a", 1001), refused},
		{"udp.send", `"hex:00ff"`, strings.Repeat("ä", 501), onlySchema}, // 1002 bytes
		{"udp.expect", "expect: pong", `expect: "a\nb"`, taken},
		{"udp.expect", "expect: pong", "expect: 'hex:xy'", onlySchema},
		{"ntp.port", "ntp: {port: 123", "ntp: {port: 123456", refused},
		{"ntp.maxDistance", "maxDistance: 2s", "maxDistance: 20s", onlySchema},
		{"ntp.maxDistance", "maxDistance: 2s", "maxDistance: 2", refused},
		{"sctp.port", "sctp: {port: 2905", "sctp: {port: -1", refused},
		{"http.tls", fullTLS, "tls: {}", taken},
		{"http.tls", fullTLS, "tls:", refused},
		{"http.tls", fullTLS, "tls: true", refused},
		{"grpc.port", "grpc: {port: 9090", "grpc: {port: '9090'", taken},
		{"grpc.port", "grpc: {port: 9090, ", "grpc: {", refused},
		{"grpc.service", "pkg.Service", "vip/20.0.0.1/32", taken},
		{"grpc.service", "pkg.Service", "12", taken},
		{"grpc.service", "pkg.Service", "''", refused},
		{"grpc.service", "pkg.Service", "a b", refused},
		{"grpc.service", "pkg.Service", strings.Repeat("a", 200), taken},
		{"grpc.service", "pkg.Service", strings.Repeat("a", 201), refused},
		{"grpc.tls", "tls: {insecure: true}", "tls: {}", taken},
		{"grpc.tls", "tls: {insecure: true}", "tls: []", refused},
		{"tls.serverName", "sni.example.org", "'fd00::1'", taken},
		{"tls.serverName", "sni.example.org", "sni/example", refused},
		{"tls.serverName", "sni.example.org", "''", refused},
		{"tls.caFile", "/etc/ca.pem", "ca.pem", refused},
		{"tls.caFile", "/etc/ca.pem", `"/\n"`, taken},
		{"tls.caFile", "insecure: false", "insecure: true", onlySchema}, // conflicts with caFile
		{"tls.certFile", "certFile: /etc/c.pem", "certFile: c.pem", refused},
		{"tls.certFile", "certFile: /etc/c.pem, ", "", onlySchema}, // keyFile alone
		{"tls.keyFile", "keyFile: /etc/c.key", "keyFile: c.key", refused},
		{"tls.insecure", "insecure: false", "insecure: 'false'", taken},
		{"tls.insecure", "insecure: false", "insecure: no", refused},
		{"tls.insecure", "insecure: false", "insecure: 0", refused},
		{"tls.insecure", "insecure: false", "insecure:", refused},
		{"tls.insecure", "insecure: false", "insecure: False", onlySchema}, // false in JSON
		{"target.terminating", "terminating: true", "terminating: false", taken},
		{"target.terminating", "terminating: true", "terminating: yes", refused},
		{"target.terminating", "terminating: true", "terminating: {}", refused},
		{"check.interval", "interval: 2s", "interval: soon", refused},
		{"check.interval", "interval: 2s", "interval: 2h", onlySchema},
		{"check.timeout", "timeout: 300ms", "timeout: 300", refused},
		{"check.timeout", "timeout: 300ms", "timeout: 3s", onlySchema},
		{"check.rise", "rise: 1", "rise: 101", refused},
		{"check.rise", "rise: 1", "rise: 100", taken},
		{"check.fall", "fall: 4", "fall: 0", refused},
		{"check.fall", "fall: 4", "fall: '4'", taken},
		{"tcp.port", "{port: 5000}", "{}", refused},
		{"tcp.port", "{port: 5000}", "{port: http}", refused},
		{"target.name", "name: t1, ", "", refused},
		{"target.ips", `[172.16.1.1, "fd00::1"]`, "[]", refused},
		{"target.ips", `[172.16.1.1, "fd00::1"]`, "[172.16.1.1, 'fd00::1', 172.16.1.2]", refused},
		{"target.ips", `[172.16.1.1, "fd00::1"]`, "[172.16.1.1, 172.16.1.1]", refused},
		{"target.ips", `[172.16.1.1, "fd00::1"]`, "['fd00::1.2.3.4']", taken},
		{"target.ips", `[172.16.1.1, "fd00::1"]`, "[127.0.0.1, '::1']", taken},
		{"target.ips", `[172.16.1.1, "fd00::1"]`, "[172.16.1.1, 172.16.1.2]", onlySchema}, // two of a family
		{"target.ips", `[172.16.1.1, "fd00::1"]`, "[20.0.0.1]", onlySchema},               // in a VIP
	} {
		tried[tt.field] = true
		if !strings.Contains(every, tt.old) {
			t.Errorf("%q is not in the file to spoil", tt.old)
		}
		file := strings.Replace(every, tt.old, tt.new, 1)
		_, err := Parse("f", []byte(file), trench.DefaultDefaults())
		if (err == nil) != (tt.want == taken) {
			t.Errorf("%s, %q: the reader says %v", tt.field, tt.new, err)
		}
		x, err := instance([]byte(file))
		if err != nil {
			t.Errorf("%s, %q: %v", tt.field, tt.new, err)
			continue
		}
		if err := s.Validate(x); (err == nil) != (tt.want != refused) {
			t.Errorf("%s, %q: the schema says %v", tt.field, tt.new, err)
		}
	}
	for name, o := range objects() {
		for _, f := range o.fields() {
			if !tried[name+"."+f.Key] {
				t.Errorf("no example has %s.%s", name, f.Key)
			}
		}
	}
}

// FuzzSchemaTakesWhatTheReaderTakes checks that an editor never complains about a valid file.
func FuzzSchemaTakesWhatTheReaderTakes(f *testing.F) {
	for _, file := range []string{
		every, good, strings.ReplaceAll(every, "5000", "'5000'"),
		"trench: &n a\nattractor: {name: *n, vips: []}\n",
	} {
		f.Add([]byte(file))
	}
	reference, err := os.ReadFile("testdata/reference.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(reference)
	s := judge(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		if _, err := Parse("f", data, trench.DefaultDefaults()); err != nil {
			return
		}
		x, err := instance(data)
		if err != nil {
			return // without a JSON form, such as .nan for a name
		}
		if err := s.Validate(x); err != nil {
			t.Errorf("%v in\n%s", err, data)
		}
	})
}
