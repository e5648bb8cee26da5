package publication

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/latest"
)

// write is a write that the fake API server received.
type write struct {
	at             time.Time
	verb, resource string
	name           string
	body           map[string]any
}

// api is an API server that accepts writes without storing them.
type api struct {
	*fake.FakeDynamicClient
	mu      sync.Mutex
	version int
	writes  []write
	// answer is called with the number of the write, starting at 1; nil accepts all.
	answer func(n int, w write) error
	// delay is called before each patch, concurrently for several ones; nil without delays.
	delay func(name string)
}

// Resource returns a client that delays patches before the fake, which handles one at a time.
func (a *api) Resource(r schema.GroupVersionResource) dynamic.NamespaceableResourceInterface {
	return delayedResource{a.FakeDynamicClient.Resource(r), a}
}

type delayedResource struct {
	dynamic.NamespaceableResourceInterface
	api *api
}

func (r delayedResource) Namespace(namespace string) dynamic.ResourceInterface {
	return delayedPatches{r.NamespaceableResourceInterface.Namespace(namespace), r.api}
}

type delayedPatches struct {
	dynamic.ResourceInterface
	api *api
}

func (p delayedPatches) Patch(ctx context.Context, name string, kind types.PatchType, data []byte,
	o metav1.PatchOptions, subresources ...string,
) (*unstructured.Unstructured, error) {
	if p.api.delay != nil {
		p.api.delay(name)
	}
	return p.ResourceInterface.Patch(ctx, name, kind, data, o, subresources...)
}

func newAPI() *api {
	a := &api{FakeDynamicClient: fake.NewSimpleDynamicClient(runtime.NewScheme()), version: 100}
	take := func(action clienttesting.Action) (bool, runtime.Object, error) {
		w := write{at: time.Now(), verb: action.GetVerb(), resource: action.GetResource().Resource}
		switch action := action.(type) {
		case clienttesting.PatchAction:
			w.name = action.GetName()
			if err := json.Unmarshal(action.GetPatch(), &w.body); err != nil {
				return true, nil, err
			}
		case clienttesting.CreateAction:
			u := action.GetObject().(*unstructured.Unstructured)
			w.name, w.body = u.GetName(), u.Object
		}
		a.mu.Lock()
		a.writes = append(a.writes, w)
		n, answer := len(a.writes), a.answer
		a.version++
		u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Service"}}
		u.SetResourceVersion(strconv.Itoa(a.version))
		a.mu.Unlock()
		if answer != nil {
			if err := answer(n, w); err != nil {
				return true, nil, err
			}
		}
		return true, u, nil
	}
	a.PrependReactor("patch", "*", take)
	a.PrependReactor("create", "*", take)
	return a
}

// of returns the writes of a resource.
func (a *api) of(resource string) (found []write) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, w := range a.writes {
		if w.resource == resource {
			found = append(found, w)
		}
	}
	return found
}

func (a *api) leader() *leader {
	o := Options{Metrics: &counters{n: map[string]int{}}, Pod: "a-0", Log: slog.New(slog.DiscardHandler)}
	return newLeader(a, a, o, time.Minute)
}

var (
	errNetwork   = &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	errForbidden = apierrors.NewForbidden(schema.GroupResource{Resource: "services"}, "web", errors.New("no"))
	// errOlderCRD is the answer of Kubernetes 1.37.
	errOlderCRD = &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusInternalServerError, Message: "failed to create typed patch object " +
			"(ns/a; vipgate.io/v1alpha1, Kind=Trench): .status.vips: field not declared in schema",
	}}
)

// wantedStatus returns a desired status that differs from the object with the given version.
func wantedStatus(version string) wanted {
	w := wanted{
		resource: services, object: corev1.ObjectReference{
			APIVersion: "v1", Kind: "Service", Namespace: "ns", Name: "web", UID: "s", ResourceVersion: version,
		},
		status: map[string]any{"conditions": "new"}, kept: map[string]any{"conditions": "kept"},
		conditions: "new", conditionsDiffer: true,
	}
	return w
}

// settleFor calls settle every 100 ms.
func settleFor(t *testing.T, l *leader, o *object, w wanted, d time.Duration) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		_, _ = l.settle(t.Context(), w, o)
	}
}

func newObject() *object {
	o := &object{}
	o.retry.Min, o.retry.Max = 200*time.Millisecond, time.Minute
	return o
}

// A write contains the resource version and the UID of the evaluated object.
func TestWriteIsOfOneObject(t *testing.T) {
	a := newAPI()
	if _, err := a.leader().settle(t.Context(), wantedStatus("7"), newObject()); err != nil {
		t.Fatal(err)
	}
	metadata, _ := a.of("services")[0].body["metadata"].(map[string]any)
	if metadata["uid"] != "s" || metadata["resourceVersion"] != "7" || metadata["name"] != "web" ||
		metadata["namespace"] != "ns" {
		t.Errorf("written to %v", metadata)
	}
	p := &Publisher{write: a}
	own := pod("a-0", both())
	own.UID, own.Namespace = "pod", "ns"
	if err := p.writeReport(t.Context(), own, Report{Time: at.Time}); err != nil {
		t.Fatal(err)
	}
	w := a.of("trenchreports")[0]
	metadata, _ = w.body["metadata"].(map[string]any)
	owners, _ := metadata["ownerReferences"].([]any)
	if owner, _ := owners[0].(map[string]any); len(owners) != 1 || owner["uid"] != "pod" || w.name != "a-0" {
		t.Errorf("the report is written to %s, %v", w.name, w.body)
	}
}

func TestRefusedWriteIsRetriedWithBackOff(t *testing.T) {
	for name, refusal := range map[string]error{
		"forbidden": errForbidden,
		"conflict":  apierrors.NewConflict(schema.GroupResource{Resource: "services"}, "web", errors.New("newer")),
		"network":   errNetwork,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPI()
				a.answer = func(int, write) error { return refusal }
				l, o := a.leader(), newObject()
				settleFor(t, l, o, wantedStatus("7"), 5*time.Second)
				if n := len(a.of("services")); n < 3 || n > 6 {
					t.Errorf("%d attempts in 5 s", n)
				}
				// A success resets the back-off.
				a.answer = nil
				settleFor(t, l, o, wantedStatus("7"), 10*time.Second)
				a.answer = func(int, write) error { return refusal }
				before := len(a.of("services"))
				w := wantedStatus("200")
				w.conditions = "newer"
				settleFor(t, l, o, w, 500*time.Millisecond)
				if n := len(a.of("services")) - before; n != 2 {
					t.Errorf("%d attempts in the first 500 ms of the next refusal, want 2", n)
				}
			})
		})
	}
}

// A refusal is reported until a write succeeds, also during the back-off of the object. A
// different status of the object is written without delay.
func TestRefusalHoldsUntilItIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		a.answer = func(int, write) error { return errForbidden }
		l, o := a.leader(), newObject()
		settleFor(t, l, o, wantedStatus("7"), 20*time.Second)
		before := len(a.of("services"))
		if _, err := l.settle(t.Context(), wantedStatus("7"), o); !apierrors.IsForbidden(err) {
			t.Errorf("while the object waits: %v", err)
		}
		if n := len(a.of("services")); n != before {
			t.Fatal("the object does not wait")
		}
		a.answer = nil
		w := wantedStatus("7")
		w.conditions = "newer"
		if _, err := l.settle(t.Context(), w, o); err != nil || len(a.of("services")) != before+1 {
			t.Errorf("another status: %d writes, %v", len(a.of("services"))-before, err)
		}
	})
}

// A CRD without a field of the status is not an API server that is away. Only vipgate's CRDs are in
// its manifests.
func TestWriteToOlderCRD(t *testing.T) {
	const remedy = "the CRD trenches.vipgate.io is older, apply deployments/kubernetes"
	for _, resource := range []schema.GroupVersionResource{v1alpha1.Resource, gateways} {
		a := newAPI()
		a.answer = func(int, write) error { return errOlderCRD }
		l, o := a.leader(), newObject()
		o.wanted = wantedStatus("7")
		o.wanted.resource = resource
		l.objects[o.wanted.object.UID] = o
		if again, _ := l.process(t.Context(), o.wanted.object.UID); !l.away.IsZero() || again.IsZero() {
			t.Errorf("no writes until %v, again at %v", l.away, again)
		}
		if got := strings.Contains(o.err.Error(), remedy); got != (resource == v1alpha1.Resource) ||
			strings.Contains(o.err.Error(), "is older") != got {
			t.Errorf("%s: %v", resource.Resource, o.err)
		}
	}
}

// Conditions are written even if the addresses are refused.
func TestConditionsOutliveRefusedAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		a.answer = func(_ int, w write) error {
			if status := w.body["status"].(map[string]any); status["addresses"] == "bad" {
				return apierrors.NewInvalid(schema.GroupKind{Kind: "Service"}, "web", nil)
			}
			return nil
		}
		l, o := a.leader(), newObject()
		w := wantedStatus("7")
		w.addresses, w.addressesDiffer = "bad", true
		w.status = map[string]any{"conditions": "new", "addresses": "bad"}
		_, err := l.settle(t.Context(), w, o)
		writes := a.of("services")
		if !apierrors.IsInvalid(err) || len(writes) != 2 || o.conditions != "new" || o.addresses == "bad" {
			t.Fatalf("%v, conditions %q, addresses %q after %d writes", err, o.conditions, o.addresses, len(writes))
		}
		if status := writes[1].body["status"].(map[string]any); status["conditions"] != "kept" {
			t.Errorf("the second write has %v", status)
		}
	})
}

// The status of another writer, which may be a second leader, stays for contestTime. It is
// replaced at most once per restore interval.
func TestContestedStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		l, o := a.leader(), newObject()
		settled := wantedStatus("7")
		settled.conditionsDiffer = false
		settleFor(t, l, o, settled, 100*time.Millisecond)
		// The desired status is unchanged, and the object differs.
		begin := time.Now()
		for version := 8; time.Since(begin) < 90*time.Second; version++ {
			a.mu.Lock()
			a.version = version // another leader replaces the write of this one immediately
			a.mu.Unlock()
			_, _ = l.settle(t.Context(), wantedStatus(strconv.Itoa(version)), o)
			time.Sleep(100 * time.Millisecond)
		}
		writes := a.of("services")
		if len(writes) != 2 {
			t.Fatalf("%d writes in 90 s, want 2", len(writes))
		}
		if d := writes[0].at.Sub(begin); d < contestTime || d > contestTime+200*time.Millisecond {
			t.Errorf("the first write came after %v", d)
		}
		if d := writes[1].at.Sub(writes[0].at); d < time.Minute || d > time.Minute+200*time.Millisecond {
			t.Errorf("the second write came %v after the first", d)
		}
	})
}

// A different desired status is written without delay.
func TestNewStatusIsWrittenWithoutWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		l, o := a.leader(), newObject()
		o.conditions = "old"
		if _, err := l.settle(t.Context(), wantedStatus("7"), o); err != nil || len(a.of("services")) != 1 {
			t.Errorf("%d writes, %v", len(a.of("services")), err)
		}
	})
}

// The watch returns a write within echoTime. An older version after that time comes from an etcd
// that was restored from a backup.
func TestOlderVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		l, o := a.leader(), newObject()
		begin := time.Now()
		settleFor(t, l, o, wantedStatus("7"), echoTime+contestTime+time.Second)
		writes := a.of("services")
		if len(writes) != 2 {
			t.Fatalf("%d writes, want one and another after the backup was restored", len(writes))
		}
		if d := writes[1].at.Sub(begin); d < echoTime {
			t.Errorf("written again after %v, while the watch may bring the write back", d)
		}
	})
}

func TestEventsWaitForTheAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		r := a.leader().recorder
		object := wantedStatus("7").object
		a.answer = func(n int, _ write) error {
			if n <= 2 {
				return errNetwork
			}
			return nil
		}
		r.add(object, []event{{true, "A", "Translate", "a"}, {false, "B", "Advertise", "b"}})
		for range 2 {
			if err := r.flush(t.Context()); err == nil {
				t.Error("no error while the API server is away")
			}
		}
		for range 2 {
			if err := r.flush(t.Context()); err != nil {
				t.Error(err)
			}
		}
		writes := a.of("events")
		var reasons []string
		for _, w := range writes[2:] {
			reasons = append(reasons, w.body["reason"].(string)+" "+w.body["type"].(string))
		}
		if len(reasons) != 2 || reasons[0] != "A Warning" || reasons[1] != "B Normal" {
			t.Errorf("sent after the return: %q", reasons)
		}
		if writes[0].name != writes[2].name {
			t.Error("an attempt whose answer was lost would make a second Event")
		}
		// A repeated Event increments the count of the first one for seriesTime.
		r.add(object, []event{{true, "A", "Translate", "a"}})
		if err := r.flush(t.Context()); err != nil {
			t.Error(err)
		}
		if last := a.of("events")[4]; last.verb != "patch" || last.name != writes[2].name {
			t.Errorf("a repetition is %+v", last)
		}
		time.Sleep(seriesTime + time.Second)
		r.add(object, []event{{true, "A", "Translate", "a"}})
		if err := r.flush(t.Context()); err != nil {
			t.Error(err)
		}
		if last := a.of("events")[5]; last.verb != "create" {
			t.Errorf("after the time of a series: %+v", last)
		}
		// A refused Event does not delay later ones.
		a.answer = func(n int, _ write) error {
			if n == 7 {
				return apierrors.NewBadRequest("no")
			}
			return nil
		}
		r.add(object, []event{{true, "C", "Translate", "c"}, {true, "D", "Translate", "d"}})
		err := r.flush(t.Context())
		if err != nil || len(a.of("events")) != 8 || len(r.pending) > 0 {
			t.Errorf("%d writes, %d pending, %v", len(a.of("events")), len(r.pending), err)
		}
	})
}

// Events of the last writes are sent at the stop. An unreachable API server does not delay the
// stop.
func TestEventsAreSentAtTheStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		l := a.leader()
		l.recorder.add(wantedStatus("7").object, []event{{true, "A", "Translate", "a"}})
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		begin := time.Now()
		l.run(ended, latest.New(Input{}))
		if len(a.of("events")) != 1 || time.Since(begin) > endTimeout {
			t.Errorf("%d Events after %v", len(a.of("events")), time.Since(begin))
		}
	})
}

// If the queue is full, the oldest Events are discarded. A note that is too long is truncated.
func TestPendingEventsAreBounded(t *testing.T) {
	a := newAPI()
	r := a.leader().recorder
	for i := range maxPending + 2 {
		r.add(wantedStatus("7").object, []event{{true, "R", "Translate", strconv.Itoa(i)}})
	}
	first, last := r.pending[0].note, r.pending[len(r.pending)-1].note
	if len(r.pending) != maxPending || first != "2" || last != strconv.Itoa(maxPending+1) {
		t.Errorf("%d pending, from %s to %s", len(r.pending), first, last)
	}
	long := r.event(record{event: event{note: strings.Repeat("ä", maxNote)}})
	if len(long.Note) > maxNote || !strings.HasPrefix(long.Note, "ää") || !utf8.ValidString(long.Note) {
		t.Errorf("the note has %d bytes", len(long.Note))
	}
}

// A difference of the record of targets alone is written once in echoTime, and other differences
// without delay.
func TestTargetsAreWrittenSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		l, o := a.leader(), newObject()
		changes := func(count int, onlyTargets bool) (writes int) {
			before := len(a.of("services"))
			for i := range count {
				w := wantedStatus("200")
				if w.onlyTargets = onlyTargets; !onlyTargets { // or else the rest of the status is unchanged
					w.conditions = fmt.Sprint(i)
				}
				settleFor(t, l, o, w, time.Second)
			}
			return len(a.of("services")) - before
		}
		for _, step := range []struct {
			count       int
			onlyTargets bool
			want        int
		}{{1, true, 1}, {8, true, 0}, {12, true, 2}, {4, false, 4}, {8, true, 0}} {
			if writes := changes(step.count, step.onlyTargets); writes != step.want {
				t.Errorf("%+v: %d writes", step, writes)
			}
		}
	})
}
