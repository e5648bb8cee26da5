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
func Kube(s *kubev1.Status, now time.Time) (text string, good bool) {
	var b strings.Builder
	kind, _, _ := strings.Cut(s.GetVerdict().GetObject(), " ") // a Trench, or a Gateway of Meridio 2
	fmt.Fprintf(&b, "kube %s, %s %s/%s\n", cut(s.GetVersion(), maxCell), cut(cmp.Or(kind, "Trench"), maxCell),
		cut(s.GetNamespace(), maxCell), cut(s.GetTrench(), maxCell))
	good = s.GetVerdict().GetAccepted() && s.GetStaleSince() == nil && s.GetFile().GetError() == ""
	switch {
	case s.GetStaleSince() != nil:
		fmt.Fprintf(&b, "STALE for %s: %s\n", ago(s.GetStaleSince(), now), cut(s.GetStaleCause(), maxLine))
	case s.GetSyncedSince() == nil:
		b.WriteString("NOT SYNCED: not everything was listed yet; nothing is written\n")
	}
	if v := s.GetVerdict(); v != nil && !v.GetAccepted() {
		fmt.Fprintf(&b, "REFUSED (%s): %s; the previous trench file stays in force\n",
			cut(v.GetReason(), maxCell), cut(v.GetMessage(), maxLine))
	}
	var head table
	head.row("API server", cut(s.GetApiServer(), maxCell))
	head.row("synced for", ago(s.GetSyncedSince(), now))
	head.row("trench file", fmt.Sprintf("%s, written %s ago, %s", cut(s.GetFile().GetPath(), maxCell),
		ago(s.GetFile().GetWritten(), now), plural(int(s.GetFile().GetWrites()), "write")))
	if e := s.GetFile().GetError(); e != "" {
		head.row("", "NOT WRITTEN: "+cut(e, maxLine))
	}
	head.row("pod", cut(s.GetPod(), maxCell))
	leader := cut(s.GetLeader(), maxCell)
	if s.GetLeader() == "" && kind == "Trench" {
		leader, good = "NONE: status and Events are not written; see the Lease vipgate-"+cut(s.GetTrench(), maxCell), false
	}
	head.row("leader", leader)
	if p := s.GetPublication(); p != nil {
		text := cut(p.GetMessage(), maxLine)
		if !p.GetComplete() {
			text, good = "INCOMPLETE ("+cut(p.GetReason(), maxCell)+"): "+text, false
		}
		head.row("publication", text)
	}
	b.WriteByte('\n')
	head.align(&b, "")
	writeConditions(&b, s.GetConditions())

	services := newTable("SERVICE", "STATE", "VIPS", "TARGETS", "REASON")
	problems := problemLines(s.GetVerdict())
	for _, v := range s.GetServices() {
		state, reason := "accepted", v.GetVerdict().GetReason()
		if !v.GetVerdict().GetAccepted() {
			state, good = "REFUSED", false
			reason += ": " + v.GetVerdict().GetMessage()
		}
		name := strings.TrimPrefix(v.GetVerdict().GetObject(), "Service ")
		services.add(name, state, names(v.GetVips()), v.GetTargets(), reason)
		problems = append(problems, problemLines(v.GetVerdict())...)
	}
	services.write(&b)
	writeList(&b, "Refused in accepted objects:", problems)
	caches := newTable("WATCHED", "OBJECTS", "STATE")
	for _, c := range s.GetCaches() {
		state := "synced"
		if !c.GetSynced() {
			state = "NOT LISTED YET"
		}
		if c.GetFailingSince() != nil {
			state += fmt.Sprintf(", failing for %s: %s", ago(c.GetFailingSince(), now), c.GetError())
		}
		caches.add(c.GetWhat(), c.GetObjects(), state)
	}
	caches.write(&b)
	return b.String(), good && len(problems) == 0
}

func problemLines(v *kubev1.Verdict) (lines [][]string) {
	for _, p := range v.GetProblems() {
		lines = append(lines, []string{p.GetObject() + ": " + p.GetReason(), p.GetMessage()})
	}
	return lines
}
