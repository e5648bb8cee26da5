package e2e

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// newWeights creates pods whose gateway is an FRR with its defaults.
func newWeights(t *testing.T) *dataPlaneFixture {
	t.Helper()
	need(t, lab.KindFRR)
	f := newDataPlaneFixtureOf(t, 2, 4)
	f.must(f.gateway.Process.Kill())
	c := f.GatewayConfig()
	c.Name = "router-a"
	router, err := f.StartRouter(lab.KindFRR, f.Gateway, c)
	f.must(err)
	f.Routers = []lab.Router{router}
	return f
}

// weighed returns a trench file with the policy of the document.
func weighed(t *testing.T, targets ...int) string {
	t.Helper()
	document, err := os.ReadFile("../../docs/gateways.md")
	harness.Must(t, err)
	_, example, _ := strings.Cut(string(document), "```yaml weights\n")
	example, _, _ = strings.Cut(example, "```")
	_, policies, found := strings.Cut(example, "  policies:")
	if !found {
		t.Fatal("the document has no example with weights")
	}
	return withPolicies(dataPlaneTrench(targets...), "  policies:"+policies)
}

// startPods starts pods with these trench files.
func (f *dataPlaneFixture) startPods(bird string, trench ...string) {
	f.t.Helper()
	for i, pod := range f.Pods {
		f.must(pod.WriteTrench(trench[i]))
		f.must(pod.StartLB("--dataplane=nftables"))
		f.must(pod.StartFrontend("--ecmp", bird))
	}
}

// wantWeights waits until the gateway's kernel has routes to each VIP with these weights of the
// pods.
func (f *dataPlaneFixture) wantWeights(pod1, pod2 int) {
	f.t.Helper()
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		for _, v := range f.VIPs {
			got, err := f.Weights(v)
			if err != nil {
				return err
			}
			if !maps.Equal(got, map[int]int{1: pod1, 2: pod2}) {
				return fmt.Errorf("the weights of %s are %v, want %d and %d", v, got, pod1, pod2)
			}
		}
		return nil
	}))
}

// FRR without any option shares new flows by the ready targets of the pods, with each BIRD in the
// pods. The last target that fails is one UPDATE for each VIP.
func TestWeightsShareFlows(t *testing.T) {
	t.Parallel()
	for _, version := range lab.BIRDs() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			f := newWeights(t)
			f.startPods(podBIRD(t, version), weighed(t, 1), weighed(t, 2, 3, 4))
			f.wantWeights(25, 75)
			// With 2 000 flows 5 % are five standard deviations.
			g, err := f.Load(f.ctx, 200, 0, load.Config{})
			f.must(err)
			defer g.Stop(f.ctx)
			f.must(g.WaitAnswered(f.ctx, 2000))
			result := g.Now()
			if share := 100 * result.ByTarget["target-1"] / result.Answered; share < 20 || share > 30 {
				t.Errorf("target-1 has %d %% of the flows, want 25: %v", share, result.ByTarget)
			}
			g.Stop(f.ctx)

			before, err := f.Routers[0].Trace()
			f.must(err)
			f.must(f.Targets[3].Unhealthy())
			f.wantWeights(33, 66)
			trace, err := f.Routers[0].Trace()
			f.must(err)
			if got := changes(trace[len(before):]); !slices.Equal(got, []string{announced, announced}) {
				t.Errorf("UPDATEs of two VIPs: %v", got)
			}
		})
	}
}

// A new weight moves flows to another pod, and none to another target: pods with the same targets
// choose the same target of a flow. Only flows of the target that failed may move.
func TestWeightChangeMovesNoFlow(t *testing.T) {
	t.Parallel()
	f := newWeights(t)
	all := viaAddress(weighed(t, 1, 2, 3, 4)) // only then do checks have an address of the pod
	f.startPods(podBIRD(t, "2.0"), all, all)
	f.wantWeights(50, 50)
	g, err := f.Load(f.ctx, 0, 400, load.Config{})
	f.must(err)
	defer g.Stop(f.ctx)
	f.must(g.WaitFlows(f.ctx))
	keep := func(what string, left ...string) {
		t.Helper()
		result, err := g.Take(f.ctx)
		f.must(err)
		if err := result.Lost(left...); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	// Pod 1 does not reach the health port of target 4.
	from := lab.PodInternal(1)
	f.Targets[3].NS.Shell(t, fmt.Sprintf(`nft 'table inet block {
		chain in { type filter hook input priority 0; }
	}'
	nft add rule inet block in ip saddr %s tcp dport %d drop
	nft add rule inet block in ip6 saddr %s tcp dport %[2]d drop`, from[0], lab.HealthPort, from[1]))
	f.wantWeights(42, 57)
	keep("a target less", "target-4")

	f.must(f.Pods[1].WriteTrench(strings.Replace(all, "targetBandwidth: 10", "targetBandwidth: 90", 1)))
	f.wantWeights(7, 92)
	keep("an edit", "target-4")
}

// A target that recovers counts a tenth at first, and fully at the end of its warmup; at most one
// UPDATE of a VIP in 10 s has a new weight. The first ready targets of a pod count fully, so a
// restarted pod has its share.
func TestWeightsOfWarmup(t *testing.T) {
	t.Parallel()
	f := newWeights(t)
	warm := func(targets ...int) string {
		return strings.Replace(weighed(t, targets...), "interval:", "warmup: 30s, interval:", 1)
	}
	f.startPods(podBIRD(t, "2.0"), warm(1), warm(2, 3, 4))
	f.wantWeights(25, 75)

	f.must(f.Targets[3].Unhealthy())
	f.wantWeights(33, 66)
	before, err := f.Routers[0].Trace()
	f.must(err)
	began := time.Now()
	f.must(f.Targets[3].Start())
	// ready waits until pod 2 has three ready targets, and returns its status.
	ready := func() (status string) {
		t.Helper()
		f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() (err error) {
			status, err = f.Pods[1].Run(f.ctx, "lb", "status", "--admin-socket=unix://"+f.Pods[1].LBAdmin())
			if err == nil && !strings.Contains(status, "  3/3") {
				err = fmt.Errorf("no VIP has three ready targets:\n%s", status)
			}
			return err
		}))
		return status
	}
	if status := ready(); !strings.Contains(status, "  3/3, weight 2.") {
		t.Errorf("a target that has just become ready counts fully:\n%s", status)
	}
	var seen []int
	f.must(lab.Eventually(harness.Context(t, 2*waitTimeout), 100*time.Millisecond, func() error {
		weights, err := f.Weights(f.VIPs[0])
		if err == nil && !slices.Contains(seen, weights[2]) {
			seen = append(seen, weights[2])
		}
		if err == nil && weights[2] != 75 {
			err = fmt.Errorf("the weights are %v", weights)
		}
		return err
	}))
	t.Logf("weights of pod 2: %v, the last after %s", seen, time.Since(began))
	if !slices.IsSorted(seen) {
		t.Errorf("the weight of pod 2 fell: %v", seen)
	}
	if warmed := time.Since(began); warmed < 20*time.Second {
		t.Errorf("warm after %s", warmed)
	}
	f.wantWeights(25, 75)
	trace, err := f.Routers[0].Trace()
	f.must(err)
	// A weight that does not grow gradually is one UPDATE for each VIP.
	if got := changes(trace[len(before):]); len(got) < 2*2 || len(got) > 2*6 || slices.Contains(got, withdrawn) {
		t.Errorf("UPDATEs of two VIPs: %v", got)
	}

	f.must(f.Pods[1].LB.Kill())
	f.must(f.Pods[1].StartLB("--dataplane=nftables"))
	if status := ready(); strings.Contains(status, "weight") {
		t.Errorf("the targets of a restarted pod do not count fully:\n%s", status)
	}
	f.wantWeights(25, 75)
}
