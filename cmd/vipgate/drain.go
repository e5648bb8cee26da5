package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/pods"
)

// changeTimeout bounds the change of one pod.
const changeTimeout = 15 * time.Second

type drainCommand struct {
	Object string `arg:"" name:"pod|vip" help:"Name of a pod, or a VIP such as 20.0.0.1."`
	Force  bool   `help:"Drain also the last advertiser of a VIP." env:"-"`
}

func (c *drainCommand) Run(ctx context.Context, out *cli.Output, line *commandLine) error {
	source, all, err := line.list(ctx)
	if err != nil {
		return err
	}
	drained, command := all, []string{"frontend", "drain"}
	vip, notVIP := cli.ParseVIP(c.Object)
	if notVIP == nil {
		command = append(command, vip)
	} else {
		if drained, err = named(all, c.Object); err != nil {
			return err
		}
		command = append(command, "--all")
	}
	if last := lastAdvertised(all, drained, vip); len(last) > 0 && !c.Force {
		return fmt.Errorf("not drained, because no other pod announces %s; --force drains anyway", strings.Join(last, ", "))
	}
	// The frontends know the other pods only by kube's reports, which are some seconds old. The states
	// above are newer, and exist without kube.
	return change(ctx, out, source, drained, append(command, "--force"))
}

// lastAdvertised returns the VIPs that drained pods advertise, and no other pod announces, and the
// drained pods whose VIPs are unknown. It considers one VIP, or all if vip is empty.
func lastAdvertised(all, drained []pods.Pod, vip string) (last []string) {
	elsewhere := map[string]bool{}
	for _, pod := range all {
		if !slices.ContainsFunc(drained, func(d pods.Pod) bool { return d.Name == pod.Name }) {
			for _, v := range pod.Frontend.GetVips() {
				if v.GetAdvertisement() == readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED {
					elsewhere[v.GetVip()] = true
				}
			}
		}
	}
	for _, pod := range drained {
		if pod.Frontend == nil {
			last = append(last, fmt.Sprintf("what pod %s may announce (%s)", pod.Name, strings.Join(pod.Problems, ", ")))
		}
		for _, v := range pod.Frontend.GetVips() {
			withdrawn := v.GetAdvertisement() == readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
			if name := v.GetVip(); !withdrawn && !elsewhere[name] && (vip == "" || vip == name) && !slices.Contains(last, name) {
				last = append(last, name)
			}
		}
	}
	return last
}

func named(all []pods.Pod, name string) ([]pods.Pod, error) {
	var names []string
	for _, pod := range all {
		if pod.Name == name {
			return []pods.Pod{pod}, nil
		}
		names = append(names, pod.Name)
	}
	return nil, cli.Usage("%s is neither a VIP nor a pod of the trench: %s", name, strings.Join(names, ", "))
}

type undrainCommand struct {
	Object string `arg:"" name:"pod|vip" help:"Name of a pod, or a VIP such as 20.0.0.1."`
}

func (c *undrainCommand) Run(ctx context.Context, out *cli.Output, line *commandLine) error {
	source, all, err := line.list(ctx)
	if err != nil {
		return err
	}
	command := []string{"frontend", "undrain"}
	if vip, err := cli.ParseVIP(c.Object); err == nil {
		command = append(command, vip)
	} else if all, err = named(all, c.Object); err != nil {
		return err
	}
	return change(ctx, out, source, all, command)
}

// change runs a command in the frontends of pods, and prints the result of each pod.
func change(ctx context.Context, out *cli.Output, source pods.Source, all []pods.Pod, command []string) error {
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	results := make([]bytes.Buffer, len(all))
	failures := make([]error, len(all))
	var group sync.WaitGroup
	for i, pod := range all {
		group.Go(func() { failures[i] = source.Run(ctx, pod.Name, pods.Frontend, command, &results[i]) })
	}
	group.Wait()
	good := true
	for i, pod := range all {
		for line := range strings.Lines(results[i].String()) {
			out.Printf("%s: %s", pod.Name, line)
		}
		if failures[i] != nil {
			good = false
			fmt.Fprintf(os.Stderr, "%s: %v\n", pod.Name, failures[i])
		}
	}
	return exit(good)
}
