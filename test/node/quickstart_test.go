package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/load"
)

const (
	namespace = "vipgate-quickstart"
	// tag is the image tag in deployments/quickstart.
	tag = "quickstart"
	// rate is the number of requests per second during a step. A lost request fails or, after a
	// retransmitted SYN, takes a second or more.
	rate = 50
	// calm is the number of consecutive answers that end a step, enough to observe the last
	// change.
	calm = 3 * rate
)

// vip is the address of the quickstart's Service.
var vip = netip.MustParseAddrPort("20.0.0.1:8080")

// TestQuickstart applies the quickstart and sends requests to its VIP from the node, through a
// rollout of the trench pods, a rollout of the application, a drain of a node and the deletion of
// pods without a grace period.
func TestQuickstart(t *testing.T) {
	q := &quickstart{cluster: newCluster(t)}
	q.startNodes(tag)
	began := time.Now()
	q.apply()
	t.Logf("quickstart: from apply to the first answer %v", time.Since(began).Round(time.Second))
	q.wantReady(t)
	q.startLoad(t)

	q.step(t, "no change", 0, func() {})
	q.step(t, "rollout of the trench pods", 0, func() { q.restart("vipgate") })
	q.step(t, "rollout of the application", 0, func() { q.restart("web") })
	q.step(t, "drain of a node", 0, q.drain)
	q.step(t, "trench pod deleted without a grace period", rate, func() { q.delete("app.kubernetes.io/name=vipgate") })
	q.step(t, "application pod deleted without a grace period", rate, func() { q.delete("app=web") })
	q.wantReady(t)
}

// quickstart is the namespace of the quickstart, and requests to its VIP.
type quickstart struct {
	*cluster
	load *load.Generator
}

// in runs kubectl in the namespace.
func (q *quickstart) in(args ...string) string {
	q.t.Helper()
	return q.kubectl(append([]string{"--namespace=" + namespace}, args...)...)
}

// rolledOut waits until the Deployments have their pods, all are ready, and former pods have
// ended.
func (q *quickstart) rolledOut(deployments ...string) {
	q.t.Helper()
	for _, d := range deployments {
		q.in("rollout", "status", "--timeout="+waitTimeout.String(), "deployment/"+d)
	}
	q.wait(func(context.Context) error {
		if ends := q.in("get", "pods", "--output=jsonpath={.items[*].metadata.deletionTimestamp}"); ends != "" {
			return errors.New("pods are ending")
		}
		return nil
	})
}

// apply applies the quickstart and waits for the first answer.
func (q *quickstart) apply() {
	q.t.Helper()
	q.kubectl("apply", "-k", repository+"/deployments/kubernetes")
	q.kubectl("wait", "--for=condition=Established", "crd/trenches.vipgate.io", "crd/trenchreports.vipgate.io")
	q.kubectl("apply", "-k", repository+"/deployments/quickstart")
	q.rolledOut("gateway", "web", "vipgate")
	g, err := load.Start(q.t.Context(), load.Config{Requests: []netip.AddrPort{vip}, Rate: rate, For: waitTimeout})
	harness.Must(q.t, err)
	q.wait(func(context.Context) error {
		if r := g.Now(); r.Answered == 0 {
			return fmt.Errorf("none of %d requests was answered", r.Sent)
		}
		return nil
	})
	g.Stop(q.t.Context())
}

func (q *quickstart) startLoad(t *testing.T) {
	t.Helper()
	var err error
	if q.load, err = load.Start(t.Context(), load.Config{Requests: []netip.AddrPort{vip}, Rate: rate}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { q.load.Stop(context.Background()) })
}

// step runs change under load and fails if more than most requests fail.
func (q *quickstart) step(t *testing.T, name string, most int, change func()) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		defer func(outer *testing.T) { q.t = outer }(q.t)
		q.t = t
		change()
		q.calm()
		ctx := harness.Context(t, waitTimeout)
		r, err := q.load.Take(ctx)
		harness.Must(t, err)
		t.Logf("%v: %d requests, %d failed, slowest answer %v, by pod %v", r.Took.Round(time.Second), r.Sent, r.Failed,
			r.Slowest.Round(time.Millisecond), r.ByTarget)
		for _, f := range r.Failures {
			t.Log(f)
		}
		if r.Failed > most {
			t.Errorf("%d of %d requests failed, at most %d may", r.Failed, r.Sent, most)
		}
		if r.Answered == 0 {
			t.Error("no request was answered")
		}
	})
}

// calm waits for consecutive answers without a failure.
func (q *quickstart) calm() {
	q.t.Helper()
	start := q.load.Now()
	q.wait(func(context.Context) error {
		now := q.load.Now()
		if now.Failed > start.Failed {
			start = now
			return errors.New("requests fail")
		}
		if n := now.Answered - start.Answered; n < calm {
			return fmt.Errorf("%d requests were answered", n)
		}
		return nil
	})
}

// restart replaces the pods of a Deployment.
func (q *quickstart) restart(deployment string) {
	q.t.Helper()
	q.in("rollout", "restart", "deployment/"+deployment)
	q.rolledOut(deployment)
}

// drain drains the node without the gateway, and then makes it schedulable again.
func (q *quickstart) drain() {
	q.t.Helper()
	node := nodeNames[0]
	if node == q.in("get", "pods", "--selector=app=gateway", "--output=jsonpath={.items[0].spec.nodeName}") {
		node = nodeNames[1]
	}
	q.t.Logf("%s has\n%s", node, q.in("get", "pods", "--field-selector=spec.nodeName="+node))
	q.kubectl("drain", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout="+waitTimeout.String(), node)
	q.rolledOut("web", "vipgate")
	q.kubectl("uncordon", node)
}

// delete deletes one pod without a grace period, and waits for its replacement.
func (q *quickstart) delete(selector string) {
	q.t.Helper()
	pod := q.in("get", "pods", "--selector="+selector, "--output=jsonpath={.items[0].metadata.name}")
	q.in("delete", "pod", pod, "--grace-period=0", "--force")
	q.rolledOut("web", "vipgate")
}

// wantReady fails unless every container of every pod is ready and was never restarted.
func (q *quickstart) wantReady(t *testing.T) {
	t.Helper()
	t.Log("\n" + q.in("get", "pods", "--output=wide"))
	const containers = `{range .items[*]}{range .status.containerStatuses[*]}{.name} {.ready} {.restartCount}{"\n"}{end}` +
		`{range .status.initContainerStatuses[*]}{.name} {.ready} {.restartCount}{"\n"}{end}{end}`
	for line := range strings.Lines(q.in("get", "pods", "--output=jsonpath="+containers)) {
		if words := strings.Fields(line); len(words) != 3 || words[1] != "true" || words[2] != "0" {
			t.Errorf("container, ready, restarts: %v", words)
		}
	}
}
