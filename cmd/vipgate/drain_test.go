package main

import (
	"strings"
	"testing"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/pods"
)

// A pod whose frontend does not answer may be the last advertiser.
func TestGuardOfDrain(t *testing.T) {
	with := func(name string, state readinessv1.Advertisement) pods.Pod {
		v := &frontendv1.VipStatus{Vip: "20.0.0.1/32", Advertisement: state}
		return pods.Pod{Name: name, Frontend: &frontendv1.Status{Vips: []*frontendv1.VipStatus{v}}}
	}
	const announced = readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED
	const withdrawn = readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
	silent := func(name string) pods.Pod { return pods.Pod{Name: name, Problems: []string{"late answer"}} }
	for name, c := range map[string]struct {
		drained, other pods.Pod
		want           string
	}{
		"another announces":      {with("a", announced), with("b", announced), ""},
		"the last":               {with("a", announced), with("b", withdrawn), "20.0.0.1/32"},
		"announces nothing":      {with("a", withdrawn), with("b", withdrawn), ""},
		"silent":                 {silent("a"), with("b", withdrawn), "what pod a may announce (late answer)"},
		"silent beside another":  {silent("a"), with("b", announced), "what pod a may announce (late answer)"},
		"another one silent":     {with("a", announced), silent("b"), "20.0.0.1/32"},
		"nothing beside silence": {with("a", withdrawn), silent("b"), ""},
	} {
		last := lastAdvertised([]pods.Pod{c.drained, c.other}, []pods.Pod{c.drained}, "")
		if got := strings.Join(last, ", "); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
