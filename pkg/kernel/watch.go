package kernel

import (
	"errors"
	"log/slog"
	"sync/atomic"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
)

// watch receives notifications about kernel objects that affect source routing.
type watch struct {
	*rtnetlink.Listener
	// changed holds a token after a relevant change.
	changed chan struct{}

	// birdPort is the netlink port that last added a route of BIRD to the gateways' table; only the
	// rtnetlink listener's goroutine accesses it. removed counts BIRD's routes that another port
	// deleted from the table.
	birdPort uint32
	removed  atomic.Uint64
}

// newWatch subscribes in the network namespace of the calling thread.
func newWatch(options Options) (*watch, error) {
	watch := &watch{Listener: rtnetlink.NewListener(), changed: make(chan struct{}, 1)}
	err := errors.Join(
		watch.listen("rtnetlink", unix.NETLINK_ROUTE,
			func(message netlink.Message) bool { return watch.concernsPolicy(options, message) },
			unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
			unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF),
		watch.listen("nftables", unix.NETLINK_NETFILTER, concernsTable, unix.NFNLGRP_NFTABLES),
	)
	if err != nil {
		return nil, errors.Join(err, watch.Close())
	}
	return watch, nil
}

func (watch *watch) listen(
	name string, netlinkProtocol int, concerns func(netlink.Message) bool, groups ...uint32,
) error {
	wake := func() { latest.Wake(watch.changed) }
	return watch.Listen(name, rtnetlink.Subscription{
		Protocol: netlinkProtocol, Groups: groups, Overrun: wake,
		Handle: func(message netlink.Message) {
			if concerns(message) {
				wake()
			}
		},
	})
}

// close ends the subscriptions of w, which may be nil.
func (watch *watch) close(log *slog.Logger) {
	if watch == nil {
		return
	}
	if err := watch.Close(); err != nil {
		log.Warn("failed to close netlink subscription", "error", err)
	}
}

// concernsPolicy reports whether a message affects source routing. Relevant routes are all routes
// of the blackhole table, foreign routes in the gateways' table, and deletions of BIRD's routes by
// another process. BIRD's own changes are ignored, because BIRD may write a large number of routes.
func (watch *watch) concernsPolicy(options Options, message netlink.Message) bool {
	switch message.Header.Type {
	case unix.RTM_NEWRULE, unix.RTM_DELRULE, unix.RTM_NEWNETCONF, unix.RTM_DELNETCONF:
		return true // any rule can divert traffic; netconf reports forwarding and rp_filter
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		route, err := rtnetlink.ParseRoute(message.Data)
		switch {
		case err != nil || route.Table != options.TableID || route.Protocol != unix.RTPROT_BIRD || options.ForeignRoutes:
			return err != nil || route.Table == options.TableID || route.Table == options.blackholeTable()
		case message.Header.Type == unix.RTM_NEWROUTE:
			watch.birdPort = message.Header.PID
		// The kernel itself (port 0) removes routes with their interface; BIRD handles that.
		case message.Header.PID != 0 && message.Header.PID != watch.birdPort:
			watch.removed.Add(1)
			return true
		}
	}
	return false
}

// concernsTable reports whether an nftables message concerns the table of this package. Attribute
// 1 is the table name in every message except NEWGEN.
func concernsTable(message netlink.Message) bool {
	return message.Header.Type>>8 == unix.NFNL_SUBSYS_NFTABLES && message.Header.Type&0xff != unix.NFT_MSG_NEWGEN &&
		nlmsg.Netfilter(message.Data).Text(unix.NFTA_TABLE_NAME) == TableName
}
