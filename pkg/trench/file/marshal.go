package file

import (
	"fmt"
	"reflect"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/pkg/trench"
)

// Marshal returns the trench file of a configuration. Equal configurations have equal files. Fields
// with their zero value, or their default if they can be zero, are omitted.
func Marshal(config *trench.Config) []byte {
	root := nodeOf(reflect.ValueOf(config))
	root.Style = 0
	file, err := yaml.Dump(root, yaml.WithCompactSeqIndent(false), yaml.WithLineWidth(-1),
		yaml.WithQuotePreference(yaml.QuoteDouble))
	if err != nil {
		panic(err) // not with nodes of this package
	}
	return file
}

// nodeOf returns the YAML node of a value. A list of objects has a line for each object; an object
// without such a list, and any other list, are in one line.
func nodeOf(value reflect.Value) *yaml.Node {
	// Duration is a Stringer, too, but its text has units that are zero.
	switch v := value.Interface().(type) {
	case time.Duration:
		return textNode(duration(v))
	case fmt.Stringer:
		return textNode(v.String())
	}
	node := &yaml.Node{Style: yaml.FlowStyle}
	add := func(child *yaml.Node, multiline bool) {
		node.Content = append(node.Content, child)
		if multiline {
			node.Style = 0
		}
	}
	switch value.Kind() {
	case reflect.Pointer:
		return nodeOf(value.Elem())
	case reflect.Struct:
		node.Kind = yaml.MappingNode
		fields := trench.FieldsOf(value.Type())
		for nth := range fields {
			field := fields[nth].Of(value)
			if !fields[nth].Required && omitted(field, &fields[nth]) {
				continue
			}
			child := nodeOf(field)
			add(textNode(fields[nth].Key), false)
			// A child with several lines requires block style for its parents.
			add(child, child.Kind != yaml.ScalarNode && child.Style == 0)
		}
	case reflect.Slice, reflect.Array:
		node.Kind = yaml.SequenceNode
		for nth := range value.Len() {
			// An array has fewer items than its length: the rest is zero.
			if item := value.Index(nth); value.Kind() == reflect.Slice || !item.IsZero() {
				child := nodeOf(item)
				add(child, child.Kind == yaml.MappingNode)
			}
		}
	case reflect.String:
		return textNode(value.String())
	default:
		return &yaml.Node{Kind: yaml.ScalarNode, Value: fmt.Sprint(value.Interface())}
	}
	return node
}

func textNode(text string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}
}

// omitted reports whether the reader sets the value of a field that the file omits.
func omitted(value reflect.Value, field *trench.Field) bool {
	if initial, own := field.Default(); own {
		return value.Equal(initial)
	}
	return value.IsZero() || value.Kind() == reflect.Slice && value.Len() == 0
}

// duration returns the text of a duration without units that are zero.
func duration(length time.Duration) string {
	text := length.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-2]
		}
	}
	return text
}
