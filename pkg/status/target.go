package status

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
)

// Target renders the status of a target. good reports whether the kernel state is complete and
// each registration is in force; a status without a pool has only registrations.
func Target(s *targetadminv1.Status, now time.Time) (text string, good bool) {
	var b strings.Builder
	fmt.Fprintf(&b, "target %s\n", cut(s.GetVersion(), maxCell))
	good = true
	if len(s.GetPool()) > 0 {
		good = s.GetComplete()
		writeReplyPath(&b, s, now)
	}
	registrations := newTable("STREAM", "TARGET", "ADDRESSES", "REGISTRY", "LB", "STATE", "SINCE", "ERROR")
	for _, r := range s.GetRegistrations() {
		good = good && r.GetState() != ""
		registrations.add(r.GetStream(), r.GetName(), names(r.GetAddresses()), r.GetRegistry(), r.GetLb(),
			cmp.Or(r.GetState(), "NOT REGISTERED"), ago(r.GetSince(), now), registrationError(r))
	}
	registrations.write(&b)
	return b.String(), good
}

// writeReplyPath appends the kernel state, and the peers with their flows.
func writeReplyPath(b *strings.Builder, s *targetadminv1.Status, now time.Time) {
	problems := problemItems(s.GetProblems())
	state := "complete for " + ago(s.GetSince(), now)
	switch {
	case s.GetSince() == nil:
		state = "NOT READ YET"
	case !s.GetComplete():
		state = "NOT COMPLETE for " + ago(s.GetSince(), now)
	}
	var head table
	head.row("pool", cut(strings.Join(s.GetPool(), ", "), maxLine))
	head.row("interface", cut(s.GetInterface(), maxCell))
	head.row("kernel state", fmt.Sprintf("%s, %s", state, plural(int(s.GetRepairs()), "repair")))
	if n := s.GetDropped(); n > 0 {
		head.row("dropped", fmt.Sprintf("%d replies without a known peer", n))
	}
	b.WriteByte('\n')
	head.align(b, "")
	writeList(b, "Packets to the pool are not accepted, or not answered, since:", problems)
	conditions := slices.DeleteFunc(slices.Clone(s.GetConditions()), func(c *adminv1.Condition) bool {
		replyPath := c.GetName() == "ReplyPath" || c.GetName() == readiness
		return replyPath && len(problems) > 0 // the problems have more detail
	})
	writeConditions(b, conditions)

	peers := newTable("PEER", "STATE", "FLOWS", "PACKETS", "FWMARK", "ADDRESSES")
	for _, p := range s.GetPeers() {
		live, seen, flows := "live", "not yet", fmt.Sprint(p.GetFlows())
		if !p.GetLive() {
			live = "GONE"
		}
		if p.GetSeen() {
			seen = "received"
		}
		if s.GetFlowsError() != "" {
			flows = "?"
		}
		peers.add(p.GetMac(), live, flows, seen, fmt.Sprintf("%#08x", p.GetFwmark()), names(p.GetAddresses()))
	}
	peers.write(b)
	if e := s.GetFlowsError(); e != "" {
		fmt.Fprintf(b, "\nFlows cannot be counted: %s\n", cut(e, maxLine))
	}
}

// registrationError returns why a registration is not in force, with the number of failed
// attempts.
func registrationError(r *targetadminv1.Registration) string {
	if r.GetState() != "" || r.GetFailures() == 0 {
		return r.GetError()
	}
	return fmt.Sprintf("%s (%s failed)", r.GetError(), plural(int(r.GetFailures()), "attempt"))
}
