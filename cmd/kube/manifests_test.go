package main

import (
	"os"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/kube"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/harness"
)

const deployments = "../../deployments/"

func manifest(t *testing.T) *clitest.Container {
	d := clitest.Read[clitest.Deployment](t, deployments+"base/deployment.yaml")
	return d.Spec.Template.Spec.Container(t, "kube")
}

func TestContainerFitsProgram(t *testing.T) {
	readme, err := os.ReadFile(deployments + "README.md")
	harness.Must(t, err)
	parser, err := cli.New(program(), &commandLine{})
	harness.Must(t, err)
	for _, problem := range manifest(t).Problems(t, clitest.CommandLine{
		Parser:     parser,
		Services:   []string{"", kube.Liveness, kube.Readiness},
		Variables:  []string{"GOMEMLIMIT", "POD_NAME", "POD_NAMESPACE"},
		Reads:      []string{"frontend-admin-socket"},
		Documented: func(path string) bool { return strings.Contains(string(readme), "`"+path+"`") },
	}) {
		t.Error(problem)
	}
}

// kube writes the trench file to the path that lb and frontend read, and uses the admin socket of
// a frontend container that runs as the same user.
func TestContainersMeet(t *testing.T) {
	pod := clitest.Read[clitest.Deployment](t, deployments+"base/deployment.yaml").Spec.Template.Spec
	kube, frontend := manifest(t), pod.Container(t, "frontend")
	for _, c := range pod.Containers {
		if got, want := c.Variable("VIPGATE_TRENCH_FILE"), kube.Variable("VIPGATE_TRENCH_FILE"); got != want {
			t.Errorf("%s reads %s, kube writes %s", c.Name, got, want)
		}
		for _, m := range c.VolumeMounts {
			if m.Name == "trench" && !m.ReadOnly {
				t.Errorf("%s may write the trench file", c.Name)
			}
		}
	}
	if kube.SecurityContext.RunAsUser != frontend.SecurityContext.RunAsUser {
		t.Error("kube may not open the admin socket of the frontend")
	}
	if escalation := kube.SecurityContext.AllowPrivilegeEscalation; escalation == nil || *escalation ||
		len(kube.SecurityContext.Capabilities.Add) > 0 {
		t.Errorf("kube has privileges: %+v", kube.SecurityContext)
	}
	volumes := map[string]string{}
	for _, m := range append(kube.VolumeMounts, frontend.VolumeMounts...) {
		volumes[m.MountPath] = m.Name
	}
	if a, b := volumes["/run/vipgate/frontend"], volumes["/run/vipgate"]; a == "" || a != b {
		t.Errorf("kube looks for the frontend's socket in volume %s, it is in %s", a, b)
	}
}

func TestImageFitsContainer(t *testing.T) {
	image := clitest.ReadImage(t, deployments+"images/kube.Dockerfile")
	for _, problem := range manifest(t).ImageProblems(image) {
		t.Error(problem)
	}
	if image.EntryPoint != "/usr/local/bin/kube" {
		t.Errorf("the entry point is %q", image.EntryPoint)
	}
}

func TestMeridio2ContainerFitsProgram(t *testing.T) {
	parser, err := cli.New(program(), &commandLine{})
	harness.Must(t, err)
	d := clitest.Read[clitest.Deployment](t, deployments+"meridio2/swap.yaml")
	kubeContainer := d.Spec.Template.Spec.Container(t, "kube")
	for _, problem := range kubeContainer.Problems(t, clitest.CommandLine{
		Parser:    parser,
		Services:  []string{"", kube.Liveness, kube.Readiness},
		Variables: []string{"GOMEMLIMIT", "POD_NAME", "POD_NAMESPACE"},
		Reads:     []string{"frontend-admin-socket"},
	}) {
		t.Error(problem)
	}
}
