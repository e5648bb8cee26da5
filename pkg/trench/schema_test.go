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
)

// `make generate` generates the schema for editors.
var update = flag.Bool("update", false, "write docs/trench.schema.json instead of comparing it")

const schemaFile = "../../docs/trench.schema.json"

// ordered is a JSON object whose members keep their order: the schema is read by people, too.
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

// The forms of scalars. They let pass all that the reader takes; what it refuses beyond that (a
// timeout longer than the interval) no schema can say.
const (
	byteForm     = `(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])`
	ip4Form      = `(` + byteForm + `\.){3}` + byteForm
	ip6Form      = `[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]*(` + ip4Form + `)?`
	requestForm  = `^/[!-"$-~]{0,999}$`
	hostForm     = `^([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\])(:[1-9][0-9]{0,4})?$`
	serverForm   = `^[A-Za-z0-9_.:-]{1,253}$`
	serviceForm  = `^[!-~]{1,200}$`
	codeForm     = `[2-5][0-9]{2}(-[2-5][0-9]{2})?`
	statusForm   = `^` + codeForm + `(,` + codeForm + `){0,19}$`
	durationForm = `^\+?(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+$`
)

// anyScalar are the types of a text that may look like something else: a plain 123, 1.5 or true.
var anyScalar = []string{"string", "number", "boolean"}

// forms are the definitions of scalars, by name.
var forms = ordered{
	{"name", ordered{{"type", anyScalar}, {"pattern", `^[A-Za-z0-9_.-]{1,60}$`}}},
	{"vip", ordered{{"type", "string"}, {"pattern", `^(` + ip4Form + `/([1-9]|[12][0-9]|3[0-2])|` + ip6Form + `/([1-9][0-9]?|1[01][0-9]|12[0-8]))$`}, {"examples", []string{"20.0.0.1/32", "2000::1/128"}}}},
	{"address", ordered{{"type", "string"}, {"pattern", `^(` + ip4Form + `|` + ip6Form + `)$`}, {"examples", []string{"169.254.100.150", "fd00:100::150"}}}},
	{"path", ordered{{"type", "string"}, {"pattern", `^/[\s\S]`}, {"examples", []string{"/etc/vipgate/gateway-a-1.key"}}}},
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
			meaning += " " + s.bounds() + "."
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
	s = append(s, member{"properties", properties})
	if len(m.oneOf) > 0 {
		var choice []ordered
		for _, name := range m.oneOf {
			choice = append(choice, ordered{{"required", []string{name}}})
		}
		s = append(s, member{"oneOf", choice})
	}
	if m.entails[0] != "" {
		s = append(s,
			member{"if", ordered{{"properties", ordered{{m.entails[0], ordered{{"minItems", 1}}}}}, {"required", []string{m.entails[0]}}}},
			member{"then", ordered{{"required", []string{m.entails[1]}}}})
	}
	return s
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
	case boolean: // quotes do not matter to the reader
		return ordered{{"enum", []any{true, false, "true", "false"}}}
	case text:
		switch is {
		case nameText:
			return ref("name")
		case vipText:
			return ref("vip")
		case gatewayText, targetText, sourceText:
			return ref("address")
		case protocolText:
			return ordered{{"const", "bgp"}}
		case pathText:
			return ref("path")
		case asnText:
			return ref("asn")
		case requestText:
			return ordered{{"type", "string"}, {"pattern", requestForm}}
		case hostText:
			return ordered{{"type", anyScalar}, {"pattern", hostForm}}
		case serverText:
			return ordered{{"type", anyScalar}, {"pattern", serverForm}}
		case serviceText:
			return ordered{{"type", anyScalar}, {"pattern", serviceForm}}
		case bodyText:
			return ordered{{"type", anyScalar}, {"minLength", 1}, {"maxLength", maxBody}}
		case statusText:
			return ordered{{"type", []string{"integer", "string"}}, {"minimum", 200}, {"maximum", 599}, {"pattern", statusForm}}
		case familiesText:
			return ordered{{"enum", []string{"ipv4", "ipv6", "both"}}}
		}
	}
	panic(fmt.Sprintf("no schema for %T %v", is, is))
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

func TestSchemaExplainsEveryField(t *testing.T) {
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
func TestSchemaDefaultsMatchReader(t *testing.T) {
	file := strings.Replace(strings.Replace(good, "name: gw4", "name: gw4\n      bfd: {}", 1), "name: s1", "name: s1\n    maglev: {}", 1) +
		"  - {name: s2, vips: [20.0.0.1/32], check: {http: {port: 80, tls: {}}}}\n"
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
				"stream": {"- name: s1\n", "- name: s1\n    %s: %v\n"}, "maglev": {"maglev: {", "maglev: {%s: %v"}, "check": {"check: {", "check: {%s: %v, "},
				"http": {"http: {", "http: {%s: %v, "}, "tls": {"tls: {", "tls: {%s: %v"}, "target": {"- {name: t1", "- {%s: %v, name: t1"},
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
	if len(fields) != 22 {
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
