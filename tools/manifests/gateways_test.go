package manifests

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// Configurations of gateways, and the Trenches for which they are.
var gateways = []struct{ gateway, trench string }{
	{"docs/gateways.md", "deployments/example/trench.yaml"},
	{"docs/gateways.md", "docs/kubernetes.md"},
	{"deployments/quickstart/bird.conf", "deployments/quickstart/trench.yaml"},
}

var (
	gatewayASN = regexp.MustCompile(`(?:\tlocal .*port 10179 as |router bgp |  as = )(\d+)`)
	remoteASN  = regexp.MustCompile(`remoteASN: (\d+)`)
)

// numbers returns the distinct numbers of a file.
func numbers(t *testing.T, file string, pattern *regexp.Regexp) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, m := range pattern.FindAllStringSubmatch(string(text), -1) {
		list = append(list, m[1])
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// The AS number of a gateway is the one that the Trench expects.
func TestGatewaysFitTrenches(t *testing.T) {
	for _, c := range gateways {
		got, want := numbers(t, c.gateway, gatewayASN), numbers(t, c.trench, remoteASN)
		if len(got) != 1 || !slices.Equal(got, want) {
			t.Errorf("%s has the AS numbers %v, %s %v", c.gateway, got, c.trench, want)
		}
	}
}
