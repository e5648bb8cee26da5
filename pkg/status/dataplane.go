package status

import (
	"fmt"
	"slices"
	"strings"
	"time"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
)

// writeDataPlane appends the state of the data plane, if the load balancer has one.
func (view View) writeDataPlane(out *strings.Builder, plane *lbv1.DataPlaneStatus, now time.Time) {
	if plane == nil {
		return
	}
	conntrack := "established flows stay with their target"
	switch plane.GetConntrack() {
	case "off":
		conntrack = "off: flows move with the table"
	case "loose":
		conntrack = "loose: " + conntrack + ", with replies through any pod"
	}
	var head table
	head.row("data plane", plane.GetMode())
	if plane.GetConntrack() != "" { // else VIPs are local addresses
		head.row("conntrack", conntrack)
	}
	if fast := plane.GetFastPath(); fast != nil {
		head.row("fast path", fastPath(fast))
	}
	// Revision 0 is not desired by this process: the kernel still has the state of its predecessor.
	confirmed := fmt.Sprintf("change %d of %d", plane.GetAppliedRevision(), plane.GetWantedRevision())
	switch {
	case plane.GetWantedRevision() == 0:
		confirmed = "state of an earlier lb; not every target was checked yet"
	case plane.GetAppliedRevision() >= plane.GetWantedRevision():
		confirmed = "desired state"
	}
	head.row("confirmed", confirmed)
	if moved := plane.GetMovedFlows(); moved.GetAsked()+moved.GetFull() > 0 {
		head.row("moved", fmt.Sprintf("flows of other pods: %d of the current target, %d of another one, %d denied by all; "+
			"%d packets copied, %d not", moved.GetCurrent(), moved.GetDecided(), moved.GetDenied(), moved.GetAsked(),
			moved.GetFull()))
	}
	if !view.Problems {
		head.write(out)
	}
	// An error concerns the whole data plane, so it comes before single problems.
	if failure := plane.GetError(); failure != "" {
		fmt.Fprintf(out, "NOTHING CAN BE CHANGED (%s): %s\nThe kernel state is kept.\n",
			plural(int(plane.GetFailures()), "attempt"), cut(failure, maxLine))
	}
	writeList(out, "Held back:", single(plane.GetHeldBack()))
	writeList(out, "Problems of the data plane:", problemItems(plane.GetProblems()))
	var drift [][]string
	for _, object := range plane.GetDrift() {
		drift = append(drift, []string{Drift(object) + ", " + ago(object.GetSince(), now)})
	}
	writeList(out, "Drift, not repaired yet or held:", drift)
	// Without this line, the tables below would look like an empty kernel.
	if failure := plane.GetUnread(); failure != "" {
		fmt.Fprintf(out, "\nFailed to read the targets in the kernel: %s\n", cut(failure, maxLine))
	}
	dataPlaneStreams(only(view, plane.GetStreams(), func(stream *lbv1.DataPlaneStream) bool {
		return stream.GetProblemIpv4() != "" || stream.GetProblemIpv6() != ""
	})).write(out)
	if view.Problems {
		return
	}
	earlierTargets(plane.GetStreams(), now).write(out)
	dataPlaneTargets(plane.GetStreams(), now).write(out)
}

// fastPath renders the interfaces of the fast path, and the reasons why it is detached.
func fastPath(fast *lbv1.FastPathStatus) string {
	var attached, reasons []string
	for _, at := range fast.GetInterfaces() {
		if at.GetReason() == "" {
			attached = append(attached, clean(at.GetName()))
		} else {
			reasons = append(reasons, "; not to "+clean(at.GetName())+": "+cut(at.GetReason(), maxLine))
		}
	}
	state := "attached to " + strings.Join(attached, ", ")
	if fast.GetReason() != "" {
		state = "detached: " + cut(fast.GetReason(), maxLine)
	}
	return state + strings.Join(reasons, "")
}

// holds lists held streams at the top of the status.
func holds(out *strings.Builder, plane *lbv1.DataPlaneStatus, now time.Time) {
	for _, hold := range plane.GetHolds() {
		what, end := "ALL STREAMS", "until `lb resume`"
		if hold.GetStream() != "" {
			what = "STREAM " + clean(hold.GetStream())
		}
		if hold.GetUntil() != nil {
			end = "for another " + span(hold.GetUntil().AsTime().Sub(now))
		}
		fmt.Fprintf(out, "%s HELD %s: drift of the data plane is not repaired (%s)\n",
			what, end, plural(len(plane.GetDrift()), "object"))
	}
}

// Drift renders one object that another process changed on a line.
func Drift(drift *lbv1.DataPlaneDrift) string {
	line := clean(drift.GetObject())
	if drift.GetStream() != "" {
		line += " of stream " + clean(drift.GetStream())
	}
	if drift.GetTarget() != "" {
		line += ", target " + clean(drift.GetTarget())
	}
	return line + ": " + cut(drift.GetDetail(), maxLine)
}

// stateServing is the state of a target that receives new flows.
const stateServing = "serving"

func dataPlaneStreams(all []*lbv1.DataPlaneStream) *table {
	rows := newTable("STREAM", "TABLE", "SEED", "VIPS IN KERNEL", "SERVING", "TARGETS IN KERNEL", "MATCH", "NOT MATCHED",
		"PROBLEM")
	for _, stream := range all {
		serving := 0
		for _, target := range stream.GetTargets() {
			if target.GetState() == stateServing {
				serving++
			}
		}
		var problems []string
		for family, problem := range map[string]string{"IPv4": stream.GetProblemIpv4(), "IPv6": stream.GetProblemIpv6()} {
			if problem != "" {
				problems = append(problems, family+": "+problem)
			}
		}
		slices.Sort(problems) // the map has no order
		size, seed := fmt.Sprint(stream.GetSize()), fmt.Sprint(stream.GetSeed())
		if stream.GetSize() == 0 { // the stream is no longer configured
			size, seed = none, none
		}
		match, dropped := none, none
		if len(stream.GetMatch()) > 0 {
			match, dropped = names(stream.GetMatch()), fmt.Sprint(stream.GetUnmatchedPackets())
		}
		rows.add(stream.GetName(), size, seed, stream.GetVips(), serving, len(stream.GetTargets()), match, dropped,
			strings.Join(problems, "; "))
	}
	return rows
}

// earlierTargets lists the sets of targets that are asked about flows of other pods.
func earlierTargets(all []*lbv1.DataPlaneStream, now time.Time) *table {
	rows := newTable("STREAM", "EARLIER TARGETS", "IN FORCE", "ENDED")
	for _, stream := range all {
		if stream.GetAsksAllTargets() {
			rows.add(stream.GetName(), "all are asked: earlier ones are unknown", none, none)
		}
		for _, generation := range stream.GetEarlier() {
			lasted, ended := "trench file", none
			if generation.GetUntil() != nil {
				lasted, ended = span(generation.GetLasted().AsDuration()), ago(generation.GetUntil(), now)
			}
			targets := names(generation.GetTargetsIpv4())
			if !slices.Equal(generation.GetTargetsIpv4(), generation.GetTargetsIpv6()) {
				targets = fmt.Sprintf("IPv4: %s; IPv6: %s", targets, names(generation.GetTargetsIpv6()))
			}
			rows.add(stream.GetName(), targets, lasted, ended)
		}
	}
	return rows
}

func dataPlaneTargets(all []*lbv1.DataPlaneStream, now time.Time) *table {
	rows := newTable("STREAM", "TARGET", "MARK AND TABLE", "IN KERNEL", "ENTRIES IPV4", "ENTRIES IPV6", "PACKETS",
		"ADDRESSES")
	// Targets that do not serve come first: they are the reason to look.
	for _, serving := range []bool{false, true} {
		for _, stream := range all {
			for _, target := range stream.GetTargets() {
				if (target.GetState() == stateServing) != serving {
					continue
				}
				state := target.GetState()
				if end := target.GetDrainEnd(); end != nil && end.AsTime().After(now) {
					state += ", " + span(end.AsTime().Sub(now)) + " left"
				}
				rows.add(stream.GetName(), target.GetName(), target.GetNumber(), state, target.GetEntriesIpv4(),
					target.GetEntriesIpv6(),
					target.GetPackets(), strings.Join(target.GetAddresses(), ", "))
			}
		}
	}
	return rows
}
