package nodedrain

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/publication"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

// labelledNodes returns the cache of Nodes with the label.
func labelledNodes(t *testing.T, names ...string) *cluster.Mirror {
	t.Helper()
	labelled := unreadNodes()
	var list []any
	for _, name := range names {
		node := &unstructured.Unstructured{}
		node.SetName(name)
		list = append(list, node)
	}
	harness.Must(t, labelled.Replace(list, "1"))
	return labelled
}

// unreadNodes returns a cache of Nodes before the first list.
func unreadNodes() *cluster.Mirror {
	return cluster.NewMirror(make(chan struct{}, 1))
}

// trenchOf returns a trench with a pod on each node, NODE: VIPs that the pod advertises.
func trenchOf(t *testing.T, advertised map[string]string) publication.Input {
	t.Helper()
	input := publication.Input{Reports: map[types.UID]publication.Reported{}}
	input.Objects.Trench = &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"nodeDrain": true}}}
	for node, vips := range advertised {
		name := "pod-of-" + node
		input.Siblings = append(input.Siblings, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}, Spec: corev1.PodSpec{NodeName: node},
		})
		var reported publication.Reported
		harness.Must(t, json.Unmarshal([]byte(`{"advertised": 1, "total": 2, "vips": [`+vips+`]}`), &reported.Report))
		input.Reports[types.UID(name)] = reported
	}
	return input
}

func TestDecision(t *testing.T) {
	const (
		first    = `{"vip": "20.0.0.1/32", "advertised": true}`
		both     = first + `, {"vip": "2000::1/128", "advertised": true}`
		part     = first + `, {"vip": "2000::1/128", "advertised": false}`
		absent   = `{"vip": "20.0.0.1/32", "advertised": false}, {"vip": "2000::1/128", "advertised": false}`
		unserved = `{"vip": "20.0.0.1/32", "advertised": false, "reason": "NoStream"}`
	)
	dark := func(waits decision) decision {
		waits.dark = true
		return waits
	}
	drain, no := decision{known: true, drain: true}, decision{known: true}
	last := func(vips string) decision {
		return decision{known: true, problem: "no pod on another node advertises " + vips + ": remove the label from " +
			"another node, or run `frontend drain --all --force`"}
	}
	for name, test := range map[string]struct {
		pods     map[string]string
		labelled []string
		drains   bool
		want     decision
	}{
		"no label":             {map[string]string{"a": both, "b": both}, nil, false, no},
		"label on another":     {map[string]string{"a": both, "b": both}, []string{"b"}, false, no},
		"another pod":          {map[string]string{"a": both, "b": both}, []string{"a"}, false, drain},
		"the last pod":         {map[string]string{"a": both}, []string{"a"}, false, last("20.0.0.1, 2000::1")},
		"another without IPv6": {map[string]string{"a": both, "b": first}, []string{"a"}, false, last("2000::1")},
		"another without VIPs": {map[string]string{"a": first, "b": absent}, []string{"a"}, false, last("20.0.0.1")},
		"nothing advertised":   {map[string]string{"a": absent}, []string{"a"}, false, dark(last("20.0.0.1, 2000::1"))},
		"nothing served":       {map[string]string{"a": unserved}, []string{"a"}, false, drain},
		"a part advertised":    {map[string]string{"a": part}, []string{"a"}, false, last("20.0.0.1")},
		"both labels":          {map[string]string{"a": first, "b": both}, []string{"a", "b"}, false, last("20.0.0.1")},
		"a third pod":          {map[string]string{"a": first, "b": first, "c": first}, []string{"a", "b"}, false, drain},
		"drained already":      {map[string]string{"a": both}, []string{"a"}, true, drain},
		"end of the drain":     {map[string]string{"a": both}, nil, true, no},
	} {
		input := trenchOf(t, test.pods)
		if got := decide(input, labelledNodes(t, test.labelled...), "pod-of-a", test.drains); got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
	input, unread := trenchOf(t, map[string]string{"a": both}), unreadNodes()
	if got := decide(input, unread, "pod-of-a", true); got != (decision{}) {
		t.Errorf("before the first list: %+v", got)
	}
	unread.Attempted(errors.New("forbidden"))
	unread.Attempted(errors.New("forbidden, too"))
	if got := decide(input, unread, "pod-of-a", true); !strings.HasSuffix(got.problem, "cannot be read: forbidden") {
		t.Errorf("without permission: %+v", got)
	}
	if got := decide(input, nil, "pod-of-a", true); got != no {
		t.Errorf("without spec.nodeDrain: %+v", got)
	}
	if got := decide(publication.Input{}, nil, "pod-of-a", true); got != (decision{}) {
		t.Errorf("without a Trench: %+v", got)
	}
}

// The last advertiser does not drain while its report is missing or does not say for long enough
// that it does not advertise.
func TestUnknownReportKeepsGuard(t *testing.T) {
	const first = `{"vip": "20.0.0.1/32", "advertised": true}`
	for name, test := range map[string]struct {
		report  string // "" for none
		old     bool
		problem string
		dark    bool
	}{
		"advertises":     {`{"total": 1, "advertised": 1, "vips": [` + first + `]}`, false, "no pod on another node", false},
		"only counts":    {`{"total": 2, "advertised": 1}`, false, "no pod on another node", false},
		"session flaps":  {strings.Replace(`{"total": 1, "vips": [`+first+`]}`, "true", "false", 1), false, "no pod", true},
		"not configured": {`{}`, false, "no pod on another node advertises 20.0.0.1", true},
		"restarts":       {`{"problem": "connection refused"}`, false, "pod advertises: connection refused", false},
		"no report":      {"", false, "pod advertises: no report yet", false},
		"not renewed":    {`{"total": 1, "advertised": 1}`, true, "pod advertises: its report is no longer renewed", false},
	} {
		input := trenchOf(t, map[string]string{"a": first})
		vips := []vip.VIP{vip.Require("20.0.0.1/32")}
		input.Result.Config = &trench.Config{Streams: []trench.Stream{{VIPs: vips}}}
		clear(input.Reports)
		if test.report != "" {
			reported := publication.Reported{Old: test.old}
			harness.Must(t, json.Unmarshal([]byte(test.report), &reported.Report))
			input.Reports["pod-of-a"] = reported
		}
		got := decide(input, labelledNodes(t, "a"), "pod-of-a", false)
		if got.drain || !strings.Contains(got.problem, test.problem) || got.dark != test.dark {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestDarkPodDrainsLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		drainer := New(Options{})
		drainer.advertised = time.Now()
		waits := decision{known: true, problem: "no other pod"}
		for _, step := range []struct {
			after       time.Duration
			dark, drain bool
		}{
			{0, true, false},
			{darkTime - 1, true, false},
			{1, true, true},
			{0, false, false},
			{darkTime - 1, true, false},
			{1, true, true},
			{1, true, true},
		} {
			time.Sleep(step.after)
			next, want := waits, waits
			if next.dark = step.dark; step.drain {
				want = decision{known: true, drain: true}
			}
			if got := drainer.wait(next); got != want {
				t.Errorf("%+v: %+v", step, got)
			}
		}
	})
}

// frontend fails the first order of a drain.
type frontend struct {
	frontendv1.UnimplementedFrontendServiceServer
	failed  bool
	ordered chan bool // a drain or its end
}

func (f *frontend) WatchStatus(_ *adminv1.WatchStatusRequest, s grpc.ServerStreamingServer[frontendv1.Status]) error {
	err := s.Send(&frontendv1.Status{})
	<-s.Context().Done()
	return err
}

func (f *frontend) Drain(context.Context, *frontendv1.DrainRequest) (*frontendv1.Drains, error) {
	f.ordered <- true
	if !f.failed {
		f.failed = true
		return nil, status.Error(codes.Unavailable, "restarts")
	}
	return &frontendv1.Drains{}, nil
}

func (f *frontend) Undrain(context.Context, *frontendv1.UndrainRequest) (*frontendv1.Drains, error) {
	f.ordered <- false
	return &frontendv1.Drains{}, nil
}

// The guard holds until the frontend has confirmed a drain, and an order without an answer is ended
// with the label, too.
func TestRecordOfDrain(t *testing.T) {
	dir := t.TempDir()
	listener, err := net.Listen("unix", filepath.Join(dir, "frontend.sock"))
	harness.Must(t, err)
	f, server := &frontend{ordered: make(chan bool)}, grpc.NewServer()
	frontendv1.RegisterFrontendServiceServer(server, f)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	reports := make(chan error)
	drainer := New(Options{
		AdminSocket: listener.Addr().String(), Record: filepath.Join(dir, "record"),
		Report: func(err error) { reports <- err }, Log: slog.New(slog.DiscardHandler),
	})
	run := func(decision decision) (end func()) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { drainer.carryOut(ctx, decision); close(ended) }()
		return func() { cancel(); <-ended }
	}
	want := func(name string, order, ordered, drained, fails bool) {
		t.Helper()
		if got := await.Receive(t, name, f.ordered); got != order {
			t.Errorf("%s: ordered a drain: %v", name, got)
		}
		err := await.Receive(t, name, reports)
		if o, d := drainer.drains(); o != ordered || d != drained || (err != nil) != fails {
			t.Errorf("%s: ordered %v, drained %v, %v", name, o, d, err)
		}
	}
	end := run(decision{known: true, drain: true})
	want("failed order", true, true, false, true)
	want("order", true, true, true, false)
	end()
	end = run(decision{known: true, drain: true})
	want("order of the next process", true, true, true, false)
	end()
	end = run(decision{known: true})
	want("end", false, false, false, false)
	end()
	server.Stop()
	harness.Must(t, <-served)
}

// A report of another pod with counts only covers a VIP if that pod advertises all of its VIPs.
func TestReportOfCounts(t *testing.T) {
	for report, want := range map[string]bool{
		`{"total": 2, "advertised": 2}`: true,
		`{"total": 2, "advertised": 1}`: false,
		`{"total": 2}`:                  false,
	} {
		input := trenchOf(t, map[string]string{"a": `{"vip": "20.0.0.1/32", "advertised": true}`, "b": ""})
		vips := []vip.VIP{vip.Require("20.0.0.1/32"), vip.Require("20.0.0.2/32")}
		input.Result.Config = &trench.Config{Streams: []trench.Stream{{VIPs: vips}}}
		var reported publication.Reported
		harness.Must(t, json.Unmarshal([]byte(report), &reported.Report))
		input.Reports["pod-of-b"] = reported
		if got := decide(input, labelledNodes(t, "a"), "pod-of-a", false); got.drain != want {
			t.Errorf("%s: %+v", report, got)
		}
	}
}
