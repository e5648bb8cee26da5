package frontend

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// The KEEPALIVEs of the loopback session need a heartbeat also without any input of the gate.
func TestControllerBeatsAtWholeSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const offset = 300 * time.Millisecond
		<-time.After(offset)
		o, _ := testObserver()
		c := &controller{
			gate: gate.New(gate.Options{}), bird: latest.New(bird.State{}), kernel: latest.New(kernel.Confirmed{}),
			announcer: announce.New(announce.Options{}), observer: o,
			attractor: &attractor{current: latest.New(attraction{}), apply: func(time.Time, [len(vip.Families)]bool) {}},
			commands:  make(chan command), ready: make(chan struct{}),
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Run(ctx) }()
		<-c.ready
		for range 5 {
			<-time.After(time.Second)
			synctest.Wait()
			if got := c.idle(); got != offset {
				t.Errorf("last evaluated %v before %v", got, time.Now())
			}
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
