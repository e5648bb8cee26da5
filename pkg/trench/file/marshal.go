package file

import (
	"fmt"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// Marshal returns the trench file of a configuration. Equal configurations have equal files. Fields
// with their zero value, or their default if they can be zero, are omitted.
func Marshal(config *trench.Config) []byte {
	return appendBlock(nil, "", reflect.ValueOf(config).Elem())
}

// appendBlock writes an object with a line for each field, and for each item of a list of objects.
func appendBlock(b []byte, indent string, object reflect.Value) []byte {
	first := true
	for field, value := range written(object) {
		if !first {
			b = append(b, indent...)
		}
		first = false
		b = append(append(b, field.Key...), ':')
		switch {
		case isBlock(field.Type):
			b = appendBlock(append(b, "\n  "+indent...), indent+"  ", value)
		case isObjects(field.Type):
			b = append(b, '\n')
			for i := range value.Len() {
				b = append(b, indent+"  - "...)
				if item := value.Index(i); isBlock(item.Type()) {
					b = appendBlock(b, indent+"    ", item)
				} else {
					b = append(appendFlow(b, item), '\n')
				}
			}
		default:
			b = append(appendFlow(append(b, ' '), value), '\n')
		}
	}
	return b
}

// written returns the fields of an object that are not omitted.
func written(object reflect.Value) func(yield func(*trench.Field, reflect.Value) bool) {
	return func(yield func(*trench.Field, reflect.Value) bool) {
		fields := trench.FieldsOf(object.Type())
		for i := range fields {
			value := fields[i].Of(object)
			omitted := value.IsZero()
			if initial, own := fields[i].Default(); own {
				omitted = value.Equal(initial)
			}
			if value.Kind() == reflect.Slice {
				omitted = value.Len() == 0
			}
			if (fields[i].Required || !omitted) && !yield(&fields[i], value) {
				return
			}
		}
	}
}

// isObjects reports whether a type is a list of objects.
func isObjects(t reflect.Type) bool {
	return t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Struct &&
		t.Elem() != trench.VIPType && t.Elem() != trench.AddressType
}

// isBlock reports whether an object is too large for one line: it has a list of objects.
func isBlock(t reflect.Type) bool {
	return t.Kind() == reflect.Struct &&
		slices.ContainsFunc(trench.FieldsOf(t), func(f trench.Field) bool { return isObjects(f.Type) })
}

// appendFlow writes a value in one line.
func appendFlow(b []byte, value reflect.Value) []byte {
	switch v := value.Interface().(type) {
	case time.Duration:
		return append(b, duration(v)...)
	case fmt.Stringer:
		return appendText(b, v.String())
	}
	switch value.Kind() {
	case reflect.Pointer:
		return appendFlow(b, value.Elem())
	case reflect.Struct:
		b = append(b, '{')
		begin := len(b)
		for field, of := range written(value) {
			if len(b) > begin {
				b = append(b, ", "...)
			}
			b = appendFlow(append(append(b, field.Key...), ": "...), of)
		}
		return append(b, '}')
	case reflect.Slice, reflect.Array:
		b = append(b, '[')
		begin := len(b)
		for i := range value.Len() {
			item := value.Index(i)
			if address, ok := item.Interface().(netip.Addr); ok && !address.IsValid() {
				continue // an array may have fewer addresses than items
			}
			if len(b) > begin {
				b = append(b, ", "...)
			}
			b = appendFlow(b, item)
		}
		return append(b, ']')
	case reflect.String:
		return appendText(b, value.String())
	}
	return fmt.Append(b, value.Interface())
}

// duration returns the text of a duration without units that are zero.
func duration(d time.Duration) string {
	text := d.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-2]
		}
	}
	return text
}

// plainNumber matches the scalars that begin with a digit and are written without quotes.
var plainNumber = regexp.MustCompile(`^[0-9]+(\.[0-9]+){3}(/[0-9]+)?$`)

// words lists the scalars that YAML reads as booleans or null unless they are quoted.
var words = []string{"y", "n", "yes", "no", "on", "off", "true", "false", "null"}

// plain reports whether every YAML reader reads a text as a string without quotes.
func plain(text string) bool {
	if text == "" || text[0] >= '0' && text[0] <= '9' {
		return plainNumber.MatchString(text)
	}
	for i := range len(text) {
		c := text[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '/'
		if !letter && (i == 0 || (c < '0' || c > '9') && c != '-' && c != '_' && c != '.') {
			return false
		}
	}
	return !slices.Contains(words, strings.ToLower(text))
}

// appendText writes a string, quoted in ASCII if needed. The escapes of Go are valid in YAML.
func appendText(b []byte, text string) []byte {
	if plain(text) {
		return append(b, text...)
	}
	return strconv.AppendQuoteToASCII(b, text)
}
