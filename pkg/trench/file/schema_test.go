package file

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	goparser "go/parser"
	"go/token"
	"maps"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// `make generate` generates the schema for editors.
var update = flag.Bool("update", false, "write docs/trench.schema.json instead of comparing it")

const schemaFile = "../../../docs/trench.schema.json"

// ordered is a JSON object that preserves the order of its members, because people also read the
// schema.
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

// Patterns of scalars with a parser in the reader. They accept all valid values. A schema cannot
// express further conditions, such as a timeout of at most the interval.
const (
	bytePattern     = `(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])`
	ip4Pattern      = `(` + bytePattern + `\.){3}` + bytePattern
	ip6Pattern      = `[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]*(` + ip4Pattern + `)?`
	durationPattern = `^\+?(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+$`
)

// anyScalar lists the JSON types of a text that may look like another scalar: a plain 123, 1.5 or
// true.
var anyScalar = []string{"string", "number", "boolean"}

// scalars maps names to the definitions of scalars.
var scalars = ordered{
	{"name", ordered{{"type", anyScalar}, {"pattern", pattern(reflect.TypeFor[trench.Config](), "trench")}}},
	{"vip", ordered{
		{"type", "string"},
		{"pattern", `^(` + ip4Pattern + `/([1-9]|[12][0-9]|3[0-2])|` + ip6Pattern +
			`/([1-9][0-9]?|1[01][0-9]|12[0-8]))$`},
		{"examples", []string{"20.0.0.1/32", "2000::1/128"}},
	}},
	{"address", ordered{
		{"type", "string"},
		{"pattern", `^(` + ip4Pattern + `|` + ip6Pattern + `)$`},
		{"examples", []string{"169.254.100.150", "fd00:100::150"}},
	}},
	{"path", ordered{
		{"type", "string"},
		{"pattern", pattern(reflect.TypeFor[trench.TLSCheck](), "caFile")},
		{"examples", []string{"/etc/vipgate/gateway-a-1.key"}},
	}},
	{"duration", ordered{{"type", "string"}, {"pattern", durationPattern}}},
	{"port", numbers(1, 65535)},
	{"asn", append(numbers(1, 4294967294), member{"not", ordered{{"enum", []uint32{23456, 65535}}}})},
}

// pattern returns the pattern of a field.
func pattern(object reflect.Type, key string) string {
	fields := trench.FieldsOf(object)
	return fields[slices.IndexFunc(fields, func(f trench.Field) bool { return f.Key == key })].Pattern()
}

// numbers describes a number within bounds. The reader also accepts quoted numbers.
func numbers(lo, hi uint64) ordered {
	return ordered{
		{"type", []string{"integer", "string"}},
		{"minimum", lo},
		{"maximum", hi},
		{"pattern", fmt.Sprintf(map[bool]string{false: "^[1-9][0-9]{0,%d}$", true: "^(0|[1-9][0-9]{0,%d})$"}[lo == 0],
			len(strconv.FormatUint(hi, 10))-1)},
	}
}

// object is the type of an object of the file; name is its name in the schema, "" for the whole
// file.
type object struct {
	name string
	of   reflect.Type
}

func objectOf(t reflect.Type) object { return object{schemaName(t.Name()), t} }

// schemaName returns the name of a type in the schema.
func schemaName(goName string) string {
	name := cmp.Or(strings.TrimSuffix(goName, "Check"), goName)
	return strings.TrimPrefix(strings.ToLower(name), "config")
}

func (o object) fields() []trench.Field { return trench.FieldsOf(o.of) }

// objects returns all object types of the file by name.
func objects() map[string]object {
	all := map[string]object{}
	var add func(t reflect.Type)
	add = func(t reflect.Type) {
		switch {
		case t.Kind() == reflect.Slice, t.Kind() == reflect.Array, t.Kind() == reflect.Pointer:
			add(t.Elem())
		case t.Kind() == reflect.Struct && t != trench.VIPType && t != trench.AddressType:
			o := objectOf(t)
			all[o.name] = o
			for _, f := range o.fields() {
				add(f.Type)
			}
		}
	}
	add(reflect.TypeFor[trench.Config]())
	return all
}

// descriptions returns the first paragraphs of the comments of types and fields, by their names
// in the schema.
func descriptions(t *testing.T) map[string]string {
	t.Helper()
	var decls []ast.Decl
	for _, name := range []string{"../config.go", "../check.go"} {
		file, err := goparser.ParseFile(token.NewFileSet(), name, nil, goparser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		decls = append(decls, file.Decls...)
	}
	found := map[string]string{}
	var parts [][2]string // objects with the fields of others
	first := func(text string) string {
		text, _, _ = strings.Cut(text, "\n\n")
		return strings.TrimSpace(strings.ReplaceAll(text, "\n", " "))
	}
	for _, d := range decls {
		d, ok := d.(*ast.GenDecl)
		if !ok || d.Tok != token.TYPE {
			continue
		}
		spec := d.Specs[0].(*ast.TypeSpec)
		of, ok := spec.Type.(*ast.StructType)
		if !ok {
			continue
		}
		name := schemaName(spec.Name.Name)
		// "Gateway is an external router" becomes the description "An external router".
		text := strings.TrimPrefix(strings.TrimPrefix(first(d.Doc.Text()), spec.Name.Name+" "), "is ")
		found[name] = strings.ToUpper(text[:1]) + text[1:]
		for _, f := range of.Fields.List {
			switch {
			case len(f.Names) == 0: // embedded
				parts = append(parts, [2]string{name, schemaName(f.Type.(*ast.Ident).Name)})
			case f.Tag != nil:
				field, _, _ := strings.Cut(reflect.StructTag(strings.Trim(f.Tag.Value, "`")).Get("yaml"), ",")
				found[name+"."+field] = first(f.Doc.Text())
			}
		}
	}
	for _, part := range parts {
		for field, text := range maps.Clone(found) {
			if key, ok := strings.CutPrefix(field, part[1]+"."); ok {
				found[part[0]+"."+key] = text
			}
		}
	}
	return found
}

// schema returns the JSON Schema of the file.
func schema(t *testing.T) ordered {
	t.Helper()
	defs := scalars
	s := ordered{{"$schema", "https://json-schema.org/draft/2020-12/schema"}, {"title", "vipgate trench file"}}
	s = append(s, objects()[""].schema(descriptions(t), &defs)...)
	return append(s, member{"$defs", defs})
}

// schema describes an object. Nested objects become definitions.
func (o object) schema(texts map[string]string, defs *ordered) ordered {
	required, properties := []string{}, ordered{}
	for _, f := range o.fields() {
		name := f.Key
		if f.Required {
			required = append(required, name)
		}
		p, text := holds(f.Type, &f, texts, defs), texts[o.name+"."+name]
		if lo, hi := f.Tag.Get("min"), f.Tag.Get("max"); lo != "" && !strings.HasSuffix(name, "ASN") {
			if f.Type == durationType {
				p = append(p, member{"examples", []string{lo, hi}})
			}
			if name == "fastInterval" || name == "timeout" {
				hi = "the interval"
			}
			text += fmt.Sprintf(" %s to %s.", lo, hi)
		}
		if initial := o.initial(f); initial != nil {
			p = append(p, member{"default", initial})
		}
		if o.name == "gateway" && name == "name" {
			p = append(p, member{"not", ordered{{"const", "BFD"}}})
		}
		properties = append(properties, member{name, append(p, member{"description", text})})
	}
	s := ordered{{"description", texts[o.name]}, {"type", "object"}, {"additionalProperties", false}}
	if len(required) > 0 {
		s = append(s, member{"required", required})
	}
	s = append(s, member{"properties", properties})
	switch o.name {
	case "check", "single":
		var choice []ordered
		for _, f := range o.fields() {
			if f.Tag.Get("oneof") != "" {
				choice = append(choice, ordered{{"required", []string{f.Key}}})
			}
		}
		s = append(s, member{"oneOf", choice})
	case "stream": // a stream with targets requires a check
		s = append(s,
			member{"if", ordered{
				{"properties", ordered{{"targets", ordered{{"minItems", 1}}}}},
				{"required", []string{"targets"}},
			}},
			member{"then", ordered{{"required", []string{"check"}}}})
	}
	return s
}

// initial returns the default of a field as written in the file, or nil without a default.
func (o object) initial(f trench.Field) any {
	fallback := trench.DefaultDefaults()
	switch text := f.Tag.Get("default"); {
	case f.Required, o.name == "single": // the whole check has the defaults
		return nil
	case f.Type.Kind() == reflect.Bool:
		return false
	case text != "" && (f.Type.Kind() == reflect.String || f.Type == durationType || f.Type.Kind() == reflect.Uint8):
		return text
	case text != "":
		n, _ := strconv.Atoi(text)
		return n
	case o.name == "attractor" && f.Key == "interface":
		return fallback.Interface
	case o.name != "gateway":
		return nil
	}
	return map[string]any{
		"localASN": fallback.LocalASN, "remoteASN": fallback.RemoteASN, "localPort": fallback.LocalPort,
		"remotePort": fallback.RemotePort, "holdTime": fallback.HoldTime.String(),
	}[f.Key]
}

var durationType = reflect.TypeFor[time.Duration]()

func ref(name string) ordered { return ordered{{"$ref", "#/$defs/" + name}} }

// holds describes the value of a field or of a list item.
func holds(t reflect.Type, f *trench.Field, texts map[string]string, defs *ordered) ordered {
	tag := f.Tag
	switch t {
	case trench.VIPType:
		return ref("vip")
	case trench.AddressType:
		return ref("address")
	case durationType:
		return ref("duration")
	}
	switch t.Kind() {
	case reflect.Pointer:
		return holds(t.Elem(), f, texts, defs)
	case reflect.Struct:
		o := objectOf(t)
		if !slices.ContainsFunc(*defs, func(m member) bool { return m.name == o.name }) {
			i := len(*defs)
			*defs = append(*defs, member{name: o.name}) // before its nested objects
			of := o.schema(texts, defs)
			(*defs)[i].value = of
		}
		return ref(o.name)
	case reflect.Slice, reflect.Array:
		s := ordered{{"type", "array"}, {"items", holds(t.Elem(), f, texts, defs)}}
		if tag.Get("empty") != "" {
			s = append(s, member{"minItems", 1})
		}
		if hi, err := strconv.Atoi(tag.Get("max")); err == nil && tag.Get("min") == "" {
			s = append(s, member{"maxItems", hi})
		}
		return append(s, member{"uniqueItems", true})
	case reflect.Bool: // the reader accepts quoted booleans
		return ordered{{"enum", []any{true, false, "true", "false"}}}
	}
	if enum, ok := reflect.Zero(t).Interface().(interface{ Names() []string }); ok {
		names := slices.DeleteFunc(enum.Names(), func(name string) bool { return name == "" })
		return ordered{{"enum", names}}
	}
	switch tag.Get("form") {
	case "name":
		return ref("name")
	case "password file", "CA file", "certificate file", "key file":
		return ref("path")
	case "request":
		return ordered{{"type", "string"}, {"pattern", f.Pattern()}}
	case "body", "payload":
		return ordered{{"type", anyScalar}, {"minLength", 1}, {"maxLength", 1000}}
	case "status":
		types := []string{"integer", "string"}
		return ordered{{"type", types}, {"minimum", 200}, {"maximum", 599}, {"pattern", f.Pattern()}}
	case "transport":
		return ordered{{"enum", []string{"tcp", "udp", "sctp"}}}
	case "":
		lo, _ := strconv.ParseUint(tag.Get("min"), 10, 32)
		hi, _ := strconv.ParseUint(tag.Get("max"), 10, 32)
		switch hi {
		case 65535:
			return ref("port")
		case 4294967294:
			return ref("asn")
		}
		return numbers(lo, hi)
	default:
		return ordered{{"type", anyScalar}, {"pattern", f.Pattern()}}
	}
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
		for _, f := range o.fields() {
			field := f.Key
			if text := texts[name+"."+field]; !strings.HasSuffix(text, ".") {
				t.Errorf("%s.%s is explained as %q", name, field, text)
			}
		}
	}
	if want := len(objects()) + len(scalars); len(defs) != want {
		t.Errorf("the schema has %d definitions, want %d", len(defs), want)
	}
}

// The limits are repeated in the tags, which cannot refer to constants.
func TestTagsMatchConstants(t *testing.T) {
	tag := func(object reflect.Type, field string) string {
		f, _ := object.FieldByName(field)
		return f.Tag.Get("max")
	}
	if got := tag(reflect.TypeFor[trench.Attractor](), "VIPs"); got != strconv.Itoa(trench.MaxVIPs) {
		t.Errorf("an attractor has %s VIPs at most, want %d", got, trench.MaxVIPs)
	}
	if got := tag(reflect.TypeFor[trench.Stream](), "Match"); got != strconv.Itoa(trench.MaxMatch) {
		t.Errorf("a match has %s entries at most, want %d", got, trench.MaxMatch)
	}
	if got := tag(reflect.TypeFor[trench.Stream](), "Earlier"); got != strconv.Itoa(trench.MaxEarlier) {
		t.Errorf("a stream has %s earlier sets of targets at most, want %d", got, trench.MaxEarlier)
	}
	if d, err := time.ParseDuration(tag(reflect.TypeFor[trench.Stream](), "DrainTime")); err != nil ||
		d != trench.MaxDrainTime {
		t.Errorf("the longest drain time is %v, %v, want %v", d, err, trench.MaxDrainTime)
	}
	if d, err := time.ParseDuration(tag(reflect.TypeFor[trench.Gateway](), "HoldTime")); err != nil ||
		d != 65535*time.Second {
		t.Errorf("the longest hold time is %v, %v, want 65535 s", d, err)
	}
}

// The reader refuses a list beyond its limit before it reads the items: annotations are decoded into
// a part of a configuration, which nothing validates as a whole.
func TestReaderLimitsLists(t *testing.T) {
	tried := 0
	for name, o := range objects() {
		for _, f := range o.fields() {
			most, err := strconv.Atoi(f.Tag.Get("max"))
			if kind := f.Type.Kind(); err != nil || f.Tag.Get("min") != "" || kind != reflect.Slice && kind != reflect.Array {
				continue
			}
			tried++
			for items, want := range map[int]string{
				most - 1: "", most: "", most + 1: fmt.Sprintf("has %d items: write %d at most", most+1, most),
			} {
				got := ""
				target := reflect.New(o.of).Interface()
				for _, problem := range Decode(map[string]any{f.Key: make([]any, items)}, target) {
					if problem.Path == f.Key {
						got = problem.Message(nil)
					}
				}
				if got != want {
					t.Errorf("%d items of %s.%s: %q, want %q", items, name, f.Key, got, want)
				}
			}
		}
	}
	if tried < 9 {
		t.Errorf("only %d lists have a limit", tried)
	}
}

// The reader uses the default in the schema for an omitted field.
func TestSchemaDefaultsMatchReader(t *testing.T) {
	file := strings.Replace(good, "name: gw4", "name: gw4\n      bfd: {}", 1)
	file = strings.Replace(file, "name: s1", "name: s1\n    maglev: {}", 1) +
		"  - {name: s2, vips: [20.0.0.1/32], check: {http: {port: 80, tls: {}}}}\n" +
		"  - {name: s3, vips: [20.0.0.1/32], check: {dns: {port: 53, name: a}}}\n" +
		"  - {name: s4, vips: [20.0.0.1/32], check: {ntp: {port: 123}}}\n"
	left, err := Parse("f", []byte(file), trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	var fields []string
	for _, m := range objects() {
		for _, f := range m.fields() {
			name, initial := f.Key, m.initial(f)
			if initial == nil {
				continue
			}
			at := map[string][2]string{ // the start of the mapping in the file, and its replacement
				"":          {"trench: ", "%s: %v\ntrench: "},
				"attractor": {"attractor:\n", "attractor:\n  %s: %v\n"},
				"gateway":   {"name: gw4\n", "name: gw4\n      %s: %v\n"}, "bfd": {"bfd: {", "bfd: {%s: %v"},
				"stream": {"- name: s1\n", "- name: s1\n    %s: %v\n"}, "maglev": {"maglev: {", "maglev: {%s: %v"},
				"check": {"check: {", "check: {%s: %v, "}, "http": {"http: {", "http: {%s: %v, "},
				"dns": {"dns: {", "dns: {%s: %v, "}, "ntp": {"ntp: {", "ntp: {%s: %v, "},
				"tls": {"tls: {", "tls: {%s: %v"}, "target": {"- {name: t1", "- {%s: %v, name: t1"},
			}[m.name]
			explicit := strings.Replace(file, at[0], fmt.Sprintf(at[1], name, initial), 1)
			written, err := Parse("f", []byte(explicit), trench.DefaultDefaults())
			if err != nil {
				t.Errorf("%s.%s: %v", m.name, name, err)
				continue
			}
			if got, want := fmt.Sprintf("%+v", shown(written)), fmt.Sprintf("%+v", shown(left)); got != want {
				t.Errorf("%s.%s: %v is not the default:\n%s\n%s", m.name, name, initial, got, want)
			}
			fields = append(fields, name)
		}
	}
	if len(fields) != 33 {
		t.Errorf("%d fields have a default: %v", len(fields), fields)
	}
}

// shown returns a configuration without pointers.
func shown(c *trench.Config) any {
	var bfd []trench.BFD
	gateways := append([]trench.Gateway(nil), c.Attractor.Gateways...)
	for i := range gateways {
		if gateways[i].BFD != nil {
			bfd = append(bfd, *gateways[i].BFD)
		}
		gateways[i].BFD = nil
	}
	return []any{c.Trench, c.Attractor.Name, c.Attractor.VIPs, gateways, bfd, c.Streams, c.MaxRemoval}
}
