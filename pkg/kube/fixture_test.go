package kube

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/pkg/logs"
	shell "github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
)

// definition is a CustomResourceDefinition without a schema, so that the API server also stores an
// invalid Trench.
const definition = `
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
`

// access holds the permissions of kube's service account in a namespace.
const access = `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: kube, namespace: NAMESPACE}
rules:
  - {apiGroups: [vipgate.io], resources: [trenches], verbs: [get, list, watch]}
  - {apiGroups: [""], resources: [services, pods], verbs: [get, list, watch]}
  - {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [get, list, watch]}
  - {apiGroups: [""], resources: [secrets], resourceNames: [gw-1], verbs: [get, list, watch]}
  - {apiGroups: [vipgate.io], resources: [trenches/status], verbs: [get, patch]}
  - {apiGroups: [vipgate.io], resources: [trenchreports], verbs: [get, list, watch, create, patch]}
  - {apiGroups: [""], resources: [services/status, pods, pods/status], verbs: [get, patch]}
  - {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [get, create, update, patch]}
  - {apiGroups: [events.k8s.io, ""], resources: [events], verbs: [create, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: kube, namespace: NAMESPACE}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: kube}
subjects: [{kind: ServiceAccount, name: kube, namespace: trench-a}]
`

const trenchA = `
apiVersion: vipgate.io/v1alpha1
kind: Trench
metadata: {name: trench-a, namespace: trench-a}
spec:
  attractor:
    name: attractor-a
    vips: [20.0.0.1/32, 20.0.0.2/32]
    gateways: [{name: gw-1, address: 169.254.100.150, remoteASN: 64512}]
`

const web = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: trench-a, annotations: {vipgate.io/vips: 20.0.0.1}}
spec:
  type: LoadBalancer
  loadBalancerClass: vipgate.io/trench-a
  allocateLoadBalancerNodePorts: false
  selector: {app: web}
  ports: [{port: 8080}]
`

// fixture is an API server with the Trench trench-a in the namespace trench-a, and a Service.
type fixture struct {
	*kubernetes.Cluster
	t       *testing.T
	objects dynamic.Interface
	file    string // the trench file
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	t.Parallel()
	f := &fixture{Cluster: kubernetes.Start(t), t: t}
	client, err := rest.HTTPClientFor(f.Admin())
	harness.Must(t, err)
	t.Cleanup(client.CloseIdleConnections)
	if f.objects, err = dynamic.NewForConfigAndClient(f.Admin(), client); err != nil {
		t.Fatal(err)
	}
	f.Apply(t, definition)
	reports, err := os.ReadFile("../../deployments/kubernetes/reports.yaml")
	harness.Must(t, err)
	f.Apply(t, string(reports))
	f.addNamespace("trench-a")
	f.Apply(t, trenchA)
	f.Apply(t, web)
	f.file = filepath.Join(t.TempDir(), "trench.yaml")
	return f
}

// addNamespace creates a namespace that the service account of kube may read.
func (f *fixture) addNamespace(name string) {
	f.t.Helper()
	f.Apply(f.t, "apiVersion: v1\nkind: Namespace\nmetadata: {name: "+name+"}\n---"+
		strings.ReplaceAll(access, "NAMESPACE", name))
}

// addPod creates a ready Pod of the Service web.
func (f *fixture) addPod(namespace, name, address string) {
	f.t.Helper()
	f.Apply(f.t, pod(namespace, name, address))
}

func pod(namespace, name, address string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: %s, labels: {app: web, vipgate.io/trench: trench-a}}
spec:
  nodeName: node-1
  containers: [{name: app, image: app, ports: [{containerPort: 8080}]}]
status:
  phase: Running
  podIP: %[3]s
  podIPs: [{ip: %[3]s}]
  conditions: [{type: Ready, status: "True"}]
`, name, namespace, address)
}

var (
	podResource     = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	accountResource = schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}
	serviceResource = schema.GroupVersionResource{Version: "v1", Resource: "services"}
	trenchResource  = schema.GroupVersionResource{Group: "vipgate.io", Version: "v1alpha1", Resource: "trenches"}
)

// patch merges into an object of trench-a, or its subresource.
func (f *fixture) patch(r schema.GroupVersionResource, name, merge string, sub ...string) {
	f.t.Helper()
	_, err := f.objects.Resource(r).Namespace("trench-a").Patch(f.t.Context(), name, types.MergePatchType, []byte(merge),
		metav1.PatchOptions{}, sub...)
	harness.Must(f.t, err)
}

// remove deletes an object of trench-a; a Pod with a grace period of 0.
func (f *fixture) remove(r schema.GroupVersionResource, name string, grace ...int64) {
	f.t.Helper()
	o := metav1.DeleteOptions{}
	if len(grace) > 0 {
		o.GracePeriodSeconds = &grace[0]
	}
	harness.Must(f.t, f.objects.Resource(r).Namespace("trench-a").Delete(f.t.Context(), name, o))
}

// instance is a running kube.
type instance struct {
	*process
	t    *testing.T
	log  *harness.Log
	stop func()
}

// run starts a kube with the service account, or with the given configuration.
func (f *fixture) run(config *rest.Config) *instance {
	f.t.Helper()
	if config == nil {
		config = f.ServiceAccount(f.t, "trench-a", "kube")
	}
	i := &instance{t: f.t, log: &harness.Log{}}
	_, level, err := logs.New("text", "debug", i.log)
	harness.Must(f.t, err)
	i.process, err = newProcess(Options{
		Settings: shell.Settings{
			Version: "test", AdminSocket: "unix://" + f.t.TempDir() + "/a.sock", HealthAddr: "127.0.0.1:0",
			MetricsAddr: "127.0.0.1:0", Log: i.log.Logger(), Level: level,
		},
		Config: config, Namespace: "trench-a", Trench: "trench-a", PodName: "lb-1",
		TrenchFile: f.file, KeyDir: filepath.Join(filepath.Dir(f.file), "keys"),
		FrontendSocket: "unix://" + f.t.TempDir() + "/frontend.sock",
	})
	harness.Must(f.t, err)
	stop, ended := make(chan struct{}, 1), make(chan error, 1)
	go func() { ended <- i.process.run(context.Background(), stop) }()
	i.stop = sync.OnceFunc(func() {
		stop <- struct{}{}
		if err := <-ended; err != nil {
			f.t.Errorf("kube ended with: %v", err)
		}
	})
	f.t.Cleanup(func() {
		i.stop()
		if f.t.Failed() {
			f.t.Logf("log of kube:\n%s", i.log.String())
		}
	})
	return i
}

// current reports whether all caches are synced and watched.
func (i *instance) current() bool {
	s := i.cluster.State().Load()
	return !s.Synced.IsZero() && s.Stale.Since.IsZero()
}

// awaitStale waits until kube reports that its file is stale, with a cause that contains the text.
func (i *instance) awaitStale(cause string) {
	i.t.Helper()
	await.True(i.t, "stale: "+cause, func() bool {
		return strings.Contains(i.cluster.State().Load().Stale.Cause, cause)
	})
	await.True(i.t, "stale file: "+cause, func() bool {
		b, err := os.ReadFile(i.TrenchFile + trench.StaleSuffix)
		since, text, _ := strings.Cut(string(b), " ")
		_, bad := time.Parse(time.RFC3339, since)
		return err == nil && bad == nil && strings.HasSuffix(text, "\n") && strings.Contains(text, cause)
	})
}

// awaitCurrent waits until kube reports that its file is current.
func (i *instance) awaitCurrent() {
	i.t.Helper()
	await.True(i.t, "in sync with the API server", i.current)
	await.True(i.t, "no stale file", func() bool {
		_, err := os.Stat(i.TrenchFile + trench.StaleSuffix)
		return errors.Is(err, os.ErrNotExist)
	})
}

// content summarizes the trench file: per stream its targets with their addresses, and a ! for
// each terminating target.
func (f *fixture) content() string {
	f.t.Helper()
	config, err := trenchfile.Read(f.file, trench.DefaultDefaults())
	if err != nil {
		return fmt.Sprint("no file: ", err)
	}
	var all []string
	for _, s := range config.Streams {
		text := s.Name + ":"
		for _, x := range s.Targets {
			text += fmt.Sprintf(" %s=%v", x.Name, x.IPs)
			if x.Terminating {
				text += "!"
			}
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}

func (f *fixture) awaitContent(want string) {
	f.t.Helper()
	await.True(f.t, "trench file says "+want+", not "+f.content(), func() bool { return f.content() == want })
}

// stamp identifies a write of the file: each rename changes the inode.
func (f *fixture) stamp() os.FileInfo {
	f.t.Helper()
	info, err := os.Stat(f.file)
	harness.Must(f.t, err)
	return info
}

// wantSame fails the test if the file was written after the stamp.
func (f *fixture) wantSame(before os.FileInfo) {
	f.t.Helper()
	if !os.SameFile(before, f.stamp()) || !before.ModTime().Equal(f.stamp().ModTime()) {
		f.t.Error("the trench file was written again")
	}
}
