package v1alpha1

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/test/harness"
)

var update = flag.Bool("update", false, "write the CustomResourceDefinition instead of comparing it")

const (
	crdFile    = "../../../deployments/kubernetes/crd.yaml"
	schemaFile = "../../../docs/trench.schema.json" // generated from the tables of the trench file's reader
	header     = "# Generated from docs/trench.schema.json: go test ./pkg/kube/v1alpha1 -run TestCRD -update\n"
)

type object = map[string]any

// converter converts schemas of the trench file to structural schemas of Kubernetes, which have no
// references, one type per value and few keywords.
type converter struct {
	defs object
	// nested reports whether the schemas belong to streams. Their lists have no limit, so the API
	// server refuses rules there: it estimates the cost of a rule for the longest possible list.
	nested bool
}

// addresses lists the schemas of addresses and prefixes. In the trench file they have patterns of
// 300 characters, which the API server would print in errors; a rule has a message instead.
func (c converter) addresses(name string) (object, bool) {
	s := object{"type": "string"}
	rule := func(rule, message string) {
		rules, _ := s["x-kubernetes-validations"].([]any)
		s["x-kubernetes-validations"] = append(rules, object{"rule": rule, "message": message})
	}
	switch name {
	case "address":
		s["maxLength"] = 45
		if c.nested {
			s["pattern"] = `^[0-9A-Fa-f:.]+$`
			break
		}
		rule("isIP(self)", "write an IPv4 or IPv6 address, such as 169.254.100.150 or fd00:100::150")
	case "vip":
		s["maxLength"] = 49
		if c.nested {
			s["pattern"] = `^[0-9A-Fa-f:.]+/[0-9]{1,3}$`
			break
		}
		rule("isCIDR(self) && cidr(self).prefixLength() > 0",
			"write an IPv4 or IPv6 address and the length of its prefix, such as 20.0.0.1/32 or 2000::1/128")
		rule("!isCIDR(self) || cidr(self) == cidr(self).masked()",
			"write an address without bits after the length of the prefix, such as 20.0.0.0/24; a host has /32 or /128")
	default:
		return nil, false
	}
	return s, true
}

// whole lists the patterns of quoted integers, which Kubernetes does not accept as numbers.
var whole = regexp.MustCompile(`^\^(\(0\|)?\[1-9\]\[0-9\]\{0,[0-9]+\}\)?\$$`)

func (c converter) convert(in object) object {
	if ref, ok := in["$ref"].(string); ok {
		in = maps.Clone(in)
		delete(in, "$ref")
		if out, ok := c.addresses(strings.TrimPrefix(ref, "#/$defs/")); ok {
			if description, ok := in["description"]; ok {
				out["description"] = description
			}
			return out
		}
		target := maps.Clone(c.defs[strings.TrimPrefix(ref, "#/$defs/")].(object))
		maps.Copy(target, in)
		return c.convert(target)
	}
	out := object{}
	for name, value := range in {
		switch name {
		case "type", "description", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
			"required", "oneOf", "enum":
			out[name] = value
		case "not":
			out[name] = c.convert(value.(object))
			delete(out[name].(object), "type")
		case "const":
			out["enum"] = []any{value}
		case "items":
			out[name] = c.convert(value.(object))
		case "properties":
			properties := object{}
			for field, of := range value.(object) {
				properties[field] = c.convert(of.(object))
			}
			out[name] = properties
		case "uniqueItems", "additionalProperties", "examples", "default", "if", "then": // not in structural schemas
		default:
			panic("unknown keyword " + name)
		}
	}
	// Do not set a default: Kubernetes would write it into objects.
	text, _ := out["description"].(string)
	if initial, ok := in["default"]; ok && !strings.Contains(text, "The default") {
		out["description"] = fmt.Sprintf("%s Default: %v.", text, initial)
	}
	c.setType(out)
	return out
}

// setType leaves one type.
func (c converter) setType(out object) {
	pattern, _ := out["pattern"].(string)
	kinds, several := out["type"].([]any)
	values, _ := out["enum"].([]any)
	switch {
	case slices.Contains(values, any(true)):
		out["type"] = "boolean"
		delete(out, "enum")
	case values != nil:
		out["type"] = "string"
	case several && kinds[0] == "string":
		out["type"] = "string"
	case several && whole.MatchString(pattern):
		out["type"], out["format"] = "integer", "int64"
		delete(out, "pattern")
	case several:
		delete(out, "type")
		out["x-kubernetes-int-or-string"] = true
		out["anyOf"] = []any{object{"type": "integer"}, object{"type": "string"}}
	case out["type"] == "array":
		items := out["items"].(object)
		out["x-kubernetes-list-type"] = "set"
		if items["type"] == "object" {
			out["x-kubernetes-list-type"] = "map"
			out["x-kubernetes-list-map-keys"] = []any{"name"}
			if required, _ := items["required"].([]any); !slices.Contains(required, any("name")) {
				out["x-kubernetes-list-type"] = "atomic"
				delete(out, "x-kubernetes-list-map-keys")
			}
		}
	}
}

func readYAML(t *testing.T, file string) object {
	t.Helper()
	text, err := os.ReadFile(file)
	harness.Must(t, err)
	var o object
	if err := yaml.Unmarshal(text, &o); err != nil { // of JSON, too, with whole numbers
		t.Fatal(err)
	}
	return o
}

// at returns the object below another one.
func at(o object, path ...string) object {
	for _, name := range path {
		o = o[name].(object)
	}
	return o
}

// crd returns the CustomResourceDefinition.
func crd(t *testing.T) object {
	t.Helper()
	schema := readYAML(t, schemaFile)
	c := converter{defs: at(schema, "$defs")}
	result := readYAML(t, "testdata/crd.yaml")
	version := at(result, "spec")["versions"].([]any)[0].(object)
	spec := at(version, "schema", "openAPIV3Schema", "properties", "spec")
	properties := at(spec, "properties")

	network := at(properties, "network", "properties", "subnets")
	network["items"] = c.convert(at(network, "items"))

	attractor := c.convert(at(schema, "properties", "attractor"))
	gateways := at(attractor, "properties", "gateways")
	gateways["maxItems"] = 1000 // far above any use; without a limit the API server refuses rules below it
	gateway := at(gateways, "items", "properties")
	delete(gateway, "passwordFile")
	gateway["passwordSecret"] = object{
		"description": "The key of a Secret, in the namespace of the Trench, that has the TCP-MD5 password. " +
			"While it is missing or refused the gateway has no session.",
		"type": "object", "required": []any{"name", "key"},
		"properties": object{
			"name": object{
				"description": "Name of the Secret.",
				"type":        "string", "pattern": `^[a-z0-9][a-z0-9.-]*$`, "maxLength": 253,
			},
			"key": object{
				"description": "Key of the password in the Secret.",
				"type":        "string", "pattern": `^[A-Za-z0-9._-]+$`, "maxLength": 253,
			},
		},
	}
	c.nested = true
	at(attractor, "properties")["policies"] = c.convert(at(schema, "$defs", "attractor", "properties", "policies"))
	streams := c.convert(at(schema, "properties", "streams"))
	c.nested = false
	streams["description"] = "Streams for targets that are no Pods, as in the trench file."
	properties["attractor"], properties["streams"] = attractor, streams

	defaults := object{}
	stream := c.convert(at(schema, "$defs", "stream"))
	for _, name := range []string{"drainTime", "minReady", "check", "maglev"} {
		defaults[name] = at(stream, "properties", name)
	}
	delete(at(defaults, "check"), "oneOf") // a Service may set the kind of the check
	properties["defaults"] = object{
		"description": "What the streams of Services have unless an annotation of the Service says otherwise.",
		"type":        "object", "properties": defaults,
	}
	return result
}

func TestCRD(t *testing.T) {
	var b bytes.Buffer
	b.WriteString(header)
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	harness.Must(t, e.Encode(crd(t)))
	if *update {
		harness.Must(t, os.WriteFile(crdFile, b.Bytes(), 0o644))
	}
	old, err := os.ReadFile(crdFile)
	harness.Must(t, err)
	if !bytes.Equal(old, b.Bytes()) {
		t.Errorf("%s is stale: run make generate", crdFile)
	}
}

// The types and the schema have the same fields.
func TestCRDHasFieldsOfTypes(t *testing.T) {
	version := at(crd(t), "spec")["versions"].([]any)[0].(object)
	properties := at(version, "schema", "openAPIV3Schema", "properties")
	network := &Network{Subnets: []string{""}}
	publish := &Publish{Addresses: []string{""}, FromService: "x", IngressClass: "x", GatewayClass: "x"}
	full := Spec{
		Network: network, Namespaces: []string{""}, Attractor: object{}, Streams: []any{""}, Defaults: object{"x": ""},
		Publish: publish, MaxRemoval: 1, NodeDrain: true, Quota: &DefaultQuota, Communities: []string{""},
	}
	for path, of := range map[string]any{
		"spec": full, "network": network, "publish": publish, "quota": DefaultQuota,
	} {
		text, err := json.Marshal(of)
		harness.Must(t, err)
		var fields object
		harness.Must(t, json.Unmarshal(text, &fields))
		schema := at(properties, "spec")
		if path != "spec" {
			schema = at(schema, "properties", path)
		}
		got, want := slices.Sorted(maps.Keys(at(schema, "properties"))), slices.Sorted(maps.Keys(fields))
		if !slices.Equal(got, want) {
			t.Errorf("%s has the fields %v, the type %v", path, got, want)
		}
	}
}

// structural fails for elements that the API server refuses in a structural schema, and for fields
// without a description.
func structural(t *testing.T, path string, s object) {
	t.Helper()
	if s["type"] == nil && s["x-kubernetes-int-or-string"] != true {
		t.Errorf("%s has no type", path)
	}
	for _, keyword := range []string{
		"$ref", "uniqueItems", "additionalProperties", "default", "x-kubernetes-preserve-unknown-fields",
	} {
		if s[keyword] != nil {
			t.Errorf("%s has %s", path, keyword)
		}
	}
	if strings.HasPrefix(path, "spec.") && !strings.HasSuffix(path, "[]") && s["description"] == nil {
		t.Errorf("%s has no description", path)
	}
	properties, _ := s["properties"].(object)
	for name, of := range properties {
		structural(t, strings.TrimPrefix(path+"."+name, "."), of.(object))
	}
	if items, ok := s["items"].(object); ok {
		structural(t, path+"[]", items)
	}
}

func TestCRDIsStructural(t *testing.T) {
	version := at(crd(t), "spec")["versions"].([]any)[0].(object)
	structural(t, "", at(version, "schema", "openAPIV3Schema"))
}
