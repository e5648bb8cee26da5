package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/harness"
)

// With this variable the test binary runs kube.
const asKube = "VIPGATE_TEST_AS_KUBE"

func TestTranslateIsProgram(*testing.T) {
	if args := os.Getenv(asKube); args != "" {
		os.Exit(cli.Main(context.Background(), program(), &commandLine{}, strings.Fields(args)))
	}
}

// translate runs kube translate, and returns its output and its exit status.
func translate(t *testing.T, stdin string, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestTranslateIsProgram$")
	c.Env = append(os.Environ(), asKube+"=translate "+strings.Join(args, " "))
	var out, errs bytes.Buffer
	c.Stdin, c.Stdout, c.Stderr = strings.NewReader(stdin), &out, &errs
	_ = c.Run()
	return out.String(), errs.String(), c.ProcessState.ExitCode()
}

const trenchObject = `
apiVersion: vipgate.io/v1alpha1
kind: Trench
metadata: {name: trench-a, namespace: a}
spec: {attractor: {name: attractor-a, vips: [20.0.0.1/32]}}
`

// noStreams is the end of a file that has no streams.
const noStreams = "attractor: {name: attractor-a, vips: [20.0.0.1/32]}\n"

const gatewayObject = `
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: gw-a, namespace: a}
spec: {gatewayClassName: meridio, listeners: []}
`

func serviceObject(namespace, class, vip string) string {
	return `
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: ` + namespace + `, annotations: {vipgate.io/vips: ` + vip + `}}
spec: {type: LoadBalancer, loadBalancerClass: ` + class + `, ports: [{port: 80}]}
`
}

func TestTranslate(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trench.yaml")
	harness.Must(t, os.WriteFile(file, []byte(trenchObject), 0o600))
	for name, c := range map[string]struct {
		stdin          string
		args           []string
		stdout, stderr string // parts of the output
		status         int
	}{
		"accepted": {
			serviceObject("a", "vipgate.io/trench-a", "20.0.0.1"),
			[]string{"-f", file, "-f", "-"},
			"- name: a.web", "Service  a/web       true      Accepted", cli.ExitOK,
		},
		"refused": {
			trenchObject + serviceObject("a", "vipgate.io/trench-a", "20.0.0.2"),
			[]string{"-f", "-"},
			noStreams, "Service  a/web       false     VIPNotAllowed", cli.ExitFailed,
		},
		"other class": {
			trenchObject + serviceObject("a", "vipgate.io/trench-b", "20.0.0.1"),
			[]string{"-f", "-"},
			noStreams, "Service a/web is ignored: its class is vipgate.io/trench-b, not vipgate.io/trench-a", cli.ExitOK,
		},
		"other namespace": {
			trenchObject + serviceObject("b", "vipgate.io/trench-a", "20.0.0.1"),
			[]string{"-f", "-"},
			noStreams, "Service b/web is ignored: namespace b is none of spec.namespaces", cli.ExitOK,
		},
		"Gateway of Meridio 2": {
			gatewayObject, []string{"-f", "-"}, "trench: gw-a", "Gateway  a/gw-a  true", cli.ExitOK,
		},
		"changes": {
			strings.Replace(trenchObject, "20.0.0.1/32", "20.0.0.2/32", 1) +
				serviceObject("a", "vipgate.io/trench-a", "20.0.0.2"),
			[]string{"-f", "-", "--against", file},
			"+ VIP 20.0.0.2/32\n- VIP 20.0.0.1/32\n+ stream a.web\n", "Service  a/web       true", cli.ExitOK,
		},
		"changes of a refused object": {
			trenchObject + serviceObject("a", "vipgate.io/trench-a", "20.0.0.2"),
			[]string{"-f", "-", "--against", file, "-o", "json"},
			"\"valid\": false,", "Service  a/web       false     VIPNotAllowed", cli.ExitFailed,
		},
		"no changes from a directory": {
			trenchObject, []string{"-f", "-", "--against", filepath.Dir(file)}, "no change\n", "Trench", cli.ExitOK,
		},
		"changes from a Gateway": {
			gatewayObject, []string{"-f", file, "--against", "-"}, "+ VIP 20.0.0.1/32", "", cli.ExitOK,
		},
		"changes from no Trench": {
			"", []string{"-f", file, "--against", "-"}, "", "no trench file, since there is no accepted Trench", cli.ExitUsage,
		},
		"no Trench":     {"", []string{"-f", "-"}, "", "NotFound", cli.ExitFailed},
		"two Trenches":  {trenchObject + "---" + trenchObject, []string{"-f", "-"}, "", "a second Trench", cli.ExitUsage},
		"no file":       {"", []string{"-f", file + ".none"}, "", "no such file", cli.ExitUsage},
		"without files": {"", nil, "", "missing flags: --filename", cli.ExitUsage},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, status := translate(t, c.stdin, c.args...)
			if c.stdout == noStreams && !strings.HasSuffix(stdout, noStreams) {
				t.Errorf("a file with streams:\n%s", stdout)
			}
			if status != c.status || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) {
				t.Errorf("exit status %d\n%s%s", status, stdout, stderr)
			}
			if c.stdout == "" && stdout != "" {
				t.Errorf("printed %s", stdout)
			}
		})
	}
}
