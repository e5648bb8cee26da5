package main

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/machine"
)

func TestHoldStatistics(t *testing.T) {
	var samples []time.Duration
	for i := range 200 {
		samples = append(samples, time.Duration(200-i)*time.Millisecond)
	}
	h := newHold("x", 150*time.Millisecond, samples)
	if h.Median != 100*time.Millisecond || h.P99 != 198*time.Millisecond || h.Longest != 200*time.Millisecond ||
		h.Exceeded != 50 || h.Times != 200 {
		t.Errorf("%+v", h)
	}
}

// TestResults checks the table: each cause has a row, also one that no fault of the run had, and a
// missed bound is bold.
func TestResults(t *testing.T) {
	run := func(seed uint64, held time.Duration) Summary {
		return Summary{
			Machine: machine.Machine{Commit: "0123456789ab", CPU: "a", BIRD: "2.0.12"}, Seed: seed, Injected: 5, Passed: true,
			Holds: summarize([]measure{{"the lb is dead", held, 10 * time.Millisecond}}, false), SlowestRecovery: time.Second,
		}
	}
	text, err := results([]Summary{run(1, 4*time.Millisecond), run(2, 12*time.Millisecond)})
	harness.Must(t, err)
	for _, want := range []string{
		"10 faults, seed 1, 2;", "|the lb is dead|2|4.0 ms|**12 ms**|**12 ms**|10 ms|1|\n",
		"|BIRD is stopped|0|–|–|–|4.50 s|–|\n",
		"|the slowest recovery||||1.00 s|10.00 s||\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the results lack %q:\n%s", want, text)
		}
	}
	other := run(3, 0)
	other.Commit = "other"
	_, err = results([]Summary{run(1, 0), other})
	harness.WantError(t, err, "one commit")
}

// TestPublishedResults checks that no cause is missing in docs/proof.md, whatever was measured.
func TestPublishedResults(t *testing.T) {
	text, err := os.ReadFile("../../docs/proof.md")
	harness.Must(t, err)
	_, table, _ := strings.Cut(string(text), "<!-- begin "+section+" -->")
	table, _, _ = strings.Cut(table, "<!-- end")
	var got, want []string
	for line := range strings.Lines(table) {
		if cells := strings.Split(line, "|"); len(cells) == 9 && cells[1] != "cause" && !strings.HasPrefix(cells[1], "-") {
			got = append(got, cells[1])
		}
	}
	for _, r := range causes(strings.Contains(table, "an external FRR")) {
		want = append(want, r.cause)
	}
	if want = append(want, slowest); !slices.Equal(got, want) {
		t.Errorf("docs/proof.md has the causes %q, want %q", got, want)
	}
}
