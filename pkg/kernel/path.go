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
	// found is the problem of the last lookup, "" for none; since is the time when it first
	// appeared.
	found [len(vip.Families)]string
	since [len(vip.Families)]time.Time
}

// configure sets a source address for each family with a VIP.
func (p *paths) configure(desired vip.Set) {
	p.sources = [len(vip.Families)]netip.Addr{}
	for v := range desired {
		// The smallest address, so that the same VIPs always give the same source.
		source := &p.sources[v.Family()]
		if addr := v.Prefix().Addr(); !v.IsZero() && (!source.IsValid() || addr.Less(*source)) {
			*source = addr
		}
	}
	for f, source := range p.sources {
		if !source.IsValid() {
			p.found[f] = ""
		}
	}
}

// findInputs lists the interfaces to which targets may be attached: interfaces with an address of
// the family, except the external interface. The interface of the pod's default route counts only
// if it is the only candidate.
func (p *paths) findInputs() error {
	if p.sources == [len(vip.Families)]netip.Addr{} {
		return nil
	}
	c, err := p.dial()
	if err != nil {
		return err
	}
	links, err := c.Links()
	if err != nil {
		return err
	}
	addresses, err := c.Addresses()
	if err != nil {
		return err
	}
	external := ""
	if p.External != nil {
		external = p.External()
	}
	for _, f := range vip.Families {
		if !p.sources[f].IsValid() {
			continue
		}
		inputs := slices.DeleteFunc(slices.Clone(links), func(l rtnetlink.Link) bool {
			return l.Flags&(unix.IFF_UP|unix.IFF_LOOPBACK) != unix.IFF_UP || l.Name == external ||
				!slices.ContainsFunc(addresses, func(a rtnetlink.Address) bool {
					return a.Link == l.Index && vip.FamilyOf(a.Addr) == f && !onLink(a.Addr)
				})
		})
		if route, err := c.Lookup(farClients[f], 0); err == nil && len(inputs) > 1 {
			inputs = slices.DeleteFunc(inputs, func(l rtnetlink.Link) bool { return l.Index == route.Link })
		}
		p.inputs[f] = inputs
	}
	return nil
}

// dial returns the connection, which stays open for later lookups.
func (p *paths) dial() (*rtnetlink.Conn, error) {
	if p.conn == nil {
		c, err := rtnetlink.Dial()
		if err != nil {
			return nil, err
		}
		p.conn = c
	}
	return p.conn, nil
}

// close closes the connection, if it is open. The next lookup dials again.
func (p *paths) close() error {
	if p.conn == nil {
		return nil
	}
	err := p.conn.Close()
	p.conn = nil
	return err
}

// look looks up the routes of a family with VIPs and reports whether the problem has changed.
func (p *paths) look(f vip.Family) (changed bool) {
	if !p.sources[f].IsValid() {
		return false
	}
	c, err := p.dial()
	if err != nil {
		return false // reconcile reports the error
	}
	problem := ""
	for _, input := range p.inputs[f] {
		if problem = p.problem(c, f, input); problem != "" {
			break
		}
	}
	if problem != "" && p.found[f] == "" {
		p.since[f] = time.Now()
	}
	changed = problem != p.found[f]
	p.found[f] = problem
	return changed
}

// check looks up the routes of a family. It returns a problem as an error only if it persists for
// lookAgain: a single lookup may fall between two steps of a change by BIRD or another process.
func (p *paths) check(f vip.Family) (err error, unconfirmed bool) {
	p.look(f)
	switch {
	case p.found[f] == "":
		return nil, false
	case time.Since(p.since[f]) < lookAgain:
		return nil, true
	}
	return errors.New(p.found[f]), false
}

// problem returns why packets from VIPs that arrive on an interface do not leave by the gateways.
func (p *paths) problem(c *rtnetlink.Conn, f vip.Family, input rtnetlink.Link) string {
	r, err := c.LookupForwarded(p.sources[f], farClients[f], input.Index, p.Mark)
	subject := fmt.Sprintf("%s packets from VIPs that arrive on %s", f, input.Name)
	switch {
	case err != nil:
		if !p.mustPass(c, f, input, err) {
			return ""
		}
		return fmt.Sprintf("%s are dropped, although table %d has a route of BIRD: %s", subject, p.TableID,
			p.blame(c, f, rtnetlink.Rule.Drops))
	case r.Table == p.blackholeTable() && r.Drops():
		return ""
	case r.Table != p.TableID:
		return fmt.Sprintf("%s leave by table %d, not by the gateways: %s", subject, r.Table,
			p.blame(c, f, func(x rtnetlink.Rule) bool { return x.Action == unix.FR_ACT_TO_TBL && x.Table == r.Table }))
	case r.Protocol != unix.RTPROT_BIRD:
		return fmt.Sprintf("%s follow a route that is not BIRD's: remove the %s %s", subject, f, r)
	}
	return ""
}

// mustPass reports whether the kernel should forward packets that it drops with an error. Drops
// are expected without a gateway's route, and they are ignored on interfaces that do not forward
// and for VIPs that are local addresses.
func (p *paths) mustPass(c *rtnetlink.Conn, f vip.Family, input rtnetlink.Link, err error) bool {
	var rejected *nlmsg.Error
	if !errors.As(err, &rejected) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.ENODEV) {
		return false // reverse path filtering, or the interface is gone
	}
	// Linux 6.18 returns EINVAL for packets that fail reverse path filtering, too, as for packets
	// that a rule drops.
	if f == vip.IPv4 && (sysctl.IPv4Interface(input.Name, "forwarding").Read() != "1" ||
		reversePathFilter(sysctl.IPv4Interface(input.Name, "rp_filter")) == "1") {
		return false
	}
	if r, err := c.Lookup(p.sources[f], 0); err == nil && r.Type == unix.RTN_LOCAL {
		return false
	}
	routes, err := c.Routes(f, rtnetlink.RouteFilter{Table: p.TableID, Protocol: unix.RTPROT_BIRD})
	return err == nil && slices.ContainsFunc(routes, func(r rtnetlink.Route) bool {
		return r.IsDefault() && !r.Drops() && !r.Dead
	})
}

// blame returns the remedy for a diversion: it names the first matching rule of another process
// that precedes the rules of this package.
func (p *paths) blame(c *rtnetlink.Conn, f vip.Family, fits func(rtnetlink.Rule) bool) string {
	rules, err := c.Rules(f)
	if err != nil {
		return err.Error()
	}
	for _, r := range rules {
		if r.Priority > uint32(p.Priority) {
			break
		}
		if r.Protocol != protocol && fits(r) {
			return fmt.Sprintf("remove the rule %s, or give it a priority above %d", r, p.Priority+2)
		}
	}
	return fmt.Sprintf("remove the rule before priority %d, see ip rule show", p.Priority)
}
