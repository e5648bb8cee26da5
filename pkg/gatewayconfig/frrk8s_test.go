package gatewayconfig

import (
	"net/netip"
	"os"
	"testing"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// frrK8s is the trench of test/e2e/testdata/frr-k8s.
func frrK8s() FRRK8s {
	var config trench.Config
	config.Attractor.VIPs = []vip.VIP{vip.Require("20.0.0.1/32"), vip.Require("2000::1/128")}
	config.Attractor.Gateways = []trench.Gateway{{Address: netip.MustParseAddr("192.0.2.1")}}
	return FRRK8s{
		Name: "vipgate-trench-a-trench-a", Namespace: "frr-k8s-system", ASN: 64500, AnnouncerASN: 4200000000, Port: 10179,
		Announcers: []netip.Addr{netip.MustParseAddr("169.254.100.1")},
	}.Of(&config)
}

// The FRRConfiguration is the one that frr-k8s renders, and FRR loads, in the end-to-end tests.
func TestFRRConfiguration(t *testing.T) {
	want, err := os.ReadFile("../../test/e2e/testdata/frr-k8s/vipgate.yaml")
	harness.Must(t, err)
	got, err := frrK8s().Text()
	harness.Must(t, err)
	if got != string(want) {
		t.Errorf("got\n%s", got)
	}
}

func TestFRRConfigurationErrors(t *testing.T) {
	for want, change := range map[string]func(*FRRK8s){
		"the ASN of FRR is missing":        func(f *FRRK8s) { f.ASN = 0 },
		"FRR's and the announcers'":        func(f *FRRK8s) { f.ASN = f.AnnouncerASN },
		"no addresses of announcers":       func(f *FRRK8s) { f.Announcers = nil },
		"port 20179 is outside of 1 to":    func(f *FRRK8s) { f.Port = 20179 },
		"port 0 is outside of 1 to 16384,": func(f *FRRK8s) { f.Port = 0 },
	} {
		f := frrK8s()
		change(&f)
		_, err := f.Text()
		harness.WantError(t, err, want)
	}
}
