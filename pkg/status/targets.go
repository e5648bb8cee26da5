package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
)

// targetRank orders states in the summary: problems first.
func targetRank(s targetv1.State) int {
	switch s {
	case targetv1.State_STATE_READY:
		return 2
	case targetv1.State_STATE_STARTING, targetv1.State_STATE_DRAINING, targetv1.State_STATE_DRAINED:
		return 1
	}
	return 0
}

// Targets renders a list of targets, sorted by stream, name and address.
func Targets(all []*targetv1.TargetInfo, now time.Time) string {
	if len(all) == 0 {
		return "no targets\n"
	}
	counts := map[targetv1.State]int{}
	for _, i := range all {
		counts[i.GetState()]++
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %d addresses of targets ready\n", counts[targetv1.State_STATE_READY], len(all))
	countTargets(counts).align(&b, "  ")
	t := newTable("STREAM", "TARGET", "ADDRESS", "STATE", "SINCE", "SOURCE", "REGISTERED BY", "LAST ERROR")
	sorted := slices.Clone(all)
	slices.SortStableFunc(sorted, compareTargets)
	for _, i := range sorted {
		t.add(i.GetStream(), i.GetName(), i.GetAddress(), targetDetail(i), ago(i.GetSince(), now),
			names(i.GetSources()), i.GetRegisteredBy(), i.GetLastError())
	}
	t.write(&b)
	return b.String()
}

// countTargets has a line for each state, with what to check next.
func countTargets(counts map[targetv1.State]int) *table {
	t := &table{}
	for _, s := range slices.SortedFunc(maps.Keys(counts), func(x, y targetv1.State) int {
		return cmp.Or(cmp.Compare(targetRank(x), targetRank(y)), cmp.Compare(x, y))
	}) {
		e := Explain(s)
		t.explain(counts[s], e.Short, e.Meaning, e)
	}
	return t
}

func compareTargets(x, y *targetv1.TargetInfo) int {
	return cmp.Or(strings.Compare(x.GetStream(), y.GetStream()), strings.Compare(x.GetName(), y.GetName()),
		strings.Compare(x.GetAddress(), y.GetAddress()))
}

// targetDetail returns the state with the remaining drain time and its cause.
func targetDetail(i *targetv1.TargetInfo) string {
	s := Explain(i.GetState()).Short
	why := i.GetDrainCause()
	if d := i.GetDrainFor(); d != nil {
		why = strings.TrimSuffix(span(max(0, d.AsDuration()))+" left, "+why, ", ")
	}
	if why != "" {
		s += ": " + why
	}
	return s
}

// TargetLine renders one address of a target on one line, for `--follow`.
func TargetLine(i *targetv1.TargetInfo) string {
	s := fmt.Sprintf("%s/%s %s: %s", i.GetStream(), i.GetName(), i.GetAddress(), targetDetail(i))
	if why := i.GetLastError(); why != "" && i.GetState() != targetv1.State_STATE_READY {
		s += ": " + why
	}
	return cut(s, maxLine)
}
