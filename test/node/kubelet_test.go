package node

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
)

// nodeNames are the names of the nodes. test/setup/test-node.sh creates their cgroups.
var nodeNames = []string{"node-a", "node-b"}

// nodeAddress returns the address of a node. All addresses belong to the one machine.
func nodeAddress(i int) netip.Addr {
	a := address
	for range i {
		a = a.Next()
	}
	return a
}

// pause is the image of a pod's sandbox; it is in the folder of the run.
const pause = "docker.io/vipgate/pause:test"

// containerd is the configuration of a node's containerd. runc and the CNI plugins use their
// default folders, which both nodes share: containers have unique IDs.
const containerd = `version = 2
root = "%[1]s/root"
state = "%[1]s/state"
[grpc]
  address = "%[1]s/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "` + pause + `"
  disable_tcp_service = true
  # Root may lack CAP_SYS_RESOURCE, as in a container.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "%[2]s"
`

// kubelet is the configuration of the kubelets: cgroup v1 and swap are accepted, a small disk
// causes no eviction, and the API server needs no client certificate.
const kubelet = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://%[1]s/containerd.sock
address: %[2]s
healthzPort: %[3]d
cgroupDriver: cgroupfs
cgroupRoot: /vipgate-test-node/%[4]s
failCgroupV1: false
failSwapOn: false
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
evictionHard: {memory.available: "0%%"}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
podLogsDir: %[1]s/pods
volumePluginDir: %[1]s/plugins
`

// startNodes starts containerd and a kubelet for each node, imports the images with a tag, and
// waits until the nodes are ready.
func (c *cluster) startNodes(tag string) {
	c.t.Helper()
	network := c.folder("cni")
	c.run("cp", repository+"/deployments/quickstart/bridge.conflist", network+"/10-bridge.conflist")
	for i, name := range nodeNames {
		dir := c.folder(name)
		config := filepath.Join(dir, "containerd.toml")
		c.write(config, fmt.Sprintf(containerd, dir, network))
		c.start("containerd-"+name, "containerd", "--config="+config)
		c.importImages(dir, tag)
		config = filepath.Join(dir, "kubelet.yaml")
		c.write(config, fmt.Sprintf(kubelet, dir, nodeAddress(i), 10248+i, name))
		c.start("kubelet-"+name, pinned+"/kubelet", "--config="+config, "--hostname-override="+name,
			"--node-ip="+nodeAddress(i).String(), "--root-dir="+c.folder(name+"/kubelet"),
			"--cert-dir="+c.folder(name+"/pki"),
			"--kubeconfig="+c.kube.Kubeconfig(c.t, c.kube.User("system:node:"+name, "system:nodes")))
	}
	for _, name := range nodeNames {
		c.kubectl("wait", "--for=create", "--timeout="+waitTimeout.String(), "node/"+name)
		c.kubectl("wait", "--for=condition=Ready", "--timeout="+waitTimeout.String(), "node/"+name)
	}
}

// importImages imports the images of `make images` and the sandbox image into a node, with the
// names that manifests use.
func (c *cluster) importImages(dir, tag string) {
	c.t.Helper()
	ctr := func(args ...string) string {
		return c.run(append([]string{"ctr", "--address=" + dir + "/containerd.sock", "--namespace=k8s.io"}, args...)...)
	}
	c.wait(func(ctx context.Context) error {
		return exec.CommandContext(ctx, "ctr", "--address="+dir+"/containerd.sock", "version").Run()
	})
	ctr("images", "import", filepath.Join(c.dir, "pause.tar"))
	for _, name := range []string{"lb", "frontend", "kube", "target"} {
		ctr("images", "import", repository+"/bin/images/"+name+".tar")
	}
	for line := range strings.Lines(ctr("images", "list", "--quiet")) {
		image, _, _ := strings.Cut(strings.TrimSpace(line), ":")
		if image != "docker.io/vipgate/pause" && !strings.HasPrefix(image, "sha256") {
			ctr("images", "tag", "--force", strings.TrimSpace(line), image+":"+tag)
		}
	}
}
