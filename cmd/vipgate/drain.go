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
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/pods"
)

// changeTimeout bounds the change of one pod.
const changeTimeout = 15 * time.Second

type drainCommand struct {
	sourceFlags
	Object string `arg:"" name:"pod|vip" help:"Name of a pod, or a VIP such as 20.0.0.1."`
	Force  bool   `help:"Drain also the last advertiser of a VIP." env:"-"`
}

func (c *drainCommand) Run(ctx context.Context, out *cli.Output) error {
	source, err := c.source()
	if err != nil {
		return err
	}
	all, err := pods.List(ctx, source)
	if err != nil {
		return err
	}
	command := []string{"frontend", "drain"}
	vip, err := cli.ParseVIP(c.Object)
	if err == nil {
		// The frontends know the other pods by reports that are some seconds old, and would drain one
		// after another: the last advertiser, too.
		if err := refuse(all, vip); err != nil && !c.Force {
			return err
		}
		command = append(command, vip, "--force")
	} else {
		if all, err = named(all, c.Object); err != nil {
			return err
		}
		command = append(command, "--all")
		if c.Force {
			command = append(command, "--force")
		}
	}
	return change(ctx, out, source, all, command)
}

// refuse returns an error if a drain of a VIP in all pods leaves it without an advertiser.
func refuse(all []pods.Pod, vip string) error {
	var advertisers []string
	configured := false
	for _, pod := range all {
		if pod.Frontend == nil {
			return fmt.Errorf("not drained, because pod %s may advertise %s: %s; --force drains it in the others", pod.Name, vip,
				strings.Join(pod.Problems, "; "))
		}
		at := slices.IndexFunc(pod.Frontend.GetVips(), func(v *frontendv1.VipStatus) bool { return v.GetVip() == vip })
		if at < 0 {
			continue
		}
		configured = true
		switch pod.Frontend.GetVips()[at].GetAdvertisement() {
		case readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED, readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED:
			advertisers = append(advertisers, pod.Name)
		case readinessv1.Advertisement_ADVERTISEMENT_UNSPECIFIED, readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN:
		}
	}
	switch {
	case !configured:
		return fmt.Errorf("no pod has the VIP %s", vip)
	case len(advertisers) > 0:
		return fmt.Errorf("not drained, because no pod would advertise %s: it is drained in all pods, and advertised by %s; "+
			"drain one pod, or add --force", vip, strings.Join(advertisers, ", "))
	}
	return nil
}

// named returns the pod with a name.
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
	sourceFlags
	Object string `arg:"" name:"pod|vip" help:"Name of a pod, or a VIP such as 20.0.0.1."`
}

func (c *undrainCommand) Run(ctx context.Context, out *cli.Output) error {
	source, err := c.source()
	if err != nil {
		return err
	}
	all, err := pods.List(ctx, source)
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
		out.Printf("%s: %s", pod.Name, results[i].String())
		if failures[i] != nil {
			good = false
			fmt.Fprintf(os.Stderr, "%s: %v\n", pod.Name, failures[i])
		}
	}
	return exit(good)
}
