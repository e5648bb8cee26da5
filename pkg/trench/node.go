package trench

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"
)

// report collects the problems of one file.
type report struct {
	file   string
	errors Errors
}

// add records a problem. Beyond maxProblems only the fact is kept.
func (r *report) add(line, column int, field, format string, args ...any) {
	if r.full() {
		r.errors.More = true
		return
	}
	r.errors.Problems = append(r.errors.Problems, Problem{
		File: r.file, Line: max(line, 1), Column: max(column, 1), Field: field, Message: fmt.Sprintf(format, args...),
	})
}

func (r *report) full() bool { return len(r.errors.Problems) >= maxProblems }

// err returns the problems as an error, or nil when there are none.
func (r *report) err() error {
	if len(r.errors.Problems) == 0 {
		return nil
	}
	r.errors.sort()
	return &r.errors
}

// value is one node of the file, and its position in the model.
type value struct {
	r    *report
	node *yaml.Node
	path string
}

func (v value) problem(format string, args ...any) {
	v.r.add(v.node.Line, v.node.Column, v.path, format, args...)
}

// member returns the node as the named part of v. Aliases are followed here, in one place; since
// the model has a fixed depth, an alias that contains itself ends like any other value of a wrong
// kind.
func (v value) member(name string, node *yaml.Node) value {
	if node.Kind == yaml.AliasNode && node.Alias != nil {
		node = node.Alias
	}
	return value{r: v.r, node: node, path: v.path + name}
}

// typeName names what the file has here, in the words of a person.
func (v value) typeName() string {
	switch v.node.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	if v.isNull() {
		return "empty"
	}
	return quote(v.node.Value)
}

// quote quotes what the file says, cut short if it is long.
func quote(s string) string {
	const enough = 100
	if len(s) > enough {
		s = strings.ToValidUTF8(s[:enough], "") + "…"
	}
	return strconv.Quote(s)
}

func (v value) isNull() bool {
	return v.node.Kind == yaml.ScalarNode && v.node.ShortTag() == "!!null"
}

// object is a mapping whose keys were checked.
type object struct {
	value
	is     *mapping
	fields map[string]value
}

// object reads a mapping with no other fields than its own, each at most once.
func (v value) object(is *mapping) (object, bool) {
	o := object{value: v, is: is, fields: make(map[string]value, len(is.fields))}
	lines := make(map[string]int, len(is.fields))
	if v.node.Kind != yaml.MappingNode {
		v.problem("is %s: write a mapping with the fields %s", v.typeName(), strings.Join(is.names(), ", "))
		return o, false
	}
	dot := "."
	if v.path == "" {
		dot = ""
	}
	for i := 0; i+1 < len(v.node.Content); i += 2 {
		key := v.member(dot, v.node.Content[i])
		name := key.node.Value
		key.path += printable(name)
		switch first, twice := lines[name]; {
		case key.node.Kind != yaml.ScalarNode:
			key.problem("a field's name is %s: the fields here are %s", key.typeName(), strings.Join(is.names(), ", "))
		case name == "<<":
			key.problem("merge keys are not supported: write the fields out, or use an alias for a whole value")
		case !is.has(name):
			key.problem("unknown field%s: the fields here are %s", suggestion(name, is.names()), strings.Join(is.names(), ", "))
		case twice:
			key.problem("appears twice, first in line %d: remove one of them", first)
		default:
			lines[name] = key.node.Line
			o.fields[name] = v.member(dot+name, v.node.Content[i+1])
		}
	}
	return o, true
}

// printable returns the name as it may stand in a message: what is no name of a field at all is
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
		if bare(k) == bare(name) || withinOneEdit(bare(k), bare(name)) {
			return fmt.Sprintf(", did you mean %q", k)
		}
	}
	return ""
}

// withinOneEdit reports whether one insertion, deletion or replacement of a byte makes a of b.
func withinOneEdit(a, b string) bool {
	if len(a) > len(b) {
		a, b = b, a
	}
	i := 0
	for i < len(a) && a[i] == b[i] {
		i++
	}
	switch len(b) - len(a) {
	case 0:
		return i == len(a) || a[i+1:] == b[i+1:]
	case 1:
		return a[i:] == b[i+1:]
	}
	return false
}

// required returns the field, and reports when it is missing.
func (o object) required(name string) (value, bool) {
	v, ok := o.fields[name]
	if !ok {
		o.missing(name, o.is.field(name).remedy)
	}
	return v, ok
}

func (o object) missing(name, remedy string) {
	dot := "."
	if o.path == "" {
		dot = ""
	}
	o.r.add(o.node.Line, o.node.Column, o.path+dot+name, "is missing: %s", remedy)
}

// optional returns the field if the file has it.
func (o object) optional(name string) (value, bool) {
	v, ok := o.fields[name]
	return v, ok
}

// items reads a list.
func (v value) items(remedy string) ([]value, bool) {
	if v.node.Kind != yaml.SequenceNode {
		v.problem("is %s, not a list: %s", v.typeName(), remedy)
		return nil, false
	}
	items := make([]value, len(v.node.Content))
	for i, n := range v.node.Content {
		items[i] = v.member(fmt.Sprintf("[%d]", i), n)
	}
	return items, true
}

// text reads a scalar as it is written, whatever YAML takes it for: a name may be 123 or yes.
func (v value) text(remedy string) (string, bool) {
	switch {
	case v.node.Kind != yaml.ScalarNode, v.isNull(), v.node.Value == "":
		if v.node.Kind == yaml.ScalarNode {
			v.problem("is empty: %s", remedy)
		} else {
			v.problem("is %s: %s", v.typeName(), remedy)
		}
		return "", false
	case v.node.Style&yaml.TaggedStyle != 0:
		v.problem("has the YAML tag %s: remove the tag", v.node.Tag)
		return "", false
	}
	return v.node.Value, true
}

// number reads a decimal number.
func (v value) number(is whole) (uint32, bool) {
	remedy := fmt.Sprintf("write a whole number between %d and %d", is.lo, is.hi)
	s, ok := v.text(remedy)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || n < uint64(is.lo) || n > uint64(is.hi) || (len(s) > 1 && s[0] == '0') {
		v.problem("is %s: %s", quote(s), remedy)
		return 0, false
	}
	return uint32(n), true
}

// boolean reads true or false, in quotes or not.
func (v value) boolean() (is, ok bool) {
	const remedy = "write true or false"
	s, ok := v.text(remedy)
	if ok && s != "true" && s != "false" {
		v.problem("is %s: %s", quote(s), remedy)
		return false, false
	}
	return s == "true", ok
}

// duration reads a duration such as 500ms.
func (v value) duration(is span) (time.Duration, bool) {
	remedy := fmt.Sprintf("write a duration with its unit between %s and %s", words(is.lo), words(is.hi))
	s, ok := v.text(remedy)
	if !ok {
		return 0, false
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		if f, errNumber := strconv.ParseFloat(s, 64); errNumber == nil && f > 0 && f < math.MaxInt32 {
			v.problem("is %s, which has no unit: write %ss or %sms", quote(s), s, s)
			return 0, false
		}
	}
	// Go takes 0 without a unit, and a 0s that has a sign.
	if err != nil || d < is.lo || d > is.hi || s[0] == '-' || strings.TrimLeft(s, "+0") == "" {
		v.problem("is %s: %s", quote(s), remedy)
		return 0, false
	}
	return d, true
}

// words writes a duration in its largest unit that makes it a whole number.
func words(d time.Duration) string {
	switch {
	case d == 0:
		return "0s"
	case d%time.Hour == 0:
		return fmt.Sprintf("%dh", d/time.Hour)
	case d%time.Minute == 0:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d%time.Second == 0:
		return fmt.Sprintf("%ds", d/time.Second)
	}
	return d.String()
}
