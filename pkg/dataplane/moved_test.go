package dataplane

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/midstream"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// remember writes the state of a process that knows all sets of targets that stream a had, so that
// not all targets are asked.
func (x *site) remember() {
	x.t.Helper()
	const state = `{"a":{"since":"2000-01-01T00:00:00Z"}}`
	x.must(os.WriteFile(filepath.Join(x.dir, "generations.json"), []byte(state), 0o600))
}

// movedTables match the tables for flows of other pods, which depend on the time that sets of
// targets were in force.
var movedTables = regexp.MustCompile(`(?ms)^table ip6? vipgate-lb \{.*?^\}\n`)

// The tables for flows of other pods follow the earlier sets of targets, survive a restart, are
// repaired unless a hold forbids it, and are removed.
func TestTablesForFlowsOfOtherPods(t *testing.T) {
	x := newSite(t)
	events := make(chan Repaired, 1000)
	start := func() *running {
		return x.start(func(o *Options) {
			o.OnRepair = func(list []Repaired) {
				for _, repaired := range list {
					events <- repaired
				}
			}
		})
	}
	await := func(object string) {
		t.Helper()
		for deadline := time.After(patience); ; {
			select {
			case repaired := <-events:
				if repaired.Object == object {
					return
				}
			case <-deadline:
				t.Fatalf("%s is not repaired:\n%s", object, x.snapshot())
			}
		}
	}
	table := func(family string) string {
		return strings.TrimSpace(x.sh("nft -a -s list table " + family + " vipgate-lb 2>/dev/null || true"))
	}
	targets := []plan.Target{siteTarget(1, plan.Serving, plan.Serving), siteTarget(2, plan.Serving, plan.Serving)}
	x.remember()
	p := start()
	p.configure(siteStream("a", bothVIPs, targets...))
	if table("ip")+table("ip6") != "" {
		t.Error("there are tables without earlier targets")
	}

	stream := siteStream("a", bothVIPs, targets...)
	stream.Earlier = [][len(vip.Families)][]string{{{"t1", "t9"}, {"t2"}}}
	p.configure(stream)
	x.eventually("both tables", func() bool {
		return strings.Contains(table("ip"), "10.1.0.11") && strings.Contains(table("ip6"), "fd01::c")
	})
	if strings.Contains(table("ip"), "10.1.0.12,") || strings.Contains(table("ip6"), "fd01::b,") {
		t.Errorf("slots without an earlier target are asked:\n%s\n%s", table("ip"), table("ip6"))
	}

	t.Log("restart")
	before := []string{table("ip"), table("ip6")}
	p.stop()
	p = start()
	p.configure(stream)
	p.wait("the state", func(s plan.State) bool { return serves(s, "a", vip.IPv4, "t1", "t2") })
	if after := []string{table("ip"), table("ip6")}; !slices.Equal(before, after) {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}

	t.Log("hold")
	whole := sortedLines(x.snapshot())
	if _, err := p.Hold(t.Context(), "", 0); err != nil {
		t.Fatal(err)
	}
	x.sh("nft delete table ip vipgate-lb")
	// This drift is younger: when it is known, the table was left alone.
	x.sh("ip rule del priority 90")
	p.wait("drift", func(s plan.State) bool { return len(s.Drift) > 0 })
	if _, err := p.Moved(t.Context()); err != nil { // after the step that published the drift
		t.Fatal(err)
	}
	if table("ip") != "" {
		t.Error("the table is repaired during a hold")
	}
	if _, err := p.Resume(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	await(movedDrift.Object)
	x.eventually("the kernel to be as before", func() bool { return sortedLines(x.snapshot()) == whole })

	t.Log("drift")
	for _, tampering := range []string{
		"nft flush chain ip vipgate-lb denied", "nft delete table ip6 vipgate-lb", "nft flush map ip vipgate-lb asked-1/a",
	} {
		x.sh(tampering)
		await(movedDrift.Object)
		if after := sortedLines(x.snapshot()); after != whole {
			t.Errorf("%s: before\n%s\nafter\n%s", tampering, whole, after)
		}
	}

	t.Log("cleanup")
	p.stop()
	x.must(x.ns.Do(func() error {
		_, err := Cleanup(t.Context(), x.options())
		return err
	}))
	if left := x.sh("nft list ruleset"); left != "" {
		t.Error(left)
	}
}

// The earlier sets of targets survive a restart in the state directory.
func TestGenerationsSurviveARestart(t *testing.T) {
	x := newSite(t)
	file := filepath.Join(x.dir, "generations.json")
	read := func() (stored midstream.Generations) {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil
		}
		x.must(json.Unmarshal(text, &stored))
		return stored
	}
	targets := []plan.Target{siteTarget(1, plan.Serving), siteTarget(2, plan.Serving)}
	x.remember()
	p := x.start()
	p.configure(siteStream("a", bothVIPs, targets[0]))
	x.eventually("the file", func() bool { return slices.Equal(read()["a"].Current.Targets[0], []string{"t1"}) })
	p.stop()
	// The kernel keeps the table of the last process: it was in force for as long as no lb ran.
	stored := read()
	generations := stored["a"]
	generations.Current.Until = generations.Current.Until.Add(-time.Hour)
	stored["a"] = generations
	text, err := json.Marshal(stored)
	x.must(err)
	x.must(os.WriteFile(file, text, 0o600))
	p = x.start()
	p.configure(siteStream("a", bothVIPs, targets...))
	x.eventually("the file", func() bool {
		earlier := read()["a"].Earlier
		return len(earlier) == 1 && slices.Equal(earlier[0].Targets[0], []string{"t1"}) && earlier[0].Seconds > 3600
	})
	x.has(t, "asked-1/a")

	moved, err := p.Moved(t.Context())
	if err != nil || len(moved.Generations["a"].Earlier) != 1 {
		t.Errorf("%+v, %v", moved, err)
	}
	// A corrupt file is set aside: all targets are asked, since the sets before are unknown.
	p.stop()
	x.must(os.WriteFile(file, []byte("{"), 0o600))
	p = x.start()
	p.configure(siteStream("a", bothVIPs, targets...))
	x.eventually("the table of all targets", func() bool {
		return !strings.Contains(x.snapshot(), "asked-1/a") && strings.Contains(x.snapshot(), "ask/a")
	})
	// A third target is asked before it gets packets.
	p.configure(siteStream("a", bothVIPs, append(targets, siteTarget(3, plan.Serving))...))
	if !strings.Contains(x.snapshot(), "dup to 10.1.0.13") {
		t.Error(x.snapshot())
	}
}
