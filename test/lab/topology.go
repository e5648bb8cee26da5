package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/test/load"
)

// Limits of a topology: the numbers of pods and targets are part of its addresses.
const (
	MaxPods    = 9
	MaxTargets = 99
)

// TopologyConfig describes a topology.
type TopologyConfig struct {
	Pods, Targets int
	VIPs          []netip.Addr // served by every target
	Binaries      string       // the folder of lb and frontend
}

// Topology is a lab for real traffic: a gateway, one or more trench pods
// beside each other, and targets with a namespace each.
//
//	                      .- int0 - pod 1 - ext-vlan -.
//	targets == (bridge) --+                           +-- (bridge) trench0 == gateway, clients
//	            backend   '- int0 - pod 2 - ext-vlan -'
//
// Clients live in the gateway's namespace and have its addresses. A VIP to which the gateway has no
// route is an error at connect(2): an interval without an announcement fails every request in it, and
// no second SYN hides it. (BIRD 2.0.12 replaces the next hops of a route at one stroke, so that
// starting and ending pods cause no such interval.)
//
// Targets have the VIPs on lo, do not answer ARP or neighbor solicitations for them, and send
// what comes from a VIP back to the pod from which the newest packet of the same
// flow came (a mark of the connection in the target's own nftables). So the way
// back follows the way there, and is no better and no worse than it: a pod gets
// answers exactly while the gateway sends it the questions. That is what makes
// "no request failed" a fair criterion: a pod that leaves has its VIPs withdrawn
// and its flows moved by the gateway, and their answers move with them; a pod
// that attracts traffic and cannot return it loses it, and that is counted.
// Meridio spreads the answers over the pods that its control plane reports
// alive; such a report would be one more component here, whose delay would be
// measured instead of the trench's. A flow that begins at a target
// has no mark and is spread over all pods.
//
// A pod that is replaced loses everything that its kernel and its folder held,
// as with a new pod of a Deployment, but for its addresses.
type Topology struct {
	*Lab
	VIPs    []netip.Addr
	Pods    []*Pod // pod 1 is the first
	Targets []*App // target-1 is the first
}

// PodExternal are the addresses of a pod on the external network; pods count from 1.
func PodExternal(pod int) []netip.Addr {
	return []netip.Addr{addr("169.254.100.%d", pod), addr("fd00:100::%d", pod)}
}

// PodInternal are the addresses of a pod on the targets' network.
func PodInternal(pod int) []netip.Addr {
	return []netip.Addr{addr("172.16.0.%d", pod), addr("fd00:16::%d", pod)}
}

// TargetAddrs are the own addresses of a target; targets count from 1.
func TargetAddrs(target int) []netip.Addr {
	return []netip.Addr{addr("172.16.1.%d", target), addr("fd00:16::1:%x", target)}
}

// addr fills a number within its bounds into an address.
func addr(format string, n int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf(format, n)) }

// Link addresses of pods. They stay the same when a pod is replaced.
func internalLink(pod int) string { return fmt.Sprintf("02:76:67:01:00:%02x", pod) }
func externalLink(pod int) string { return fmt.Sprintf("02:76:67:02:00:%02x", pod) }

// gatewayLink is the link address of the gateway's bridge: without one of its
// own a bridge has that of a port, which changes when a pod comes.
const gatewayLink = "02:76:67:03:00:01"

// MissingForTopology returns the program that this machine lacks for a topology, besides those of
// Missing, or "".
func MissingForTopology() string {
	if _, err := exec.LookPath("nft"); err != nil {
		return "nft (Debian: apt-get install nftables)"
	}
	return ""
}

// NewTopology creates a topology without any process; its targets serve nothing yet. The
// caller closes it.
func NewTopology(c TopologyConfig) (*Topology, error) {
	if c.Pods < 1 || c.Pods > MaxPods || c.Targets < 1 || c.Targets > MaxTargets || len(c.VIPs) == 0 {
		return nil, fmt.Errorf("topology of %d pods, %d targets and %d VIPs, want 1 to %d, 1 to %d, and some", c.Pods,
			c.Targets, len(c.VIPs), MaxPods, MaxTargets)
	}
	t := &Topology{VIPs: c.VIPs}
	var err error
	t.Lab, err = newLab(func(l *Lab) error {
		t.Lab = l
		if err := t.wire(); err != nil {
			return err
		}
		for n := 1; n <= c.Pods; n++ {
			p := &Pod{Lab: l, Binaries: c.Binaries, Dir: filepath.Join(l.Dir, fmt.Sprintf("pod-%d", n)), NS: l.Pod}
			if n > 1 {
				ns, err := t.create()
				if err != nil {
					return err
				}
				p.NS = ns
			}
			t.Pods = append(t.Pods, p)
			if err := errors.Join(os.MkdirAll(p.Dir, 0o700), t.wirePod(n)); err != nil {
				return err
			}
		}
		for n := 1; n <= c.Targets; n++ {
			ns, err := t.create()
			if err != nil {
				return err
			}
			a := &App{
				Name: fmt.Sprintf("target-%d", n), NS: ns, Addrs: TargetAddrs(n), VIPs: c.VIPs,
				backend: l.Backend, port: fmt.Sprintf("target%d", n),
			}
			t.Targets = append(t.Targets, a)
			if err := t.wireTarget(n, c.Pods); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}

// create creates a namespace that Close removes.
func (t *Topology) create() (*NetNS, error) {
	ns, err := Create()
	if err == nil {
		t.others = append(t.others, ns)
	}
	return ns, err
}

// wire creates the bridges.
func (t *Topology) wire() error {
	quiet := func(ns *NetNS) error { // what a bridge forwards is no matter of IP
		return errors.Join(ns.sysctlIfExists("net.bridge.bridge-nf-call-iptables", "0"),
			ns.sysctlIfExists("net.bridge.bridge-nf-call-ip6tables", "0"))
	}
	return errors.Join(
		quiet(t.Gateway), quiet(t.Backend),
		t.Backend.Batch("link add targets type bridge", "link set targets up"),
		t.Gateway.Batch("link add trench0 address "+gatewayLink+" type bridge", "link set trench0 up"),
		t.Gateway.Addr("trench0", prefix(GatewayA4, externalBits4), prefix(GatewayA6, externalBits6)),
		hashFlows(t.Gateway), enableForwarding(t.Gateway),
		// Ports of clients, enough of them for the requests of a minute.
		t.Gateway.Sysctl("net.ipv4.ip_local_port_range", "10240 65535"),
	)
}

// hashFlows makes a namespace spread flows, not addresses, over several next hops, and keep the
// next hop of a flow that begins in it. The kernel uses the hash of a socket as that of the flow,
// also in the next namespace, and changes it on a retransmission (txrehash); between machines no
// such hash is transferred.
func hashFlows(ns *NetNS) error {
	return errors.Join(ns.Sysctl("net.core.txrehash", "0"),
		ns.Sysctl("net.ipv4.fib_multipath_hash_policy", "1"), ns.Sysctl("net.ipv6.fib_multipath_hash_policy", "1"))
}

// enableForwarding makes a namespace forward, without a reverse path filter.
func enableForwarding(ns *NetNS) error {
	return errors.Join(
		ns.Sysctl("net.ipv4.ip_forward", "1"), ns.Sysctl("net.ipv6.conf.all.forwarding", "1"),
		ns.Sysctl("net.ipv4.conf.all.rp_filter", "0"), ns.Sysctl("net.ipv4.conf.default.rp_filter", "0"),
	)
}

// wirePod connects a pod's namespace.
func (t *Topology) wirePod(n int) error {
	ns, port := t.Pods[n-1].NS, fmt.Sprintf("pod%d", n)
	external, internal := PodExternal(n), PodInternal(n)
	return errors.Join(
		enableForwarding(ns), hashFlows(ns),
		ip("link", "add", External, "address", externalLink(n), "netns", ns.name, "type", "veth", "peer", "name", port,
			"netns", t.Gateway.name),
		ip("link", "add", Internal, "address", internalLink(n), "netns", ns.name, "type", "veth", "peer", "name", port,
			"netns", t.Backend.name),
		t.Gateway.Batch("link set "+port+" master trench0 up"),
		t.Backend.Batch("link set "+port+" master targets up"),
		ns.Batch("link set "+External+" up", "link set "+Internal+" up"),
		ns.Addr(External, prefix(external[0], externalBits4), prefix(external[1], externalBits6)),
		ns.Addr(Internal, prefix(internal[0], 16), prefix(internal[1], 64)),
	)
}

// Routing tables and the first rule of targets.
const (
	returnTable        = 100 // over all pods; the table of pod n is returnTable+n
	returnRulePriority = 1000
)

// wireTarget connects a target and adds its return routes.
func (t *Topology) wireTarget(n, pods int) error {
	a := t.Targets[n-1]
	var lines, rules4, rules6 []string
	var marks strings.Builder
	for f, anywhere := range []string{"0.0.0.0/0", "::/0"} {
		all := fmt.Sprintf("route add %s table %d", anywhere, returnTable)
		for pod := 1; pod <= pods; pod++ {
			via := PodInternal(pod)[f]
			all += fmt.Sprintf(" nexthop via %s dev net0", via)
			lines = append(lines, fmt.Sprintf("route add %s via %s dev net0 table %d", anywhere, via, returnTable+pod))
		}
		lines = append(lines, all)
	}
	for _, vip := range t.VIPs {
		rules, nodad := &rules4, ""
		if vip.Is6() {
			rules, nodad = &rules6, " nodad"
		}
		lines = append(lines, fmt.Sprintf("addr add %s dev lo%s", netip.PrefixFrom(vip, vip.BitLen()), nodad))
		for pod := 1; pod <= pods; pod++ {
			*rules = append(*rules,
				fmt.Sprintf("rule add from %s fwmark %d lookup %d priority %d", vip, pod, returnTable+pod,
					returnRulePriority))
		}
		*rules = append(*rules,
			fmt.Sprintf("rule add from %s lookup %d priority %d", vip, returnTable, returnRulePriority+1))
	}
	for pod := 1; pod <= pods; pod++ {
		fmt.Fprintf(&marks, "add rule inet lab in ether saddr %s ct mark set %d;", internalLink(pod), pod)
	}
	return errors.Join(
		hashFlows(a.NS),
		// A pod that does not answer gets nothing, also of what begins here.
		a.NS.Sysctl("net.ipv4.fib_multipath_use_neigh", "1"),
		// ARP does not answer for addresses of lo: only the pods have routes to a VIP.
		a.NS.Sysctl("net.ipv4.conf.all.arp_ignore", "1"), a.NS.Sysctl("net.ipv4.conf.all.arp_announce", "2"),
		a.NS.Sysctl("net.ipv4.conf.all.rp_filter", "0"), a.NS.Sysctl("net.ipv4.conf.default.rp_filter", "0"),
		ip("link", "add", "net0", "netns", a.NS.name, "type", "veth", "peer", "name", a.port, "netns", t.Backend.name),
		t.Backend.Batch("link set "+a.port+" master targets up"),
		a.NS.Batch("link set net0 up"),
		a.NS.Addr("net0", prefix(a.Addrs[0], 16), prefix(a.Addrs[1], 64)),
		a.NS.Batch(lines...), a.NS.Batch(rules4...), a.NS.batch([]string{"-6"}, rules6),
		a.NS.nft("add table inet lab;"+
			"add chain inet lab in { type filter hook prerouting priority -150; };"+
			"add chain inet lab out { type route hook output priority -150; };"+
			marks.String()+
			"add rule inet lab out ct mark != 0 meta mark set ct mark"),
	)
}

// nft runs a command of nft in the namespace.
func (n *NetNS) nft(command string) error {
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	_, err := n.Run(ctx, "nft", command)
	return err
}

// sysctlIfExists is Sysctl for a parameter of a module that need not be loaded.
func (n *NetNS) sysctlIfExists(key, value string) error {
	err := n.Sysctl(key, value)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// GatewayConfig is the configuration of the gateway: the usual one, with every
// pod as a neighbour.
func (t *Topology) GatewayConfig() GatewayConfig {
	c := GatewayA()
	c.Local, c.Peers = nil, nil
	for n := range t.Pods {
		c.Local = append(c.Local, GatewayA4, GatewayA6)
		c.Peers = append(c.Peers, PodExternal(n+1)...)
	}
	return c
}

// WriteTrench replaces the trench file of every pod.
func (t *Topology) WriteTrench(text string) error {
	var errs []error
	for _, p := range t.Pods {
		errs = append(errs, p.WriteTrench(text))
	}
	return errors.Join(errs...)
}

// Replace puts a new pod, without processes, in the place of one: with a new
// network namespace and a folder that has nothing but the trench file, and the
// logs of its predecessor. Processes of the old one end at once: they should
// have ended before.
func (t *Topology) Replace(pod int) error {
	p := t.Pods[pod-1]
	fail := func(err error) error { return fmt.Errorf("replace pod %d: %w", pod, err) }
	p.NS.endProcesses()
	// The wires go first: a namespace goes some time after it was removed.
	if err := errors.Join(p.NS.IP("link", "del", External), p.NS.IP("link", "del", Internal)); err != nil {
		return fail(err)
	}
	ns, err := Create()
	if err != nil {
		return fail(err)
	}
	old := p.NS
	p.NS, p.LB, p.Frontend = ns, nil, nil
	if pod == 1 {
		t.Pod = ns
	} else {
		t.others[slices.Index(t.others, old)] = ns
	}
	if err := errors.Join(old.Close(), t.wirePod(pod)); err != nil {
		return fail(err)
	}
	entries, err := os.ReadDir(p.Dir)
	if err != nil {
		return fail(err)
	}
	var errs []error
	for _, e := range entries {
		path := filepath.Join(p.Dir, e.Name())
		if path != filepath.Dir(p.TrenchFile()) && !strings.HasSuffix(path, ".log") {
			errs = append(errs, os.RemoveAll(path))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fail(err)
	}
	return nil
}

// Via are the pods to which the gateway's kernel sends what is for a VIP, none
// when it has no route to it.
func (t *Topology) Via(ctx context.Context, vip netip.Addr) ([]int, error) {
	family := "-4"
	if vip.Is6() {
		family = "-6"
	}
	out, err := t.Gateway.Run(ctx, "ip", family, "-json", "route", "show", netip.PrefixFrom(vip, vip.BitLen()).String())
	if err != nil {
		return nil, err
	}
	type hop struct {
		Gateway string `json:"gateway"`
		Via     struct {
			Host string `json:"host"`
		} `json:"via"`
	}
	var routes []struct {
		hop
		Nexthops []hop `json:"nexthops"`
	}
	if err := json.Unmarshal([]byte(out), &routes); err != nil {
		return nil, fmt.Errorf("routes to %s at the gateway: %w: %s", vip, err, out)
	}
	var pods []int
	for _, r := range routes {
		for _, h := range append(r.Nexthops, r.hop) {
			for n := range t.Pods {
				if h.Gateway != "" && slices.Contains(hopNames(n+1), h.Gateway) {
					pods = append(pods, n+1)
				}
			}
		}
	}
	slices.Sort(pods)
	return slices.Compact(pods), nil
}

// hopNames are the addresses by which a next hop may be called.
func hopNames(pod int) []string {
	external := PodExternal(pod)
	return []string{external[0].String(), external[1].String(), addr("fe80::76:67ff:fe02:%x", pod).String()}
}

// WantVia waits until the gateway's kernel sends what is for any of the VIPs to
// exactly these pods.
func (t *Topology) WantVia(ctx context.Context, pods ...int) error {
	want := slices.Sorted(slices.Values(pods))
	return Eventually(ctx, pollInterval, func() error {
		for _, vip := range t.VIPs {
			got, err := t.Via(ctx, vip)
			if err != nil {
				return err
			}
			if !slices.Equal(got, want) {
				return fmt.Errorf("the gateway sends what is for %s to the pods %v, want %v", vip, got, want)
			}
		}
		return nil
	})
}

// Load starts clients in the gateway's namespace: rate requests per second and
// flows, spread over the VIPs. The rest of the configuration is the caller's.
func (t *Topology) Load(ctx context.Context, rate, flows int, c load.Config) (*load.Generator, error) {
	c.Rate, c.Flows, c.Inside = rate, flows, t.Gateway.Do
	c.Requests, c.FlowsTo = nil, nil
	for _, vip := range t.VIPs {
		c.Requests = append(c.Requests, netip.AddrPortFrom(vip, RequestPort))
		c.FlowsTo = append(c.FlowsTo, netip.AddrPortFrom(vip, FlowPort))
	}
	return load.Start(ctx, c)
}

// Close ends every process and application and removes every namespace and file.
func (t *Topology) Close() error {
	var errs []error
	for _, a := range t.Targets {
		errs = append(errs, a.Abort())
	}
	return errors.Join(append(errs, t.Lab.Close())...)
}
