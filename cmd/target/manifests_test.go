package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/sidecar"
	"github.com/vipgate/vipgate/test/clitest"
)

func deployed(t *testing.T) *clitest.Program {
	return &clitest.Program{Name: "target", Manifest: "example/application.yaml", CommandLine: clitest.CommandLine{
		Parser:       parser(t),
		Services:     []string{"", sidecar.Liveness, sidecar.Readiness},
		Variables:    []string{"GOMEMLIMIT"},
		EveryAddress: true,
	}}
}

func TestContainerAndImageFitProgram(t *testing.T) { deployed(t).Fits(t) }

func TestPodIsRestricted(t *testing.T) {
	pod := clitest.ReadPod(t, "example/application.yaml")
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
