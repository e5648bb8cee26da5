package status

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
)

// Pod is a trench pod as its programs describe it.
type Pod struct {
	Name string
	// Frontend and LB are nil if the program does not answer, or if the pod does not have it.
	Frontend *frontendv1.Status
	LB       *lbv1.Status
	// Problems lists why programs do not answer, and the end of the pod.
	Problems []string
}

// Pods renders a line for each pod, with its problems, and the VIPs that a pod does not advertise.
// It reports whether every program answers, every pod advertises every VIP, every gateway is up,
// and every configuration and data plane is in force.
func Pods(all []Pod, now time.Time) (text string, good bool) {
	rows := &table{rows: [][]string{{"", "POD", "VIPS", "GATEWAYS", "TARGETS", "PROBLEM"}}}
	count := 0
	for _, pod := range all {
		problems := pod.AllProblems()
		if len(problems) == 0 {
			rows.row(append([]string{"ok", clean(pod.Name)}, append(pod.counts(), none)...)...)
			count++
			continue
		}
		rows.row(append([]string{"NO", clean(pod.Name)}, append(pod.counts(), cut(problems[0], maxError))...)...)
		for _, problem := range problems[1:min(len(problems), maxItems)] {
			rows.row("", "", "", "", "", cut(problem, maxError))
		}
	}
	var out strings.Builder
	rows.align(&out, "")
	writeUnadvertised(&out, all, now)
	fmt.Fprintf(&out, "\n%d of %s good\n", count, plural(len(all), "pod"))
	return out.String(), count == len(all)
}

// counts returns the cells of a pod's VIPs, gateways and targets.
func (pod Pod) counts() []string {
	cells := []string{none, none, none}
	if pod.Frontend != nil {
		advertised, depreferred, up := 0, 0, 0
		for _, vip := range pod.Frontend.GetVips() {
			if isAdvertised(vip.GetAdvertisement()) {
				advertised++
			}
			if vip.GetAdvertisement() == readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED {
				depreferred++
			}
		}
		for _, gateway := range pod.Frontend.GetGateways() {
			if gateway.GetUp() {
				up++
			}
		}
		cells[0] = fmt.Sprintf("%d/%d", advertised, len(pod.Frontend.GetVips()))
		if depreferred > 0 {
			cells[0] += fmt.Sprintf(", %d de-preferred", depreferred)
		}
		cells[1] = fmt.Sprintf("%d/%d", up, len(pod.Frontend.GetGateways()))
	}
	if pod.LB != nil {
		// A target has an entry for each address.
		total, failing := map[string]bool{}, map[string]bool{}
		for _, stream := range pod.LB.GetStreams() {
			for _, target := range stream.GetTargets() {
				name := stream.GetName() + "/" + target.GetName()
				total[name] = true
				if targetState(target.GetState()) != targetReady {
					failing[name] = true
				}
			}
		}
		cells[2] = fmt.Sprintf("%d/%d", len(total)-len(failing), len(total))
	}
	return cells
}

// AllProblems lists the problems that a pod's programs report, after programs that do not answer.
func (pod Pod) AllProblems() []string {
	all := slices.Clone(pod.Problems)
	if refused := pod.Frontend.GetConfigurationError(); refused != "" {
		all = append(all, "frontend: the configuration on disk is not in force: "+refused)
	}
	for _, gateway := range pod.Frontend.GetGateways() {
		// A held gateway follows its VIPs, which have the reason.
		if !gateway.GetUp() && !gateway.GetHeld() {
			all = append(all, "gateway "+gateway.GetName()+" is DOWN: "+cmp.Or(gateway.GetLastError(), gateway.GetState()))
		}
	}
	withdrawn := map[string]int{} // by explanation
	for _, vip := range pod.Frontend.GetVips() {
		if !isAdvertised(vip.GetAdvertisement()) {
			withdrawn[explainReason(pod.Frontend, vip.GetReason()).Meaning]++
		}
	}
	for _, meaning := range slices.Sorted(maps.Keys(withdrawn)) {
		all = append(all, plural(withdrawn[meaning], "VIP")+" withdrawn: "+meaning)
	}
	if refused := pod.LB.GetConfigurationError(); refused != "" && refused != pod.Frontend.GetConfigurationError() {
		all = append(all, "lb: the trench file on disk is not in force: "+refused)
	}
	if failed := pod.LB.GetDataPlane().GetError(); failed != "" {
		all = append(all, "data plane: "+failed)
	}
	for _, problem := range pod.LB.GetDataPlane().GetProblems() {
		all = append(all, problem.GetObject()+": "+problem.GetDetail()+"; "+problem.GetRemedy())
	}
	return all
}

// writeUnadvertised appends the VIPs that an answering pod does not advertise.
func writeUnadvertised(out *strings.Builder, all []Pod, now time.Time) {
	advertisers, reasons, answering := map[string]int{}, map[string]string{}, 0
	for _, pod := range all {
		if pod.Frontend == nil {
			continue
		}
		answering++
		for _, vip := range pod.Frontend.GetVips() {
			if isAdvertised(vip.GetAdvertisement()) {
				advertisers[vip.GetVip()]++
			} else if reasons[vip.GetVip()] == "" {
				reasons[vip.GetVip()] = pod.Name + ": " + VIPReason(vip, now)
			}
		}
	}
	var items [][]string
	for _, vip := range slices.Sorted(maps.Keys(reasons)) {
		items = append(items, []string{fmt.Sprintf("%s: advertised by %d of %s; %s", vip, advertisers[vip],
			plural(answering, "answering pod"), reasons[vip])})
	}
	// At most maxItems lines: the rest has similar reasons, which the pods' lines count.
	writeList(out, "Not advertised by every pod (explain VIP shows each step):", items[:min(len(items), maxItems)])
}

// PodsJSON renders pods as a JSON list.
func PodsJSON(all []Pod) (string, error) {
	type pod struct {
		Name     string          `json:"name"`
		Problems []string        `json:"problems"`
		Frontend json.RawMessage `json:"frontend"`
		LB       json.RawMessage `json:"lb"`
	}
	list := make([]pod, len(all))
	for i, from := range all {
		list[i] = pod{Name: from.Name, Problems: from.AllProblems()}
		var failed [2]error
		list[i].Frontend, failed[0] = rawJSON(from.Frontend, from.Frontend != nil)
		list[i].LB, failed[1] = rawJSON(from.LB, from.LB != nil)
		if err := errors.Join(failed[:]...); err != nil {
			return "", err
		}
	}
	text, err := json.MarshalIndent(list, "", "  ")
	return string(text) + "\n", err
}

// rawJSON renders a message, or null if it is absent.
func rawJSON(message proto.Message, exists bool) (json.RawMessage, error) {
	if !exists {
		return json.RawMessage("null"), nil
	}
	text, err := JSON(message, false)
	return json.RawMessage(text), err
}

// Explain returns the steps of a VIP in a pod. A program that does not answer is a broken step.
func (pod Pod) Explain(vip string, now time.Time) *Chain {
	chain := &Chain{VIP: vip}
	for _, problem := range pod.Problems {
		chain.add("pod", false, problem, "`kubectl describe pod`, and the log of the container")
	}
	if pod.LB != nil {
		chain.LBSteps(pod.LB, now)
	} else {
		chain.Unasked = "the steps of lb are missing"
	}
	if pod.Frontend != nil {
		chain.FrontendSteps(pod.Frontend, now)
	}
	return chain
}
