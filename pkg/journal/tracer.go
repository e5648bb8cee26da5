package journal

import (
	"context"
	"time"

	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/task"
)

// Step is a part of a decision in a trace. WholeDecision contains the others.
type Step struct {
	Name       string
	Start, End time.Time
	Detail     string // for people; "" for none
	Failed     bool
}

// WholeDecision is the name of the step that contains the others.
const WholeDecision = "decision"

// Tracer exports the steps of sampled decisions.
type Tracer interface {
	task.Task
	// Follow exports the steps of the decision at a position, without blocking; steps may block.
	Follow(position readiness.Position, steps func(ctx context.Context) []Step)
	// Lost returns the number of decisions whose trace is not complete.
	Lost() uint64
}
