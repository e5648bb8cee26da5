package kube

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/kube/bgpsessions"
	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/meridio2"
	"github.com/vipgate/vipgate/pkg/kube/nodedrain"
	"github.com/vipgate/vipgate/pkg/kube/publication"
	"github.com/vipgate/vipgate/pkg/kube/siblings"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/turn"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	shell "github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/speaker/frrk8s"
	"github.com/vipgate/vipgate/pkg/task"
)

// Options configure kube. Every field is required unless stated otherwise.
type Options struct {
	shell.Settings
	// Config configures the client of the API server.
	Config *rest.Config
	// Namespace and Trench name the Trench, PodName this process's Pod in the same namespace.
	Namespace, Trench, PodName string
	// Gateway replaces Trench: it names a Gateway of Meridio 2, whose router role this process takes.
	Gateway string
	// TrenchFile is the path of the file that is written; its directory exists. KeyDir is a different
	// directory that holds only key files.
	TrenchFile, KeyDir string
	// FrontendSocket is the path of the admin socket of the frontend in the same Pod.
	FrontendSocket string
	// FRRK8sNamespace is the namespace of frr-k8s, whose sessions on the node of this process are
	// written for the frontend; "" if the frontend does not read them. Only with Trench.
	FRRK8sNamespace string
}

// Health services of kube, in addition to the overall service "".
const (
	Liveness = "Liveness"
	// Readiness serves if TrenchFile does: lb and frontend can start.
	Readiness  = "Readiness"
	TrenchFile = "TrenchFile" // exists
	APIServer  = "APIServer"  // the caches are current
	Trench     = "Trench"     // exists and is accepted
	Written    = "Written"    // the last write succeeded
	// Publication serves while status, Events and the report of this pod can be written.
	Publication = "Publication"
	// NodeDrain serves unless the node of this pod is to be drained and the drain does not begin.
	NodeDrain = "NodeDrain"
	// BGPSessions serves unless the sessions of frr-k8s cannot be read or written.
	BGPSessions = "BGPSessions"
)

type process struct {
	Options
	shell     *shell.Process
	cluster   *cluster.Cluster
	agent     *agent
	health    *health.Server
	metrics   *metrics.Kube
	evaluated latest.Value[publication.Input]
	publisher *publication.Publisher // nil with a Gateway
	meridio2  latest.Value[meridio2.Input]
	changed   latest.Value[struct{}] // set after each change of the admin status

	mu     sync.Mutex
	counts counts
}

// counts holds the counters of translations and writes since the start.
type counts struct {
	translations, writes, failures uint64
	written                        time.Time
	err                            error // of the last write
}

// Run watches and writes until stop fires or ctx ends. It leaves the trench and key files in place.
func Run(ctx context.Context, o Options, stop <-chan struct{}) error {
	p, err := newProcess(o)
	if err != nil {
		return err
	}
	return p.run(ctx, stop)
}

func (p *process) run(ctx context.Context, stop <-chan struct{}) error {
	defer p.shell.Close()
	tasks := []task.Task{p.cluster, p.agent, observer{p}}
	if p.Gateway == "" {
		client, err := p.dynamic()
		if err != nil {
			return err
		}
		tasks = append(tasks, p.publisher, p.agent.turns, p.nodeDrainer(client), p.siblings())
		if p.FRRK8sNamespace != "" {
			tasks = append(tasks, p.bgpSessions(client))
		}
	} else {
		more, err := p.meridio2Tasks()
		if err != nil {
			return err
		}
		tasks = append(tasks, more...)
	}
	err := p.shell.Listen(ctx, shell.Services{Admin: func(r grpc.ServiceRegistrar) {
		kubev1.RegisterKubeServiceServer(r, newAdmin(p))
	}})
	if err != nil {
		return err
	}
	return p.shell.Run(ctx, stop, shell.Plan{Stages: [][]task.Task{tasks}})
}

// dynamic returns a client for watches of any resource.
func (p *process) dynamic() (dynamic.Interface, error) {
	config := p.cluster.Config()
	config.Timeout = 0 // a timeout would also end watches
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("failed to create a client of the API server %s: %w", p.Config.Host, err)
	}
	return client, nil
}

// nodeDrainer returns the task that drains the frontend with its node.
func (p *process) nodeDrainer(client dynamic.Interface) task.Task {
	return nodedrain.New(nodedrain.Options{
		Client: client, Pod: p.PodName, AdminSocket: p.FrontendSocket, Record: p.TrenchFile + ".node-drain",
		Input: p.publisher.Input(), Report: p.health.Reporter(NodeDrain), Log: p.Log,
	})
}

// bgpSessions returns the task that writes the sessions of frr-k8s for the frontend.
func (p *process) bgpSessions(client dynamic.Interface) task.Task {
	return bgpsessions.New(bgpsessions.Options{
		Client: client, Namespace: p.FRRK8sNamespace, Pod: p.PodName, Path: p.TrenchFile + frrk8s.Suffix,
		Input:   p.publisher.Input(),
		Current: func() bool { return p.cluster.State().Load().Stale.Since.IsZero() },
		Report:  p.health.Reporter(BGPSessions), Log: p.Log,
	})
}

// siblings returns the task that notifies the frontend which VIPs the other pods advertise.
func (p *process) siblings() task.Task {
	return siblings.New(siblings.Options{
		Pod: p.PodName, AdminSocket: p.FrontendSocket, Input: p.publisher.Input(), Log: p.Log,
		// While reports cannot be written, those of other pods do not age.
		Current: func() bool {
			return p.cluster.State().Load().Stale.Since.IsZero() && p.publisher.State().Load().ReportError == nil
		},
	})
}

func newProcess(o Options) (*process, error) {
	p := &process{Options: o}
	var err error
	p.cluster, err = cluster.New(cluster.Options{
		Config: o.Config, Namespace: o.Namespace, Trench: o.Trench, Gateway: o.Gateway, Pod: o.PodName, Log: o.Log,
	})
	if err != nil {
		return nil, err
	}
	p.metrics = metrics.NewKube(o.Version, p.metricState)
	p.shell = shell.New(o.Settings, p.metrics)
	p.health = p.shell.Health
	p.health.Define(Readiness, TrenchFile)
	p.agent = &agent{
		cluster: p.cluster, translator: o.translator(), log: o.Log,
		files: &files{trench: o.TrenchFile, keyDir: o.KeyDir}, translated: p.translated,
	}
	// With a Gateway, the tasks of the Meridio 2 router report instead; see meridio2Tasks.
	if o.Gateway == "" {
		p.publisher, err = publication.New(publication.Options{
			Config: p.cluster.Config(), Namespace: o.Namespace, Trench: o.Trench, Pod: o.PodName,
			AdminSocket: o.FrontendSocket, Input: &p.evaluated, Metrics: p.metrics, Log: o.Log,
		})
		if err != nil {
			return nil, err
		}
		p.metrics.Leader(false) // also a pod that never becomes the leader has the series
		p.agent.turns = turn.New(turn.Options{
			Leases: p.publisher.Leases(), Namespace: o.Namespace, Trench: o.Trench, Pod: o.PodName,
			FrontendSocket: o.FrontendSocket, Log: o.Log,
		})
	}
	// lb and frontend can start with the file of a previous process.
	p.health.Set(TrenchFile, p.agent.files.exists(), "the first translation of all objects was not written yet")
	p.health.Set(Trench, false, "not read yet")
	p.health.Set(APIServer, false, "no cache is synced yet")
	for _, name := range []string{Liveness, Written, Publication, NodeDrain, BGPSessions, shell.AdminSocket} {
		p.health.Report(name, "")
	}
	return p, nil
}

// translated records a translation in metrics, counters and health, and passes it to the publisher.
func (p *process) translated(s cluster.Snapshot, r translation.Result, o outcome) {
	p.metrics.Translated(o.took)
	// Status and metrics read the counters concurrently.
	p.mu.Lock()
	p.counts.translations++
	p.counts.err = o.err
	if o.err != nil {
		p.counts.failures++
	} else if o.wrote {
		p.counts.writes++
		p.counts.written = time.Now()
		p.metrics.Written(o.latency)
		p.Log.Info("trench file written", "file", p.TrenchFile, "bytes", len(r.File), "latency", o.latency)
	}
	p.mu.Unlock()
	p.health.Report(Written, logs.Text(o.err))
	var refused error
	if !r.Trench.Accepted {
		refused = errors.New(r.Trench.Reason + ": " + r.Trench.Message)
	}
	p.health.Report(Trench, logs.Text(refused))
	// A refused Trench leaves the older file, which is enough for Readiness.
	if p.agent.files.exists() {
		p.health.Report(TrenchFile, "")
	}
	// Publish after the write: the verdict must not precede the file that it describes.
	p.evaluated.Set(publication.Input{Objects: s.Objects, Result: r, Siblings: s.Siblings})
	p.meridio2.Set(meridio2Input(s, r))
	p.changed.Set(struct{}{})
}

// observer is a task that sets the health services of the API server and of the publication.
type observer struct{ *process }

// String implements task.Task.
func (observer) String() string { return "observer" }

// Run updates the health services until ctx ends.
func (o observer) Run(ctx context.Context) error {
	for {
		s, changed := o.cluster.State().Get()
		// Until the first list or the first failure, the initial reason holds.
		if !s.Synced.IsZero() || !s.Stale.Since.IsZero() {
			o.health.Report(APIServer, s.Stale.Cause)
		}
		// A nil channel blocks forever: with a Gateway there is no publisher.
		var publishing <-chan struct{}
		if o.publisher != nil {
			var published publication.State
			published, publishing = o.publisher.State().Get()
			o.health.Report(Publication, logs.Text(errors.Join(published.WriteError, published.ReportError)))
		}
		o.changed.Set(struct{}{})
		select {
		case <-changed:
		case <-publishing:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
