package kube

import (
	"strings"
	"testing"
	"time"

	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/test/await"
)

// Each planted cause between a Service and the trench file is named at its step, with a remedy.
func TestAPIServerExplainsService(t *testing.T) {
	f := newFixture(t)
	i := f.run(nil)
	i.awaitCurrent()
	edit := func(*kubev1.Status) {} // of causes that the fixture does not plant
	explain := func(name, service string, good bool, parts ...string) {
		t.Helper()
		var text string
		defer func() { t.Logf("%s: %s", name, text) }()
		await.True(t, name, func() bool {
			chain := &status.Chain{Service: "svc/trench-a/" + service}
			current := i.status()
			edit(current)
			vips := chain.KubeSteps(current, time.Now())
			text = strings.Join(strings.Fields(chain.Text()), " ")
			for _, part := range parts {
				if !strings.Contains(text, part) {
					return false
				}
			}
			return chain.Good() == good && (!good || len(vips) == 1)
		})
	}
	explain("no targets", "web", false, "ok Service accepted",
		"NO targets 0 targets next: `kubectl describe service -n trench-a web`: does its selector match Pods")
	f.addPod("trench-a", "lb-1", "10.0.0.1")
	explain("good", "web", true, "ok targets 1 target", "ok trench file stream trench-a.web is in", "ok leader lb-1")
	for name, cause := range map[string]struct {
		edit func(*kubev1.Status)
		want string
	}{
		"no leader": {
			func(s *kubev1.Status) { s.Leader = "" },
			"NO leader no pod writes status and Events next: `kubectl get lease -n trench-a vipgate-trench-a`",
		},
		"file not written": {
			func(s *kubev1.Status) { s.File.Error = "disk full" },
			"NO trench file disk full next: the volume that the containers share",
		},
		"no list yet": {
			func(s *kubev1.Status) { s.SyncedSince = nil },
			"NO API server not every kind of object was listed yet next: `kube status`",
		},
	} {
		edit = cause.edit
		explain(name, "web", false, cause.want)
	}
	edit = func(*kubev1.Status) {}
	explain("no such Service", "other", false, "NO Service the Trench has no such Service next: `kubectl get service -n "+
		"trench-a other -o yaml`: type LoadBalancer, loadBalancerClass vipgate.io/trench-a")
	f.patch(serviceResource, "web", `{"metadata": {"annotations": {"vipgate.io/vips": "20.0.0.9"}}}`)
	explain("VIP not allowed", "web", false, "NO Service VIPNotAllowed",
		"next: correct the Service: `kubectl describe service")
	f.patch(serviceResource, "web", `{"metadata": {"annotations": {"vipgate.io/vips": "20.0.0.1"}}}`)
	explain("repaired", "web", true)
	f.patch(trenchResource, "trench-a", `{"spec": {"attractor": {"vips": ["20.0.0.1/8"]}}}`)
	explain("refused Trench", "web", false, "NO Trench ",
		"next: correct the Trench: `kubectl describe trench -n trench-a trench-a`")
	f.StopServer(t)
	explain("no API server", "web", false, "NO API server not followed for", "next: `kube status`: what is watched")
}
