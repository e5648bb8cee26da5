package healthcheck

import (
	"net/netip"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxWait bounds the wait for the first verdicts of a new check.
const maxWait = 30 * time.Second

// settleRest is the time for each target of a stream between two visits of all of them.
const settleRest = 10 * time.Microsecond

// edit is a change of the check of a stream. Each target keeps the old check, which decides, until
// it passes the new one; one that enters gets both. The old one also ends if the target fails the
// new one, provided that minReady targets, and half of those that are ready, pass; otherwise the
// edit is held.
type edit struct {
	check           trench.Check                    // the new one
	vips            [len(vip.Families)][]netip.Addr // of the stream, also for old checks
	minReady        int
	ends, due, rest time.Time // of the wait for first verdicts; of the next settle; after the last one
	held, confirmed bool      // too few targets pass; the old check ends in any case
}

// lastOf returns a target with the old check of an edit, or any one; nil without targets.
func lastOf(targets map[Key]*target) (last *target) {
	for _, target := range targets {
		if last = target; target.before != nil {
			return target.before
		}
	}
	return last
}

// isReplaced reports whether plans replace the check of a target. If the stream had, or has, no VIP
// of the family, no verdict is worth keeping.
func (target *target) isReplaced(plans []*plan, anyPasses bool, family vip.Family) bool {
	was, is := target.members[0].plan, plans[0]
	idle := was.Via == is.Via && was.subjects[family].vip != is.subjects[family].vip
	return !idle && !target.keeps(plans, anyPasses, family)
}

// settle ends old checks whose new ones decide.
func (checker *Checker) settle(now time.Time) {
	for name, edit := range checker.edits {
		if now.Before(edit.due) {
			continue
		}
		edit.rest = now.Add(time.Duration(len(checker.streams[name])) * settleRest)
		over := !now.Before(edit.ends)
		var passes, ready [len(vip.Families)]int
		for key, target := range checker.streams[name] {
			if family := vip.FamilyOf(key.Addr); target.state == Ready {
				passes[family]++
				ready[family]++
			} else if target.before != nil && target.before.state == Ready {
				ready[family]++
			}
		}
		pending, awaited := false, false
		for key, target := range checker.streams[name] {
			family, decided := vip.FamilyOf(key.Addr), over || target.state != Starting
			enough := edit.confirmed || passes[family] >= edit.minReady && 2*passes[family] >= ready[family]
			switch {
			case target.before == nil:
			// Above Ready, the old check fails or is overdue. One of a new target may have no verdict yet.
			case target.state == Ready, decided && (enough || target.before.state > Ready):
				checker.remove(target.before)
				target.before = nil
			default:
				pending, awaited = true, awaited || !decided
			}
		}
		edit.held = pending && !awaited
		if edit.due = edit.ends; over {
			edit.due = now.Add(maxWait)
		}
		if !pending {
			delete(checker.edits, name)
		}
	}
	if len(checker.gone) > 0 {
		checker.forget()
	}
}

// Held returns the new checks that wait, by stream: too few targets pass them.
func (checker *Checker) Held() map[string]trench.Check {
	checker.mu.Lock()
	defer checker.mu.Unlock()
	held := map[string]trench.Check{}
	for name, edit := range checker.edits {
		if edit.held {
			held[name] = edit.check
		}
	}
	return held
}

// Release makes new checks decide, unless another edit followed.
func (checker *Checker) Release(checks map[string]trench.Check) {
	checker.mu.Lock()
	defer checker.mu.Unlock()
	for name, check := range checks {
		if edit := checker.edits[name]; edit != nil && edit.check == check {
			edit.confirmed, edit.held, edit.due = true, false, time.Time{}
		}
	}
	latest.Wake(checker.changed)
}
