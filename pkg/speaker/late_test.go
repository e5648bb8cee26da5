package speaker

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// lateFake is a speaker whose view is late and has no routes.
type lateFake struct{ fake }

func (*lateFake) Late() {}

func (*lateFake) Exported(context.Context, netip.Addr, vip.Family) (vip.Set, error) {
	return nil, ErrUnknown
}

// A late view withdraws nothing: the gateway stays usable while the session is reported as down, and
// while there is no report. VIPs count as exported with a warning.
func TestLateView(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		up := Session{Peer: address, Up: true, State: "Established", Exported: -1}
		speaker := &lateFake{fake{answers: answers{session: up}}}
		observer := NewObserver(Options{View: speaker})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); _ = observer.Run(ctx) }()
		observer.Expect(2, 0)
		observer.Configure(trench.Attractor{
			VIPs: []vip.VIP{vipA, vipB}, Gateways: []trench.Gateway{{Name: "a", Address: address, Protocol: trench.BGP}},
		})
		for _, step := range []struct {
			session Session
			err     error
			up      bool
			warning string
		}{
			{
				Session{Peer: address, Up: true, State: "Established", Exported: -1},
				nil, true,
				"not confirmed that it receives VIPs: " + ErrUnknown.Error(),
			},
			{Session{Peer: address, State: "Active", Exported: -1}, nil, false, ""},
			{Session{}, errors.New("too old"), false, "too old"},
		} {
			speaker.change(func(a *answers) { a.session, a.err = step.session, step.err })
			pass(10 * pollInterval)
			is, all := state(observer), observer.State().Load()
			if !all.Alive || !is.Usable || is.Up != step.up || is.Warning != step.warning || is.Short {
				t.Errorf("%+v: alive %v, %+v", step, all.Alive, is)
			}
			bounded, cancel := context.WithTimeout(ctx, 3*time.Second)
			if err := observer.Confirm(bounded); err != nil {
				t.Errorf("%+v: %v", step, err)
			}
			cancel()
		}
		cancel()
		<-done
	})
}
