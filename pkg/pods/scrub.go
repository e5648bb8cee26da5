package pods

import (
	"cmp"
	"encoding/json"
	"fmt"
	"index/suffixarray"
	"maps"
	"net/netip"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
)

const (
	// removed replaces a value that may be secret.
	removed = "(removed by sysdump)"
	// masked replaces the part of a check that may be secret.
	masked = "********"
	// unmistakable is the length from which a text is masked wherever it occurs. A shorter one, such
	// as the datagram "ping", may be a word of another file, unless it is in a header of credentials.
	unmistakable, unmistakableCredential = 20, 8
)

var (
	credentials = regexp.MustCompile(`(?i)^[^:]*(auth|cookie|cred|jwt|key|pass|secret|session|sign|token).*: $`)
	// safeVariables matches the variables whose values are kept. Passwords of vipgate are in files.
	safeVariables = regexp.MustCompile(`^(VIPGATE_.*|POD_.*|SPIFFE_ENDPOINT_SOCKET|GOMEMLIMIT|GOGC)$`)
	// safeAnnotations matches the annotations whose values are kept: last-applied-configuration
	// repeats the object with its secrets.
	safeAnnotations = regexp.MustCompile(
		`^vipgate\.io/(vips|check|min-ready|drain-time|last-resort|policy|maglev|confirm)$|^k8s\.v1\.cni\.cncf\.io/|` +
			`^kubectl\.kubernetes\.io/default-container$|^deployment\.kubernetes\.io/revision$`)
)

// masker removes secrets from objects and trench files, and remembers the secrets of checks:
// statuses, conditions and logs quote them.
type masker struct {
	mu       sync.Mutex
	replaced map[string]string // by the text that a message may quote
	words    []string          // names and types, which checks of tenants must not mask elsewhere
}

// scrub removes values from an object that may be secret: variables and arguments of containers
// that are not vipgate's, annotations, parts of checks, and data of ConfigMaps that are not trench
// files. own reports whether the object is part of a trench pod, and within a container whether
// that is vipgate's. It changes the object.
func (m *masker) scrub(object map[string]any, own bool) map[string]any {
	delete(object, "managedFields")
	if metadata, is := object["metadata"].(map[string]any); is {
		labels, _ := metadata["labels"].(map[string]any)
		_, own = labels[trenchLabel]
	}
	for key, value := range object {
		switch typed := value.(type) {
		case map[string]any:
			switch key {
			case "annotations":
				replace(typed, func(name string) bool { return safeAnnotations.MatchString(name) })
				if check, has := typed[v1alpha1.CheckAnnotation].(string); has {
					typed[v1alpha1.CheckAnnotation] = maskJSON(check, m.check)
				}
			case "data":
				replace(typed, func(name string) bool { return strings.HasSuffix(name, ".yaml") })
				for name, text := range typed {
					if text, is := text.(string); is && text != removed {
						typed[name] = m.file(text)
					}
				}
			case "binaryData":
				replace(typed, func(string) bool { return false })
			case "check":
				object[key] = m.check(typed)
			default:
				m.scrub(typed, own)
			}
		case []any:
			m.scrubList(key, typed, own)
		case string:
			switch {
			// The messages of some conditions are records that repeat annotations.
			case key == "message" && strings.HasPrefix(typed, "{"):
				object[key] = maskJSON(typed, func(record map[string]any) any { return m.scrub(record, false) })
			case key == "name" || key == "type":
				m.mu.Lock()
				m.words = append(m.words, typed)
				m.mu.Unlock()
			}
		}
	}
	return object
}

// scrubList removes secrets from a list under a key.
func (m *masker) scrubList(key string, list []any, own bool) {
	for _, item := range list {
		object, is := item.(map[string]any)
		if !is {
			continue
		}
		name, _ := object["name"].(string)
		mine := own
		switch key {
		case "env":
			if _, has := object["value"]; has && !(own && safeVariables.MatchString(name)) {
				object["value"] = removed
			}
		case "containers", "initContainers", "ephemeralContainers":
			if mine = own && slices.Contains(ownContainers, name); !mine {
				for _, field := range []string{"command", "args", "lifecycle", "livenessProbe", "readinessProbe", "startupProbe"} {
					delete(object, field)
				}
			}
		}
		m.scrub(object, mine)
	}
}

// replace removes the values that are not kept.
func replace(values map[string]any, keep func(name string) bool) {
	for name := range values {
		if !keep(name) {
			values[name] = removed
		}
	}
}

// maskJSON masks an object in a text, which is masked whole if it is not an object.
func maskJSON(text string, mask func(object map[string]any) any) string {
	var object map[string]any
	// Messages quote a number as it is written.
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	if decoder.Decode(&object) != nil {
		return masked
	}
	kept, err := json.Marshal(mask(object))
	if err != nil {
		return masked
	}
	return string(kept)
}

// file masks the checks of a trench file, and the values that are not fields of one.
func (m *masker) file(text string) string {
	var object map[string]any
	if strings.TrimSpace(text) == "" {
		return text
	}
	if yaml.Unmarshal([]byte(text), &object) != nil {
		return masked
	}
	kept, err := yaml.Dump(m.object(object, reflect.TypeFor[trench.Config]()), yaml.WithLineWidth(-1))
	if err != nil {
		return masked
	}
	return string(kept)
}

// check masks the values of a check that may be secret, and the values that are not fields of one.
func (m *masker) check(check map[string]any) any {
	return m.object(check, reflect.TypeFor[trench.Check]())
}

// object masks the values of an object by the type of its fields.
func (m *masker) object(object map[string]any, of reflect.Type) any {
	fields := trench.FieldsOf(of)
	for key, value := range object {
		i := slices.IndexFunc(fields, func(field trench.Field) bool { return field.Key == key })
		if i < 0 {
			object[key] = m.whole(value)
		} else {
			object[key] = m.field(value, fields[i])
		}
	}
	return object
}

// field masks the value of a field, or each item of its list.
func (m *masker) field(value any, field trench.Field) any {
	of, is := field.Type, field.Tag.Get("form")
	for of.Kind() == reflect.Array || of.Kind() == reflect.Slice || of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	isObject := of.Kind() == reflect.Struct && of != trench.AddressType && of != trench.VIPType
	switch typed := value.(type) {
	case []any:
		for i, item := range typed {
			typed[i] = m.field(item, field)
		}
		return typed
	case map[string]any:
		if isObject {
			return m.object(typed, of)
		}
		return m.whole(typed)
	case string:
		switch name, secret, has := strings.Cut(typed, ":"); {
		case is == "header" && has:
			return m.secret(name+": ", strings.TrimPrefix(secret, " "))
		case is == "header" || is == "payload" || isObject:
			return m.secret("", typed)
		}
		if place, query, has := strings.Cut(typed, "?"); is == "request" && has {
			return m.secret(place+"?", query)
		}
	case map[any]any:
		return masked
	default:
		if value != nil && (is == "header" || is == "payload") {
			return m.secret("", fmt.Sprint(value))
		}
	}
	return value
}

// whole masks a value with all texts in it.
func (m *masker) whole(value any) any {
	switch typed := value.(type) {
	case string:
		m.secret("", typed)
	case []any:
		for _, item := range typed {
			m.whole(item)
		}
	case map[string]any:
		for _, item := range typed {
			m.whole(item)
		}
	}
	return masked
}

// secret returns a text whose end is masked, and remembers the end.
func (m *masker) secret(kept, secret string) string {
	least := unmistakable
	if credentials.MatchString(kept) {
		least = unmistakableCredential
	}
	remember := func(text, shown string, least int) {
		if len(text) < least {
			return
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.replaced[text] = shown
	}
	remember(secret, masked, least)
	switch {
	case strings.HasSuffix(kept, ": "): // with the quotation mark, it is no field of another file
		remember(`"`+kept+secret, `"`+kept+masked, unmistakableCredential)
	case kept != "":
		remember(kept+secret, kept+masked, unmistakableCredential)
	}
	// Messages quote the beginning of a long value.
	if quoted := trench.Quote(kept + secret); strings.HasSuffix(quoted, `…"`) {
		remember(strings.TrimPrefix(strings.TrimSuffix(quoted, `…"`), `"`+kept), masked, least)
	}
	return kept + masked
}

// finish masks the configuration in force in kernel dumps, and remembered secrets in all files.
func (m *masker) finish(files []File) {
	const begin, end = "# Configuration in force\n", "\n# Interfaces\n"
	for i, file := range files {
		if path.Base(file.Name) != "kernel.txt" {
			continue
		}
		if before, rest, has := strings.Cut(string(file.Content), begin); has {
			configuration, after, more := strings.Cut(rest, end)
			if more {
				after = end + after
			}
			files[i].Content = []byte(before + begin + m.file(configuration) + after)
		}
	}
	// The longer text first: one may be the beginning of another one.
	longest := func(a, b string) int { return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(a, b)) }
	quoted := func(text string) string { text = strconv.Quote(text); return text[1 : len(text)-1] }
	var pairs []string
	words := suffixarray.New([]byte(strings.Join(m.words, "\n"))) // a cluster has many, and many checks
	for _, text := range slices.SortedFunc(maps.Keys(m.replaced), longest) {
		shown := m.replaced[text]
		_, errAddress := netip.ParseAddr(text)
		_, errPrefix := netip.ParsePrefix(text)
		if errAddress == nil || errPrefix == nil || words.Lookup([]byte(text), 1) != nil {
			continue
		}
		// As it is, quoted, and quoted in a text of JSON.
		for range 3 {
			pairs = append(pairs, text, shown)
			text, shown = quoted(text), quoted(shown)
		}
	}
	replacer := strings.NewReplacer(pairs...)
	for i, file := range files {
		files[i].Content = []byte(replacer.Replace(string(file.Content)))
	}
}
