package meridio2

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func TestGateNames(t *testing.T) {
	if a, b := GateOf(vip.IPv4), GateOf(vip.IPv6); a != "meridio-2.nordix.org/ipv4-connectivity" ||
		b != "meridio-2.nordix.org/ipv6-connectivity" {
		t.Error(a, b)
	}
}

func TestHoldTime(t *testing.T) {
	start := time.Now()
	at := func(d time.Duration) time.Time { return start.Add(d) }
	a, b := session{name: "a"}, session{name: "b"}
	again := session{name: "a", since: start}
	type step struct {
		at        time.Duration
		up        []session
		connected bool
		again     time.Duration // 0 if only a change requires another call
	}
	for name, steps := range map[string][]step{
		"up for 3 s": {
			{0, []session{a}, false, 3 * time.Second},
			{2999 * time.Millisecond, []session{a}, false, 3 * time.Second},
			{3 * time.Second, []session{a}, true, 0},
		},
		"down at once": {
			{0, []session{a}, false, 3 * time.Second},
			{3 * time.Second, []session{a}, true, 0},
			{4 * time.Second, nil, false, 0},
			{4 * time.Second, []session{a}, false, 7 * time.Second},
		},
		"break between two states": {
			{0, []session{a}, false, 3 * time.Second},
			{2 * time.Second, []session{again}, false, 5 * time.Second},
			{3 * time.Second, []session{again}, false, 5 * time.Second},
			{5 * time.Second, []session{again}, true, 0},
		},
		"other gateway": {
			{0, []session{a}, false, 3 * time.Second},
			{time.Second, []session{a, b}, false, 3 * time.Second},
			{2 * time.Second, []session{b}, false, 4 * time.Second},
			{4 * time.Second, []session{b}, true, 0},
		},
		"other gateway while connected": {
			{0, []session{a}, false, 3 * time.Second},
			{3 * time.Second, []session{a}, true, 0},
			{4 * time.Second, []session{a, b}, true, 0},
			{5 * time.Second, []session{b}, true, 0},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var f family
			for _, s := range steps {
				next := f.observe(at(s.at), s.up)
				want := time.Time{}
				if s.again != 0 {
					want = at(s.again)
				}
				if f.connected != s.connected || !next.Equal(want) {
					t.Errorf("at %v: connected %t, again %v, want %+v", s.at, f.connected, next.Sub(start), s)
				}
			}
		})
	}
}

func TestRestartWhileConnected(t *testing.T) {
	f := family{adopted: true, connected: true}
	if f.observe(time.Now(), []session{{name: "a"}}); !f.connected {
		t.Error("a gateway that is up is no longer connected after a restart")
	}
	f = family{adopted: true, connected: true}
	if f.observe(time.Now(), nil); f.connected {
		t.Error("connected without a gateway")
	}
}

func TestSessionsOfFamily(t *testing.T) {
	since := timestamppb.New(time.Unix(1, 0))
	s := &frontendv1.Status{Gateways: []*frontendv1.GatewayStatus{
		{Name: "v4", Address: "169.254.1.1", Up: true, Since: since},
		{Name: "down", Address: "169.254.1.2", Since: since},
		{Name: "held", Address: "fd00::1", Held: true, Usable: true, Since: since},
		{Name: "held and dead", Address: "fd00::2", Held: true, Since: since},
		{Name: "none", Address: "gateway", Up: true},
	}}
	for family, want := range map[vip.Family]string{vip.IPv4: "v4", vip.IPv6: "held"} {
		if up := sessions(s, family); len(up) != 1 || up[0].name != want || !up[0].since.Equal(since.AsTime()) {
			t.Errorf("%v: %+v", family, up)
		}
	}
	if up := sessions(nil, vip.IPv4); len(up) != 0 {
		t.Error(up)
	}
}

func TestConditionNamesTheCause(t *testing.T) {
	for want, c := range map[string]corev1.PodCondition{
		reasonUp:          (&family{connected: true}).condition("x", nil),
		reasonDown:        (&family{}).condition("x", nil),
		reasonHold:        (&family{seen: map[session]time.Time{{}: {}}}).condition("x", nil),
		reasonUnreachable: (&family{}).condition("x", context.DeadlineExceeded),
	} {
		if c.Reason != want || c.Message == "" || (c.Status == corev1.ConditionTrue) != (want == reasonUp) {
			t.Errorf("%s: %+v", want, c)
		}
	}
}

// api is an API server that accepts writes without storing them.
type api struct {
	*fake.FakeDynamicClient
	writes []map[string]any
	answer func(n int) error // nil accepts all writes
}

func newAPI() *api {
	a := &api{FakeDynamicClient: fake.NewSimpleDynamicClient(runtime.NewScheme())}
	take := func(action clienttesting.Action) (bool, runtime.Object, error) {
		body := map[string]any{}
		switch action := action.(type) {
		case clienttesting.PatchAction:
			if err := json.Unmarshal(action.GetPatch(), &body); err != nil {
				return true, nil, err
			}
		case clienttesting.CreateAction:
			body = action.GetObject().(*unstructured.Unstructured).Object
		}
		a.writes = append(a.writes, body)
		if a.answer != nil {
			if err := a.answer(len(a.writes)); err != nil {
				return true, nil, err
			}
		}
		return true, &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Pod"}}, nil
	}
	a.PrependReactor("patch", "*", take)
	a.PrependReactor("create", "*", take)
	return a
}

// gatedPod returns a Pod with the gate of IPv4 and the status of its condition; "" without a
// condition.
func gatedPod(version string, live corev1.ConditionStatus) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a-0", Namespace: "ns", UID: "uid", ResourceVersion: version}}
	p.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: GateOf(vip.IPv4)}}
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	if live != "" {
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: GateOf(vip.IPv4), Status: live})
	}
	return p
}

func newGates(a *api, reported *error) *Gates {
	return NewGates(Options{
		Client: a, Pod: "a-0", Report: func(err error) { *reported = err }, Log: slog.New(slog.DiscardHandler),
	})
}

// After a start, a gate that is true stays true; any other gate waits for the hold time.
func TestGateAtTheStart(t *testing.T) {
	up := state{status: &frontendv1.Status{Gateways: []*frontendv1.GatewayStatus{
		{Name: "a", Address: "169.254.1.1", Up: true, Since: timestamppb.New(time.Unix(1, 0))},
		{Name: "b", Address: "fd00::1", Up: true, Since: timestamppb.New(time.Unix(1, 0))}, // has no gate
	}}}
	for live, want := range map[corev1.ConditionStatus][]string{
		"":                      {"False", "False", "True"},
		corev1.ConditionUnknown: {"False", "False", "True"},
		corev1.ConditionFalse:   {"", "", "True"},
		corev1.ConditionTrue:    {"", "", ""},
	} {
		t.Run(string(live), func(t *testing.T) {
			a := newAPI()
			var reported error
			g := newGates(a, &reported)
			begin := time.Now()
			if again := g.apply(t.Context(), begin, Input{}, up); !again.IsZero() || len(a.writes) > 0 {
				t.Error("written before the objects are known")
			}
			input := Input{Known: true, Pod: gatedPod("1", live)}
			if again := g.apply(t.Context(), begin, input, state{}); !again.IsZero() || len(a.writes) > 0 {
				t.Error("written before the frontend is known")
			}
			last := ""
			for i, d := range []time.Duration{0, holdTime - time.Millisecond, holdTime} {
				again := g.apply(t.Context(), begin.Add(d), input, up)
				if n := len(a.writes); n > 0 {
					conditions := a.writes[n-1]["status"].(map[string]any)["conditions"].([]any)
					c := conditions[0].(map[string]any)
					if last = c["status"].(string); len(conditions) != 1 || c["type"] != string(GateOf(vip.IPv4)) {
						t.Errorf("written are %v", conditions)
					}
					if uid := a.writes[n-1]["metadata"].(map[string]any)["uid"]; uid != "uid" {
						t.Errorf("written to the Pod %v", uid)
					}
				}
				if last != want[i] || reported != nil {
					t.Errorf("after %v: %q, want %q, error %v", d, last, want[i], reported)
				}
				if live != corev1.ConditionTrue && i < 2 && !again.Equal(begin.Add(holdTime)) {
					t.Errorf("after %v: looks again after %v", d, again.Sub(begin))
				}
			}
		})
	}
}

// A write is not repeated before the watch returns it. A condition that another writer changed is
// restored, and a refused write is retried with back-off.
func TestGateIsWrittenOnce(t *testing.T) {
	a := newAPI()
	var reported error
	g := newGates(a, &reported)
	down := state{err: errors.New("connection refused")}
	now := time.Now()
	for range 3 {
		g.apply(t.Context(), now, Input{Known: true, Pod: gatedPod("1", corev1.ConditionTrue)}, down)
	}
	if len(a.writes) != 1 {
		t.Fatalf("%d writes, want 1", len(a.writes))
	}
	g.apply(t.Context(), now, Input{Known: true, Pod: gatedPod("2", corev1.ConditionFalse)}, down)
	if len(a.writes) != 1 {
		t.Errorf("%d writes after the watch", len(a.writes))
	}
	a.answer = func(int) error {
		return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "a-0", errors.New("no"))
	}
	changed := Input{Known: true, Pod: gatedPod("3", corev1.ConditionTrue)}
	for range 3 {
		again := g.apply(t.Context(), time.Now(), changed, down)
		if again.IsZero() || !apierrors.IsForbidden(reported) {
			t.Errorf("looks again at %v, reported %v", again, reported)
		}
	}
	if len(a.writes) != 2 {
		t.Errorf("%d writes, want one more: the others are too early", len(a.writes)-1)
	}
	a.answer = nil
	g.apply(t.Context(), time.Now().Add(time.Second), changed, down)
	if len(a.writes) != 3 || reported != nil {
		t.Errorf("%d writes, reported %v", len(a.writes), reported)
	}
	if g.apply(t.Context(), now, Input{Known: true}, down); reported == nil {
		t.Error("a missing Pod is not reported")
	}
}

// The back-off of refused writes increases until a write is accepted. A changed state of a gate
// does not wait for it.
func TestNewStateOfGateDoesNotWait(t *testing.T) {
	a := newAPI()
	var reported error
	g := newGates(a, &reported)
	refuse := func(int) error {
		return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "a-0", errors.New("no"))
	}
	down := state{err: errors.New("connection refused")}
	up := state{status: &frontendv1.Status{Gateways: []*frontendv1.GatewayStatus{
		{Name: "a", Address: "169.254.1.1", Up: true, Since: timestamppb.New(time.Unix(1, 0))},
	}}}
	live := Input{Known: true, Pod: gatedPod("1", corev1.ConditionUnknown)}
	// write applies a state after the back-off of the last write, and checks the next back-off.
	now := time.Now()
	write := func(s state, n int) time.Duration {
		t.Helper()
		before := len(a.writes)
		again := g.apply(t.Context(), now, live, s)
		if len(a.writes) != before+n {
			t.Errorf("%d writes, want %d", len(a.writes)-before, n)
		}
		if again.IsZero() {
			return 0
		}
		wait := time.Until(again)
		now = again
		return wait
	}
	a.answer = refuse
	first := write(down, 1)
	var last time.Duration
	for range 8 {
		last = write(down, 1)
	}
	if first <= 0 || last < 10*first {
		t.Errorf("the first wait is %v, the ninth %v", first, last)
	}
	early := now.Add(-last)
	now = early
	write(down, 0) // it waits
	now = early
	g.families[vip.IPv4] = family{adopted: true, connected: true}
	if again := write(up, 1); again > 2*first {
		t.Errorf("another state waits %v after its first write", again)
	}
	a.answer = nil
	write(up, 1)
	a.answer = refuse
	live.Pod = gatedPod("2", corev1.ConditionFalse) // changed by another writer
	if again := write(up, 1); again > 2*first {
		t.Errorf("%v after a write that was accepted", again)
	}
}

// Each refusal has one Event, also if the API server rejects it at first. A refusal that recurs
// after it was resolved has a new Event.
func TestEventOfRefusal(t *testing.T) {
	a := newAPI()
	e := NewEvents(Options{Client: a, Pod: "a-0", Log: slog.New(slog.DiscardHandler)})
	problem := func(name, message string) translation.Problem {
		return translation.Problem{
			Object: corev1.ObjectReference{Kind: "GatewayRouter", Namespace: "ns", Name: name, UID: types.UID(name)},
			Reason: "Invalid", Message: message,
		}
	}
	all := []translation.Problem{problem("a", "x"), problem("b", "y")}
	a.answer = func(n int) error {
		switch n {
		case 1:
			return errors.New("connection refused")
		case 3:
			return apierrors.NewAlreadyExists(schema.GroupResource{Resource: "events"}, "a") // sent by another pod
		}
		return nil
	}
	if err := e.send(t.Context(), all); err == nil {
		t.Error("no error")
	}
	for range 2 {
		harness.Check(t, e.send(t.Context(), all))
	}
	if len(a.writes) != 3 {
		t.Fatalf("%d writes, want a, b and again a", len(a.writes))
	}
	name := func(i int) any { return a.writes[i]["metadata"].(map[string]any)["name"] }
	if name(0) != name(2) || name(0) == name(1) {
		t.Errorf("names are %v, %v, %v", name(0), name(1), name(2))
	}
	if note, regarding := a.writes[1]["note"], a.writes[1]["regarding"].(map[string]any); note != "y" ||
		regarding["uid"] != "b" || a.writes[1]["type"] != "Warning" || a.writes[1]["reason"] != "Invalid" {
		t.Errorf("the Event is %v", a.writes[1])
	}
	for _, now := range [][]translation.Problem{all[:1], all, {problem("a", "z"), all[1]}} {
		harness.Check(t, e.send(t.Context(), now))
	}
	if len(a.writes) != 5 { // b again, and a with another message
		t.Errorf("%d writes, want 5", len(a.writes))
	}
}

func TestRefusalsAndTheirNames(t *testing.T) {
	of := func(name, reason string, accepted bool) translation.Verdict {
		return translation.Verdict{
			Object: corev1.ObjectReference{Name: name, UID: types.UID(name)}, Accepted: accepted, Reason: reason, Message: "m",
		}
	}
	names := func(r translation.Result) (all string) {
		for _, p := range refusals(r) {
			all += p.Object.Name + " "
		}
		return all
	}
	router := translation.ServiceVerdict{Verdict: of("router", "Invalid", false)}
	partly := translation.ServiceVerdict{Verdict: of("partly", "Accepted", true)}
	partly.Problems = []translation.Problem{{Object: corev1.ObjectReference{Name: "vip"}}}
	for _, c := range []struct {
		result translation.Result
		want   string
	}{
		{translation.Result{Trench: of("gw", "Invalid", false)}, "gw "},
		{translation.Result{Trench: of("gw", ReasonDeleting, false)}, ""},
		{translation.Result{Trench: of("", "Missing", false)}, ""},
		{translation.Result{
			Trench: of("gw", "Valid", true), Services: []translation.ServiceVerdict{router, partly},
		}, "router vip "},
	} {
		if got := names(c.result); got != c.want {
			t.Errorf("refusals are %q, want %q", got, c.want)
		}
	}
	var long translation.Problem
	long.Object.Name = strings.Repeat("a", maxPrefix-1) + ".b" + strings.Repeat("c", 50)
	if name := eventName(long); len(name) != maxPrefix-1+17 || strings.Contains(name, "..") {
		t.Errorf("the Event is called %s", name)
	}
	distinct := map[string]bool{eventName(long): true}
	for i := range 3 {
		other := long
		*[]*string{(*string)(&other.Object.UID), &other.Reason, &other.Message}[i] = "another"
		if distinct[eventName(other)] = true; len(distinct) != i+2 {
			t.Errorf("names do not follow the refusal: %v", distinct)
		}
	}
}
