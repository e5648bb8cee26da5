// Command vipgate shows and changes all pods of a trench at once: in Kubernetes with the user's
// kubeconfig, on other machines by the admin sockets. As kubectl-vipgate it is the kubectl plugin.
package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/klog/v2"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/cmd/vipgate/quickstart"
	"github.com/vipgate/vipgate/pkg/pods"
)

type commandLine struct {
	Status     statusCommand      `cmd:"" help:"Show every pod and its problems. Exit status 1 if there is one."`
	Explain    explainCommand     `cmd:"" help:"Show each step of a VIP's traffic in every pod, with the remedy. Exit status 1 if one is broken."`
	Events     eventsCommand      `cmd:"" help:"Show the last events of all pods, ordered by time."`
	Drain      drainCommand       `cmd:"" help:"Drain all VIPs of a pod, or a VIP in all pods. It survives restarts of containers."`
	Undrain    undrainCommand     `cmd:"" help:"End the drains of a pod, or of a VIP in all pods."`
	Dashboard  dashboardCommand   `cmd:"" help:"Show all pods live on a page for a browser of this machine."`
	Sysdump    sysdumpCommand     `cmd:"" help:"Collect states, events, configuration, kernel state, logs and manifests, without secrets."`
	Quickstart quickstart.Command `cmd:"" help:"Create a laboratory in network namespaces: a trench pod, gateways and targets."`
	Version    cli.VersionCommand `cmd:"" help:"Print the version."`

	sourceFlags
	cli.Globals
}

// sourceFlags select the pods of a trench, before or after the command.
type sourceFlags struct {
	Namespace  string `short:"n" help:"Namespace of the trench; when absent that of the kubeconfig's context." placeholder:"NAME" env:"-"`
	Context    string `help:"Context of the kubeconfig." placeholder:"NAME" env:"-"`
	Kubeconfig string `help:"Kubeconfig file; when absent $KUBECONFIG or ~/.kube/config." type:"path" placeholder:"FILE" env:"-"`
	Trench     string `help:"Name of the trench; when absent the only one of the namespace." placeholder:"NAME" env:"-"`
	Sockets    string `help:"Folder of admin sockets, such as /run/vipgate, instead of Kubernetes." type:"path" placeholder:"DIR" env:"-"`
}

func (f sourceFlags) source() (pods.Source, error) {
	if f.Sockets != "" {
		if f.Namespace+f.Context+f.Kubeconfig+f.Trench != "" {
			return nil, cli.Usage("--sockets excludes --namespace, --context, --kubeconfig and --trench")
		}
		return pods.Machine{Dir: f.Sockets}, nil
	}
	return f.cluster()
}

func (f sourceFlags) cluster() (*pods.Cluster, error) {
	// Messages of client-go are for developers; its errors are returned.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	cluster, err := pods.NewCluster(pods.Access{Kubeconfig: f.Kubeconfig, Context: f.Context, Namespace: f.Namespace},
		f.Trench)
	if err != nil {
		return nil, cli.Usage("%w; select a cluster by --kubeconfig, or --sockets without Kubernetes", err)
	}
	return cluster, nil
}

func main() {
	os.Exit(cli.Main(context.Background(), program(os.Args[0]), &commandLine{}, os.Args[1:]))
}

// program returns the command line under the name of the executable; kubectl runs kubectl-vipgate.
func program(executable string) cli.Program {
	name := "vipgate"
	if strings.HasPrefix(filepath.Base(executable), "kubectl-") {
		name = "kubectl vipgate"
	}
	return cli.Program{Name: name, Description: "Shows and drains all pods of a trench."}
}
