package speakerconfig_test

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/speakerconfig"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

const example = `
trench: trench-a
attractor:
  name: attractor-a
  vips: [20.0.0.1/32, 20.0.0.2/32, 20.0.0.3/32, 20.0.1.0/24, "2000::1/128"]
  gateways:
    - {name: a4, address: 169.254.100.150, remoteASN: 65002, passwordFile: /run/a.key, holdTime: 9s, ttlSecurity: true}
    - {name: a6, address: "fd00:100::150", remoteASN: 8103, families: both}
    - {name: b4, address: 169.254.100.151, multihop: 2, bfd: {minTx: 400ms, minRx: 200ms, multiplier: 5}}
`

// speakerOf returns the speaker of a trench file.
func speakerOf(t *testing.T, text string) speakerconfig.Speaker {
	t.Helper()
	config, err := trenchfile.Parse("example", []byte(text), trench.DefaultDefaults())
	harness.Must(t, err)
	speaker := speakerconfig.Speaker{
		Address: netip.MustParseAddrPort("10.77.0.1:10179"), AS: 8103, Frontend: netip.MustParseAddr("10.77.0.2"),
		FrontendAS: 4200000000, Password: speakerconfig.Placeholder, RouterID: netip.MustParseAddr("192.0.2.1"),
		BMP: netip.MustParseAddrPort("127.0.0.1:11019"), Gateways: config.Attractor.Gateways,
	}
	for _, v := range config.Attractor.VIPs {
		speaker.VIPs = append(speaker.VIPs, v.Prefix())
	}
	return speaker
}

// Every version of BIRD, and gobgpd, accept the text. The tests of test/speakers run it.
func TestDaemonsAcceptText(t *testing.T) {
	birds, err := filepath.Glob("../../bin/birds/*/bird")
	harness.Must(t, err)
	programs := map[string][]string{"gobgp": {"gobgpd -d -f"}}
	for _, bird := range append(birds, lab.BIRD()) {
		programs["bird"] = append(programs["bird"], bird+" -p -c")
	}
	for name, change := range map[string]func(*speakerconfig.Speaker){
		"eBGP":     func(*speakerconfig.Speaker) {},
		"prepends": func(s *speakerconfig.Speaker) { s.Prepends = true },
		"iBGP":     func(s *speakerconfig.Speaker) { s.FrontendAS, s.Prepends = s.AS, true },
		"listens":  func(s *speakerconfig.Speaker) { s.Listens, s.Password, s.BMP = 1179, "", netip.AddrPort{} },
		"IPv6 session": func(s *speakerconfig.Speaker) {
			s.Address = netip.MustParseAddrPort("[fd00:100::1]:10179")
			s.Frontend = netip.MustParseAddr("fd00:100::2")
		},
		"one family": func(s *speakerconfig.Speaker) { s.VIPs = s.VIPs[:1] },
		"no VIPs":    func(s *speakerconfig.Speaker) { s.VIPs = nil },
	} {
		for kind, commands := range programs {
			speaker := speakerOf(t, example)
			change(&speaker)
			text, err := speaker.Text(kind)
			harness.Must(t, err)
			path := filepath.Join(t.TempDir(), "config")
			harness.Must(t, os.WriteFile(path, []byte(text), 0o600))
			for _, command := range commands {
				words := append(strings.Fields(command), path)
				if !filepath.IsAbs(words[0]) {
					lab.Need(t, words[0])
				}
				if out, err := exec.CommandContext(t.Context(), words[0], words[1:]...).CombinedOutput(); err != nil {
					t.Errorf("%s, %s: %v\n%s\n%s", command, name, err, out, text)
				}
			}
		}
	}
}

// FRR needs seconds for a thousand entries of a list.
func TestRangesOfFRR(t *testing.T) {
	text, err := speakerOf(t, example).Text("frr")
	harness.Must(t, err)
	harness.WantText(t, text, "\nip prefix-list VIPGATE4 seq 10 permit 20.0.0.1/32\n"+
		"ip prefix-list VIPGATE4 seq 20 permit 20.0.0.2/31 ge 32\nip prefix-list VIPGATE4 seq 30 permit 20.0.1.0/24\n",
		"\nipv6 prefix-list VIPGATE6 seq 10 permit 2000::1/128\n")
}

func TestGoBGPRefusals(t *testing.T) {
	const head = "trench: trench-a\nattractor:\n  name: a\n  vips: [20.0.0.1/32]\n  interface: eth0\n  gateways: "
	for want, text := range map[string]string{
		"gateway a has no address":                                     "[{name: a, interface: eth0}]",
		"gateway a expects AS 5, and the speaker has AS 8103; write":   "[{name: a, address: 192.0.2.1, localASN: 5}]",
		"connects to port 10179, and localPort of gateway a is 5, but": "[{name: a, address: 192.0.2.1, localPort: 5}]",
		"gateway a is static, which only BIRD of the frontend serves":  "[{name: a, address: 192.0.2.1, protocol: static}]",
	} {
		_, err := speakerOf(t, head+text).Text("gobgp")
		harness.WantError(t, err, want)
	}
	speaker := speakerOf(t, example)
	speaker.RouterID = netip.Addr{}
	_, err := speaker.Text("gobgp")
	harness.WantError(t, err, "GoBGP needs a router ID; write --router-id")
}

// Each kind has a template, and each template is a kind.
func TestKinds(t *testing.T) {
	templates, err := filepath.Glob("*.tmpl")
	harness.Must(t, err)
	kinds := speakerconfig.Kinds()
	for i := range kinds {
		kinds[i] += ".tmpl"
	}
	if slices.Sort(kinds); !slices.Equal(kinds, templates) {
		t.Errorf("kinds %q, templates %q", kinds, templates)
	}
}
