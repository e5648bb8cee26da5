package trench

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v4"
)

// judge is the schema on disk, as an editor takes it.
func judge(t testing.TB) *jsonschema.Schema {
	t.Helper()
	s, err := jsonschema.NewCompiler().Compile(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// instance is the JSON that an editor makes of YAML: aliases are followed, and
// scalars have the types of YAML 1.2. Not everything in YAML has a JSON form.
func instance(data []byte) (any, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return nil, err
	}
	v, err := plain(&doc)
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return jsonschema.UnmarshalJSON(bytes.NewReader(b))
}

func plain(n *yaml.Node) (v any, err error) {
	switch n.Kind {
	case yaml.DocumentNode:
		return plain(n.Content[0])
	case yaml.AliasNode:
		return plain(n.Alias)
	case yaml.SequenceNode:
		l := make([]any, len(n.Content))
		for i, c := range n.Content {
			if l[i], err = plain(c); err != nil {
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
			if m[key.Value], err = plain(n.Content[i+1]); err != nil {
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

// A file to spoil, with every field at a value that is not its default.
const every = `trench: trench-a
attractor:
  name: attractor-a-1
  vips: [20.0.0.1/32, "2000::1/128"]
  gateways:
    - {name: gw4, address: 169.254.100.150, protocol: bgp, localASN: 64512, remoteASN: 64513, localPort: 179, remotePort: 1179, holdTime: 9s, bfd: {minTx: 100ms, minRx: 200ms, multiplier: 5}, passwordFile: /etc/key}
    - {name: gw6, address: "fd00:100::150"}
streams:
  - {name: s1, vips: [20.0.0.1/32], minReady: 2, check: {tcp: {port: 5000}, interval: 2s, timeout: 300ms, rise: 1, fall: 4}, targets: [{name: t1, ips: [172.16.1.1, "fd00::1"]}]}
`

// verdict is who takes an example.
type verdict int

const (
	taken   verdict = iota // by both
	refused                // by both
	// onlySchema: what the reader refuses and a schema cannot see, since it
	// compares several fields, or is lost when YAML becomes JSON.
	onlySchema
)

func TestSchemaAndReaderAgree(t *testing.T) {
	s := judge(t)
	tried := map[string]bool{}
	for _, tt := range []struct {
		field    string // as mapping.field
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
		{".trench", "trench-a", "1e+3", onlySchema}, // a name has no +, a number has no sign left
		{".attractor", "attractor:\n", "attractr:\n", refused},
		{".attractor", every, "trench: a\nattractor: []\n", refused},
		{".streams", every[strings.Index(every, "streams:"):], "streams: []\n", taken},
		{".streams", every[strings.Index(every, "streams:"):], "streams:\n", refused},
		{".streams", every[strings.Index(every, "streams:"):], "streams: {}\n", refused},
		{"attractor.name", "  name: attractor-a-1\n", "", refused},
		{"attractor.name", "attractor-a-1", "a/b", refused},
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
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, "2000:0::1/128", "`, onlySchema}, // the same in another form
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 30.0.0.1/24, "`, onlySchema},     // bits beyond its length
		{"attractor.vips", `20.0.0.1/32, "`, `20.0.0.1/32, 127.0.0.1/32, "`, onlySchema},    // loopback
		{"attractor.gateways", "  gateways:", "  gateways: {}\n  gatways:", refused},
		{"gateway.name", "name: gw4", "name: BFD", refused},
		{"gateway.name", "name: gw4, ", "", refused},
		{"gateway.name", "name: gw4", "name: gw6", onlySchema}, // twice
		{"gateway.address", "169.254.100.150", "gateway.example.org", refused},
		{"gateway.address", "169.254.100.150", "169.254.100.150/24", refused},
		{"gateway.address", "169.254.100.150", "'fe80::1%eth0'", refused},
		{"gateway.address", "169.254.100.150", "224.0.0.1", onlySchema},
		{"gateway.protocol", "protocol: bgp", "protocol: static", refused},
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
		{"gateway.localASN", "localASN: 64512", "localASN: 4200000000", refused},
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
		{"gateway.passwordFile", "/etc/key", "/..", onlySchema},
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
		{"stream.vips", "vips: [20.0.0.1/32], ", "vips: [20.0.0.9/32], ", onlySchema}, // none of the attractor
		{"stream.minReady", "minReady: 2", "minReady: 0", refused},
		{"stream.minReady", "minReady: 2", "minReady: 1000000", taken},
		{"stream.minReady", "minReady: 2", "minReady: 1000001", refused},
		{"stream.check", "check: {tcp: {port: 5000}, interval: 2s, timeout: 300ms, rise: 1, fall: 4}, ", "", refused},
		{"stream.targets", "targets: [{", "targets: [], targts: [{", refused},
		{"stream.targets", `targets: [{name: t1, ips: [172.16.1.1, "fd00::1"]}]`, "targets: []", taken},
		{"check.tcp", "tcp: {port: 5000}, ", "", refused},
		{"check.tcp", "tcp: {port: 5000}", "http: {port: 5000}", refused},
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
		{"target.ips", `[172.16.1.1, "fd00::1"]`, "[172.16.1.1, 172.16.1.2]", onlySchema}, // two of a family
		{"target.ips", `[172.16.1.1, "fd00::1"]`, "[20.0.0.1]", onlySchema},               // in a VIP
	} {
		tried[tt.field] = true
		if !strings.Contains(every, tt.old) {
			t.Errorf("%q is not in the file to spoil", tt.old)
		}
		file := strings.Replace(every, tt.old, tt.new, 1)
		_, err := Parse("f", []byte(file), DefaultDefaults())
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
	for _, m := range mappings() {
		for _, f := range m.fields {
			if !tried[m.name+"."+f.name] {
				t.Errorf("no example has %s.%s", m.name, f.name)
			}
		}
	}
}

// mappings are all mappings of the file.
func mappings() []*mapping {
	return []*mapping{fileMapping, attractorMapping, gatewayMapping, bfdMapping, streamMapping, checkMapping, tcpMapping, targetMapping}
}

// FuzzSchemaTakesWhatTheReaderTakes: an editor must never complain of a good file.
func FuzzSchemaTakesWhatTheReaderTakes(f *testing.F) {
	for _, file := range []string{every, good, strings.ReplaceAll(every, "5000", "'5000'"), "trench: &n a\nattractor: {name: *n, vips: []}\n"} {
		f.Add([]byte(file))
	}
	reference, err := os.ReadFile("testdata/reference.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(reference)
	s := judge(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		if _, err := Parse("f", data, DefaultDefaults()); err != nil {
			return
		}
		x, err := instance(data)
		if err != nil {
			return // JSON, which the schema is about, cannot say it: .nan for a name
		}
		if err := s.Validate(x); err != nil {
			t.Errorf("%v in\n%s", err, data)
		}
	})
}
