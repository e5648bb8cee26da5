package main

import (
	"context"
	"fmt"
	"time"
)

// kind is a kind of fault.
type kind struct {
	Name        string
	Args        int // number of variants
	Weight      int // relative frequency in the draw
	Least, Most time.Duration
	Breadth     breadth
	// TakesTurns is true if every VIP stays at one gateway at least, although it leaves others.
	TakesTurns bool
	// describe returns the name of a variant for reports.
	describe func(arg int) string
	// holds are the resources that no other fault may hold at the same time.
	holds func(arg int) []string
	// touches is the VIPs and gateways that it may affect.
	touches func(arg int) scope
	// inject injects the fault and returns a function that heals it.
	inject func(ctx context.Context, fx *fixture, f fault) (heal func(context.Context) error, err error)
}

// weight returns how often a kind is drawn in a group. Faults of the group's breadth are drawn
// more often.
func (k *kind) weight(b breadth) int {
	if k.Breadth == b && b != quiet {
		return 6 * k.Weight
	}
	return k.Weight
}

// Resources.
const (
	resLB          = "lb"
	resFrontend    = "frontend"
	resSpeaker     = "speaker"
	resStream      = "stream" // the readiness socket
	resAPILB       = "workload-api-lb"
	resAPIFrontend = "workload-api-frontend"
	resTrench      = "trench"
	resDisk        = "disk"
	resCPU         = "cpu"
	resInternal    = "internal-wire"
	resExternal    = "external-wire"
)

func resTarget(t int) string  { return fmt.Sprintf("target-%d", t) }
func resGateway(g int) string { return fmt.Sprintf("gateway-%d", g) }
func resPath(g int) string    { return fmt.Sprintf("path-%d", g) }
func resQueue(g int) string   { return fmt.Sprintf("queue-%d", g) }

func constant[T any](v T) func(int) T { return func(int) T { return v } }

// touchable are the targets that faults may hit.
var touchable = untouchedStream * targetsPerStream

// catalog returns every kind of fault. The order is part of the meaning of a seed: a seed draws
// from this list.
func catalog() []*kind {
	all := append(processKinds(), networkKinds()...)
	all = append(all, gatewayKinds()...)
	all = append(all, identityKinds()...)
	all = append(all, diskKinds()...)
	all = append(all, dataPlaneKinds()...)
	return append(all, editKinds()...)
}

// span is a range of durations.
type span struct{ least, most time.Duration }

// once is the duration of a momentary fault.
var once = span{}

func ms(least, most int) span {
	return span{time.Duration(least) * time.Millisecond, time.Duration(most) * time.Millisecond}
}

// simple returns a kind without variants.
func simple(name string, weight int, d span, b breadth, touches scope, holds ...string) *kind {
	return &kind{
		Name: name, Args: 1, Weight: weight, Least: d.least, Most: d.most, Breadth: b,
		describe: constant(""), holds: constant(holds), touches: constant(touches),
	}
}

// by sets how a kind is injected.
func (k *kind) by(inject func(ctx context.Context, fx *fixture, f fault) (func(context.Context) error, error)) *kind {
	k.inject = inject
	return k
}

// variants sets the variants of a kind.
func (k *kind) variants(n int, describe func(arg int) string) *kind {
	k.Args, k.describe = n, describe
	return k
}
