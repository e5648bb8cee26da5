package dataplane

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"
)

// deaf runs a plane that hears nothing of what happens in the kernel.
func (s *site) deaf(interval time.Duration) *running {
	s.t.Helper()
	o := s.options()
	o.CheckInterval = interval
	p, err := New(o)
	s.must(err)
	var f *fabric
	s.must(s.ns.Do(func() error {
		f, err = newFabric(p.o)
		return err
	}))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- s.ns.Do(func() error {
			x := &overseer{
				p: p, e: newEngine(p.o, f, p.store), pause: failurePause, solicit: f.solicit, leave: f.leave, last: p.o.lastShape(),
				listen: func(Options) (*watch, error) {
					return &watch{changed: make(chan struct{}), failed: make(chan struct{})}, nil
				},
			}
			defer x.deafen()
			return x.run(ctx)
		})
	}()
	s.t.Cleanup(func() {
		cancel()
		for _, err := range []error{<-done, f.close(), p.store.Close()} {
			s.must(err)
		}
	})
	return &running{Plane: p, site: s}
}

// Issue 5: "a mistake of ours is never sticky: at every start and every minute actual is compared with the
// records", also if nothing was reported.
func TestTheKernelIsLookedAtAlthoughNothingWasReported(t *testing.T) {
	if got := (Options{}).withDefaults().CheckInterval; got != time.Minute {
		t.Errorf("the kernel is compared with the records every %s", got)
	}
	x := newSite(t)
	p := x.deaf(100 * time.Millisecond)
	p.configure(siteStream("a", bothVIPs, siteTarget(1, Serving, Serving), siteTarget(2, Serving, Serving)))
	for _, tt := range []struct{ hand, object string }{
		{"ip rule del fwmark 5001/0xffffff lookup 5001", "rule fwmark 5001 lookup 5001 (IPv4)"},
		{"nft delete element inet vipgate-lb maglev4/a { 7 }", "map maglev4/a"},
	} {
		x.sh(tt.hand)
		p.wait("drift of "+tt.object, func(s State) bool {
			return slices.ContainsFunc(s.Drift, func(d Drift) bool { return d.Object == tt.object })
		})
	}
	x.sh("ip neigh replace fd01::c dev eth1 lladdr 02:00:00:00:00:12 nud reachable; ip neigh replace fd01::c dev eth1 nud failed")
	p.wait("t2 out of the table", func(s State) bool { return s.Unreachable[netip.MustParseAddr("fd01::c")] != "" })
}
