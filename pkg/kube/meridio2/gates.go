package meridio2

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/kube/frontendstatus"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// holdTime is how long a session must be up without interruption for its family to be connected.
	holdTime = 3 * time.Second
	// writeTimeout is the timeout of a write, and bounds the time to stop.
	writeTimeout = 5 * time.Second
	// probeInterval is the interval of the probes that detect a hanging frontend.
	probeInterval = 2 * time.Second
	// manager is the field manager of all writes.
	manager = "vipgate"
)

// Reasons of the conditions.
const (
	reasonUp          = "GatewayUp"
	reasonHold        = "GatewayHoldTime"
	reasonDown        = "NoGatewayUp"
	reasonUnreachable = "FrontendUnreachable"
)

// GateOf returns the type of the readiness gate of a family.
func GateOf(f vip.Family) corev1.PodConditionType {
	return corev1.PodConditionType(Group + "/" + f.String() + "-connectivity")
}

// Input holds the inputs of Gates and Events. It is zero before the first translation.
type Input struct {
	Known  bool
	Pod    *corev1.Pod // the pod of this process; nil if it does not exist
	Result translation.Result
}

// Options configure Gates and Events. All are required.
type Options struct {
	Client dynamic.Interface
	Pod    string // name of this process's pod
	// AdminSocket is the path of the admin socket of the frontend in the same pod.
	AdminSocket string
	Input       *latest.Value[Input]
	// Report is called with the result of each attempt to set the gates.
	Report func(error)
	Log    *slog.Logger
}

// Gates maintains the conditions of the pod's readiness gates. A family becomes connected when
// one of its gateways has been up for 3 s without interruption. It is disconnected when none of
// them is up, or when the frontend does not answer. Only gates that the Pod declares are set. As
// in Meridio 2, the gate of a family without gateways is false. A condition that is true at the
// start stays true while a gateway is up, because a restart of this process does not interrupt
// sessions. It implements task.Task.
type Gates struct {
	Options
	state    latest.Value[state]
	families [len(vip.Families)]family
	wrote    map[corev1.PodConditionType]written

	wanted   [len(vip.Families)]corev1.ConditionStatus
	retry    backoff.Backoff
	notUntil time.Time // earliest time of the next write after a failure
	throttle logs.Throttle
}

// state is the frontend's last status, or the connection's error. Both are zero before an answer.
type state struct {
	status *frontendv1.Status
	err    error
}

// written is the status of a condition, and the version of the Pod that the write was based on.
type written struct {
	status  corev1.ConditionStatus
	version string
}

// NewGates returns a task that sets the readiness gates.
func NewGates(o Options) *Gates {
	return &Gates{
		Options: o, wrote: map[corev1.PodConditionType]written{},
		retry: backoff.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.1},
	}
}

// String implements task.Task.
func (*Gates) String() string { return "readiness gates" }

// Run sets the gates until ctx ends, and returns ctx's error. Failures are retried.
func (g *Gates) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return frontendstatus.Follow(ctx, g.AdminSocket, probeInterval, func(s *frontendv1.Status, err error) {
			g.state.Set(state{s, err})
		})
	})
	group.Go(func() error { return g.set(ctx) })
	return group.Wait()
}

func (g *Gates) set(ctx context.Context) error {
	for {
		input, changed := g.Input.Get()
		state, reported := g.state.Get()
		again := g.apply(ctx, time.Now(), input, state)
		var due <-chan time.Time // nil without a deadline
		if !again.IsZero() {
			due = time.After(time.Until(again))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-reported:
		case <-due:
		}
	}
}

// apply writes the conditions that differ. It returns the time to call it again without a change,
// or zero if only a change requires it.
func (g *Gates) apply(ctx context.Context, now time.Time, input Input, s state) (again time.Time) {
	sooner := func(t time.Time) {
		if !t.IsZero() && (again.IsZero() || t.Before(again)) {
			again = t
		}
	}
	// Keep the conditions of an earlier process until both inputs are known.
	if s == (state{}) || !input.Known {
		return again
	}
	if input.Pod == nil {
		g.report(fmt.Errorf("the own Pod %s does not exist: set --pod-name", g.Pod))
		return again
	}
	var differ []corev1.PodCondition
	var wanted [len(vip.Families)]corev1.ConditionStatus
	for _, family := range vip.Families {
		kind := GateOf(family)
		if !declares(input.Pod, kind) {
			continue
		}
		f, live := &g.families[family], g.live(input.Pod, kind)
		if !f.adopted {
			// Keep a true condition of an earlier process: its sessions may still be up.
			f.adopted, f.connected = true, live == corev1.ConditionTrue
		}
		// Call again at the end of the hold time.
		sooner(f.observe(now, sessions(s.status, family)))
		c := f.condition(kind, s.err)
		wanted[family] = c.Status
		if c.Status != live {
			differ = append(differ, c)
		}
	}
	// A new state must not wait for the back-off of the last one.
	if wanted != g.wanted {
		g.wanted, g.notUntil = wanted, time.Time{}
		g.retry.Reset()
	}
	switch {
	case len(differ) == 0:
		g.report(nil)
	case now.Before(g.notUntil):
		sooner(g.notUntil)
	default:
		err := g.write(ctx, input.Pod, differ)
		// A write that the end of Run cancels is not a failure.
		if ctx.Err() != nil {
			return again
		}
		g.report(err)
		if err != nil {
			g.notUntil = time.Now().Add(g.retry.Next())
			sooner(g.notUntil)
		} else {
			g.retry.Reset()
		}
	}
	return again
}

func (g *Gates) report(err error) {
	g.Report(err)
	switch {
	case apierrors.IsForbidden(err):
		g.throttle.Log(g.Log.Error, "", "RBAC does not allow to patch the own Pod; bind the Role of vipgate",
			"resource", "pods/status", "error", err)
	case err != nil:
		g.throttle.Log(g.Log.Warn, "", "readiness gates not set, retrying", "error", err)
	}
}

func declares(pod *corev1.Pod, kind corev1.PodConditionType) bool {
	return slices.ContainsFunc(pod.Spec.ReadinessGates,
		func(g corev1.PodReadinessGate) bool { return g.ConditionType == kind })
}

// live returns the status of a condition, or "" without it. The last write takes precedence until
// the watch returns a new version of the Pod.
func (g *Gates) live(pod *corev1.Pod, kind corev1.PodConditionType) corev1.ConditionStatus {
	if w, ok := g.wrote[kind]; ok && w.version == pod.ResourceVersion {
		return w.status
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == kind {
			return c.Status
		}
	}
	return ""
}

// write patches only the given conditions in the status of the Pod.
func (g *Gates) write(ctx context.Context, pod *corev1.Pod, conditions []corev1.PodCondition) error {
	patch, err := json.Marshal(map[string]any{
		// The API server rejects the patch if a new Pod has the same name.
		"metadata": map[string]any{"uid": pod.UID}, "status": map[string]any{"conditions": conditions},
	})
	if err != nil {
		return fmt.Errorf("failed to encode conditions: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	// A strategic merge patch merges conditions by type, and keeps the conditions of the kubelet.
	_, err = g.Client.Resource(corev1.SchemeGroupVersion.WithResource("pods")).Namespace(pod.Namespace).
		Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{FieldManager: manager}, "status")
	if err != nil {
		return fmt.Errorf("failed to set the readiness gates of Pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	for _, c := range conditions {
		g.wrote[c.Type] = written{c.Status, pod.ResourceVersion}
		g.Log.Info("readiness gate set", "gate", c.Type, "status", c.Status, "reason", c.Reason)
	}
	return nil
}

// session identifies one session of a gateway; a new session has a different start time.
type session struct {
	name, address string
	since         time.Time
}

// sessions returns the sessions of a family that are up. The BFD session of a static router also
// counts while the frontend holds it down (usable): replies have a route, and the gate must not
// wait until a VIP attracts requests. Older frontends report only up.
func sessions(s *frontendv1.Status, f vip.Family) (up []session) {
	for _, g := range s.GetGateways() {
		a, err := netip.ParseAddr(g.GetAddress())
		if err == nil && (g.GetUp() || g.GetUsable()) && vip.FamilyOf(a) == f {
			up = append(up, session{g.GetName(), g.GetAddress(), g.GetSince().AsTime()})
		}
	}
	return up
}

// family is the connectivity of an address family.
type family struct {
	adopted   bool // connected was initialized from the Pod's condition
	connected bool
	seen      map[session]time.Time // first observation of each session that is up, monotonic
}

// observe updates the family with the sessions that are up. It returns the end of the first hold
// time, or zero if only a change requires another call.
func (f *family) observe(now time.Time, up []session) (again time.Time) {
	seen := make(map[session]time.Time, len(up))
	for _, s := range up {
		since, ok := f.seen[s]
		if !ok {
			// The hold time uses this process's monotonic clock, not the clock of the frontend.
			since = now
		}
		seen[s] = since
		if due := since.Add(holdTime); again.IsZero() || due.Before(again) {
			again = due
		}
	}
	f.seen = seen
	// The hold time applies to a disconnected family; a connected one needs only one session.
	f.connected = len(up) > 0 && (f.connected || !now.Before(again))
	if f.connected {
		return time.Time{}
	}
	return again
}

// condition returns the condition of a gate. err is the connection error of the frontend, if any.
func (f *family) condition(kind corev1.PodConditionType, err error) corev1.PodCondition {
	c := corev1.PodCondition{Type: kind, Status: corev1.ConditionFalse, LastTransitionTime: metav1.Now()}
	switch {
	case f.connected:
		c.Status, c.Reason, c.Message = corev1.ConditionTrue, reasonUp, "a gateway of this family is up"
	case err != nil:
		c.Reason, c.Message = reasonUnreachable, "frontend does not answer: "+health.Reason(err)
	case len(f.seen) > 0:
		c.Reason, c.Message = reasonHold, fmt.Sprintf("no gateway of this family has been up for %v yet", holdTime)
	default:
		c.Reason, c.Message = reasonDown, "no gateway of this family is up"
	}
	return c
}
