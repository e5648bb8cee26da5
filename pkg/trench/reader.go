package trench

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"
)

// kind is what a field of the file holds: text, number, duration, boolean, prefix, address, list or
// object. docs/trench.schema.json is generated from the same values.
type kind interface {
	// read stores the value where the kind says. It reports what is wrong, and whether it stored it.
	read(v value) bool
}

// object is a mapping with fields of its own, each at most once.
type object struct {
	name   string // in the schema
	fields []field
	// oneOf are fields of which the file has exactly one, such as example.
	oneOf   []string
	example string
	// ifNull is the remedy for a mapping that has no value; "" for none in particular.
	ifNull string
	// then checks what concerns several fields. It is called after all of them were read.
	then func(m mapping)
}

// field is one field of an object.
type field struct {
	name string
	is   kind
	// remedy says what to write when the field is missing; a field without one may be left out.
	remedy string
	// doc describes the field in the schema, if no field of the Config does.
	doc string
	// then checks more than the kind does. It is called once the value was stored.
	then func(v value)
}

func (o object) names() []string {
	names := make([]string, len(o.fields))
	for i, f := range o.fields {
		names[i] = f.name
	}
	return names
}

// value is one node of the file, and its path in the file.
type value struct {
	errors *Errors
	node   *yaml.Node
	path   string
}

// mapping is an object of the file: its fields as far as they are known.
type mapping struct {
	value
	fields map[string]value
}

func (v value) problem(format string, args ...any) {
	v.errors.add(v.node.Line, v.node.Column, v.path, format, args...)
}

// report reports a problem unless it is "".
func (v value) report(problem string) {
	if problem != "" {
		v.problem("%s", problem)
	}
}

// at returns the node as a part of v. Aliases are followed here, in one place; since the model has
// a fixed depth, an alias that contains itself ends like any other value of a wrong kind.
func (v value) at(path string, node *yaml.Node) value {
	if node.Kind == yaml.AliasNode && node.Alias != nil {
		node = node.Alias
	}
	return value{errors: v.errors, node: node, path: path}
}

// member returns the path of a member of the mapping.
func (v value) member(name string) string {
	return strings.TrimPrefix(v.path+"."+name, ".")
}

// typeName names what the file has here, for a message.
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

// quote quotes what the file says, cut short if it is long.
func quote(s string) string {
	const enough = 100
	if len(s) > enough {
		s = strings.ToValidUTF8(s[:enough], "") + "…"
	}
	return strconv.Quote(s)
}

func (o object) read(v value) bool {
	switch {
	case o.ifNull != "" && v.isNull():
		v.problem("is empty: %s", o.ifNull)
		return false
	case v.node.Kind != yaml.MappingNode:
		v.problem("is %s: write a mapping with the fields %s", v.typeName(), strings.Join(o.names(), ", "))
		return false
	}
	m := mapping{value: v, fields: o.members(v)}
	if len(o.oneOf) > 0 {
		o.requireOne(m)
	}
	for _, f := range o.fields {
		switch v, ok := m.fields[f.name]; {
		case !ok && f.remedy != "":
			m.missing(f.name, f.remedy)
		case ok && f.is.read(v) && f.then != nil:
			f.then(v)
		}
	}
	if o.then != nil {
		o.then(m)
	}
	return true
}

// stored is an object that is stored in to as soon as the file has it, defaults included.
func stored[T any](to *T, is func(*T) object) object {
	x := new(T)
	o := is(x)
	then := o.then
	o.then = func(m mapping) {
		if then != nil {
			then(m)
		}
		*to = *x
	}
	return o
}

// members returns the values of the mapping, and reports keys that are unknown or appear twice.
func (o object) members(v value) map[string]value {
	fields, lines, known := map[string]value{}, map[string]int{}, o.names()
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

// requireOne reports when the file has none or several of the fields of which it must have one.
func (o object) requireOne(m mapping) {
	choice, found := strings.Join(o.oneOf, ", "), ""
	for _, name := range o.oneOf {
		v, ok := m.fields[name]
		switch {
		case ok && found == "":
			found = name
		case ok:
			v.problem("conflicts with %s: write only one of %s", found, choice)
		}
	}
	if found == "" {
		m.problem("has none of %s: write one of them, such as %s", choice, o.example)
	}
}

func (m mapping) missing(name, remedy string) {
	m.errors.add(m.node.Line, m.node.Column, m.member(name), "is missing: %s", remedy)
}

// printable returns the name as it may appear in a message: what cannot be the name of a field is
// quoted and cut short.
func printable(name string) string {
	const enough = 40
	for i, c := range name {
		if i >= enough || !strconv.IsPrint(c) || c == ' ' {
			return strconv.Quote(name[:i] + "…")
		}
	}
	return name
}

// suggestion returns ", did you mean X" when the name is a known one but for case, dashes,
// underscores or one character.
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

// list is a list whose items are all of one kind.
type list struct {
	of kind // of an item that was not read, for the schema
	// max bounds the items; 0 does not.
	max int
	// remedy says what to write instead of what is no list, ifEmpty instead of an empty one; "" allows
	// that. tooMany is the problem of more than max items; "" leaves that to the check of the items.
	remedy, ifEmpty, tooMany string
	items                    func(v value)
}

// listOf is a list that is stored in to: item is the kind that reads one, and keep, unless nil,
// checks it and reports whether it is kept.
func listOf[T any, K kind](to *[]T, l list, item func(*T) K, keep func(v value, x T) bool) list {
	l.of = item(new(T))
	l.items = func(v value) {
		*to = make([]T, 0, len(v.node.Content))
		for i, node := range v.node.Content {
			if v.errors.full() {
				v.errors.More = true
				return
			}
			var x T
			v := v.at(fmt.Sprintf("%s[%d]", v.path, i), node)
			if item(&x).read(v) && (keep == nil || keep(v, x)) {
				*to = append(*to, x)
			}
		}
	}
	return l
}

func (l list) read(v value) bool {
	n := len(v.node.Content)
	switch {
	case v.node.Kind != yaml.SequenceNode:
		v.problem("is %s, not a list: %s", v.typeName(), l.remedy)
		return false
	case n == 0 && l.ifEmpty != "":
		v.problem("is an empty list: %s", l.ifEmpty)
		return false
	case n > l.max && l.tooMany != "":
		v.problem(l.tooMany, n, l.max)
		return false
	}
	l.items(v)
	return true
}
