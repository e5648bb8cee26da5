package lb

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/file"
)

// While a stream that left the trench file is in force, status has it, and a drain of its targets
// by an operator has its drain time.
func TestDepartedStreamIsInForce(t *testing.T) {
	l := newBenchLoop(t, 1, 1, false)
	p := &process{loop: l.loop, index: l.index, checker: healthcheck.New(healthcheck.Options{Log: quiet})}
	p.config = file.NewWatcher("trench.yaml", trench.DefaultDefaults(), l.trench, quiet)
	check := func(what string, want bool) {
		t.Helper()
		s, known := p.stream(l.trench.Streams[0].Name)
		if known != want || want && s.DrainTime != l.trench.Streams[0].DrainTime {
			t.Errorf("%s: stream %+v", what, s)
		}
		for where, streams := range map[string]int{
			"status":                   len(p.streamStatus(l.inForce.Load())),
			"status of the data plane": len(p.dataPlaneStreams(plan.State{}, nil, nil)),
		} {
			if streams == 1 != want {
				t.Errorf("%s: %d streams in %s", what, streams, where)
			}
		}
	}
	check("listed", true)
	left := trench.Loaded{Config: &trench.Config{Attractor: l.trench.Attractor}, Generation: 2}
	p.config.Value().Set(left)
	l.evaluate(l.load(left))
	check("leaving", true)
	l.departures.ends[l.trench.Attractor.VIPs[0]] = time.Now()
	l.evaluate(input{})
	check("gone", false)
}
