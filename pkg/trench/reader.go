package trench

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"
)

// value is a node of the file with its path. The path of a list item is composed only for a
// message, because a file may have 100 000 items.
type value struct {
	errors *Errors
	node   *yaml.Node
	path   string // for a list item, the path of the list
	nth    int    // position of a list item, from 1; 0 for other values
}

// fullPath returns the path of the value, including the index of a list item.
func (v value) fullPath() string {
	if v.nth == 0 {
		return v.path
	}
	return fmt.Sprintf("%s[%d]", v.path, v.nth-1)
}

// mapping is an object of the file.
type mapping struct {
	value
	// in is the enclosing object, of type *Stream for a target.
	in     any
	fields map[string]value // fields present in the file
	read   map[string]any   // values of the valid fields
}

// valid returns the node of a field and reports whether the field is present and valid.
func (m mapping) valid(name string) (value, bool) {
	_, ok := m.read[name]
	return m.fields[name], ok
}

// report records a problem of a valid field, unless problem is "".
func (m mapping) report(name, problem string) {
	if v, ok := m.valid(name); ok && problem != "" {
		v.problem("%s", problem)
	}
}

func (m mapping) missing(name, remedy string) {
	m.errors.add(m.node.Line, m.node.Column, m.member(name), "is missing: %s", remedy)
}

func (v value) problem(format string, args ...any) {
	v.errors.add(v.node.Line, v.node.Column, v.fullPath(), format, args...)
}

// at returns a node below v and follows an alias. The model has a fixed depth, so an alias that
// contains itself ends as a value of the wrong kind.
func (v value) at(path string, node *yaml.Node) value {
	if node.Kind == yaml.AliasNode && node.Alias != nil {
		node = node.Alias
	}
	return value{errors: v.errors, node: node, path: path}
}

// member returns the path of a field of the mapping.
func (v value) member(name string) string {
	return strings.TrimPrefix(v.fullPath()+"."+name, ".")
}

// typeName describes the type or the text of the value for a message.
func (v value) typeName() string {
	switch {
	case v.node.Kind == yaml.MappingNode:
		return "a mapping"
	case v.node.Kind == yaml.SequenceNode:
		return "a list"
	case v.isNull():
		return "empty"
	}
	return quote(v.node.Value)
}

func (v value) isNull() bool {
	return v.node.Kind == yaml.ScalarNode && v.node.ShortTag() == "!!null"
}

// quote quotes a text of the file and truncates a long one.
func quote(s string) string {
	const enough = 100
	if len(s) > enough {
		s = strings.ToValidUTF8(s[:enough], "") + "…"
	}
	return strconv.Quote(s)
}

// fieldName returns the YAML name of a field, or "" if the file cannot contain it.
func fieldName(f reflect.StructField) (name string, required bool) {
	name, option, _ := strings.Cut(f.Tag.Get("yaml"), ",")
	return name, option == "required"
}

// objectType describes a struct that represents an object; names lists its YAML field names.
type objectType struct {
	fields []reflect.StructField
	names  []string
}

// typeOf describes a type once per file, because reflection is slow.
func (p *parser) typeOf(t reflect.Type) objectType {
	o, ok := p.types[t]
	if !ok {
		o.fields = reflect.VisibleFields(t)
		for _, f := range o.fields {
			if name, _ := fieldName(f); name != "" {
				o.names = append(o.names, name)
			}
		}
		p.types[t] = o
	}
	return o
}

// setDefaults sets the defaults of the optional fields of an object.
func (p *parser) setDefaults(to reflect.Value) {
	for i, f := range p.typeOf(to.Type()).fields {
		if text, ok := f.Tag.Lookup("default"); ok && f.Name != "_" {
			p.read(value{node: &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}}, to.Field(i), f.Tag, nil)
		}
	}
	d := p.defaults
	switch g := to.Addr().Interface().(type) {
	case *Attractor:
		g.Interface = d.Interface
	case *Gateway:
		g.LocalASN, g.RemoteASN, g.LocalPort, g.RemotePort = d.LocalASN, d.RemoteASN, d.LocalPort, d.RemotePort
		g.HoldTime = d.HoldTime
	}
}

// object reads a mapping into a struct and reports whether v is a mapping.
func (p *parser) object(v value, to reflect.Value, tag reflect.StructTag, in any) bool {
	t := p.typeOf(to.Type())
	if removal := tag.Get("null"); removal != "" && v.isNull() {
		v.problem("is empty: write {} for the defaults, or remove the field %s", removal)
		return false
	}
	if v.node.Kind != yaml.MappingNode {
		v.problem("is %s: write a mapping with the fields %s", v.typeName(), strings.Join(t.names, ", "))
		return false
	}
	p.setDefaults(to)
	object := to.Addr().Interface()
	m := mapping{value: v, in: in, fields: v.members(t.names), read: map[string]any{}}
	for i, f := range t.fields {
		name, required := fieldName(f)
		at, ok := m.fields[name]
		switch {
		case !ok && required:
			remedy := f.Tag.Get("remedy")
			if remedy == "" {
				remedy = listRemedy(f.Type.Elem(), f.Tag)
			}
			m.missing(name, remedy)
		case ok:
			field := to.Field(i)
			// Only the method check reads a field named _; the value is stored outside the struct, since
			// reflection cannot set a blank field. An array type declares a list.
			if f.Name == "_" {
				field = reflect.New(f.Type).Elem()
				if f.Type.Kind() == reflect.Array {
					field = reflect.New(reflect.SliceOf(f.Type.Elem())).Elem()
				}
			}
			if p.read(at, field, f.Tag, object) {
				m.read[name] = field.Interface()
			}
		}
	}
	if c, ok := object.(interface{ check(p *parser, m mapping) }); ok {
		c.check(p, m) // constraints beyond the tags
	}
	return true
}

// listRemedy returns the remedy for a missing list or a value that is not a list.
func listRemedy(item reflect.Type, tag reflect.StructTag) string {
	remedy := "write a list of " + tag.Get("yaml")
	switch item {
	case vipType:
		remedy = "write a list of VIPs such as [20.0.0.1/32]"
	case addressType:
		remedy = "write a list of addresses such as [172.16.1.1]"
	}
	if tag.Get("empty") == "" {
		remedy += ", or [] for none"
	}
	return remedy
}

// list reads a list and reports whether all items are valid. Invalid items are zero.
func (p *parser) list(v value, to reflect.Value, tag reflect.StructTag, in any) bool {
	n := len(v.node.Content)
	if v.node.Kind != yaml.SequenceNode {
		v.problem("is %s, not a list: %s", v.typeName(), listRemedy(to.Type().Elem(), tag))
		return false
	}
	if removal := tag.Get("empty"); removal != "" && n == 0 {
		v.problem("is an empty list: %s, or remove %s", tag.Get("remedy"), removal)
		return false
	}
	if n > MaxVIPs && to.Type().Elem() == vipType {
		v.problem("has %d VIPs: an attractor has %d at most", n, MaxVIPs)
		return false
	}
	to.Set(reflect.MakeSlice(to.Type(), n, n))
	valid := true
	for i := range n {
		if v.errors.full() {
			v.errors.More = true
			return false
		}
		valid = p.read(v.item(i), to.Index(i), tag, in) && valid
	}
	return valid
}

// item returns item i of the list.
func (v value) item(i int) value {
	item := v.at(v.fullPath(), v.node.Content[i])
	item.nth = i + 1
	return item
}

// members returns the fields of the mapping and reports unknown and duplicate keys.
func (v value) members(known []string) map[string]value {
	fields, lines := map[string]value{}, map[string]int{}
	for i := 0; i+1 < len(v.node.Content); i += 2 {
		key := v.at("", v.node.Content[i])
		name := key.node.Value
		key.path = v.member(printable(name))
		switch first, twice := lines[name]; {
		case key.node.Kind != yaml.ScalarNode:
			key.problem("a field's name is %s: the fields here are %s", key.typeName(), strings.Join(known, ", "))
		case name == "<<":
			key.problem("merge keys are not supported: write the fields out, or use an alias for a whole value")
		case !slices.Contains(known, name):
			key.problem("unknown field%s: the fields here are %s", suggestion(name, known), strings.Join(known, ", "))
		case twice:
			key.problem("appears twice, first in line %d: remove one of them", first)
		default:
			lines[name] = key.node.Line
			fields[name] = v.at(v.member(name), v.node.Content[i+1])
		}
	}
	return fields
}

// printable returns name for a message. A name that cannot be a field name is quoted and
// truncated.
func printable(name string) string {
	const enough = 40
	for i, c := range name {
		if i >= enough || !strconv.IsPrint(c) || c == ' ' {
			return strconv.Quote(name[:i] + "…")
		}
	}
	return name
}

// suggestion returns ", did you mean X" if name differs from the known name X only in case,
// dashes, underscores, spaces or one character.
func suggestion(name string, known []string) string {
	bare := func(s string) string {
		return strings.ToLower(strings.NewReplacer("_", "", "-", "", " ", "").Replace(s))
	}
	for _, k := range known {
		if withinOneEdit(bare(k), bare(name)) {
			return fmt.Sprintf(", did you mean %q", k)
		}
	}
	return ""
}

// withinOneEdit reports whether at most one insertion, deletion or replacement of a byte turns a
// into b.
func withinOneEdit(a, b string) bool {
	for a != "" && b != "" && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	tail := func(s string) string { return s[min(1, len(s)):] }
	return tail(a) == tail(b) || a == tail(b) || tail(a) == b
}
