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
	// PeerSubnets contain the trench pods' own addresses on the interface. Packets to the pool from
	// other hosts are dropped. Empty: every host on the link can be a trench pod.
	PeerSubnets []netip.Prefix
	Log         *slog.Logger
}

// Validate returns an error for invalid options.
func (options Options) Validate() error {
	if options.Interface == "" || len(options.Interface) >= unix.IFNAMSIZ {
		return fmt.Errorf("interface %q: its name needs 1 to %d characters", options.Interface, unix.IFNAMSIZ-1)
	}
	if len(options.Pool) == 0 {
		return errors.New("the pool has no prefix; name at least one")
	}
	for index, prefix := range options.Pool {
		switch address := prefix.Addr(); {
		case !prefix.IsValid():
			return errors.New("the pool has an invalid prefix")
		case prefix != prefix.Masked():
			return fmt.Errorf("pool prefix %s has host bits set; use %s", prefix, prefix.Masked())
		case prefix.Bits() == 0 || address.Is4In6() || address.Zone() != "" ||
			address.IsLoopback() || address.IsMulticast() || address.IsLinkLocalUnicast():
			return fmt.Errorf("pool prefix %s: VIPs are unicast addresses of a part of the network", prefix)
		}
		if slices.ContainsFunc(options.Pool[:index], prefix.Overlaps) {
			return fmt.Errorf("pool prefix %s overlaps another one", prefix)
		}
	}
	addresses := 0
	for _, subnet := range options.PeerSubnets {
		addresses += 1 << min(subnet.Addr().BitLen()-subnet.Bits(), 9) // 512 for any wide one
		if addresses > maxSolicited || subnet != subnet.Masked() ||
			slices.ContainsFunc(options.Pool, subnet.Overlaps) {
			return fmt.Errorf("peer subnet %s: name the trench pods' own addresses as /32 and /128, "+
				"at most %d in all, without VIPs and host bits", subnet, maxSolicited)
		}
	}
	return nil
}

// Path reconciles the kernel state of a target. It implements task.Task.
type Path struct {
	o       Options
	ready   chan struct{}
	isReady bool // ready is closed
	changed chan struct{}
	status  latest.Value[Status]
}

// New returns a Path that changes nothing before Run.
func New(options Options) *Path {
	return &Path{o: options, ready: make(chan struct{}), changed: make(chan struct{}, 1)}
}

// String returns the name of the task.
func (path *Path) String() string { return "reply-path" }

// Ready returns a channel that is closed when the kernel state is first complete.
func (path *Path) Ready() <-chan struct{} { return path.ready }

// Changed returns a channel that receives a value when [Path.Status] may have changed.
func (path *Path) Changed() <-chan struct{} { return path.changed }

// Status returns the last observed state without querying the kernel.
func (path *Path) Status() Status { return path.status.Load() }

// Run installs the kernel state and restores it until ctx ends, in the network namespace of the
// calling thread. It leaves the state installed.
func (path *Path) Run(ctx context.Context) error {
	if err := errors.Join(path.o.Validate(), checkCapability()); err != nil {
		return err
	}
	retry := backoff.Backoff{Min: minBackoff, Max: maxBackoff}
	for {
		err := path.run(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		// The state stays in the kernel; only its supervision is interrupted.
		path.o.Log.Warn("netlink sockets failed, reopening", "error", err)
		if err := retry.Wait(ctx); err != nil {
			return err
		}
	}
}

func (path *Path) run(ctx context.Context) (err error) {
	kernel, err := dial(path.o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, kernel.close()) }()
	// Subscribe before the first comparison, so that no change is missed in between.
	listener, wake, err := watch()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, listener.Close()) }()
	repairs := repairs{}
	// Neighbors are probed, and new peers read, without a notification.
	ticks := time.NewTicker(interval)
	defer ticks.Stop()
	for {
		path.step(kernel, repairs)
		if err := backoff.Sleep(ctx, pause); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-listener.Failed():
			return listener.Err()
		case <-wake:
		case <-ticks.C:
			kernel.probe()
		case <-repairs.due():
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
func (repairs repairs) allow(missing []string, now time.Time) bool {
	return slices.ContainsFunc(missing, func(name string) bool {
		return repairs[name] == nil || !now.Before(repairs[name].next)
	})
}

// done records restored parts and extends their back-off.
func (repairs repairs) done(parts []string, now time.Time) {
	maps.DeleteFunc(repairs, func(_ string, entry *repair) bool { return now.Sub(entry.last) > calm })
	for _, name := range parts {
		entry := repairs[name]
		if entry == nil {
			entry = &repair{Backoff: backoff.Backoff{Min: minBackoff, Max: maxBackoff}}
			repairs[name] = entry
		}
		entry.last, entry.next = now, now.Add(entry.Next())
	}
}

// due returns a channel that fires at the next delayed restoration.
func (repairs repairs) due() <-chan time.Time {
	first := time.Time{}
	for _, entry := range repairs {
		if time.Now().Before(entry.next) && (first.IsZero() || entry.next.Before(first)) {
			first = entry.next
		}
	}
	if first.IsZero() {
		return nil
	}
	return time.After(time.Until(first))
}

// step compares the state once and restores it if no back-off applies.
func (path *Path) step(kernel *kernel, repairs repairs) {
	now, was := time.Now(), path.status.Load()
	status := was
	// Compare without changes first: a part in back-off is reported as missing, not restored.
	missing, problems := kernel.reconcile(false)
	if repairs.allow(missing, now) {
		drift, _ := kernel.reconcile(true)
		// Read the result back.
		missing, problems = kernel.reconcile(false)
		// Until the state is first complete, a missing part is not drift.
		if path.isReady {
			repairs.done(drift, now)
			drift = slices.DeleteFunc(drift, func(name string) bool { return slices.Contains(missing, name) })
			status.Repairs += uint64(len(drift))
			path.o.Log.Info("drift detected", "restored", drift, "missing", missing)
		}
	}
	status.Problems, status.Peers, status.Dropped = problems, slices.Clone(kernel.peers.list), kernel.dropped
	status.Full, status.Evicted = kernel.peers.full(), kernel.peers.evicted
	complete := len(missing)+len(problems) == 0
	if complete != status.Complete || status.Since.IsZero() {
		status.Complete, status.Since = complete, now
		path.o.Log.Info("reply path changed", "complete", complete, "problems", problems)
	}
	if !reflect.DeepEqual(status, was) {
		path.status.Set(status)
		latest.Wake(path.changed)
	}
	if complete && !path.isReady {
		path.isReady = true
		close(path.ready)
	}
}

// watch subscribes to changes of the kernel state. The channel receives a token after a change.
func watch() (*rtnetlink.Listener, <-chan struct{}, error) {
	listener, changed := rtnetlink.NewListener(), make(chan struct{}, 1)
	wake := func() { latest.Wake(changed) }
	err := errors.Join(
		listener.Listen("nftables", rtnetlink.Subscription{
			Protocol: unix.NETLINK_NETFILTER, Groups: []uint32{unix.NFNLGRP_NFTABLES}, Overrun: wake,
			Handle: func(netlink.Message) { wake() },
		}),
		listener.Listen("rtnetlink", rtnetlink.Subscription{
			Protocol: unix.NETLINK_ROUTE, Overrun: wake,
			Groups: []uint32{
				unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
				unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE,
			},
			Handle: func(message netlink.Message) {
				if concerns(message) {
					wake()
				}
			},
		}),
	)
	if err != nil {
		return nil, nil, errors.Join(err, listener.Close())
	}
	return listener, changed, nil
}

// concerns reports whether a notification is relevant. It excludes foreign routes, which may
// change often, and neighbor updates, which every probe causes.
func concerns(message netlink.Message) bool {
	switch message.Header.Type {
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		route, err := rtnetlink.ParseRoute(message.Data)
		return err != nil || route.Protocol == protocol || route.Table == table
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		neighbor, err := rtnetlink.ParseNeighbor(message.Data)
		return err != nil || message.Header.Type == unix.RTM_DELNEIGH || neighbor.State&unix.NUD_FAILED != 0 ||
			neighbor.Addr == placeholder(vip.FamilyOf(neighbor.Addr))
	}
	return true
}

// attempts limits the retries of Install after concurrent changes by another process.
const attempts = 5

// Install installs the kernel state once and reads it back. The error includes [Status.Err].
func Install(ctx context.Context, options Options) (Status, error) {
	if err := errors.Join(options.Validate(), checkCapability()); err != nil {
		return Status{}, err
	}
	kernel, err := dial(options)
	if err != nil {
		return Status{}, err
	}
	status := Status{Since: time.Now()}
	for range attempts {
		// The following read reports the parts that this call fails to install.
		_, _ = kernel.reconcile(true)
		var missing []string
		missing, status.Problems = kernel.reconcile(false)
		if status.Complete = len(missing)+len(status.Problems) == 0; status.Complete || ctx.Err() != nil {
			break
		}
	}
	status.Peers = kernel.peers.list
	return status, errors.Join(ctx.Err(), kernel.close(), status.Err())
}

// Cleanup removes the kernel state of all Paths in this network namespace and returns the objects.
func Cleanup(ctx context.Context) ([]string, error) {
	if err := checkCapability(); err != nil {
		return nil, err
	}
	kernel, err := dial(Options{})
	if err != nil {
		return nil, err
	}
	removed, err := kernel.cleanup()
	return removed, errors.Join(err, kernel.close(), ctx.Err())
}
