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

// plainNumber are the texts that begin with a digit and are written without quotes.
var plainNumber = regexp.MustCompile(`^([0-9]+(\.[0-9]+){3}(/[0-9]+)?|[0-9]+(ns|us|ms|s|m|h))$`)

// words are texts without quotes that YAML takes for something else.
var words = []string{"y", "n", "yes", "no", "on", "off", "true", "false", "null"}

// plain reports whether a text needs no quotes, for any reader of YAML.
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

// appendText writes a text. What is quoted is ASCII: the escapes of Go are those of YAML, too.
func appendText(b []byte, s string) []byte {
	if plain(s) {
		return append(b, s...)
	}
	return strconv.AppendQuoteToASCII(b, s)
}

// appendAddress writes an address or a prefix; those of IPv6 need quotes for their colons.
func appendAddress[T interface{ AppendTo([]byte) []byte }](b []byte, a T, family vip.Family) []byte {
	if family == vip.IPv4 {
		return a.AppendTo(b)
	}
	return append(a.AppendTo(append(b, '"')), '"')
}

// fieldOrder are the fields that are written first; the others follow in the order of the alphabet.
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

// appendValue writes a value of JSON in one line.
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
		return strconv.AppendFloat(b, v, 'f', -1, 64) // YAML is decoded to these
	case bool, int, int32, int64, json.Number:
		return fmt.Append(b, v)
	}
	return appendText(b, fmt.Sprint(v))
}

// appendFields writes the fields of an object, one a line, and lists of objects with one a line.
// Without fields nothing is written.
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

// addresses are at most one of each family; the zero Addr is none.
type addresses [len(vip.Families)]netip.Addr

func (a addresses) empty() bool { return a == addresses{} }

// target is a target of a stream.
type target struct {
	name        string
	ips         addresses
	terminating bool
}
