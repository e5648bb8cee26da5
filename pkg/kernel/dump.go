package kernel

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// maxDumped bounds each list of a [Snapshot]: it is for people.
const maxDumped = 20_000

// Snapshot is what the kernel has, for `frontend debug`. Lists that could not
// be read are empty and named in Problems.
type Snapshot struct {
	// Rules are all policy rules, also those of others.
	Rules []string `json:"rules"`
	// Sets are the ranges of the sets of VIPs in the nftables table.
	Sets map[string][]string `json:"sets"`
	// Routes of the gateways' table and of the blackholes' table.
	Routes     map[string][]string `json:"routes"`
	Neighbours []string            `json:"neighbours"`
	Interfaces []Interface         `json:"interfaces"`
	// Sysctls that decide about forwarding, by name.
	Sysctls map[string]string `json:"sysctls"`
	// Problems are things that are known not to work, and failed reads.
	Problems []string `json:"problems"`
}

// Interface is a network interface of a [Snapshot].
type Interface struct {
	Name      string   `json:"name"`
	Index     int      `json:"index"`
	Type      string   `json:"type"`
	State     string   `json:"state"`
	MTU       int      `json:"mtu"`
	MAC       string   `json:"mac,omitempty"`
	Addresses []string `json:"addresses"`
}

// Dump reads the network namespace of the calling thread. It changes nothing.
// The error is ctx's; what else fails is in the snapshot's Problems.
func Dump(ctx context.Context, o Options) (Snapshot, error) {
	o = o.withDefaults()
	s := Snapshot{Sets: map[string][]string{}, Routes: map[string][]string{}, Sysctls: map[string]string{}}
	s.Problems = reversePathProblems()
	for _, read := range []func(Options) error{s.readRules, s.readTable, s.readRoutes, s.readLinks, s.readSysctls} {
		if err := ctx.Err(); err != nil {
			return s, fmt.Errorf("dump of the kernel's state: %w", err)
		}
		if err := read(o); err != nil {
			s.Problems = append(s.Problems, err.Error())
		}
	}
	return s, nil
}

func (s *Snapshot) readRules(Options) error {
	var errs []error
	for _, f := range vip.Families {
		rules, err := listRules(f)
		if err != nil {
			errs = append(errs, err)
		}
		for _, r := range rules {
			s.Rules = append(s.Rules, r.String())
		}
	}
	s.Rules = limit(s.Rules)
	return errors.Join(errs...)
}

func (s *Snapshot) readTable(o Options) error {
	t, err := newTable(o, o.Log)
	if err != nil {
		return err
	}
	var errs []error
	for _, f := range vip.Families {
		set := t.set(f)
		elems, err := t.nft.GetSetElements(set)
		if err != nil {
			errs = append(errs, fmt.Errorf("read set %s: %w", set.Name, err))
			continue
		}
		ranges := []string{}
		for _, r := range spans(elems) {
			ranges = append(ranges, r.String())
		}
		s.Sets[set.Name] = limit(ranges)
	}
	return errors.Join(errs...)
}

func (s *Snapshot) readRoutes(o Options) error {
	h, err := newHandle()
	if err != nil {
		return err
	}
	defer h.Close()
	var errs []error
	for _, table := range []uint32{o.TableID, o.blackholeTable()} {
		name := fmt.Sprint(table)
		s.Routes[name] = []string{}
		for _, f := range vip.Families {
			routes, err := h.RouteListFiltered(int(systemFamily(f)), &vnetlink.Route{Table: int(table)}, vnetlink.RT_FILTER_TABLE)
			if err != nil {
				errs = append(errs, fmt.Errorf("list %s routes of table %d: %w", f, table, err))
			}
			for _, r := range routes {
				s.Routes[name] = append(s.Routes[name], r.String())
			}
		}
		s.Routes[name] = limit(s.Routes[name])
	}
	return errors.Join(errs...)
}

func (s *Snapshot) readLinks(Options) error {
	h, err := newHandle()
	if err != nil {
		return err
	}
	defer h.Close()
	links, err := h.LinkList()
	if err != nil {
		return fmt.Errorf("list interfaces: %w", err)
	}
	var errs []error
	for _, l := range links {
		a := l.Attrs()
		i := Interface{Name: a.Name, Index: a.Index, Type: l.Type(), State: a.OperState.String(), MTU: a.MTU, MAC: a.HardwareAddr.String()}
		addrs, err := h.AddrList(l, vnetlink.FAMILY_ALL)
		if err != nil {
			errs = append(errs, fmt.Errorf("list addresses of %s: %w", a.Name, err))
		}
		for _, addr := range addrs {
			i.Addresses = append(i.Addresses, addr.IPNet.String())
		}
		s.Interfaces = append(s.Interfaces, i)
		neighbours, err := h.NeighList(a.Index, vnetlink.FAMILY_ALL)
		if err != nil {
			errs = append(errs, fmt.Errorf("list neighbours on %s: %w", a.Name, err))
		}
		for _, n := range neighbours {
			s.Neighbours = append(s.Neighbours, fmt.Sprintf("%s dev %s lladdr %s %s", n.IP, a.Name, n.HardwareAddr, neighbourState(n.State)))
		}
	}
	s.Neighbours = limit(s.Neighbours)
	return errors.Join(errs...)
}

func newHandle() (*vnetlink.Handle, error) {
	h, err := vnetlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink: %w", err)
	}
	if err := h.SetSocketTimeout(netlinkTimeout); err != nil {
		h.Close()
		return nil, fmt.Errorf("rtnetlink deadline: %w", err)
	}
	return h, nil
}

func neighbourState(state int) string {
	for bit, name := range map[int]string{
		vnetlink.NUD_INCOMPLETE: "INCOMPLETE", vnetlink.NUD_REACHABLE: "REACHABLE", vnetlink.NUD_STALE: "STALE", vnetlink.NUD_DELAY: "DELAY",
		vnetlink.NUD_PROBE: "PROBE", vnetlink.NUD_FAILED: "FAILED", vnetlink.NUD_NOARP: "NOARP", vnetlink.NUD_PERMANENT: "PERMANENT",
	} {
		if state&bit != 0 {
			return name
		}
	}
	return fmt.Sprintf("state %d", state)
}

func (s *Snapshot) readSysctls(Options) error {
	var paths []string
	for _, pattern := range []string{
		ipv4Conf + "/*/rp_filter", ipv4Conf + "/*/forwarding", "/proc/sys/net/ipv6/conf/*/forwarding", "/proc/sys/net/ipv6/conf/*/disable_ipv6",
		"/proc/sys/net/ipv4/fib_multipath_hash_policy", "/proc/sys/net/ipv6/fib_multipath_hash_policy",
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return fmt.Errorf("list sysctls %s: %w", pattern, err)
		}
		paths = append(paths, found...)
	}
	for _, path := range paths {
		s.Sysctls[strings.ReplaceAll(strings.TrimPrefix(path, "/proc/sys/"), "/", ".")] = readSysctl(path)
	}
	return nil
}

func limit(list []string) []string {
	if len(list) > maxDumped {
		return append(list[:maxDumped:maxDumped], fmt.Sprintf("… and %d more", len(list)-maxDumped))
	}
	return list
}
