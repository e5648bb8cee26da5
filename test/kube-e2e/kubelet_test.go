package kubee2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/test/lab"
)

// grace is the grace period of the application's pods, in seconds. A drain has to begin within it,
// so it is far above the expected delay.
const grace = 10

// kubelet acts as ReplicaSet controller, kubelet and Multus for the application's pods. A target's
// pod has the target's name.
type kubelet struct {
	f      *fixture
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	ended map[string]time.Time // when the applications of deleted pods began to end
	errs  []error
}

func newKubelet(f *fixture) *kubelet {
	k := &kubelet{f: f, ended: map[string]time.Time{}}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	return k
}

// close waits for terminating pods after cutting their grace periods short.
func (k *kubelet) close() {
	k.cancel()
	k.wg.Wait()
}

// create creates a pending Pod.
func (k *kubelet) create(app *lab.App) {
	k.f.t.Helper()
	k.f.cluster.Apply(k.f.t, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: trench-a, labels: {app: web, vipgate.io/trench: trench-a}}
spec:
  nodeName: node-1
  terminationGracePeriodSeconds: %d
  containers: [{name: app, image: app, ports: [{containerPort: 8080}]}]
`, app.Name, grace))
}

// run writes the addresses to the Pod like Multus, sets it running but not ready, and starts the
// application.
func (k *kubelet) run(app *lab.App) {
	k.f.t.Helper()
	networks, err := json.Marshal([]map[string]any{
		{"name": "cbr0", "interface": "eth0", "ips": []string{"10.244.0.5"}, "default": true},
		{"name": network, "interface": "net1", "ips": app.Addrs},
	})
	k.f.must(err)
	k.patch(app, corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"k8s.v1.cni.cncf.io/network-status": string(networks)}},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: "10.244.0.5", PodIPs: []corev1.PodIP{{IP: "10.244.0.5"}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse}},
		},
	})
	k.f.must(app.Start())
}

// ready sets the Pod ready.
func (k *kubelet) ready(app *lab.App) {
	k.f.t.Helper()
	k.patch(app, corev1.Pod{Status: corev1.PodStatus{
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
	}})
}

// patch merges into the status of a Pod.
func (k *kubelet) patch(app *lab.App, pod corev1.Pod) {
	k.f.t.Helper()
	body, err := json.Marshal(pod)
	k.f.must(err)
	_, err = k.f.core.Pods(namespace).Patch(k.f.t.Context(), app.Name, types.StrategicMergePatchType, body,
		metav1.PatchOptions{}, "status")
	k.f.must(err)
}

// delete deletes a Pod. Its application serves for the whole grace period and then ends, and the
// Pod is removed.
func (k *kubelet) delete(app *lab.App) {
	k.f.t.Helper()
	k.f.must(k.f.core.Pods(namespace).Delete(k.f.t.Context(), app.Name, metav1.DeleteOptions{}))
	pod, err := k.f.core.Pods(namespace).Get(k.f.t.Context(), app.Name, metav1.GetOptions{})
	k.f.must(err)
	if pod.DeletionTimestamp == nil {
		k.f.t.Fatalf("%s was deleted without a deletion timestamp", app.Name)
	}
	k.wg.Go(func() {
		timer := time.NewTimer(grace * time.Second)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-k.ctx.Done():
			return
		}
		k.mu.Lock()
		k.ended[app.Name] = time.Now()
		k.mu.Unlock()
		ctx, cancel := context.WithTimeout(k.ctx, waitTimeout)
		defer cancel()
		now := int64(0)
		err := errors.Join(app.Stop(ctx),
			k.f.core.Pods(namespace).Delete(ctx, app.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}))
		k.mu.Lock()
		defer k.mu.Unlock()
		if err != nil {
			k.errs = append(k.errs, fmt.Errorf("end of %s: %w", app.Name, err))
		}
	})
}

// hasEnded reports whether the application of a deleted pod has begun to end.
func (k *kubelet) hasEnded(app *lab.App) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return !k.ended[app.Name].IsZero()
}

// wait waits for the end of the grace periods of all deleted pods.
func (k *kubelet) wait() {
	k.f.t.Helper()
	k.wg.Wait()
	k.f.must(errors.Join(k.errs...))
}
