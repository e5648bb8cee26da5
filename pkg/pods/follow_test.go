package pods

import (
	"context"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// Events of one decision share their time, and those of a restarted process their numbers.
func TestFollowKeepsEqualTimesAndNumbers(t *testing.T) {
	const one = `{"time": "2026-01-01T00:00:01Z", "sequence": "1", "object": "a"}`
	const two = `{"time": "2026-01-01T00:00:01Z", "sequence": "2", "object": "b"}`
	const restarted = `{"time": "2026-01-01T00:00:02Z", "sequence": "1", "object": "c"}`
	source := &fakeSource{
		members: []Member{{Name: "a", Programs: map[string]string{Frontend: ""}}}, follow: make(chan struct{}),
		output: map[string]string{
			"a frontend events --output=json":          `{"events": [` + one + "," + two + `]}`,
			"a frontend events --follow --output=json": strings.Join([]string{one, two, restarted, ""}, "\n"),
		},
	}
	ctx, cancel := context.WithCancel(t.Context())
	var got string
	harness.Must(t, Follow(ctx, source, func(events []Event) error {
		for _, event := range events {
			got += event.GetObject()
		}
		if strings.Contains(got, "c") {
			cancel()
		}
		return nil
	}))
	if got != "abc" {
		t.Errorf("got %s", got)
	}
}
