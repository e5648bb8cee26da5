package status

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

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

// Chain explains a VIP by every step from its targets to its gateways and back, or a Service by its
// steps into the trench file and the chain of each of its VIPs.
type Chain struct {
	VIP     string `json:"vip,omitempty"`
	Service string `json:"service,omitempty"`
	Steps   []Step `json:"steps"`
	// VIPs are the chains of a Service's VIPs in this pod.
	VIPs []*Chain `json:"vips,omitempty"`
	// Unasked is why the steps of a program are missing; empty if none are.
	Unasked string `json:"unasked,omitempty"`

	exports map[string]*frontendv1.Export // by gateway; nil if unknown
}

// Exported sets how BIRD exports the VIP to each gateway, for FrontendSteps.
func (chain *Chain) Exported(exports []*frontendv1.Export) {
	chain.exports = map[string]*frontendv1.Export{}
	for _, export := range exports {
		chain.exports[export.GetGateway()] = export
	}
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
	for _, part := range chain.VIPs {
		if !part.Good() {
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
		if step.Good && step.Next != "" {
			sign = "!!" // a problem that breaks no step
		}
		rows.row(sign, cut(step.Name, maxCell), cut(step.Text, maxError))
		if step.Next != "" {
			rows.row("", "", "next: "+cut(step.Next, maxError))
		}
	}
	rows.align(&out, "")
	if chain.Unasked != "" {
		out.WriteString(cut(chain.Unasked, maxError) + "\n")
	}
	for _, part := range chain.VIPs {
		out.WriteString("\n" + cut(part.VIP, maxCell) + "\n" + part.Text())
	}
	return out.String()
}

// Silent adds that a program does not answer.
func (chain *Chain) Silent(program string, err error) {
	chain.add(program, false, err.Error(),
		"does the container "+program+" run, what does it log, and is its admin socket shared?")
}

// JSON renders the chain as JSON.
func (chain *Chain) JSON() (string, error) {
	text, err := json.MarshalIndent(chain, "", "  ")
	return string(text) + "\n", err
}

// refused adds why the trench file on disk is not in force, if it is not.
func (chain *Chain) refused(name, problems, program string) {
	if problems != "" {
		chain.note(name, "an older file is in force, since the file on disk is refused: "+problems,
			"correct the file: `"+program+" validate FILE`")
	}
}

// LBSteps adds the steps that a load balancer confirms: its targets, the data plane, the readiness.
func (chain *Chain) LBSteps(status *lbv1.Status, now time.Time) {
	chain.refused("trench file of lb", status.GetConfigurationError(), "lb")
	at := slices.IndexFunc(status.GetVips(), func(v *lbv1.VipStatus) bool { return v.GetVip() == chain.VIP })
	if at < 0 {
		chain.add("trench file of lb", false, "the file in force does not have the VIP",
			"add it to attractor.vips and to the vips of a stream")
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
	chain.dataPlane(status.GetDataPlane(), status.GetVips()[at].GetReadiness())
	chain.readiness("readiness", status.GetVips()[at].GetReadiness(), now)
	if len(status.GetWatchers()) == 0 {
		chain.add("readiness socket", false, "no frontend is connected",
			"does the frontend run, and do both containers mount the socket? `frontend status`")
	}
}

func (chain *Chain) stream(stream *lbv1.StreamStatus, plane *lbv1.DataPlaneStatus) {
	ready, other, needed := 0, 0, int(max(1, stream.GetMinReady()))
	var failing []*lbv1.TargetStatus
	for _, target := range stream.GetTargets() {
		switch {
		case familyOf(target.GetAddress()) != familyOf(chain.VIP):
			other++
		case targetState(target.GetState()) == targetReady:
			ready++
		default:
			failing = append(failing, target)
		}
	}
	// A target that fails its check explains more than one that leaves.
	failing = problemsFirst(failing, func(target *lbv1.TargetStatus) int {
		switch {
		case target.GetDrainCause() != "":
			return 2
		case target.GetLastError() == "":
			return 1
		}
		return 0
	})
	text := fmt.Sprintf("%d of %d ready, needs %d", ready, ready+len(failing), needed)
	for _, target := range failing[:min(len(failing), maxNames)] {
		text += fmt.Sprintf("; %s at %s is %s", target.GetName(), target.GetAddress(), targetState(target.GetState()))
		if cause := cmp.Or(target.GetDrainCause(), target.GetLastError()); cause != "" {
			text += ": " + cause
		}
	}
	var next string
	switch {
	case len(failing) > 0:
		next = targetRemedy(stream.GetName(), failing[0])
	case ready > 0:
		next = fmt.Sprintf("add targets to %s, or lower its minReady to %d", stream.GetName(), ready)
	case other > 0:
		next = fmt.Sprintf("add an %s address to ips of its targets, or take the VIP out of %s", familyOf(chain.VIP),
			stream.GetName())
	default:
		next = "list targets in the stream, or register them: `target add`, `lb target add`"
	}
	chain.add("targets of "+stream.GetName(), ready >= needed, text, next)
	for _, forwarded := range plane.GetStreams() {
		problem := forwarded.GetProblemIpv4()
		if familyOf(chain.VIP) == "ipv6" {
			problem = forwarded.GetProblemIpv6()
		}
		if forwarded.GetName() == stream.GetName() && problem != "" {
			chain.add("data plane of "+stream.GetName(), false, problem, "the data plane below; `lb status`")
		}
	}
}

// targetRemedies maps parts of a check's error to the remedy; the first one counts.
var targetRemedies = []struct{ part, next string }{
	{
		"does not accept packets",
		"`target run` with --pool and --interface in the pod of the target; `target status` there",
	},
	{
		"connection refused",
		"start the application, let it listen on this address and port, or correct the port of the check",
	},
	{"is down", "`ip -br link`: set the link up"},
	{
		"no connected network",
		"correct the address in ips, or give this pod an interface in that network: `ip -br address`",
	},
	{"no answer, and none", "correct the address in ips; `ping` it from here: does the host run, on this network?"},
	{"firewall", "the data plane below; then `nft list ruleset` here and there, and the network policies in between"},
	{"ip address del", "the data plane below"},
	{"no answer", unfitCheck},
	{"reset by peer", unfitCheck},
	{"answer is not", unfitCheck},
	{"no route to host", "correct the address in ips; `ping` it from here: does the host run, on this network?"},
	{"status", "correct the path of the check, or see why the application answers so: `curl` it from here"},
}

const unfitCheck = "does the check fit the application (its kind, port and path)? `curl` it from here"

// targetRemedy returns what to do about a target that is not ready.
func targetRemedy(stream string, target *lbv1.TargetStatus) string {
	if cause := target.GetDrainCause(); cause != "" {
		if strings.Contains(cause, "operator") {
			return "`lb target undrain " + target.GetName() + " --stream=" + stream + "`"
		}
		return "list the target again in the stream, without terminating; in Kubernetes: which Pods are ready?"
	}
	for _, remedy := range targetRemedies {
		if strings.Contains(target.GetLastError(), remedy.part) {
			return remedy.next
		}
	}
	return "the error of its check; then the application, and `target status` in its pod"
}

// note adds a problem that breaks no step.
func (chain *Chain) note(name, text, next string) {
	chain.Steps = append(chain.Steps, Step{name, true, clean(text), clean(next)})
}

// dataPlane adds the state of the kernel. A problem that names no VIP is a suspect while the VIP is
// not ready, and breaks nothing otherwise.
func (chain *Chain) dataPlane(plane *lbv1.DataPlaneStatus, report *readinessv1.VipReadiness) {
	const name = "data plane"
	before := len(chain.Steps)
	if plane.GetError() != "" {
		chain.add(name, false, plane.GetError(), "`lb status`; the log of lb")
	}
	isReady := report.GetState() == readinessv1.VipState_VIP_STATE_READY
	for _, problem := range plane.GetProblems() {
		text := problem.GetObject() + ": " + problem.GetDetail()
		switch {
		case len(problem.GetVips()) > 0 && !slices.Contains(problem.GetVips(), chain.VIP),
			// The kernel parameters of the other family.
			strings.HasPrefix(problem.GetObject(), "net.ipv") && !strings.HasPrefix(problem.GetObject(),
				"net."+familyOf(chain.VIP)):
		case len(problem.GetVips()) > 0 || !isReady:
			chain.add(name, false, text, problem.GetRemedy())
		default:
			chain.note(name, text, problem.GetRemedy())
		}
	}
	if drifts := plane.GetDrift(); len(drifts) > 0 {
		text := "another process changed " + drifts[0].GetObject() + ": " + drifts[0].GetDetail()
		if len(drifts) > 1 {
			text += fmt.Sprintf(", and %d more", len(drifts)-1)
		}
		chain.add(name, false, text, "`lb reconcile`, or `lb resume` under a hold")
	}
	switch {
	case len(chain.Steps) > before:
	case plane == nil:
		chain.add(name, true, "another process forwards (--dataplane=none)", "")
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

// FrontendSteps adds the steps that a frontend confirms: the lease, the gate, BIRD, each gateway
// and the way back.
func (chain *Chain) FrontendSteps(status *frontendv1.Status, now time.Time) {
	// lb reads the same file.
	if chain.Unasked != "" {
		chain.refused("trench file of frontend", status.GetConfigurationError(), "frontend")
	}
	vips := slices.Concat(status.GetVips(), status.GetLeaving())
	at := slices.IndexFunc(vips, func(v *frontendv1.VipStatus) bool { return v.GetVip() == chain.VIP })
	if at < 0 {
		explanation := Explain(readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_CONFIGURED)
		chain.add("trench file of frontend", false, explanation.Meaning, explanation.Next)
		return
	}
	report := vips[at]
	chain.lease(status, report, now)
	decision := "advertised"
	switch report.GetAdvertisement() {
	case readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED:
		decision = "de-preferred"
	case readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN, readinessv1.Advertisement_ADVERTISEMENT_UNSPECIFIED:
		decision = "withdrawn"
	}
	chain.explain("gate", decision == "advertised", decision+" since "+ago(report.GetSince(), now),
		explainReason(status, report.GetReason()))
	process := status.GetBird()
	running := (process.GetPid() != 0 || process.GetExternal()) && process.GetError() == ""
	next := "BIRD's lines in the frontend's log"
	if process.GetExternal() {
		next = "does the speaker run, and may the frontend read its socket?"
	}
	chain.add(speaker(process), running, bird(process, now), next)
	chain.gateways(status, report, now)
	family := familyOf(chain.VIP)
	routes := map[string]string{
		"SourceRouting/" + family: "rules and routes are in the kernel", "RouteBack/" +
			family: "a gateway announces a route",
	}
	for _, condition := range status.GetConditions() {
		// Without a gateway RouteBack says nothing.
		unknown := condition.GetServing() && condition.GetName() == "RouteBack/"+family && len(report.GetGateways()) == 0
		if text := routes[condition.GetName()]; text != "" && !unknown {
			next := "`frontend status`: the condition; `ip -br link`, `birdc show route`"
			if process.GetExternal() {
				next = "`frontend status`: the condition; `ip -br link`, the speaker's routes"
			}
			// The detail may end with the remedy.
			for _, before := range []string{"; ", ": run ", ": remove "} {
				if _, remedy, is := strings.Cut(condition.GetDetail(), before); is {
					next = strings.TrimLeft(before, ":; ") + remedy
				}
			}
			chain.add(condition.GetName(), condition.GetServing(), cmp.Or(condition.GetDetail(), text), next)
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
	text := View{}.loadBalancer(status)
	if failure := source.GetError(); failure != "" && !strings.Contains(text, failure) {
		text += ", last error: " + failure
	}
	chain.add("lease", source.GetFreshness() == frontendv1.Freshness_FRESHNESS_LIVE && source.GetSynced(), text,
		Explain(lost).Next)
	// Otherwise the load balancer has said it above.
	if report.GetReadiness() != nil && chain.Unasked != "" {
		chain.readiness("readiness", report.GetReadiness(), now)
	}
}
