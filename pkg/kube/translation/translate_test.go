package translation_test

import (
	"fmt"
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
