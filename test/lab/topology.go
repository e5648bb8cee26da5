package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Limits of a topology: the numbers of pods and targets are part of its addresses.
const (
	MaxPods    = 9
	MaxTargets = 99
)

// TopologyConfig describes a topology.
type TopologyConfig struct {
	Pods, Targets int
	Gateways      int          // 1 or 2; 0 is 1
	VIPs          []netip.Addr // served by every target
	Binaries      string       // the folder of lb, frontend and target
	Replies       Replies      // of the targets
	// OnceTarget is the number of the target whose sidecar installs the kernel state and exits, so
	// that the target does not notice the loss of a pod; 0 is none.
	OnceTarget int
	Options    []Option
}

// Replies is the route of the targets' replies.
type Replies uint8

const (
	// SamePod: through the pod from which the newest packet of the flow came, by `target run`.
	SamePod Replies = iota
	// ECMP: over all pods by a hash of the flow, whichever pod its packets come from, as with the
	// targets of Meridio 2. The application runs without a sidecar.
	ECMP
)

// Topology is a lab for real traffic: one or two gateways, one or more trench pods in parallel,
// and targets with a namespace each.
//
//	                      .- int0 - pod 1 - ext-vlan -.           .- gateway, clients
//	targets == (bridge) --+                           +-- trench0 +
//	            backend   '- int0 - pod 2 - ext-vlan -'           '- second gateway, clients
//
// Clients run in the gateways' namespaces and use their addresses. If a gateway has no route to
// a VIP, connect(2) fails: an interval without an announcement fails every request in it, and no
// second SYN hides it. (BIRD 2.0.12 replaces the next hops of a route atomically, so that
// starting and ending pods cause no such interval.) Gateways choose the pod by a hash of
// addresses, protocol and ports, each with a different seed, and keep no state of a flow: when a
// pod comes or goes, flows of other pods move, too. Pods spread packets to clients over the
// gateways, so that a flow comes through one gateway, and replies leave through another.
//
// Targets accept the VIPs. `target run` sends a reply from a VIP back to the pod from which the
// newest packet of the same flow came. So the reply path follows the forward path, and is no
// better and no worse than it: a pod gets replies exactly while a gateway sends it the requests.
// That makes "no request failed" a fair criterion: a pod that leaves has its VIPs withdrawn and
// its flows moved by the gateways, and their replies move with them; a pod that attracts traffic
// and cannot return it loses it, and the loss is counted.
//
// A replaced pod keeps its addresses, and loses its kernel state, its folder and its link
// addresses, as with a new pod of a Deployment. So does a target.
type Topology struct {
	*Lab
	VIPs    []netip.Addr
	Pods    []*Pod   // pod 1 is the first
	Targets []*App   // target-1 is the first
	Routers []Router // the gateways, once StartGateways has started them

	replies  Replies
	once     int
	binaries string
}

// PodExternal returns the addresses of a pod on the external network; pods count from 1.
func PodExternal(pod int) []netip.Addr {
	return []netip.Addr{addr("169.254.100.%d", pod), addr("fd00:100::%d", pod)}
}

// PodInternal returns the addresses of a pod on the targets' network.
func PodInternal(pod int) []netip.Addr {
	return []netip.Addr{addr("172.16.0.%d", pod), addr("fd00:16::%d", pod)}
}

// TargetAddrs returns the addresses of a target, without VIPs; targets count from 1.
func TargetAddrs(target int) []netip.Addr {
	return []netip.Addr{addr("172.16.1.%d", target), addr("fd00:16::1:%x", target)}
}

// addr fills a number within its bounds into an address.
func addr(format string, n int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf(format, n)) }

// Link addresses of pods. A replacement pod has different ones.
func (t *Topology) internalLink(pod int) string {
	return fmt.Sprintf("02:76:67:01:%02x:%02x", t.Pods[pod-1].replaced, pod)
}

func (t *Topology) externalLink(pod int) string {
	return fmt.Sprintf("02:76:67:02:%02x:%02x", t.Pods[pod-1].replaced, pod)
}

// gatewayLink is the link address of the gateway's bridge: without a configured one a bridge
// takes the address of a port, which changes when a pod comes.
const gatewayLink = "02:76:67:03:00:01"

// MissingForTopology returns the additional program, which Missing does not check, that this
// machine lacks for a topology, or "".
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
	t := &Topology{VIPs: c.VIPs, replies: c.Replies, once: c.OnceTarget, binaries: c.Binaries}
	var err error
	t.Lab, err = newLab(func(l *Lab) error {
		// The methods of t below use the lab before newLab returns it.
		t.Lab = l
		if err := t.wire(); err != nil {
			return err
		}
		if c.Gateways == 2 {
			if err := t.wireSecondGateway(); err != nil {
				return err
			}
		}
		for n := 1; n <= c.Pods; n++ {
			p := &Pod{Lab: l, Binaries: c.Binaries, Dir: filepath.Join(l.Dir, fmt.Sprintf("pod-%d", n)), NS: l.Pod}
			if n > 1 {
				ns, err := t.create(l.options...)
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
			if err := t.addTarget(n); err != nil {
				return err
			}
		}
		return nil
	}, c.Options)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// create creates a namespace that Close removes.
func (t *Topology) create(options ...Option) (*NetNS, error) {
	ns, err := Create(options...)
	if err == nil {
		t.others = append(t.others, ns)
	}
	return ns, err
}

// wire creates the bridges.
func (t *Topology) wire() error {
	quiet := func(ns *NetNS) error { // netfilter must not see bridged packets
		return errors.Join(ns.sysctlIfExists("net.bridge.bridge-nf-call-iptables", "0"),
			ns.sysctlIfExists("net.bridge.bridge-nf-call-ip6tables", "0"))
	}
	return errors.Join(
		quiet(t.Gateway), quiet(t.Backend),
		t.Backend.Batch("link add targets type bridge", "link set targets up"),
		t.Gateway.Batch("link add trench0 address "+gatewayLink+" type bridge", "link set trench0 up"),
		wireGateway(t.Gateway, "1", GatewayA4, GatewayA6),
	)
}

// hashFlows makes a namespace hash flows, not addresses, over several next hops, and keep the
// next hop of a flow that begins in it. The kernel uses the hash of a socket as the hash of the
// flow, also in the next namespace, and changes it on a retransmission (txrehash); between
// machines no such hash is transferred.
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
	ns, port := t.Pods[n-1].NS, podPort(n)
	external, internal := PodExternal(n), PodInternal(n)
	return errors.Join(
		enableForwarding(ns), hashFlows(ns),
		// When a flow moves back to a pod, its packets are outside the TCP window that the pod's
		// conntrack has recorded.
		ns.sysctlIfExists("net.netfilter.nf_conntrack_tcp_be_liberal", "1"),
		ip("link", "add", External, "netns", ns.name, "type", "veth", "peer", "name", port,
			"netns", t.Gateway.name),
		ip("link", "add", Internal, "netns", ns.name, "type", "veth", "peer", "name", port,
			"netns", t.Backend.name),
		t.plug(t.Gateway, "trench0", port, ns, External, t.externalLink(n), prefix(external[0], externalBits4),
			prefix(external[1], externalBits6)),
		t.plug(t.Backend, "targets", port, ns, Internal, t.internalLink(n), prefix(internal[0], 16),
			prefix(internal[1], 64)),
		ns.awaitDAD(External), ns.awaitDAD(Internal),
	)
}

// podPort returns the port of a pod in the bridges.
func podPort(pod int) string { return fmt.Sprintf("pod%d", pod) }

// plug sets up a port of a bridge and the interface at the other end, and adds addresses to that
// interface. The kernel announces the addresses on the link, as a CNI plugin does: another host
// may have had them with another link address.
func (t *Topology) plug(bridge *NetNS, master, port string, ns *NetNS, dev, link string, prefixes ...string) error {
	lines := []string{"link set " + dev + " address " + link}
	for _, p := range prefixes {
		lines = append(lines, fmt.Sprintf("addr add %s dev %s", p, dev))
	}
	if err := errors.Join(
		bridge.Batch(fmt.Sprintf("link set %s master %s up", port, master)), ns.shortenDAD(dev),
		ns.Sysctl("net.ipv4.conf."+dev+".arp_notify", "1"), ns.Sysctl("net.ipv6.conf."+dev+".ndisc_notify", "1"),
		ns.Batch(append(lines, "link set "+dev+" up")...),
	); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	// The kernel's announcements at link up were lost if the port was not forwarding yet.
	if err := Eventually(ctx, time.Millisecond, func() error {
		out, err := bridge.Run(ctx, "ip", "-d", "-o", "link", "show", "dev", port)
		if err == nil && !strings.Contains(out, "state forwarding") {
			err = fmt.Errorf("port %s does not forward: %s", port, out)
		}
		return err
	}); err != nil {
		return err
	}
	return ns.IP("link", "set", dev, "address", link) // also announces an unchanged address
}

// sysctlIfExists is Sysctl for a parameter whose module may not be loaded.
func (n *NetNS) sysctlIfExists(key, value string) error {
	err := n.Sysctl(key, value)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// WriteTrench replaces the trench file of every pod.
func (t *Topology) WriteTrench(text string) error {
	var errs []error
	for _, p := range t.Pods {
		errs = append(errs, p.WriteTrench(text))
	}
	return errors.Join(errs...)
}

// Lose is the sudden loss of a pod with its node: its links are cut first, so that no
// peer receives a FIN or a BGP notification, then all of its processes are killed.
// Replace puts a new pod in its place.
func (t *Topology) Lose(pod int) error {
	down := "link set " + podPort(pod) + " down"
	if err := errors.Join(t.Gateway.Batch(down), t.Backend.Batch(down)); err != nil {
		return fmt.Errorf("lose pod %d: %w", pod, err)
	}
	t.Pods[pod-1].NS.endProcesses()
	return nil
}

// Replace replaces a pod by a new one without processes: with a new network namespace, and with
// a folder that contains only the trench file and the logs of its predecessor. Remaining
// processes of the old pod are killed: they should have ended before.
func (t *Topology) Replace(pod int) error {
	p := t.Pods[pod-1]
	fail := func(err error) error { return fmt.Errorf("replace pod %d: %w", pod, err) }
	p.NS.endProcesses()
	// Delete the links first: a namespace is destroyed some time after its removal.
	if err := errors.Join(p.NS.IP("link", "del", External), p.NS.IP("link", "del", Internal)); err != nil {
		return fail(err)
	}
	ns, err := Create(t.options...)
	if err != nil {
		return fail(err)
	}
	old := p.NS
	p.NS, p.LB, p.Frontend = ns, nil, nil
	p.replaced++
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

// Close ends every process and application and removes every namespace and file.
func (t *Topology) Close() error {
	var errs []error
	for _, a := range t.Targets {
		errs = append(errs, a.Abort())
	}
	return errors.Join(append(errs, t.Lab.Close())...)
}
