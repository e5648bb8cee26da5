package trench

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v4"
)

// `make generate` writes the schema for editors anew.
var update = flag.Bool("update", false, "write docs/trench.schema.json instead of comparing it")

const schemaFile = "../../docs/trench.schema.json"

// ordered is a JSON object whose members keep their order: the schema is read by
// people, too.
type ordered []member

type member struct {
	name  string
	value any
}

// MarshalJSON implements json.Marshaler.
func (o ordered) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range o {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%q:", m.name)
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(false)
		if err := e.Encode(m.value); err != nil {
			return nil, err
		}
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// The forms of scalars. They let pass all that the reader takes; what it refuses
// beyond that (a timeout longer than the interval) no schema can say.
const (
	byteForm     = `(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])`
	ip4Form      = `(` + byteForm + `\.){3}` + byteForm
	ip6Form      = `[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]*(` + ip4Form + `)?`
	durationForm = `^\+?(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+$`
)

// forms are the definitions of scalars, by name.
var forms = ordered{
	// A plain 123, 1.5 or true is a name as well.
	{"name", ordered{{"type", []string{"string", "number", "boolean"}}, {"pattern", `^[A-Za-z0-9_.-]{1,60}$`}}},
	{"vip", ordered{{"type", "string"}, {"pattern", `^(` + ip4Form + `/([1-9]|[12][0-9]|3[0-2])|` + ip6Form + `/([1-9][0-9]?|1[01][0-9]|12[0-8]))$`}, {"examples", []string{"20.0.0.1/32", "2000::1/128"}}}},
	{"address", ordered{{"type", "string"}, {"pattern", `^(` + ip4Form + `|` + ip6Form + `)$`}, {"examples", []string{"169.254.100.150", "fd00:100::150"}}}},
	{"path", ordered{{"type", "string"}, {"pattern", `^/.`}, {"examples", []string{"/etc/vipgate/gateway-a-1.key"}}}},
	{"duration", ordered{{"type", "string"}, {"pattern", durationForm}}},
	{"port", numbers(anyPort)},
	{"asn", append(numbers(anyASN), member{"not", ordered{{"enum", []uint32{23456, 65535, LoopbackASN}}}})},
}

// numbers are the numbers within bounds. Quotes do not matter to the reader.
func numbers(w whole) ordered {
	return ordered{
		{"type", []string{"integer", "string"}},
		{"minimum", w.lo},
		{"maximum", w.hi},
		{"pattern", fmt.Sprintf("^[1-9][0-9]{0,%d}$", len(strconv.Itoa(int(w.hi)))-1)},
	}
}

// schema makes the JSON Schema of the reader's tables.
func schema() ordered {
	defs := forms
	s := append(ordered{{"$schema", "https://json-schema.org/draft/2020-12/schema"}, {"title", "vipgate trench file"}}, fileMapping.schema(&defs)...)
	return append(s, member{"$defs", defs})
}

// schema describes a mapping; those below it become definitions.
func (m *mapping) schema(defs *ordered) ordered {
	required, properties := []string{}, ordered{}
	for _, f := range m.fields {
		if f.remedy != "" {
			required = append(required, f.name)
		}
		p := holds(f.is, defs)
		meaning := f.meaning
		if w, ok := f.is.(whole); ok {
			meaning += fmt.Sprintf(" %d to %d.", w.lo, w.hi)
		}
		if s, ok := f.is.(span); ok {
			p = append(p, member{"examples", []string{words(s.lo), words(s.hi)}})
			bounds := words(s.lo) + " to " + words(s.hi)
			if f.name == "timeout" {
				bounds = words(s.lo) + " to the interval"
			}
			meaning += " " + bounds + "."
		}
		if f.initial != nil {
			initial := f.initial
			if d, ok := initial.(time.Duration); ok {
				initial = words(d)
			}
			p = append(p, member{"default", initial})
		}
		if m == gatewayMapping && f.name == "name" {
			p = append(p, member{"not", ordered{{"const", "BFD"}}})
		}
		properties = append(properties, member{f.name, append(p, member{"description", meaning})})
	}
	s := ordered{{"description", m.meaning}, {"type", "object"}, {"additionalProperties", false}}
	if len(required) > 0 {
		s = append(s, member{"required", required})
	}
	return append(s, member{"properties", properties})
}

func ref(name string) ordered { return ordered{{"$ref", "#/$defs/" + name}} }

// holds describes what a field or an item of a list is.
func holds(is any, defs *ordered) ordered {
	switch is := is.(type) {
	case *mapping:
		described := false
		for _, d := range *defs {
			described = described || d.name == is.name
		}
		if !described {
			i := len(*defs)
			*defs = append(*defs, member{name: is.name}) // before those below it
			of := is.schema(defs)
			(*defs)[i].value = of
		}
		return ref(is.name)
	case list:
		s := ordered{{"type", "array"}, {"items", holds(is.of, defs)}}
		if is.min > 0 {
			s = append(s, member{"minItems", is.min})
		}
		if is.max > 0 {
			s = append(s, member{"maxItems", is.max})
		}
		return append(s, member{"uniqueItems", true})
	case whole:
		if is == anyPort {
			return ref("port")
		}
		return numbers(is)
	case span:
		return ref("duration")
	case text:
		switch is {
		case nameText:
			return ref("name")
		case vipText:
			return ref("vip")
		case gatewayText, targetText:
			return ref("address")
		case protocolText:
			return ordered{{"const", "bgp"}}
		case pathText:
			return ref("path")
		case asnText:
			return ref("asn")
		}
	}
	panic(fmt.Sprintf("nobody knows the schema of %T %v", is, is))
}

func TestTheSchemaIsThatOfTheReader(t *testing.T) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(schema()); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(schemaFile, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	old, err := os.ReadFile(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(old, b.Bytes()) {
		t.Errorf("%s is stale: run make generate", schemaFile)
	}
}

// judge is the schema on disk, as an editor takes it.
func judge(t *testing.T) *jsonschema.Schema {
	t.Helper()
	s, err := jsonschema.NewCompiler().Compile(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// instance is the JSON that an editor makes of YAML: aliases are followed, and
// scalars have the types of YAML 1.2.
func instance(t *testing.T, data string) any {
	t.Helper()
	var v any
	if err := yaml.Unmarshal([]byte(data), &v); err != nil {
		t.Fatalf("%v in\n%s", err, data)
	}
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatalf("%v in\n%s", err, data)
	}
	x, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	return x
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
		{"", "trench: trench-a\n", "trench: trench-a\n? [a]\n: b\n", refused},
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
		if strings.Contains(tt.new, "? [a]") {
			continue // no JSON has such a name
		}
		if err := s.Validate(instance(t, file)); (err == nil) != (tt.want != refused) {
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

func TestEveryFieldIsExplainedAndEveryMappingIsInTheSchema(t *testing.T) {
	defs := map[string]bool{"": true}
	for _, m := range schema()[len(schema())-1].value.(ordered) {
		defs[m.name] = true
	}
	for _, m := range mappings() {
		if !defs[m.name] {
			t.Errorf("the schema has no %q", m.name)
		}
		for _, f := range append(m.fields, field{name: m.name, meaning: m.meaning}) {
			if !strings.HasSuffix(f.meaning, ".") {
				t.Errorf("%s.%s is explained as %q", m.name, f.name, f.meaning)
			}
		}
	}
	if want := len(mappings()) + len(forms); len(defs) != want {
		t.Errorf("the schema has %d definitions, want %d", len(defs), want)
	}
}

// What the schema calls a default, the reader takes for a field that is left out.
func TestDefaultsOfTheSchemaAreThoseOfTheReader(t *testing.T) {
	file := strings.Replace(good, "name: gw4", "name: gw4\n      bfd: {}", 1)
	left, err := Parse("f", []byte(file), DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	var fields []string
	for _, m := range mappings() {
		for _, f := range m.fields {
			initial := f.initial
			if d, ok := initial.(time.Duration); ok {
				initial = words(d)
			}
			if initial == nil {
				continue
			}
			at := map[string][2]string{ // where the mapping begins in the file
				"gateway": {"name: gw4\n", "name: gw4\n      %s: %v\n"}, "bfd": {"bfd: {", "bfd: {%s: %v"},
				"stream": {"- name: s1\n", "- name: s1\n    %s: %v\n"}, "check": {"check: {", "check: {%s: %v, "},
			}[m.name]
			written, err := Parse("f", []byte(strings.Replace(file, at[0], fmt.Sprintf(at[1], f.name, initial), 1)), DefaultDefaults())
			if err != nil {
				t.Errorf("%s.%s: %v", m.name, f.name, err)
				continue
			}
			if got, want := fmt.Sprintf("%+v", shown(written)), fmt.Sprintf("%+v", shown(left)); got != want {
				t.Errorf("%s.%s: %v is not the default:\n%s\n%s", m.name, f.name, initial, got, want)
			}
			fields = append(fields, f.name)
		}
	}
	if len(fields) != 14 {
		t.Errorf("%d fields have a default: %v", len(fields), fields)
	}
}

// shown is a configuration without pointers.
func shown(c *Config) any {
	var bfd []BFD
	gateways := append([]Gateway(nil), c.Attractor.Gateways...)
	for i := range gateways {
		if gateways[i].BFD != nil {
			bfd = append(bfd, *gateways[i].BFD)
		}
		gateways[i].BFD = nil
	}
	return []any{c.Trench, c.Attractor.Name, c.Attractor.VIPs, gateways, bfd, c.Streams}
}
