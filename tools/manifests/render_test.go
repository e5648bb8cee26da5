package manifests

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"

	"github.com/vipgate/vipgate/test/harness"
)

const (
	root      = "../.."
	namespace = "trench-a" // of the release and of the overlay
	instance  = "trench-a" // name of the release
)

// objects are Kubernetes objects by KIND NAMESPACE/NAME.
type objects map[string]map[string]any

func (o objects) add(t *testing.T, text string) {
	t.Helper()
	for document := range strings.SplitSeq("\n"+text, "\n---\n") {
		var object map[string]any
		if err := yaml.Unmarshal([]byte(document), &object); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		if len(object) == 0 {
			continue
		}
		metadata, _ := object["metadata"].(map[string]any)
		key := fmt.Sprintf("%v %v/%v", object["kind"], metadata["namespace"], metadata["name"])
		if _, twice := o[key]; twice {
			t.Fatalf("%s exists twice", key)
		}
		o[key] = object
	}
}

// overlay renders the base with components, as an overlay of the namespace does that selects the
// images of a version.
func overlay(t *testing.T, version string, components ...string) objects {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "deployments")
	harness.Must(t, os.CopyFS(dir, os.DirFS(filepath.Join(root, "deployments"))))
	var text strings.Builder
	fmt.Fprintf(&text, "namespace: %s\nresources: [../base]\nlabels:\n  - pairs: {app.kubernetes.io/instance: %s}\n"+
		"    includeSelectors: true\nimages:\n", namespace, instance)
	for _, name := range []string{"lb", "frontend", "kube"} {
		fmt.Fprintf(&text, "  - {name: vipgate/%s, newTag: %s}\n", name, version)
	}
	text.WriteString("components:\n")
	for _, c := range components {
		fmt.Fprintf(&text, "  - ../components/%s\n", c)
	}
	harness.Must(t, os.Mkdir(filepath.Join(dir, "overlay"), 0o755))
	file := filepath.Join(dir, "overlay", "kustomization.yaml")
	harness.Must(t, os.WriteFile(file, []byte(text.String()), 0o600))
	return kustomize(t, filepath.Dir(file))
}

// kustomize renders a directory as kubectl kustomize does.
func kustomize(t *testing.T, dir string) objects {
	t.Helper()
	rendered, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	harness.Must(t, err)
	text, err := rendered.AsYaml()
	harness.Must(t, err)
	o := objects{}
	o.add(t, string(text))
	return o
}

// chart renders a chart as helm template does, after a check of the values against its schema. It
// returns the chart's version of the application, too.
func chart(t *testing.T, name string, values map[string]any) (objects, string, error) {
	t.Helper()
	c, err := loader.Load(filepath.Join(root, "charts", name))
	harness.Must(t, err)
	release := common.ReleaseOptions{Name: instance, Namespace: namespace, Revision: 1, IsInstall: true}
	all, err := util.ToRenderValues(c, values, release, common.DefaultCapabilities)
	if err != nil {
		return nil, c.Metadata.AppVersion, err
	}
	files, err := engine.Render(c, all)
	if err != nil {
		return nil, c.Metadata.AppVersion, err
	}
	o := objects{}
	for file, text := range files {
		if !strings.HasSuffix(file, "NOTES.txt") {
			o.add(t, text)
		}
	}
	return o, c.Metadata.AppVersion, nil
}

// values parses values of a chart, merged over those that every test of the chart needs.
func values(t *testing.T, text string) map[string]any {
	t.Helper()
	var merged, base map[string]any
	harness.Must(t, yaml.Unmarshal([]byte(text), &merged))
	data, err := os.ReadFile(filepath.Join(root, "deployments/base/trench.yaml"))
	harness.Must(t, err)
	harness.Must(t, yaml.Unmarshal(data, &base))
	all := map[string]any{"trench": map[string]any{"spec": base["spec"]}}
	if own, ok := merged["trench"].(map[string]any); ok {
		trench := all["trench"].(map[string]any)
		maps.Copy(trench, own)
		merged["trench"] = trench
	}
	maps.Copy(all, merged)
	return all
}
