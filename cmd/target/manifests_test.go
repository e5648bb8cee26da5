package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/sidecar"
	"github.com/vipgate/vipgate/test/clitest"
)

const deployments = "../../deployments/"

func application(t *testing.T) clitest.Pod {
	return clitest.Read[clitest.Deployment](t, deployments+"example/application.yaml").Spec.Template.Spec
}

func image(t *testing.T) clitest.Image {
	return clitest.ReadImage(t, deployments+"images/target.Dockerfile")
}

func TestContainerFitsProgram(t *testing.T) {
	pod := application(t)
	for _, problem := range pod.Container(t, "target").Problems(t, clitest.CommandLine{
		Parser:       parser(t),
		Services:     []string{"", sidecar.Liveness, sidecar.Readiness},
		Variables:    []string{"GOMEMLIMIT"},
		EveryAddress: true,
	}) {
		t.Error(problem)
	}
}

func TestPodIsRestricted(t *testing.T) {
	pod := application(t)
	for _, problem := range pod.Problems() {
		// The application is not one of the project's programs.
		if !strings.HasPrefix(problem, "web: ") {
			t.Error(problem)
		}
	}
	c := pod.Container(t, "target")
	if got := c.SecurityContext.Capabilities; !slices.Equal(got.Add, []string{"NET_ADMIN"}) ||
		!slices.Equal(got.Drop, []string{"ALL"}) || c.RestartPolicy != "Always" {
		t.Errorf("capabilities %+v, restart policy %q", got, c.RestartPolicy)
	}
}

func TestImageFitsContainer(t *testing.T) {
	pod := application(t)
	for _, problem := range pod.Container(t, "target").ImageProblems(image(t)) {
		t.Error(problem)
	}
}
