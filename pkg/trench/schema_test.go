package trench

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	goparser "go/parser"
	"go/token"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
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

// The patterns of scalars that the reader parses by code. They let pass all that the reader takes;
// what it refuses beyond that (a timeout longer than the interval) no schema can say.
const (
	bytePattern     = `(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])`
	ip4Pattern      = `(` + bytePattern + `\.){3}` + bytePattern
	ip6Pattern      = `[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]*(` + ip4Pattern + `)?`
	durationPattern = `^\+?(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+$`
)

// anyScalar are the types of a text that may look like something else: a plain 123, 1.5 or true.
var anyScalar = []string{"string", "number", "boolean"}

// forms are the definitions of scalars, by name.
var forms = ordered{
	{"name", ordered{{"type", anyScalar}, {"pattern", nameForm.pattern.String()}}},
	{"vip", ordered{{"type", "string"}, {"pattern", `^(` + ip4Pattern + `/([1-9]|[12][0-9]|3[0-2])|` + ip6Pattern + `/([1-9][0-9]?|1[01][0-9]|12[0-8]))$`}, {"examples", []string{"20.0.0.1/32", "2000::1/128"}}}},
	{"address", ordered{{"type", "string"}, {"pattern", `^(` + ip4Pattern + `|` + ip6Pattern + `)$`}, {"examples", []string{"169.254.100.150", "fd00:100::150"}}}},
	{"path", ordered{{"type", "string"}, {"pattern", pathPattern}, {"examples", []string{"/etc/vipgate/gateway-a-1.key"}}}},
	{"duration", ordered{{"type", "string"}, {"pattern", durationPattern}}},
	{"port", numbers(port(new(uint16)))},
	{"asn", append(numbers(asn(new(uint32))), member{"not", ordered{{"enum", []uint32{23456, 65535, LoopbackASN}}}})},
}

// numbers are the numbers within bounds. Quotes do not matter to the reader.
func numbers(w number) ordered {
	return ordered{
		{"type", []string{"integer", "string"}},
		{"minimum", w.lo},
		{"maximum", w.hi},
		{"pattern", fmt.Sprintf("^[1-9][0-9]{0,%d}$", len(strconv.Itoa(int(w.hi)))-1)},
	}
}

// root is the object of the whole file.
func root() object {
	p := parser{defaults: DefaultDefaults()}
	return p.config(&Config{})
}

// objects are all objects of the file, by name.
func objects() map[string]object {
	all := map[string]object{}
	var add func(k kind)
	add = func(k kind) {
		switch k := k.(type) {
		case object:
			all[k.name] = k
			for _, f := range k.fields {
				add(f.is)
			}
		case list:
			add(k.of)
		}
	}
	add(root())
	return all
}

// descriptions reads the first paragraphs of the comments of types and their fields, by the names
// of both in lower case.
func descriptions(t *testing.T) map[string]string {
	t.Helper()
	file, err := goparser.ParseFile(token.NewFileSet(), "config.go", nil, goparser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	first := func(text string) string {
		text, _, _ = strings.Cut(text, "\n\n")
		return strings.TrimSpace(strings.ReplaceAll(text, "\n", " "))
	}
	for _, d := range file.Decls {
		d, ok := d.(*ast.GenDecl)
		if !ok || d.Tok != token.TYPE {
			continue
		}
		spec := d.Specs[0].(*ast.TypeSpec)
		of, ok := spec.Type.(*ast.StructType)
		if !ok {
			continue
		}
		name := strings.ToLower(strings.TrimSuffix(spec.Name.Name, "Check"))
		if name == "" {
			name = "check"
		}
		// A type is described as "Gateway is an external router".
		text := strings.TrimPrefix(strings.TrimPrefix(first(d.Doc.Text()), spec.Name.Name+" "), "is ")
		found[name] = strings.ToUpper(text[:1]) + text[1:]
		for _, f := range of.Fields.List {
			found[name+"."+strings.ToLower(f.Names[0].Name)] = cmp.Or(first(f.Doc.Text()), first(f.Comment.Text()))
		}
	}
	found[""] = found["config"]
	for name, text := range found {
		if field, ok := strings.CutPrefix(name, "config."); ok {
			found["."+field] = text
		}
	}
	return found
}

// description returns that of a field.
func (o object) description(texts map[string]string, f field) string {
	return cmp.Or(f.doc, texts[o.name+"."+strings.ToLower(f.name)])
}

// schema returns the JSON Schema of the reader's objects.
func schema(t *testing.T) ordered {
	t.Helper()
	texts, defs := descriptions(t), forms
	s := append(ordered{{"$schema", "https://json-schema.org/draft/2020-12/schema"}, {"title", "vipgate trench file"}}, root().schema(texts, &defs)...)
	return append(s, member{"$defs", defs})
}

// schema describes an object; those below it become definitions.
func (o object) schema(texts map[string]string, defs *ordered) ordered {
	required, properties := []string{}, ordered{}
	for _, f := range o.fields {
		if f.remedy != "" {
			required = append(required, f.name)
		}
		p, text := holds(f.is, texts, defs), o.description(texts, f)
		switch is := f.is.(type) {
		case number:
			if is.hi != asn(new(uint32)).hi {
				text += fmt.Sprintf(" %d to %d.", is.lo, is.hi)
			}
		case duration:
			p = append(p, member{"examples", []string{inUnits(is.lo), inUnits(is.hi)}})
			text += fmt.Sprintf(" %s to %s.", inUnits(is.lo), cmp.Or(strings.Replace(is.below, "interval", "the interval", 1), inUnits(is.hi)))
		}
		if initial := f.initial(); initial != nil {
			p = append(p, member{"default", initial})
		}
		if o.name == "gateway" && f.name == "name" {
			p = append(p, member{"not", ordered{{"const", "BFD"}}})
		}
		properties = append(properties, member{f.name, append(p, member{"description", text})})
	}
	s := ordered{{"description", texts[o.name]}, {"type", "object"}, {"additionalProperties", false}}
	if len(required) > 0 {
		s = append(s, member{"required", required})
	}
	s = append(s, member{"properties", properties})
	if len(o.oneOf) > 0 {
		var choice []ordered
		for _, name := range o.oneOf {
			choice = append(choice, ordered{{"required", []string{name}}})
		}
		s = append(s, member{"oneOf", choice})
	}
	if o.name == "stream" { // one with targets needs a check
		s = append(s,
			member{"if", ordered{{"properties", ordered{{"targets", ordered{{"minItems", 1}}}}}, {"required", []string{"targets"}}}},
			member{"then", ordered{{"required", []string{"check"}}}})
	}
	return s
}

// initial returns the value of a field that is left out, as it would be written; nil for none.
func (f field) initial() any {
	if f.remedy != "" {
		return nil
	}
	switch is := f.is.(type) {
	case text:
		if *is.to != "" {
			return *is.to
		}
	case boolean:
		return *is.to
	case duration:
		if *is.to != 0 {
			return inUnits(*is.to)
		}
	case number:
		return is.initial
	}
	return nil
}

func ref(name string) ordered { return ordered{{"$ref", "#/$defs/" + name}} }

// holds describes what a field or an item of a list is.
func holds(is kind, texts map[string]string, defs *ordered) ordered {
	switch is := is.(type) {
	case object:
		if !slices.ContainsFunc(*defs, func(m member) bool { return m.name == is.name }) {
			i := len(*defs)
			*defs = append(*defs, member{name: is.name}) // before those below it
			of := is.schema(texts, defs)
			(*defs)[i].value = of
		}
		return ref(is.name)
	case list:
		s := ordered{{"type", "array"}, {"items", holds(is.of, texts, defs)}}
		if is.ifEmpty != "" {
			s = append(s, member{"minItems", 1})
		}
		if is.max > 0 {
			s = append(s, member{"maxItems", is.max})
		}
		return append(s, member{"uniqueItems", true})
	case number:
		switch is.hi {
		case port(new(uint16)).hi:
			return ref("port")
		case asn(new(uint32)).hi:
			return ref("asn")
		}
		return numbers(is)
	case duration:
		return ref("duration")
	case boolean: // quotes do not matter to the reader
		return ordered{{"enum", []any{true, false, "true", "false"}}}
	case prefix:
		return ref("vip")
	case address:
		return ref("address")
	case text:
		switch is.is {
		case nameForm:
			return ref("name")
		case protocolForm:
			return ordered{{"const", "bgp"}}
		case passwordForm, authorityForm:
			return ref("path")
		case requestForm:
			return ordered{{"type", "string"}, {"pattern", requestForm.pattern.String()}}
		case bodyForm:
			return ordered{{"type", anyScalar}, {"minLength", 1}, {"maxLength", 1000}}
		case statusForm:
			return ordered{{"type", []string{"integer", "string"}}, {"minimum", 200}, {"maximum", 599}, {"pattern", statusForm.pattern.String()}}
		case familiesForm:
			return ordered{{"enum", []string{"ipv4", "ipv6", "both"}}}
		}
		return ordered{{"type", anyScalar}, {"pattern", is.is.pattern.String()}}
	}
	panic(fmt.Sprintf("no schema for %T %v", is, is))
}

func TestSchemaIsCurrent(t *testing.T) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(schema(t)); err != nil {
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
	texts := descriptions(t)
	defs := map[string]bool{"": true}
	s := schema(t)
	for _, m := range s[len(s)-1].value.(ordered) {
		defs[m.name] = true
	}
	for name, o := range objects() {
		if !defs[name] {
			t.Errorf("the schema has no %q", name)
		}
		if !strings.HasSuffix(texts[name], ".") {
			t.Errorf("%q is explained as %q", name, texts[name])
		}
		for _, f := range o.fields {
			if text := o.description(texts, f); !strings.HasSuffix(text, ".") {
				t.Errorf("%s.%s is explained as %q", name, f.name, text)
			}
		}
	}
	if want := len(objects()) + len(forms); len(defs) != want {
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
	for _, m := range objects() {
		for _, f := range m.fields {
			initial := f.initial()
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
