package readiness

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/growth"
	"github.com/vipgate/vipgate/test/harness"
)

// Decisions that reach a reader one by one, and with a snapshot after all of them.
func TestGrowth(t *testing.T) {
	for name, each := range map[string]bool{"changes": true, "snapshot": false} {
		growth.Check(t, name, 500, 25_000, func(t *testing.T, n int) func() {
			table := NewTable(TableOptions{InstanceID: "a", Lease: MaxLease})
			readiness := numberedReady(n)
			var vips []vip.VIP
			for _, one := range readiness {
				vips = append(vips, one.VIP)
			}
			return func() {
				var cursor *cursor
				var decoder decoder
				var stream streamState
				merger, lease := newUpdateMerger(), durationpb.New(time.Second)
				read := func() {
					for now := time.Now(); ; {
						next := table.next(cursor, now)
						if next.kind == kindNone {
							break
						}
						for message := range next.messages() {
							message.Lease, message.Position, message.WatchId = lease, next.position.Proto(), ""
							if decoder.watchID == "" {
								message.WatchId = "w"
							}
							event, err := decoder.decode(message, now)
							harness.Must(t, err)
							harness.Must(t, merger.merge(&stream, event, now))
						}
					}
				}
				if each {
					cursor = table.open()
					defer table.close(cursor)
					read()
				}
				for _, state := range []vip.State{vip.NotReady, vip.Draining, vip.Ready} {
					for i := range readiness {
						readiness[i].State = state
					}
					table.Commit(Decision{Changed: readiness, Synced: true})
					if each {
						read()
					}
				}
				table.Commit(Decision{Removed: vips[:n/2], Synced: true})
				if !each {
					cursor = table.open()
					defer table.close(cursor)
				}
				read()
				merger.take()
				table.State()
			}
		})
	}
}
