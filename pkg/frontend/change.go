package frontend

import (
	"fmt"
	"slices"
	"strings"
	"time"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/turns"
)

// slotTime is the time of one pod to restart the only session of a family: a drain time and the
// time in which a gateway usually connects. A cycle of all slots takes 2 min.
const slotTime = 2 * time.Second

// changeText describes the change of a gateway for the status, or returns "".
func changeText(change turns.Change, now time.Time) string {
	left := ""
	if change.Until.After(now) {
		left = fmt.Sprintf(", %d s left", (change.Until.Sub(now)+time.Second-1)/time.Second)
	}
	parameters := strings.Join(change.Parameters, ", ")
	switch change.Phase {
	case turns.Pending:
		return "change pending: " + parameters
	case turns.Draining:
		return "draining before a change: " + parameters + left
	case turns.Restarting:
		return "changing: " + parameters
	case turns.Leaving:
		return "leaving" + left
	}
	return ""
}

func isChanging(s bird.State) bool {
	return slices.ContainsFunc(s.Gateways, func(g bird.GatewayState) bool { return g.Change.Phase != turns.Steady })
}

// changeProblem names the gateways that did not come back after a change.
func changeProblem(s bird.State) string {
	var problems []string
	for _, g := range s.Gateways {
		if g.Change.Failed != nil && !g.Up {
			problems = append(problems, fmt.Sprintf("%s did not come back after a change: %s; %s",
				g.Name, strings.Join(g.Change.Failed, ", "), gatewayDetail(g)))
		}
	}
	return strings.Join(slices.Compact(problems), "; ")
}

// changeEvents returns the events of changes of gateways between two states.
func changeEvents(was, is bird.State) (list []*adminv1.Event) {
	before := map[string]bird.GatewayState{}
	for _, g := range was.Gateways {
		before[g.Name] = g
	}
	note := func(name, format string, values ...any) {
		list = append(list, &adminv1.Event{Detail: "gateway " + name + " " + fmt.Sprintf(format, values...)})
	}
	for i, g := range is.Gateways {
		if i > 0 && is.Gateways[i-1].Name == g.Name {
			continue // another family of the same session
		}
		old := before[g.Name].Change
		delete(before, g.Name)
		parameters := strings.Join(g.Change.Parameters, ", ")
		switch {
		case g.Change.Failed != nil && old.Failed == nil:
			note(g.Name, "did not come back after a change: %s", strings.Join(g.Change.Failed, ", "))
		case g.Change.Phase == old.Phase:
		case g.Change.Phase == turns.Pending:
			note(g.Name, "waits for its turn to change: %s", parameters)
		case g.Change.Phase == turns.Draining:
			note(g.Name, "is de-preferred before a change: %s", parameters)
		case g.Change.Phase == turns.Restarting:
			note(g.Name, "restarts with a change: %s", parameters)
		case g.Change.Phase == turns.Leaving:
			note(g.Name, "left the configuration: de-preferred, then removed")
		case old.Phase == turns.Restarting:
			note(g.Name, "is up after a change: %s", strings.Join(old.Parameters, ", "))
		}
	}
	for name, g := range before {
		if g.Change.Phase == turns.Leaving {
			note(name, "was removed after its drain")
		}
	}
	return list
}
