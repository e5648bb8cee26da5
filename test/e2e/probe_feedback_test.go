package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
	"github.com/vipgate/vipgate/test/traffic"
)

// feedbackFixture is a trench with two probes that report to all pods.
type feedbackFixture struct {
	t      *testing.T
	ctx    context.Context
	trench *traffic.Trench
	users  *lab.NetNS
	began  int // probes
}

const (
	feedbackPort = 7790
	probeIDs     = "spiffe://vipgate.demo/probe/"
)

// start starts a probe that may have a SPIFFE ID.
func (f *feedbackFixture) start(id string) *lab.Process {
	f.t.Helper()
	n := f.began
	f.began++
	args := []string{
		filepath.Join(binaries, "vipgate-probe"), "run", "--trench-file=" + f.trench.Pods[0].TrenchFile(),
		fmt.Sprintf("--ports=%d", probePorts), fmt.Sprintf("--port-base=%d", 31000+100*n),
		fmt.Sprintf("--admin-socket=unix://%s/probe-%d.sock", f.trench.Dir, n),
		fmt.Sprintf("--health-address=127.0.0.1:%d", 7800+n), fmt.Sprintf("--metrics-address=127.0.0.1:%d", 7900+n),
		"--lb-id=" + lab.LBID, "--identity=dev", "--dev-authority-dir=" + f.trench.Authority(), "--spiffe-id=" + id,
		"--log-format=text",
	}
	for pod := range f.trench.Pods {
		args = append(args, fmt.Sprintf("--lb=%s:%d", lab.PodExternal(pod + 1)[0], feedbackPort))
	}
	process, err := f.trench.Start(f.users, fmt.Sprintf("probe-%d", n), args...)
	harness.Must(f.t, err)
	f.t.Cleanup(func() {
		if f.t.Failed() {
			f.t.Logf("== %s\n%s", id, process.Tail(20))
		}
		harness.Check(f.t, process.Kill())
	})
	return process
}

// waitLog waits until the log of a process has a text.
func (f *feedbackFixture) waitLog(process *lab.Process, text string) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.ctx, waitTimeout)
	defer cancel()
	harness.Must(f.t, lab.Eventually(ctx, 50*time.Millisecond, func() error {
		if !strings.Contains(process.Output(), text) {
			return fmt.Errorf("%s does not log %q:\n%s", process.Name, text, process.Tail(10))
		}
		return nil
	}))
}

// want waits until a condition holds for the status of each lb.
func (f *feedbackFixture) want(step string, condition func(pod int, status *lbv1.Status) error) {
	f.t.Helper()
	began := time.Now()
	ctx, cancel := context.WithTimeout(f.ctx, waitTimeout)
	defer cancel()
	err := lab.Eventually(ctx, 50*time.Millisecond, func() error {
		for n, pod := range f.trench.Pods {
			status, err := admin.LBStatus(ctx, pod)
			if err == nil {
				err = condition(n+1, status)
			}
			if err != nil {
				return fmt.Errorf("pod %d: %w\n%v", n+1, err, status.GetProbes())
			}
		}
		return nil
	})
	if err != nil {
		f.t.Fatalf("%s: %v", step, err)
	}
	f.t.Logf("%s: %v", step, time.Since(began))
}

// suspects returns the VIPs that are de-preferred for probes.
func suspects(status *lbv1.Status) (vips []string) {
	for _, v := range status.GetVips() {
		if v.GetReadiness().GetReason() == readinessv1.VipReason_VIP_REASON_PROBES {
			vips = append(vips, v.GetVip())
		}
	}
	return vips
}

// hole drops checks from source ports at a pod that advertises the VIPs and passes its own checks.
func (f *feedbackFixture) hole(pod int, ports string) {
	f.t.Helper()
	_, err := f.trench.Pods[pod-1].NS.Run(f.ctx, "nft", `table inet hole { chain hole { type filter hook prerouting `+
		`priority -400; iifname "`+lab.External+`" tcp sport `+ports+` tcp dport 5000 drop; }; }`)
	harness.Must(f.t, err)
}

// One of two probes finds a pod dead, and nothing happens. Both do, and only that pod moves traffic
// away. Without the probes its VIPs return, although it is still dead.
func TestProbesMoveTraffic(t *testing.T) {
	t.Parallel()
	ctx, trench := openTrench(t, traffic.Options{Targets: 2, SharedAuthority: true, LB: []string{
		fmt.Sprintf("--registry-address=0.0.0.0:%d", feedbackPort),
		"--probe-id=" + probeIDs + "a", "--probe-id=" + probeIDs + "b",
		"--source=file", "--source=registry", "--target-id=" + lab.AppID,
	}})
	f := &feedbackFixture{t: t, ctx: ctx, trench: trench, users: usersBeyond(t, trench)}
	for _, pod := range trench.Pods {
		_, err := pod.NS.Run(ctx, "ip", "route", "add", "198.51.100.0/24", "via", lab.GatewayA4.String())
		harness.Must(t, err)
	}

	// The ID of a target may call, but not report; a probe may not register.
	target := f.start(lab.AppID)
	f.waitLog(target, lab.AppID+" may not report verdicts")
	harness.Must(t, target.Kill())
	out, err := f.users.Run(ctx, filepath.Join(binaries, "lb"), "target", "remove", "x", "--stream=stream-a",
		fmt.Sprintf("--registry=%s:%d", lab.PodExternal(1)[0], feedbackPort), "--lb-id="+lab.LBID,
		"--identity=dev", "--dev-authority-dir="+trench.Authority(), "--spiffe-id="+probeIDs+"a")
	if err == nil || !strings.Contains(fmt.Sprint(out, err), "may not register targets") {
		t.Fatalf("a probe deregisters a target: %v\n%s", err, out)
	}
	unknown := f.start(probeIDs + "c")
	f.waitLog(trench.Pods[0].LB, probeIDs+"c")
	harness.Must(t, unknown.Kill())

	a, b := f.start(probeIDs+"a"), f.start(probeIDs+"b")
	f.want("both probes see each pod", func(_ int, status *lbv1.Status) error {
		for _, probe := range status.GetProbes() {
			if !probe.GetLive() || probe.GetPaths() != 2*probePorts || probe.GetPathsHere() == 0 || probe.GetDeadHere() > 0 {
				return fmt.Errorf("probe %s", probe.GetSpiffeId())
			}
		}
		return nil
	})

	const dead = 2
	ports := func(n int) string { return fmt.Sprintf("31%d00-31%d99", n, n) }
	both := []string{"20.0.0.1/32", "2000::1/128"}
	f.hole(dead, ports(2))
	f.want("one probe finds a pod dead", func(pod int, status *lbv1.Status) error {
		if found := status.GetProbes()[0].GetDeadVips(); pod == dead && !slices.Equal(found, both) {
			return fmt.Errorf("dead are %v", found)
		}
		return nil
	})
	harness.Must(t, trench.WantVia(ctx, 1, 2, 3))

	f.hole(dead, ports(3))
	f.want("both find it dead", func(pod int, status *lbv1.Status) error {
		want := both
		if pod != dead {
			want = nil
		}
		if got := suspects(status); !slices.Equal(got, want) {
			return fmt.Errorf("suspected are %v, want %v", got, want)
		}
		return nil
	})
	harness.Must(t, trench.WantVia(ctx, 1, 3))
	events, err := trench.Pods[dead-1].Run(ctx, "lb", "events", "--admin-socket=unix://"+trench.Pods[dead-1].LBAdmin())
	harness.Must(t, err)
	if !strings.Contains(events, "2 of 2 probes reach no target through this pod: "+probeIDs+"a, "+probeIDs+"b") ||
		strings.Contains(events, "1 of 2 probes") {
		t.Errorf("events do not name both probes:\n%s", events)
	}
	f.want("users reach the other pods", func(pod int, status *lbv1.Status) error {
		for _, probe := range status.GetProbes() {
			if pod == dead && probe.GetPathsHere() > 0 || pod != dead && probe.GetDeadHere() > 0 {
				return fmt.Errorf("probe %s", probe.GetSpiffeId())
			}
		}
		return nil
	})

	harness.Must(t, a.Kill())
	harness.Must(t, b.Kill())
	f.want("without probes no VIP is suspected", func(_ int, status *lbv1.Status) error {
		for _, probe := range status.GetProbes() {
			if probe.GetLive() {
				return fmt.Errorf("probe %s is live", probe.GetSpiffeId())
			}
		}
		if got := suspects(status); len(got) > 0 {
			return fmt.Errorf("suspected are %v", got)
		}
		return nil
	})
	harness.Must(t, trench.WantVia(ctx, 1, 2, 3))
}
