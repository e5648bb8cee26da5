package kube

import (
	"fmt"

	"k8s.io/client-go/dynamic"

	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/meridio2"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/task"
)

// ReadinessGates is the health service that serves while the readiness gates of Meridio 2 are set.
const ReadinessGates = "ReadinessGates"

// translator returns the function that translates a snapshot into the trench file.
func (o *Options) translator() func(cluster.Snapshot) translation.Result {
	if o.Gateway != "" {
		return func(s cluster.Snapshot) translation.Result { return meridio2.Translate(s.Meridio2) }
	}
	options := translation.Options{KeyDir: o.KeyDir}
	return func(s cluster.Snapshot) translation.Result { return translation.Translate(s.Objects, options) }
}

// meridio2Input returns the inputs of the Meridio 2 router tasks.
func meridio2Input(s cluster.Snapshot, r translation.Result) meridio2.Input {
	input := meridio2.Input{Known: true, Result: r}
	// With a Gateway, the cluster watches only the own pod.
	if len(s.Siblings) > 0 {
		input.Pod = s.Siblings[0]
	}
	return input
}

// meridio2Tasks returns the additional tasks of the Meridio 2 router role.
func (p *process) meridio2Tasks() ([]task.Task, error) {
	client, err := dynamic.NewForConfig(p.cluster.Config())
	if err != nil {
		return nil, fmt.Errorf("failed to create a client of the API server %s: %w", p.Config.Host, err)
	}
	p.health.Set(ReadinessGates, false, "not set yet")
	o := meridio2.Options{
		Client: client, Pod: p.PodName, AdminSocket: p.FrontendSocket, Input: &p.meridio2,
		Report: p.health.Reporter(ReadinessGates), Log: p.Log,
	}
	return []task.Task{meridio2.NewGates(o), meridio2.NewEvents(o)}, nil
}
