package frontend

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/journal"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
)

// tracer follows decisions of the gate to the gateways.
type tracer struct {
	journal.Tracer
	instance  string // of this start, for decisions without a cause at the load balancer
	announcer *latest.Value[announce.State]
	confirm   func(context.Context) error // waits until the gateway sessions export the announced VIPs
}

// decided follows a batch of decisions unless it changes no advertisement. update is nil unless it
// is the cause. It does not block; the controller calls it after the announcer wrote the batch.
func (t *tracer) decided(now, cause time.Time, position readiness.Position, revision uint64, changes []gate.Change,
	update *readiness.Update,
) {
	i := slices.IndexFunc(changes, func(ch gate.Change) bool { return ch.From.Advertisement != ch.To.Advertisement })
	if i < 0 {
		return
	}
	var sent time.Time
	// Other load balancers have no trace to join.
	const joins = readinessv1.ReadinessService_WatchReadiness_FullMethodName
	if update != nil && !update.ReceivedAt.IsZero() && strings.HasPrefix(joins, "/"+update.Service+"/") {
		for i := range update.Changed {
			if since := update.Changed[i].Since; since.After(sent) {
				sent = since
			}
		}
	} else {
		position = readiness.Position{InstanceID: t.instance, Revision: revision}
	}
	first, count, state := changes[i], len(changes), t.announcer.Load()
	t.Follow(position, func(ctx context.Context) []journal.Step {
		gated := journal.Step{Name: "gate", Start: cause, End: now, Detail: fmt.Sprintf("%s %s to %s: %s; %d VIPs in all",
			first.VIP, first.From.Advertisement, first.To.Advertisement, first.To.Reason, count)}
		steps := append(t.follow(ctx, now, revision, state), gated)
		if sent.IsZero() {
			gated.Name, gated.End = journal.WholeDecision, steps[1].End
			return append(steps, gated)
		}
		return append(steps, journal.Step{Name: "message", Start: sent, End: cause})
	})
}

// follow returns the write to BIRD and the export of a revision, after its confirmation: BIRD is
// surveyed, so the export may have been earlier. state is the announcer's after the decision.
func (t *tracer) follow(ctx context.Context, decided time.Time, revision uint64, state announce.State) []journal.Step {
	ctx, cancel := context.WithTimeout(ctx, confirmTimeout)
	defer cancel()
	var err error
	wrote := state.WrittenAt
	if state.Written != revision {
		err = t.announcer.Wait(ctx, func(state announce.State) bool { return state.Written >= revision })
		wrote = time.Now()
	}
	write := journal.Step{Name: "bird write", Start: decided, End: wrote, Failed: err != nil}
	if err == nil {
		err = t.confirm(ctx)
	}
	export := journal.Step{Name: "export", Start: wrote, End: time.Now()}
	if err != nil {
		export.Failed, export.Detail = true, err.Error()
	}
	return []journal.Step{write, export}
}
