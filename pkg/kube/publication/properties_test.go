package publication

import (
	"errors"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/vipgate/vipgate/pkg/vip"
)

// New addresses are written without delay when another writer has changed the conditions, and new
// conditions when it has changed the addresses, which stay until the end of the delay.
func TestContestDelaysOnlyItsPart(t *testing.T) {
	for name, c := range map[string]struct {
		conditions, addresses string // last written status
		status                string // expected write; "" without a write
	}{
		"conditions of another writer": {"new", "old", "new"},
		"addresses of another writer":  {"old", "new", "kept"},
		"both":                         {"new", "new", ""},
		"none":                         {"old", "old", "new"},
	} {
		a := newAPI()
		l, o := a.leader(), newObject()
		o.conditions, o.addresses = c.conditions, c.addresses
		w := wantedStatus("7")
		w.addresses, w.addressesDiffer = "new", true
		again, err := l.settle(t.Context(), w, o)
		written := ""
		if writes := a.of("services"); len(writes) > 0 {
			written, _ = writes[0].body["status"].(map[string]any)["conditions"].(string)
		}
		waits := c.status == "" || c.status == "kept"
		if err != nil || written != c.status || again.IsZero() == waits {
			t.Errorf("%s: status %q is written, again %v: %v", name, written, again, err)
		}
	}
}

// Results of writes, and whether they are the API server's answer about one object.
func TestResultsOfWrites(t *testing.T) {
	services := schema.GroupResource{Resource: "services"}
	for _, c := range []struct {
		err      error
		result   string
		answered bool
	}{
		{nil, written, false},
		{errForbidden, forbidden, true},
		{apierrors.NewConflict(services, "web", errors.New("newer")), conflict, true},
		{apierrors.NewInvalid(schema.GroupKind{Kind: "Service"}, "web", nil), rejected, true},
		{apierrors.NewNotFound(services, "web"), rejected, true},
		{apierrors.NewTooManyRequests("busy", 1), unreachable, false},
		{apierrors.NewInternalError(errors.New("etcd")), unreachable, false},
		{errOlderCRD, rejected, true},
		{apierrors.NewGenericServerResponse(http.StatusBadGateway, "patch", services, "", "", 0, true), unreachable, false},
		{errNetwork, unreachable, false},
	} {
		if got := resultOf(c.err); got != c.result || answered(c.err) != c.answered {
			t.Errorf("%v is %s, answered %v", c.err, got, answered(c.err))
		}
	}
}

// A repeated Event increments the count of the first one while that exists, for at most ten
// minutes.
func TestSeriesOfEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		l := a.leader()
		w := wantedStatus("7")
		for i, step := range []struct {
			after  time.Duration
			gone   bool // the first Event no longer exists
			create bool
		}{
			{0, false, true},
			{time.Minute, false, false},
			{seriesTime - time.Second, false, false},
			{time.Minute, true, true},
			{time.Minute, false, false},
			{seriesTime + time.Second, false, true},
		} {
			time.Sleep(step.after)
			before := len(a.of("events"))
			a.answer = func(_ int, w write) error {
				if w.verb == "patch" && step.gone {
					return apierrors.NewNotFound(schema.GroupResource{Resource: "events"}, w.name)
				}
				return nil
			}
			l.recorder.add(w.object, []event{{true, "Reason", "Action", "note"}})
			if err := l.recorder.flush(t.Context()); err != nil {
				t.Errorf("%d: %v", i, err)
			}
			writes := a.of("events")[before:]
			if last := writes[len(writes)-1]; (last.verb == "create") != step.create {
				t.Errorf("%d: %d writes, the last is a %s", i, len(writes), last.verb)
			}
		}
	})
}

// The report of a pod on a VIP, and whether the pod counts.
func TestReportsOfPods(t *testing.T) {
	v := vip.Require("20.0.0.1/32")
	terminating := annotated("a", `{}`)
	terminating.DeletionTimestamp = &at
	failed := annotated("a", `{}`)
	failed.Status.Phase = corev1.PodFailed
	report := func(counts, vip string) *corev1.Pod {
		return annotated("a", "{"+counts+`,"vips":[{"vip":"20.0.0.`+vip+"}]}")
	}
	const one, advertised = `"advertised":1,"total":1`, `1/32","advertised":true`
	for name, c := range map[string]struct {
		pod               *corev1.Pod
		counts            bool
		advertised, known bool
		reason            string
	}{
		"advertises":    {report(one, advertised), true, true, true, ""},
		"withdrawn":     {report(`"total":1`, `1/32","reason":"NoGateway"`), true, false, true, "NoGateway"},
		"another VIP":   {report(one, `2/32","advertised":true`), true, false, true, "NotConfigured"},
		"no VIP":        {annotated("a", `{}`), true, false, true, "NotConfigured"},
		"all of many":   {annotated("a", `{"advertised":600,"total":600}`), true, true, true, ""},
		"none of many":  {annotated("a", `{"total":600}`), true, false, true, "NothingAdvertised"},
		"some of many":  {annotated("a", `{"advertised":599,"total":600}`), true, false, false, ""},
		"frontend away": {report(`"problem":"x",`+one, advertised), true, false, true, "FrontendAway"},
		"unreadable":    {annotated("a", `{`), true, false, true, "InvalidReport"},
		"no report":     {&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, true, false, true, "NoReport"},
		"terminating":   {terminating, false, false, false, ""},
		"failed":        {failed, false, false, false, ""},
	} {
		all := readReports([]*corev1.Pod{c.pod}, reported([]*corev1.Pod{c.pod}))
		if len(all) != 0 != c.counts {
			t.Errorf("%s: %d pods count", name, len(all))
			continue
		}
		if !c.counts {
			continue
		}
		if r, known := all[0].of(v); known != c.known || r.Advertised != c.advertised || r.Reason != c.reason {
			t.Errorf("%s: %+v, known %v", name, r, known)
		}
	}
}

// A refused Service keeps its addresses, independent of spec.publish.
func TestRefusedServiceKeepsAddresses(t *testing.T) {
	p := published{replaces: true, addresses: []corev1.LoadBalancerIngress{hostname("published")}}
	for _, live := range [][]corev1.LoadBalancerIngress{nil, {hostname("kept")}} {
		w := serviceStatus(service(live...), refused("Invalid"), nil, p, at)
		if w.addresses != text(live) || w.addressesDiffer {
			t.Errorf("addresses %s instead of %s", w.addresses, text(live))
		}
	}
	if w := serviceStatus(service(), accepted(vip4), nil, p, at); w.addresses != text(p.addresses) || !w.addressesDiffer {
		t.Errorf("an accepted one gets %s", w.addresses)
	}
}
