package kubee2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
	"github.com/vipgate/vipgate/test/load"
)

const (
	hostile    = "tenant-b" // namespace
	hostileVIP = "20.0.0.9"
	markerVIP  = "20.0.0.10"
	// crowd is the number of Services, each with a Pod, that a hostile tenant creates at once,
	// crowdVIPs that of the VIPs that they claim, and quota that of the Services that it may have.
	crowd, crowdVIPs, quota = 1000, 30, 20
	// The fastest of manyAnswers may be slower by a factor: it waits for no stall of the machine.
	manyAnswers, slower = 100, 10
)

// limits are the memory limits of deployments/base/deployment.yaml, in MiB.
var limits = map[string]int{"kube": 128, "lb": 256, "frontend": 512}

// tenants is a Trench with a victim, the Service of fixture under requests, and a hostile tenant: a
// user with the role edit in another namespace who may also write the status of Services.
type tenants struct {
	*fixture
	user *kubernetes.Clientset
	load *load.Generator
	// before and fastest, the time of an answer, must not change.
	before  []string
	fastest time.Duration
	marks   int // of the Service marker
}

// Whatever one tenant writes, VIP, targets, policy, conditions and answers of the other are
// unchanged, the answers as fast, no program exceeds its memory or ends, and a Service that has no
// effect says why. There are no admission policies, which only add to that.
func TestTenants(t *testing.T) {
	f := &tenants{fixture: newFixture(t)}
	f.admit()
	f.serve()
	for _, c := range f.annotations() {
		f.refused(c.name, c.annotations, c.want)
	}
	f.pods()
	f.records()
	f.endpoints()
	f.crowd()
	f.lost(f.load.Stop(t.Context()))
	f.wantUpdates(1)
}

// admit creates the hostile namespace with its Roles.
func (f *tenants) admit() {
	f.t.Helper()
	f.cluster.Apply(f.t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+hostile+"}}")
	f.cluster.Apply(f.t, strings.ReplaceAll(f.manifest("deployments/example/namespace-role.yaml"),
		"namespace: application-a", "namespace: "+hostile))
	var err error
	f.user, err = kubernetes.NewForConfig(f.cluster.User("mallory"))
	f.must(err)
	root, err := kubernetes.NewForConfig(f.cluster.Admin())
	f.must(err)
	rules := []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"services", "pods", "services/status"}, Verbs: []string{"*"}},
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"*"}},
	}
	_, err = root.RbacV1().Roles(hostile).Create(f.t.Context(),
		&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "mallory"}, Rules: rules}, metav1.CreateOptions{})
	f.must(err)
	_, err = root.RbacV1().RoleBindings(hostile).Create(f.t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "mallory"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "mallory"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "mallory"}},
	}, metav1.CreateOptions{})
	f.must(err)
	f.must(root.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().DeleteCollection(f.t.Context(),
		metav1.DeleteOptions{}, metav1.ListOptions{}))
}

// serve starts the Trench with the victim. A Pod of the hostile tenant is older than all of it.
func (f *tenants) serve() {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	f.wait(func(ctx context.Context) error { // the API server watches its Roles
		return f.createPod(ctx, "idle")
	})
	free := hostileVIP + "/32, " + markerVIP + "/32, "
	for i := range crowdVIPs {
		free += crowdVIP(i) + "/32, "
	}
	f.cluster.Apply(f.t, strings.NewReplacer("spec:\n", fmt.Sprintf("spec:\n  namespaces: [trench-a, %s]\n"+
		"  quota: {streams: %d}\n", hostile, quota), "vips: [", "vips: ["+free).Replace(trenchManifest()))
	f.startTrenchPods()
	f.cluster.Apply(f.t, strings.Replace(service, "    vipgate.io/drain-time",
		`    vipgate.io/policy: '{"ready": {"communities": ["64512:7"], "med": 10}}'`+"\n    vipgate.io/drain-time", 1))
	_, err := f.user.CoreV1().Services(hostile).Create(ctx,
		f.service("marker", map[string]string{v1alpha1.VIPsAnnotation: markerVIP}), metav1.CreateOptions{})
	f.must(err)
	f.startTargets(f.Targets[:replicas])
	f.load, err = f.Load(f.t.Context(), rate, 0, load.Config{})
	f.must(err)
	f.t.Cleanup(func() { f.load.Stop(context.Background()) })
	f.wantAnswers(f.load, f.Targets[:replicas]...)
	f.must(f.load.WaitAnswered(ctx, manyAnswers))
	answers, err := f.load.Take(ctx)
	f.must(err)
	f.lost(answers)
	f.fastest = answers.Fastest
	f.before, err = f.victim(ctx)
	f.must(err)
}

// victim returns what users of the victim see: the conditions of the Service, its routes and its
// targets.
func (f *tenants) victim(ctx context.Context) ([]string, error) {
	var all []string
	s, err := f.core.Services(namespace).Get(ctx, serviceName, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	for _, c := range s.Status.Conditions {
		// An address that Pods of two namespaces have is a warning for both.
		message, _, _ := strings.Cut(c.Message, "; Pod ")
		all = append(all, fmt.Sprintf("%s %s %s %s", c.Type, c.Status, c.Reason, message))
	}
	routes, err := f.gateway.Routes(ctx)
	for prefix, route := range routes {
		if text := prefix.String(); text == route4 || text == route6 {
			all = append(all, fmt.Sprintf("%s %v med %s", prefix, route.Communities, route.MED))
		}
	}
	slices.Sort(all)
	for _, p := range f.Pods {
		err = errors.Join(err, f.wantTargets(ctx, p))
	}
	return all, err
}

// wantTargets returns an error unless the victim's targets are ready in a pod. Targets of the
// hostile tenant have the same names, in streams of its own.
func (f *tenants) wantTargets(ctx context.Context, p *lab.Pod) error {
	list, err := admin.Call(p.LBAdmin(), func(conn *grpc.ClientConn) (*targetv1.ListResponse, error) {
		return targetv1.NewTargetServiceClient(conn).List(ctx, &targetv1.ListRequest{})
	})
	missing := map[string]bool{}
	for _, app := range f.Targets[:replicas] {
		missing[app.Name] = true
	}
	for _, x := range list.GetTargets() {
		if strings.HasPrefix(x.GetStream(), hostile+".") {
			continue
		}
		delete(missing, x.GetName())
		if x.GetState() != targetv1.State_STATE_READY {
			err = errors.Join(err, fmt.Errorf("target %s of stream %s is %v",
				x.GetName(), x.GetStream(), x.GetState()))
		}
	}
	if len(missing) > 0 {
		err = errors.Join(err, fmt.Errorf("no targets %v", slices.Sorted(maps.Keys(missing))))
	}
	return err
}

// crowdVIP returns a VIP of the crowd.
func crowdVIP(i int) string { return fmt.Sprintf("20.0.1.%d", i%crowdVIPs) }

// settled waits until each kube has read all that was written before: a later edit is in its trench
// file.
func (f *tenants) settled() {
	f.t.Helper()
	f.marks++
	mark := fmt.Sprint(100_000 + f.marks)
	_, err := f.user.CoreV1().Services(hostile).Patch(f.t.Context(), "marker", types.MergePatchType,
		[]byte(annotated("policy", `{"ready":{"med":`+mark+`}}`)), metav1.PatchOptions{})
	f.must(err)
	f.wait(func(context.Context) error {
		for _, p := range f.Pods {
			text, err := os.ReadFile(p.TrenchFile())
			if err == nil && !strings.Contains(string(text), "med: "+mark) {
				err = fmt.Errorf("%s has no MED %s", p.TrenchFile(), mark)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// unharmed fails the test if the victim has changed, or a program has ended or exceeded its memory.
func (f *tenants) unharmed(after string) {
	f.t.Helper()
	f.settled()
	ctx := harness.Context(f.t, waitTimeout)
	now, err := f.victim(ctx)
	if err != nil || !slices.Equal(now, f.before) {
		f.t.Fatalf("after %s: %v\nthe victim has %q\nand had %q", after, err, now, f.before)
	}
	f.wantUpdates(1)
	r := f.load.Now()
	if r.Answered >= manyAnswers {
		r, err = f.load.Take(ctx)
		f.must(err)
		if r.Fastest > slower*f.fastest {
			f.t.Fatalf("after %s: the fastest of %d answers took %v, %v before", after, r.Answered, r.Fastest, f.fastest)
		}
	}
	if r.Failed > 0 {
		f.t.Fatalf("after %s: %d of %d requests failed: %v", after, r.Failed, r.Sent, r.Failures)
	}
	for i, p := range f.Pods {
		for name, process := range map[string]*lab.Process{"kube": f.kubes[i], "lb": p.LB, "frontend": p.Frontend} {
			select {
			case <-process.Done():
				f.t.Fatalf("after %s: %s has ended:\n%s", after, process.Name, process.Tail(20))
			default:
			}
			if peak := f.peak(process.PID()); peak > limits[name] {
				f.t.Fatalf("after %s: %s needed %d MiB of %d", after, process.Name, peak, limits[name])
			}
		}
	}
}

// peak returns the largest resident size of a process so far, in MiB.
func (f *tenants) peak(pid int) int {
	f.t.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	f.must(err)
	_, rest, _ := strings.Cut(string(text), "VmHWM:")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	f.must(err)
	return kib >> 10
}

// service returns a Service of the hostile tenant.
func (f *tenants) service(name string, annotations map[string]string) *corev1.Service {
	class := v1alpha1.Group + "/trench-a"
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{v1alpha1.VIPsAnnotation: hostileVIP}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: &class,
			AllocateLoadBalancerNodePorts: new(bool),
			Selector:                      map[string]string{"app": "idle"},
			Ports:                         []corev1.ServicePort{{Port: 8080, Protocol: corev1.ProtocolTCP}},
		},
	}
	maps.Copy(s.Annotations, annotations)
	return s
}

// refused creates a Service that kube must refuse with a message that contains want, and deletes
// it. With an empty want kube may accept it.
func (f *tenants) refused(name string, annotations map[string]string, want string) {
	f.t.Helper()
	ctx := harness.Context(f.t, 2*waitTimeout)
	services := f.user.CoreV1().Services(hostile)
	created, err := services.Create(ctx, f.service(name, annotations), metav1.CreateOptions{})
	if apierrors.IsInvalid(err) || apierrors.IsRequestEntityTooLargeError(err) {
		f.t.Logf("%s: the API server: %.200v", name, err)
		return
	}
	f.must(err)
	f.wait(func(ctx context.Context) error {
		s, err := services.Get(ctx, created.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		c := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.Group+"/"+v1alpha1.Accepted)
		if c == nil || want != "" && (c.Status != metav1.ConditionFalse || !strings.Contains(c.Reason+": "+c.Message, want)) {
			return fmt.Errorf("%s: Accepted is %+v, want a refusal with %q", name, c, want)
		}
		return nil
	})
	f.unharmed(name)
	f.must(services.Delete(ctx, created.Name, metav1.DeleteOptions{}))
}

// annotation is a Service with annotations, and a part of its refusal.
type annotation struct {
	name        string
	annotations map[string]string
	want        string
}

// annotations returns absurd values of each annotation, and those that reach further than a Service
// may.
func (f *tenants) annotations() []annotation {
	var all []annotation
	for _, name := range []string{"vips", "check", "min-ready", "drain-time", "maglev", "last-resort", "policy"} {
		for kind, value := range map[string]string{
			"long": strings.Repeat("x", 200_000), "nested": strings.Repeat(`{"all":[`, 10_000), "nul": "{\"\x01\":\"\\u0000\"}",
			"list": "[[]]", "negative": "-1", "huge": "1e999999999",
		} {
			key := v1alpha1.Group + "/" + name
			all = append(all, annotation{kind + "-" + name, map[string]string{key: value}, key})
		}
	}
	add := func(name, field, value, want string) {
		all = append(all, annotation{name, map[string]string{v1alpha1.Group + "/" + field: value}, want})
	}
	communities := func(n int) string {
		return `{"ready":{"communities":["64512:1"` + strings.Repeat(`,"64512:1"`, n-1) + `]}}`
	}
	add("most-communities", "policy", communities(20), "")
	add("too-many-communities", "policy", communities(21), "communities")
	add("endless-communities", "policy", communities(1100), "communities")
	body := func(expression string) string {
		text, err := json.Marshal(map[string]any{"http": map[string]any{"port": 8080, "body": expression}})
		f.must(err)
		return string(text)
	}
	add("many-repeats", "check", body("(?:"+strings.Repeat("a", 980)+"){0,1000}"), "body")
	add("slow-repeats", "check", body(strings.Repeat("a{0,1000}", 100)), "body")
	add("wide-classes", "check", body(`^\pL{990}$`), "body")
	add("folded-classes", "check", body("(?i)["+strings.Repeat("Ⱥ-ⱿK", 140)+"]"), "")
	add("open-quotation", "check", body(`\Qok`), "")
	for field, check := range map[string]string{
		"via":      `{"tcp":{"port":8080},"via":"address"}`,
		"source":   `{"tcp":{"port":8080},"source":["172.16.0.1"]}`,
		"caFile":   `{"http":{"port":8080,"tls":{"caFile":"/proc/1/environ"}}}`,
		"certFile": `{"http":{"port":8080,"tls":{"certFile":"/proc/1/environ","keyFile":"/proc/1/environ"}}}`,
		"method":   `{"http":{"port":8080,"method":"PUT"}}`,
	} {
		add("check-"+strings.ToLower(field), "check", check, field+": a Service cannot have it")
	}
	add("check-interval", "check", `{"tcp":{"port":8080},"interval":"10ms","timeout":"10ms"}`, "interval")
	add("vip-of-another", "vips", vip4, translation.ReasonVIPHeld)
	add("vip-outside", "vips", "20.9.9.9", "20.9.9.9")
	add("vip-and-more", "vips", vip4+","+hostileVIP, "")
	add("web", "min-ready", "1000001", "min-ready")
	return all
}

// createPod creates a running Pod of the trench with an annotation of Multus that lists addresses.
func (f *tenants) createPod(ctx context.Context, name string, addresses ...netip.Addr) error {
	networks, err := json.Marshal([]map[string]any{{"name": network, "interface": "net1", "ips": addresses}})
	if err != nil {
		return err
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: map[string]string{"app": "idle", v1alpha1.TrenchLabel: "trench-a"},
			Annotations: map[string]string{"k8s.v1.cni.cncf.io/network-status": string(networks)},
		},
		Spec: corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{{Name: "app", Image: "app"}}},
	}
	if _, err := f.user.CoreV1().Pods(hostile).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return err
	}
	return f.running(ctx, name)
}

// running sets a Pod running, as a kubelet does.
func (f *tenants) running(ctx context.Context, name string) error {
	_, err := f.core.Pods(hostile).Patch(ctx, name, types.StrategicMergePatchType, []byte(`{"status":{"phase":"Running",`+
		`"podIP":"10.244.0.9","podIPs":[{"ip":"10.244.0.9"}],"conditions":[{"type":"Ready","status":"True"}]}}`),
		metav1.PatchOptions{}, "status")
	return err
}

// claim sets the addresses that the oldest Pod claims, as `kubectl annotate` does.
func (f *tenants) claim(name, status string) {
	f.t.Helper()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"annotations": map[string]string{"k8s.v1.cni.cncf.io/network-status": status},
	}})
	f.must(err)
	_, err = f.user.CoreV1().Pods(hostile).Patch(f.t.Context(), "idle", types.MergePatchType, patch, metav1.PatchOptions{})
	f.must(err)
	f.unharmed(name)
}

// pods forges the annotation of Multus and labels, of a Pod that the tenant's own Service selects.
func (f *tenants) pods() {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	_, err := f.user.CoreV1().Services(hostile).Create(ctx, f.service("own", nil), metav1.CreateOptions{})
	f.must(err)
	status := func(addresses ...string) string {
		text, err := json.Marshal([]map[string]any{{"name": network, "ips": addresses}})
		f.must(err)
		return string(text)
	}
	victim := f.Targets[0].Addrs
	f.claim("address-of-another", status(victim[0].String(), victim[1].String()))
	f.claim("one-family-of-another", status(victim[0].String()))
	f.claim("vip-of-another", status(vip4, vip6))
	f.claim("gateway", status(lab.GatewayA4.String(), lab.GatewayA6.String()))
	f.claim("metadata", status("169.254.169.254", "fd00:ec2::254"))
	f.claim("loopback", status("127.0.0.1", "::1"))
	f.claim("all-addresses", status(func() (all []string) {
		for i := range 2000 {
			all = append(all, fmt.Sprintf("172.16.%d.%d", i/250, 1+i%250))
		}
		return all
	}()...))
	f.claim("no-json", "]["+strings.Repeat("[", 100_000))
	f.claim("no-address", status("nonsense", "172.16.1.300"))
	// A Pod that looks like one of the trench, and one with the name of the victim's.
	for _, name := range []string{podName(1), f.Targets[0].Name} {
		f.must(f.createPod(ctx, name, victim...))
		_, err := f.user.CoreV1().Pods(hostile).Patch(ctx, name, types.MergePatchType,
			[]byte(`{"metadata":{"labels":{"vipgate.io/trench-pod":"trench-a"}}}`), metav1.PatchOptions{})
		f.must(err)
		f.unharmed("pod " + name)
	}
	f.claim("own-address", status("172.16.200.9"))
}

// records forges the record of an accepted Service, with the victim's VIP and with earlier sets of
// targets.
func (f *tenants) records() {
	f.t.Helper()
	for kind, message := range map[string]string{
		v1alpha1.LastAccepted: `{"generation":1,"annotations":{"vipgate.io/vips":"` + vip4 + `,` + vip6 +
			`","vipgate.io/check":"{\"tcp\":{\"port\":5000}}"},"ports":[{"port":8080,"protocol":"TCP"}],` +
			`"selector":{"app":"idle"}}`,
		v1alpha1.Accepted: "serving", v1alpha1.Advertised: "2 of 2",
		"Generations": `[{"targets":["` + f.Targets[0].Name + `"]}]`,
	} {
		ctx := harness.Context(f.t, waitTimeout)
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"annotations": map[string]string{v1alpha1.VIPsAnnotation: vip4 + "," + vip6}},
			"status": map[string]any{"conditions": []metav1.Condition{{
				Type: v1alpha1.Group + "/" + kind, Status: metav1.ConditionTrue, Reason: "Recorded", Message: message,
				LastTransitionTime: metav1.Now(),
			}}, "loadBalancer": map[string]any{"ingress": []map[string]string{{"ip": vip4}}}},
		})
		f.must(err)
		for _, subresource := range [][]string{{"status"}, nil} {
			_, err = f.user.CoreV1().Services(hostile).Patch(ctx, "own", types.MergePatchType, patch, metav1.PatchOptions{},
				subresource...)
			f.must(err)
		}
		f.unharmed("record " + kind)
	}
	_, err := f.user.CoreV1().Services(hostile).Patch(f.t.Context(), "own", types.MergePatchType,
		[]byte(`{"metadata":{"annotations":{"vipgate.io/vips":"`+hostileVIP+`"}}}`), metav1.PatchOptions{})
	f.must(err)
}

// endpoints lists the victim's targets, and others, as endpoints of a Service without a selector.
func (f *tenants) endpoints() {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	s := f.service("sliced", nil)
	s.Spec.Selector = nil
	_, err := f.user.CoreV1().Services(hostile).Create(ctx, s, metav1.CreateOptions{})
	f.must(err)
	for i, addresses := range [][]string{
		{f.Targets[0].Addrs[0].String()}, {vip4}, {lab.GatewayA4.String()}, {"172.16.250.1", "172.16.250.2"},
	} {
		_, err := f.user.DiscoveryV1().EndpointSlices(hostile).Create(ctx, &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf("sliced-%d", i), Labels: map[string]string{discoveryv1.LabelServiceName: "sliced"},
			},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: addresses}},
		}, metav1.CreateOptions{})
		f.t.Logf("slice %v: %v", addresses, err) // the API server refuses link-local addresses
		f.unharmed("endpoint slice")
	}
}

// crowd creates many Services, each with a Pod, at once. Those beyond the quota are refused.
func (f *tenants) crowd() {
	f.t.Helper()
	ctx := harness.Context(f.t, 3*waitTimeout)
	var group errgroup.Group
	for part := range 8 {
		group.Go(func() error {
			for i := part; i < crowd; i += 8 {
				name := fmt.Sprintf("crowd-%d", i)
				s := f.service(name, map[string]string{v1alpha1.VIPsAnnotation: crowdVIP(i)})
				_, err := f.user.CoreV1().Services(hostile).Create(ctx, s, metav1.CreateOptions{})
				if address := [4]byte{172, 16, byte(100 + i/250), byte(1 + i%250)}; err == nil {
					err = f.createPod(ctx, name, netip.AddrFrom4(address))
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	f.must(group.Wait())
	f.wait(func(ctx context.Context) error {
		list, err := f.user.CoreV1().Services(hostile).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		reasons := map[string]int{}
		for i := range list.Items {
			if c := meta.FindStatusCondition(list.Items[i].Status.Conditions, v1alpha1.Group+"/"+v1alpha1.Accepted); c != nil {
				reasons[c.Reason]++
			}
		}
		if reasons[translation.ReasonQuotaExceeded] == 0 {
			return fmt.Errorf("no Service exceeds the quota: %v", reasons)
		}
		return nil
	})
	f.wantAnswers(f.load, f.Targets[:replicas]...)
	f.unharmed("crowd")
}
