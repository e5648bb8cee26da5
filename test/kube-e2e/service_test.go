package kubee2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
	"github.com/vipgate/vipgate/test/load"
)

// The load is far below the lab's capacity, so every lost request is lost by the change.
const (
	rate = 100 // requests per second, to both VIPs
	calm = 50  // answered requests before and after a change
)

// TestServiceLife follows a Service through its creation, a rolling update of its pods, a stop of
// the API server, and its deletion.
func TestServiceLife(t *testing.T) {
	f := newFixture(t)
	f.cluster.Apply(t, trenchManifest())
	f.startTrenchPods()

	old, fresh := f.Targets[:replicas], f.Targets[replicas:]
	f.cluster.Apply(t, service)
	f.wantStatus(metav1.ConditionFalse) // the VIPs are shown since acceptance
	for _, app := range old {
		f.kubelet.create(app)
		f.kubelet.run(app)
	}
	f.wantUpdates(0) // none is ready
	f.kubelet.ready(old[0])
	f.wantReady(old[0])
	for _, app := range old[1:] { // kube has processed them: events of Pods are in order
		f.wantNoTarget(app)
		f.kubelet.ready(app)
	}
	f.wantAnnounced()
	f.wantUpdates(1)
	f.wantStatus(metav1.ConditionTrue)
	f.wantExplained(0, "svc/"+serviceName, "ok Service accepted",
		fmt.Sprintf("ok targets %d targets", replicas), "20.0.0.1/32 ok lease live",
		"and receives the VIP (next hop ")
	f.wantExplained(1, "svc/none", "NO Service the Trench has no such Service next: `kubectl get service")

	g, err := f.Load(t.Context(), rate, 0, load.Config{})
	f.must(err)
	t.Cleanup(func() { g.Stop(context.Background()) })
	f.wantAnswers(g, old...)
	f.rollingUpdate(g, old, fresh)
	f.editPolicies(g)
	f.apiServerAway(g)

	f.deleteService(g)
}

// wantExplained waits until `kube explain` in the first pod ends with a status, and its output has
// the parts.
func (f *fixture) wantExplained(status int, object string, parts ...string) {
	f.t.Helper()
	p := f.Pods[0]
	f.waitEvery(processInterval, func(ctx context.Context) error {
		out, err := p.Run(ctx, "kube", "explain", object, "--frontend-admin-socket=unix://"+p.FrontendAdmin(),
			"--admin-socket=unix://"+filepath.Join(p.Dir, "kube.sock"))
		line := strings.Join(strings.Fields(out), " ")
		for _, part := range parts {
			if (err == nil) != (status == 0) || !strings.Contains(line, part) {
				return fmt.Errorf("%v, want status %d and %q:\n%s", err, status, part, out)
			}
		}
		return nil
	})
}

// deleteService deletes the Service under traffic: its VIPs drain with its policy, and no request is
// lost before their withdrawal.
func (f *fixture) deleteService(g *load.Generator) {
	f.t.Helper()
	f.must(f.core.Services(namespace).Delete(f.t.Context(), serviceName, metav1.DeleteOptions{}))
	f.wait(func(context.Context) error {
		for _, prefix := range []string{route4, route6} {
			if n := f.gateway.Updates(prefix); n < 6*trenchPods {
				return fmt.Errorf("the gateway received %d updates of %s", n, prefix)
			}
		}
		return nil
	})
	f.wantUpdates(6) // de-preferred
	routes, err := f.gateway.Routes(f.t.Context())
	f.must(err)
	for prefix, route := range routes {
		if !slices.Contains(route.Communities, "(64512,7)") || !slices.Contains(route.Communities, "(65535,0)") {
			f.t.Errorf("%s drains with %q", prefix, route.Communities)
		}
	}
	f.wantRoutes(route4, route6)
	f.wantAnswers(g)
	f.lost(g.Stop(f.t.Context()))
	f.wantRoutes()
	f.wantUpdates(7)
}

// editPolicies adds a policy to the Trench and one to the Service, which replaces it while it has
// it. Each edit is one UPDATE from each pod.
func (f *fixture) editPolicies(g *load.Generator) {
	f.t.Helper()
	want := func(updates int, med, community string) {
		f.t.Helper()
		f.wait(func(ctx context.Context) error {
			routes, err := f.gateway.Routes(ctx)
			for _, prefix := range []string{route4, route6} {
				route := routes[netip.MustParsePrefix(prefix)]
				if n := f.gateway.Updates(prefix); n < updates*trenchPods || route.MED != med ||
					strings.Join(route.Communities, " ") != community {
					err = errors.Join(err, fmt.Errorf("after %d updates %+v", n, route))
				}
			}
			return err
		})
		f.wantAnswers(g)
		f.wantUpdates(updates)
	}
	const vips = `    vips: [20.0.0.1/32, "2000::1/128"]`
	f.cluster.Apply(f.t, strings.Replace(trenchManifest(), vips, vips+"\n    policies: [{ready: {med: 50}}]", 1))
	want(2, "50", "")
	const drain = "    vipgate.io/drain-time: 15s\n"
	withPolicy := strings.Replace(service, drain,
		drain+`    vipgate.io/policy: '{"ready": {"communities": ["64512:7"]}}'`+"\n", 1)
	f.cluster.Apply(f.t, withPolicy)
	want(3, "", "(64512,7)")
	f.cluster.Apply(f.t, service)
	want(4, "50", "")
	f.cluster.Apply(f.t, withPolicy)
	want(5, "", "(64512,7)")
}

// rollingUpdate replaces pods one after the other under traffic, like a Deployment with maxSurge 1,
// maxUnavailable 0 and minReadySeconds for the checks of the trench.
func (f *fixture) rollingUpdate(g *load.Generator, old, fresh []*lab.App) {
	f.t.Helper()
	f.wantRemembered(old)
	for n := range old {
		f.kubelet.create(fresh[n])
		f.kubelet.run(fresh[n])
		f.kubelet.ready(fresh[n])
		f.wantReady(fresh[n])
		f.kubelet.delete(old[n])
		f.wantDrainBeforeEnd(old[n])
		f.wantNoAnswers(g, old[n])
	}
	f.kubelet.wait()
	for _, app := range old {
		f.wantGone(app)
	}
	f.wantAnswers(g, fresh...)
	f.wantCondition(v1alpha1.Generations, metav1.ConditionTrue, old[0].Name)
	f.wantUpdates(1) // no pod withdrew a VIP in between, or announced it differently
}

// wantRemembered waits until a set of targets has been in force for so long that kube records it
// when it ends: for 3 s, in whole seconds.
func (f *fixture) wantRemembered(apps []*lab.App) {
	f.t.Helper()
	var want []string
	for _, app := range apps {
		want = append(want, app.Name)
	}
	f.wait(func(ctx context.Context) error {
		s, err := f.core.Services(namespace).Get(ctx, serviceName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var record struct {
			Current struct {
				Targets [][]string
				Until   time.Time
			}
		}
		c := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.Group+"/"+v1alpha1.Generations)
		if c == nil {
			return errors.New("no set of targets is recorded")
		}
		f.must(json.Unmarshal([]byte(c.Message), &record))
		if !slices.Equal(record.Current.Targets[0], want) || time.Since(record.Current.Until) < 4*time.Second {
			return fmt.Errorf("the recorded targets are %+v, want %v for 4 s", record.Current, want)
		}
		return nil
	})
}

// apiServerAway stops the API server under traffic, and starts it again.
func (f *fixture) apiServerAway(g *load.Generator) {
	f.t.Helper()
	f.cluster.StopServer(f.t)
	for _, p := range f.Pods {
		f.wait(func(context.Context) error {
			_, err := os.Stat(p.TrenchFile() + ".stale")
			return err
		})
	}
	f.wantAnswers(g)
	f.cluster.StartServer(f.t)
	for _, p := range f.Pods {
		f.wait(func(context.Context) error {
			if _, err := os.Stat(p.TrenchFile() + ".stale"); !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("the trench file of %s is still stale: %w", p.Dir, err)
			}
			return nil
		})
	}
	f.wantUpdates(5)
	f.wantStatus(metav1.ConditionTrue)
}

// wantStatus waits until the status of the Service shows both VIPs, Accepted, and whether the VIPs
// are advertised.
func (f *fixture) wantStatus(advertised metav1.ConditionStatus) {
	f.t.Helper()
	proxy := corev1.LoadBalancerIPModeProxy
	addresses := []corev1.LoadBalancerIngress{{IP: vip4, IPMode: &proxy}, {IP: vip6, IPMode: &proxy}}
	want := map[string]metav1.ConditionStatus{
		v1alpha1.Group + "/" + v1alpha1.Accepted:   metav1.ConditionTrue,
		v1alpha1.Group + "/" + v1alpha1.Advertised: advertised,
	}
	f.wait(func(ctx context.Context) error {
		s, err := f.core.Services(namespace).Get(ctx, serviceName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if !equality.Semantic.DeepEqual(s.Status.LoadBalancer.Ingress, addresses) {
			return fmt.Errorf("addresses in status %v, want %v", s.Status.LoadBalancer.Ingress, addresses)
		}
		for kind, status := range want {
			if c := meta.FindStatusCondition(s.Status.Conditions, kind); c == nil || c.Status != status {
				return fmt.Errorf("condition %s is %v, want %s", kind, c, status)
			}
		}
		return nil
	})
}

// wantRoutes waits until the gateway has routes to exactly these prefixes.
func (f *fixture) wantRoutes(prefixes ...string) {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	f.must(f.gateway.WantRoutes(ctx, prefixes...))
}

// wantAnnounced waits until the gateway uses both trench pods for both VIPs.
func (f *fixture) wantAnnounced() {
	f.t.Helper()
	f.wantRoutes(route4, route6)
	ctx := harness.Context(f.t, waitTimeout)
	f.must(f.WantVia(ctx, 1, 2))
}

// wantUpdates fails the test unless the gateway received perPod UPDATEs of each VIP from each pod.
func (f *fixture) wantUpdates(perPod int) {
	f.t.Helper()
	for _, prefix := range []string{route4, route6} {
		if n := f.gateway.Updates(prefix); n != perPod*trenchPods {
			trace, err := f.gateway.Trace()
			f.t.Fatalf("the gateway received %d updates of %s, want %d: %v %v", n, prefix, perPod*trenchPods, trace, err)
		}
	}
}

// wantAnswers waits until requests are answered, including answers of each application in apps.
func (f *fixture) wantAnswers(g *load.Generator, apps ...*lab.App) {
	f.t.Helper()
	var names []string
	for _, app := range apps {
		names = append(names, app.Name)
	}
	ctx := harness.Context(f.t, waitTimeout)
	if err := errors.Join(g.WaitAnswered(ctx, calm), g.WaitTargets(ctx, names...)); err != nil {
		f.t.Fatalf("%v; failures: %v", err, g.Now().Failures)
	}
}

// wantNoAnswers checks that app receives no requests after the last kernel has stopped sending new
// flows to it: lb reports a draining target before the kernel has the new table.
func (f *fixture) wantNoAnswers(g *load.Generator, app *lab.App) {
	f.t.Helper()
	f.wait(func(ctx context.Context) error {
		for _, p := range f.Pods {
			if err := wantNoEntries(ctx, p, app.Name); err != nil {
				return err
			}
		}
		return nil
	})
	ctx := harness.Context(f.t, waitTimeout)
	before, err := g.Take(ctx)
	f.must(err)
	f.lost(before)
	f.must(g.WaitAnswered(ctx, calm))
	during, err := g.Take(ctx)
	f.must(err)
	f.lost(during)
	if n := during.ByTarget[app.Name]; n > 0 {
		f.t.Fatalf("%s answered %d requests that began after its drain", app.Name, n)
	}
}

// wantNoEntries returns an error while a table of a trench pod contains a target.
func wantNoEntries(ctx context.Context, p *lab.Pod, target string) error {
	r, err := admin.LBStatus(ctx, p)
	if err != nil {
		return err
	}
	for _, stream := range r.GetDataPlane().GetStreams() {
		for _, x := range stream.GetTargets() {
			if n := x.GetEntriesIpv4() + x.GetEntriesIpv6(); x.GetName() == target && n > 0 {
				return fmt.Errorf("%d entries of tables lead to %s", n, target)
			}
		}
	}
	return nil
}

// lost fails the test if a request was lost.
func (f *fixture) lost(r load.Result) {
	f.t.Helper()
	if r.Failed > 0 {
		f.t.Fatalf("%d of %d requests failed: %v", r.Failed, r.Sent, r.Failures)
	}
}

// wantStates waits until the targets of each trench pod satisfy a condition.
func (f *fixture) wantStates(condition admin.Condition) {
	f.t.Helper()
	f.wait(func(ctx context.Context) error { return admin.WantTargets(ctx, f.Topology, condition) })
}

// wantReady waits until a target is ready in each trench pod.
func (f *fixture) wantReady(app *lab.App) {
	f.t.Helper()
	f.wantStates(admin.Ready(app.Name))
}

// wantGone waits until no trench pod has a target.
func (f *fixture) wantGone(app *lab.App) {
	f.t.Helper()
	f.wantStates(admin.Gone(app.Name))
}

// wantNoTarget fails the test if a trench pod has a target.
func (f *fixture) wantNoTarget(app *lab.App) {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	f.must(admin.WantTargets(ctx, f.Topology, admin.Gone(app.Name)))
}

// wantDrainBeforeEnd waits until a target of a deleted pod drains in each trench pod, or has
// drained, and checks that its application was still serving.
func (f *fixture) wantDrainBeforeEnd(app *lab.App) {
	f.t.Helper()
	began := time.Now()
	f.wantStates(func(have map[string]targetv1.State) error {
		switch state, ok := have[app.Name]; {
		case !ok, state == targetv1.State_STATE_DRAINING, state == targetv1.State_STATE_DRAINED:
			return nil
		default:
			return fmt.Errorf("%s is %v, want it draining", app.Name, state)
		}
	})
	if f.kubelet.hasEnded(app) {
		f.t.Fatalf("%s ended before its drain began", app.Name)
	}
	f.t.Logf("%s drained %v after its deletion", app.Name, time.Since(began).Round(time.Millisecond))
}
