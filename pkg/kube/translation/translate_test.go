package translation_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
)

func TestObjectsAreNotChanged(t *testing.T) {
	for name, a := range cases(t) {
		o, before := objectsOf(t, a), objectsOf(t, a)
		translation.Translate(o, options)
		if d := cmp.Diff(before, o); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

// Read returns the objects of a kubectl list in YAML and in JSON.
func TestReadLists(t *testing.T) {
	const service = `{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "%s"}}`
	const serviceList = `{"apiVersion": "v1", "kind": "ServiceList", "items": [` + service + `]}`
	list := fmt.Sprintf(`{"apiVersion": "v1", "kind": "List", "items": [`+service+
		`, {"apiVersion": "v1", "kind": "Node"}, `+serviceList+`]}`, "a", "b")
	for name, text := range map[string]string{
		"JSON": list, "YAML": "# objects\n" + list, "documents": list + "\n---\n\n---\n{kind: Unknown}",
	} {
		o := read(t, []byte(text))
		if len(o.Services) != 2 || o.Services[0].Name+o.Services[1].Name != "ab" {
			t.Errorf("%s: %v", name, o.Services)
		}
	}
}

func TestReadErrors(t *testing.T) {
	for text, want := range map[string]string{
		"a: [":                     "read object 1: ",
		"kind: X\n---\na: [":       "read object 2: ",
		"{kind: List, items: [x]}": "read object 1: item 1 is no object",
		"{apiVersion: v1, kind: Pod, metadata: {name: x, namespace: a}, spec: x}": "read object 1: Pod a/x: ",
	} {
		var o translation.Objects
		if err := o.Read(strings.NewReader(text)); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v, want %s…", text, err, want)
		}
	}
}

// A file that is larger than the limit of its reader is not written.
func TestSizeOfFile(t *testing.T) {
	o := read(t, base(t))
	tls := map[string]any{"caFile": "/" + strings.Repeat("a", trenchfile.MaxSize)}
	streams := []any{map[string]any{
		"name": "s", "vips": []any{"30.0.0.0/24"}, "check": map[string]any{"grpc": map[string]any{
			"port": int64(80),
			"tls":  tls,
		}},
	}}
	o.Trench.Object["spec"].(map[string]any)["streams"] = streams
	if r := translation.Translate(o, options); r.File != nil || !strings.Contains(r.Trench.Message,
		"divide the Services") {
		t.Errorf("%d bytes: %s", len(r.File), r.Trench.Message)
	}
}

// A Service that is replaced by one of another name, with or without a time in which both exist,
// only renames the stream: the VIP and the targets are the same, so that lb keeps verdicts and flows.
func TestReplacedServiceOnlyRenamesStream(t *testing.T) {
	service := func(name, created string) string {
		return fmt.Sprintf(`---
apiVersion: v1
kind: Service
metadata:
  name: %s
  namespace: trench-a
  generation: 1
  creationTimestamp: %q
  annotations: {vipgate.io/vips: 20.0.0.1}
spec:
  type: LoadBalancer
  loadBalancerClass: vipgate.io/trench-a
  selector: {app: web}
  ports: [{port: 8080, targetPort: 8080}]
`, name, created)
	}
	before, after := service("web", "2026-01-01T00:00:00Z"), service("api", "2026-01-02T00:00:00Z")
	// stream returns the only stream that serves the VIP.
	stream := func(services string) trench.Stream {
		t.Helper()
		r := translation.Translate(read(t, append(base(t), services...)), options)
		config, err := trenchfile.Parse("trench.yaml", r.File, trench.DefaultDefaults())
		if err != nil || len(config.Streams) != 1 || len(config.Streams[0].Targets) != 2 {
			t.Fatalf("%v\n%s\n%s", err, r.File, r.Table())
		}
		return config.Streams[0]
	}
	old, both, replaced := stream(before), stream(before+after), stream(after)
	if d := cmp.Diff(fmt.Sprint(old), fmt.Sprint(both)); d != "" {
		t.Errorf("the new Service changes the stream:\n%s", d)
	}
	if replaced.Name == old.Name {
		t.Errorf("the stream is still %s", old.Name)
	}
	replaced.Name = old.Name
	if d := cmp.Diff(fmt.Sprint(old), fmt.Sprint(replaced)); d != "" {
		t.Errorf("more than the name changes:\n%s", d)
	}
}

// poolTrench is a Trench of targets in the pod network.
const poolTrench = `apiVersion: vipgate.io/v1alpha1
kind: Trench
metadata: {name: trench-a, namespace: trench-a}
spec: {attractor: {name: a, vips: [20.0.0.1/32], gateways: [{name: gw-1, address: 169.254.100.150}]}}
---
`

// targetsOf returns the targets of the first stream, such as "a=172.16.1.1"; "!" marks terminating
// ones.
func targetsOf(r translation.Result) string {
	if len(r.Config.Streams) == 0 {
		return "no stream"
	}
	var texts []string
	for _, target := range r.Config.Streams[0].Targets {
		text := fmt.Sprint(target.Name, "=", target.IPs[0])
		if target.Terminating {
			text += "!"
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, " ")
}

// Pods of several namespaces with one name, such as of StatefulSets, are different targets.
func TestNamesakesOfSlices(t *testing.T) {
	const service = `apiVersion: v1
kind: Service
metadata: {name: db, namespace: trench-a, annotations: {vipgate.io/vips: "20.0.0.1"}}
spec: {type: LoadBalancer, loadBalancerClass: vipgate.io/trench-a, ports: [{name: pg, port: 5432}]}
`
	slice := func(namespace, address, conditions string) string {
		return fmt.Sprintf(`---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-%[1]s, namespace: trench-a, labels: {kubernetes.io/service-name: db}}
addressType: IPv4
ports: [{name: pg, port: 5432}]
endpoints:
  - {addresses: [%[2]s.1], targetRef: {kind: Pod, namespace: %[1]s, name: db-0}, conditions: {%[3]s}}
  - {addresses: [%[2]s.2], targetRef: {kind: Pod, namespace: %[1]s, name: db-%[1]s}}
`, namespace, address, conditions)
	}
	const east, west = "Pod-east-db-0-3499291c28f195fd", "Pod-west-db-0-9427fbbb507ba5fa"
	for name, c := range map[string]struct{ west, want string }{
		"two": {
			slice("west", "172.16.2", ""),
			east + "=172.16.1.1 " + west + "=172.16.2.1 db-east=172.16.1.2 db-west=172.16.2.2",
		},
		"one terminating": {
			slice("west", "172.16.2", "ready: false, terminating: true"),
			east + "=172.16.1.1 " + west + "=172.16.2.1! db-east=172.16.1.2 db-west=172.16.2.2",
		},
		"one": {"", "db-0=172.16.1.1 db-east=172.16.1.2"},
	} {
		r := translation.Translate(read(t, []byte(poolTrench+service+slice("east", "172.16.1", "")+c.west)), options)
		if got := targetsOf(r); got != c.want || len(r.Services[0].Problems) > 0 {
			t.Errorf("%s: %s, want %s\n%s", name, got, c.want, r.Table())
		}
	}
}

// After the port of a Service is renamed, the Pods with the old name serve until one with the new
// name is ready.
func TestRenamedPort(t *testing.T) {
	const service = `apiVersion: v1
kind: Service
metadata: {name: web, namespace: trench-a, annotations: {vipgate.io/vips: "20.0.0.1"}}
spec:
  type: LoadBalancer
  loadBalancerClass: vipgate.io/trench-a
  selector: {app: web}
  ports: [{port: 8080, targetPort: web}]
status: {conditions: [{type: vipgate.io/LastAccepted, status: "True", reason: Recorded, message: '%s'}]}
`
	recorded := func(port string) string {
		return fmt.Sprintf(service, `{"generation":1,"annotations":{"vipgate.io/vips":"20.0.0.1"},`+
			`"ports":[{"port":8080,"targetPort":"`+port+`"}],"selector":{"app":"web"}}`)
	}
	pod := func(name, port, phase, ready string) string {
		return fmt.Sprintf(`---
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: trench-a, labels: {app: web, vipgate.io/trench: trench-a}}
spec: {containers: [{name: web, ports: [{name: %s, containerPort: 8080}]}]}
status: {phase: %s, podIPs: [{ip: 172.16.1.%d}], conditions: [{type: Ready, status: "%s"}]}
`, name, port, phase, len(name), ready)
	}
	old := pod("old", "http", "Running", "True")
	for name, c := range map[string]struct {
		objects, want string
		accepted      bool
	}{
		"before a new Pod": {recorded("http") + old, "old=172.16.1.3", false},
		"pending":          {recorded("http") + old + pod("next", "web", "Pending", "False"), "old=172.16.1.3", false},
		"not ready":        {recorded("http") + old + pod("next", "web", "Running", "False"), "old=172.16.1.3", false},
		"ready":            {recorded("http") + old + pod("next", "web", "Running", "True"), "next=172.16.1.4", true},
		"accepted before":  {recorded("web") + old + pod("next", "web", "Running", "False"), "", true},
		"none of them":     {recorded("http") + pod("next", "web", "Running", "False"), "", true},
		"old one not ready": {
			recorded("http") + pod("old", "http", "Running", "False") + pod("next", "web", "Pending", "False"), "", false,
		},
	} {
		r := translation.Translate(read(t, []byte(poolTrench+c.objects)), options)
		if got := targetsOf(r); got != c.want || r.Services[0].Accepted != c.accepted {
			t.Errorf("%s: %q, want %q\n%s", name, got, c.want, r.Table())
		}
	}
}

// The last form of a Service without a selector serves until its EndpointSlices have the new port.
func TestNewPortOfSlices(t *testing.T) {
	for name, c := range map[string]struct {
		last, slice, want string
		accepted          bool
	}{
		"old slice":    {"8080", "8080", "172.16.1.1=172.16.1.1", false},
		"new slice":    {"8080", "9090", "172.16.1.1=172.16.1.1", true},
		"wrong before": {"9090", "8080", "", true},
	} {
		text := fmt.Sprintf(poolTrench+`apiVersion: v1
kind: Service
metadata: {name: web, namespace: trench-a, annotations: {vipgate.io/vips: "20.0.0.1"}}
spec: {type: LoadBalancer, loadBalancerClass: vipgate.io/trench-a, ports: [{port: 9090}]}
status: {conditions: [{type: vipgate.io/LastAccepted, status: "True", reason: Recorded, message:
  '{"generation":1,"annotations":{"vipgate.io/vips":"20.0.0.1"},"ports":[{"port":%s}]}'}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web, namespace: trench-a, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: %s}]
endpoints: [{addresses: [172.16.1.1]}]
`, c.last, c.slice)
		r := translation.Translate(read(t, []byte(text)), options)
		if got := targetsOf(r); got != c.want || r.Services[0].Accepted != c.accepted {
			t.Errorf("%s: %q, want %q\n%s", name, got, c.want, r.Table())
		}
	}
}

// A warning refuses nothing, and an object with several problems counts once.
func TestRefusedObjects(t *testing.T) {
	service := func(name, selector string) string {
		return fmt.Sprintf(`---
apiVersion: v1
kind: Service
metadata: {name: web%s, namespace: trench-a, annotations: {vipgate.io/vips: "20.0.0.%[1]s"}}
spec:
  type: LoadBalancer
  loadBalancerClass: vipgate.io/trench-a
  selector: {app: web}
  ports: [{port: 8080, targetPort: %s}]
`, name, selector)
	}
	pod := func(name, port string) string {
		return fmt.Sprintf(`---
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: trench-a, labels: {app: web, vipgate.io/trench: trench-a}}
spec:
  containers:
    - {name: web, ports: [{name: http, containerPort: %s}], readinessProbe: {httpGet: {path: /healthz, port: 8080}}}
status: {phase: Running, podIPs: [{ip: 172.16.1.%d}], conditions: [{type: Ready, status: "True"}]}
`, name, port, len(name))
	}
	all := strings.Replace(poolTrench, "20.0.0.1/32", "20.0.0.1/32, 20.0.0.2/32, 20.0.0.3/32", 1) + pod("a", "8080")
	for name, c := range map[string]struct {
		objects string
		want    map[string]int // by kind
	}{
		"warning":                {service("1", "8080"), map[string]int{}},
		"Pod of two Services":    {service("1", "http") + service("2", "http") + pod("bb", "80"), map[string]int{"Pod": 1}},
		"Service of another VIP": {service("9", "8080") + service("1", "8080"), map[string]int{"Service": 1}},
		"two Services":           {service("8", "8080") + service("9", "8080"), map[string]int{"Service": 2}},
	} {
		r := translation.Translate(read(t, []byte(all+c.objects)), options)
		got := map[string]int{}
		for object := range r.Refused() {
			got[object.Kind]++
		}
		warned := slices.ContainsFunc(r.Services, func(v translation.ServiceVerdict) bool {
			return slices.ContainsFunc(v.Problems, translation.Problem.Warning)
		})
		if !maps.Equal(got, c.want) || warned != (name != "two Services") {
			t.Errorf("%s: %v, want %v, warned %v\n%s", name, got, c.want, warned, r.Table())
		}
	}
}
