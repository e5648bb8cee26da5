package e2e

import (
	"context"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
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
