package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/harness"
)

const docs = "../../docs/"

func TestConfigurationDocument(t *testing.T) {
	clitest.Texts(t, "lb", true, parser(t), cli.Variables(program(), parser(t)))
}

func document(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(docs + "configuration.md")
	harness.Must(t, err)
	return string(b)
}

// The example sets every optional field to its default, so removing them must not
// change the configuration.
func TestTheExampleOfTheTrenchFileIsValid(t *testing.T) {
	_, example, found := strings.Cut(document(t), "<!-- example: parsed by a test -->\n```yaml\n")
	example, _, closed := strings.Cut(example, "```")
	if !found || !closed {
		t.Fatal("docs/configuration.md has no example of the trench file")
	}
	full, err := trenchfile.Parse("docs/configuration.md", []byte(example), trench.DefaultDefaults())
	harness.Must(t, err)
	optional := regexp.MustCompile(`(?m)^ +(protocol|localASN|remoteASN|localPort|remotePort|holdTime|` +
		`minReady|drainTime|maglev): .*\n|, interval: .*, fall: 3`)
	short := optional.ReplaceAllString(example, "")
	short = strings.Replace(short, "{minTx: 300ms, minRx: 300ms, multiplier: 3}", "{}", 1)
	got, err := trenchfile.Parse("short", []byte(short), trench.DefaultDefaults())
	if err != nil {
		t.Fatalf("%v in\n%s", err, short)
	}
	if len(short) > len(example)*2/3 {
		t.Fatalf("nothing was left out of the example:\n%s", short)
	}
	values := cmp.Options{
		cmp.Comparer(func(a, b vip.VIP) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmp.Comparer(func(a, b trench.Members) bool { return a == b }),
	}
	if diff := cmp.Diff(full, got, values); diff != "" {
		t.Errorf("what the example calls defaults are none (-example +defaults):\n%s", diff)
	}
}

type schemaObject struct {
	Required   []string
	Properties map[string]struct {
		Default     any
		Description string
	}
}

// The documented fields are exactly the fields of the JSON Schema, with the same
// defaults. A test of pkg/trench compares the schema with the reader.
func TestTrenchFieldsAreDocumented(t *testing.T) {
	data, err := os.ReadFile(docs + "trench.schema.json")
	harness.Must(t, err)
	var schema struct {
		schemaObject
		Defs map[string]schemaObject `json:"$defs"`
	}
	harness.Must(t, json.Unmarshal(data, &schema))
	objects := map[string]schemaObject{"The file": schema.schemaObject}
	for name, o := range schema.Defs {
		// Members of check.any and check.all have fields of check.
		if len(o.Properties) > 0 && name != "single" {
			objects[name] = o
		}
	}
	_, fields, found := strings.Cut(document(t), "<!-- fields -->\n")
	if !found {
		t.Fatal("docs/configuration.md has no list of fields")
	}
	row := regexp.MustCompile("(?m)^\\| `([^`]+)` \\| (.*?) \\| (.*) \\|$")
	for section := range strings.SplitSeq(fields, "\n### ") {
		title, text, _ := strings.Cut(section, "\n")
		if strings.TrimSpace(section) == "" {
			continue
		}
		o, ok := objects[title]
		if !ok {
			t.Errorf("the schema has no object %q", title)
			continue
		}
		delete(objects, title)
		seen := map[string]bool{}
		for _, m := range row.FindAllStringSubmatch(text, -1) {
			name, value, meaning := m[1], m[2], m[3]
			seen[name] = true
			p, ok := o.Properties[name]
			if !ok {
				t.Errorf("%s.%s is documented, and not in the schema", title, name)
				continue
			}
			if want := cell(p.Default, slices.Contains(o.Required, name)); want != "" && value != want {
				t.Errorf("%s.%s: documented as %q, in the schema %q", title, name, value, want)
			}
			// The reference lists the bounds that depend on no other field.
			bounds := regexp.MustCompile(`\d+m?s to the interval`).FindString(p.Description)
			if !strings.Contains(meaning, bounds) {
				t.Errorf("%s.%s: bounds %s are not documented", title, name, bounds)
			}
		}
		for name := range o.Properties {
			if !seen[name] {
				t.Errorf("%s.%s is not documented", title, name)
			}
		}
	}
	for title := range objects {
		t.Errorf("%s is not documented", title)
	}
}

// cell returns the required text of the column of defaults, or "" if any text is valid.
func cell(value any, required bool) string {
	if required {
		return "required"
	}
	switch v := value.(type) {
	case nil:
		return ""
	case float64:
		return fmt.Sprintf("`%.0f`", v)
	}
	return fmt.Sprintf("`%v`", value)
}
