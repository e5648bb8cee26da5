package e2e

import (
	"errors"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/fastpath"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// fastPathFlags select the fast path. lb does not start where it cannot work.
var fastPathFlags = []string{"--conntrack=off", "--dataplane=fastpath-required"}

// requireFastPath skips a test on a kernel without tcx.
func requireFastPath(t *testing.T) {
	t.Helper()
	if err := fastpath.Probe(); err != nil {
		lab.Skip(t, err.Error())
	}
}

// The fast path forwards the traffic, and no flow breaks while it is detached by a hold and by the
// death of lb: nftables selects the same targets.
func TestFastPathComesAndGoes(t *testing.T) {
	t.Parallel()
	requireFastPath(t)
	f := newDataPlaneFixture(t)
	const attached = "fast path   attached to " + lab.External + ", " + lab.Internal
	f.start(fastPathFlags...)
	f.waitOutput(attached, "status")
	g, err := f.Load(f.ctx, 100, 16, load.Config{})
	f.must(err)
	defer g.Stop(f.ctx)
	f.must(errors.Join(g.WaitFlows(f.ctx), g.WaitTargets(f.ctx, "target-1", "target-2")))

	// The status adds both counters, so the chains of nftables have fewer packets.
	total := 0
	for _, row := range regexp.MustCompile(`target-\d +\d+ +serving +\d+ +\d+ +(\d+)`).FindAllStringSubmatch(
		f.waitOutput(attached, "status"), -1) {
		n, err := strconv.Atoi(row[1])
		f.must(err)
		total += n
	}
	slow := 0
	for _, rule := range regexp.MustCompile(`counter packets (\d+) bytes \d+ meta mark set`).FindAllStringSubmatch(
		f.shell("nft list table inet vipgate-lb"), -1) {
		n, err := strconv.Atoi(rule[1])
		f.must(err)
		slow += n
	}
	if total == 0 || slow > total/10 {
		t.Errorf("nftables forwarded %d packets of %d: the fast path is not in front", slow, total)
	}

	wait := func() {
		t.Helper()
		f.must(g.WaitAnswered(f.ctx, 100))
	}
	_, err = f.lb("hold")
	f.must(err)
	f.waitOutput("fast path   detached: the data plane is held", "status")
	wait()
	_, err = f.lb("resume")
	f.must(err)
	f.waitOutput(attached, "status")
	wait()
	f.must(f.pod.LB.Kill())
	wait()
	f.must(f.pod.StartLB(append([]string{"--dataplane=nftables"}, fastPathFlags...)...))
	f.waitOutput(attached, "status")
	wait()
	r, err := g.Take(f.ctx)
	f.must(err)
	for _, flow := range r.Flows {
		if flow.Broken != "" {
			t.Errorf("the flow %d to %s broke: %s", flow.Number, flow.Target, flow.Broken)
		}
	}
	if r.Failed > 0 {
		t.Errorf("%d requests failed", r.Failed)
	}
}

// Without CAP_BPF nftables forwards and status has the reason; a required fast path ends lb.
func TestFastPathWithoutCapability(t *testing.T) {
	t.Parallel()
	requireFastPath(t)
	f := newDataPlaneFixture(t)
	// CAP_SYS_ADMIN includes CAP_BPF.
	const without = "-bpf,-sys_admin"
	incapable := func(flags ...string) *lab.Process {
		process, err := f.Start(f.pod.Namespace(), "lb",
			append([]string{"setpriv", "--bounding-set=" + without, "--inh-caps=" + without}, f.pod.LBArgs(flags...)...)...)
		f.must(err)
		return process
	}
	refused := incapable(fastPathFlags...)
	if status, err := refused.Wait(f.ctx); err != nil || status == 0 || !strings.Contains(refused.Output(), "CAP_BPF") {
		t.Errorf("without CAP_BPF lb ended with %d, %v\n%s", status, err, refused.Output())
	}
	incapable("--dataplane=fastpath", "--conntrack=off")
	f.must(f.pod.StartFrontend("--ecmp"))
	f.must(f.WantVia(f.ctx, 1))
	f.waitOutput("fast path   detached: the process lacks CAP_BPF", "status")
	g, err := f.Load(f.ctx, 50, 4, load.Config{})
	f.must(err)
	defer g.Stop(f.ctx)
	f.must(errors.Join(g.WaitFlows(f.ctx), g.WaitTargets(f.ctx, "target-1", "target-2")))
}
