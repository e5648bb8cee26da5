package kubee2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"

	"github.com/vipgate/vipgate/pkg/kube/turn"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/test/lab/admin"
	"github.com/vipgate/vipgate/test/load"
)

// TestTurns changes the hold time of the only gateway of each family under traffic: the two pods
// reset their sessions one after the other, and the gateway has the VIPs at every instant.
func TestTurns(t *testing.T) {
	f := newFixture(t)
	f.cluster.Apply(t, trenchManifest())
	f.startTrenchPods()
	f.cluster.Apply(t, service)
	for _, app := range f.Targets[:replicas] {
		f.kubelet.create(app)
		f.kubelet.run(app)
		f.kubelet.ready(app)
	}
	f.wantAnnounced()
	g, err := f.Load(t.Context(), rate, 0, load.Config{})
	f.must(err)
	t.Cleanup(func() { g.Stop(context.Background()) })
	f.wantAnswers(g)
	routes, err := f.gateway.WatchRoutes(t.Context(), pollInterval)
	f.must(err)
	defer routes.Close()

	before := f.sessions()
	began := time.Now()
	f.patchTrench(`[{"op": "add", "path": "/spec/attractor/gateways/0/holdTime", "value": "200s"},
		{"op": "add", "path": "/spec/attractor/gateways/1/holdTime", "value": "200s"}]`)
	f.wait(func(context.Context) error {
		for session, since := range f.sessions() {
			if since.Equal(before[session]) {
				return fmt.Errorf("session %s was not reset", session)
			}
		}
		return nil
	})
	f.wantAnnounced()
	t.Logf("both pods changed in %v", time.Since(began).Round(time.Millisecond))
	for _, snapshot := range routes.Since(began) {
		for _, prefix := range []string{route4, route6} {
			if !snapshot.Has(netip.MustParsePrefix(prefix)) {
				t.Errorf("%v after the change the gateway had no route to %s", snapshot.At.Sub(began), prefix)
			}
		}
	}
	f.wantNoHolder()
	f.wrongChangeReachesOnePod()
	f.wantNoHolder()
	for _, snapshot := range routes.Since(began) {
		if len(snapshot.Routes) < 2 {
			t.Errorf("%v after the change the gateway had the routes %v", snapshot.At.Sub(began), snapshot.Prefixes())
		}
	}
	f.wantAnswers(g)
	f.lost(g.Stop(t.Context()))
}

// wrongChangeReachesOnePod gives a gateway a wrong AS number and, once the session of a pod did not
// come back, corrects it: the session of the other pod is never reset.
func (f *fixture) wrongChangeReachesOnePod() {
	f.t.Helper()
	const path = `"path": "/spec/attractor/gateways/0/remoteASN"`
	before := f.sessions()
	f.patchTrench(`[{"op": "add", ` + path + `, "value": 64999}]`)
	failed := 0
	f.wait(func(ctx context.Context) error {
		for n, p := range f.Pods {
			status, err := admin.FrontendStatus(ctx, p)
			if err != nil {
				return err
			}
			for _, condition := range status.GetConditions() {
				if condition.GetName() == "GatewayChange" && !condition.GetServing() {
					failed = n + 1
					return nil
				}
			}
		}
		return errors.New("no session failed to come back")
	})
	f.patchTrench(`[{"op": "remove", ` + path + `}]`)
	other := "gateway-a4 of " + podName(trenchPods+1-failed)
	if after := f.sessions(); !after[other].Equal(before[other]) {
		f.t.Errorf("the wrong change reset %s, too", other)
	}
	f.wantAnnounced()
}

// sessions returns since when each session of each pod is up.
func (f *fixture) sessions() map[string]time.Time {
	f.t.Helper()
	all := map[string]time.Time{}
	f.wait(func(ctx context.Context) error {
		for n, p := range f.Pods {
			status, err := admin.FrontendStatus(ctx, p)
			if err != nil {
				return err
			}
			for _, gateway := range status.GetGateways() {
				if !gateway.GetUp() {
					return fmt.Errorf("%s of %s is not up", gateway.GetName(), podName(n+1))
				}
				all[gateway.GetName()+" of "+podName(n+1)] = gateway.GetSince().AsTime()
			}
		}
		return nil
	})
	return all
}

// patchTrench applies a JSON patch to the Trench.
func (f *fixture) patchTrench(patch string) {
	f.t.Helper()
	client, err := dynamic.NewForConfig(f.cluster.Admin())
	f.must(err)
	_, err = client.Resource(v1alpha1.Resource).Namespace(namespace).Patch(f.t.Context(), "trench-a", types.JSONPatchType,
		[]byte(patch), metav1.PatchOptions{})
	f.must(err)
}

// wantNoHolder waits until no pod has its turn.
func (f *fixture) wantNoHolder() {
	f.t.Helper()
	leases, err := coordinationclient.NewForConfig(f.cluster.Admin())
	f.must(err)
	f.wait(func(ctx context.Context) error {
		lease, err := leases.Leases(namespace).Get(ctx, turn.LeaseName("trench-a"), metav1.GetOptions{})
		if err == nil && lease.Spec.HolderIdentity != nil && *lease.Spec.HolderIdentity != "" {
			err = fmt.Errorf("%s has its turn", *lease.Spec.HolderIdentity)
		}
		return err
	})
}
