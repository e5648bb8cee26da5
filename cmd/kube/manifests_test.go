package main

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/kube"
	"github.com/vipgate/vipgate/test/clitest"
)

func deployed(t *testing.T) *clitest.Program {
	return &clitest.Program{Name: "kube", Manifest: "base/deployment.yaml", CommandLine: clitest.CommandLine{
		Parser:    parser(t),
		Services:  []string{"", kube.Liveness, kube.Readiness},
		Variables: []string{"GOMEMLIMIT", "POD_NAME", "POD_NAMESPACE"},
		Reads:     []string{"frontend-admin-socket"},
	}}
}

func TestContainerAndImageFitProgram(t *testing.T) { deployed(t).Fits(t) }

func TestMeridio2ContainerFitsProgram(t *testing.T) {
	swapped := deployed(t)
	swapped.Manifest = "meridio2/swap.yaml"
	swapped.Documented = func(string) bool { return false }
	swapped.Fits(t)
}

// kube writes the trench file to the path that lb and frontend read, and uses the admin socket of
// a frontend container that runs as the same user.
func TestContainersMeet(t *testing.T) {
	pod := clitest.ReadPod(t, "base/deployment.yaml")
	kube, frontend := pod.Container(t, "kube"), pod.Container(t, "frontend")
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
	// The gateways' passwords.
	keys := kube.Variable("VIPGATE_KEY_DIR")
	if volumes[keys] == "" {
		t.Errorf("kube writes the passwords to %q, which is not a volume", keys)
	}
	for _, c := range pod.Containers {
		got := ""
		for _, m := range c.VolumeMounts {
			if m.Name == volumes[keys] {
				got = m.MountPath
			}
		}
		if want := map[string]string{"frontend": keys}[c.Name]; got != want {
			t.Errorf("%s mounts the passwords at %q, want %q", c.Name, got, want)
		}
	}
	if a, b := volumes["/run/vipgate/frontend"], volumes["/run/vipgate"]; a == "" || a != b {
		t.Errorf("kube looks for the frontend's socket in volume %s, it is in %s", a, b)
	}
}
