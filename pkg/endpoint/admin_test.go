package endpoint

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/latest"
)

func TestWatchStatusInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		changes := latest.New(0)
		var sent atomic.Int32
		ended := make(chan error)
		go func() {
			ended <- WatchStatus(ctx, changes, func() error {
				sent.Add(1)
				return nil
			})
		}()
		want := func(n int32) {
			t.Helper()
			synctest.Wait()
			if got := sent.Load(); got != n {
				t.Errorf("%d messages, want %d", got, n)
			}
		}
		want(1)
		for i := range 5 {
			changes.Set(i)
			want(1)
		}
		time.Sleep(statusInterval)
		want(2)
		time.Sleep(10 * statusInterval)
		want(2)
		changes.Set(7)
		want(3)
		cancel()
		if err := <-ended; status.Code(err) != codes.Canceled {
			t.Errorf("got %v", err)
		}
	})
}
