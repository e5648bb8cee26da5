package kube

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/kube/meridio2"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	shell "github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
)

const meridio2Gateway = `
apiVersion: v1
kind: Namespace
metadata: {name: ns-a}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: gw-a, namespace: ns-a}
spec: {gatewayClassName: meridio}
status: {addresses: [{type: IPAddress, value: 20.0.0.1}, {type: IPAddress, value: "2000::1"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: sllb-1, namespace: ns-a}
spec:
  containers: [{name: loadbalancer, image: lb}]
  readinessGates:
    - {conditionType: meridio-2.nordix.org/ipv4-connectivity}
    - {conditionType: meridio-2.nordix.org/ipv6-connectivity}
`

var (
	gatewayResource = meridio2.GatewayResource()
	routerResource  = meridio2.RouterResource()
	eventResource   = schema.GroupVersionResource{Group: "events.k8s.io", Version: "v1", Resource: "events"}
)

// meridio2Fixture is an API server with the Gateway gw-a of Meridio 2, and its Pod sllb-1.
type meridio2Fixture struct {
	*kubernetes.Cluster
	*testing.T
	objects  dynamic.Interface
	file     string
	frontend *adminSocket
}

func newMeridio2Fixture(t *testing.T) *meridio2Fixture {
	t.Helper()
	t.Parallel()
	f := &meridio2Fixture{Cluster: kubernetes.Start(t), T: t, file: filepath.Join(t.TempDir(), "trench.yaml")}
	client, err := rest.HTTPClientFor(f.Admin())
	harness.Must(t, err)
	t.Cleanup(client.CloseIdleConnections)
	if f.objects, err = dynamic.NewForConfigAndClient(f.Admin(), client); err != nil {
		t.Fatal(err)
	}
	f.Apply(t, f.manifest("meridio2/testdata/definitions.yaml"))
	f.Apply(t, meridio2Gateway)
	// Besides metadata, Kustomize sets only the namespace of a subject.
	f.ApplyIn(t, "ns-a", strings.Replace(f.manifest("../../deployments/meridio2/role.yaml"),
		"  - kind: ServiceAccount\n", "  - kind: ServiceAccount\n    namespace: ns-a\n", 1))
	f.frontend = newAdminSocket(t)
	return f
}

// manifest reads a file of the repository.
func (f *meridio2Fixture) manifest(path string) string {
	f.Helper()
	text, err := os.ReadFile(path)
	harness.Must(f, err)
	return string(text)
}

func (f *meridio2Fixture) addRouter(name, address, protocol, more string) {
	f.Helper()
	f.Apply(f.T, fmt.Sprintf(`
apiVersion: meridio-2.nordix.org/v1alpha1
kind: GatewayRouter
metadata: {name: %s, namespace: ns-a}
spec: {gatewayRef: {name: gw-a}, interface: vlan-100, address: "%s", protocol: %s, %s}
`, name, address, protocol, more))
}

const bgp = "bgp: {localASN: 64512, remoteASN: 64513}"

func (f *meridio2Fixture) patchStatus(r schema.GroupVersionResource, name, merge string) {
	f.Helper()
	_, err := f.objects.Resource(r).Namespace("ns-a").Patch(f.Context(), name, types.MergePatchType, []byte(merge),
		metav1.PatchOptions{}, "status")
	harness.Must(f, err)
}

// run starts kube with the service account of Meridio 2's load balancer.
func (f *meridio2Fixture) run() (p *process, stop func()) {
	f.Helper()
	log := slog.New(slog.NewTextHandler(f.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	_, level, err := logs.New("text", "debug", f.Output())
	harness.Must(f, err)
	p, err = newProcess(Options{
		Settings: shell.Settings{
			Version: "test", AdminSocket: "unix://" + f.TempDir() + "/a.sock", HealthAddr: "127.0.0.1:0", Log: log, Level: level,
		},
		Config: f.ServiceAccount(f.T, "ns-a", "stateless-load-balancer"), Namespace: "ns-a",
		Gateway: "gw-a", PodName: "sllb-1", TrenchFile: f.file, KeyDir: filepath.Join(filepath.Dir(f.file), "keys"),
		FrontendSocket: "unix://" + f.frontend.path,
	})
	harness.Must(f, err)
	stops, ended := make(chan struct{}, 1), make(chan error, 1)
	go func() { ended <- p.run(context.Background(), stops) }()
	stop = sync.OnceFunc(func() {
		stops <- struct{}{}
		if err := <-ended; err != nil {
			f.Errorf("kube ended with: %v", err)
		}
	})
	f.Cleanup(stop)
	return p, stop
}

// content summarizes the trench file: VIPs, interface and gateways.
func (f *meridio2Fixture) content() string {
	config, err := trenchfile.Read(f.file, trench.DefaultDefaults())
	if err != nil {
		return "no file: " + err.Error()
	}
	text := fmt.Sprint(config.Attractor.VIPs)
	for _, g := range config.Attractor.Gateways {
		text += fmt.Sprintf(" %s=%s%%%s:%d", g.Name, g.Address, config.Attractor.Interface, g.RemotePort)
	}
	return text
}

func (f *meridio2Fixture) awaitContent(want string) {
	f.Helper()
	await.True(f.T, "trench file says "+want, func() bool { return f.content() == want })
}

// events returns "kind name reason" of all Events, sorted.
func (f *meridio2Fixture) events() (all []string) {
	f.Helper()
	list, err := f.objects.Resource(eventResource).Namespace("ns-a").List(f.Context(), metav1.ListOptions{})
	harness.Must(f, err)
	for _, e := range list.Items {
		reason, _, _ := unstructured.NestedString(e.Object, "reason")
		kind, _, _ := unstructured.NestedString(e.Object, "regarding", "kind")
		name, _, _ := unstructured.NestedString(e.Object, "regarding", "name")
		all = append(all, kind+" "+name+" "+reason)
	}
	slices.Sort(all)
	return all
}

// gate returns the condition of a readiness gate; its Status is "" if it is not set.
func (f *meridio2Fixture) gate(family vip.Family) (c corev1.PodCondition) {
	f.Helper()
	u, err := f.objects.Resource(podResource).Namespace("ns-a").Get(f.Context(), "sllb-1", metav1.GetOptions{})
	harness.Must(f, err)
	pod := &corev1.Pod{}
	harness.Must(f, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, pod))
	i := slices.IndexFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == meridio2.GateOf(family)
	})
	if i < 0 {
		return c
	}
	return pod.Status.Conditions[i]
}

func (f *meridio2Fixture) awaitGate(family vip.Family, status corev1.ConditionStatus, reason string) {
	f.Helper()
	await.True(f.T, fmt.Sprintf("gate %v is %s for %s", family, status, reason), func() bool {
		c := f.gate(family)
		return c.Status == status && c.Reason == reason
	})
}

func TestAPIServerMeridio2Objects(t *testing.T) {
	f := newMeridio2Fixture(t)
	f.checkSwap()
	f.addRouter("router-a", "169.254.10.150", "BGP", bgp)
	p, stop := f.run()
	f.awaitContent("[20.0.0.1/32 2000::1/128] router-a=169.254.10.150%vlan-100:179")

	f.patchStatus(gatewayResource, "gw-a", `{"status": {"addresses": [{"value": "20.0.0.1"}, {"value": "20.0.0.2"}]}}`)
	f.awaitContent("[20.0.0.1/32 20.0.0.2/32] router-a=169.254.10.150%vlan-100:179")
	f.addRouter("router-b", "169.254.10.151", "BGP", "bgp: {localASN: 64512, remoteASN: 64513, remotePort: 10179}")
	f.awaitContent("[20.0.0.1/32 20.0.0.2/32] router-a=169.254.10.150%vlan-100:179 " +
		"router-b=169.254.10.151%vlan-100:10179")
	f.patchStatus(gatewayResource, "gw-a", `{"status": {"addresses": [{"value": "20.0.0.2"}]}}`)
	f.awaitContent("[20.0.0.2/32] router-a=169.254.10.150%vlan-100:179 router-b=169.254.10.151%vlan-100:10179")
	harness.Must(t, f.objects.Resource(routerResource).Namespace("ns-a").Delete(t.Context(), "router-a",
		metav1.DeleteOptions{}))
	f.awaitContent("[20.0.0.2/32] router-b=169.254.10.151%vlan-100:10179")
	if len(f.events()) != 0 {
		t.Errorf("Events without a refusal: %v", f.events())
	}

	// A refusal does not affect valid objects, and has only one Event, also after a restart.
	f.addRouter("router-s", "169.254.10.152", "Static", "static: {bfd: {minTx: soon, minRx: 300ms, multiplier: 3}}")
	f.addRouter("router-6", "fe80::1", "BGP", bgp)
	refusals := []string{"GatewayRouter router-6 InvalidAddress", "GatewayRouter router-s Invalid"}
	await.True(t, "an Event for each refusal", func() bool { return slices.Equal(f.events(), refusals) })
	f.awaitContent("[20.0.0.2/32] router-b=169.254.10.151%vlan-100:10179")
	stop()
	f.run()
	f.addRouter("router-c", "169.254.10.153", "BGP", bgp)
	f.awaitContent("[20.0.0.2/32] router-b=169.254.10.151%vlan-100:10179 router-c=169.254.10.153%vlan-100:179")
	f.addRouter("router-d", "169.254.10.153", "BGP", bgp)
	refusals = slices.Insert(refusals, 1, "GatewayRouter router-d AddressTaken")
	await.True(t, "an Event for the new refusal", func() bool { return slices.Equal(f.events(), refusals) })

	// The file stays when the Gateway is deleted.
	harness.Must(t, f.objects.Resource(gatewayResource).Namespace("ns-a").Delete(t.Context(), "gw-a",
		metav1.DeleteOptions{}))
	await.True(t, "a stale file", func() bool {
		b, err := os.ReadFile(f.file + trench.StaleSuffix)
		return err == nil && strings.Contains(string(b), "Gateway ns-a/gw-a: does not exist")
	})
	f.awaitContent("[20.0.0.2/32] router-b=169.254.10.151%vlan-100:10179 router-c=169.254.10.153%vlan-100:179")
	if s := p.status(); s.GetTrench() != "gw-a" || s.GetVerdict().GetObject() != "Gateway ns-a/gw-a" {
		t.Errorf("status %v", s)
	}
}

func TestAPIServerMeridio2Gates(t *testing.T) {
	f := newMeridio2Fixture(t)
	f.addRouter("router-a", "169.254.10.150", "BGP", bgp)
	f.run()
	f.awaitGate(vip.IPv4, corev1.ConditionFalse, "NoGatewayUp")
	f.awaitGate(vip.IPv6, corev1.ConditionFalse, "NoGatewayUp")

	begin := time.Now()
	f.frontend.up("router-a", "169.254.10.150")
	f.awaitGate(vip.IPv4, corev1.ConditionTrue, "GatewayUp")
	if took := time.Since(begin); took < 3*time.Second {
		t.Errorf("connected after %v", took)
	}
	f.awaitGate(vip.IPv6, corev1.ConditionFalse, "NoGatewayUp")
	f.frontend.status.Set(&frontendv1.Status{})
	f.awaitGate(vip.IPv4, corev1.ConditionFalse, "NoGatewayUp")

	// The kubelet's conditions stay.
	f.patchStatus(podResource, "sllb-1", `{"status": {"phase": "Running", "conditions": [
		{"type": "PodScheduled", "status": "True"},
		{"type": "meridio-2.nordix.org/ipv4-connectivity", "status": "True", "reason": "Other"},
		{"type": "meridio-2.nordix.org/ipv6-connectivity", "status": "False", "reason": "NoGatewayUp"}]}}`)
	f.awaitGate(vip.IPv4, corev1.ConditionFalse, "NoGatewayUp") // replaces another writer's status
	u, err := f.objects.Resource(podResource).Namespace("ns-a").Get(t.Context(), "sllb-1", metav1.GetOptions{})
	if err != nil || !strings.Contains(fmt.Sprint(u.Object["status"]), "PodScheduled") {
		t.Errorf("status of the Pod %v: %v", u.Object["status"], err)
	}

	f.frontend.up("router-6", "fd00::1")
	f.awaitGate(vip.IPv6, corev1.ConditionTrue, "GatewayUp")
	f.frontend.end()
	f.awaitGate(vip.IPv6, corev1.ConditionFalse, "FrontendUnreachable")
}

func TestAPIServerMeridio2Outage(t *testing.T) {
	f := newMeridio2Fixture(t)
	f.frontend.up("router-a", "169.254.10.150")
	_, stop := f.run()
	f.awaitGate(vip.IPv4, corev1.ConditionTrue, "GatewayUp")
	before := f.gate(vip.IPv4)

	// A restart does not change the gate.
	stop()
	p, _ := f.run()
	await.True(t, "the gates are set", func() bool {
		return slices.ContainsFunc(p.status().GetConditions(), func(c *adminv1.Condition) bool {
			return c.GetName() == ReadinessGates && c.GetServing()
		})
	})
	if after := f.gate(vip.IPv4); !after.LastTransitionTime.Equal(&before.LastTransitionTime) ||
		after.Status != corev1.ConditionTrue {
		t.Errorf("a restart changed the condition from %+v to %+v", before, after)
	}

	// The gate is set when the API server is reachable again.
	f.StopServer(t)
	f.frontend.status.Set(&frontendv1.Status{})
	await.True(t, "a failed attempt", func() bool {
		return slices.ContainsFunc(p.status().GetConditions(), func(c *adminv1.Condition) bool {
			return c.GetName() == ReadinessGates && !c.GetServing()
		})
	})
	f.StartServer(t)
	f.awaitGate(vip.IPv4, corev1.ConditionFalse, "NoGatewayUp")
}

// adminSocket serves the admin socket of a frontend.
type adminSocket struct {
	frontendv1.UnimplementedFrontendServiceServer
	path   string
	status *latest.Value[*frontendv1.Status]
	end    func()
}

func newAdminSocket(t *testing.T) *adminSocket {
	t.Helper()
	s := &adminSocket{path: filepath.Join(t.TempDir(), "f.sock"), status: latest.New(&frontendv1.Status{})}
	listener, err := net.Listen("unix", s.path)
	harness.Must(t, err)
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	frontendv1.RegisterFrontendServiceServer(server, s)
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(listener) })
	s.end = sync.OnceFunc(func() {
		server.Stop()
		wg.Wait()
	})
	t.Cleanup(s.end)
	return s
}

// up sets a status with one gateway that is up.
func (s *adminSocket) up(name, address string) {
	s.status.Set(&frontendv1.Status{Gateways: []*frontendv1.GatewayStatus{
		{Name: name, Address: address, Up: true, Since: timestamppb.Now()},
	}})
}

// GetStatus implements the FrontendService.
func (s *adminSocket) GetStatus(context.Context, *adminv1.GetStatusRequest) (*frontendv1.Status, error) {
	return s.status.Load(), nil
}

// WatchStatus implements the FrontendService.
func (s *adminSocket) WatchStatus(_ *adminv1.WatchStatusRequest,
	stream grpc.ServerStreamingServer[frontendv1.Status],
) error {
	return endpoint.WatchStatus(stream.Context(), s.status, func() error {
		return stream.Send(s.status.Load())
	})
}
