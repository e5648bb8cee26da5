package publication

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/kubernetes"
)

var leases = coordinationv1.SchemeGroupVersion.WithResource("leases")

// TestAPIServer runs publishers against one API server. Each test has a separate namespace.
func TestAPIServer(t *testing.T) {
	c := kubernetes.Start(t)
	c.Apply(t, crd)
	reports, err := os.ReadFile("../../../deployments/kubernetes/reports.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c.Apply(t, string(reports))
	tests := []struct {
		name string
		run  func(*lab)
	}{
		{"Report", testReport},
		{"Report_interval", testReportInterval},
		{"Status", testStatus},
		{"Late_and_changed", testLateAndChanged},
		{"Refused", testRefused},
		{"Events_repeat", testEventsRepeat},
		{"Two_leaders", testTwoLeaders},
		{"Lease_passes_on", testLeasePassesOn},
		{"Lease_lost", testLeaseLost},
		{"Foreign_writer", testForeignWriter},
		{"Foreign_writer_again", testForeignWriterAgain},
		{"Static_addresses", testStaticAddresses},
		{"From_Service", testFromService},
		{"RBAC_missing", testRBACMissing},
	}
	t.Run("Server", func(t *testing.T) {
		for _, x := range tests {
			t.Run(x.name, func(t *testing.T) {
				t.Parallel()
				x.run(newLab(t, c))
			})
		}
	})
	t.Run("Server_away", func(t *testing.T) { testServerAway(newLab(t, c)) })
}

// awaitPass waits until a leader has evaluated the Service web again: it waits for the status of a
// Service that is evaluated after web.
func (l *lab) awaitPass() {
	l.Helper()
	l.apply(strings.NewReplacer("web", "zeta", "20.0.0.1", "20.0.0.3").Replace(web("20.0.0.1")))
	await.True(l, "status of another Service", func() bool {
		return find(l.service("zeta").Status.Conditions, "vipgate.io/Accepted") != nil
	})
}

// report returns the report of a Pod; the zero Report if there is none.
func (l *lab) report(name string) (r Report) {
	l.Helper()
	u, err := l.admin.Resource(v1alpha1.ReportResource).Namespace(l.namespace).Get(l.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return r
	}
	if err != nil {
		l.Fatal(err)
	}
	text, err := json.Marshal(u.Object["report"])
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil {
		l.Fatal(err)
	}
	return r
}

// patchReport changes the report of a Pod like another writer.
func (l *lab) patchReport(name, patch string) {
	l.Helper()
	_, err := l.admin.Resource(v1alpha1.ReportResource).Namespace(l.namespace).Patch(l.Context(), name,
		"application/merge-patch+json", []byte(patch), metav1.PatchOptions{FieldManager: "other"})
	if err != nil {
		l.Fatal(err)
	}
}

func testReport(l *lab) {
	k := l.kube("a-0", l.config, both(), func(p *Publisher) { p.frontend.probe = 500 * time.Millisecond })
	await.True(l, "both VIPs in the report", func() bool { return l.report("a-0").Advertised == 2 })
	k.frontend.status.Set(noTargets())
	await.True(l, "the reason in the report", func() bool {
		r := l.report("a-0")
		return r.Advertised == 1 && len(r.VIPs) == 2 && r.VIPs[1].Reason == "NoTargets"
	})
	before := l.report("a-0").Time

	k.frontend.end()
	await.True(l, "a dead frontend in the report", func() bool {
		r := l.report("a-0")
		return strings.Contains(r.Problem, "frontend does not answer") && len(r.VIPs) == 0 && !r.Time.Before(before)
	})
	k.frontend.start()
	await.True(l, "the new frontend in the report", func() bool { return l.report("a-0").Advertised == 1 })

	k.frontend.hangs.Store(true)
	await.True(l, "a frontend that hangs in the report", func() bool { return l.report("a-0").Problem != "" })
	k.frontend.hangs.Store(false)
	await.True(l, "the frontend that answers again", func() bool { return l.report("a-0").Advertised == 1 })

	// A report of another writer is replaced even if the frontend's status does not change.
	l.patchReport("a-0", `{"report": {"advertised": 0}}`)
	await.True(l, "the report again", func() bool { return l.report("a-0").Advertised == 1 })

	// Counts only.
	k.frontend.status.Set(many(501, 501))
	await.True(l, "counts in the report", func() bool { r := l.report("a-0"); return r.Total == 501 && len(r.VIPs) == 0 })
}

func testReportInterval(l *lab) {
	k := l.kube("a-0", l.config, both(), func(p *Publisher) { p.timing.report = time.Hour })
	await.True(l, "the first report", func() bool { return l.report("a-0").Advertised == 2 })
	k.frontend.status.Set(noTargets())
	await.True(l, "the change", func() bool { return k.Publisher.frontend.report.Load().Advertised == 1 })
	l.apply(web("20.0.0.1")) // a change of objects causes an evaluation
	l.awaitIngress("20.0.0.1")
	if n := k.metrics.count("trenchreports"); n != 1 {
		l.Errorf("%d reports written within the interval, want 1", n)
	}
}

func testStatus(l *lab) {
	l.apply(web("20.0.0.1,2000::1"))
	a, b := l.kube("a-0", l.config, both()), l.kube("a-1", l.config, noTargets())
	l.awaitIngress("20.0.0.1 2000::1")
	const message = "2000::1: advertised by 1 of 2 pods: no targets (a-1)"
	await.True(l, message, func() bool {
		c := find(l.service("web").Status.Conditions, "vipgate.io/Advertised")
		return c != nil && c.Message == message
	})
	l.awaitCondition(v1alpha1.Advertised, "True PartlyAdvertised")
	l.awaitCondition(v1alpha1.Accepted, "True Accepted")
	l.awaitCondition(v1alpha1.TargetsAccepted, "False NoPods")
	first := l.service("web").Status.LoadBalancer.Ingress[0]
	if first.IPMode == nil || *first.IPMode != corev1.LoadBalancerIPModeProxy {
		l.Errorf("ipMode %v, want Proxy", first.IPMode)
	}
	b.frontend.status.Set(both())
	l.awaitCondition(v1alpha1.Advertised, "True AllAdvertised")
	a.frontend.status.Set(noTargets())
	b.frontend.status.Set(noTargets())
	l.awaitCondition(v1alpha1.Advertised, "False NoTargets")
	await.True(l, "status of the Trench", func() bool {
		t, err := v1alpha1.FromUnstructured(l.get(v1alpha1.Resource, "a"))
		if err != nil {
			l.Fatal(err)
		}
		accepted, advertised := find(t.Status.Conditions, "Accepted"), find(t.Status.Conditions, "Advertised")
		return t.Status.ObservedGeneration == t.Generation && accepted != nil && accepted.Reason == "Valid" &&
			advertised != nil && advertised.Reason == "NoTargets"
	})
	for _, reason := range []string{"Accepted", "Advertised", "NotAdvertised", "NoPods"} {
		await.True(l, "Event "+reason, func() bool { return l.events()[reason] > 0 })
	}
	// Changes that affect no status cause no write.
	version := l.service("web").ResourceVersion
	more := vipStatus(vip.Require("20.0.0.77/32"), announced, ready, 0)
	b.frontend.status.Set(statusOf(append(noTargets().GetVips(), more)...))
	await.True(l, "another report", func() bool { return l.report("a-1").Total == 3 })
	l.awaitPass()
	if got := l.service("web").ResourceVersion; got != version {
		l.Errorf("Service written without a difference: version %s, then %s", version, got)
	}
}

func testLateAndChanged(l *lab) {
	l.kube("a-0", l.config, both())
	await.True(l, "status of the Trench", func() bool {
		_, ok, _ := unstructured.NestedSlice(l.get(v1alpha1.Resource, "a").Object, "status", "conditions")
		return ok
	})
	l.apply(web("20.0.0.1"))
	l.awaitIngress("20.0.0.1")
	l.apply(web("20.0.0.1,2000::1"))
	l.awaitIngress("20.0.0.1 2000::1")
	l.apply(web("20.0.0.2"))
	l.awaitIngress("20.0.0.2")
}

func testRefused(l *lab) {
	l.kube("a-0", l.config, both())
	l.apply(web("30.0.0.1"))
	l.awaitCondition(v1alpha1.Accepted, "False VIPNotAllowed")
	if got := l.ingress(); got != "" {
		l.Errorf("a Service that was never accepted has the addresses %s", got)
	}
	await.True(l, "an Event", func() bool { return l.events()["VIPNotAllowed"] == 1 })
	l.apply(web("20.0.0.1"))
	l.awaitIngress("20.0.0.1")
	l.apply(web("30.0.0.1"))
	l.awaitCondition(v1alpha1.Accepted, "False VIPNotAllowed")
	if got := l.ingress(); got != "20.0.0.1" {
		l.Errorf("addresses of a Service that is refused later: %q, want 20.0.0.1", got)
	}
	l.apply(web("20.0.0.2"))
	l.awaitIngress("20.0.0.2")
}

func testEventsRepeat(l *lab) {
	l.apply(web("2000::1"))
	k := l.kube("a-0", l.config, both())
	for range 3 {
		l.awaitCondition(v1alpha1.Advertised, "True PartlyAdvertised")
		k.frontend.status.Set(noTargets())
		l.awaitCondition(v1alpha1.Advertised, "False NoTargets")
		k.frontend.status.Set(both())
	}
	await.True(l, "one Event that counts", func() bool {
		e := l.events()
		return e["NotAdvertised series"] == 3 && e["Advertised series"] >= 3
	})
}

// ownLease gives a publisher a separate Lease, so that it leads concurrently with another one.
func ownLease(pod string) func(*Publisher) {
	return func(p *Publisher) { p.lease = "lease-of-" + pod }
}

func testTwoLeaders(l *lab) {
	l.apply(web("20.0.0.1,2000::1"))
	a, b := l.kube("a-0", l.config, both(), ownLease("a-0")), l.kube("a-1", l.config, both(), ownLease("a-1"))
	await.True(l, "two leaders", func() bool { return a.State().Load().Leading && b.State().Load().Leading })
	l.awaitCondition(v1alpha1.Advertised, "True AllAdvertised")
	const changes = 5
	for range changes {
		a.frontend.status.Set(noTargets())
		b.frontend.status.Set(noTargets())
		l.awaitCondition(v1alpha1.Advertised, "False NoTargets")
		a.frontend.status.Set(both())
		b.frontend.status.Set(both())
		l.awaitCondition(v1alpha1.Advertised, "True AllAdvertised")
	}
	// Each change is at most two conditions (one report comes before the other), each written once.
	n := a.metrics.count("services") + b.metrics.count("services")
	l.Logf("%d writes of the Service", n)
	if n > 4*changes+6 {
		l.Errorf("more than the changes of %d reports", 4*changes)
	}
	await.True(l, "Events", func() bool { return l.events()["Accepted"] == 1 && l.events()["Advertised"] >= 1 })
	if n := l.events()["StatusRestored"]; n > 0 {
		l.Errorf("the leaders took each other for a foreign writer %d times", n)
	}
	writes := func() int { return a.metrics.count("services") + b.metrics.count("services") }
	before := writes()
	l.awaitPass()
	if n := writes() - before; n > 3 {
		l.Errorf("%d writes of Services after the last change", n)
	}
}

func (l *lab) holder() string {
	l.Helper()
	holder, _, err := unstructured.NestedString(l.get(leases, "vipgate-a").Object, "spec", "holderIdentity")
	if err != nil {
		l.Fatal(err)
	}
	return holder
}

func testLeasePassesOn(l *lab) {
	l.apply(web("20.0.0.1,2000::1"))
	a := l.kube("a-0", l.config, both())
	l.awaitCondition(v1alpha1.Accepted, "True Accepted")
	if h := l.holder(); h != "a-0" {
		l.Fatalf("holder %q, want a-0", h)
	}
	l.awaitCondition(v1alpha1.Advertised, "True PartlyAdvertised")
	before := l.service("web")
	a.stop()
	if h := l.holder(); h != "" {
		l.Errorf("holder %q after the stop, want none", h)
	}
	if after := l.service("web"); after.ResourceVersion != before.ResourceVersion {
		l.Errorf("status after the stop: %+v", after.Status)
	}
	if got := l.report("a-0"); len(got.VIPs) != 2 {
		l.Errorf("report after the stop: %+v", got)
	}
	l.kube("a-1", l.config, noTargets())
	await.True(l, "the other leader", func() bool { return l.holder() == "a-1" })
	l.apply(web("20.0.0.2"))
	l.awaitIngress("20.0.0.2")
	if n := l.events()["Accepted"]; n != 1 {
		l.Errorf("%d Events Accepted, want 1: the second leader repeats them", n)
	}
}

func testLeaseLost(l *lab) {
	l.apply(web("20.0.0.1"))
	proxy := l.cluster.Proxy(l.T)
	a := l.kube("a-0", proxy.Config(l.config), both(), shortLease)
	await.True(l, "the first leader", func() bool { return a.State().Load().Leading })
	b := l.kube("a-1", l.config, both(), shortLease)
	l.awaitIngress("20.0.0.1")
	proxy.Cut()
	await.True(l, "the second leader", func() bool { return b.State().Load().Leading })
	await.True(l, "the first one stopped writing", func() bool { return !a.State().Load().Leading })
	l.apply(web("20.0.0.2"))
	l.awaitIngress("20.0.0.2")
	proxy.Restore()
	b.stop()
	await.True(l, "the first one leads again", func() bool { return a.State().Load().Leading })
	l.apply(web("20.0.0.3"))
	l.awaitIngress("20.0.0.3")
}

func testForeignWriter(l *lab) {
	l.apply(web("20.0.0.1"))
	k := l.kube("a-0", l.config, both())
	l.awaitIngress("20.0.0.1")
	l.awaitCondition(v1alpha1.Advertised, "True PartlyAdvertised")
	l.publish("web", ingressOf("192.0.2.9"))
	l.awaitIngress("20.0.0.1")
	await.True(l, "an Event", func() bool { return l.events()["StatusRestored"] == 1 })
	// A second restoration waits for the restore interval, an hour in the lab.
	l.publish("web", ingressOf("192.0.2.9"))
	l.awaitPass()
	if got := l.ingress(); got != "192.0.2.9" {
		l.Errorf("addresses %s: restored more often than once in the interval", got)
	}
	// During this time, new conditions and new desired addresses are written without delay.
	k.frontend.status.Set(statusOf(vipStatus(vip4, withdrawn, noGateway, 0)))
	l.awaitCondition(v1alpha1.Advertised, "False NoGateway")
	if got := l.ingress(); got != "192.0.2.9" {
		l.Errorf("addresses %s: restored with a condition", got)
	}
	l.apply(web("20.0.0.2"))
	l.awaitIngress("20.0.0.2")
}

func testForeignWriterAgain(l *lab) {
	l.apply(web("20.0.0.1"))
	l.kube("a-0", l.config, both(), func(p *Publisher) { p.timing.restore = time.Second })
	l.awaitIngress("20.0.0.1")
	l.awaitCondition(v1alpha1.Advertised, "True PartlyAdvertised")
	for range 2 {
		l.publish("web", ingressOf("192.0.2.9"))
		l.awaitIngress("20.0.0.1")
	}
}

func testStaticAddresses(l *lab) {
	l.apply(web("20.0.0.1"))
	l.apply(ingress("mine", "external") + ingress("other", "internal") + `
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: annotated, namespace: NS, annotations: {kubernetes.io/ingress.class: external}}
spec: {defaultBackend: {service: {name: web, port: {number: 8080}}}}
`)
	l.kube("a-0", l.config, both())
	l.awaitIngress("20.0.0.1")
	l.apply(trenchOf(`publish: {addresses: [192.0.2.1, lb.example.com], ingressClass: external}`))
	l.awaitIngress("192.0.2.1 lb.example.com")
	await.True(l, "the Ingresses of the class", func() bool {
		return l.published("mine") == "192.0.2.1 lb.example.com" && l.published("annotated") == l.published("mine")
	})
	l.apply(ingress("late", "external"))
	await.True(l, "a late Ingress", func() bool { return l.published("late") == "192.0.2.1 lb.example.com" })
	l.apply(trenchOf(`publish: {addresses: [192.0.2.2], ingressClass: external}`))
	l.awaitIngress("192.0.2.2")
	await.True(l, "changed addresses", func() bool {
		return l.published("late") == "192.0.2.2" && l.published("mine") == "192.0.2.2"
	})
	if got := l.published("other"); got != "" {
		l.Errorf("an Ingress of another class has the addresses %s", got)
	}
	// Without spec.publish, Services show the VIPs again and the condition is removed. Ingresses keep
	// their addresses.
	hasPublished := func() bool {
		t, err := v1alpha1.FromUnstructured(l.get(v1alpha1.Resource, "a"))
		if err != nil {
			l.Fatal(err)
		}
		return find(t.Status.Conditions, v1alpha1.Published) != nil
	}
	await.True(l, "the condition Published", hasPublished)
	l.apply(trenchOf(`namespaces: [NS]`))
	l.awaitIngress("20.0.0.1")
	await.True(l, "no condition Published", func() bool { return !hasPublished() })
	if got := l.published("mine"); got != "192.0.2.2" {
		l.Errorf("the Ingress has the addresses %q, want 192.0.2.2", got)
	}
}

func ingress(name, class string) string {
	return fmt.Sprintf(`
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: %s, namespace: NS}
spec: {ingressClassName: %s, defaultBackend: {service: {name: web, port: {number: 8080}}}}
`, name, class)
}

// published returns the addresses of an Ingress.
func (l *lab) published(name string) string {
	l.Helper()
	text, err := json.Marshal(l.get(ingresses, name).Object["status"])
	if err != nil {
		l.Fatal(err)
	}
	var s corev1.ServiceStatus // has the same fields as the status of an Ingress
	if err := json.Unmarshal(text, &s); err != nil {
		l.Fatal(err)
	}
	return addresses(s.LoadBalancer.Ingress)
}

func testFromService(l *lab) {
	l.apply(web("20.0.0.1") + "\n---" + ingress("mine", "external"))
	l.apply(trenchOf(`publish: {fromService: lb, ingressClass: external}`))
	l.kube("a-0", l.config, both())
	l.awaitCondition(v1alpha1.Accepted, "True Accepted")
	if got := l.ingress(); got != "" {
		l.Errorf("addresses %s before the other Service exists", got)
	}
	l.apply(`
apiVersion: v1
kind: Service
metadata: {name: lb, namespace: NS}
spec: {type: LoadBalancer, ports: [{port: 80}]}
`)
	l.publish("lb", ingressOf("192.0.2.1"))
	l.awaitIngress("192.0.2.1")
	l.publish("lb", ingressOf("192.0.2.2"), ingressOf("lb.example.com"))
	l.awaitIngress("192.0.2.2 lb.example.com")
	await.True(l, "the Ingress", func() bool { return l.published("mine") == "192.0.2.2 lb.example.com" })
	l.publish("lb")
	err := l.admin.Resource(services).Namespace(l.namespace).Delete(l.Context(), "lb", metav1.DeleteOptions{})
	if err != nil {
		l.Fatal(err)
	}
	l.awaitPass()
	if got := l.ingress(); got != "192.0.2.2 lb.example.com" {
		l.Errorf("addresses %q after the other Service has gone", got)
	}
}

func testRBACMissing(l *lab) {
	l.apply(web("20.0.0.1"))
	limited := strings.Split(namespaced, "\n---\n")[1]
	l.apply(strings.ReplaceAll(limited, "services/status", "nodes"))
	k := l.kube("a-0", l.config, both())
	await.True(l, "a write is refused", func() bool { return k.metrics.count("services forbidden") > 0 })
	await.True(l, "the state has the cause", func() bool { return k.State().Load().WriteError != nil })
	await.True(l, "status of the Trench follows", func() bool {
		t, err := v1alpha1.FromUnstructured(l.get(v1alpha1.Resource, "a"))
		c := find(t.Status.Conditions, "Advertised")
		return err == nil && c != nil && c.Reason == "PartlyAdvertised"
	})
	l.apply(limited)
	l.awaitIngress("20.0.0.1")
	await.True(l, "no error is left", func() bool { return k.State().Load().WriteError == nil })
}

func testServerAway(l *lab) {
	l.apply(web("20.0.0.1,2000::1"))
	a := l.kube("a-0", l.config, both())
	l.awaitCondition(v1alpha1.Advertised, "True PartlyAdvertised")
	l.cluster.StopServer(l.T)
	a.frontend.status.Set(noTargets())
	a.frontend.status.Set(statusOf(vipStatus(vip4, withdrawn, noGateway, 0)))
	await.True(l, "the report is not written", func() bool { return a.metrics.count("trenchreports unreachable") > 0 })
	l.cluster.StartServer(l.T)
	l.awaitCondition(v1alpha1.Advertised, "False NoGateway")
}
