package status

import (
	"fmt"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
)

// Explanation explains one value of an enum.
type Explanation struct {
	// Short fits into a table.
	Short string
	// Meaning is one sentence.
	Meaning string
	// Next is what to check or to do; empty without a problem.
	Next string
}

// AdvertisementReason explains the reason of a VIP's advertisement. A reason that this program does
// not know has its own explanation.
func AdvertisementReason(r readinessv1.AdvertisementReason) Explanation {
	switch r {
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_CONFIGURED:
		return Explanation{
			"not configured", "The VIP is not among the attractor's VIPs in the trench file in force.",
			"add it to attractor.vips; if it is there, the file on disk may be refused: `frontend validate`",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NEVER_SEEN:
		return Explanation{
			"LB never seen", "No load balancer has reported the VIP since the frontend started.",
			"the load balancer's line in `frontend status`; then `lb status`: is it synced, does a stream have the VIP?",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY:
		return Explanation{
			"LB says not ready", "The load balancer cannot forward traffic to the VIP.",
			"`lb status`: the VIP's reason, and the last error of its targets' checks",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_SOURCE_ROUTING:
		return Explanation{
			"no source routing", "The kernel does not yet route packets from the VIP through the gateways.",
			"SourceRouting among the conditions; `frontend debug` shows rules and sets; the container needs NET_ADMIN",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY:
		return Explanation{
			"no gateway is up", "No BGP session with a gateway of the VIP's address family is up.",
			"the gateways in `frontend status`, with their last error; `birdc show protocols all`; link, VLAN and AS numbers",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_LOST:
		return Explanation{
			"LB lost", "The load balancer's lease and its grace period have expired.",
			"does the lb container run, and what does it log? The readiness socket, and Identity on both sides",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_STOPPING:
		return Explanation{
			"frontend stops", "The frontend is stopping and moves traffic away first.",
			"the cause of the pod's end: its events, the node, a rollout; no action required here",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_DRAINED:
		return Explanation{
			"drained by an operator", "An operator asked to move traffic away from the VIP.",
			"`frontend events` shows since when; `frontend undrain` ends the drain",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_DRAINING:
		return Explanation{
			"LB drains",
			"The load balancer is about to stop, or to lose the VIP's last targets, and forwards only a little longer.",
			"`lb status`: does it go away, or do the targets drain? A restart ends this by itself",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_STALE:
		return Explanation{
			"LB stale (grace period)",
			"The load balancer's lease has expired; the VIP stays advertised until the grace period ends.",
			"the lb container now: restarting, hung or out of CPU? If it stays silent this becomes \"LB lost\"",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_FLAPPING:
		return Explanation{
			"flapping, waits", "The VIP is ready again, but fell at least twice within a minute, and waits up to 30 s.",
			"`lb status` and `frontend events`: which targets' checks fail on and off?",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY:
		return Explanation{"ready", "Everything that an advertisement needs holds.", ""}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_UNSPECIFIED:
		return Explanation{"not decided yet", "The frontend has not decided about the VIP yet.", "ask again in a second; then the frontend's log"}
	}
	return unknownReason(int32(r))
}

// VipReason explains the reason of a VIP's readiness.
func VipReason(r readinessv1.VipReason) Explanation {
	switch r {
	case readinessv1.VipReason_VIP_REASON_TARGETS_READY:
		return Explanation{"enough targets ready", "A stream that serves the VIP has enough ready targets.", ""}
	case readinessv1.VipReason_VIP_REASON_NO_STREAM:
		return Explanation{
			"no stream", "No stream in the trench file serves the VIP.",
			"add the VIP to a stream's vips, or take it out of the attractor",
		}
	case readinessv1.VipReason_VIP_REASON_NO_TARGETS:
		return Explanation{
			"no targets", "The streams that serve the VIP have no target with an address of its family.",
			"the sources in `lb status`: is one gone, is an entry ignored? An IPv6 VIP needs IPv6 targets",
		}
	case readinessv1.VipReason_VIP_REASON_TOO_FEW_READY:
		return Explanation{
			"too few targets ready", "Fewer targets than the stream's minReady pass their checks.",
			"the targets in `lb status`, with the last error of their checks; is the application up, is the network there?",
		}
	case readinessv1.VipReason_VIP_REASON_NOT_CHECKED:
		return Explanation{
			"targets not checked yet", "The targets have not been checked yet since the start, or since they were added.",
			"ask again after one check interval; then whether checks get a timeout",
		}
	case readinessv1.VipReason_VIP_REASON_CHECK_OVERDUE:
		return Explanation{
			"checks overdue", "The load balancer did not check the targets in time: their state is unknown.",
			"CPU limits and throttling of the lb container; the number of targets",
		}
	case readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING:
		return Explanation{
			"targets drain", "Every usable target drains; traffic is forwarded a little longer.",
			"the cause of the drain: a rollout of the application?",
		}
	case readinessv1.VipReason_VIP_REASON_SUSPECT:
		return Explanation{
			"network suspected", "Most targets failed at once, and none of them answers: their network appears to be down.",
			"the network between lb and targets: link, VLAN, switch, policy; --on-sudden-loss says whether VIPs stay ready meanwhile",
		}
	case readinessv1.VipReason_VIP_REASON_READINESS_FILE:
		return Explanation{"readiness file exists", "A file in the readiness directory reports the VIP as ready.", ""}
	case readinessv1.VipReason_VIP_REASON_NO_READINESS_FILE:
		return Explanation{
			"no readiness file", "No file in the readiness directory makes the VIP ready.",
			"the directory, and the process that writes it; the detail names the file that is missing",
		}
	case readinessv1.VipReason_VIP_REASON_DATA_PLANE:
		return Explanation{
			"kernel does not forward", "Enough targets are ready, but the kernel is not known to forward the VIP to them.",
			"the data plane in `lb status`: problems with their remedies, drift; a moment after a change this is normal",
		}
	case readinessv1.VipReason_VIP_REASON_UNSPECIFIED:
		return Explanation{"no reason", "The load balancer reported no reason.", "the versions of both programs"}
	}
	return unknownReason(int32(r))
}

// newer is the explanation of a value that this program does not know.
func unknownReason(n int32) Explanation {
	return Explanation{
		fmt.Sprintf("reason %d", n), "The running program gives a reason that this one does not know.",
		"use the command of the running program's version",
	}
}

// advertised is the advertisement of a VIP in a table.
func advertised(a readinessv1.Advertisement) string {
	switch a {
	case readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED:
		return "yes"
	case readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED:
		return "de-preferred"
	case readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN:
		return "NO"
	}
	return none
}

// advertisement is the advertisement of a VIP in one word.
func advertisement(a readinessv1.Advertisement) string {
	switch a {
	case readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED:
		return "announced"
	case readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED:
		return "de-preferred"
	case readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN:
		return "withdrawn"
	}
	return none
}

// isAdvertised reports whether the VIP is advertised to gateways.
func isAdvertised(a readinessv1.Advertisement) bool {
	return a == readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED || a == readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED
}

// vipState is the state of a VIP in a table.
func vipState(s readinessv1.VipState) string {
	switch s {
	case readinessv1.VipState_VIP_STATE_READY:
		return "ready"
	case readinessv1.VipState_VIP_STATE_NOT_READY:
		return "not ready"
	case readinessv1.VipState_VIP_STATE_DRAINING:
		return "draining"
	}
	return none
}
