package lab

import (
	"flag"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/gatewayconfig"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/test/harness"
)

var update = flag.Bool("update", false, "write docs/gateways.md instead of comparing it")

const gatewaysDocument = "../../docs/gateways.md"

// blockPattern matches a fenced block with the router's side of the document's gateways.
var blockPattern = regexp.MustCompile("(?m)^```[a-z]+ gateway-config=(\\S+)\n((?s:.*?))^```$")

// yamlPattern matches a trench file of the document.
var yamlPattern = regexp.MustCompile("(?m)^```(yaml(?: [a-z]+)?)\n((?s:.*?))^```$")

// The configurations in docs/gateways.md are the output of gateway-config for its trench file.
func TestGatewaysDocument(t *testing.T) {
	b, err := os.ReadFile(gatewaysDocument)
	harness.Must(t, err)
	text := string(b)
	examples := map[string]*trench.Config{}
	for _, m := range yamlPattern.FindAllStringSubmatch(text, -1) {
		examples[m[1]], err = trenchfile.Parse("docs/gateways.md", []byte(m[2]), trench.DefaultDefaults())
		harness.Must(t, err)
	}
	var pods []netip.Prefix
	for _, address := range []netip.Addr{PodExternal4, PodExternal6} {
		pods = append(pods, netip.PrefixFrom(address, address.BitLen()))
	}
	blocks := 0
	text = blockPattern.ReplaceAllStringFunc(text, func(block string) string {
		m := blockPattern.FindStringSubmatch(block)
		blocks++
		config := examples["yaml"]
		router, err := gatewayconfig.Of(config, config.Attractor.Gateways, pods)
		harness.Must(t, err)
		want, err := router.Text(m[1])
		harness.Must(t, err)
		if want != m[2] && !*update {
			t.Errorf("the block of %s is\n%s\nbut gateway-config prints\n%s\nrun go test ./test/lab -run "+
				"TestGatewaysDocument -update", m[1], m[2], want)
		}
		first, _, _ := strings.Cut(block, "\n")
		return first + "\n" + want + "```"
	})
	if *update && !t.Failed() {
		harness.Must(t, os.WriteFile(gatewaysDocument, []byte(text), 0o644))
	}
	if blocks == 0 {
		t.Error("the document has no configuration")
	}
	for fence, protocol := range map[string]trench.Protocol{"yaml": trench.BGP, "yaml static": trench.Static} {
		if examples[fence] == nil {
			t.Fatalf("the document has no trench file of %s gateways", protocol)
		}
		for i, want := range []netip.Addr{GatewayA4, GatewayA6} {
			if g := examples[fence].Attractor.Gateways[i]; g.Address != want || g.Protocol != protocol {
				t.Errorf("gateway %d of the trench file is %s %s, want %s %s", i+1, g.Protocol, g.Address, protocol, want)
			}
		}
	}
}
