package healthcheck

import (
	"container/list"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unique"

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

// own returns the state of the target by its newest check, with the errors of all failed members.
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

// keeps reports whether the verdicts of the target are valid under plans: only timing may differ.
func (target *target) keeps(plans []*plan, anyPasses bool, family vip.Family) bool {
	return target.anyPasses == anyPasses &&
		slices.EqualFunc(target.members, plans, func(member *entry, p *plan) bool {
			return member.plan == p || member.plan.subjects[family] == p.subjects[family]
		})
}

// plans returns the plans of the members.
func (target *target) plans() (plans []*plan) {
	for _, member := range target.members {
		plans = append(plans, member.plan)
	}
	return plans
}

// peers has the checks that differ in nothing but timing by address, the newest verdict first.
type peers map[netip.Addr]*list.List

// sources returns by family the verdicts that a new target inherits from, for each of its checks.
// Checks of VIPs count only if they cover the VIPs of the new target: its stream may serve one that
// the application does not have.
func (checker *Checker) sources(plans []*plan) (sources [len(vip.Families)][][]peers) {
	for _, family := range vip.Families {
		for _, plan := range plans {
			var covering []peers
			vips := plan.lineages[family].checked
			few := slices.MinFunc(vips, func(a, b checked) int { return len(checker.verdicts[a]) - len(checker.verdicts[b]) })
			for of, all := range checker.verdicts[few] {
				if !slices.ContainsFunc(vips, func(c checked) bool { return checker.verdicts[c][of] == nil }) {
					covering = append(covering, all)
				}
			}
			sources[family] = append(sources[family], covering)
		}
	}
	return sources
}

// inherit gives a new target the newest verdict on its address, with its counters.
func (heir *entry) inherit(sources []peers) {
	key := heir.Key
	for _, source := range sources {
		if source[key.Addr] == nil {
			continue
		}
		if from := source[key.Addr].Front().Value.(*entry); !heir.judged || from.alive.After(heir.alive) {
			heir.Health, heir.streak, heir.passing, heir.judged = from.Health, from.streak, from.passing, true
			heir.Key, heir.alive, heir.due = key, from.alive, from.due
		}
	}
}

// note makes the verdict of a check the newest one that new targets inherit, or ends that if the
// check is overdue or does not remain.
func (checker *Checker) note(entry *entry, remains bool) {
	lineage := entry.plan.lineages[vip.FamilyOf(entry.Addr)]
	all := checker.verdicts[lineage.checked[0]][lineage.vips]
	switch inherited := remains && entry.judged && !entry.overdue; {
	case inherited && entry.noted != nil:
		all[entry.Addr].MoveToFront(entry.noted)
	case inherited:
		if all == nil {
			all = peers{}
			for _, c := range lineage.checked {
				if checker.verdicts[c] == nil {
					checker.verdicts[c] = map[unique.Handle[string]]peers{}
				}
				checker.verdicts[c][lineage.vips] = all
			}
		}
		if all[entry.Addr] == nil {
			all[entry.Addr] = list.New()
		}
		entry.noted = all[entry.Addr].PushFront(entry)
	case entry.noted != nil:
		all[entry.Addr].Remove(entry.noted)
		if entry.noted = nil; all[entry.Addr].Len() == 0 {
			delete(all, entry.Addr)
		}
		if len(all) > 0 {
			return
		}
		for _, c := range lineage.checked {
			if delete(checker.verdicts[c], lineage.vips); len(checker.verdicts[c]) == 0 {
				delete(checker.verdicts, c)
			}
		}
	}
}

// forget ends the inheritance of removed targets, which may have been the last without a verdict.
func (checker *Checker) forget() {
	for _, gone := range checker.gone {
		checker.note(gone, false)
	}
	checker.gone = nil
	checker.sync()
}

// plansOf returns the plans of the checks of a stream. Those of targets that it has are kept where
// they are equal, so that retime skips these targets.
func (checker *Checker) plansOf(stream *trench.Stream) (plans []*plan, anyPasses bool) {
	var vips []vip.VIP
	if stream.Check.Via.ToVIP(checker.FWMark != nil) {
		vips = stream.VIPs
	}
	for _, target := range checker.streams[stream.Name] { // all of them share their plans
		return newPlans(stream.Check, vips, target.plans()...)
	}
	return newPlans(stream.Check, vips)
}
