package change_test

import (
	"slices"
	"testing"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	"github.com/vipgate/vipgate/pkg/vip"
)

// A VIP has one reason to be in force, through edits that remove it or its stream and bring it
// back. Until it is listed again it has the policy from before, unless it has another one.
func TestInForce(t *testing.T) {
	first, second := vip.Require("20.0.0.1/32"), vip.Require("2000::1/128")
	policies := func(med int64, vips ...vip.VIP) []trench.Policy {
		return []trench.Policy{{VIPs: vips, Ready: trench.Attributes{MED: med}}}
	}
	both := []vip.VIP{first, second}
	for name, steps := range map[string][]struct {
		vips, served, held, leaving []vip.VIP
		policies                    []trench.Policy
		undrained                   bool
		why                         change.Why // of the first VIP
		gone                        bool
		med                         int64
	}{
		"never served": {
			{vips: both, policies: policies(7), med: 7},
			{vips: both, policies: policies(8), med: 8},
		},
		"held, and back": {
			{vips: both, served: both, policies: policies(7, first), med: 7},
			{vips: both, served: both, held: both[:1], policies: policies(7, first), why: change.Held, med: 7},
			{vips: both, served: both, policies: policies(8, first), med: 8},
		},
		"held, and confirmed": {
			{vips: both, served: both, policies: policies(7, first), med: 7},
			{vips: both, served: both, held: both[:1], policies: policies(7, first), why: change.Held, med: 7},
			{vips: both[1:], served: both[1:], leaving: both[:1], why: change.Leaving, med: 7},
		},
		"leaves": {
			{vips: both, served: both, policies: policies(7, first), med: 7},
			{vips: both[1:], served: both[1:], leaving: both[:1], why: change.Leaving, med: 7},
			{vips: both[1:], served: both[1:], leaving: both[:1], policies: policies(8), why: change.Leaving, med: 7},
			{vips: both[1:], served: both[1:], gone: true},
			{vips: both, served: both, policies: policies(8), med: 8},
		},
		"leaves, and back": {
			{vips: both, served: both, policies: policies(7), med: 7},
			{leaving: both, policies: policies(8), why: change.Leaving, med: 7},
			{vips: both, served: both, leaving: both[:1], policies: policies(8), med: 8},
		},
		"without a policy": {
			{vips: both, served: both},
			{vips: both[1:], served: both[1:], leaving: both[:1], policies: policies(8), why: change.Leaving},
		},
		"ends, and back": {
			{vips: both, served: both, policies: policies(7, first), med: 7},
			{vips: both, served: both[1:], why: change.Ended, med: 7},
			{vips: both, why: change.Ended, med: 7},
			{vips: both, policies: policies(8, both...), why: change.Ended, med: 8},
			{vips: both, policies: policies(9), why: change.Ended, med: 8},
			{vips: both, served: both[:1]},
		},
		"ends, and leaves": {
			{vips: both, served: both, policies: policies(7), med: 7},
			{vips: both, served: both[1:], policies: policies(8), why: change.Ended, med: 7},
			{vips: both[1:], served: both[1:], leaving: both[:1], why: change.Leaving, med: 7},
			{vips: both, policies: policies(8), med: 8},
		},
		"without a drain": {
			{vips: both, served: both, policies: policies(7), undrained: true, med: 7},
			{vips: both, policies: policies(8), undrained: true, med: 8},
		},
	} {
		inForce := &change.InForce{}
		for nth, step := range steps {
			config := &trench.Config{Attractor: trench.Attractor{VIPs: step.vips, Policies: step.policies}}
			if len(step.served) > 0 {
				config.Streams = []trench.Stream{{VIPs: step.served}}
			}
			inForce = inForce.Next(trench.Loaded{Config: config, Held: trench.Held{VIPs: step.held}},
				vip.NewSet(step.leaving...), !step.undrained)
			if is := slices.Contains(inForce.Attractor.VIPs, first); is == step.gone || inForce.Kept[first] != step.why {
				t.Errorf("%s, step %d: in force %v, as %v", name, nth, is, inForce.Kept[first])
			}
			if left := slices.Contains(inForce.Leaving(), first); left != (step.why == change.Leaving) {
				t.Errorf("%s, step %d: leaves %v", name, nth, left)
			}
			if med, count := medOf(inForce.Attractor.Policies, first); count > 1 || !step.gone && med != step.med {
				t.Errorf("%s, step %d: MED %d of %d policies, want %d", name, nth, med, count, step.med)
			}
			if len(config.Attractor.VIPs) != len(step.vips) || len(config.Attractor.Policies) != len(step.policies) {
				t.Errorf("%s, step %d: the configuration has changed", name, nth)
			}
		}
	}
}

// medOf returns the MED of a VIP, and the number of policies that name it.
func medOf(policies []trench.Policy, v vip.VIP) (med int64, count int) {
	for _, policy := range policies {
		if slices.Contains(policy.VIPs, v) {
			med, count = policy.Ready.MED, count+1
		} else if len(policy.VIPs) == 0 && count == 0 {
			med = policy.Ready.MED
		}
	}
	return med, count
}
