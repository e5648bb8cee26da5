package nodedrain

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/frontendstatus"
	"github.com/vipgate/vipgate/pkg/kube/publication"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/latest"
)

// probeInterval is the interval of the probes that detect a frontend that restarts or hangs.
const probeInterval = 10 * time.Second

// darkTime is the time without advertisement after which a drain loses nothing: sessions may flap.
const darkTime = 5 * time.Minute

const begun = "begun\n" // the record of a drain that the frontend confirmed

type client = frontendv1.FrontendServiceClient

// Options configure a Drainer. All are required.
type Options struct {
	Client dynamic.Interface
	Pod    string // name of this process's pod
	// AdminSocket is the path of the admin socket of the frontend in the same pod.
	AdminSocket string
	// Record is the path of the file that exists while this package drains the frontend.
	Record string
	// Input has the Trench, its pods and their reports.
	Input *latest.Value[publication.Input]
	// Report is called with the reason why a drain cannot begin or end, or nil.
	Report func(error)
	Log    *slog.Logger
}

// Drainer drains the frontend. It implements task.Task.
type Drainer struct {
	Options
	changed    chan struct{} // has a token after a change of the Nodes
	decision   latest.Value[decision]
	advertised time.Time // the last time at which a drain would have lost VIPs
}

// New returns a Drainer.
func New(options Options) *Drainer {
	return &Drainer{Options: options, changed: make(chan struct{}, 1)}
}

// String implements task.Task.
func (*Drainer) String() string { return "node drain" }

// Run drains and undrains until ctx ends. A drain outlives the process.
func (drainer *Drainer) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return drainer.decide(ctx) })
	group.Go(func() error { return drainer.act(ctx) })
	return group.Wait()
}

// decide keeps the decision current until ctx ends.
func (drainer *Drainer) decide(ctx context.Context) error {
	var labelled *cluster.Mirror // of Nodes with the label; nil unless the Trench asks for drains
	defer func() { labelled.End() }()
	drainer.advertised = time.Now()
	for {
		input, changed := drainer.Input.Get()
		if asks := asksForDrains(input); !asks {
			labelled.End()
			labelled = nil
		} else if labelled == nil {
			labelled = cluster.NewMirror(drainer.changed)
			labelled.Start(ctx, "nodes to drain", drainer.Client.Resource(corev1.SchemeGroupVersion.WithResource("nodes")),
				metav1.ListOptions{LabelSelector: v1alpha1.DrainLabel + "=true"}, nil)
		}
		_, drained := drainer.drains()
		if next := drainer.wait(decide(input, labelled, drainer.Pod, drained)); next != drainer.decision.Load() {
			drainer.decision.Set(next)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-drainer.changed:
		case <-time.After(darkTime / 10):
		}
	}
}

// wait returns a decision, or a drain if the pod is dark for darkTime.
func (drainer *Drainer) wait(next decision) decision {
	if !next.dark {
		drainer.advertised = time.Now()
	} else if time.Since(drainer.advertised) >= darkTime {
		return decision{known: true, drain: true}
	}
	next.dark = false
	return next
}

func (drainer *Drainer) act(ctx context.Context) error {
	for ctx.Err() == nil {
		decision, changed := drainer.decision.Get()
		acting, cancel := context.WithCancel(ctx)
		var action sync.WaitGroup
		action.Go(func() { drainer.carryOut(acting, decision) })
		select {
		case <-changed:
		case <-ctx.Done():
		}
		cancel()
		action.Wait()
	}
	return ctx.Err()
}

// carryOut carries out a decision. It returns when no further action is needed, or ctx ends.
func (drainer *Drainer) carryOut(ctx context.Context, decision decision) {
	step := drainer.undrain
	switch {
	case decision.problem != "":
		drainer.Log.Warn("no drain with the node", "reason", decision.problem)
		drainer.Report(errors.New(decision.problem))
		return
	case !decision.known:
		return
	case decision.drain:
		step = drainer.drain
	}
	retry := backoff.Backoff{Min: 200 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.2}
	for ctx.Err() == nil {
		err := step(ctx)
		if ctx.Err() != nil {
			return
		}
		drainer.Report(err)
		if err == nil {
			return
		}
		_ = retry.Wait(ctx)
	}
}

// drain drains the frontend, and again after each restart of it, until ctx ends. It returns the
// error of a call or of the connection.
func (drainer *Drainer) drain(ctx context.Context) error {
	if recorded, _ := drainer.drains(); !recorded {
		if err := durable.Replace(drainer.Record, nil, 0o640); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	drained := false
	_ = frontendstatus.Follow(ctx, drainer.AdminSocket, probeInterval, func(_ *frontendv1.Status, err error) {
		if err == nil && !drained {
			err = frontendstatus.Call(ctx, drainer.AdminSocket, func(ctx context.Context, frontend client) error {
				// The decision knows the other pods better than the frontend does: whose node leaves.
				_, err := frontend.Drain(ctx, &frontendv1.DrainRequest{All: true, Node: true, Force: true})
				return err
			})
			if err == nil {
				err = durable.Replace(drainer.Record, []byte(begun), 0o640)
			}
			if drained = err == nil; drained {
				drainer.Log.Info("the node is to be drained: all VIPs drain")
				drainer.Report(nil)
			}
		}
		if err != nil {
			cancel(err)
		}
	})
	return context.Cause(ctx)
}

// undrain ends the drain of this package, if any.
func (drainer *Drainer) undrain(ctx context.Context) error {
	if recorded, _ := drainer.drains(); !recorded {
		return nil
	}
	err := frontendstatus.Call(ctx, drainer.AdminSocket, func(ctx context.Context, frontend client) error {
		_, err := frontend.Undrain(ctx, &frontendv1.UndrainRequest{All: true, Node: true})
		return err
	})
	if err != nil {
		return err
	}
	drainer.Log.Info("the node is no longer to be drained: the drain of all VIPs ends")
	if err := os.Remove(drainer.Record); err != nil {
		return fmt.Errorf("failed to remove the record of a drain: %w", err)
	}
	return nil
}

// drains reports whether this package ordered a drain of the frontend, and whether it began.
func (drainer *Drainer) drains() (ordered, drained bool) {
	content, err := os.ReadFile(drainer.Record)
	return !errors.Is(err, fs.ErrNotExist), string(content) == begun
}

// decision is what to do with the frontend. It is comparable.
type decision struct {
	known   bool // whether the label of the node is known
	drain   bool
	problem string // why a drain does not begin; "" if nothing prevents it
	dark    bool   // whether the pod advertises none of the VIPs that prevent it
}

// asksForDrains reports whether the Trench has spec.nodeDrain.
func asksForDrains(input publication.Input) bool {
	if input.Objects.Trench == nil {
		return false
	}
	trench, err := v1alpha1.FromUnstructured(input.Objects.Trench)
	return err == nil && trench.Spec.NodeDrain
}

// decide decides about the frontend of a pod. drains reports whether it is drained already; such a
// drain ends with the label only. labelled is nil if the Trench does not ask for drains.
func decide(input publication.Input, labelled *cluster.Mirror, pod string, drains bool) decision {
	if labelled == nil {
		// Without the Trench, nothing is known about its wishes.
		return decision{known: input.Objects.Trench != nil}
	}
	own := slices.IndexFunc(input.Siblings, func(other *corev1.Pod) bool { return other.Name == pod })
	leaves := func(other *corev1.Pod) bool {
		_, is, _ := labelled.GetByKey(other.Spec.NodeName)
		return is
	}
	listed, err := labelled.State()
	switch {
	case !listed && err != nil:
		return decision{problem: fmt.Sprintf("the Nodes cannot be read: %v", err)}
	case !listed || own < 0:
		return decision{}
	case !leaves(input.Siblings[own]):
		return decision{known: true}
	}
	last, unknown, dark := publication.LastAdvertised(input, pod, leaves)
	switch {
	case drains || len(last) == 0 && unknown == "":
		return decision{known: true, drain: true}
	case unknown != "":
		return decision{known: true, problem: "it is not known what this pod advertises: " + unknown}
	}
	return decision{known: true, dark: dark, problem: fmt.Sprintf(
		"no pod on another node advertises %s: remove the label from another node, or run `frontend drain --all --force`",
		strings.Join(last[:min(len(last), 5)], ", "))}
}
