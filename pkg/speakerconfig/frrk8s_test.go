package speakerconfig

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
)

func frrK8sSpeaker() Speaker {
	return Speaker{
		Trench: "trench-a", AS: 64500, FrontendAS: 4200000000, Listens: 10179,
		Frontend: netip.MustParseAddr("169.254.100.1"),
		VIPs:     []netip.Prefix{netip.MustParsePrefix("20.0.0.1/32"), netip.MustParsePrefix("2000::1/128")},
		Gateways: []trench.Gateway{{Name: "gw1", Address: netip.MustParseAddr("192.0.2.1")}},
	}
}

// The FRRConfiguration is the one that the chart creates, frr-k8s renders and FRR loads in other
// tests.
func TestFRRK8s(t *testing.T) {
	want, err := os.ReadFile("../../test/e2e/testdata/frr-k8s/vipgate.yaml")
	harness.Must(t, err)
	text, err := frrK8sSpeaker().Text(frrK8s)
	harness.Must(t, err)
	_, got, _ := strings.Cut(text, "FRRConfiguration.\n")
	got = strings.Replace(got, "name: vipgate-trench-a", "name: vipgate-trench-a-trench-a", 1) // the namespace
	if got != string(want) {
		t.Errorf("got\n%s", got)
	}
}

func TestFRRK8sPassword(t *testing.T) {
	speaker := frrK8sSpeaker()
	speaker.Password = Placeholder
	text, err := speaker.Text(frrK8s)
	harness.Must(t, err)
	if !strings.Contains(text, "passwordSecret: {name: vipgate-trench-a}") || strings.Contains(text, Placeholder) {
		t.Errorf("got\n%s", text)
	}
}

func TestFRRK8sRefuses(t *testing.T) {
	for want, change := range map[string]func(*Speaker){
		"--speaker-listen=0":             func(s *Speaker) { s.Listens = 0 },
		"--speaker-listen=20179":         func(s *Speaker) { s.Listens = 20179 },
		"--speaker-local-as is required": func(s *Speaker) { s.FrontendAS = s.AS },
	} {
		speaker := frrK8sSpeaker()
		change(&speaker)
		_, err := speaker.Text(frrK8s)
		harness.WantError(t, err, want)
	}
}
