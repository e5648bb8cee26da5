package healthcheck

import (
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// target is one address of a target with its checks. It is guarded by Checker.mu.
type target struct {
	members   []*entry // of trench.Check.Members
	anyPasses bool
	state     State // of the newest join
	since     time.Time
	judged    bool // had a verdict
}

// order ranks states: all checks have the lowest one of the members, any the highest. A target is
// thus Starting while its members with a verdict do not decide.
var order = [...]int{NotReady: 0, Overdue: 1, Starting: 2, Ready: 3}

// join derives the state from the members.
func (target *target) join(now time.Time) {
	state := target.members[0].state()
	for _, member := range target.members[1:] {
		if is := member.state(); target.anyPasses == (order[is] > order[state]) {
			state = is
		}
	}
	if state != target.state {
		target.state, target.since = state, now
	}
}

// health returns the reported state of the target. The error has a sentence for each member that
// failed.
func (target *target) health() Health {
	health := target.members[0].Health
	health.State, health.Since = target.state, target.since
	if len(target.members) == 1 {
		return health
	}
	var failed []string
	for _, member := range target.members {
		if member.LastCheck.After(health.LastCheck) {
			health.LastCheck, health.Took = member.LastCheck, member.Took
		}
		health.Deferred = health.Deferred || member.Deferred
		if member.LastError != "" {
			failed = append(failed, member.plan.named(member.LastError))
		}
	}
	health.Deferred = health.Deferred && health.State == Starting
	health.LastError = strings.Join(failed, "; ")
	return health
}

// reportedAs is the part of Health whose change is reported.
type reportedAs struct {
	state     State
	deferred  bool
	members   [trench.MaxMembers]State
	diagnosis [trench.MaxMembers]string
}

func (target *target) reportedAs() reportedAs {
	health := target.health()
	reported := reportedAs{state: health.State, deferred: health.Deferred}
	for i, member := range target.members {
		reported.members[i], reported.diagnosis[i] = member.state(), member.diagnosis.text
	}
	return reported
}

// keeps reports whether the verdicts of the target are valid under these plans: only the timing may
// differ.
func (target *target) keeps(plans []*plan, family vip.Family) bool {
	return slices.EqualFunc(target.members, plans, func(member *entry, p *plan) bool {
		return member.plan == p || member.plan.subjects[family] == p.subjects[family]
	})
}

// plansOf returns the plans of the checks of a stream. Those of targets that it has are kept where
// they are equal, so that retime skips these targets.
func (checker *Checker) plansOf(stream *trench.Stream) (plans []*plan, anyPasses bool) {
	var vips []vip.VIP
	if stream.Check.Via.ToVIP(checker.FWMark != nil) {
		vips = stream.VIPs
	}
	plans, anyPasses = newPlans(stream.Check, vips...)
	for _, target := range checker.streams[stream.Name] { // all of them share their plans
		for i, member := range target.members[:min(len(target.members), len(plans))] {
			if old := member.plan; old.Check == plans[i].Check && old.name == plans[i].name && slices.Equal(old.of, vips) {
				plans[i] = old
			}
		}
		break
	}
	return plans, anyPasses
}
