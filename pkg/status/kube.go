package status

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
)

// Kube renders the status of kube, and reports whether the trench file is current, every object is
// accepted, and status is written and published.
func (view View) Kube(status *kubev1.Status, now time.Time) (text string, good bool) {
	var out strings.Builder
	kind, _, _ := strings.Cut(status.GetVerdict().GetObject(), " ") // a Trench, or a Gateway of Meridio 2
	fmt.Fprintf(&out, "kube %s, %s %s/%s\n", cut(status.GetVersion(), maxCell), cut(cmp.Or(kind, "Trench"), maxCell),
		cut(status.GetNamespace(), maxCell), cut(status.GetTrench(), maxCell))
	// The exit status is 1 unless all of the checks below hold.
	good = status.GetVerdict().GetAccepted() && status.GetStaleSince() == nil && status.GetFile().GetError() == ""
	switch {
	// Stale first: it names the failure of a kube that never synced, too.
	case status.GetStaleSince() != nil:
		fmt.Fprintf(&out, "STALE for %s: %s\n", ago(status.GetStaleSince(), now), cut(status.GetStaleCause(), maxLine))
	case status.GetSyncedSince() == nil:
		out.WriteString("NOT SYNCED: not everything was listed yet; nothing is written\n")
	}
	if verdict := status.GetVerdict(); verdict != nil && !verdict.GetAccepted() {
		fmt.Fprintf(&out, "REFUSED (%s): %s; the previous trench file stays in force\n",
			cut(verdict.GetReason(), maxCell), cut(verdict.GetMessage(), maxLine))
	}
	var head table
	head.row("API server", cut(status.GetApiServer(), maxCell))
	head.row("synced for", ago(status.GetSyncedSince(), now))
	head.row("trench file", fmt.Sprintf("%s, written %s ago, %s", cut(status.GetFile().GetPath(), maxCell),
		ago(status.GetFile().GetWritten(), now), plural(int(status.GetFile().GetWrites()), "write")))
	if failure := status.GetFile().GetError(); failure != "" {
		head.row("", "NOT WRITTEN: "+cut(failure, maxLine))
	}
	head.row("pod", cut(status.GetPod(), maxCell))
	// A Gateway of Meridio 2 has no leader: each pod writes its own file only.
	leader := cut(status.GetLeader(), maxCell)
	if status.GetLeader() == "" && kind == "Trench" {
		leader = "NONE: status and Events are not written; see the Lease vipgate-" + cut(status.GetTrench(), maxCell)
		good = false
	}
	head.row("leader", leader)
	// Only a Trench has the condition Published.
	if publication := status.GetPublication(); publication != nil {
		text := cut(publication.GetMessage(), maxLine)
		if !publication.GetComplete() {
			text, good = "INCOMPLETE ("+cut(publication.GetReason(), maxCell)+"): "+text, false
		}
		head.row("publication", text)
	}
	if !view.Problems {
		head.write(&out)
	}
	writeConditions(&out, status.GetConditions())

	services := newTable("SERVICE", "STATE", "VIPS", "TARGETS", "REASON")
	problems, warnings := problemLines(status.GetVerdict(), false), problemLines(status.GetVerdict(), true)
	for _, service := range status.GetServices() {
		state, reason := "accepted", service.GetVerdict().GetReason()
		if !service.GetVerdict().GetAccepted() {
			state, good = "REFUSED", false
			reason += ": " + service.GetVerdict().GetMessage()
		}
		problems = append(problems, problemLines(service.GetVerdict(), false)...)
		warnings = append(warnings, problemLines(service.GetVerdict(), true)...)
		if view.Problems && service.GetVerdict().GetAccepted() && service.GetTargets() > 0 {
			continue
		}
		name := strings.TrimPrefix(service.GetVerdict().GetObject(), "Service ")
		services.add(name, state, names(service.GetVips()), service.GetTargets(), reason)
	}
	services.write(&out)
	writeList(&out, "Refused in accepted objects:", problems)
	writeList(&out, "Without effect on the traffic:", warnings)
	caches := newTable("WATCHED", "OBJECTS", "STATE")
	for _, cache := range only(view, status.GetCaches(), func(cache *kubev1.Cache) bool {
		return !cache.GetSynced() || cache.GetFailingSince() != nil
	}) {
		state := "synced"
		if !cache.GetSynced() {
			state = "NOT LISTED YET"
		}
		if cache.GetFailingSince() != nil {
			state += fmt.Sprintf(", failing for %s: %s", ago(cache.GetFailingSince(), now), cache.GetError())
		}
		caches.add(cache.GetWhat(), cache.GetObjects(), state)
	}
	caches.write(&out)
	return out.String(), good && len(problems) == 0
}

func problemLines(verdict *kubev1.Verdict, warnings bool) (lines [][]string) {
	for _, problem := range verdict.GetProblems() {
		if problem.GetWarning() == warnings {
			lines = append(lines, []string{problem.GetObject() + ": " + problem.GetReason(), problem.GetMessage()})
		}
	}
	return lines
}
