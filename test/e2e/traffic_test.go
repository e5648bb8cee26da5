package e2e

import (
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
	"github.com/vipgate/vipgate/test/traffic"
)

// With targets that reply over all pods, as Meridio 2 targets do, --conntrack=loose fails no
// request and breaks no flow, also of targets that drain.
func TestTrafficWithRepliesOverAllPods(t *testing.T) {
	t.Parallel()
	s := traffic.Replies()
	ctx, trench := openTrench(t, traffic.Options{
		Targets: s.Targets, Replies: lab.ECMP, LB: []string{"--conntrack=loose"},
	})
	row, err := trench.Run(ctx, s)
	t.Logf("\n%s", load.Table(row))
	harness.Must(t, err)
	if err := s.Check(row); err != nil {
		t.Errorf("%v\n%s", err, trench.Logs())
	}
	used := map[string]bool{}
	for _, f := range row.Result.Flows {
		used[f.Target] = true
	}
	if len(used) < s.Targets {
		t.Errorf("the flows are with %v only", used)
	}
}

// The control run must fail: --conntrack=on does not know flows whose replies take another pod.
func TestTrafficLossWithoutLooseTracking(t *testing.T) {
	t.Parallel()
	s := traffic.Replies()
	ctx, trench := openTrench(t, traffic.Options{Targets: s.Targets, Replies: lab.ECMP})
	row, err := trench.Run(ctx, s)
	t.Logf("\n%s", load.Table(row))
	harness.Must(t, err)
	if broken, _ := row.Result.Broken(row.Left...); broken == 0 {
		t.Error("no flow was broken with --conntrack=on, so that nothing is proved")
	}
}
