package replypath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// interval is the period of reading peers and comparing the state without a notification.
	interval = time.Second
	// pause is the minimum time between two comparisons, so that frequent changes by another
	// process do not cause a busy loop.
	pause = 20 * time.Millisecond
	// An object that another process removes repeatedly is restored after a delay of minBackoff to
	// maxBackoff. The back-off of an object ends after calm without a removal.
	minBackoff, maxBackoff = 100 * time.Millisecond, 10 * time.Second
	calm                   = 30 * time.Second
)

// Options configures a Path.
type Options struct {
	// Pool lists the prefixes of VIPs, of both families, without overlaps.
	Pool []netip.Prefix
	// Interface is the network interface toward the trench pods. It may be temporarily absent.
	Interface string
	Log       *slog.Logger
}

// Validate returns an error for invalid options.
func (o Options) Validate() error {
	if o.Interface == "" || len(o.Interface) >= unix.IFNAMSIZ {
		return fmt.Errorf("interface %q: its name needs 1 to %d characters", o.Interface, unix.IFNAMSIZ-1)
	}
	if len(o.Pool) == 0 {
		return errors.New("the pool has no prefix; name at least one")
	}
	for i, p := range o.Pool {
		switch a := p.Addr(); {
		case !p.IsValid():
			return errors.New("the pool has an invalid prefix")
		case p != p.Masked():
			return fmt.Errorf("pool prefix %s has host bits set; use %s", p, p.Masked())
		case p.Bits() == 0 || a.Is4In6() || a.Zone() != "" || a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast():
			return fmt.Errorf("pool prefix %s: VIPs are unicast addresses of a part of the network", p)
		}
		if slices.ContainsFunc(o.Pool[:i], p.Overlaps) {
			return fmt.Errorf("pool prefix %s overlaps another one", p)
		}
	}
	return nil
}

// Path reconciles the kernel state of a target. It implements task.Task.
type Path struct {
	o       Options
	ready   chan struct{}
	changed chan struct{}
	status  latest.Value[Status]
}

// New returns a Path that changes nothing before Run.
func New(o Options) *Path {
	return &Path{o: o, ready: make(chan struct{}), changed: make(chan struct{}, 1)}
}

// String returns the name of the task.
func (p *Path) String() string { return "reply-path" }

// Ready returns a channel that is closed when the kernel state is first complete.
func (p *Path) Ready() <-chan struct{} { return p.ready }

// Changed returns a channel that receives a value when [Path.Status] may have changed.
func (p *Path) Changed() <-chan struct{} { return p.changed }

// Status returns the last observed state without querying the kernel.
func (p *Path) Status() Status { return p.status.Load() }

// Run installs the kernel state and restores it until ctx ends, in the network namespace of the
// calling thread. It leaves the state installed.
func (p *Path) Run(ctx context.Context) error {
	if err := errors.Join(p.o.Validate(), checkCapability()); err != nil {
		return err
	}
	retry := backoff.Backoff{Min: minBackoff, Max: maxBackoff}
	for {
		err := p.run(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		p.o.Log.Warn("netlink sockets failed, reopening", "error", err)
		if err := retry.Wait(ctx); err != nil {
			return err
		}
	}
}

func (p *Path) run(ctx context.Context) (err error) {
	k, err := dial(p.o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, k.close()) }()
	w, wake, err := watch()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	r := repairs{}
	ticks := time.NewTicker(interval)
	defer ticks.Stop()
	for {
		p.step(k, r)
		if err := backoff.Sleep(ctx, pause); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.Failed():
			return w.Err()
		case <-wake:
		case <-ticks.C:
			k.probe()
		case <-r.due():
		}
	}
}

// repairs holds the back-off of each part that another process removes repeatedly.
type repairs map[string]*repair

type repair struct {
	backoff.Backoff
	last, next time.Time
}

// allow reports whether the back-off permits restoring at least one part.
func (r repairs) allow(missing []string, now time.Time) bool {
	return slices.ContainsFunc(missing, func(name string) bool { return r[name] == nil || !now.Before(r[name].next) })
}

// done records restored parts and extends their back-off.
func (r repairs) done(parts []string, now time.Time) {
	maps.DeleteFunc(r, func(_ string, x *repair) bool { return now.Sub(x.last) > calm })
	for _, name := range parts {
		x := r[name]
		if x == nil {
			x = &repair{Backoff: backoff.Backoff{Min: minBackoff, Max: maxBackoff}}
			r[name] = x
		}
		x.last, x.next = now, now.Add(x.Next())
	}
}

// due returns a channel that fires at the next delayed restoration.
func (r repairs) due() <-chan time.Time {
	first := time.Time{}
	for _, x := range r {
		if time.Now().Before(x.next) && (first.IsZero() || x.next.Before(first)) {
			first = x.next
		}
	}
	if first.IsZero() {
		return nil
	}
	return time.After(time.Until(first))
}

// step compares the state once and restores it if no back-off applies.
func (p *Path) step(k *kernel, r repairs) {
	now, was, ready := time.Now(), p.status.Load(), isClosed(p.ready)
	s := was
	missing, problems := k.reconcile(false)
	if r.allow(missing, now) {
		drift, _ := k.reconcile(true)
		// Read the result back.
		missing, problems = k.reconcile(false)
		if ready {
			r.done(drift, now)
			drift = slices.DeleteFunc(drift, func(name string) bool { return slices.Contains(missing, name) })
			s.Repairs += uint64(len(drift))
			p.o.Log.Info("drift detected", "restored", drift, "missing", missing)
		}
	}
	s.Problems, s.Peers, s.Dropped = problems, slices.Clone(k.peers.list), k.dropped
	s.Full, s.Evicted = k.peers.full(), k.peers.evicted
	complete := len(missing)+len(problems) == 0
	if complete != s.Complete || s.Since.IsZero() {
		s.Complete, s.Since = complete, now
		p.o.Log.Info("reply path changed", "complete", complete, "problems", problems)
	}
	if !reflect.DeepEqual(s, was) {
		p.status.Set(s)
		latest.Wake(p.changed)
	}
	if complete && !ready {
		close(p.ready)
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// watch subscribes to changes of the kernel state. The channel receives a token after a change.
func watch() (*rtnetlink.Listener, <-chan struct{}, error) {
	l, changed := rtnetlink.NewListener(), make(chan struct{}, 1)
	wake := func() { latest.Wake(changed) }
	err := errors.Join(
		l.Listen("nftables", rtnetlink.Subscription{
			Protocol: unix.NETLINK_NETFILTER, Groups: []uint32{unix.NFNLGRP_NFTABLES}, Overrun: wake,
			Handle: func(netlink.Message) { wake() },
		}),
		l.Listen("rtnetlink", rtnetlink.Subscription{
			Protocol: unix.NETLINK_ROUTE, Overrun: wake,
			Groups: []uint32{
				unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
				unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE,
			},
			Handle: func(m netlink.Message) {
				if concerns(m) {
					wake()
				}
			},
		}),
	)
	if err != nil {
		return nil, nil, errors.Join(err, l.Close())
	}
	return l, changed, nil
}

// concerns reports whether a notification is relevant. It excludes foreign routes, which may
// change often, and neighbor updates, which every probe causes.
func concerns(m netlink.Message) bool {
	switch m.Header.Type {
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		r, err := rtnetlink.ParseRoute(m.Data)
		return err != nil || r.Protocol == protocol || r.Table == table
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		n, err := rtnetlink.ParseNeighbor(m.Data)
		return err != nil || m.Header.Type == unix.RTM_DELNEIGH || n.State&unix.NUD_FAILED != 0 ||
			n.Addr == placeholder(vip.FamilyOf(n.Addr))
	}
	return true
}

// attempts limits the retries of Install after concurrent changes by another process.
const attempts = 5

// Install installs the kernel state once and reads it back. The error lists the problems of an
// incomplete status.
func Install(ctx context.Context, o Options) (Status, error) {
	if err := errors.Join(o.Validate(), checkCapability()); err != nil {
		return Status{}, err
	}
	k, err := dial(o)
	if err != nil {
		return Status{}, err
	}
	s := Status{Since: time.Now()}
	for range attempts {
		_, _ = k.reconcile(true)
		var missing []string
		missing, s.Problems = k.reconcile(false)
		if s.Complete = len(missing)+len(s.Problems) == 0; s.Complete || ctx.Err() != nil {
			break
		}
	}
	s.Peers = k.peers.list
	err = errors.Join(ctx.Err(), k.close())
	for _, x := range s.Problems {
		err = errors.Join(err, fmt.Errorf("%s: %s; %s", x.Object, x.Detail, x.Remedy))
	}
	return s, err
}

// Cleanup removes the kernel state of every Path in this network namespace and returns the removed
// objects.
func Cleanup(ctx context.Context) ([]string, error) {
	if err := checkCapability(); err != nil {
		return nil, err
	}
	k, err := dial(Options{})
	if err != nil {
		return nil, err
	}
	removed, err := k.cleanup()
	return removed, errors.Join(err, k.close(), ctx.Err())
}
