package bird

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/turns"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// fullInput uses every feature of the template.
func fullInput() renderInput {
	gateway := func(name, addr string, local, remote int64) trench.Gateway {
		return trench.Gateway{
			Name: name, Address: netip.MustParseAddr(addr), LocalASN: local, RemoteASN: remote,
			LocalPort: 10179, RemotePort: 10180, HoldTime: 3 * time.Second,
		}
	}
	a := Session{
		Gateway: gateway("gateway-a.1_x", "169.254.100.150", 8103, 4248829953),
		Path:    turns.Path{Local: netip.MustParseAddr("169.254.100.1")}, Password: `p'#{};w`,
	}
	b := Session{Gateway: gateway("gateway-b", "fd00::150", 8103, 8103)}
	b.Local = netip.MustParseAddr("fd00::1")
	b.BFD = &trench.BFD{MinTx: 300 * time.Millisecond, MinRx: 300 * time.Millisecond, Multiplier: 3}
	return renderInput{
		Options: Options{
			RouterID: netip.MustParseAddr("1.2.3.4"), LoopbackPort: 1790, Password: "SECRET",
			TableID: 4096, ECMP: true, KernelScanTime: 10 * time.Second,
			ImportAll: true, ImportLimit: 1000,
		},
		Interface: "ext-vlan", Sessions: []Session{a, b},
		VIPs: []vip.VIP{vip.Require("20.0.0.1/32"), vip.Require("2000::1/128")},
	}
}

// checkWithBIRD parses a configuration with the real BIRD.
func checkWithBIRD(t *testing.T, content []byte) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "bird.conf")
	harness.Must(t, os.WriteFile(path, content, 0o600))
	if out, err := exec.Command(Executable(""), "-p", "-c", path).CombinedOutput(); err != nil {
		t.Fatalf("BIRD refuses it: %v: %s\n%s", err, out, content)
	}
}

func TestBIRDAcceptsConfiguration(t *testing.T) {
	full := fullInput()
	logging := full
	logging.Dir, logging.LogFileSize = t.TempDir(), 20000
	small := Options{
		RouterID: full.RouterID, LoopbackPort: 1790, TableID: 4096,
		KernelScanTime: time.Second,
	}
	tests := map[string]renderInput{
		"everything":  full,
		"nothing":     {Options: small, Interface: "eth0"},
		"with a log":  logging,
		"masked":      full.Masked(),
		"a wider VIP": {Options: small, Interface: "eth0", VIPs: []vip.VIP{vip.Require("20.0.0.0/24")}},
	}
	for name, in := range tests {
		t.Run(name, func(t *testing.T) {
			content, err := render(in)
			harness.Must(t, err)
			checkWithBIRD(t, content)
		})
	}
}

func TestRenderNoVIPRouteNoMaskedSecret(t *testing.T) {
	in := fullInput()
	content, err := render(in.Masked())
	harness.Must(t, err)
	text := string(content)
	if strings.Contains(text, "route 20.") || strings.Contains(text, "protocol static") {
		t.Error("the configuration announces something by itself")
	}
	for _, secret := range []string{"SECRET", "p'#"} {
		if strings.Contains(text, secret) {
			t.Errorf("the masked configuration holds %q", secret)
		}
	}
	if in.Password != "SECRET" || in.Sessions[0].Password == maskedPassword {
		t.Error("masking changed the original")
	}
}

func TestParsePassword(t *testing.T) {
	for _, tt := range []struct {
		content, want, problem string
	}{
		{content: "secret\n", want: "secret"},
		{content: "secret\r\n", want: "secret"},
		{content: "se cret", want: "se cret"},
		{content: "", problem: "empty"},
		{content: "\n", problem: "empty"},
		{content: `a"b`, problem: "quote"},
		{content: "a\nb\n", problem: "control character"},
		{content: strings.Repeat("x", 80) + "\n", want: strings.Repeat("x", 80)},
		{content: strings.Repeat("x", 81), problem: "81 bytes"},
	} {
		got, err := parsePassword([]byte(tt.content))
		if tt.problem != "" {
			harness.WantError(t, err, tt.problem)
		} else if err != nil || got != tt.want {
			t.Errorf("ParsePassword(%q) = %q, %v; want %q", tt.content, got, err, tt.want)
		}
	}
}

func TestRenderRefusesUnsafeNames(t *testing.T) {
	for _, change := range []func(*renderInput){
		func(in *renderInput) { in.Interface = `eth0"; } evil` },
		func(in *renderInput) { in.Interface = "eth*" },
		func(in *renderInput) { in.Interface = "eth\n" },
		func(in *renderInput) { in.Interface = "e'th0" },
		func(in *renderInput) { in.Dir, in.LogFileSize = `/tmp/a"b`, 1000 },
	} {
		in := fullInput()
		change(&in)
		if content, err := render(in); err == nil || content != nil {
			t.Errorf("rendered with interface %q, directory %q", in.Interface, in.Dir)
		}
	}
}

func TestOptionsInConfiguration(t *testing.T) {
	in := fullInput()
	in.KernelScanTime, in.LoopbackHoldTime = 7500*time.Millisecond, 7*time.Second
	content, err := render(in)
	harness.Must(t, err)
	in.ECMP, in.Password, in.Sessions[0].Password = false, "", ""
	without, err := render(in)
	harness.Must(t, err)
	for text, n := range map[string][2]int{
		"router id 1.2.3.4;": {1, 1},
		"scan time 7;":       {2, 2}, // of both families
		"hold time 7;":       {1, 1},
		"kernel table 4096;": {2, 2},
		"merge paths yes;":   {2, 0},

		"local 127.0.0.1 port 1790 as 4200000001;":  {1, 1},
		"neighbor 127.0.0.2 as 4200000000;":         {1, 1},
		"password \"":                               {2, 0},
		"graceful restart off;":                     {6, 6}, // two kinds, three sessions
		"strict bind;":                              {4, 4}, // three sessions and BFD
		"bgp_path.prepend(8103);":                   {3, 3}, // eBGP
		"bgp_local_pref = 0;":                       {1, 1}, // iBGP
		"20.0.0.1/32+":                              {1, 1},
		"2000::1/128+":                              {1, 1},
		"bfd { min tx interval 300 ms; min rx":      {1, 1},
		"local 169.254.100.1 port 10179 as 8103;":   {1, 1},
		"neighbor fd00::150 port 10180 as 8103;":    {1, 1},
		"interface \"ext-vlan\"":                    {3, 3},
		"debug protocols { states };":               {1, 1},
		"protocol device { scan time 1; }":          {1, 1},
		"error wait time 1, 1;":                     {3, 3}, // the loopback session's, too
		"import limit 200000 action restart;":       {2, 2},
		"import limit 1000 action block;":           {2, 2},
		`if proto != "LB" then reject;`:             {2, 2},
		"LB_IN_4 { if net = 0.0.0.0/0 then reject;": {1, 1}, // a VIP is never a default route
		"LB_IN_6 { if net = ::/0 then reject;":      {1, 1},
		`source = RTS_BGP && proto != "LB" then ac`: {1, 1},
	} {
		if got := [2]int{strings.Count(string(content), text), strings.Count(string(without), text)}; got != n {
			t.Errorf("%q is there %v times, want %v", text, got, n)
		}
	}
}
