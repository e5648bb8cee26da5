package trench_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// A configuration that never was a file has its problems by path. An object of another API can have
// numbers that no file has.
func TestValidateObjects(t *testing.T) {
	gateway := trench.Gateway{Name: "gw", Address: netip.MustParseAddr("169.254.1.1")}
	wrong := trench.Gateway{
		Name: "gw", Address: netip.MustParseAddr("20.0.0.7"), LocalASN: 1 << 40, LocalPort: -1, HoldTime: time.Second,
		BFD: &trench.BFD{MinTx: time.Millisecond, Multiplier: 256},
	}
	static := trench.Gateway{
		Name: "static", Address: netip.MustParseAddr("169.254.1.2"), Protocol: trench.Static, LocalPort: 179,
	}
	config := &trench.Config{
		Trench: "t", Attractor: trench.Attractor{
			Name: "a b", VIPs: []vip.VIP{vip.Require("20.0.0.0/24")}, Gateways: []trench.Gateway{gateway, wrong, static},
		},
		Streams: []trench.Stream{{Name: "s", VIPs: []vip.VIP{vip.Require("30.0.0.0/24")}, DrainTime: 2 * time.Hour}},
	}
	var got []string
	for _, problem := range trench.Validate(config.Complete(trench.DefaultDefaults())) {
		got = append(got, problem.Path+": "+problem.Message(func(path string) string { return path }))
	}
	want := []string{
		`attractor.name: is "a b": write 1 to 60 characters out of A-Z a-z 0-9 _ . -`,
		`attractor.gateways[1].localASN: is "1099511627776": write a whole number between 1 and 4294967294`,
		`attractor.gateways[1].localPort: is "-1": write a whole number between 1 and 65535`,
		`attractor.gateways[1].holdTime: is "1s": write a duration with its unit between 3s and 65535s`,
		`attractor.gateways[1].bfd.minTx: is "1ms": write a duration with its unit between 10ms and 1m`,
		`attractor.gateways[1].bfd.multiplier: is "256": write a whole number between 1 and 255`,
		`attractor.gateways[2].localPort: conflicts with protocol: static, which has no BGP session: ` +
			`remove it, or write protocol: bgp`,
		`attractor.gateways[1].name: gateway gw appears twice, first in attractor.gateways[0].name: ` +
			`remove one of them or change it`,
		`attractor.gateways[1].address: is 20.0.0.7, which lies in the VIP 20.0.0.0/24: ` +
			`a gateway cannot be reached through itself, change one of them`,
		`streams[0].drainTime: is "2h0m0s": write a duration with its unit between 0s and 1h`,
		`streams[0].vips[0]: VIP 30.0.0.0/24 is not one of the attractor: add it to attractor.vips or remove it here`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// Complete leaves the original as it is, so that it can be written without the defaults.
func TestCompleteCopies(t *testing.T) {
	config := &trench.Config{
		Attractor: trench.Attractor{Gateways: []trench.Gateway{{BFD: &trench.BFD{}}}},
		Streams: []trench.Stream{{Check: trench.Check{
			SingleCheck: trench.SingleCheck{HTTP: trench.HTTPCheck{Port: 80}},
		}}},
	}
	before := fmt.Sprintf("%+v %+v", *config, *config.Attractor.Gateways[0].BFD)
	full := config.Complete(trench.DefaultDefaults())
	if full.Attractor.Gateways[0].BFD.Multiplier != 3 || full.Streams[0].Check.HTTP.Path != "/" {
		t.Errorf("without defaults: %+v", full)
	}
	if after := fmt.Sprintf("%+v %+v", *config, *config.Attractor.Gateways[0].BFD); after != before {
		t.Errorf("changed from %s to %s", before, after)
	}
}

func TestItem(t *testing.T) {
	for path, want := range map[string]string{
		"streams[3].vips[0]": "3 vips[0] true", "streams[12]": "12  true", "streams": "0  false",
		"attractor.streams[1]": "1  false",
	} {
		i, rest, ok := trench.Item(path, "streams")
		if got := fmt.Sprint(i, " ", rest, " ", ok); ok && got != want || !ok && want[len(want)-5:] != "false" {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}
