package translation_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/trench"
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

// The size limit equals the limit of the reader, so that no file is written that lb refuses.
func TestSizeOfFile(t *testing.T) {
	const limit = 8 << 20
	o := read(t, base(t))
	r := translation.Translate(o, options)
	file := filepath.Join(t.TempDir(), "trench.yaml")
	for size, accepted := range map[int]bool{limit: true, limit + 1: false} {
		text := append(bytes.Clone(r.File), bytes.Repeat([]byte("#"), size-len(r.File))...)
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := trench.Read(file, trench.DefaultDefaults()); (err == nil) != accepted {
			t.Errorf("a file of %d bytes: %v", size, err)
		}
	}
	attractor := o.Trench.Object["spec"].(map[string]any)["attractor"].(map[string]any)
	attractor["name"] = strings.Repeat("a", limit-len(r.File)+len("attractor-a"))
	if r := translation.Translate(o, options); strings.Contains(r.Trench.Message, "divide the Services") {
		t.Errorf("at the limit: %s", r.Trench.Message)
	}
	attractor["name"] = attractor["name"].(string) + "a"
	if r := translation.Translate(o, options); !strings.Contains(r.Trench.Message, "divide the Services") {
		t.Errorf("above the limit: %s", r.Trench.Message)
	}
}
