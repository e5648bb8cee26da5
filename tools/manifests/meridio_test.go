package manifests

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// meridioTemplate has of the Deployment template of Meridio's operator what the component could
// change.
const meridioTemplate = `apiVersion: apps/v1
kind: Deployment
metadata: {name: stateless-lb-frontend, labels: {app: stateless-lb-frontend}}
spec:
  template:
    spec:
      serviceAccountName:
      initContainers:
        - {name: sysctl-init, image: busybox, command: ["/bin/sh"], args: }
      containers:
        - {name: stateless-lb, image: registry.nordix.org/cloud-native/meridio/stateless-lb:v1.2.8}
        - name: frontend
          image: registry.nordix.org/cloud-native/meridio/frontend:v1.2.8
          env:
            - {name: NFE_ECMP, value: "true"}
            - {name: NFE_NSP_SERVICE, value: }
          startupProbe:
            exec: {command: [/bin/grpc_health_probe, "-addr=unix:///tmp/health.sock", "-service="]}
          volumeMounts:
            - {name: tmp-fe, mountPath: /tmp}
      volumes:
        - {name: tmp-fe, emptyDir: {medium: Memory}}
`

// renderMeridio renders the template, with the component or without it.
func renderMeridio(t *testing.T, kustomization string) map[string]any {
	t.Helper()
	dir := t.TempDir()
	harness.Must(t, os.CopyFS(filepath.Join(dir, "meridio"), os.DirFS(filepath.Join(root, "deployments/meridio"))))
	overlay := filepath.Join(dir, "overlay")
	harness.Must(t, os.Mkdir(overlay, 0o755))
	for name, text := range map[string]string{
		"template.yaml": meridioTemplate, "kustomization.yaml": "resources: [template.yaml]\n" + kustomization,
	} {
		harness.Must(t, os.WriteFile(filepath.Join(overlay, name), []byte(text), 0o600))
	}
	return kustomize(t, overlay)["Deployment <nil>/stateless-lb-frontend"]
}

// containerOf returns a container of a Deployment.
func containerOf(t *testing.T, deployment map[string]any, name string) map[string]any {
	t.Helper()
	spec := deployment["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
	for _, c := range spec["containers"].([]any) {
		if c := c.(map[string]any); c["name"] == name {
			return c
		}
	}
	t.Fatalf("no container %s in %v", name, deployment)
	return nil
}

// normal returns a value without empty fields, and with lists of named objects in the order of
// names.
func normal(value any) any {
	switch v := value.(type) {
	case map[string]any:
		m := map[string]any{}
		for key, field := range v {
			if field != nil && field != "" {
				m[key] = normal(field)
			}
		}
		return m
	case []any:
		list := slices.Clone(v)
		for i := range list {
			list[i] = normal(list[i])
		}
		slices.SortStableFunc(list, func(a, b any) int { return strings.Compare(nameOf(a), nameOf(b)) })
		return list
	}
	return value
}

func nameOf(value any) string {
	object, _ := value.(map[string]any)
	name, _ := object["name"].(string)
	return name
}

func TestMeridioSwapChangesOneImage(t *testing.T) {
	const image = "registry.example.org/vipgate/meridio-frontend"
	before := renderMeridio(t, "")
	after := renderMeridio(t, "components: [../meridio]\nimages:\n"+
		"  - {name: vipgate/meridio-frontend, newName: "+image+", newTag: v0.1.0}\n")
	c := containerOf(t, after, "frontend")
	if c["image"] != image+":v0.1.0" {
		t.Errorf("the image is %v", c["image"])
	}
	c["image"] = containerOf(t, before, "frontend")["image"]
	// Kustomize puts the patched container first and drops fields without a value; neither has an
	// effect.
	if before, after := normal(before), normal(after); !reflect.DeepEqual(before, after) {
		t.Errorf("more than the image changes:\n%v\n%v", before, after)
	}
}
