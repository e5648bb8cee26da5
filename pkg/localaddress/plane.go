package localaddress

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/tick"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// readInterval is the period of reads without notifications.
	readInterval = 5 * time.Second
	// failurePause is the first delay after a failure; it doubles up to maxPause.
	failurePause = 50 * time.Millisecond
	maxPause     = time.Second
	// attempts bounds the changes before one confirmation.
	attempts = 3
)

// Plane keeps the addresses of VIPs on one interface. It is a task.Loop.
type Plane struct {
	link    string // name of the interface
	log     *slog.Logger
	desired *latest.Value[*plan.Desired] // nil before the first one
	state   *latest.Value[plan.State]
	ready   chan struct{} // closed after the first read, also a failed one
	pulse   task.Pulse

	// The following belong to the goroutine of Run.
	conn    *rtnetlink.Conn // nil after a failure
	added   vip.Set         // wanted VIPs whose addresses existed
	foreign vip.Set         // VIPs whose addresses belong to other processes, for the log
}

// New returns a Plane for the interface with a name.
func New(link string, log *slog.Logger) *Plane {
	return &Plane{
		link: link, log: log.With("component", "local addresses", "interface", link), ready: make(chan struct{}),
		desired: latest.New[*plan.Desired](nil), state: latest.New(plan.State{}), added: vip.Set{},
	}
}

// Configure sets the desired state. It does not block.
func (plane *Plane) Configure(desired *plan.Desired) {
	if !desired.RoutesOnly { // the targets are this host, to which no route is needed
		plane.desired.Set(desired)
	}
}

// State returns the confirmed state.
func (plane *Plane) State() *latest.Value[plan.State] { return plane.state }

// Ready is closed after the first read of the kernel.
func (plane *Plane) Ready() <-chan struct{} { return plane.ready }

// Overdue implements task.Loop.
func (plane *Plane) Overdue() time.Duration { return plane.pulse.Overdue() }

func (plane *Plane) String() string { return "local addresses" }

// Run keeps the addresses until ctx ends, and then removes them, in the calling thread's namespace.
func (plane *Plane) Run(ctx context.Context) error {
	defer plane.pulse.End()
	changed := make(chan struct{}, 1)
	var listener *rtnetlink.Listener
	defer func() {
		_, err := Cleanup()
		if plane.conn != nil {
			err = errors.Join(err, plane.conn.Close())
		}
		if listener != nil {
			err = errors.Join(err, listener.Close())
		}
		if err != nil {
			plane.log.Warn("failed to remove the addresses of VIPs; the next lb, or lb cleanup, removes them", "error", err)
		}
	}()
	retry := backoff.Backoff{Min: failurePause, Max: maxPause}
	for {
		plane.pulse.Next(0)
		var err error
		// Subscribe before the read, so that no change between the two is missed.
		if listener == nil {
			listener, err = listen(changed)
		}
		var failed <-chan struct{}
		if listener != nil {
			failed = listener.Failed()
		}
		desired, replaced := plane.desired.Get()
		wait := tick.Until(time.Now(), readInterval)
		if err = errors.Join(err, plane.reconcile(desired)); err != nil {
			wait = retry.Next()
		} else {
			retry.Reset()
		}
		plane.pulse.Next(wait)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-replaced:
		case <-changed:
		case <-failed:
			plane.log.Warn("netlink subscription failed, resubscribing", "error", listener.Err())
			_ = listener.Close() // its failure is logged
			listener = nil
		case <-time.After(wait):
		}
	}
}

// listen subscribes to changes of links and addresses.
func listen(changed chan<- struct{}) (*rtnetlink.Listener, error) {
	wake := func() { latest.Wake(changed) }
	listener := rtnetlink.NewListener()
	err := listener.Listen("addresses", rtnetlink.Subscription{
		Protocol: unix.NETLINK_ROUTE, Groups: []uint32{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR},
		Handle: func(netlink.Message) { wake() }, Overrun: wake,
	})
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return listener, nil
}

// reconcile changes the addresses to the desired state, reads them back, and publishes the
// confirmed state. Before the first desired state it only reads.
func (plane *Plane) reconcile(desired *plan.Desired) error {
	before := plane.state.Load()
	next := plan.State{
		Repairs: before.Repairs, TotalFailures: before.TotalFailures, At: time.Now(),
		VIPs: map[vip.VIP]string{}, Streams: map[string]*plan.StreamState{},
	}
	if next.Err = plane.apply(desired, &before, &next); next.Err != nil {
		next.Failures, next.TotalFailures = before.Failures+1, before.TotalFailures+1
		if before.Err == nil || before.Err.Error() != next.Err.Error() {
			plane.log.Warn("failed to change the addresses of VIPs, retrying", "error", next.Err)
		}
	}
	plane.state.Set(next)
	select {
	case <-plane.ready:
	default:
		close(plane.ready)
	}
	return next.Err
}

func (plane *Plane) apply(desired *plan.Desired, before, next *plan.State) error {
	kernel, err := plane.read()
	if err != nil || desired == nil {
		// The addresses that were read last most likely still exist.
		next.Revision, next.VIPs, next.Streams, next.Problems = before.Revision, before.VIPs, before.Streams, before.Problems
		return err
	}
	want := plane.wanted(desired, before, next)
	if kernel.problem != "" {
		next.Problems = append(next.Problems, plan.Problem{
			Object: "interface " + plane.link, Detail: kernel.problem, Remedy: "ip link set " + plane.link + " up",
			VIPs: slices.SortedFunc(maps.Keys(want), vip.Compare),
		})
	}
	var failed error
	// Another process may remove an address between the change and its confirmation.
	for range attempts {
		requests := plane.changes(kernel, want, next)
		if len(requests) == 0 {
			break
		}
		rejected, err := plane.conn.Do(requests...)
		failed = errors.Join(append(rejected, err)...)
		if kernel, err = plane.read(); err != nil {
			next.Revision, next.VIPs, next.Streams = before.Revision, before.VIPs, before.Streams
			return errors.Join(failed, err)
		}
	}
	for v, stream := range want {
		if kernel.usable[v.Prefix().Addr()] != nil {
			next.VIPs[v], plane.added[v] = stream, struct{}{}
		}
	}
	maps.DeleteFunc(plane.added, func(v vip.VIP, _ struct{}) bool { return want[v] == "" })
	next.Revision = desired.Revision
	return failed
}

// wanted returns the VIPs that this host serves, with their streams, and enters the targets and
// problems of all streams into next.
func (plane *Plane) wanted(desired *plan.Desired, before, next *plan.State) map[vip.VIP]string {
	want := map[vip.VIP]string{}
	for _, name := range slices.Sorted(maps.Keys(desired.Streams)) {
		stream, state := desired.Streams[name], &plan.StreamState{}
		for _, family := range vip.Families {
			state.Serving[family] = map[string]struct{}{}
			for i := range stream.Targets {
				target := &stream.Targets[i]
				role := target.Roles[family]
				if role == plan.Serving || role == plan.Unknown && before.Serves(name, family, target.Name) {
					state.Serving[family][target.Name] = struct{}{}
				}
			}
		}
		next.Streams[name] = state
		for _, v := range stream.VIPs {
			switch _, owned := want[v]; {
			case !v.Prefix().IsSingleIP():
				next.Problems = append(next.Problems, plan.Problem{
					Object: "VIP " + v.String(), Detail: "is a prefix, and --vip-interface adds single addresses",
					Remedy: "write its addresses as VIPs", VIPs: []vip.VIP{v},
				})
			case !owned && len(state.Serving[v.Family()]) > 0: // the stream whose name sorts first serves it
				want[v] = name
			}
		}
	}
	return want
}

// changes returns the requests that make the kernel have the wanted addresses.
func (plane *Plane) changes(kernel addresses, want map[vip.VIP]string, next *plan.State) (
	list []rtnetlink.Request,
) {
	foreign := vip.Set{}
	for v := range want {
		switch entry := kernel.usable[v.Prefix().Addr()]; {
		case entry != nil && entry.Metric != rtnetlink.MetricVIP:
			foreign[v] = struct{}{}
			if !plane.foreign.Has(v) {
				plane.log.Info("address of a VIP belongs to another process; it stays when the VIP is withdrawn", "vip", v)
			}
			continue
		case entry != nil || kernel.problem != "":
			continue
		case plane.added.Has(v):
			next.Repairs++
			plane.log.Warn("address of a VIP was removed by another process; restoring it", "vip", v)
		default:
			plane.log.Info("adding the address of a VIP", "vip", v)
		}
		list = append(list, rtnetlink.HostAddress(kernel.link, v.Prefix().Addr()).Add())
	}
	plane.foreign = foreign
	for _, entry := range kernel.all {
		v, err := vip.FromPrefix(entry.Network)
		// The flag may have named another interface at the last start.
		if entry.Metric == rtnetlink.MetricVIP && (err != nil || entry.Link != kernel.link || want[v] == "") {
			plane.log.Info("removing the address of a VIP", "vip", entry.Addr)
			list = append(list, entry.Delete())
		}
	}
	return list
}

type addresses struct {
	all []rtnetlink.Address
	// usable holds the addresses on the interface of the VIPs. The kernel delivers nothing to the
	// addresses of an interface that is down.
	usable  map[netip.Addr]*rtnetlink.Address
	link    int    // the index of the interface of the VIPs
	problem string // why it can have no address; "" if it can
}

func (plane *Plane) read() (kernel addresses, err error) {
	if plane.conn == nil {
		if plane.conn, err = rtnetlink.Dial(); err != nil {
			return kernel, err
		}
	}
	links, err := plane.conn.Links()
	if err != nil {
		return kernel, err
	}
	kernel.problem = "does not exist"
	for _, link := range links {
		if link.Name != plane.link {
			continue
		}
		kernel.link, kernel.problem = link.Index, ""
		if link.Flags&unix.IFF_UP == 0 {
			kernel.problem = "is down"
		}
	}
	kernel.all, err = plane.conn.Addresses()
	kernel.usable = make(map[netip.Addr]*rtnetlink.Address, len(kernel.all))
	for i := range kernel.all {
		entry := &kernel.all[i]
		if kernel.problem == "" && entry.Link == kernel.link && kernel.usable[entry.Addr] == nil &&
			!entry.Tentative() && !entry.Duplicate() {
			kernel.usable[entry.Addr] = entry
		}
	}
	return kernel, err
}

// Cleanup removes the addresses of VIPs from all interfaces, and returns them.
func Cleanup() (removed []string, err error) {
	conn, err := rtnetlink.Dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	all, err := conn.Addresses()
	if err != nil {
		return nil, err
	}
	var failed error
	for _, entry := range all {
		if entry.Metric != rtnetlink.MetricVIP {
			continue
		}
		if err := conn.Apply(entry.Delete()); err != nil {
			failed = errors.Join(failed, err)
		} else {
			removed = append(removed, entry.String())
		}
	}
	return removed, failed
}
