package kubee2e

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
	"github.com/vipgate/vipgate/test/lab"
)

// fencedBlock matches the fenced blocks of a document: info string and text.
var fencedBlock = regexp.MustCompile("(?sm)^```(.*?)\n(.*?)^```$")

// The info strings of a document's blocks. Objects are applied, and a file is written to the
// user's directory. Each group of commands has a separate API server; other commands need a
// kubelet.
const (
	objects       = "yaml"
	fileIs        = "yaml file="
	commands      = "sh run-by-test"
	otherCommands = "sh needs=cluster"
)

// user is a user who follows documents in a clone of the repository, with kubectl and helm.
type user struct {
	t       *testing.T
	dir     string // working directory of commands, with links to deployments and charts
	env     []string
	cluster *kubernetes.Cluster
	root    string
}

// newUser starts an API server with only the CustomResourceDefinitions of Multus and SPIRE, for a
// user with programs of bin/tools.
func newUser(t *testing.T, programs ...string) *user {
	t.Helper()
	t.Parallel()
	root, err := filepath.Abs("../..")
	harness.Must(t, err)
	tools := filepath.Join(root, "bin", "tools")
	for _, program := range programs {
		if _, err := os.Stat(filepath.Join(tools, program)); err != nil {
			t.Fatalf("missing: %s (make test-kube builds it): %v", program, err)
		}
	}
	u := &user{t: t, dir: t.TempDir(), root: root}
	u.cluster = kubernetes.Start(t)
	u.env = []string{
		"KUBECONFIG=" + u.cluster.Kubeconfig(t, u.cluster.Admin()), "HOME=" + u.dir,
		"PATH=" + strings.Join([]string{tools, binaries, "/usr/bin", "/bin"}, ":"),
	}
	for _, name := range []string{"deployments", "charts"} {
		harness.Must(t, os.Symlink(filepath.Join(root, name), filepath.Join(u.dir, name)))
	}
	foreign, err := os.ReadFile("testdata/foreign.yaml")
	harness.Must(t, err)
	u.cluster.Apply(t, string(foreign))
	return u
}

// run runs a script in the user's directory and returns its output.
func (u *user) run(script, stdin string) (string, error) {
	ctx := harness.Context(u.t, waitTimeout)
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir, cmd.Env, cmd.Stdin = u.dir, u.env, strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// follow runs the blocks of a document in their order: the blocks of group, and the objects if
// group is unnamed. applied is called after each block of objects. It returns the number of
// scripts.
func (u *user) follow(document, group string, applied func(objects string)) int {
	u.t.Helper()
	text, err := os.ReadFile(filepath.Join(u.root, document))
	harness.Must(u.t, err)
	ran := 0
	for _, block := range fencedBlock.FindAllStringSubmatch(string(text), -1) {
		info, text := block[1], block[2]
		script, stdin := text, ""
		switch name, isFile := strings.CutPrefix(info, fileIs); {
		case isFile:
			harness.Must(u.t, os.WriteFile(filepath.Join(u.dir, name), []byte(text), 0o600))
			continue
		case info == objects && group == commands:
			script, stdin = "kubectl apply -f -", text
		case info == group:
			ran++
		default:
			continue
		}
		if out, err := u.run(script, stdin); err != nil {
			u.t.Fatalf("%s: %v\n%s%s", document, err, text, out)
		}
		if stdin != "" {
			applied(stdin)
		}
	}
	return ran
}

// startKube starts the kube of a trench pod with the service account of the deployment.
func (u *user) startKube(namespace string) {
	u.t.Helper()
	ns, err := lab.Create(lab.WithoutDAD)
	harness.Must(u.t, err)
	u.t.Cleanup(func() {
		harness.Check(u.t, ns.Close())
	})
	u.cluster.ApplyIn(u.t, namespace, `
apiVersion: v1
kind: Pod
metadata: {name: vipgate-1, labels: {vipgate.io/trench-pod: trench-a}}
spec: {nodeName: node-1, containers: [{name: frontend, image: frontend}]}
status: {phase: Running, conditions: [{type: Ready, status: "True"}]}
`)
	var listener net.Listener
	harness.Must(u.t, ns.Do(func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}))
	config := u.cluster.ProxyOn(u.t, listener).Config(u.cluster.ServiceAccount(u.t, namespace, "vipgate"))
	dir := u.t.TempDir()
	kube, err := lab.StartProcess(ns, dir, "kube", filepath.Join(binaries, "kube"), "run",
		"--namespace="+namespace, "--trench=trench-a", "--pod-name=vipgate-1",
		"--kubeconfig="+u.cluster.Kubeconfig(u.t, config), "--trench-file="+filepath.Join(dir, "trench.yaml"),
		"--key-dir="+filepath.Join(dir, "keys"), "--admin-socket=unix://"+filepath.Join(dir, "kube.sock"),
		"--frontend-admin-socket=unix://"+filepath.Join(dir, "frontend.sock"), "--log-format=text")
	harness.Must(u.t, err)
	u.t.Cleanup(func() {
		if u.t.Failed() {
			u.t.Logf("== last lines of kube\n%s", kube.Tail(30))
		}
		harness.Check(u.t, kube.Kill())
	})
}

// wantAddresses waits until the Service shows the addresses.
func (u *user) wantAddresses(namespace string, addresses ...string) {
	u.t.Helper()
	ctx := harness.Context(u.t, waitTimeout)
	err := lab.Eventually(ctx, processInterval, func() error {
		out, err := u.run("kubectl -n "+namespace+" get service web", "")
		for _, address := range addresses {
			if !strings.Contains(out, address) {
				err = errors.Join(err, fmt.Errorf("no %s in\n%s", address, out))
			}
		}
		return err
	})
	if err != nil {
		out, _ := u.run("kubectl -n "+namespace+" describe trench,service", "")
		u.t.Fatalf("%v\n%s", err, out)
	}
}

// pod is a Pod as the controllers and the kubelet create it from the document's Deployment,
// networkStatus what Multus writes into it.
const (
	pod = `
apiVersion: v1
kind: Pod
metadata:
  name: web-1
  namespace: trench-a
  labels: {app: web, vipgate.io/trench: trench-a}
spec: {nodeName: node-1, containers: [{name: web, image: web}]}
status: {phase: Running, conditions: [{type: Ready, status: "True"}]}
`
	networkStatus = `kubectl -n trench-a patch pod web-1 --subresource=status --patch-file=/dev/stdin <<'EOF'
metadata:
  annotations:
    k8s.v1.cni.cncf.io/network-status: '[{"name": "trench-a/targets", "ips": ["172.16.0.11", "fd00:16::11"]}]'
EOF
`
)

// Runs the commands and objects of docs/kubernetes.md in their order, from an empty API server.
func TestCommandsOfTheDocument(t *testing.T) {
	u := newUser(t, "kubectl")
	ran := u.follow("docs/kubernetes.md", commands, func(objects string) {
		if strings.Contains(objects, "kind: Deployment") {
			u.cluster.Apply(t, pod)
			if out, err := u.run(networkStatus, ""); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
	})
	if ran != 3 {
		t.Errorf("%d blocks are marked", ran)
	}
	u.startKube("trench-a")
	u.wantAddresses("trench-a", vip4, vip6)
}

func TestHelmCommandsOfTheDocument(t *testing.T) {
	u := newUser(t, "kubectl", "helm")
	if ran := u.follow("docs/kubernetes.md", commands+"=helm", nil); ran != 1 {
		t.Errorf("%d blocks for helm", ran)
	}
	for _, object := range []string{"deployment/vipgate", "trench/trench-a", "rolebinding/vipgate"} {
		if out, err := u.run("kubectl -n trench-a get "+object, ""); err != nil {
			t.Errorf("%s: %v: %s", object, err, out)
		}
	}
}

// The quickstart needs neither Multus nor SPIRE.
func TestCommandsOfTheQuickstart(t *testing.T) {
	u := newUser(t, "kubectl")
	if ran := u.follow("deployments/quickstart/README.md", commands, nil); ran != 1 {
		t.Errorf("%d blocks are marked", ran)
	}
	u.startKube("vipgate-quickstart")
	u.wantAddresses("vipgate-quickstart", vip4)
}

// Commands that no test runs need a kubelet or images.
func TestUnmarkedCommands(t *testing.T) {
	text, err := os.ReadFile("../../docs/kubernetes.md")
	harness.Must(t, err)
	for _, block := range fencedBlock.FindAllStringSubmatch(string(text), -1) {
		if block[1] != otherCommands {
			continue
		}
		for line := range strings.Lines(block[2]) {
			if !strings.Contains(line, " exec ") {
				t.Errorf("no test runs %s", line)
			}
		}
	}
}
