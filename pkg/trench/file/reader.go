package file

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/pkg/trench"
)

// reader reads YAML nodes into the types of the configuration, and records the problems.
type reader struct {
	problems []problem
	more     bool // reading ended after maxProblems problems
	// partial is set if the outermost object may omit required fields.
	partial bool
}

// problem is a problem with its position in the file.
type problem struct {
	trench.Problem
	line, column int
}

// value is a node of the file with its path. The path of a list item is composed only for a
// message, because a file may have 100 000 items.
type value struct {
	node *yaml.Node
	path string // for a list item, the path of the list
	nth  int    // position of a list item, from 1; 0 for other values
}

// Object reads a configuration that an API holds as an object with the fields of the trench file.
// Omitted fields are zero: [Marshal] omits them, too. The problems are those of the objects' syntax
// and of [trench.Validate].
func Object(object map[string]any, d trench.Defaults) (*trench.Config, []trench.Problem) {
	r := reader{}
	config := r.config(jsonNode(object), d)
	return config, r.found()
}

// Decode reads an object with fields of the trench file into a part of a configuration, such as a
// *trench.Stream. Omitted fields keep their values, and a kind of check replaces another one. The
// paths of the problems begin at the part.
func Decode(object map[string]any, to any) []trench.Problem {
	r := reader{partial: true}
	r.object(value{node: jsonNode(object)}, reflect.ValueOf(to).Elem(), nil)
	return r.found()
}

// found returns the problems without their positions.
func (r *reader) found() (problems []trench.Problem) {
	for _, p := range r.problems {
		problems = append(problems, p.Problem)
	}
	return problems
}

// jsonNode returns the YAML node of an object: JSON is YAML.
func jsonNode(object map[string]any) *yaml.Node {
	if object == nil {
		object = map[string]any{} // its JSON is null
	}
	var document yaml.Node
	text, err := json.Marshal(object)
	if err == nil {
		err = yaml.Unmarshal(text, &document)
	}
	if err != nil { // a number that JSON does not have, such as NaN
		return textNode(err.Error())
	}
	return document.Content[0]
}

// config reads and validates a whole configuration.
func (r *reader) config(root *yaml.Node, d trench.Defaults) *trench.Config {
	config := &trench.Config{}
	r.object(value{node: root}, reflect.ValueOf(config).Elem(), nil)
	syntax := len(r.problems)
	if r.more {
		return config
	}
	for _, p := range trench.Validate(config.Complete(d)) {
		// A value that cannot be read is zero in the configuration: a problem of it, of a part, of the
		// whole, or in comparison with it is a consequence.
		if !slices.ContainsFunc(r.problems[:syntax], func(cause problem) bool {
			return overlap(cause.Path, p.Path) || p.Related != "" && overlap(cause.Path, p.Related)
		}) {
			line, column := position(root, p.Path)
			r.problems = append(r.problems, problem{p, line, column})
		}
	}
	return config
}

// overlap reports whether two paths are equal, or one is a part of the other.
func overlap(a, b string) bool {
	if len(a) > len(b) {
		a, b = b, a
	}
	rest, ok := strings.CutPrefix(b, a)
	return ok && (a == "" || rest == "" || rest[0] == '.' || rest[0] == '[')
}

// position returns the position of the value at a path, or of the object that lacks it.
func position(node *yaml.Node, path string) (line, column int) {
	for path != "" {
		var child *yaml.Node
		if number, rest, isItem := strings.Cut(path, "]"); isItem && path[0] == '[' {
			i, _ := strconv.Atoi(number[1:])
			child, path = node.Content[i], strings.TrimPrefix(rest, ".")
		} else {
			end := strings.IndexAny(path+".", ".[")
			for i := 0; i+1 < len(node.Content) && child == nil; i += 2 {
				if node.Content[i].Value == path[:end] {
					child = node.Content[i+1]
				}
			}
			path = strings.TrimPrefix(path[end:], ".")
		}
		if child == nil {
			break
		}
		node = target(child)
	}
	return node.Line, node.Column
}

// target follows an alias. The model has a fixed depth, so an alias that contains itself ends as a
// value of the wrong kind.
func target(node *yaml.Node) *yaml.Node {
	if node.Kind == yaml.AliasNode && node.Alias != nil {
		return node.Alias
	}
	return node
}

// fullPath returns the path of the value, including the index of a list item.
func (v value) fullPath() string {
	if v.nth == 0 {
		return v.path
	}
	return fmt.Sprintf("%s[%d]", v.path, v.nth-1)
}

// member returns the path of a field of the mapping.
func (v value) member(name string) string {
	return strings.TrimPrefix(v.fullPath()+"."+name, ".")
}

// report records a problem of a value.
func (r *reader) report(v value, text, remedy string) {
	r.reportAt(v, v.fullPath(), trench.Problem{Text: text, Remedy: remedy})
}

func (r *reader) reportAt(v value, path string, p trench.Problem) {
	if r.full() {
		r.more = true
		return
	}
	p.Path = path
	r.problems = append(r.problems, problem{p, v.node.Line, v.node.Column})
}

func (r *reader) full() bool { return len(r.problems) >= maxProblems }

// typeName describes the type or the text of the value for a message.
func (v value) typeName() string {
	switch {
	case v.node.Kind == yaml.MappingNode:
		return "a mapping"
	case v.node.Kind == yaml.SequenceNode:
		return "a list"
	case isNull(v.node):
		return "empty"
	}
	return trench.Quote(v.node.Value)
}

func isNull(node *yaml.Node) bool {
	return node.Kind == yaml.ScalarNode && node.ShortTag() == "!!null"
}

// read stores the value of a field, or of an item of its list.
func (r *reader) read(v value, to reflect.Value, field *trench.Field) {
	switch {
	case to.Kind() == reflect.Pointer:
		to.Set(reflect.New(to.Type().Elem()))
		r.object(v, to.Elem(), field)
	case to.Kind() == reflect.Slice, to.Kind() == reflect.Array:
		r.list(v, to, field)
	case to.Kind() == reflect.Struct && to.Type() != trench.VIPType && to.Type() != trench.AddressType:
		r.object(v, to, field)
	default:
		r.scalar(v, to, field)
	}
}

// scalar reads a text regardless of its YAML type: a name may be 123 or yes.
func (r *reader) scalar(v value, to reflect.Value, field *trench.Field) {
	switch {
	case v.node.Kind != yaml.ScalarNode:
		r.report(v, "is "+v.typeName(), field.Remedy())
	case isNull(v.node), v.node.Value == "":
		r.report(v, "is empty", field.Remedy())
	case v.node.Style&yaml.TaggedStyle != 0:
		r.report(v, "has the YAML tag "+v.node.Tag, "remove the tag")
	default:
		if p := field.Parse(v.node.Value, to); p != (trench.Problem{}) {
			r.reportAt(v, v.fullPath(), p)
		}
	}
}

// object reads a mapping into a struct. field is nil for the outermost object.
func (r *reader) object(v value, to reflect.Value, field *trench.Field) {
	fields := trench.FieldsOf(to.Type())
	names := make([]string, len(fields))
	for i := range fields {
		names[i] = fields[i].Key
	}
	list := strings.Join(names, ", ")
	tag := func(name string) string {
		if field == nil {
			return ""
		}
		return field.Tag.Get(name)
	}
	switch {
	case tag("null") != "" && isNull(v.node):
		r.report(v, "is empty", "write {} for the defaults, or remove the field "+tag("null"))
		return
	case v.node.Kind != yaml.MappingNode:
		r.report(v, "is "+v.typeName(), "write a mapping with the fields "+list)
		return
	case field != nil && field.Type == to.Type() && tag("empty") != "" && len(v.node.Content) == 0:
		r.report(v, "is an empty mapping", tag("remedy")+", or remove "+tag("empty"))
		return
	}
	present := r.members(v, names, list)
	fresh := to.IsZero()
	for i := range fields {
		_, ok := present[fields[i].Key]
		switch initial, own := fields[i].Default(); {
		case fresh && own:
			fields[i].Of(to).Set(initial)
		case ok && fields[i].Tag.Get("oneof") != "": // one of a group replaces the others
			for k := range fields {
				if fields[k].Tag.Get("oneof") == fields[i].Tag.Get("oneof") {
					fields[k].Of(to).SetZero()
				}
			}
		}
	}
	if tls, ok := to.Addr().Interface().(*trench.TLSCheck); ok {
		tls.On = true
	}
	for i := range fields {
		at, ok := present[fields[i].Key]
		switch {
		case ok:
			r.read(at, fields[i].Of(to), &fields[i])
		case fields[i].Required && (field != nil || !r.partial):
			remedy := fields[i].Tag.Get("remedy")
			if remedy == "" {
				remedy = listRemedy(&fields[i])
			}
			r.reportAt(v, v.member(fields[i].Key), trench.Problem{Text: "is missing", Remedy: remedy})
		}
	}
}

// listRemedy returns the remedy for a missing list or a value that is not a list.
func listRemedy(field *trench.Field) string {
	remedy := "write a list of " + field.Key
	switch field.Type.Elem() {
	case trench.VIPType:
		remedy = "write a list of VIPs such as [20.0.0.1/32]"
	case trench.AddressType:
		remedy = "write a list of addresses such as [172.16.1.1]"
	}
	if field.Tag.Get("empty") == "" {
		remedy += ", or [] for none"
	}
	return remedy
}

// list reads a list. Invalid items are zero.
func (r *reader) list(v value, to reflect.Value, field *trench.Field) {
	items := len(v.node.Content)
	switch {
	case v.node.Kind != yaml.SequenceNode:
		r.report(v, "is "+v.typeName()+", not a list", listRemedy(field))
		return
	case items == 0 && field.Tag.Get("empty") != "":
		r.reportAt(v, v.fullPath(), trench.EmptyList(field))
		return
	case to.Kind() == reflect.Array && items > to.Len():
		r.report(v, fmt.Sprintf("has %d items", items), fmt.Sprintf("write %d at most", to.Len()))
		return
	case to.Kind() == reflect.Slice:
		to.Set(reflect.MakeSlice(to.Type(), items, items))
	default:
		to.SetZero()
	}
	path := v.fullPath()
	for i := range items {
		if r.full() {
			r.more = true
			return
		}
		item := value{node: target(v.node.Content[i]), path: path, nth: i + 1}
		r.read(item, to.Index(i), field)
	}
}

// members returns the fields of the mapping and reports unknown and duplicate keys.
func (r *reader) members(v value, known []string, list string) map[string]value {
	fields, lines := map[string]value{}, map[string]int{}
	for i := 0; i+1 < len(v.node.Content); i += 2 {
		key := value{node: target(v.node.Content[i])}
		name := key.node.Value
		key.path = v.member(printable(name))
		switch first, twice := lines[name]; {
		case key.node.Kind != yaml.ScalarNode:
			r.report(key, "a field's name is "+key.typeName(), "the fields here are "+list)
		case name == "<<":
			r.report(key, "merge keys are not supported", "write the fields out, or use an alias for a whole value")
		case !slices.Contains(known, name):
			r.report(key, "unknown field"+suggestion(name, known), "the fields here are "+list)
		case twice:
			r.report(key, fmt.Sprintf("appears twice, first in line %d", first), "remove one of them")
		default:
			lines[name] = key.node.Line
			fields[name] = value{node: target(v.node.Content[i+1]), path: v.member(name)}
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
