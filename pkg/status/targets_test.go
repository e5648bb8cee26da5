package status

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
)

func TestTargets(t *testing.T) {
	wantGolden(t, "targets.golden", Targets([]*targetv1.TargetInfo{
		{
			Stream: "stream-b", Name: "target-1", Address: "172.16.1.1", State: targetv1.State_STATE_READY,
			Since: before(time.Hour), Sources: []string{"file"},
		},
		{
			Stream: "stream-a", Name: "target-2", Address: "fd00::2", State: targetv1.State_STATE_NOT_READY,
			Since: before(time.Minute), Sources: []string{"registry"},
			RegisteredBy: "spiffe://example.org/ns/a/sa/app", LastError: "port 5000: connection refused",
		},
		{
			Stream: "stream-a", Name: "target-2", Address: "172.16.1.2", State: targetv1.State_STATE_READY,
			Since: before(2 * time.Second), Sources: []string{"file", "registry"},
			RegisteredBy: "spiffe://example.org/ns/a/sa/app",
		},
		{
			Stream: "stream-a", Name: "target-1", Address: "172.16.1.3", State: targetv1.State_STATE_DRAINING,
			Since: before(2 * time.Second), DrainFor: durationpb.New(28 * time.Second), DrainCause: "operator",
			Sources: []string{"file"},
		},
		{
			Stream: "stream-a", Name: "target-3", Address: "172.16.1.4", State: targetv1.State_STATE_DRAINED,
			Since: before(time.Minute), DrainCause: "operator", Sources: []string{"file"},
		},
		{
			Stream: "stream-a", Name: "target-4", Address: "172.16.1.5", State: targetv1.State_STATE_STARTING,
			Since: before(0), Sources: []string{"registry"}, RegisteredBy: "operator",
		},
		{
			Stream: "stream-a", Name: "target-5", Address: "172.16.1.6", State: targetv1.State_STATE_OVERDUE,
			Since: before(0), Sources: []string{"file"}, LastError: "evil \x1b[2J text",
		},
	}, now))
	if got := Targets(nil, now); got != "no targets\n" {
		t.Errorf("got %q", got)
	}
}

func TestEveryStateOfATargetHasWords(t *testing.T) {
	seen := map[string]bool{}
	for n, name := range targetv1.State_name {
		w := Explain(targetv1.State(n))
		if n != 0 && (w.Short == "" || w.Meaning == "" || strings.HasPrefix(w.Short, "state ") || seen[w.Short]) {
			t.Errorf("%s: %+v", name, w)
		}
		seen[w.Short] = true
	}
}

func TestTargetLine(t *testing.T) {
	for want, i := range map[string]*targetv1.TargetInfo{
		"s/a 10.0.0.1: ready": {State: targetv1.State_STATE_READY, LastError: "an older one"},
		"s/a 10.0.0.1: not ready: port 1: connection refused": {
			State:     targetv1.State_STATE_NOT_READY,
			LastError: "port 1: connection refused",
		},
		"s/a 10.0.0.1: draining: 5s left, deregistered": {
			State:    targetv1.State_STATE_DRAINING,
			DrainFor: durationpb.New(5 * time.Second), DrainCause: "deregistered",
		},
		"s/a 10.0.0.1: draining: 0ms left": {
			State:    targetv1.State_STATE_DRAINING,
			DrainFor: durationpb.New(-time.Second),
		},
		"s/a 10.0.0.1: gone":     {State: targetv1.State_STATE_GONE},
		"s/a 10.0.0.1: state 99": {State: 99},
	} {
		i.Stream, i.Name, i.Address = "s", "a", "10.0.0.1"
		if got := TargetLine(i); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
