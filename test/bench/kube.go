package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/test/kubernetes"
)

// kubeGoals are by the number of Pods.
var kubeGoals = map[int]struct{ latency, memory string }{
	500: {"p99 ≤ 50", "max ≤ 30"},
}

const (
	kubeBurstGoal = "max ≤ 1"
	// podWriters is the number of concurrent requests that create Pods.
	podWriters = 8
	// kubeQuiet is longer than the time for which kube collects changes after a write.
	kubeQuiet = 150 * time.Millisecond

	kubeObjects = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: trenches.vipgate.io}
spec:
  group: vipgate.io
  scope: Namespaced
  names: {plural: trenches, singular: trench, kind: Trench, listKind: TrenchList}
  versions:
    - name: v1alpha1
      served: true
      storage: true
      subresources: {status: {}}
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
---
apiVersion: vipgate.io/v1alpha1
kind: Trench
metadata: {name: trench-a}
spec:
  attractor:
    name: attractor-a
    vips: [20.0.0.1/32]
    gateways: [{name: gw-1, address: 169.254.100.150, remoteASN: 64512}]
---
apiVersion: v1
kind: Service
metadata: {name: web, annotations: {vipgate.io/vips: 20.0.0.1}}
spec:
  type: LoadBalancer
  loadBalancerClass: vipgate.io/trench-a
  allocateLoadBalancerNodePorts: false
  selector: {app: web}
  ports: [{port: 8080}]
`
)

// measureKube is row 20.
func measureKube(ctx context.Context, s *session) error {
	if err := errors.Join(kubernetes.Missing()...); err != nil {
		s.note(20, "not measured: %v", err)
		return nil
	}
	for _, n := range s.sizes([]int{500, 5000}, []int{50}) {
		if err := measureKubeWith(ctx, s, n); err != nil {
			return fmt.Errorf("%d Pods: %w", n, err)
		}
	}
	return nil
}

func measureKubeWith(ctx context.Context, s *session, n int) (err error) {
	fx, err := newKubeFixture(ctx, s)
	defer func() { err = errors.Join(err, fx.close()) }()
	if err == nil {
		err = fx.createPods(0, n)
	}
	if err == nil {
		err = fx.start(s.binaries)
	}
	if err == nil {
		_, err = fx.await(func(file []byte) bool { return bytes.Count(file, []byte("web-")) == n })
	}
	if err != nil {
		return err
	}
	before, err := usageOf(fx.kube.Process.Pid)
	if err != nil {
		return err
	}
	latency := Measurement{
		Row: 20, What: "readiness of a Pod changes → trench file", Method: vipgate, N: n, Unit: "ms",
		Goal: kubeGoals[n].latency,
	}
	for i := range 2 * s.repeats(50, 3) {
		name, ready := fmt.Sprintf("web-%04d", i/2), i%2 == 1
		if err := backoff.Sleep(ctx, kubeQuiet); err != nil {
			return err
		}
		began := time.Now()
		if err := fx.setReady(name, ready); err != nil {
			return err
		}
		at, err := fx.await(func(file []byte) bool { return bytes.Contains(file, []byte(name)) == ready })
		if err != nil {
			return err
		}
		latency.Samples = append(latency.Samples, milliseconds(at.Sub(began)))
	}
	s.record(latency)
	own := Measurement{
		Row: 20, What: "first watch event → trench file, as kube says", Method: vipgate, N: n, Unit: "ms",
		Goal: kubeGoals[n].latency,
	}
	if own.Samples, err = fx.latencies(len(latency.Samples)); err != nil {
		return err
	}
	s.record(own)
	after, err := usageOf(fx.kube.Process.Pid)
	if err != nil {
		return err
	}
	s.record(Measurement{
		Row: 20, What: "processor time of kube for such a change", Method: vipgate, N: n, Unit: "ms",
		Samples: []float64{milliseconds(after.cpu-before.cpu) / float64(len(latency.Samples))},
	})
	s.record(Measurement{
		Row: 20, What: "kube: peak resident memory", Method: vipgate, N: n, Unit: "MiB", Goal: kubeGoals[n].memory,
		Samples: []float64{after.peak},
	})
	anonymous, err := ownMemory(fx.kube.Process.Pid)
	if err != nil {
		return err
	}
	s.record(Measurement{
		Row: 20, What: "kube: resident memory without files (RssAnon)", Method: vipgate, N: n, Unit: "MiB",
		Samples: []float64{anonymous},
	})
	more := s.sizes([]int{1000}, []int{50})[0]
	writes, err := fx.burst(n, more)
	if err == nil {
		s.record(Measurement{
			Row: 20, What: fmt.Sprintf("%d Pods come at once: writes of the trench file", more), Method: vipgate, N: n,
			Goal: kubeBurstGoal, Samples: []float64{float64(writes)},
		})
	}
	return err
}

// ownMemory returns the resident memory of a process without file pages such as its program, in
// MiB.
func ownMemory(pid int) (float64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, fmt.Errorf("memory of process %d: %w", pid, err)
	}
	_, line, _ := strings.Cut(string(status), "RssAnon:")
	var kib float64
	if _, err := fmt.Sscanf(line, "%f kB", &kib); err != nil {
		return 0, fmt.Errorf("memory of process %d: RssAnon: %w", pid, err)
	}
	return kib / 1024, nil
}

// kubeFixture is an API server and a kube.
type kubeFixture struct {
	ctx     context.Context
	scope   *scope
	cluster *kubernetes.Cluster
	pods    typedcorev1.PodInterface
	dir     string
	file    string
	kube    *exec.Cmd
	events  *fsnotify.Watcher
}

func newKubeFixture(ctx context.Context, s *session) (fx *kubeFixture, err error) {
	fx = &kubeFixture{ctx: ctx, scope: &scope{ctx: ctx}}
	if fx.dir, err = os.MkdirTemp("", "vipgate-bench-"); err != nil {
		return fx, err
	}
	fx.file = filepath.Join(fx.dir, "trench", "trench.yaml")
	if err = os.Mkdir(filepath.Dir(fx.file), 0o700); err != nil {
		return fx, err
	}
	if fx.events, err = fsnotify.NewWatcher(); err == nil {
		err = fx.events.Add(filepath.Dir(fx.file))
	}
	if err != nil {
		return fx, err
	}
	return fx, fx.scope.try(func() {
		fx.cluster = kubernetes.Start(fx.scope)
		fx.cluster.Apply(fx.scope, kubeObjects)
		core, err := typedcorev1.NewForConfig(fx.cluster.Admin())
		if err != nil {
			fx.scope.Fatal(err)
		}
		fx.pods = core.Pods("default")
	})
}

func (fx *kubeFixture) close() (err error) {
	if fx.kube != nil && fx.kube.Process != nil {
		err = fx.kube.Process.Kill()
		_ = fx.kube.Wait() // it was killed
	}
	if fx.events != nil {
		err = errors.Join(err, fx.events.Close())
	}
	return errors.Join(err, fx.scope.end(), os.RemoveAll(fx.dir))
}

// start starts kube as an administrator.
func (fx *kubeFixture) start(binaries string) error {
	log, err := os.Create(filepath.Join(fx.dir, "kube.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	var kubeconfig string
	if err := fx.scope.try(func() { kubeconfig = fx.cluster.Kubeconfig(fx.scope, fx.cluster.Admin()) }); err != nil {
		return err
	}
	path, err := filepath.Abs(filepath.Join(binaries, "kube"))
	if err != nil {
		return err
	}
	fx.kube = exec.Command(path, "run",
		"--trench=trench-a", "--namespace=default", "--pod-name=lb-1", "--kubeconfig="+kubeconfig,
		"--trench-file="+fx.file, "--key-dir="+filepath.Join(fx.dir, "keys"),
		"--frontend-admin-socket=unix://"+filepath.Join(fx.dir, "frontend.sock"),
		"--admin-socket=unix://"+filepath.Join(fx.dir, "admin.sock"))
	fx.kube.Stdout, fx.kube.Stderr = log, log
	fx.kube.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return fx.kube.Start()
}

// kubeLog returns the end of kube's log, for errors.
func (fx *kubeFixture) kubeLog() string {
	log, _ := os.ReadFile(filepath.Join(fx.dir, "kube.log"))
	return string(log[max(0, len(log)-2000):])
}

// latencies returns the latencies of the last n writes, in ms.
func (fx *kubeFixture) latencies(n int) (all []float64, err error) {
	log, err := os.ReadFile(filepath.Join(fx.dir, "kube.log"))
	if err != nil {
		return nil, err
	}
	for line := range bytes.Lines(log) {
		var written struct {
			Msg     string
			Latency time.Duration
		}
		if json.Unmarshal(line, &written) == nil && written.Msg == "trench file written" {
			all = append(all, milliseconds(written.Latency))
		}
	}
	if len(all) < n {
		return nil, fmt.Errorf("kube says of %d writes how long they took, not of %d", len(all), n)
	}
	return all[len(all)-n:], nil
}

// createPods creates ready Pods with the numbers from first on.
func (fx *kubeFixture) createPods(first, n int) error {
	g, ctx := errgroup.WithContext(fx.ctx)
	g.SetLimit(podWriters)
	for i := first; i < first+n; i++ {
		g.Go(func() error {
			ip := fmt.Sprintf("10.%d.%d.1", i>>8, i&255)
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{
					Name: fmt.Sprintf("web-%04d", i), Labels: map[string]string{"app": "web", "vipgate.io/trench": "trench-a"},
				},
				Spec: corev1.PodSpec{
					NodeName: "node-1",
					Containers: []corev1.Container{{
						Name: "app", Image: "app", Env: []corev1.EnvVar{{Name: "SETTINGS", Value: strings.Repeat("x", 500)}},
					}},
				},
			}
			pod, err := fx.pods.Create(ctx, pod, metav1.CreateOptions{})
			if err != nil {
				return err
			}
			pod.Status = corev1.PodStatus{
				Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
				Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
			}
			_, err = fx.pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{})
			return err
		})
	}
	return g.Wait()
}

// setReady changes the condition of a Pod as its kubelet does.
func (fx *kubeFixture) setReady(name string, ready bool) error {
	status := map[bool]string{true: "True", false: "False"}[ready]
	_, err := fx.pods.Patch(fx.ctx, name, types.StrategicMergePatchType,
		fmt.Appendf(nil, `{"status":{"conditions":[{"type":"Ready","status":"%s"}]}}`, status),
		metav1.PatchOptions{}, "status")
	return err
}

// await waits until the trench file is as wanted, and returns when its last write was noticed.
func (fx *kubeFixture) await(wanted func([]byte) bool) (at time.Time, err error) {
	limit := time.After(waitTimeout)
	for {
		at = time.Now()
		if file, err := os.ReadFile(fx.file); err == nil && wanted(file) {
			return at, nil
		}
		select {
		case <-fx.events.Events:
		case err := <-fx.events.Errors:
			return at, fmt.Errorf("watch of the trench file: %w", err)
		case <-limit:
			return at, fmt.Errorf("the trench file is not as expected after %v: %s", waitTimeout, fx.kubeLog())
		case <-fx.ctx.Done():
			return at, context.Cause(fx.ctx)
		}
	}
}

// burst lets kube find n more Pods in one batch, and returns the number of file writes until all
// of them are in the file.
func (fx *kubeFixture) burst(before, n int) (writes int, err error) {
	if err := fx.kube.Process.Signal(syscall.SIGSTOP); err != nil {
		return 0, err
	}
	err = fx.createPods(before, n)
	if err = errors.Join(err, fx.kube.Process.Signal(syscall.SIGCONT)); err != nil {
		return 0, err
	}
	seen, _ := os.Stat(fx.file)
	_, err = fx.await(func(file []byte) bool {
		if info, err := os.Stat(fx.file); err == nil && !os.SameFile(info, seen) {
			writes, seen = writes+1, info
		}
		return bytes.Count(file, []byte("web-")) == before+n
	})
	return writes, err
}
