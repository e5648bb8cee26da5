package readiness

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

func TestWatcherHearsSnapshotThenDeltas(t *testing.T) {
	path, table := socketPath(t), NewTable(TableOptions{StaleGrace: 2 * time.Second})
	startBalancer(t, path, table)
	beat(t, table)
	table.Commit(Decision{Changed: []VIPReadiness{ready("20.0.0.1/32"), notReady("2000::1/128")}, Synced: true})
	f := startFrontend(t, path, nil)
	f.until(t, "snapshot", f.at(table))
	if !f.Complete || !f.Open || f.StaleGrace != 2*time.Second || len(f.vips) != 2 || f.HeardAt.IsZero() {
		t.Fatalf("after the snapshot: %+v", f.Update)
	}
	if left := time.Until(f.LeaseEnd); left <= 0 || left > DefaultLease {
		t.Fatalf("the lease has %v left", left)
	}
	if r := f.vips[vip.Require("2000::1/128")]; r.State != NotReady || r.Detail != "connect: connection refused" || r.TotalTargets != 1 || r.Since.IsZero() {
		t.Fatalf("2000::1/128 is %+v", r)
	}
	table.Commit(Decision{Changed: []VIPReadiness{ready("2000::1/128")}, Removed: []vip.VIP{vip.Require("20.0.0.1/32")}, Synced: true})
	f.until(t, "delta", f.at(table))
	if f.Complete || len(f.Update.Changed) != 1 || !f.Removed.Equal(vip.NewSet(vip.Require("20.0.0.1/32"))) {
		t.Fatalf("after the delta: %+v", f.Update)
	}
	before := f.LeaseEnd
	f.until(t, "heartbeats renew the lease", func() bool { return f.LeaseEnd.After(before.Add(time.Second)) })
}
