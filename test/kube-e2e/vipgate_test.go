package kubee2e

import (
	"archive/tar"
	"bufio"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
	"github.com/vipgate/vipgate/test/lab"
)

// Secrets that must not be in a sysdump.
const (
	bgpPassword   = "planted-bgp-password"
	plantedValue  = "planted-env-value"
	plantedOther  = "planted-annotation"
	plantedConfig = "planted-configmap"
	plantedArg    = "planted-argument"
)

// plugin is an operator with kubectl-vipgate and a kubeconfig.
type plugin struct {
	*fixture
	dir, kubeconfig string
}

// TestVipgate asks and drains the pods of a trench through the API server: good pods, a program
// that hangs, one that ended, and a container that does not exist.
func TestVipgate(t *testing.T) {
	p := newPlugin(t)
	p.want(0, "ok trench-a-1 2/2 2/2 1/1 -", "ok trench-a-2 2/2 2/2 1/1 -", "2 of 2 pods good").by("status")
	p.want(0, "pod trench-a-1", "ok targets of trench-a.web 1 of 1 ready", "receives the VIP", "pod trench-a-2").
		by("explain", vip4)
	p.want(1, "NO trench file of lb the file in force does not have the VIP").by("explain", "20.0.0.99")
	p.want(2, "neither a VIP nor a pod of the trench: trench-a-1, trench-a-2").by("drain", "trench-a-3")
	p.want(1, `cannot list resource "pods"`).by("status", "--namespace=default")
	p.want(1, "namespace trench-a has no pod with the label vipgate.io/trench-pod=b").by("status", "--trench=b")
	p.sockets()
	p.drains()
	p.events()
	p.dashboard()
	p.sysdump()
	p.documented()
	p.broken()
}

// documented runs the commands of the document by the real kubectl.
func (p *plugin) documented() {
	p.t.Helper()
	tools, err := filepath.Abs("../../bin/tools")
	p.must(err)
	u := &user{t: p.t, dir: p.dir, root: "../..", env: []string{
		"KUBECONFIG=" + p.kubeconfig, "HOME=" + p.dir,
		"PATH=" + strings.Join([]string{p.dir, tools, "/usr/bin", "/bin"}, ":"),
	}}
	if ran := u.follow("docs/kubernetes.md", commands+"=vipgate", nil); ran != 1 {
		p.t.Errorf("%d blocks for vipgate", ran)
	}
}

func newPlugin(t *testing.T) *plugin {
	t.Helper()
	p := &plugin{fixture: newSecuredFixture(t, bgpPassword), dir: t.TempDir()}
	p.plant()
	for n := range p.Pods {
		p.cluster.StartKubelet(t, fmt.Sprintf("node-%d", n+1), p.container)
	}
	harness.Must(t, os.Symlink(filepath.Join(binaries, "vipgate"), filepath.Join(p.dir, "kubectl-vipgate")))
	// The least rights that the documents name.
	p.cluster.Apply(t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: operator, namespace: trench-a}
rules:
  - {apiGroups: [""], resources: [pods, pods/log, services, configmaps], verbs: [get, list]}
  - {apiGroups: [""], resources: [pods/exec], verbs: [create, get]}
  - {apiGroups: [apps], resources: [deployments], verbs: [list]}
  - {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list]}
  - {apiGroups: [vipgate.io], resources: [trenches, trenchreports], verbs: [list]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: operator, namespace: trench-a}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: operator}
subjects: [{kind: ServiceAccount, name: operator, namespace: trench-a}]
`)
	p.kubeconfig = p.cluster.Kubeconfig(t, p.cluster.ServiceAccount(t, namespace, "operator"))
	p.cluster.Apply(t, securedTrench())
	p.startTrenchPods()
	p.cluster.Apply(t, service)
	for _, app := range p.Targets[:1] {
		p.kubelet.create(app)
		p.kubelet.run(app)
		p.kubelet.ready(app)
	}
	p.wantAnnounced()
	return p
}

// securedTrench returns the Trench whose gateways have passwords.
func securedTrench() string {
	text := trenchManifest()
	for _, family := range []string{"4", "6"} {
		text = strings.Replace(text, "{name: gateway-a"+family,
			"{passwordSecret: {name: bgp, key: password}, name: gateway-a"+family, 1)
	}
	return text
}

// plant creates secrets where a cluster has them.
func (p *plugin) plant() {
	p.t.Helper()
	encoded := base64.StdEncoding.EncodeToString([]byte(bgpPassword))
	p.cluster.Apply(p.t, fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {name: bgp, namespace: trench-a}
data: {password: %s}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: passwords, namespace: trench-a}
rules: [{apiGroups: [""], resources: [secrets], resourceNames: [bgp], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: passwords, namespace: trench-a}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: passwords}
subjects: [{kind: ServiceAccount, name: vipgate, namespace: trench-a}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: mounted, namespace: trench-a}
data: {key: %[2]s}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: vipgate
  namespace: trench-a
  annotations: {kubectl.kubernetes.io/last-applied-configuration: %[3]s}
spec:
  selector: {matchLabels: {vipgate.io/trench-pod: trench-a}}
  template:
    metadata:
      labels: {vipgate.io/trench-pod: trench-a}
      annotations: {example.com/token: %[3]s}
    spec:
      containers:
        - name: frontend
          image: frontend
          env: [{name: HTTPS_PROXY, value: %[4]s}, {name: VIPGATE_LB_ID, value: kept}]
        - {name: injected, image: injected, args: [--token=%[5]s]}
      volumes: [{name: mounted, configMap: {name: mounted}}]
`, encoded, plantedConfig, plantedOther, plantedValue, plantedArg))
}

// podContainer is a container of a trench pod of the lab.
type podContainer struct {
	pod     *lab.Pod
	program string
	env     []string
	log     string
}

// container finds the container of a pod for a kubelet.
func (p *plugin) container(pod, program string) kubernetes.Container {
	for n, of := range p.Pods {
		if podName(n+1) != pod {
			continue
		}
		c := podContainer{pod: of, program: program, env: []string{"VIPGATE_TRENCH_FILE=" + of.TrenchFile()}}
		switch program {
		case "lb":
			c.env, c.log = append(c.env, "VIPGATE_ADMIN_SOCKET=unix://"+of.LBAdmin()), of.LB.Output()
		case "frontend":
			c.env, c.log = append(c.env, "VIPGATE_ADMIN_SOCKET=unix://"+of.FrontendAdmin(),
				"VIPGATE_EXTERNAL_INTERFACE="+lab.External), of.Frontend.Output()
		case "kube":
			c.env, c.log = append(c.env, "VIPGATE_ADMIN_SOCKET=unix://"+filepath.Join(of.Dir, "kube.sock")),
				p.kubes[n].Output()
		}
		return c
	}
	return nil
}

// Exec runs a program in the pod. The image has no other one.
func (c podContainer) Exec(ctx context.Context, command []string, stdin io.Reader, stdout, stderr io.Writer) error {
	if command[0] != c.program {
		return fmt.Errorf("exec failed: %q: executable file not found in $PATH", command[0])
	}
	cmd := exec.CommandContext(ctx, filepath.Join(binaries, command[0]), command[1:]...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), c.env...), stdout, stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := c.pod.Namespace().Start(cmd); err != nil {
		return err
	}
	// Ends with the connection, after the command.
	go func() {
		_, _ = io.Copy(in, stdin)
		in.Close()
	}()
	return cmd.Wait()
}

func (c podContainer) Logs(previous bool) (string, error) {
	if previous && c.program == "lb" {
		return "the previous run of lb", nil
	}
	if previous {
		return "", fmt.Errorf("previous terminated container %q not found", c.program)
	}
	return c.log, nil
}

// wanted is the result of a command.
type wanted struct {
	*plugin
	status int
	parts  []string
}

func (p *plugin) want(status int, parts ...string) wanted { return wanted{p, status, parts} }

// by runs a command until it has the wanted result.
func (w wanted) by(args ...string) {
	w.t.Helper()
	w.waitEvery(processInterval, func(ctx context.Context) error {
		out, status := w.run(ctx, args...)
		line := strings.Join(strings.Fields(out), " ")
		for _, part := range w.parts {
			if status != w.status || !strings.Contains(line, part) {
				return fmt.Errorf("%q: exit status %d, want %d and %q:\n%s", args, status, w.status, part, out)
			}
		}
		return nil
	})
}

// command returns a command line of the plugin.
func (p *plugin) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(p.dir, "kubectl-vipgate"), args...)
	cmd.Env = []string{"KUBECONFIG=" + p.kubeconfig, "HOME=" + p.dir, "PATH=/usr/bin:/bin"}
	cmd.Dir = p.dir
	if !slices.ContainsFunc(args, func(arg string) bool {
		return strings.HasPrefix(arg, "--namespace") || strings.HasPrefix(arg, "--sockets")
	}) {
		cmd.Args = slices.Insert(cmd.Args, 1, "-n", namespace)
	}
	return cmd
}

func (p *plugin) run(ctx context.Context, args ...string) (out string, status int) {
	cmd := p.command(ctx, args...)
	text, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		return err.Error(), -1
	}
	return string(text), cmd.ProcessState.ExitCode()
}

// sockets asks the same pods without Kubernetes.
func (p *plugin) sockets() {
	p.t.Helper()
	for n, pod := range p.Pods {
		dir := filepath.Join(p.dir, "run", podName(n+1))
		p.must(os.MkdirAll(dir, 0o700))
		p.must(errors.Join(os.Symlink(pod.LBAdmin(), filepath.Join(dir, "lb.sock")),
			os.Symlink(pod.FrontendAdmin(), filepath.Join(dir, "frontend.sock"))))
	}
	p.want(0, "ok trench-a-2 2/2 2/2", "2 of 2 pods good").by("status", "--sockets="+filepath.Join(p.dir, "run"))
	p.want(0, "ok trench-a-1 2/2 2/2", "1 of 1 pod good").
		by("status", "--sockets="+filepath.Join(p.dir, "run", podName(1)))
	path := filepath.Join(p.dir, "sockets.tar.gz")
	p.want(0, path).by("sysdump", path, "--sockets="+filepath.Join(p.dir, "run"))
	files := readArchive(p.t, path)
	harness.WantText(p.t, files["trench-a-2/lb/kernel.txt"], "neighbor 172.16.1.1 ", "lookup 4096")
	harness.WantText(p.t, files["trench-a-1/frontend/status.txt"], "2 of 2 VIPs advertised")
	p.want(1, "no admin socket in /nowhere").by("status", "--sockets=/nowhere")
}

// drains drains a pod, and a VIP in all pods.
func (p *plugin) drains() {
	p.t.Helper()
	p.want(0, "trench-a-1: drain").by("drain", "trench-a-1")
	p.want(1, "NO trench-a-1 0/2", "ok trench-a-2 2/2",
		"20.0.0.1/32: advertised by 1 of 2 answering pods; trench-a-1: drained").by("status")
	p.want(1, "no other pod announces 20.0.0.1/32, 2000::1/128; --force").by("drain", "trench-a-2")
	p.want(0, "trench-a-1: no VIP is drained").by("undrain", "trench-a-1")
	p.want(0, "2 of 2 pods good").by("status")
	p.want(1, "no other pod announces 20.0.0.1/32; --force").by("drain", vip4)
	p.want(0, "2 of 2 pods good").by("status")
	p.want(0, "trench-a-1: drain", "trench-a-2: drain").by("drain", vip4, "--force")
	p.want(1, "NO gate withdrawn").by("explain", vip4)
	p.want(0, "trench-a-1: no VIP", "trench-a-2: no VIP").by("undrain", vip4)
	p.want(0, "2 of 2 pods good").by("status")
}

// events follows the events of all pods, and ends the commands in the containers with the client.
func (p *plugin) events() {
	p.t.Helper()
	p.want(0, "trench-a-1 frontend", "trench-a-2 frontend", "trench-a-1 lb", "trench-a-2 lb").by("events")
	before := p.followers()
	cmd := p.command(p.t.Context(), "events", "--follow", "--output=json")
	out, err := cmd.StdoutPipe()
	p.must(err)
	cmd.Stderr = os.Stderr
	p.must(cmd.Start())
	seen := make(chan string)
	go func() {
		defer close(seen)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			seen <- lines.Text()
		}
	}()
	p.wait(func(context.Context) error {
		if n := p.followers() - before; n != 2*trenchPods {
			return fmt.Errorf("%d followers in the containers, want %d", n, 2*trenchPods)
		}
		return nil
	})
	drained := map[string]bool{}
	last := ""
	for line := range seen {
		var event struct {
			Pod, Note string
			Event     struct{ Time, Object, To, Reason string }
		}
		p.must(json.Unmarshal([]byte(line), &event))
		if event.Note != "" || event.Event.Time == "" {
			p.t.Errorf("note or event without a time: %s", line)
		}
		if len(drained) == 0 && event.Event.Time < last {
			p.t.Errorf("%s after %s", line, last)
		}
		if last == "" { // it follows
			p.want(0, "").by("drain", vip4, "--force")
		}
		last = event.Event.Time
		if event.Event.To == "withdrawn" && event.Event.Reason == "drained" {
			if drained[event.Pod] = true; len(drained) == trenchPods {
				break
			}
		}
	}
	p.must(cmd.Process.Signal(syscall.SIGKILL)) // the unkind end
	for range seen {
	}
	_ = cmd.Wait() // killed
	p.wait(func(context.Context) error {
		if n := p.followers() - before; n != 0 {
			return fmt.Errorf("%d followers remain in the containers", n)
		}
		return nil
	})
	p.want(0, "no VIP is drained").by("undrain", vip4)
}

// dashboard reads the stream of the page until both pods have answered through the API server.
func (p *plugin) dashboard() {
	p.t.Helper()
	ctx := harness.Context(p.t, waitTimeout)
	cmd := p.command(ctx, "dashboard")
	out, err := cmd.StdoutPipe()
	p.must(err)
	p.must(cmd.Start())
	lines := bufio.NewScanner(out)
	if !lines.Scan() {
		p.t.Fatalf("dashboard printed no address: %v", cmd.Wait())
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, lines.Text()+"stream", nil)
	p.must(err)
	response, err := http.DefaultClient.Do(request)
	p.must(err)
	defer response.Body.Close()
	last := ""
	for stream := bufio.NewScanner(response.Body); stream.Scan(); {
		last = cmp.Or(stream.Text(), last)
		if strings.Contains(last, "trench-a-1") && strings.Contains(last, "trench-a-2") &&
			strings.Contains(last, vip4) && strings.Contains(last, "gateway-a4") {
			p.must(cmd.Process.Signal(syscall.SIGINT))
			p.must(cmd.Wait())
			return
		}
	}
	p.t.Errorf("the stream ended with %s", last)
}

// followers counts the processes that follow events in the pods.
func (p *plugin) followers() (count int) {
	p.t.Helper()
	for _, pod := range p.Pods {
		processes, err := pod.Namespace().Processes()
		p.must(err)
		for _, pid := range processes {
			text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // it may have ended
			if strings.Contains(string(text), "--follow") {
				count++
			}
		}
	}
	return count
}

// sysdump reads a sysdump: it has every part, and no secret.
func (p *plugin) sysdump() {
	p.t.Helper()
	path := filepath.Join(p.dir, "dump.tar.gz")
	p.want(0, path).by("sysdump", path)
	files := readArchive(p.t, path)
	for name, part := range map[string]string{
		"trench-a-1/frontend/status.txt":  "2 of 2 VIPs advertised",
		"trench-a-2/frontend/status.json": `"advertisement": "ADVERTISEMENT_ANNOUNCED"`,
		"trench-a-1/frontend/events.json": `"announced"`,
		"trench-a-1/frontend/bird.conf":   "protocol bgp",
		"trench-a-1/frontend/kernel.txt":  "passwordFile",
		"trench-a-1/lb/kernel.txt":        "lookup 4096",
		"trench-a-2/lb/kernel.txt":        "neighbor 172.16.1.1 ",
		"trench-a-1/lb/status.json":       `"state": "ready"`,
		"trench-a-1/kube/status.txt":      "trench file",
		"trench-a-1/kube/log.txt":         "starting kube",
		"trench-a-1/lb/previous-log.txt":  "the previous run of lb",
		"manifests/deployments.yaml":      "value: kept",
		"manifests/pods.yaml":             "name: target-1",
		"manifests/services.yaml":         "name: web",
		"manifests/trenches.yaml":         "attractor-a",
		"manifests/trenchreports.yaml":    "trench-a-1",
		"manifests/configmaps.yaml":       "removed by sysdump",
	} {
		if !strings.Contains(files[name], part) {
			p.t.Errorf("%s lacks %q:\n%.2000s", name, part, files[name])
		}
	}
	token, err := os.ReadFile(p.cluster.ServiceAccount(p.t, namespace, "operator").BearerTokenFile)
	p.must(err)
	secrets := []string{bgpPassword, plantedValue, plantedOther, plantedConfig, plantedArg, string(token), "PRIVATE KEY"}
	for name, text := range files {
		for _, secret := range secrets {
			if strings.Contains(text, secret) || strings.Contains(text, base64.StdEncoding.EncodeToString([]byte(secret))) {
				p.t.Errorf("%s contains %s", name, secret)
			}
		}
		if strings.Contains(text, "# sysdump:") {
			p.t.Errorf("%s is incomplete:\n%s", name, text[strings.Index(text, "# sysdump:"):])
		}
	}
}

// readArchive returns the files of a sysdump without its folder.
func readArchive(t *testing.T, path string) map[string]string {
	t.Helper()
	file, err := os.Open(path)
	harness.Must(t, err)
	defer file.Close()
	compressed, err := gzip.NewReader(file)
	harness.Must(t, err)
	files, archive := map[string]string{}, tar.NewReader(compressed)
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		harness.Must(t, err)
		text, err := io.ReadAll(archive)
		harness.Must(t, err)
		_, name, _ := strings.Cut(header.Name, "/")
		files[name] = string(text)
	}
}

// broken asks pods whose programs do not answer.
func (p *plugin) broken() {
	p.t.Helper()
	p.must(p.Pods[1].LB.Signal(syscall.SIGSTOP))
	p.want(1, "ok trench-a-1 2/2", "NO trench-a-2", "lb does not answer: ", "1 of 2 pods good").by("status")
	p.must(p.Pods[1].LB.Signal(syscall.SIGCONT))
	p.must(p.Pods[1].Frontend.Kill())
	p.want(1, "NO trench-a-2 - - 1/1 frontend does not answer: ").by("status")
	p.want(1, "NO pod frontend does not answer").by("explain", vip4)
	p.want(1, "no other pod announces 20.0.0.1/32, 2000::1/128").by("drain", "trench-a-1")
	// A pod without a kubelet, and one whose image cannot be pulled.
	p.cluster.Apply(p.t, fmt.Sprintf(strangePods, namespace))
	p.want(1, "NO trench-a-8 - - - frontend does not answer: ", "NO trench-a-9",
		"lb: the container waits: ImagePullBackOff: no such image", "1 of 4 pods good").by("status")
}

const strangePods = `
apiVersion: v1
kind: Pod
metadata: {name: trench-a-8, namespace: %[1]s, labels: {vipgate.io/trench-pod: trench-a}}
spec: {nodeName: node-8, containers: [{name: frontend, image: frontend}]}
status: {phase: Running}
---
apiVersion: v1
kind: Pod
metadata: {name: trench-a-9, namespace: %[1]s, labels: {vipgate.io/trench-pod: trench-a}}
spec: {nodeName: node-1, containers: [{name: frontend, image: frontend}, {name: lb, image: lb}]}
status:
  phase: Pending
  containerStatuses:
    - name: lb
      image: lb
      imageID: ""
      ready: false
      restartCount: 0
      state: {waiting: {reason: ImagePullBackOff, message: no such image}}
`
