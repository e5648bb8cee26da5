package main

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/klog/v2"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/kube"
	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/logs"
)

// namespaceFile contains the namespace of the pod. It is mounted with the service account.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

type runCommand struct {
	Trench     string `help:"Name of the Trench." placeholder:"NAME"`
	Gateway    string `help:"Name of a Gateway of Meridio 2, instead of --trench: this program replaces the router of its GatewayRouters." placeholder:"NAME"`
	Namespace  string `help:"Namespace of the Trench and of this pod; when absent that of POD_NAMESPACE, else of the service account." placeholder:"NAMESPACE"`
	PodName    string `help:"Name of this pod; when absent that of POD_NAME, else the host name." placeholder:"NAME"`
	Kubeconfig string `help:"Kubeconfig file, for a kube outside of the cluster; when absent the service account of the pod." type:"path" placeholder:"FILE"`

	TrenchFile          string `help:"The trench file that is written; lb and frontend read it." default:"/etc/vipgate/trench/trench.yaml" type:"path" placeholder:"FILE"`
	KeyDir              string `help:"Directory of the password files of gateways, at the same path for the frontend. It is created; other files in it are removed." default:"/etc/vipgate/trench/keys" type:"path" placeholder:"DIR"`
	FrontendAdminSocket string `help:"Unix socket of the frontend of this pod, which says what is advertised." default:"unix:///run/vipgate/frontend.sock" placeholder:"SOCKET"`
	FRRK8sNamespace     string `name:"frr-k8s-namespace" env:"VIPGATE_FRR_K8S_NAMESPACE" help:"Namespace of frr-k8s, for a frontend with --gateway-state=frr-k8s: the BGPSessionStates of this pod's node are written into a file beside the trench file." placeholder:"NAMESPACE"`

	cli.Process
}

func (c *runCommand) Run(ctx context.Context, stderr *logs.Writer) error {
	var refused cli.Refusals
	namespace := c.namespace()
	c.check(&refused, namespace)
	if err := refused.Err(); err != nil {
		return err
	}
	config, err := cluster.Config(c.Kubeconfig)
	if err != nil {
		return cli.Usage("%w", err)
	}
	frontend, err := identity.SocketPath(c.FrontendAdminSocket)
	if err != nil {
		return cli.Usage("%w", err)
	}
	settings := c.Settings(stderr)
	klog.SetSlogLogger(settings.Log) // client-go logs through klog
	// The audit log of the API server names the program by its user agent.
	config.UserAgent = "vipgate-kube/" + settings.Version
	host, _ := os.Hostname() // empty with an error
	settings.Log.Info("starting kube", "version", settings.Version, "of", namespace+"/"+cmp.Or(c.Trench, c.Gateway),
		"api_server", config.Host, "trench_file", c.TrenchFile)
	o := kube.Options{
		Settings: settings, Config: config, Namespace: namespace, Trench: c.Trench, Gateway: c.Gateway,
		PodName: c.podName(host), TrenchFile: c.TrenchFile, KeyDir: c.KeyDir, FrontendSocket: frontend,
		FRRK8sNamespace: c.FRRK8sNamespace,
	}
	return cli.RunUntilStopped(0, func(stops <-chan struct{}) error { return kube.Run(ctx, o, stops) })
}

// podName returns the name of this pod. The default is the host name, which on a host network is
// not the pod's: --pod-name or POD_NAME is required there, since pod names must be unique.
func (c *runCommand) podName(host string) string {
	return cmp.Or(c.PodName, os.Getenv("POD_NAME"), host)
}

// namespace returns the namespace of the Trench, or "" if it is unknown.
func (c *runCommand) namespace() string {
	own, _ := os.ReadFile(namespaceFile) // does not exist outside of a pod
	return cmp.Or(c.Namespace, os.Getenv("POD_NAMESPACE"), strings.TrimSpace(string(own)))
}

// check validates the flags, to report invalid ones before the start.
func (c *runCommand) check(r *cli.Refusals, namespace string) {
	r.If(namespace == "", "--namespace is required: neither POD_NAMESPACE nor a service account says it")
	r.If(c.Trench == "" && c.Gateway == "", "--trench is required: the name of the Trench")
	r.If(c.Trench != "" && c.Gateway != "", "--trench=%s and --gateway=%s exclude each other", c.Trench, c.Gateway)
	r.If(c.FRRK8sNamespace != "" && c.Gateway != "", "--frr-k8s-namespace needs a Trench: with --gateway=%s the "+
		"frontend runs BIRD", c.Gateway)
	dir := filepath.Dir(c.TrenchFile)
	info, err := os.Stat(dir)
	r.If(err != nil, "--trench-file=%s: %w", c.TrenchFile, err)
	r.If(err == nil && !info.IsDir(), "--trench-file=%s: %s is not a directory", c.TrenchFile, dir)
	// files.removeKeys would remove the trench file.
	r.If(filepath.Clean(c.KeyDir) == dir, "--key-dir=%s: use another directory than that of the trench file, "+
		"since files that are no keys are removed from it", c.KeyDir)
	r.Socket("--frontend-admin-socket", c.FrontendAdminSocket)
	c.Process.Check(r, cli.Port{})
}
