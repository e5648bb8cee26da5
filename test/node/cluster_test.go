package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	// repository and pinned are relative to the folder of this package.
	repository = "../.."
	pinned     = repository + "/bin/tools"

	// waitTimeout bounds a wait for a step of the cluster; on two idle cores each step takes
	// seconds.
	waitTimeout  = 5 * time.Minute
	pollInterval = 200 * time.Millisecond
	// tail is the number of lines of each log that a failed test prints.
	tail = 15
)

// address is the address of the machine, where the API server and the first node listen.
var address = netip.MustParseAddr("192.168.77.1")

// cluster is an API server, the controllers and the nodes.
type cluster struct {
	t    *testing.T
	dir  string
	kube *kubernetes.Cluster
	// kubectl and kubeconfig are absolute paths.
	kubectlPath, kubeconfig string
}

// newCluster starts the cluster without nodes in the network namespace of the test.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: folder(t)}
	var err error
	if c.kubectlPath, err = filepath.Abs(pinned + "/kubectl"); err != nil {
		t.Fatal(err)
	}
	c.run("ip", "link", "set", "lo", "up")
	c.run("ip", "link", "add", "machine", "type", "veth", "peer", "outside")
	c.run("ip", "link", "set", "outside", "up")
	for i := range len(nodeNames) {
		c.run("ip", "address", "add", nodeAddress(i).String()+"/24", "dev", "machine")
	}
	c.run("ip", "link", "set", "machine", "up")
	// Some programs derive the machine's address from the default route.
	c.run("ip", "route", "add", "default", "via", "192.168.77.254", "dev", "machine")
	c.kube = kubernetes.Start(t, kubernetes.ForNode(c.folder("api"), address))
	// Replaces kube-proxy for the Service kubernetes.
	_, port, _ := strings.Cut(c.kube.Address(), ":")
	c.run("nft", fmt.Sprintf(`table ip kubernetes {
	chain prerouting {
		type nat hook prerouting priority dstnat;
		ip daddr 10.96.0.1 tcp dport 443 dnat to %s:%s
	}
}`, address, port))
	c.kubeconfig = c.kube.Kubeconfig(t, c.kube.Admin())
	ca := filepath.Join(c.dir, "ca.crt")
	c.write(ca, string(c.kube.Admin().CAData))
	for _, program := range []string{"kube-controller-manager", "kube-scheduler"} {
		args := []string{
			"--kubeconfig=" + c.kube.Kubeconfig(t, c.kube.User("system:"+program)),
			"--leader-elect=false", "--secure-port=0",
		}
		if program == "kube-controller-manager" {
			args = append(args, "--root-ca-file="+ca, "--use-service-account-credentials")
		}
		c.start(program, pinned+"/"+program, args...)
	}
	return c
}

// folder creates a folder of the run.
func (c *cluster) folder(name string) string {
	c.t.Helper()
	dir := filepath.Join(c.dir, name)
	harness.Must(c.t, os.MkdirAll(dir, 0o755))
	return dir
}

func (c *cluster) write(path, text string) {
	c.t.Helper()
	harness.Must(c.t, os.WriteFile(path, []byte(text), 0o600))
}

// start starts a process that ends with the test. Its output is in a file of the run's folder; a
// failed test prints the end of the file.
func (c *cluster) start(name, program string, args ...string) {
	c.t.Helper()
	log, err := os.Create(filepath.Join(c.dir, name+".log"))
	harness.Must(c.t, err)
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = log, log
	harness.Must(c.t, errors.Join(cmd.Start(), log.Close()))
	c.t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // a killed process has no exit status of interest
		if c.t.Failed() {
			c.t.Logf("== the end of %s\n%s", log.Name(), lastLines(log.Name()))
		}
	})
}

func lastLines(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-tail):], []byte("\n")))
}

// run runs a command and returns its output.
func (c *cluster) run(args ...string) string {
	c.t.Helper()
	ctx := harness.Context(c.t, waitTimeout)
	out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
	if err != nil {
		c.t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// kubectl runs kubectl as administrator and returns its output.
func (c *cluster) kubectl(args ...string) string {
	c.t.Helper()
	return c.run(append([]string{c.kubectlPath, "--kubeconfig=" + c.kubeconfig}, args...)...)
}

// wait waits until condition returns nil.
func (c *cluster) wait(condition func(context.Context) error) {
	c.t.Helper()
	ctx := harness.Context(c.t, waitTimeout)
	harness.Must(c.t, lab.Eventually(ctx, pollInterval, func() error { return condition(ctx) }))
}
