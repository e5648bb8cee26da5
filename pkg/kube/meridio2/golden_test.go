package meridio2

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/test/harness"
)

var update = flag.Bool("update", false, "write the golden files instead of comparing them")

// cases maps names to golden files: objects.yaml, which is appended to base.yaml unless it has a
// Gateway, and the results.
func cases(t testing.TB) map[string]*txtar.Archive {
	t.Helper()
	names, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	all := map[string]*txtar.Archive{}
	for _, name := range names {
		if all[name], err = txtar.ParseFile(name); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// text returns the objects of a case.
func text(t testing.TB, a *txtar.Archive) []byte {
	t.Helper()
	objects := a.Files[0].Data
	if bytes.Contains(objects, []byte("kind: Gateway\n")) {
		return objects
	}
	base, err := os.ReadFile("testdata/base.yaml")
	harness.Must(t, err)
	return append(append(base, "---\n"...), objects...)
}

func objectsOf(t testing.TB, a *txtar.Archive) (o Objects) {
	t.Helper()
	harness.Must(t, o.Read(bytes.NewReader(text(t, a))))
	return o
}

// shown returns the result as the content of golden files.
func shown(r translation.Result) []txtar.File {
	var files []txtar.File
	if r.File != nil {
		files = append(files, txtar.File{Name: "trench.yaml", Data: r.File})
	}
	return append(files, txtar.File{Name: "verdicts", Data: []byte(r.Table())})
}

func TestGolden(t *testing.T) {
	for name, a := range cases(t) {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txtar"), func(t *testing.T) {
			r := Translate(objectsOf(t, a))
			if r.File != nil {
				if _, err := trenchfile.Parse("trench.yaml", r.File, trench.DefaultDefaults()); err != nil {
					t.Error(err)
				}
			}
			got := &txtar.Archive{Comment: a.Comment, Files: append(a.Files[:1:1], shown(r)...)}
			if *update {
				harness.Must(t, os.WriteFile(name, txtar.Format(got), 0o644))
			}
			if d := cmp.Diff(string(txtar.Format(a)), string(txtar.Format(got))); d != "" && !*update {
				t.Errorf("run go test -update, if this is as desired:\n%s", d)
			}
		})
	}
}

func TestOrderOfObjectsDoesNotMatter(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for name, a := range cases(t) {
		o := objectsOf(t, a)
		want := Translate(o)
		for range 20 {
			random.Shuffle(len(o.Routers), func(i, j int) { o.Routers[i], o.Routers[j] = o.Routers[j], o.Routers[i] })
			if d := cmp.Diff(fmt.Sprintf("%s", shown(want)), fmt.Sprintf("%s", shown(Translate(o)))); d != "" {
				t.Fatalf("%s: %s", name, d)
			}
		}
	}
}

func TestMissingGateway(t *testing.T) {
	r := Translate(Objects{})
	if r.File != nil || r.Trench.Accepted || r.Trench.Reason != ReasonNotFound || r.Trench.Object.Kind != "Gateway" {
		t.Errorf("%+v", r)
	}
}

func TestSecondGatewayIsNotRead(t *testing.T) {
	const one = "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: a, namespace: b}\n"
	var o Objects
	if err := o.Read(strings.NewReader(one + "---\n" + one)); err == nil || !strings.Contains(err.Error(), "second") {
		t.Error(err)
	}
}

// promised fails if a translation violates an invariant that holds for all objects.
func promised(t *testing.T, o Objects) {
	t.Helper()
	r := Translate(o)
	if (r.File != nil) != r.Trench.Accepted || r.File == nil && r.Services != nil {
		t.Fatalf("Gateway %+v, file:\n%s", r.Trench, r.File)
	}
	if alone := Translate(Objects{Gateway: o.Gateway}); alone.File != nil && r.File == nil {
		t.Fatalf("GatewayRouters break the file of the Gateway: %s", r.Trench.Message)
	}
	verdicts := []translation.Verdict{r.Trench}
	accepted := 0
	for _, v := range r.Services {
		verdicts = append(verdicts, v.Verdict)
		if v.Accepted {
			accepted++
		}
	}
	for _, v := range verdicts {
		if v.Reason == "" || v.Message == "" || v.Object.Kind == "" {
			t.Fatalf("verdict without an explanation: %+v", v)
		}
	}
	if r.File == nil {
		return
	}
	config, err := trenchfile.Parse("trench.yaml", r.File, trench.DefaultDefaults())
	if err != nil {
		t.Fatalf("%v\n%s", err, r.File)
	}
	if len(config.Attractor.Gateways) != accepted || len(config.Streams) != 0 {
		t.Fatalf("%d accepted, file:\n%s", accepted, r.File)
	}
}

func FuzzTranslate(f *testing.F) {
	for _, a := range cases(f) {
		f.Add(text(f, a))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var o Objects
		if err := o.Read(bytes.NewReader(text)); err == nil {
			promised(t, o)
		}
	})
}

func FuzzFields(f *testing.F) {
	f.Add("20.0.0.1", "gw", "vlan-100", "169.254.1.1", "3s", "300ms", int64(64512), int64(179), int64(3))
	f.Add("2000::1", "BFD", "a b", "2000::1", "-1s", "1h", int64(-1), int64(0), int64(256))
	f.Add("::ffff:1.2.3.4", "\n- {", "\"", "fe80::1%\n", "1e9h", "NaN", int64(1)<<40, int64(65536), int64(0))
	f.Fuzz(func(t *testing.T, address, name, device, router, hold, tx string, asn, port, multiplier int64) {
		object := func(kind schema.GroupVersionKind, fields map[string]any) *unstructured.Unstructured {
			u := &unstructured.Unstructured{Object: fields}
			u.SetGroupVersionKind(kind)
			u.SetNamespace("ns-a")
			u.SetName(name)
			return u
		}
		promised(t, Objects{
			Gateway: object(gatewayKind, map[string]any{"status": map[string]any{"addresses": []any{
				map[string]any{"value": address}, map[string]any{"value": "20.0.0.2"},
			}}}),
			Routers: []*unstructured.Unstructured{
				object(routerKind, map[string]any{"spec": map[string]any{
					"gatewayRef": map[string]any{"name": name}, "interface": device, "address": router, "protocol": "BGP",
					"bgp": map[string]any{
						"localASN": asn, "remoteASN": int64(64512), "localPort": port, "holdTime": hold,
						"bfd": map[string]any{"minTx": tx, "minRx": "300ms", "multiplier": multiplier},
					},
				}}),
				object(routerKind, map[string]any{"spec": map[string]any{
					"gatewayRef": map[string]any{"name": name}, "interface": "eth1", "address": "10.0.0.1", "protocol": "BGP",
					"bgp": map[string]any{"localASN": int64(1), "remoteASN": int64(2)},
				}}),
			},
		})
	})
}
