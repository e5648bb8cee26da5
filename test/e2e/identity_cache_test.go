package e2e

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/lab"
)

// lateDenial is longer than the test's wait for the VIPs: the program must not wait for the
// denial.
const lateDenial = 2 * waitTimeout

// cached is an attested fixture whose lb and frontend keep their SVIDs in files.
type cached struct {
	attested
	lbFile, frontendFile string
}

// newCached returns a pod whose VIPs are advertised.
func newCached(t *testing.T) cached {
	t.Helper()
	a := newAttested(t)
	c := cached{a, a.path("lb-svid.json"), a.path("frontend-svid.json")}
	a.lb.Start()
	a.frontend.Start()
	a.offer(a.lb, lbID, time.Hour)
	a.offer(a.frontend, frontendID, time.Hour)
	a.up(a.target1)
	c.startLB()
	c.startFrontend()
	a.wantRoutes(vipA4, vipA6)
	return c
}

func (c cached) startLB() {
	c.t.Helper()
	c.startLBAs([]string{"SPIFFE_ENDPOINT_SOCKET=" + c.lb.Addr()}, as(c.pod.LBArgs(noDrain),
		"--identity=spiffe", "--spiffe-id="+lab.LBID, "--identity-cache="+c.lbFile))
}

func (c cached) startFrontend() {
	c.t.Helper()
	c.startFrontendAs([]string{"SPIFFE_ENDPOINT_SOCKET=" + c.frontend.Addr()},
		as(c.pod.FrontendArgs(noDrain, shortSettle),
			"--identity=spiffe", "--spiffe-id="+lab.FrontendID, "--identity-cache="+c.frontendFile))
}

// wantKey waits until a file has the private key of an SVID, and checks that no process logged it.
func (c cached) wantKey(file string, svid *x509svid.SVID) {
	c.t.Helper()
	_, key, err := svid.MarshalRaw()
	c.must(err)
	c.waitFor(func() error {
		content, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var stored struct{ Key []byte }
		c.must(json.Unmarshal(content, &stored))
		if string(stored.Key) != string(key) {
			return fmt.Errorf("%s has another key", file)
		}
		return nil
	})
	info, err := os.Stat(file)
	c.must(err)
	if info.Mode() != 0o600 {
		c.t.Errorf("%s has mode %v", file, info.Mode())
	}
	secret := base64.StdEncoding.EncodeToString(key)
	if strings.Contains(c.pod.LB.Output()+c.pod.Frontend.Output(), secret[len(secret)/2:]) {
		c.t.Error("a private key was logged")
	}
}

// A program that restarts while the Workload API is unavailable, or denies it an SVID, uses the
// SVID of the previous run: SPIRE's agent cannot attest a new container without the API server
// (docs/adr/0038-cached-svid.md).
func TestRestartWithoutWorkloadAPI(t *testing.T) {
	t.Parallel()
	for _, program := range []struct {
		name, health string
		id           spiffeid.ID
		api          func(cached) *identitytest.WorkloadAPI
		process      func(cached) *lab.Process
		start        func(cached)
		file         func(cached) string
	}{
		{
			"lb", lab.LBHealth, lbID, func(c cached) *identitytest.WorkloadAPI { return c.lb },
			func(c cached) *lab.Process { return c.pod.LB }, cached.startLB, func(c cached) string { return c.lbFile },
		},
		{
			"frontend", lab.FrontendHealth, frontendID, func(c cached) *identitytest.WorkloadAPI { return c.frontend },
			func(c cached) *lab.Process { return c.pod.Frontend }, cached.startFrontend,
			func(c cached) string { return c.frontendFile },
		},
	} {
		for _, outage := range []struct {
			name  string
			begin func(*identitytest.WorkloadAPI)
		}{
			{"absent", (*identitytest.WorkloadAPI).Stop},
			{"mute", (*identitytest.WorkloadAPI).Mute},
			{"denies", (*identitytest.WorkloadAPI).Deny},
			{"denies late", func(api *identitytest.WorkloadAPI) { api.DenyLate(lateDenial) }},
		} {
			t.Run(program.name+"/"+outage.name, func(t *testing.T) {
				t.Parallel()
				c := newCached(t)
				api := program.api(c)
				outage.begin(api)
				c.must(program.process(c).Kill())
				c.wantRoutes()
				killed := time.Now()
				program.start(c)
				c.wantRoutes(vipA4, vipA6)
				t.Logf("advertised %v after the restart", time.Since(killed))
				c.waitLine(program.process(c), 0, "cached SVID in use", program.id.String())
				c.wantHealth(program.health, "Identity", healthv1.HealthCheckResponse_SERVING)
				if program.name == "frontend" {
					out, _ := c.run("frontend", "events", "--admin-socket=unix://"+c.pod.FrontendAdmin())
					if !strings.Contains(out, "identity: cached SVID in use") {
						t.Errorf("the events do not show the cached SVID:\n%s", out)
					}
				}

				// The SVID of the Workload API replaces the cached one, also in the file.
				svid := c.offer(api, program.id, time.Hour)
				if outage.name == "absent" {
					api.Start()
				}
				if outage.name == "denies late" {
					return // the call continues for longer than the test
				}
				c.waitLine(program.process(c), 0, "SVID rotated")
				c.wantKey(program.file(c), svid)
				c.wantRoutes(vipA4, vipA6)
			})
		}
	}
}

// A cached SVID of another ID, or one that other users can read, is refused and named in the
// status.
func TestRefusedCachedSVID(t *testing.T) {
	t.Parallel()
	c := newCached(t)
	c.frontend.Stop()
	c.must(c.pod.Frontend.Kill())
	content, err := os.ReadFile(c.lbFile)
	c.must(err)
	c.must(os.WriteFile(c.frontendFile, content, 0o600))
	c.startFrontend()
	c.waitFrontend("Identity", false, "no such file", c.frontendFile, "SVID of "+lab.LBID, "not of "+lab.FrontendID)
	c.wantHealth(lab.FrontendHealth, "Readiness", healthv1.HealthCheckResponse_NOT_SERVING)
	c.must(c.pod.Frontend.Kill())

	c.must(os.Chmod(c.frontendFile, 0o640))
	c.startFrontend()
	c.waitFrontend("Identity", false, "no such file", c.frontendFile, "has mode 0640")
	c.wantRoutes()
	svid := c.offer(c.frontend, frontendID, time.Hour)
	c.frontend.Start()
	c.wantRoutes(vipA4, vipA6)
	c.wantKey(c.frontendFile, svid)
}
