package lb

import (
	"context"
	"fmt"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/journal"
	"github.com/vipgate/vipgate/pkg/readiness"
)

// trace follows a committed decision. It does not block.
func (p *process) trace(d decision) {
	position := readiness.Position{InstanceID: p.table.Position().InstanceID, Revision: d.revision}
	p.Tracer.Follow(position, func(context.Context) []journal.Step { return d.steps() })
}

// steps returns the check with the newest verdict, if it is the cause, and the commit.
func (d *decision) steps() []journal.Step {
	start, detail := d.at, ""
	if len(d.Changed) > 0 {
		first := &d.Changed[0]
		detail = fmt.Sprintf("%s %s: %s", first.VIP, first.State, reasonWord(first.Reason))
	}
	steps := []journal.Step{{Name: "commit", Start: d.at, End: d.done, Detail: detail}}
	var newest healthcheck.Health
	for _, verdict := range d.verdicts {
		if verdict.Since.Equal(verdict.LastCheck) && verdict.Since.After(newest.Since) {
			newest = verdict
		}
	}
	if !newest.Since.IsZero() {
		start = newest.LastCheck.Add(-newest.Took)
		steps = append(steps, journal.Step{
			Name: "check", Start: start, End: newest.LastCheck, Failed: newest.State != healthcheck.Ready,
			Detail: fmt.Sprintf("%s/%s %s %s: %s", newest.Stream, newest.Name, newest.Addr, newest.State, newest.LastError),
		})
	}
	return append(steps, journal.Step{Name: journal.WholeDecision, Start: start, End: d.done, Detail: detail})
}
