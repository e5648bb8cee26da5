package trench

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// object of the JSON Schema, as far as the test looks at it.
type schemaObject struct {
	AdditionalProperties *bool `json:"additionalProperties"`
	Required             []string
	Properties           map[string]struct{ Default any }
}

// The schema for editors and the reader know the same fields, want the same
// ones, and have the same defaults.
func TestTheSchemaSaysWhatTheReaderDoes(t *testing.T) {
	data, err := os.ReadFile("../../docs/trench.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var schema struct {
		schemaObject
		Defs map[string]schemaObject `json:"$defs"`
	}
	if err := json.Unmarshal(data, &schema); err != nil {
		t.Fatal(err)
	}
	const attractor = "trench: a\nattractor: {name: a, vips: [20.0.0.1/32], gateways: [%s]}\n"
	const streams = "trench: a\nattractor: {name: a, vips: [20.0.0.1/32]}\nstreams: [%s]\n"
	const check = "{name: s, vips: [20.0.0.1/32], check: %s}"
	// Where each object stands in a file.
	files := map[string]string{
		"":          "%s",
		"attractor": "trench: a\nattractor: %s\n",
		"gateway":   attractor,
		"bfd":       fmt.Sprintf(attractor, "{name: g, address: 10.0.0.1, bfd: %s}"),
		"stream":    streams,
		"check":     fmt.Sprintf(streams, fmt.Sprintf(check, "%s")),
		"tcp":       fmt.Sprintf(streams, fmt.Sprintf(check, "{tcp: %s}")),
		"target":    fmt.Sprintf(streams, "{name: s, vips: [20.0.0.1/32], check: {tcp: {port: 1}}, targets: [%s]}"),
	}
	objects := map[string]schemaObject{"": schema.schemaObject}
	for name, o := range schema.Defs {
		if len(o.Properties) > 0 {
			objects[name] = o
		}
	}
	for name, o := range objects {
		file, ok := files[name]
		if !ok {
			t.Errorf("the schema has %q, the test does not know where it stands", name)
			continue
		}
		if o.AdditionalProperties == nil || *o.AdditionalProperties {
			t.Errorf("%q allows unknown fields", name)
		}
		_, err := Parse("f", fmt.Appendf(nil, file, "{bogus: 1}"), DefaultDefaults())
		if err == nil {
			t.Fatalf("%q: an unknown field was accepted", name)
		}
		var known, required []string
		for line := range strings.Lines(err.Error()) {
			if _, list, ok := strings.Cut(strings.TrimSpace(line), "the fields here are "); ok {
				known = strings.Split(list, ", ")
			}
			if before, _, ok := strings.Cut(line, ": is missing"); ok {
				required = append(required, before[strings.LastIndexAny(before, ". ")+1:])
			}
		}
		var properties []string
		for p := range o.Properties {
			properties = append(properties, p)
		}
		for _, list := range [][]string{known, required, properties, o.Required} {
			slices.Sort(list)
		}
		if !slices.Equal(known, properties) {
			t.Errorf("%q: the reader knows %v, the schema %v", name, known, properties)
		}
		if !slices.Equal(required, o.Required) {
			t.Errorf("%q: the reader wants %v, the schema %v", name, required, o.Required)
		}
	}
	if len(objects) != len(files) {
		t.Errorf("the schema has %d objects, the reader %d", len(objects), len(files))
	}

	c, err := Parse("f", []byte(strings.Replace(good, "name: gw4", "name: gw4\n      bfd: {}", 1)), DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	g, s := c.Attractor.Gateways[0], c.Streams[0]
	for path, want := range map[[2]string]any{
		{"gateway", "protocol"}:   "bgp",
		{"gateway", "localASN"}:   g.LocalASN,
		{"gateway", "remoteASN"}:  g.RemoteASN,
		{"gateway", "localPort"}:  g.LocalPort,
		{"gateway", "remotePort"}: g.RemotePort,
		{"gateway", "holdTime"}:   g.HoldTime,
		{"bfd", "minTx"}:          g.BFD.MinTx,
		{"bfd", "minRx"}:          g.BFD.MinRx,
		{"bfd", "multiplier"}:     g.BFD.Multiplier,
		{"stream", "minReady"}:    s.MinReady,
		{"check", "interval"}:     s.Check.Interval,
		{"check", "timeout"}:      s.Check.Timeout,
		{"check", "rise"}:         s.Check.Rise,
		{"check", "fall"}:         s.Check.Fall,
	} {
		got := schema.Defs[path[0]].Properties[path[1]].Default
		if n, ok := got.(float64); ok {
			got = int64(n)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("default of %s.%s: the schema has %v, the reader %v", path[0], path[1], got, want)
		}
	}
}
