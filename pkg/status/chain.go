package status

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
)

// Step is a step of the path of a VIP's traffic, as the part that it names confirms it.
type Step struct {
	Name string `json:"step"`
	Good bool   `json:"good"`
	Text string `json:"text"`
	// Next is the next check or action; empty without a problem.
	Next string `json:"next,omitempty"`
}

// Chain explains a VIP by every step from its targets to its gateways and back.
type Chain struct {
	VIP   string `json:"vip"`
	Steps []Step `json:"steps"`
	// Unasked is why the steps of a program are missing; empty if none are.
	Unasked string `json:"unasked,omitempty"`
}

func (chain *Chain) add(name string, good bool, text, next string) {
	if good {
		next = ""
	}
	chain.Steps = append(chain.Steps, Step{name, good, clean(text), clean(next)})
}

// explain adds the explanation of a reason.
func (chain *Chain) explain(name string, good bool, text string, explanation Explanation) {
	if !good {
		text += ": " + explanation.Meaning
	}
	chain.add(name, good, text, explanation.Next)
}

// gatewayStep is the name of the step of each gateway, of which one is enough.
const gatewayStep = "gateway"

// Good reports whether every step is good, and one of the gateways.
func (chain *Chain) Good() bool {
	gateways, receiving := 0, 0
	for _, step := range chain.Steps {
		switch {
		case step.Name == gatewayStep:
			gateways++
			if step.Good {
				receiving++
			}
		case !step.Good:
			return false
		}
	}
	return gateways == 0 || receiving > 0
}

// Text renders the steps in lines.
func (chain *Chain) Text() string {
	var out strings.Builder
	var rows table
	for _, step := range chain.Steps {
		sign := map[bool]string{true: "ok", false: "NO"}[step.Good]
		rows.row(sign, cut(step.Name, maxCell), cut(step.Text, maxError))
		if step.Next != "" {
			rows.row("", "", "next: "+cut(step.Next, maxError))
		}
	}
	rows.align(&out, "")
	if chain.Unasked != "" {
		out.WriteString(cut(chain.Unasked, maxError) + "\n")
	}
	return out.String()
}

// JSON renders the chain as JSON.
func (chain *Chain) JSON() (string, error) {
	text, err := json.MarshalIndent(chain, "", "  ")
	return string(text) + "\n", err
}

// LBSteps adds the steps that a load balancer confirms: its targets, the data plane, the readiness.
func (chain *Chain) LBSteps(status *lbv1.Status, now time.Time) {
	at := slices.IndexFunc(status.GetVips(), func(v *lbv1.VipStatus) bool { return v.GetVip() == chain.VIP })
	if at < 0 {
		next := "add it to attractor.vips and to the vips of a stream"
		if refused := status.GetConfigurationError(); refused != "" {
			next = "the file on disk is refused: " + refused
		}
		chain.add("trench file of lb", false, "the file in force does not have the VIP", next)
		return
	}
	streams := 0
	for _, stream := range status.GetStreams() {
		if slices.Contains(stream.GetVips(), chain.VIP) {
			streams++
			chain.stream(stream, status.GetDataPlane())
		}
	}
	if streams == 0 {
		chain.add("stream", false, "no stream has the VIP", "add it to the vips of a stream")
	}
	chain.dataPlane(status.GetDataPlane())
	chain.readiness("readiness", status.GetVips()[at].GetReadiness(), now)
	if len(status.GetWatchers()) == 0 {
		chain.add("readiness socket", false, "no frontend is connected",
			"does the frontend run, and do both containers mount the socket? `frontend status`")
	}
}

// stream adds the targets of a stream.
func (chain *Chain) stream(stream *lbv1.StreamStatus, plane *lbv1.DataPlaneStatus) {
	ready, all, failing := 0, 0, ""
	for _, target := range stream.GetTargets() {
		if familyOf(target.GetAddress()) != familyOf(chain.VIP) {
			continue
		}
		all++
		if targetState(target.GetState()) == targetReady {
			ready++
		} else if failing == "" {
			failing = fmt.Sprintf("; %s at %s is %s", target.GetName(), target.GetAddress(), targetState(target.GetState()))
			if cause := cmp.Or(target.GetLastError(), target.GetDrainCause()); cause != "" {
				failing += ": " + cause
			}
		}
	}
	next := "the error of its check; then the application, and `target status` in its pod"
	if all == 0 {
		next = "list targets in the stream, or register them: `target add`, `lb target add`"
	}
	chain.add("targets of "+stream.GetName(), ready >= int(max(1, stream.GetMinReady())),
		fmt.Sprintf("%d of %d ready, needs %d%s", ready, all, max(1, stream.GetMinReady()), failing), next)
	for _, forwarded := range plane.GetStreams() {
		problem := forwarded.GetProblemIpv4()
		if familyOf(chain.VIP) == "ipv6" {
			problem = forwarded.GetProblemIpv6()
		}
		if forwarded.GetName() == stream.GetName() && problem != "" {
			chain.add("data plane of "+stream.GetName(), false, problem, "`lb status`: the data plane's problems")
		}
	}
}

// dataPlane adds the state of the kernel.
func (chain *Chain) dataPlane(plane *lbv1.DataPlaneStatus) {
	const name = "data plane"
	problems := slices.DeleteFunc(slices.Clone(plane.GetProblems()), func(problem *adminv1.Problem) bool {
		return len(problem.GetVips()) > 0 && !slices.Contains(problem.GetVips(), chain.VIP)
	})
	switch {
	case plane == nil:
		chain.add(name, true, "another process forwards (--dataplane=none)", "")
	case plane.GetError() != "":
		chain.add(name, false, plane.GetError(), "`lb status`; the log of lb")
	case len(problems) > 0:
		chain.add(name, false, problems[0].GetObject()+": "+problems[0].GetDetail(), problems[0].GetRemedy())
	case len(plane.GetDrift()) > 0:
		drift := plane.GetDrift()[0]
		chain.add(name, false, "another process changed "+drift.GetObject()+": "+drift.GetDetail(),
			"`lb reconcile`, or `lb resume` under a hold")
	default:
		chain.add(name, true, fmt.Sprintf("revision %d is in the kernel", plane.GetAppliedRevision()), "")
	}
}

// readiness adds what the load balancer reports.
func (chain *Chain) readiness(name string, report *readinessv1.VipReadiness, now time.Time) {
	text := vipState(report.GetState()) + " since " + ago(report.GetSince(), now)
	if report.GetDetail() != "" {
		text += " (" + report.GetDetail() + ")"
	}
	chain.explain(name, report.GetState() == readinessv1.VipState_VIP_STATE_READY, text, Explain(report.GetReason()))
}

// FrontendSteps adds the steps that a frontend confirms: the lease, the gate, BIRD, each gateway and
// the way back.
func (chain *Chain) FrontendSteps(status *frontendv1.Status, now time.Time) {
	at := slices.IndexFunc(status.GetVips(), func(v *frontendv1.VipStatus) bool { return v.GetVip() == chain.VIP })
	if at < 0 {
		explanation := Explain(readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_CONFIGURED)
		chain.add("trench file of frontend", false, explanation.Meaning,
			cmp.Or(status.GetConfigurationError(), explanation.Next))
		return
	}
	report := status.GetVips()[at]
	chain.lease(status, report, now)
	decision := "advertised"
	switch report.GetAdvertisement() {
	case readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED:
		decision = "de-preferred"
	case readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN, readinessv1.Advertisement_ADVERTISEMENT_UNSPECIFIED:
		decision = "withdrawn"
	}
	explanation := Explain(report.GetReason())
	if next := meridioNext[report.GetReason()]; next != "" && besideMeridio(status) {
		explanation.Next = next
	}
	chain.explain("gate", decision == "advertised", decision+" since "+ago(report.GetSince(), now), explanation)
	running := status.GetBird().GetPid() != 0 && status.GetBird().GetError() == ""
	chain.add("BIRD", running, bird(status.GetBird(), now), "BIRD's lines in the frontend's log")
	chain.gateways(status, report, now)
	family := familyOf(chain.VIP)
	routes := map[string]string{
		"SourceRouting/" + family: "rules and routes are in the kernel", "RouteBack/" + family: "a gateway announces a route",
	}
	for _, condition := range status.GetConditions() {
		// Without a gateway RouteBack says nothing.
		unknown := condition.GetServing() && condition.GetName() == "RouteBack/"+family && len(report.GetGateways()) == 0
		if text := routes[condition.GetName()]; text != "" && !unknown {
			chain.add(condition.GetName(), condition.GetServing(), cmp.Or(condition.GetDetail(), text),
				"`frontend status`: the condition; `ip -br link`, `birdc show route`")
		}
	}
}

// lease adds the state of the load balancer's readiness.
func (chain *Chain) lease(status *frontendv1.Status, report *frontendv1.VipStatus, now time.Time) {
	if !status.GetGating() {
		chain.add("lease", true, "--gating=off: the load balancer is not asked", "")
		return
	}
	source := status.GetLoadBalancer()
	lost := readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_LOST
	if source.GetPosition().GetInstanceId() == "" {
		lost = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NEVER_SEEN
	}
	chain.add("lease", source.GetFreshness() == frontendv1.Freshness_FRESHNESS_LIVE && source.GetSynced(),
		loadBalancer(status), Explain(lost).Next)
	// Otherwise the load balancer has said it above.
	if report.GetReadiness() != nil && chain.Unasked != "" {
		chain.readiness("readiness", report.GetReadiness(), now)
	}
}

// gateways adds each gateway of the VIP's family.
func (chain *Chain) gateways(status *frontendv1.Status, report *frontendv1.VipStatus, now time.Time) {
	found := false
	for _, gateway := range status.GetGateways() {
		if familyOf(gateway.GetAddress()) != familyOf(chain.VIP) {
			continue
		}
		found = true
		receives := slices.Contains(report.GetGateways(), gateway.GetName())
		text := fmt.Sprintf("%s is %s since %s", gateway.GetName(), strings.ToLower(upOrDown(gateway.GetUp())),
			ago(gateway.GetSince(), now))
		next := "`birdc show protocols all " + gateway.GetName() + "`; link, VLAN, AS numbers and password of the gateway"
		switch {
		case receives && gateway.GetExport() == "depreferred":
			text += " and receives the VIP de-preferred"
		case receives:
			text += " and receives the VIP"
		case gateway.GetUp():
			text += " and does not receive the VIP"
			next = "the gate above"
		}
		if gateway.GetDrained() {
			text += ", drained by an operator" + drainEnd(gateway.GetDrainEnds(), now)
			next = "`frontend undrain --gateway=" + gateway.GetName() + "`"
		}
		problems, compare := sessionProblems(status, gateway, now)
		state := strings.TrimSuffix(gateway.GetState(), " ("+gateway.GetLastError()+")")
		for _, detail := range append([]string{gateway.GetChange(), state}, problems...) {
			if detail != "" && !(gateway.GetUp() && detail == gateway.GetState()) {
				text += ", " + strings.TrimPrefix(detail, "down: ")
			}
		}
		if compare != "" && !gateway.GetDrained() {
			next = compare + "; " + next
		}
		chain.add(gatewayStep, receives, text, next)
	}
	if !found {
		chain.add(gatewayStep, false, "no gateway of the VIP's family is configured", "add one to attractor.gateways")
	}
}
