package nodedrain

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/publication"
	"github.com/vipgate/vipgate/test/harness"
)

// labelledNodes returns the cache of Nodes with the label.
func labelledNodes(t *testing.T, names ...string) *nodes {
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
func unreadNodes() *nodes {
	changed := make(chan struct{}, 1)
	return &nodes{Mirror: cluster.NewMirror(changed), changed: changed}
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
		first  = `{"vip": "20.0.0.1/32", "advertised": true}`
		both   = first + `, {"vip": "2000::1/128", "advertised": true}`
		absent = `{"vip": "20.0.0.1/32", "advertised": false}, {"vip": "2000::1/128", "advertised": false}`
	)
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
		"nothing advertised":   {map[string]string{"a": absent}, []string{"a"}, false, drain},
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
	unread.failed(errors.New("forbidden"))
	unread.failed(errors.New("forbidden, too"))
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
