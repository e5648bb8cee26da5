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
func (view View) Target(status *targetadminv1.Status, now time.Time) (text string, good bool) {
	var out strings.Builder
	fmt.Fprintf(&out, "target %s\n", cut(status.GetVersion(), maxCell))
	good = true
	if len(status.GetPool()) > 0 {
		good = status.GetComplete()
		view.writeReplyPath(&out, status, now)
	}
	// A host that only registers targets has no pool, and no kernel state to show.
	registrations := newTable("STREAM", "TARGET", "ADDRESSES", "REGISTRY", "LB", "STATE", "SINCE", "ERROR")
	for _, registration := range status.GetRegistrations() {
		// Without a state, no registry has accepted the target.
		isRegistered := registration.GetState() != ""
		good = good && isRegistered
		if view.Problems && isRegistered {
			continue
		}
		registrations.add(registration.GetStream(), registration.GetName(), names(registration.GetAddresses()),
			registration.GetRegistry(), registration.GetLb(),
			cmp.Or(registration.GetState(), "NOT REGISTERED"), ago(registration.GetSince(), now),
			registrationError(registration))
	}
	registrations.write(&out)
	return out.String(), good
}

// writeReplyPath appends the kernel state, and the peers with their flows.
func (view View) writeReplyPath(out *strings.Builder, status *targetadminv1.Status, now time.Time) {
	problems := problemItems(status.GetProblems())
	state := "complete for " + ago(status.GetSince(), now)
	switch {
	case status.GetSince() == nil:
		state = "NOT READ YET"
	case !status.GetComplete():
		state = "NOT COMPLETE for " + ago(status.GetSince(), now)
	}
	var head table
	head.row("pool", cut(strings.Join(status.GetPool(), ", "), maxLine))
	head.row("interface", cut(status.GetInterface(), maxCell))
	head.row("kernel state", fmt.Sprintf("%s, %s", state, plural(int(status.GetRepairs()), "repair")))
	if n := status.GetDropped(); n > 0 {
		head.row("dropped", fmt.Sprintf("%d replies without a known peer", n))
	}
	if !view.Problems || !status.GetComplete() {
		head.write(out)
	}
	writeList(out, "Packets to the pool are not accepted, or not answered, since:", problems)
	// Clone first: DeleteFunc would change the message of the caller.
	conditions := slices.DeleteFunc(slices.Clone(status.GetConditions()), func(condition *adminv1.Condition) bool {
		replyPath := condition.GetName() == "ReplyPath" || condition.GetName() == readiness
		return replyPath && len(problems) > 0 // the problems have more detail
	})
	writeConditions(out, conditions)

	peers := newTable("PEER", "STATE", "FLOWS", "PACKETS", "FWMARK", "ADDRESSES")
	for _, peer := range only(view, status.GetPeers(), func(peer *targetadminv1.Peer) bool { return !peer.GetLive() }) {
		live, seen, flows := "live", "not yet", fmt.Sprint(peer.GetFlows())
		if !peer.GetLive() {
			live = "GONE"
		}
		if peer.GetSeen() {
			seen = "received"
		}
		// A count that cannot be read must not look like a peer without flows.
		if status.GetFlowsError() != "" {
			flows = "?"
		}
		peers.add(peer.GetMac(), live, flows, seen, fmt.Sprintf("%#08x", peer.GetFwmark()), names(peer.GetAddresses()))
	}
	peers.write(out)
	if failure := status.GetFlowsError(); failure != "" {
		fmt.Fprintf(out, "\nFlows cannot be counted: %s\n", cut(failure, maxLine))
	}
}

// registrationError returns why a registration is not in force, with the number of failed attempts.
func registrationError(registration *targetadminv1.Registration) string {
	if registration.GetState() != "" || registration.GetFailures() == 0 {
		return registration.GetError()
	}
	return fmt.Sprintf("%s (%s failed)", registration.GetError(), plural(int(registration.GetFailures()), "attempt"))
}
