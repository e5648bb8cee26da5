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

// yamlValue is a node of the file with its path. The path of a list item is composed only for a
// message, because a file may have 100 000 items.
type yamlValue struct {
	node *yaml.Node
	path string // for a list item, the path of the list
	nth  int    // position of a list item, from 1; 0 for other values
}

// Object reads a configuration that an API holds as an object with the fields of the trench file.
// Omitted fields are zero: [Marshal] omits them, too. It returns the problems of the
// syntax and of [trench.Validate].
func Object(object map[string]any, defaults trench.Defaults) (*trench.Config, []trench.Problem) {
	state := reader{}
	config := state.config(jsonNode(object), defaults)
	return config, state.found()
}

// Decode reads an object with fields of the trench file into a part of a configuration, such as a
// *trench.Stream. Omitted fields keep their values, and a kind of check replaces another one. The
// paths of the problems begin at the part.
func Decode(object map[string]any, target any) []trench.Problem {
	state := reader{partial: true}
	state.object(yamlValue{node: jsonNode(object)}, reflect.ValueOf(target).Elem(), nil)
	return state.found()
}

// found returns the problems without their positions.
func (state *reader) found() (problems []trench.Problem) {
	for _, problem := range state.problems {
		problems = append(problems, problem.Problem)
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
func (state *reader) config(root *yaml.Node, defaults trench.Defaults) *trench.Config {
	config := &trench.Config{}
	state.object(yamlValue{node: root}, reflect.ValueOf(config).Elem(), nil)
	// Only these problems can be the cause of a problem that Validate finds.
	syntax := len(state.problems)
	// Reading ended early: problems of the incomplete configuration would be consequences.
	if state.more {
		return config
	}
	for _, found := range trench.Validate(config.Complete(defaults)) {
		// A value that cannot be read is zero in the configuration: a problem of it, of a part, of the
		// whole, or in comparison with it is a consequence.
		if !slices.ContainsFunc(state.problems[:syntax], func(cause problem) bool {
			return overlap(cause.Path, found.Path) || found.Related != "" && overlap(cause.Path, found.Related)
		}) {
			line, column := position(root, found.Path)
			state.problems = append(state.problems, problem{found, line, column})
		}
	}
	return config
}

// overlap reports whether two paths are equal, or one is a part of the other.
func overlap(short, long string) bool {
	if len(short) > len(long) {
		short, long = long, short
	}
	rest, ok := strings.CutPrefix(long, short)
	return ok && (short == "" || rest == "" || rest[0] == '.' || rest[0] == '[')
}

// position returns the position of the value at a path, or of the object that lacks it.
func position(node *yaml.Node, path string) (line, column int) {
	for path != "" {
		var child *yaml.Node
		if number, rest, isItem := strings.Cut(path, "]"); isItem && path[0] == '[' {
			nth, _ := strconv.Atoi(number[1:])
			child, path = node.Content[nth], strings.TrimPrefix(rest, ".")
		} else {
			end := strings.IndexAny(path+".", ".[")
			for nth := 0; nth+1 < len(node.Content) && child == nil; nth += 2 {
				if resolve(node.Content[nth]).Value == path[:end] {
					child = node.Content[nth+1]
				}
			}
			path = strings.TrimPrefix(path[end:], ".")
		}
		if child == nil {
			break
		}
		node = resolve(child)
	}
	return node.Line, node.Column
}

// resolve follows an alias. The model has a fixed depth, so an alias that contains itself ends as a
// value of the wrong kind.
func resolve(node *yaml.Node) *yaml.Node {
	if node.Kind == yaml.AliasNode && node.Alias != nil {
		return node.Alias
	}
	return node
}

// fullPath returns the path of the value, including the index of a list item.
func (source yamlValue) fullPath() string {
	if source.nth == 0 {
		return source.path
	}
	return fmt.Sprintf("%s[%d]", source.path, source.nth-1)
}

// member returns the path of a field of the mapping.
func (source yamlValue) member(name string) string {
	return strings.TrimPrefix(source.fullPath()+"."+name, ".")
}

func (state *reader) report(source yamlValue, text, remedy string) {
	state.reportAt(source, source.fullPath(), trench.Problem{Text: text, Remedy: remedy})
}

func (state *reader) reportAt(source yamlValue, path string, found trench.Problem) {
	if state.full() {
		state.more = true
		return
	}
	found.Path = path
	state.problems = append(state.problems, problem{found, source.node.Line, source.node.Column})
}

func (state *reader) full() bool { return len(state.problems) >= maxProblems }

// typeName describes the type or the text of the value for a message.
func (source yamlValue) typeName() string {
	switch {
	case source.node.Kind == yaml.MappingNode:
		return "a mapping"
	case source.node.Kind == yaml.SequenceNode:
		return "a list"
	case isNull(source.node):
		return "empty"
	}
	return trench.Quote(source.node.Value)
}

func isNull(node *yaml.Node) bool {
	return node.Kind == yaml.ScalarNode && node.ShortTag() == "!!null"
}

// read stores the value of a field, or of an item of its list.
func (state *reader) read(source yamlValue, target reflect.Value, field *trench.Field) {
	switch {
	case target.Kind() == reflect.Pointer:
		target.Set(reflect.New(target.Type().Elem()))
		state.object(source, target.Elem(), field)
	case target.Kind() == reflect.Slice, target.Kind() == reflect.Array:
		state.list(source, target, field)
	case target.Kind() == reflect.Struct && target.Type() != trench.VIPType && target.Type() != trench.AddressType:
		state.object(source, target, field)
	default:
		state.scalar(source, target, field)
	}
}

// scalar reads a text regardless of its YAML type: a name may be 123 or yes.
func (state *reader) scalar(source yamlValue, target reflect.Value, field *trench.Field) {
	switch {
	case source.node.Kind != yaml.ScalarNode:
		state.report(source, "is "+source.typeName(), field.Remedy())
	case isNull(source.node), source.node.Value == "":
		state.report(source, "is empty", field.Remedy())
	case source.node.Style&yaml.TaggedStyle != 0:
		state.report(source, "has the YAML tag "+source.node.Tag, "remove the tag")
	default:
		if found := field.Parse(source.node.Value, target); found != (trench.Problem{}) {
			state.reportAt(source, source.fullPath(), found)
		}
	}
}

// object reads a mapping into a struct. field is nil for the outermost object.
func (state *reader) object(source yamlValue, target reflect.Value, field *trench.Field) {
	fields := trench.FieldsOf(target.Type())
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
	case tag("null") != "" && isNull(source.node):
		state.report(source, "is empty", "write {} for the defaults, or remove the field "+tag("null"))
		return
	case source.node.Kind != yaml.MappingNode:
		state.report(source, "is "+source.typeName(), "write a mapping with the fields "+list)
		return
	// In an array, a zero item is none.
	case field != nil && (field.Type == target.Type() || field.Type.Kind() == reflect.Array) && tag("empty") != "" &&
		len(source.node.Content) == 0:
		state.report(source, "is an empty mapping", tag("remedy")+", or remove "+tag("empty"))
		return
	}
	present := state.members(source, names, list)
	// Fields may already have values: Decode reads annotations over defaults. Of a group, the new field
	// replaces the old one as a whole.
	fresh := target.IsZero()
	for i := range fields {
		_, ok := present[fields[i].Key]
		switch initial, own := fields[i].Default(); {
		case fresh && own:
			fields[i].Of(target).Set(initial)
		case ok && fields[i].Tag.Get("oneof") != "":
			for k := range fields {
				if fields[k].Tag.Get("oneof") == fields[i].Tag.Get("oneof") {
					fields[k].Set(target, reflect.Zero(fields[k].Type))
				}
			}
		}
	}
	// An empty mapping turns TLS on, although all its fields are zero.
	if tls, ok := target.Addr().Interface().(*trench.TLSCheck); ok {
		tls.On = true
	}
	for i := range fields {
		at, ok := present[fields[i].Key]
		switch {
		case ok:
			value := fields[i].Of(target)
			state.read(at, value, &fields[i])
			fields[i].Set(target, value)
		case fields[i].Required && (field != nil || !state.partial):
			remedy := fields[i].Tag.Get("remedy")
			if remedy == "" {
				remedy = listRemedy(&fields[i])
			}
			state.reportAt(source, source.member(fields[i].Key), trench.Problem{Text: "is missing", Remedy: remedy})
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
func (state *reader) list(source yamlValue, target reflect.Value, field *trench.Field) {
	items := len(source.node.Content)
	switch {
	case source.node.Kind != yaml.SequenceNode:
		state.report(source, "is "+source.typeName()+", not a list", listRemedy(field))
		return
	case items == 0 && field.Tag.Get("empty") != "":
		state.reportAt(source, source.fullPath(), trench.EmptyList(field))
		return
	case field.TooMany(items) != trench.Problem{}:
		state.reportAt(source, source.fullPath(), field.TooMany(items))
		return
	case target.Kind() == reflect.Slice:
		target.Set(reflect.MakeSlice(target.Type(), items, items))
	default:
		target.SetZero()
	}
	// A hostile file may have a million invalid items: stop at the limit of reported problems.
	path := source.fullPath()
	for i := range items {
		if state.full() {
			state.more = true
			return
		}
		item := yamlValue{node: resolve(source.node.Content[i]), path: path, nth: i + 1}
		state.read(item, target.Index(i), field)
	}
}

// members returns the fields of the mapping and reports unknown and duplicate keys.
func (state *reader) members(source yamlValue, known []string, list string) map[string]yamlValue {
	fields, lines := map[string]yamlValue{}, map[string]int{}
	for nth := 0; nth+1 < len(source.node.Content); nth += 2 {
		key := yamlValue{node: resolve(source.node.Content[nth])}
		name := key.node.Value
		// The name comes from the file and may contain any character.
		key.path = source.member(printable(name))
		switch first, twice := lines[name]; {
		case key.node.Kind != yaml.ScalarNode:
			state.report(key, "a field's name is "+key.typeName(), "the fields here are "+list)
		case name == "<<":
			state.report(key, "merge keys are not supported", "write the fields out, or use an alias for a whole value")
		case !slices.Contains(known, name):
			state.report(key, "unknown field"+suggestion(name, known), "the fields here are "+list)
		case twice:
			state.report(key, fmt.Sprintf("appears twice, first in line %d", first), "remove one of them")
		default:
			lines[name] = key.node.Line
			fields[name] = yamlValue{node: resolve(source.node.Content[nth+1]), path: source.member(name)}
		}
	}
	return fields
}

// printable returns name for a message. A name that cannot be a field name is quoted and truncated.
func printable(name string) string {
	const enough = 40
	for position, character := range name {
		if position >= enough || !strconv.IsPrint(character) || character == ' ' {
			return strconv.Quote(name[:position] + "…")
		}
	}
	return name
}

// suggestion returns ", did you mean X" if name differs from the known name X only in case,
// dashes, underscores, spaces or one character.
func suggestion(name string, known []string) string {
	bare := func(word string) string {
		return strings.ToLower(strings.NewReplacer("_", "", "-", "", " ", "").Replace(word))
	}
	for _, candidate := range known {
		if withinOneEdit(bare(candidate), bare(name)) {
			return fmt.Sprintf(", did you mean %q", candidate)
		}
	}
	return ""
}

// withinOneEdit reports whether one insertion, deletion or change of a byte at most turns a into b.
func withinOneEdit(a, b string) bool {
	for a != "" && b != "" && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	tail := func(word string) string { return word[min(1, len(word)):] }
	return tail(a) == tail(b) || a == tail(b) || tail(a) == b
}
