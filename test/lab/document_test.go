package lab

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/test/harness"
)

var update = flag.Bool("update", false, "write docs/gateways.md instead of comparing it")

const gatewaysDocument = "../../docs/gateways.md"

// blockPattern matches a fenced block that names a template of the folder gateways, and
// optionally an option: the block then has the lines that the option adds.
var blockPattern = regexp.MustCompile("(?m)^```[a-z]+ template=(\\S+)(?: adds=(\\S+))?\n((?s:.*?))^```$")

// documented returns the configuration of the document: GatewayA, with BFD where the daemon
// supports it.
func documented(template string) GatewayConfig {
	c := GatewayA()
	c.BFD = !strings.HasPrefix(template, "gobgp")
	c.VIPs = []netip.Prefix{netip.MustParsePrefix("20.0.0.1/32"), netip.MustParsePrefix("2000::1/128")}
	return c
}

// shown renders a template for the document, with an option, or the lines that an option adds to
// it.
func shown(template, option string) (string, error) {
	c := documented(template)
	base, err := render(template+".tmpl", rendered{GatewayConfig: c})
	if err != nil || option == "" {
		return base, err
	}
	switch option {
	case "password":
		c.Password = "SECRET"
	case "passive":
		c.Passive = true
	default:
		return "", fmt.Errorf("there is no option %q", option)
	}
	text, err := render(template+".tmpl", rendered{GatewayConfig: c})
	if err != nil {
		return "", err
	}
	seen := slices.Collect(strings.Lines(base))
	var added strings.Builder
	table := ""
	for line := range strings.Lines(text) {
		if strings.HasSuffix(template, ".toml") && strings.HasPrefix(strings.TrimSpace(line), "[") {
			table = line
		}
		if !slices.Contains(seen, line) {
			seen = append(seen, line)
			// A key of TOML needs its table.
			added.WriteString(table + line)
			table = ""
		}
	}
	return added.String(), nil
}

// TestDynamicNeighborsDocument compares the files with dynamic neighbors with the tests' own.
func TestDynamicNeighborsDocument(t *testing.T) {
	for template, name := range map[string]string{
		"bird.conf": "bird-dynamic.conf", "frr.conf": "frr-dynamic.conf", "gobgpd.toml": "gobgpd-dynamic.toml",
	} {
		c := documented(template)
		c.Ranges = ExternalSubnets()
		want, err := render(template+".tmpl", rendered{GatewayConfig: c})
		harness.Must(t, err)
		path := filepath.Join(filepath.Dir(gatewaysDocument), "gateways", name)
		if *update {
			harness.Must(t, os.WriteFile(path, []byte(want), 0o644))
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("%s differs from the tests' configuration (%v): run make generate", path, err)
		}
	}
}

// The configurations in docs/gateways.md match the configurations of the tests, without their
// logging.
func TestGatewaysDocument(t *testing.T) {
	b, err := os.ReadFile(gatewaysDocument)
	harness.Must(t, err)
	blocks := map[string]int{}
	text := blockPattern.ReplaceAllStringFunc(string(b), func(block string) string {
		m := blockPattern.FindStringSubmatch(block)
		blocks[m[1]]++
		want, err := shown(m[1], m[2])
		harness.Must(t, err)
		if want != m[3] && !*update {
			t.Errorf("the block of %s %s is\n%s\nbut the tests use\n%s\nrun go test ./test/lab -run "+
				"TestGatewaysDocument -update", m[1], m[2], m[3], want)
		}
		first, _, _ := strings.Cut(block, "\n")
		return first + "\n" + want + "```"
	})
	if *update && !t.Failed() {
		harness.Must(t, os.WriteFile(gatewaysDocument, []byte(text), 0o644))
	}
	templates, err := gatewayFiles.ReadDir("gateways")
	harness.Must(t, err)
	for _, file := range templates {
		if name := strings.TrimSuffix(file.Name(), ".tmpl"); blocks[name] == 0 {
			t.Errorf("%s is not in the document", name)
		}
	}
	for fence, protocol := range map[string]trench.Protocol{"yaml": trench.BGP, "yaml static": trench.Static} {
		_, example, _ := strings.Cut(text, "```"+fence+"\n")
		example, _, found := strings.Cut(example, "```")
		if !found {
			t.Fatalf("the document has no trench file of %s gateways", protocol)
		}
		config, err := trenchfile.Parse("docs/gateways.md", []byte(example), trench.DefaultDefaults())
		harness.Must(t, err)
		for i, want := range []netip.Addr{GatewayA4, GatewayA6} {
			if g := config.Attractor.Gateways[i]; g.Address != want || g.Protocol != protocol {
				t.Errorf("gateway %d of the trench file is %s %s, want %s %s", i+1, g.Protocol, g.Address, protocol, want)
			}
		}
	}
}
