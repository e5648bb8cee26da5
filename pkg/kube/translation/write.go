package translation

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/vipgate/vipgate/pkg/vip"
)

// plainNumber matches the scalars that begin with a digit and are written without quotes.
var plainNumber = regexp.MustCompile(`^([0-9]+(\.[0-9]+){3}(/[0-9]+)?|[0-9]+(ns|us|ms|s|m|h))$`)

// words lists the scalars that YAML reads as booleans or null unless they are quoted.
var words = []string{"y", "n", "yes", "no", "on", "off", "true", "false", "null"}

// plain reports whether every YAML reader reads s as a string without quotes.
func plain(s string) bool {
	if s == "" || s[0] >= '0' && s[0] <= '9' {
		return plainNumber.MatchString(s)
	}
	for i := range len(s) {
		c := s[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '/'
		if !letter && (i == 0 || (c < '0' || c > '9') && c != '-' && c != '_' && c != '.') {
			return false
		}
	}
	return !slices.Contains(words, strings.ToLower(s))
}

// appendText writes a string, quoted in ASCII if needed. The escapes of Go are valid in YAML.
func appendText(b []byte, s string) []byte {
	if plain(s) {
		return append(b, s...)
	}
	return strconv.AppendQuoteToASCII(b, s)
}

// appendAddress writes an address or a prefix. IPv6 needs quotes because of the colons.
func appendAddress[T interface{ AppendTo([]byte) []byte }](b []byte, a T, family vip.Family) []byte {
	if family == vip.IPv4 {
		return a.AppendTo(b)
	}
	return append(a.AppendTo(append(b, '"')), '"')
}

// fieldOrder lists the fields that are written first. The remaining fields follow in alphabetical
// order.
var fieldOrder = []string{
	"name", "address", "ips", "vips", "minReady", "tcp", "http", "grpc", "port", "check", "drainTime", "maglev",
	"protocols",
}

func fieldNames(m map[string]any) []string {
	rank := func(name string) int {
		if i := slices.Index(fieldOrder, name); i >= 0 {
			return i
		}
		return len(fieldOrder)
	}
	return slices.SortedFunc(maps.Keys(m), func(a, b string) int {
		if d := rank(a) - rank(b); d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
}

// appendValue writes a JSON value in one line.
func appendValue(b []byte, v any) []byte {
	switch v := v.(type) {
	case map[string]any:
		b = append(b, '{')
		for i, name := range fieldNames(v) {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = append(appendText(b, name), ": "...)
			b = appendValue(b, v[name])
		}
		return append(b, '}')
	case []any:
		b = append(b, '[')
		for i, item := range v {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = appendValue(b, item)
		}
		return append(b, ']')
	case string:
		return appendText(b, v)
	case nil:
		return append(b, "null"...)
	case float64:
		return strconv.AppendFloat(b, v, 'f', -1, 64) // type of numbers decoded from YAML
	case bool, int, int32, int64, json.Number:
		return fmt.Append(b, v)
	}
	return appendText(b, fmt.Sprint(v))
}

// appendFields writes the fields of an object, one per line, and each item of a list of objects
// on a separate line. It writes nothing for an empty object.
func appendFields(b []byte, indent string, m map[string]any) []byte {
	for i, name := range fieldNames(m) {
		if i > 0 {
			b = append(b, indent...)
		}
		b = append(appendText(b, name), ':')
		list, ok := m[name].([]any)
		if !ok || !slices.ContainsFunc(list, isObject) {
			b = append(appendValue(append(b, ' '), m[name]), '\n')
			continue
		}
		b = append(b, '\n')
		for _, item := range list {
			b = append(append(b, indent...), "  - "...)
			b = append(appendValue(b, item), '\n')
		}
	}
	return b
}

func isObject(v any) bool {
	_, ok := v.(map[string]any)
	return ok
}

// append writes the stream without its targets.
func (s *stream) append(b []byte) []byte {
	b = append(appendText(append(b, "  - name: "...), s.name), "\n    vips: ["...)
	for i, v := range s.vips {
		if i > 0 {
			b = append(b, ", "...)
		}
		b = appendAddress(b, v.Prefix(), v.Family())
	}
	return append(append(b, "]\n"...), s.fields...)
}

// appendTargets writes the targets of a stream.
func appendTargets(b []byte, targets []target) []byte {
	if len(targets) == 0 {
		return b
	}
	b = append(b, "    targets:\n"...)
	for _, t := range targets {
		b = append(appendText(append(b, "      - {name: "...), t.name), ", ips: ["...)
		first := true
		for family, a := range t.ips {
			if !a.IsValid() {
				continue
			}
			if !first {
				b = append(b, ", "...)
			}
			first = false
			b = appendAddress(b, a, vip.Family(family))
		}
		b = append(b, ']')
		if t.terminating {
			b = append(b, ", terminating: true"...)
		}
		b = append(b, "}\n"...)
	}
	return b
}

// addresses holds at most one address per family; the zero Addr means none.
type addresses [len(vip.Families)]netip.Addr

func (a addresses) empty() bool { return a == addresses{} }

// target is a target of a stream.
type target struct {
	name        string
	ips         addresses
	terminating bool
}
