package e2e

import (
	"context"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
	"github.com/vipgate/vipgate/test/traffic"
)

// scenarioTimeout bounds one scenario with its lab.
const scenarioTimeout = 4 * time.Minute

// openTrench starts the lab for application traffic.
func openTrench(t *testing.T, o traffic.Options) (context.Context, *traffic.Trench) {
	t.Helper()
	if lack := lab.MissingForTopology(); lack != "" {
		t.Fatalf("this machine lacks %s", lack)
	}
	ctx := harness.Context(t, scenarioTimeout)
	o.Binaries = binaries
	trench, err := traffic.Open(ctx, o)
	harness.Must(t, err)
	t.Cleanup(func() {
		harness.Check(t, trench.Close())
	})
	return ctx, trench
}

// Planned changes and a killed lb fail no request and break no flow of a remaining target, also
// across pods; the sidecar of one target has exited. The sudden death of a target only breaks the
// flows of that target.
func TestTrafficSurvivesChanges(t *testing.T) {
	for _, s := range traffic.Scenarios() {
		t.Run(strings.ReplaceAll(s.Title, " ", "_"), func(t *testing.T) {
			t.Parallel()
			ctx, trench := openTrench(t, traffic.Options{Targets: s.Targets, Once: 2, Downloads: true})
			row, err := trench.Run(ctx, s)
			t.Logf("\n%s", load.Table(row))
			harness.Must(t, err)
			if row.Result.Answered == 0 || len(row.Result.Flows) == 0 {
				t.Error("there was no traffic")
			}
			if err := s.Check(row); err != nil {
				t.Errorf("%v\n%s", err, trench.Logs())
			}
			wantAsymmetry(t, trench)
			// A lost SYN is retransmitted after a second, and reaches another target.
			if _, own := row.Result.Broken(row.Left...); !s.Planned && own == 0 {
				t.Error("the death of a target broke no flow of its own: was it used at all?")
			}
		})
	}
}

// wantAsymmetry checks that replies of either family left through the gateway that did not forward
// their flow: each gateway only forwards the replies to the clients of its peer.
func wantAsymmetry(t *testing.T, trench *traffic.Trench) {
	t.Helper()
	for _, gateway := range []*lab.NetNS{trench.Gateway, trench.Second} {
		out, err := gateway.Run(t.Context(), "nstat", "-asz", "IpForwDatagrams", "Ip6OutForwDatagrams")
		harness.Must(t, err)
		for _, counter := range []string{"IpForwDatagrams", "Ip6OutForwDatagrams"} {
			if regexp.MustCompile(counter+` +[1-9]`).FindString(out) == "" {
				t.Errorf("gateway %s forwarded no reply:\n%s", gateway.Name(), out)
			}
		}
	}
}

// A rolling update replaces ten targets while a pod is lost and returns: planned changes fail no
// request and break no flow of a remaining target; the loss of the pod does not break a flow
// either.
func TestRolloutSurvivesPodLoss(t *testing.T) {
	t.Parallel()
	ctx, trench := openTrench(t, traffic.Options{BFD: true, Targets: 10, Downloads: true})
	var rows []load.Row
	for _, s := range traffic.Rollout() {
		row, err := trench.Run(ctx, s)
		rows = append(rows, row)
		harness.Must(t, err)
		if row.Result.Answered == 0 || len(row.Result.Flows) == 0 {
			t.Errorf("%s: there was no traffic", s.Title)
		}
		if err := s.Check(row); err != nil {
			t.Errorf("%s: %v\n%s", s.Title, err, trench.Logs())
		}
	}
	t.Logf("\n%s", load.Table(rows...))
}

// The control run must fail: without gating and drains the same changes lose requests and flows.
func TestTrafficLossWithoutGating(t *testing.T) {
	t.Parallel()
	ctx, trench := openTrench(t, traffic.Options{Control: true, Targets: 4})
	for _, s := range traffic.Scenarios() {
		if s.Title != "rolling restart of three targets" && s.Title != "rolling restart of the pods" {
			continue
		}
		row, err := trench.Run(ctx, s)
		t.Logf("\n%s", load.Table(row))
		harness.Must(t, err)
		if s.Check(row) == nil {
			t.Errorf("%s: nothing was lost without gating and drains, so that nothing is proved", s.Title)
		}
	}
}
