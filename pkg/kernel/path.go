package kernel

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/sysctl"
	"github.com/vipgate/vipgate/pkg/vip"
)

// farClients are addresses beyond the gateways to which only a default route leads: TEST-NET-1
// (RFC 5737) and the IPv6 documentation prefix (RFC 3849).
var farClients = [...]netip.Addr{
	vip.IPv4: netip.AddrFrom4([4]byte{192, 0, 2, 1}), vip.IPv6: netip.MustParseAddr("2001:db8::1"),
}

// paths looks up the routes of packets that targets send from VIPs. Another process can divert
// the packets by a rule with a lower priority value or by a route in the gateways' table.
type paths struct {
	policy
	conn    *rtnetlink.Conn // nil before the first lookup and after a failure
	sources [len(vip.Families)]netip.Addr
	inputs  [len(vip.Families)][]rtnetlink.Link // interfaces of targets, see findInputs
	// found is the problem of the last lookup, "" for none; since is the time when it first appeared.
	found [len(vip.Families)]string
	since [len(vip.Families)]time.Time
}

// configure sets a source address for each family with a VIP.
func (paths *paths) configure(desired vip.Set) {
	paths.sources = [len(vip.Families)]netip.Addr{}
	for address := range desired {
		// The smallest address, so that the same VIPs always give the same source.
		source := &paths.sources[address.Family()]
		if addr := address.Prefix().Addr(); !address.IsZero() && (!source.IsValid() || addr.Less(*source)) {
			*source = addr
		}
	}
	for family, source := range paths.sources {
		if !source.IsValid() {
			paths.found[family] = ""
		}
	}
}

// findInputs lists the interfaces to which targets may be attached: interfaces with an address of
// the family, except the external interface. The interface of the pod's default route counts only
// if it is the only candidate.
func (paths *paths) findInputs() error {
	// Packets come from VIPs, so without a VIP no lookup is necessary.
	if paths.sources == [len(vip.Families)]netip.Addr{} {
		return nil
	}
	conn, err := paths.dial()
	if err != nil {
		return err
	}
	links, err := conn.Links()
	if err != nil {
		return err
	}
	addresses, err := conn.Addresses()
	if err != nil {
		return err
	}
	external := ""
	if paths.External != nil {
		external = paths.External()
	}
	for _, family := range vip.Families {
		if !paths.sources[family].IsValid() {
			continue
		}
		// A link-local address does not prove that the interface is configured for the family.
		inputs := slices.DeleteFunc(slices.Clone(links), func(link rtnetlink.Link) bool {
			return link.Flags&(unix.IFF_UP|unix.IFF_LOOPBACK) != unix.IFF_UP || link.Name == external ||
				!slices.ContainsFunc(addresses, func(address rtnetlink.Address) bool {
					return address.Link == link.Index && vip.FamilyOf(address.Addr) == family && !onLink(address.Addr)
				})
		})
		// Targets are usually attached to a secondary network, not to the pod's primary interface.
		if route, err := conn.Lookup(farClients[family], 0); err == nil && len(inputs) > 1 {
			inputs = slices.DeleteFunc(inputs, func(link rtnetlink.Link) bool { return link.Index == route.Link })
		}
		paths.inputs[family] = inputs
	}
	return nil
}

// dial returns the connection, which stays open for later lookups.
func (paths *paths) dial() (*rtnetlink.Conn, error) {
	if paths.conn == nil {
		conn, err := rtnetlink.Dial()
		if err != nil {
			return nil, err
		}
		paths.conn = conn
	}
	return paths.conn, nil
}

// close closes the connection, if it is open. The next lookup dials again.
func (paths *paths) close() error {
	if paths.conn == nil {
		return nil
	}
	err := paths.conn.Close()
	paths.conn = nil
	return err
}

// look looks up the routes of a family with VIPs and reports whether the problem has changed.
func (paths *paths) look(family vip.Family) (changed bool) {
	if !paths.sources[family].IsValid() {
		return false
	}
	conn, err := paths.dial()
	if err != nil {
		return false // reconcile reports the error
	}
	problem := ""
	for _, input := range paths.inputs[family] {
		if problem = paths.problem(conn, family, input); problem != "" {
			break
		}
	}
	if problem != "" && paths.found[family] == "" {
		paths.since[family] = time.Now()
	}
	changed = problem != paths.found[family]
	paths.found[family] = problem
	return changed
}

// check looks up the routes of a family. It returns a problem as an error only if it persists for
// lookAgain: a single lookup may fall between two steps of a change by BIRD or another process.
func (paths *paths) check(family vip.Family) (err error, unconfirmed bool) {
	paths.look(family)
	switch {
	case paths.found[family] == "":
		return nil, false
	case time.Since(paths.since[family]) < lookAgain:
		return nil, true
	}
	return errors.New(paths.found[family]), false
}

// problem returns why packets from VIPs that arrive on an interface do not leave by the gateways.
func (paths *paths) problem(conn *rtnetlink.Conn, family vip.Family, input rtnetlink.Link) string {
	route, err := conn.LookupForwarded(paths.sources[family], farClients[family], input.Index, paths.Mark)
	subject := fmt.Sprintf("%s packets from VIPs that arrive on %s", family, input.Name)
	switch {
	case err != nil:
		if !paths.mustPass(conn, family, input, err) {
			return ""
		}
		return fmt.Sprintf("%s are dropped, although table %d has a default route: %s", subject, paths.TableID,
			paths.blame(conn, family, rtnetlink.Rule.Drops))
	case route.Table == paths.blackholeTable() && route.Drops():
		return ""
	case route.Table != paths.TableID:
		return fmt.Sprintf("%s leave by table %d, not by the gateways: %s", subject, route.Table,
			paths.blame(conn, family, func(problem rtnetlink.Rule) bool {
				return problem.Action == unix.FR_ACT_TO_TBL && problem.Table == route.Table
			}))
	case route.Protocol != unix.RTPROT_BIRD && !paths.ForeignRoutes:
		return fmt.Sprintf("%s follow a route that is not BIRD's: remove the %s %s", subject, family, route)
	}
	return ""
}

// mustPass reports whether the kernel should forward packets that it drops with an error. Drops
// are expected without a gateway's route, and they are ignored on interfaces that do not forward
// and for VIPs that are local addresses.
func (paths *paths) mustPass(conn *rtnetlink.Conn, family vip.Family, input rtnetlink.Link, err error) bool {
	var rejected *nlmsg.Error
	if !errors.As(err, &rejected) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.ENODEV) {
		return false // reverse path filtering, or the interface is gone
	}
	// Linux 6.18 returns EINVAL for packets that fail reverse path filtering, as for those dropped.
	if family == vip.IPv4 && (sysctl.IPv4Interface(input.Name, "forwarding").Read() != "1" ||
		reversePathFilter(sysctl.IPv4Interface(input.Name, "rp_filter")) == "1") {
		return false
	}
	if route, err := conn.Lookup(paths.sources[family], 0); err == nil && route.Type == unix.RTN_LOCAL {
		return false
	}
	routes, err := conn.Routes(family, rtnetlink.RouteFilter{Table: paths.TableID})
	return err == nil && slices.ContainsFunc(routes, func(route rtnetlink.Route) bool {
		usable := route.Protocol == unix.RTPROT_BIRD || paths.ForeignRoutes
		return usable && route.IsDefault() && !route.Drops() && !route.Dead
	})
}

// blame returns the remedy for a diversion: it names the first matching rule of another process
// that precedes the rules of this package.
func (paths *paths) blame(conn *rtnetlink.Conn, family vip.Family, fits func(rtnetlink.Rule) bool) string {
	rules, err := conn.Rules(family)
	if err != nil {
		return err.Error()
	}
	for _, rule := range rules {
		if rule.Priority > uint32(paths.Priority) {
			break
		}
		if rule.Protocol != protocol && fits(rule) {
			return fmt.Sprintf("remove the rule %s, or give it a priority above %d", rule, paths.Priority+2)
		}
	}
	return fmt.Sprintf("remove the rule before priority %d, see ip rule show", paths.Priority)
}
