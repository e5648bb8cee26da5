package clitest

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// Deployments is the folder of the manifests. The tests run in cmd/NAME.
const Deployments = "../../deployments/"

// Program is a program as a manifest and an image run it.
type Program struct {
	Name string
	// Manifest is the file in [Deployments] whose Deployment has a container called Name.
	Manifest string
	CommandLine
}

// ReadPod reads the pod of a Deployment.
func ReadPod(tb testing.TB, manifest string) Pod {
	tb.Helper()
	return Read[Deployment](tb, Deployments+manifest).Spec.Template.Spec
}

// Container reads the program's container.
func (p *Program) Container(tb testing.TB) *Container {
	tb.Helper()
	pod := ReadPod(tb, p.Manifest)
	return pod.Container(tb, p.Name)
}

// Image reads the program's image.
func (p *Program) Image(tb testing.TB) Image {
	tb.Helper()
	return ReadImage(tb, Deployments+"images/"+p.Name+".Dockerfile")
}

// Fits compares the container with the command line and the image of the program.
func (p *Program) Fits(t *testing.T) {
	t.Helper()
	c, image := p.Container(t), p.Image(t)
	for _, problem := range append(c.Problems(t, p.CommandLine), c.ImageProblems(image)...) {
		t.Error(problem)
	}
	if image.EntryPoint != "/usr/local/bin/"+p.Name {
		t.Errorf("the entry point is %q", image.EntryPoint)
	}
}

// WantProblem fails the test unless a problem contains want.
func WantProblem(t *testing.T, problems []string, want string) {
	t.Helper()
	if !slices.ContainsFunc(problems, func(problem string) bool { return strings.Contains(problem, want) }) {
		t.Errorf("got %q\nwant %q", problems, want)
	}
}

// inReadme reports whether the document of the manifests names a path.
func inReadme(tb testing.TB) func(path string) bool {
	tb.Helper()
	readme, err := os.ReadFile(Deployments + "README.md")
	harness.Must(tb, err)
	return func(path string) bool { return strings.Contains(string(readme), "`"+path+"`") }
}
