package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/test/lab"
)

// A router with exactly the text of `frontend gateway-config` comes up with a signed session, sends
// a default route and accepts exactly the VIPs of the trench file.
func TestGatewayConfigOfEachKind(t *testing.T) {
	t.Parallel()
	const bfd, ttl = ", bfd: {minTx: 400ms, minRx: 200ms, multiplier: 5}", ", ttlSecurity: true"
	for _, test := range []struct {
		kind     lab.Kind
		settings string
	}{
		{lab.KindBIRD, bfd + ttl},
		{lab.KindFRR, bfd}, // FRR 8.4.4 has multihop BFD with ttl-security
		{lab.KindFRR, ttl},
		{lab.KindGoBGP, ttl},
	} {
		kind, withBFD := test.kind, strings.Contains(test.settings, bfd)
		t.Run(string(kind)+test.settings, func(t *testing.T) {
			t.Parallel()
			need(t, kind)
			f := newFixture(t)
			f.must(f.gateway.Process.Kill())
			key := filepath.Join(f.Dir, "a.key")
			f.must(os.WriteFile(key, []byte("SECRET\n"), 0o600)) // the placeholder of the text
			trench := trenchWith(t, ", holdTime: 9s, localASN: 65001, passwordFile: "+key+test.settings)
			f.must(f.pod.WriteTrench(trench))
			// The router does not know the VIPs of target 2.
			few := filepath.Join(f.Dir, "few.yaml")
			four, two := fmt.Sprintf("vips: [%s, %q, %s, %q]", vipA4, vipA6, vipB4, vipB6), fmt.Sprintf("vips: [%s, %q]",
				vipA4, vipA6)
			text, streams, _ := strings.Cut(strings.Replace(trench, four, two, 1), "streams:")
			if streams == "" || !strings.Contains(text, two) {
				t.Fatalf("unexpected trench file:\n%s", trench)
			}
			f.must(os.WriteFile(few, []byte(text), 0o600))
			printed, status := f.run("frontend", "gateway-config", strings.ToLower(string(kind)), "gateway-a4", "gateway-a6",
				"--trench-file="+few)
			if status != 0 {
				t.Fatalf("exit status %d: %s", status, printed)
			}
			c := lab.GatewayA()
			c.Name, c.BFD, c.Text = "router-a", withBFD, printed
			router := f.startRouter(kind, f.Gateway, c)
			f.up(f.target1, f.target2)
			f.startPod()
			f.waitRouter(router, vipA4, vipA6)
			for _, name := range []string{"gateway-a4", "gateway-a6"} {
				f.waitGateway(name, func(g *frontendv1.GatewayStatus) bool {
					return g.GetExported() == 2 && g.GetImported() == 1 && (!withBFD || g.GetBfd() == "Up")
				})
			}
			f.waitRouter(router, vipA4, vipA6)
		})
	}
}
