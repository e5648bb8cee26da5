package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/clitest"
)

// krewManifest is a plugin manifest of krew, without its texts.
type krewManifest struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct{ Name string }
	Spec       struct {
		Version          string
		ShortDescription string `yaml:"shortDescription"`
		Platforms        []struct {
			Selector struct {
				MatchLabels map[string]string `yaml:"matchLabels"`
			}
			URI, SHA256, Bin string
		}
	}
}

// The release fills in the version and the sums of the archives.
func TestKrewManifest(t *testing.T) {
	manifest := clitest.Read[krewManifest](t, clitest.Deployments+"krew/vipgate.yaml")
	spec := manifest.Spec
	if manifest.APIVersion != "krew.googlecontainertools.github.com/v1alpha2" || manifest.Kind != "Plugin" ||
		manifest.Metadata.Name != "vipgate" || spec.Version != "VERSION" || len(spec.ShortDescription) > 50 {
		t.Errorf("%+v", manifest)
	}
	var architectures []string
	for _, platform := range spec.Platforms {
		labels := platform.Selector.MatchLabels
		architectures = append(architectures, labels["arch"])
		archive := "/download/VERSION/kubectl-vipgate_" + labels["os"] + "_" + labels["arch"] + ".tar.gz"
		if sum := "SHA256_LINUX_" + strings.ToUpper(labels["arch"]); labels["os"] != "linux" || platform.SHA256 != sum ||
			!strings.HasSuffix(platform.URI, archive) || program(platform.Bin).Name != "kubectl vipgate" {
			t.Errorf("%+v", platform)
		}
	}
	if want := []string{"amd64", "arm64"}; !slices.Equal(architectures, want) {
		t.Errorf("archives for %v, want %v", architectures, want)
	}
}
