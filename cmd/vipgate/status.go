package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/pods"
	"github.com/vipgate/vipgate/pkg/status"
)

type outputFlags struct {
	Output string `short:"o" help:"table or json." enum:"table,json" default:"table" env:"-"`
}

type statusCommand struct {
	outputFlags
}

func (c *statusCommand) Run(ctx context.Context, out *cli.Output, line *commandLine) error {
	_, all, err := line.list(ctx)
	if err != nil {
		return err
	}
	text, good := status.Pods(all, time.Now())
	if c.Output == "json" {
		if text, err = status.PodsJSON(all); err != nil {
			return err
		}
		out.Printf("%s", text)
	} else {
		out.Show(text)
	}
	return exit(good)
}

func (f sourceFlags) list(ctx context.Context) (source pods.Source, all []pods.Pod, err error) {
	if source, err = f.source(); err == nil {
		all, err = pods.List(ctx, source)
	}
	return source, all, err
}

func exit(good bool) error {
	if good {
		return nil
	}
	return cli.ExitError(cli.ExitFailed)
}

type explainCommand struct {
	outputFlags
	VIP string `arg:"" name:"vip" help:"A VIP such as 20.0.0.1."`
}

func (c *explainCommand) Run(ctx context.Context, out *cli.Output, line *commandLine) error {
	vip, err := cli.ParseVIP(c.VIP)
	if err != nil {
		return err
	}
	_, all, err := line.list(ctx)
	if err != nil {
		return err
	}
	chains, good := map[string]*status.Chain{}, true
	for i, pod := range all {
		chain := pod.Explain(vip, time.Now())
		chains[pod.Name], good = chain, good && chain.Good()
		if c.Output == "table" {
			out.Show(strings.Repeat("\n", min(i, 1)) + "pod " + pod.Name + "\n" + chain.Text())
		}
	}
	if c.Output == "json" {
		text, err := json.MarshalIndent(chains, "", "  ")
		if err != nil {
			return fmt.Errorf("failed to render the steps as JSON: %w", err)
		}
		out.Printf("%s\n", text)
	}
	return exit(good)
}
