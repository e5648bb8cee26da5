package main

import (
	"context"
	"strings"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
	"github.com/vipgate/vipgate/pkg/status"
)

type explainCommand struct {
	cli.AdminFlags
	Namespace           string `help:"Namespace of the Service; when absent that of the Trench." placeholder:"NAMESPACE" env:"-"`
	FrontendAdminSocket string `help:"Unix socket of the frontend of this pod." default:"unix:///run/vipgate/frontend.sock" placeholder:"SOCKET"`
	Output              string `short:"o" help:"table or json." enum:"table,json" default:"table"`
	Service             string `arg:"" name:"service" help:"A Service such as svc/web."`
}

// Run explains a Service, and each of its VIPs in this pod.
func (c *explainCommand) Run(ctx context.Context, out *cli.Output) error {
	kind, name, isTyped := strings.Cut(c.Service, "/")
	if !isTyped {
		name = kind
	} else if kind != "svc" && kind != "service" && kind != "services" {
		return cli.Usage("%s: name a Service as svc/NAME, with --namespace", c.Service)
	}
	current, err := cli.Call(ctx, "kube", c.AdminFlags, kubev1.NewKubeServiceClient, kubev1.KubeServiceClient.GetStatus,
		&adminv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	namespace := c.Namespace
	if namespace == "" {
		namespace = current.GetNamespace()
	}
	chain := &status.Chain{Service: "svc/" + namespace + "/" + name}
	for _, vip := range chain.KubeSteps(current, time.Now()) {
		part := &status.Chain{VIP: vip}
		if err := cli.ExplainPod(ctx, part, c.FrontendAdminSocket); err != nil {
			part.Silent("frontend", cli.Explain(err))
		}
		chain.VIPs = append(chain.VIPs, part)
	}
	return cli.ShowChain(out, chain, c.Output)
}
