package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/lab"
)

var lbID, frontendID = spiffeid.RequireFromString(lab.LBID), spiffeid.RequireFromString(lab.FrontendID)

// attested is a fixture whose lb and frontend have their SVIDs from separate Workload APIs.
type attested struct {
	*fixture
	ca           *identitytest.CA
	lb, frontend *identitytest.WorkloadAPI
}

func newAttested(t *testing.T) attested {
	t.Helper()
	return attested{
		fixture: newFixture(t), ca: identitytest.NewCA(t, lab.TrustDomain),
		lb: identitytest.NewWorkloadAPI(t), frontend: identitytest.NewWorkloadAPI(t),
	}
}

// start starts lb and frontend; unless named, each uses the only SVID that it is offered. extra is
// one argument for lb and one for frontend.
func (a attested) start(named bool, extra ...string) {
	a.t.Helper()
	lbArgs, frontendArgs := []string{"--identity=spiffe"}, []string{"--identity=spiffe"}
	if len(extra) == 2 {
		lbArgs, frontendArgs = append(lbArgs, extra[0]), append(frontendArgs, extra[1])
	}
	if named {
		lbArgs, frontendArgs = append(lbArgs, "--spiffe-id="+lab.LBID), append(frontendArgs,
			"--spiffe-id="+lab.FrontendID)
	}
	a.startLBAs([]string{"SPIFFE_ENDPOINT_SOCKET=" + a.lb.Addr()}, as(a.pod.LBArgs(noDrain), lbArgs...))
	a.startFrontendAs([]string{"SPIFFE_ENDPOINT_SOCKET=" + a.frontend.Addr()},
		as(a.pod.FrontendArgs(noDrain, shortSettle), frontendArgs...))
}

// offer makes a Workload API offer an SVID that is valid for ttl.
func (a attested) offer(api *identitytest.WorkloadAPI, id spiffeid.ID, ttl time.Duration) *x509svid.SVID {
	a.t.Helper()
	svid := a.ca.SVID(id, ttl)
	api.Offer(a.ca, []*x509svid.SVID{svid})
	return svid
}

// A rotated SVID moves the stream to a second connection; no UPDATE at the gateway
// (docs/architecture.md#failure-table).
func TestSVIDRotation(t *testing.T) {
	t.Parallel()
	const (
		rotations = 30
		// Every connection ends within this time, and no SVID is overdue before it.
		life = 12 * time.Second
	)
	a := newAttested(t)
	a.lb.Start()
	a.frontend.Start()
	a.lb.Rotate(a.ca, lbID, time.Second, life)
	a.frontend.Rotate(a.ca, frontendID, time.Second, life)
	a.up(a.target1)
	a.up(a.target2)
	a.start(true)
	a.wantRoutes(every()...)
	mark, lbFrom, from := a.mark(), length(a.pod.LB), length(a.pod.Frontend)
	moves := metric(t, a.get(lab.FrontendMetrics, "/metrics"), "vipgate_frontend_lb_stream_moves_total")

	deadline := time.Now().Add(rotations*time.Second + waitTimeout)
	for lb, frontend := 0, 0; lb < rotations || frontend < rotations; {
		if time.Now().After(deadline) {
			t.Fatalf("lb saw %d rotations and frontend %d, want %d", lb, frontend, rotations)
		}
		lb, frontend = len(lines(a.pod.LB, lbFrom, "SVID rotated")), len(lines(a.pod.Frontend, from, "SVID rotated"))
		a.waitPast(time.Now().Add(100 * time.Millisecond))
		a.wantRunning(a.pod.LB, a.pod.Frontend)
	}
	a.wantSilence(mark)
	a.waitFrontend("Readiness", true)
	page := a.get(lab.FrontendMetrics, "/metrics")
	// A connection is replaced after half of its life.
	if moved := metric(t, page, "vipgate_frontend_lb_stream_moves_total") - moves; moved < 2 {
		t.Errorf("the readiness stream moved %v times in %d rotations", moved, rotations)
	}
	if lost := metric(t, page, "vipgate_frontend_lb_stream_reconnects_total"); lost != 0 {
		t.Errorf("the readiness stream was lost %v times", lost)
	}
}

// metric returns the value of the first sample whose name and labels have a prefix.
func metric(t *testing.T, page, name string) float64 {
	t.Helper()
	for line := range strings.Lines(page) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			var value float64
			if _, err := fmt.Sscan(rest[strings.LastIndex(rest, " ")+1:], &value); err != nil {
				t.Fatalf("sample %q: %v", line, err)
			}
			return value
		}
	}
	t.Fatalf("there is no sample of %s", name)
	return 0
}

// An expired SVID ends its connection at NotAfter (docs/adr/0013-connection-ends-at-notafter.md).
func TestExpiredSVIDWithdraws(t *testing.T) {
	t.Parallel()
	// Long enough to observe the warnings between 2/3 of it and its end, also if the machine stalls.
	const life = 18 * time.Second
	for _, c := range []struct {
		whose, health, metrics string
		id                     spiffeid.ID
		api                    func(attested) *identitytest.WorkloadAPI
		wait                   func(*fixture, string, bool, ...string) string
	}{
		{
			"frontend", lab.FrontendHealth, lab.FrontendMetrics, frontendID,
			func(a attested) *identitytest.WorkloadAPI { return a.frontend }, (*fixture).waitFrontend,
		},
		{
			"lb", lab.LBHealth, lab.LBMetrics, lbID, func(a attested) *identitytest.WorkloadAPI { return a.lb },
			(*fixture).waitLB,
		},
	} {
		t.Run(c.whose, func(t *testing.T) {
			t.Parallel()
			a := newAttested(t)
			a.lb.Start()
			a.frontend.Start()
			a.offer(a.lb, lbID, time.Hour)
			a.offer(a.frontend, frontendID, time.Hour)
			a.up(a.target1)
			a.start(true)
			a.wantRoutes(vipA4, vipA6)
			a.wantHealth(c.health, "Identity", healthv1.HealthCheckResponse_SERVING)

			// The last SVID of this test: the connection moves to it, and ends with it.
			mark, from, lbFrom := a.mark(), length(a.pod.Frontend), length(a.pod.LB)
			svid := a.offer(c.api(a), c.id, life)
			end := svid.Certificates[0].NotAfter
			if c.whose == "lb" {
				// An open connection ends with the SVIDs of its start; this makes the frontend
				// open another one.
				a.waitLine(a.pod.LB, lbFrom, "SVID rotated")
				a.offer(a.frontend, frontendID, time.Hour)
			}
			a.waitLine(a.pod.Frontend, from, "readiness stream open")
			c.wait(a.fixture, "Identity", false, "was not renewed")
			if now := time.Now(); now.After(end) {
				t.Fatalf("Identity served until the SVID had ended at %v, it is %v now", end, now)
			}
			a.wantHealth(c.health, "Identity", healthv1.HealthCheckResponse_NOT_SERVING)
			a.wantHealth(c.health, "Readiness", healthv1.HealthCheckResponse_NOT_SERVING)
			name := fmt.Sprintf("vipgate_identity_not_after_timestamp_seconds{spiffe_id=%q}", c.id)
			if got := metric(t, a.get(c.metrics, "/metrics"), name); got != float64(end.Unix()) {
				t.Errorf("%s is %v, want %d", name, got, end.Unix())
			}

			for _, v := range []string{vipA4, vipA6} {
				received := a.waitUpdate(mark, v, withdrawn)
				// The gateway may read its clock slightly before the update arrives.
				if received.At.Before(end.Add(-time.Second)) {
					t.Errorf("%s was withdrawn at %v, long before the SVID ended at %v", v, received.At, end)
				}
				a.wantUpdates(mark, v, withdrawn)
			}
			if both := a.pod.LB.Output() +
				a.pod.Frontend.Output(); !strings.Contains(both, "connection closed: SVID expired") {
				t.Error("no log says that the connection ended with its SVID")
			}
			c.wait(a.fixture, "Identity", false, "the SVID "+c.id.String()+" expired", "local clock:")
			a.waitFrontend("Stream", false)
			for _, v := range a.frontendStatus().GetVips() {
				if want := readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_LOST; v.GetVip() == vipA4 &&
					v.GetReason() != want {
					t.Errorf("%s is withdrawn for %s, want %s", v.GetVip(), v.GetReason(), want)
				}
			}
			r, err := adminv1.NewEventServiceClient(a.dial(a.pod.FrontendAdmin())).ListEvents(
				t.Context(), &adminv1.ListEventsRequest{},
			)
			a.must(err)
			var lost, late bool
			for _, e := range r.GetEvents() {
				lost = lost || e.GetObject() == vipA4 && e.GetReason() == "lb_lost"
				late = late || strings.Contains(e.GetDetail(), "was not renewed")
			}
			if !lost || late != (c.whose == "frontend") {
				t.Errorf("the events tell of LB_LOST: %t, of the late SVID: %t: %v", lost, late, r.GetEvents())
			}

			a.offer(c.api(a), c.id, time.Hour)
			a.wantRoutes(vipA4, vipA6)
			a.wantHealth(c.health, "Identity", healthv1.HealthCheckResponse_SERVING)
		})
	}
}

// The Workload API may be absent at the start (docs/architecture.md#failure-table).
func TestWorkloadAPIOutage(t *testing.T) {
	t.Parallel()
	a := newAttested(t)
	a.up(a.target1)
	begin := func(reason ...string) {
		a.start(true)
		for _, health := range []string{lab.LBHealth, lab.FrontendHealth} {
			a.wantHealth(health, "Identity", healthv1.HealthCheckResponse_NOT_SERVING)
			a.wantHealth(health, "Readiness", healthv1.HealthCheckResponse_NOT_SERVING)
			a.wantHealth(health, "Liveness", healthv1.HealthCheckResponse_SERVING)
		}
		a.waitLB("Identity", false, append(reason, "the Workload API at "+a.lb.Addr())...)
		a.waitFrontend("Identity", false, append(reason, "the Workload API at "+a.frontend.Addr())...)
	}
	end := func() {
		for _, p := range []*lab.Process{a.pod.LB, a.pod.Frontend} {
			a.stop(p)
		}
	}
	// An API that accepts the call without a reply, and an absent one.
	for _, api := range []*identitytest.WorkloadAPI{a.lb, a.frontend} {
		api.Mute()
		api.Start()
	}
	begin("waiting for the first SVID")
	end()
	for _, api := range []*identitytest.WorkloadAPI{a.lb, a.frontend} {
		api.Stop()
		api.Deny()
	}
	begin("no such file")
	end()

	begin("no such file")
	// A refusal by the API has another reason than a missing API.
	a.lb.Start()
	a.waitLB("Identity", false, "it has no identity for this process")
	a.offer(a.lb, lbID, time.Hour)
	a.waitLB("Identity", true)
	a.waitFrontend("Stream", false)
	a.offer(a.frontend, frontendID, time.Hour)
	a.frontend.Start()
	a.wantRoutes(vipA4, vipA6)

	// While the API is down, the last SVIDs stay in use.
	mark, lbFrom, from := a.mark(), length(a.pod.LB), length(a.pod.Frontend)
	a.lb.Stop()
	a.frontend.Stop()
	a.waitLine(a.pod.LB, lbFrom, "no new SVID")
	a.waitLine(a.pod.Frontend, from, "no new SVID")
	a.wantHealth(lab.LBHealth, "Identity", healthv1.HealthCheckResponse_SERVING)
	a.wantHealth(lab.FrontendHealth, "Readiness", healthv1.HealthCheckResponse_SERVING)
	a.up(a.target2)
	a.wantRoutes(every()...)
	a.offer(a.lb, lbID, time.Hour)
	a.offer(a.frontend, frontendID, time.Hour)
	a.lb.Start()
	a.frontend.Start()
	a.waitLine(a.pod.LB, lbFrom, "SVID rotated")
	a.waitLine(a.pod.Frontend, from, "SVID rotated")
	a.waitFor(func() error {
		if metric(t, a.get(lab.FrontendMetrics, "/metrics"), "vipgate_frontend_lb_stream_moves_total") == 0 {
			return fmt.Errorf("the readiness stream has not moved to the new SVID")
		}
		return nil
	})
	a.wantNoUpdates(mark, vipA4, vipA6)
	a.wantUpdates(mark, vipB4, announced)
}

// --spiffe-id selects one of several SVIDs; without it the condition lists the offered ones.
func TestAmbiguousSVIDs(t *testing.T) {
	t.Parallel()
	a := newAttested(t)
	a.up(a.target1)
	for _, api := range []*identitytest.WorkloadAPI{a.lb, a.frontend} {
		api.Offer(a.ca, []*x509svid.SVID{
			a.ca.SVID(a.ca.ID("/sidecar"), time.Hour), a.ca.SVID(lbID, time.Hour),
			a.ca.SVID(frontendID, time.Hour),
		})
		api.Start()
	}
	offered := []string{"offers 3 SPIFFE IDs", a.ca.ID("/sidecar").String(), lab.LBID, lab.FrontendID, "--spiffe-id"}
	a.start(false)
	a.waitLB("Identity", false, offered...)
	a.waitFrontend("Identity", false, offered...)
	a.wantHealth(lab.LBHealth, "Readiness", healthv1.HealthCheckResponse_NOT_SERVING)
	a.wantHealth(lab.FrontendHealth, "Readiness", healthv1.HealthCheckResponse_NOT_SERVING)
	a.must(a.pod.LB.Kill())
	a.must(a.pod.Frontend.Kill())

	a.start(true)
	a.wantRoutes(vipA4, vipA6)
	if id := a.frontendStatus().GetSpiffeId(); id != lab.FrontendID {
		t.Errorf("the frontend is %s, want %s", id, lab.FrontendID)
	}
}

// volume is a folder in the layout of the kubelet and CSI drivers: the files are links into
// ..data, itself a link that is swapped to change all of them atomically.
type volume struct {
	f     *fixture
	dir   string
	swaps int
}

// swap replaces the SVID in the volume atomically.
func (v *volume) swap(a *identity.DevAuthority, svid *x509svid.SVID) {
	v.f.t.Helper()
	v.swaps++
	data := fmt.Sprintf("..%d", v.swaps)
	v.f.must(a.WriteFiles(filepath.Join(v.dir, data), svid))
	v.f.must(os.Symlink(data, filepath.Join(v.dir, "..data_tmp")))
	v.f.must(os.Rename(filepath.Join(v.dir, "..data_tmp"), filepath.Join(v.dir, "..data")))
	if v.swaps > 1 {
		v.f.must(os.RemoveAll(filepath.Join(v.dir, fmt.Sprintf("..%d", v.swaps-1))))
		return
	}
	for _, name := range []string{identity.CertFile, identity.KeyFile, identity.BundleFile} {
		v.f.must(os.Symlink(filepath.Join("..data", name), filepath.Join(v.dir, name)))
	}
}

// SVIDs in files are rotated, without an UPDATE at the gateway
// (docs/architecture.md#failure-table).
func TestFileRotationBySymlink(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	a := f.stranger()
	lb, frontend := &volume{f: f, dir: f.path("svid-lb")}, &volume{f: f, dir: f.path("svid-frontend")}
	f.up(f.target1)
	f.startLBAs(nil, as(f.pod.LBArgs(), "--identity=files", "--svid-dir="+lb.dir))
	f.startFrontendAs(nil, as(f.pod.FrontendArgs(), "--identity=files", "--svid-dir="+frontend.dir))
	f.waitLB("Identity", false, "the files in "+lb.dir, "no such file")
	f.waitFrontend("Identity", false, "the files in "+frontend.dir, "no such file")

	lb.swap(a, f.mint(a, lab.LBID))
	frontend.swap(a, f.mint(a, lab.FrontendID))
	f.wantRoutes(vipA4, vipA6)
	mark := f.mark()
	for range 3 {
		lbFrom, from := length(f.pod.LB), length(f.pod.Frontend)
		lb.swap(a, f.mint(a, lab.LBID))
		frontend.swap(a, f.mint(a, lab.FrontendID))
		f.waitLine(f.pod.LB, lbFrom, "SVID rotated")
		f.waitLine(f.pod.Frontend, from, "SVID rotated")
		f.waitLine(f.pod.Frontend, from, "readiness stream open")
	}
	await.True(t, "three moves of the readiness stream", func() bool {
		return metric(t, f.get(lab.FrontendMetrics, "/metrics"), "vipgate_frontend_lb_stream_moves_total") >= 3
	})
	// A mismatched certificate and key change nothing.
	from := length(f.pod.Frontend)
	f.must(os.WriteFile(filepath.Join(frontend.dir, fmt.Sprintf("..%d", frontend.swaps), identity.CertFile),
		[]byte("no certificate"), 0o600))
	frontend.touch()
	f.waitLine(f.pod.Frontend, from, "no new SVID",
		"tls.crt with tls.key: tls: failed to find any PEM data in certificate input")
	f.wantHealth(lab.FrontendHealth, "Readiness", healthv1.HealthCheckResponse_SERVING)
	f.wantNoUpdates(mark, vipA4, vipA6)
}

// touch triggers the watch after a change of a file: the frontend only watches the folder.
func (v *volume) touch() {
	v.f.t.Helper()
	v.f.must(os.WriteFile(filepath.Join(v.dir, "touched"), nil, 0o600))
}
