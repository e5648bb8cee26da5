package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// `frontend status` names each mistake in a router's configuration with its remedy, and nothing
// once the router has the text of `frontend gateway-config`.
func TestStatusNamesMistakesOfRouter(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	key := filepath.Join(f.Dir, "a.key")
	f.must(os.WriteFile(key, []byte("SECRET\n"), 0o600))
	signed := trenchWith(t, ", holdTime: 9s, passwordFile: "+key)
	f.must(f.pod.WriteTrench(signed))
	right, status := f.run("frontend", "gateway-config", "bird", "gateway-a4", "gateway-a6",
		"--trench-file="+f.pod.TrenchFile())
	if status != 0 {
		t.Fatal(right)
	}
	f.up(f.target1, f.target2)
	f.startPod()
	// printed waits until the status has every part, and returns it.
	printed := func(parts ...string) (text string) {
		t.Helper()
		f.waitFor(func() error {
			text, _ = f.run("frontend", "status", "--admin-socket=unix://"+f.pod.FrontendAdmin())
			for _, part := range parts {
				if !strings.Contains(text, part) {
					return fmt.Errorf("no %q in\n%s", part, text)
				}
			}
			if strings.Contains(text, "\ngateway gateway-a6") {
				return fmt.Errorf("the other session has a problem:\n%s", text)
			}
			return nil
		})
		return text
	}
	const compare = "\n  next: compare the router with `frontend gateway-config KIND gateway-a4`"
	const family, unsigned = "family", "password missing at the pod"
	for _, tt := range []struct {
		name, old, new string // the first old of the right configuration, for IPv4, is replaced
		want           string
	}{
		{
			"AS number of the router", "as 4248829953", "as 65001",
			"down: NOTIFICATION sent: Bad peer AS: 65001; the gateway has another AS number than remoteASN 4248829953, ",
		},
		{
			"AS number of the pod", "as 8103", "as 65002",
			"down: NOTIFICATION received: Bad peer AS: 8103; the gateway expects another AS number than localASN 8103, ",
		},
		{"password", `"SECRET"`, `"OTHER"`, "down: TCP-MD5: the passwords of both sides differ"},
		{"password missing at the router", `password "SECRET";`, "", "down: TCP-MD5: the gateway does not sign"},
		{
			"shorter hold time", "hold time 9", "hold time 4",
			"gateway gateway-a4: the hold time is 4s, which the gateway offers, instead of 9s; set 9s at the gateway, or " +
				"holdTime: 4s",
		},
		{
			"no hold time", "hold time 9", "hold time 0",
			"down: NOTIFICATION sent: Unacceptable hold time: 0; set the hold time of the gateway to 9s, at least 3s",
		},
		{
			"prefix limit", "receive limit 100 action restart", "receive limit 1 action disable",
			"NOTIFICATION received: Maximum number of prefixes reached; raise the prefix limit of the gateway",
		},
		{family, "", "", "down: NOTIFICATION sent: Required capability missing; activate ipv4 unicast for this session"},
		{unsigned, "", "", "down: TCP-MD5: the gateway signs, and this side does not"},
	} {
		text := strings.Replace(right, tt.old, tt.new, 1)
		switch tt.name {
		case family:
			text = strings.Replace(right, "\tipv4 {\n\t\timport where net ~ VIPS4", "\tipv6 {\n\t\timport all", 1)
		case unsigned:
			f.must(f.pod.WriteTrench(strings.Replace(signed, ", passwordFile: "+key, "", 1)))
		}
		if text == right && tt.name != unsigned {
			t.Fatalf("%s: %q is not in\n%s", tt.name, tt.old, right)
		}
		f.regateway(func(c *lab.GatewayConfig) { c.Text = text })
		out := printed(tt.want, compare)
		t.Logf("%s:\n%s", tt.name, out[:strings.Index(out, " advertised")])
	}
	out, _ := f.run("frontend", "explain", vipA4, "--admin-socket=unix://"+f.pod.FrontendAdmin())
	harness.WantText(t, out, "the gateway signs, and this side does not", "gateway-config KIND gateway-a4")
	f.must(f.pod.WriteTrench(signed))
	f.wantRoutes(every()...)
	if out := printed("4 of 4 VIPs advertised"); strings.Contains(out, "\ngateway gateway-") {
		t.Errorf("a problem with the printed configuration:\n%s", out)
	}
}
