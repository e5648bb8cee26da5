package status

import (
	"fmt"
	"slices"
	"strings"
	"time"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
)

// writeDataPlane appends the state of the data plane, if the load balancer has one.
func writeDataPlane(b *strings.Builder, d *lbv1.DataPlaneStatus, now time.Time) {
	if d == nil {
		return
	}
	conntrack := "established flows stay with their target"
	switch d.GetConntrack() {
	case "off":
		conntrack = "off: flows move with the table"
	case "loose":
		conntrack = "loose: " + conntrack + ", with replies through any pod"
	}
	var head table
	head.row("data plane", d.GetMode())
	head.row("conntrack", conntrack)
	confirmed := fmt.Sprintf("change %d of %d", d.GetAppliedRevision(), d.GetWantedRevision())
	switch {
	case d.GetWantedRevision() == 0:
		confirmed = "state of an earlier lb; not every target was checked yet"
	case d.GetAppliedRevision() >= d.GetWantedRevision():
		confirmed = "desired state"
	}
	head.row("confirmed", confirmed)
	b.WriteByte('\n')
	head.align(b, "")
	if e := d.GetError(); e != "" {
		fmt.Fprintf(b, "NOTHING CAN BE CHANGED (%s): %s\nThe kernel state is kept.\n",
			plural(int(d.GetFailures()), "attempt"), cut(e, maxLine))
	}
	writeList(b, "Held back:", single(d.GetHeldBack()))
	writeList(b, "Problems of the data plane:", problemItems(d.GetProblems()))
	var drift [][]string
	for _, x := range d.GetDrift() {
		drift = append(drift, []string{Drift(x) + ", " + ago(x.GetSince(), now)})
	}
	writeList(b, "Drift, not repaired yet or held:", drift)
	if e := d.GetUnread(); e != "" {
		fmt.Fprintf(b, "\nFailed to read the targets in the kernel: %s\n", cut(e, maxLine))
	}
	dataPlaneStreams(d.GetStreams()).write(b)
	dataPlaneTargets(d.GetStreams(), now).write(b)
}

// holds lists held streams at the top of the status.
func holds(b *strings.Builder, d *lbv1.DataPlaneStatus, now time.Time) {
	for _, h := range d.GetHolds() {
		what, end := "ALL STREAMS", "until `lb resume`"
		if h.GetStream() != "" {
			what = "STREAM " + clean(h.GetStream())
		}
		if h.GetUntil() != nil {
			end = "for another " + span(h.GetUntil().AsTime().Sub(now))
		}
		fmt.Fprintf(b, "%s HELD %s: drift of the data plane is not repaired (%s)\n",
			what, end, plural(len(d.GetDrift()), "object"))
	}
}

// Drift renders one object that another process changed on a line.
func Drift(d *lbv1.DataPlaneDrift) string {
	line := clean(d.GetObject())
	if d.GetStream() != "" {
		line += " of stream " + clean(d.GetStream())
	}
	if d.GetTarget() != "" {
		line += ", target " + clean(d.GetTarget())
	}
	return line + ": " + cut(d.GetDetail(), maxLine)
}

// stateServing is the state of a target that receives new flows.
const stateServing = "serving"

func dataPlaneStreams(all []*lbv1.DataPlaneStream) *table {
	t := newTable("STREAM", "TABLE", "SEED", "VIPS IN KERNEL", "SERVING", "TARGETS IN KERNEL", "MATCH", "NOT MATCHED",
		"PROBLEM")
	for _, s := range all {
		serving := 0
		for _, x := range s.GetTargets() {
			if x.GetState() == stateServing {
				serving++
			}
		}
		var problems []string
		for family, problem := range map[string]string{"IPv4": s.GetProblemIpv4(), "IPv6": s.GetProblemIpv6()} {
			if problem != "" {
				problems = append(problems, family+": "+problem)
			}
		}
		slices.Sort(problems)
		size, seed := fmt.Sprint(s.GetSize()), fmt.Sprint(s.GetSeed())
		if s.GetSize() == 0 { // the stream is no longer configured
			size, seed = none, none
		}
		match, dropped := none, none
		if len(s.GetMatch()) > 0 {
			match, dropped = names(s.GetMatch()), fmt.Sprint(s.GetUnmatchedPackets())
		}
		t.add(s.GetName(), size, seed, s.GetVips(), serving, len(s.GetTargets()), match, dropped,
			strings.Join(problems, "; "))
	}
	return t
}

func dataPlaneTargets(all []*lbv1.DataPlaneStream, now time.Time) *table {
	t := newTable("STREAM", "TARGET", "MARK AND TABLE", "IN KERNEL", "ENTRIES IPV4", "ENTRIES IPV6", "PACKETS",
		"ADDRESSES")
	for _, serving := range []bool{false, true} {
		for _, s := range all {
			for _, x := range s.GetTargets() {
				if (x.GetState() == stateServing) != serving {
					continue
				}
				state := x.GetState()
				if end := x.GetDrainEnd(); end != nil && end.AsTime().After(now) {
					state += ", " + span(end.AsTime().Sub(now)) + " left"
				}
				t.add(s.GetName(), x.GetName(), x.GetNumber(), state, x.GetEntriesIpv4(), x.GetEntriesIpv6(),
					x.GetPackets(), strings.Join(x.GetAddresses(), ", "))
			}
		}
	}
	return t
}
