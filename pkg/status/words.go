package status

import (
	"fmt"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
)

// Words explain one value of an enum.
type Words struct {
	// Short fits into a table.
	Short string
	// Meaning is one sentence.
	Meaning string
	// Next is what to look at, or to do; empty when nothing is wrong.
	Next string
}

// AdvertisementReason explains why the frontend does with a VIP what it does.
// A reason that this program does not know gets words that say so.
func AdvertisementReason(r readinessv1.AdvertisementReason) Words {
	switch r {
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_CONFIGURED:
		return Words{
			"not configured", "The VIP is not among the attractor's VIPs in the trench file in force.",
			"add it to attractor.vips; if it is there, the file on disk may be refused: `frontend validate`",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NEVER_SEEN:
		return Words{
			"never heard of by the LB", "No load balancer has said anything about the VIP since the frontend started.",
			"the load balancer's line in `frontend status`; then `lb status`: is it synced, does a stream have the VIP?",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY:
		return Words{
			"LB says not ready", "The load balancer cannot forward traffic to the VIP.",
			"`lb status`: the VIP's reason, and the last error of its targets' checks",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_SOURCE_ROUTING:
		return Words{
			"no source routing", "The kernel does not yet route what the VIP sends back through the gateways.",
			"SourceRouting among the conditions; `frontend debug` shows rules and sets; the container needs NET_ADMIN",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY:
		return Words{
			"no gateway is up", "No BGP session with a gateway of the VIP's address family is up.",
			"the gateways in `frontend status`, with their last error; `birdc show protocols all`; link, VLAN and AS numbers",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_LOST:
		return Words{
			"LB lost", "The load balancer has stopped speaking, and the grace for that is over.",
			"does the lb container run, and what does it log? The readiness socket, and Identity on both sides",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_STOPPING:
		return Words{
			"frontend stops", "The frontend was told to stop and moves traffic away first.",
			"who ended the pod: its events, the node, a rollout; nothing to do here",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_DRAINED:
		return Words{
			"drained by an operator", "An operator asked to move traffic away from the VIP.",
			"`frontend events` tells since when; `frontend undrain` takes it back",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_DRAINING:
		return Words{
			"LB drains", "The load balancer is about to stop, or to lose the VIP's last targets, and forwards only a little longer.",
			"`lb status`: does it go away, or do the targets drain? A restart ends this by itself",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_STALE:
		return Words{
			"LB silent, grace runs", "The load balancer has stopped speaking; until the grace ends nothing changes.",
			"the lb container now: restarting, hung or out of CPU? If it stays silent this becomes \"LB lost\"",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_FLAPPING:
		return Words{
			"flapping, waits", "The VIP is ready again, but fell at least twice within a minute, and waits up to 30 s.",
			"`lb status` and `frontend events`: which targets' checks fail on and off?",
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_READY:
		return Words{"ready", "Everything that an advertisement needs holds.", ""}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_UNSPECIFIED:
		return Words{"not decided yet", "The frontend has not decided about the VIP yet.", "ask again in a second; then the frontend's log"}
	}
	return newer(int32(r))
}

// VipReason explains why the load balancer says of a VIP what it says.
func VipReason(r readinessv1.VipReason) Words {
	switch r {
	case readinessv1.VipReason_VIP_REASON_TARGETS_READY:
		return Words{"enough targets ready", "A stream that serves the VIP has enough ready targets.", ""}
	case readinessv1.VipReason_VIP_REASON_NO_STREAM:
		return Words{
			"no stream", "No stream in the trench file serves the VIP.",
			"add the VIP to a stream's vips, or take it out of the attractor",
		}
	case readinessv1.VipReason_VIP_REASON_NO_TARGETS:
		return Words{
			"no targets", "The streams that serve the VIP have no target with an address of its family.",
			"the sources in `lb status`: is one gone, was something not taken? An IPv6 VIP needs IPv6 targets",
		}
	case readinessv1.VipReason_VIP_REASON_TOO_FEW_READY:
		return Words{
			"too few targets ready", "Fewer targets than the stream's minReady pass their checks.",
			"the targets in `lb status`, with the last error of their checks; is the application up, is the network there?",
		}
	case readinessv1.VipReason_VIP_REASON_NOT_CHECKED:
		return Words{
			"targets not checked yet", "The targets have not been checked yet since the start, or since they were added.",
			"ask again after one check interval; then whether checks get a timeout",
		}
	case readinessv1.VipReason_VIP_REASON_CHECK_OVERDUE:
		return Words{
			"checks overdue", "The load balancer did not get to check the targets in time, so it does not know.",
			"CPU limits and throttling of the lb container; the number of targets",
		}
	case readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING:
		return Words{
			"targets drain", "Every usable target drains; traffic is forwarded a little longer.",
			"who drains the targets: a rollout of the application?",
		}
	case readinessv1.VipReason_VIP_REASON_SUSPECT:
		return Words{
			"network suspected", "Most targets failed at once, and none of them answers: their network appears to be down.",
			"the network between lb and targets: link, VLAN, switch, policy; --on-sudden-loss says whether VIPs stay ready meanwhile",
		}
	case readinessv1.VipReason_VIP_REASON_READINESS_FILE:
		return Words{"readiness file is there", "A file in the readiness directory says that the VIP is ready.", ""}
	case readinessv1.VipReason_VIP_REASON_NO_READINESS_FILE:
		return Words{
			"no readiness file", "No file in the readiness directory makes the VIP ready.",
			"the directory, and whoever writes it; the detail names the file that is missing",
		}
	case readinessv1.VipReason_VIP_REASON_DATA_PLANE:
		return Words{
			"kernel does not forward", "Enough targets are ready, but the kernel is not known to forward the VIP to them.",
			"the data plane in `lb status`: problems with their remedies, drift; a moment after a change this is normal",
		}
	case readinessv1.VipReason_VIP_REASON_UNSPECIFIED:
		return Words{"not said", "The load balancer gave no reason.", "the versions of both programs"}
	}
	return newer(int32(r))
}

// newer are the words for a value that this program does not know.
func newer(n int32) Words {
	return Words{
		fmt.Sprintf("reason %d", n), "The running program gives a reason that this one does not know.",
		"use the command of the running program's version",
	}
}

// advertised says in a table what is done with a VIP.
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

// advertisement is what is done with a VIP, in one word.
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

// isAdvertised tells whether gateways are told of the VIP at all.
func isAdvertised(a readinessv1.Advertisement) bool {
	return a == readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED || a == readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED
}

// vipState says what the load balancer says of a VIP.
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
