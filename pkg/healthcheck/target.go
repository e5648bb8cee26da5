package healthcheck

import (
	"net/netip"
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
	// before has the check that an edit replaced, and decides until Checker.settle; usually nil.
	before *target
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

// health returns the reported state of the target: of the check that an edit replaced while that
// decides, with the errors of both.
func (target *target) health() Health {
	own := target.own()
	if target.before == nil {
		return own
	}
	health := target.before.own()
	if own.LastError != "" {
		health.LastError = strings.TrimPrefix(health.LastError+"; new check: "+own.LastError, "; ")
	}
	return health
}

// own returns the state of the target by its newest check. The error has a sentence for each member
// that failed.
func (target *target) own() Health {
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

// inherit gives a new target the newest verdict on its address that a check of the same lineage
// reached, with its counters.
func (checker *Checker) inherit(heir *entry) {
	family := vip.FamilyOf(heir.Addr)
	verdicts := checker.verdicts[heir.Addr]
	if verdicts == nil && len(checker.addresses[heir.Addr]) > 0 {
		verdicts = map[lineage]*entry{}
		for _, entry := range checker.addresses[heir.Addr] {
			lineage := entry.plan.lineages()[family]
			if newest := verdicts[lineage]; entry.judged && !entry.overdue &&
				(newest == nil || entry.alive.After(newest.alive)) {
				verdicts[lineage] = entry
			}
		}
		checker.verdicts[heir.Addr] = verdicts
	}
	from := verdicts[heir.plan.lineages()[family]]
	if from == nil {
		return
	}
	key := heir.Key
	heir.Health, heir.streak, heir.passing, heir.judged = from.Health, from.streak, from.passing, true
	heir.Key, heir.alive, heir.due = key, from.alive, from.due
}

// forget ends the inheritance of targets that the running Update removed.
func (checker *Checker) forget() {
	for gone := range checker.gone {
		left := slices.DeleteFunc(checker.addresses[gone], func(e *entry) bool { return e.removed })
		if checker.addresses[gone] = left; len(left) == 0 {
			delete(checker.addresses, gone)
		}
	}
	checker.gone, checker.verdicts = map[netip.Addr]bool{}, map[netip.Addr]map[lineage]*entry{}
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
