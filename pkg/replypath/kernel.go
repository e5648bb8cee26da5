package replypath

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// protocol marks the rules and routes of this package.
	protocol = rtnetlink.ProtocolTarget
	// table is the routing table of replies.
	table = 7667
	// priority is the priority of the lookup rules, after the rule of the local table. The rules at
	// priority+1 drop packets without a route in the table.
	priority = 80
	// metric is the metric of all routes. It is not 0, because IPv6 has no metric 0.
	metric = 1024
)

// The steps of a change, in order.
const (
	stepRead    = "read"    // no change was written
	stepRuleset = "ruleset" // the nftables transaction is committed
	stepReply   = "reply"   // rules and routes of replies are installed
	stepAccept  = "accept"  // local routes are installed
	stepStale   = "stale"   // objects of an earlier start with different options are removed
	stepPool    = "pool"    // their prefixes are removed from the nftables sets
)

// afterStep is called after each step. Tests kill the process in it.
var afterStep = func(string) {}

// kernel is a connection to the kernel in the network namespace of the thread that called dial. It
// is not safe for concurrent use.
type kernel struct {
	o   Options
	rt  *rtnetlink.Conn
	nft *nft.Conn
	// written holds the sets of live and dead peers of the last write, nil before it.
	written []nft.Set
	// dropped counts the frames to unknown peers.
	dropped   uint64
	peers     peers
	link      int                  // its index
	neighbors []rtnetlink.Neighbor // of the link, in the subnets
}

func dial(options Options) (*kernel, error) {
	socket, err := nft.Dial()
	if err != nil {
		return nil, err
	}
	rt, err := rtnetlink.Dial()
	if err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	peers := peers{restricted: len(options.PeerSubnets) > 0}
	return &kernel{o: options, rt: rt, nft: socket, peers: peers}, nil
}

func (kernel *kernel) close() error { return errors.Join(kernel.nft.Close(), kernel.rt.Close()) }

// families lists the pool's address families that the kernel supports; ipv6.disable=1 removes IPv6.
func (kernel *kernel) families() (list []vip.Family) {
	for _, family := range vip.Families {
		if len(disjoint(kernel.o.Pool, family)) > 0 && (family == vip.IPv4 || disabledIPv6("all").Read() != "") {
			list = append(list, family)
		}
	}
	return list
}

// part is one rtnetlink object.
type part struct {
	add  rtnetlink.Request
	name string
}

// network is the observed rtnetlink state.
type network struct {
	link      rtnetlink.Link // zero: absent
	rules     []rtnetlink.Rule
	routes    []rtnetlink.Route // of protocol
	neighbors []rtnetlink.Neighbor
	loopback  int
}

func (kernel *kernel) observe() (*network, error) {
	network := &network{}
	links, err := kernel.rt.Links()
	if err != nil {
		return nil, err
	}
	for _, link := range links {
		if link.Name == kernel.o.Interface {
			network.link = link
		}
		if link.Flags&unix.IFF_LOOPBACK != 0 {
			network.loopback = link.Index
		}
	}
	// An interrupted dump may omit entries; installing them again has no effect.
	for _, family := range vip.Families {
		rules, rulesErr := kernel.rt.Rules(family)
		routes, routesErr := kernel.rt.Routes(family, rtnetlink.RouteFilter{Protocol: protocol})
		neighbors, neighborsErr := kernel.rt.Neighbors(family)
		for _, err := range []error{rulesErr, routesErr, neighborsErr} {
			if err != nil && !errors.Is(err, rtnetlink.ErrInterrupted) && !rtnetlink.FamilyAbsent(err) {
				return nil, err
			}
		}
		network.rules, network.routes = append(network.rules, rules...), append(network.routes, routes...)
		network.neighbors = append(network.neighbors, neighbors...)
	}
	return network, nil
}

// apply sends the requests in order and stops at the first failure.
func (kernel *kernel) apply(parts []part) (done []string, err error) {
	for _, part := range parts {
		if err := kernel.rt.Apply(part.add); err != nil {
			return done, err
		}
		done = append(done, part.name)
	}
	return done, nil
}

// ethernet reports whether an interface exists and has Ethernet addresses.
func ethernet(link rtnetlink.Link) bool {
	return len(link.MAC) == len(placeholderMAC()) && link.Flags&unix.IFF_LOOPBACK == 0
}

// linkProblem returns the reason why the interface cannot carry replies, or nil.
func (kernel *kernel) linkProblem(network *network) *Problem {
	object := "interface " + kernel.o.Interface
	switch link := network.link; {
	case link.Index == 0:
		return &Problem{object, "it does not exist", "create it, or name another one with --interface"}
	case !ethernet(link):
		return &Problem{object, "it has no Ethernet addresses", "name an Ethernet interface with --interface"}
	case link.Flags&unix.IFF_UP == 0:
		return &Problem{object, "it is down", "ip link set " + kernel.o.Interface + " up"}
	case !link.Up():
		return &Problem{object, "it has no carrier", "check the other end of the link"}
	case len(disjoint(kernel.o.Pool, vip.IPv6)) > 0 && !kernel.usable(network, vip.IPv6):
		return &Problem{object, "IPv6 is disabled", disabledIPv6(kernel.o.Interface).SetCommand("0")}
	}
	return nil
}

// problemOf returns the Problem for a failed kernel change.
func problemOf(object string, err error) Problem {
	return Problem{object, err.Error(), cmp.Or(hint(err), "see the error; it is retried")}
}

// reconcile installs missing objects, removes stale ones, and reads the result back. With restore
// false it only reads. It returns the names of the missing objects and the remaining problems.
func (kernel *kernel) reconcile(restore bool) (missing []string, problems []Problem) {
	network, err := kernel.observe()
	if err != nil {
		return nil, []Problem{problemOf("netlink", err)}
	}
	if part := kernel.linkProblem(network); part != nil {
		problems = append(problems, *part)
	}
	kernel.link = network.link.Index
	kernel.neighbors = slices.DeleteFunc(slices.Clone(network.neighbors), func(neighbor rtnetlink.Neighbor) bool {
		return !neighborOf(neighbor, kernel.link, kernel.o.PeerSubnets)
	})
	// The neighbors are the trench pods, which must not be lost among forged senders.
	var expected []uint32
	for _, neighbor := range kernel.neighbors {
		if len(neighbor.MAC) > 0 {
			expected = append(expected, fwmark(neighbor.MAC))
		}
	}
	learned, err := readPeers(kernel.nft, expected...)
	if err != nil {
		return nil, []Problem{problemOf("nftables", err)}
	}
	if len(learned) > 0 { // empty after a flush by another process: keep the peers to restore
		kernel.peers.learned = learned
	}
	kernel.peers.update(kernel.neighbors)
	if kernel.peers.full() {
		problems = append(problems, Problem{
			"map " + peersMap, fmt.Sprintf("it is full: replies by way of a trench pod beside these %d are dropped", maxPeers),
			"find the host that sends from so many link addresses: nft list map netdev " + tableName + " " + peersMap,
		})
	}
	desired := desired{
		pool: append(slices.Clone(kernel.o.Pool), kernel.stalePool(network)...), link: kernel.o.Interface,
		index: network.link.Index, live: kernel.peers.live(), dead: kernel.peers.dead(),
		peers: kernel.peers.learned, restricted: kernel.peers.restricted,
	}
	if !ethernet(network.link) {
		return nil, problems // keep the installed state: flows continue when the interface returns
	}
	// The ruleset precedes routes: without marks replies would leave by another route.
	afterStep(stepRead)
	name, err := kernel.ruleset(desired, restore)
	if name != "" {
		missing = append(missing, name)
	} else {
		// The tables are intact, so even an empty map is the current state.
		kernel.peers.learned = learned
	}
	if err != nil {
		return missing, append(problems, problemOf("nftables", err))
	}
	if name != "" && !restore {
		return missing, append(problems, Problem{"nftables", "missing: " + name, "it is restored"})
	}
	// Both change the peers map, which exists now.
	if err := errors.Join(kernel.peers.evict(kernel.nft, time.Now()), kernel.peers.addNeighbors(kernel.nft)); err != nil {
		return missing, append(problems, problemOf("nftables", err))
	}
	afterStep(stepRuleset)
	for _, step := range []struct {
		parts []part
		name  string
	}{
		{kernel.replyParts(network), stepReply},
		{kernel.acceptParts(network), stepAccept},
		{kernel.stale(network, false), stepStale},
	} {
		for _, part := range step.parts {
			missing = append(missing, part.name)
		}
		if !restore && len(step.parts) > 0 {
			return missing, append(problems, Problem{"routing", "missing: " + step.parts[0].name, "it is restored"})
		}
		if _, err := kernel.apply(step.parts); err != nil {
			return missing, append(problems, problemOf("routing", err))
		}
		afterStep(step.name)
	}
	// Packets of former prefixes are accepted until their local routes are gone.
	if len(desired.pool) > len(kernel.o.Pool) {
		desired.pool = kernel.o.Pool
		if _, err = kernel.ruleset(desired, restore); err != nil {
			return missing, append(problems, problemOf("nftables", err))
		}
	}
	afterStep(stepPool)
	return missing, problems
}

// probe triggers verification of the peers' neighbor entries, and resolution of the addresses in
// the subnets. Rejections are ignored, because an entry may have expired since it was read.
func (kernel *kernel) probe() {
	list := kernel.peers.probes(kernel.neighbors, time.Now())
	solicit := kernel.peers.ticks%solicitTicks == 0
	for _, subnet := range kernel.o.PeerSubnets {
		for addr := subnet.Addr(); solicit && subnet.Contains(addr); addr = addr.Next() {
			list = append(list, rtnetlink.Neighbor{Link: kernel.link, Addr: addr}.Probe(unix.NLM_F_CREATE))
		}
	}
	kernel.peers.ticks++
	if _, err := kernel.rt.Do(list...); err != nil {
		kernel.o.Log.Warn("failed to probe neighbors", "error", err)
	}
}

// cleanup removes everything in the reverse order of installation.
func (kernel *kernel) cleanup() (removed []string, err error) {
	network, err := kernel.observe()
	if err != nil {
		return nil, err
	}
	if removed, err = kernel.apply(kernel.stale(network, true)); err != nil {
		return removed, err
	}
	for _, family := range slices.Backward(tableFamilies[:]) {
		table := nft.Table{Family: family, Name: tableName}
		found, err := kernel.nft.Remove(table)
		if err != nil {
			return removed, err
		}
		if found {
			removed = append(removed, "nftables table "+table.String())
		}
	}
	return removed, nil
}
