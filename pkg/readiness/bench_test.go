package readiness

import (
	"fmt"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
)

// BenchmarkCommitToReceipt measures the time from a decision about one VIP among n to its receipt
// by the consumer of a watcher, over a real unix socket.
func BenchmarkCommitToReceipt(b *testing.B) {
	for _, n := range []int{1, 1000, 50_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			lb := startSyncedLB(b, n)
			f := startFrontend(b, lb.path, nil)
			f.waitFor(b, "synced", f.at(lb.table))
			deadline := time.NewTimer(time.Minute)
			defer deadline.Stop()
			for i := 0; b.Loop(); i++ {
				revision := lb.table.Commit(Decision{Changed: []VIPReadiness{{VIP: numbered(0), State: vip.State(i % 2)}}})
				for {
					select {
					case <-f.Changed():
					case <-deadline.C:
						b.Fatal("not received")
					}
					if u := f.Take(); u.Position.Revision == revision {
						break
					}
				}
				deadline.Reset(time.Minute)
			}
		})
	}
}

// BenchmarkReport measures the time from a report about one VIP among n to its receipt by the load
// balancer.
func BenchmarkReport(b *testing.B) {
	for _, n := range []int{1, 50_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			lb := startSyncedLB(b, 1)
			f := startFrontend(b, lb.path, nil)
			all := ReportDelta{VIPs: map[vip.VIP]VIPReport{}}
			for i := range n {
				all.VIPs[numbered(i)] = VIPReport{Advertisement: announced}
			}
			f.Report(all)
			await.True(b, "reported", func() bool { return lb.Report().Load().Advertised == n })
			for i := uint64(1); b.Loop(); i++ {
				_, changed := lb.Report().Get()
				f.Report(ReportDelta{
					Applied: Position{"i", i},
					VIPs:    map[vip.VIP]VIPReport{numbered(0): {Advertisement: announced, Unconfirmed: i%2 == 0}},
				})
				for lb.Report().Load().Applied.Revision != i {
					<-changed
					_, changed = lb.Report().Get()
				}
			}
		})
	}
}

// BenchmarkSnapshot measures a reconnect with n VIPs, until the consumer has all.
func BenchmarkSnapshot(b *testing.B) {
	lb := startSyncedLB(b, 50_000)
	for b.Loop() {
		f := startFrontend(b, lb.path, nil)
		f.waitFor(b, "synced", f.at(lb.table))
		f.stop()
	}
}
