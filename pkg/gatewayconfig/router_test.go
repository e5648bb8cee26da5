package gatewayconfig_test

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/gatewayconfig"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/test/harness"
)

var update = flag.Bool("update", false, "write testdata/junos.golden")

const example = `
trench: trench-a
attractor:
  name: attractor-a
  vips: [20.0.0.1/32, 20.0.0.2/32, 20.0.0.3/32, 20.0.1.0/24, "2000::1/128"]
  gateways:
    - {name: a4, address: 169.254.100.150, localASN: 65001, remoteASN: 65002, passwordFile: /run/a.key, holdTime: 9s,
       ttlSecurity: true}
    - name: a6
      address: fd00:100::150
      localASN: 65002
      remoteASN: 65002
      bfd: {minTx: 400ms, minRx: 200ms, multiplier: 5}
    - {name: s4, address: 169.254.100.151, protocol: static, bfd: {minTx: 100ms, minRx: 200ms}}
    - {name: b4, address: 169.254.100.152, remoteASN: 65003, remotePort: 179}
`

// text renders gateways of the example, which pods call.
func text(t *testing.T, kind, names string, pods ...string) (string, error) {
	t.Helper()
	config, err := trenchfile.Parse("example", []byte(example), trench.DefaultDefaults())
	harness.Must(t, err)
	var gateways []trench.Gateway
	for _, gateway := range config.Attractor.Gateways {
		if strings.Contains(names, gateway.Name) {
			gateways = append(gateways, gateway)
		}
	}
	var prefixes []netip.Prefix
	for _, pod := range pods {
		prefixes = append(prefixes, netip.MustParsePrefix(pod))
	}
	router, err := gatewayconfig.Of(config, gateways, prefixes)
	if err != nil {
		return "", err
	}
	return router.Text(kind)
}

// No router with Junos is available: the text is compared, and not tested.
func TestJunos(t *testing.T) {
	got, err := text(t, "junos", "a4 a6 s4", "169.254.100.1/32", "169.254.100.2/32", "fd00:100::/64")
	harness.Must(t, err)
	const file = "testdata/junos.golden"
	if *update {
		harness.Must(t, os.WriteFile(file, []byte(got), 0o644))
	}
	want, err := os.ReadFile(file)
	harness.Must(t, err)
	if got != string(want) {
		t.Errorf("%s differs: go test ./pkg/gatewayconfig -update\n%s", file, got)
	}
}

// The installed FRR is older than static routes that follow BFD.
func TestStaticRoutesOfFRR(t *testing.T) {
	got, err := text(t, "frr", "s4", "169.254.100.1/32", "169.254.100.2/32")
	harness.Must(t, err)
	harness.WantText(t, got, " profile s4\n  receive-interval 100\n  transmit-interval 200\n",
		"\nip route 20.0.0.1/32 169.254.100.1 bfd profile s4\nip route 20.0.0.1/32 169.254.100.2 bfd profile s4\n",
		"\nip route 20.0.1.0/24 169.254.100.2 bfd profile s4\n")
	if strings.Contains(got, "router bgp") || strings.Contains(got, "2000::1") {
		t.Errorf("BGP or another family in\n%s", got)
	}
}

// FRR needs seconds for a thousand entries of a list.
func TestRangesOfFRR(t *testing.T) {
	got, err := text(t, "frr", "a4 a6", "169.254.100.1/32", "fd00:100::1/128")
	harness.Must(t, err)
	harness.WantText(t, got, "\nip prefix-list VIPS4 seq 1 permit 20.0.0.1/32\n"+
		"ip prefix-list VIPS4 seq 2 permit 20.0.0.2/31 ge 32\nip prefix-list VIPS4 seq 3 permit 20.0.1.0/24\n",
		"\nipv6 prefix-list VIPS6 seq 1 permit 2000::1/128\n")
}

func TestRefusals(t *testing.T) {
	for name, tt := range map[string]struct{ kind, gateways, pod, want string }{
		"kind":               {"ios", "a4", "169.254.100.1/32", "use one of frr, bird, gobgp, junos"},
		"no pod":             {"frr", "a6", "169.254.100.1/32", "no ipv6 address of a pod; name"},
		"static with gobgpd": {"gobgp", "s4", "169.254.100.1/32", "gobgpd has no BFD"},
		"static with subnet": {"bird", "s4", "169.254.100.0/24", "name the pods' addresses instead of 169.254.100.0/24"},
		"password of subnet": {"gobgp", "a4", "169.254.100.0/24", "gobgpd accepts no session from a subnet"},
		"two routers":        {"frr", "a4 b4", "169.254.100.1/32", "a4 and b4 differ in remoteASN or remotePort"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := text(t, tt.kind, tt.gateways, tt.pod)
			harness.WantError(t, err, tt.want)
		})
	}
}

// Each kind has a template, and each template is a kind.
func TestKinds(t *testing.T) {
	templates, err := filepath.Glob("*.tmpl")
	harness.Must(t, err)
	kinds := gatewayconfig.Kinds()
	for i := range kinds {
		kinds[i] += ".tmpl"
	}
	if slices.Sort(kinds); !slices.Equal(kinds, templates) {
		t.Errorf("kinds %q, templates %q", kinds, templates)
	}
}
