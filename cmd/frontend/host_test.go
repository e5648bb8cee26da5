package main

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/speaker"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/harness"
)

// The static pod's frontend has no capability, and announces to FRR.
func TestStaticPodFits(t *testing.T) {
	pod := clitest.Read[struct{ Spec clitest.Pod }](t, clitest.Deployments+"host/static-pod.yaml").Spec
	c, p := pod.Container(t, "frontend"), deployed(t)
	// The directory of FRR's socket, which is the default one.
	p.Documented = func(path string) bool { return path+"/bgpd.vty" == speaker.DefaultFRR }
	for _, problem := range slices.Concat(pod.Problems(), c.Problems(t, p.CommandLine)) {
		if !strings.Contains(problem, "--bird-socket") { // BIRD does not run
			t.Error(problem)
		}
	}
	for _, problem := range c.ImageProblems(p.Image(t)) {
		t.Error(problem)
	}
	if added := c.SecurityContext.Capabilities.Add; len(added) > 0 {
		t.Errorf("the frontend gets %v, want none", added)
	}
	lb := pod.Container(t, "lb")
	if lb.Variable("VIPGATE_FRONTEND_UID") != fmt.Sprint(c.SecurityContext.RunAsUser) ||
		c.Variable("VIPGATE_LB_UID") != fmt.Sprint(lb.SecurityContext.RunAsUser) ||
		lb.Variable("VIPGATE_SOCKET") != c.Variable("VIPGATE_LB_SOCKET") {
		t.Error("lb and frontend do not expect each other")
	}
	// The flags are valid together, and fit the trench file of the example.
	c.Environment(t)
	var line commandLine
	_, err := parserOf(t, &line).Parse([]string{"run", "--trench-file=" + clitest.Deployments + "host/trench.yaml"})
	harness.Must(t, err)
	o, config, err := line.Run.options(process.Settings{Log: slog.New(slog.DiscardHandler)}, false)
	harness.Must(t, err)
	gateway := config.Attractor.Gateways[0]
	if o.External == nil || !o.Kernel.Foreign || int64(o.External.Session.PeerAS) != gateway.LocalASN {
		t.Errorf("got %+v for %+v", o.External, config.Attractor.Gateways)
	}
}
