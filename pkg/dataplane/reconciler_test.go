package dataplane

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
)

// deaf runs a plane that hears nothing of what happens in the kernel.
func (s *site) deaf(interval time.Duration) *running {
	s.t.Helper()
	o := s.options()
	o.CheckInterval = interval
	p, err := New(o)
	s.must(err)
	var f *fwstate.Conn
	s.must(s.ns.Do(func() error {
		f, err = fwstate.Dial(p.o.Config)
		return err
	}))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- s.ns.Do(func() error {
			x := newReconciler(p, f)
			x.subscribe = func() (*fwstate.Watch, error) {
				return &fwstate.Watch{Listener: rtnetlink.NewListener(), Changed: make(chan struct{})}, nil
			}
			defer x.unsubscribe()
			x.run(ctx)
			return nil
		})
	}()
	s.t.Cleanup(func() {
		cancel()
		for _, err := range []error{<-done, f.Close()} {
			s.must(err)
		}
	})
	return &running{Plane: p, site: s}
}

// Observed and desired state are compared every minute, also if nothing was reported.
func TestTheKernelIsLookedAtAlthoughNothingWasReported(t *testing.T) {
	if got := (Options{}).withDefaults().CheckInterval; got != time.Minute {
		t.Errorf("the kernel is read every %s", got)
	}
	x := newSite(t)
	p := x.deaf(100 * time.Millisecond)
	p.configure(siteStream("a", bothVIPs, siteTarget(1, Serving, Serving), siteTarget(2, Serving, Serving)))
	whole := sortedLines(x.snapshot())
	for _, tt := range []struct{ hand, object string }{
		{"ip rule del fwmark 5001/0xffffff lookup 5001", "rule fwmark 5001 lookup 5001 (IPv4)"},
		{"nft delete element inet vipgate-lb maglev4/a { 7 }", "map maglev4/a"},
	} {
		x.sh(tt.hand)
		x.eventually("a repair of "+tt.object, func() bool { return sortedLines(x.snapshot()) == whole })
	}
	x.sh("ip neigh replace fd01::c dev eth1 lladdr 02:00:00:00:00:12 nud reachable; ip neigh replace fd01::c dev eth1 nud failed")
	p.wait("t2 out of the table", func(s State) bool { return s.Unreachable[netip.MustParseAddr("fd01::c")] != "" })
}
