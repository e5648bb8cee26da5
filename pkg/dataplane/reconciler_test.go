package dataplane

import (
	"net/netip"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
)

// withoutEvents runs a plane that receives no notifications from the kernel.
func (s *site) withoutEvents(interval time.Duration) *running {
	s.t.Helper()
	p, err := New(s.options())
	s.must(err)
	p.checkInterval = interval
	p.subscribe = func(fwstate.Config) (*fwstate.Watch, error) {
		return &fwstate.Watch{Listener: rtnetlink.NewListener(), Changed: make(chan struct{})}, nil
	}
	s.ns.Background(s.t, p.Run)
	return &running{Plane: p, site: s}
}

// Observed and desired state are compared every minute, even without notifications.
func TestKernelIsReadWithoutEvents(t *testing.T) {
	if fullReadInterval != time.Minute {
		t.Errorf("the kernel is read every %s", fullReadInterval)
	}
	x := newSite(t)
	p := x.withoutEvents(100 * time.Millisecond)
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving),
		siteTarget(2, plan.Serving, plan.Serving)))
	whole := sortedLines(x.snapshot())
	for _, tt := range []struct{ command, object string }{
		{"ip rule del fwmark 5001/0xffffff lookup 5001", "rule fwmark 5001 lookup 5001 (IPv4)"},
		{"nft delete element inet vipgate-lb maglev4/a { 7 }", "map maglev4/a"},
	} {
		x.sh(tt.command)
		x.eventually("a repair of "+tt.object, func() bool { return sortedLines(x.snapshot()) == whole })
	}
	x.sh("ip neigh replace fd01::c dev eth1 lladdr 02:00:00:00:00:12 nud reachable; ip neigh replace fd01::c dev eth1 " +
		"nud failed")
	p.wait("t2 out of the table", func(s plan.State) bool { return s.Unreachable[netip.MustParseAddr("fd01::c")] != "" })
}

// An own transaction does not cause a read; a foreign transaction does.
func TestOwnTransactionsNeedNoPass(t *testing.T) {
	w := newModelFixture()
	w.settle(streamA(testTarget("x1", plan.Serving)), false)
	p := &Plane{reconciler: reconciler{e: w.e}}
	for _, tt := range []struct {
		what   string
		events fwstate.Events
		change func()
		due    bool
	}{
		{"own", fwstate.Events{Ruleset: true}, func() { w.k.gen++; w.k.writes++ }, false},
		{"foreign", fwstate.Events{Ruleset: true}, func() { w.k.gen++ }, true},
		{"routes", fwstate.Events{Routes: true}, func() {}, true},
		{"neighbors", fwstate.Events{Neighbors: true}, func() {}, true},
		{"kernel parameters", fwstate.Events{Sysctls: true}, func() {}, true},
	} {
		p.e.stale = 0
		if tt.change(); p.handleEvents(tt.events) != tt.due {
			t.Errorf("%s: due %v", tt.what, !tt.due)
		}
	}
}

// The data plane is overdue while a call of its loop blocks, and not while it waits.
func TestHungPlaneIsOverdue(t *testing.T) {
	x := newSite(t)
	p, err := New(x.options())
	x.must(err)
	hang := make(chan struct{})
	p.subscribe = func(c fwstate.Config) (*fwstate.Watch, error) {
		<-hang
		return fwstate.Subscribe(c)
	}
	x.ns.Background(t, p.Run)
	x.eventually("an overdue loop", func() bool { return p.Overdue() > 100*time.Millisecond })
	close(hang)
	<-p.Ready()
	x.eventually("a loop that waits", func() bool { return p.Overdue() == 0 })
}

// busyKernel is a kernel in which another process writes during the first reads.
type busyKernel struct {
	*modelKernel
	busy, reads int
}

func (k *busyKernel) Read(numbers []uint32) (*plan.KernelState, error) {
	c, err := k.modelKernel.Read(numbers)
	if k.reads++; k.reads <= k.busy {
		k.gen++
	}
	return c, err
}

// A read during a foreign write may return a mixture of old and new state. It is marked as
// outdated, so that another one follows, and does not wait for the end of the writes.
func TestReadBetweenTransactions(t *testing.T) {
	for busy, outdated := range []bool{false, true, true} {
		w := newModelFixture()
		k := &busyKernel{modelKernel: w.k, busy: busy}
		w.e.kernel = k
		must(t, w.e.readAll())
		if got := w.e.foreignTransaction(); k.reads != 1 || got != outdated {
			t.Errorf("%d foreign transactions: %d reads, outdated %t", busy, k.reads, got)
		}
	}
}

// The read interval depends on the duration of a read, is shorter for links and neighbors, and
// waits for a link that just went down.
func TestNextRead(t *testing.T) {
	for name, tt := range map[string]struct {
		readTime, linkDown time.Duration // of the link: after the last read; 0 is never
		stale              parts
		want               time.Duration
	}{
		"nothing takes long":        {0, 0, nftables, 20 * time.Millisecond},
		"a tenth of the time":       {30 * time.Millisecond, 0, nftables, 300 * time.Millisecond},
		"a large kernel":            {time.Second, 0, nftables | routes, 500 * time.Millisecond},
		"links of a large kernel":   {time.Second, 0, nftables | network, 250 * time.Millisecond},
		"a link that went down":     {0, 10 * time.Millisecond, network, 110 * time.Millisecond},
		"one that went down before": {30 * time.Millisecond, 10 * time.Millisecond, routes, 300 * time.Millisecond},
	} {
		w := newModelFixture()
		p := &Plane{reconciler: reconciler{e: w.e}}
		p.e.readTime, p.e.stale = tt.readTime, tt.stale
		if tt.linkDown > 0 {
			p.lastLinkDown = p.e.lastRead.Add(tt.linkDown)
		}
		if got := p.nextRead().Sub(p.e.lastRead); got != tt.want {
			t.Errorf("%s: read after %s, want %s", name, got, tt.want)
		}
	}
}
