package replypath

import (
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
	// live holds the fwmarks of the last write.
	live []uint32
	// dropped counts the frames to unknown peers.
	dropped   uint64
	peers     peers
	neighbors []rtnetlink.Neighbor // of the link
}

func dial(o Options) (*kernel, error) {
	socket, err := nft.Dial()
	if err != nil {
		return nil, err
	}
	rt, err := rtnetlink.Dial()
	if err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	return &kernel{o: o, rt: rt, nft: socket}, nil
}

func (k *kernel) close() error { return errors.Join(k.nft.Close(), k.rt.Close()) }

// families lists the pool's address families that the kernel supports; ipv6.disable=1 removes
// IPv6.
func (k *kernel) families() (list []vip.Family) {
	for _, f := range vip.Families {
		if len(disjoint(k.o.Pool, f)) > 0 && (f == vip.IPv4 || disabledIPv6("all").Read() != "") {
			list = append(list, f)
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

func (k *kernel) observe() (*network, error) {
	n := &network{}
	links, err := k.rt.Links()
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		if l.Name == k.o.Interface {
			n.link = l
		}
		if l.Flags&unix.IFF_LOOPBACK != 0 {
			n.loopback = l.Index
		}
	}
	for _, f := range vip.Families {
		rules, err := k.rt.Rules(f)
		if err != nil && !errors.Is(err, rtnetlink.ErrInterrupted) && !rtnetlink.FamilyAbsent(err) {
			return nil, err
		}
		routes, err := k.rt.Routes(f, rtnetlink.RouteFilter{Protocol: protocol})
		if err != nil && !errors.Is(err, rtnetlink.ErrInterrupted) && !rtnetlink.FamilyAbsent(err) {
			return nil, err
		}
		neighbors, err := k.rt.Neighbors(f)
		if err != nil && !errors.Is(err, rtnetlink.ErrInterrupted) && !rtnetlink.FamilyAbsent(err) {
			return nil, err
		}
		n.rules, n.routes = append(n.rules, rules...), append(n.routes, routes...)
		n.neighbors = append(n.neighbors, neighbors...)
	}
	return n, nil
}

// apply sends the requests in order and stops at the first failure.
func (k *kernel) apply(parts []part) (done []string, err error) {
	for _, p := range parts {
		if err := k.rt.Apply(p.add); err != nil {
			return done, err
		}
		done = append(done, p.name)
	}
	return done, nil
}

// ethernet reports whether an interface exists and has Ethernet addresses.
func ethernet(l rtnetlink.Link) bool {
	return len(l.MAC) == len(placeholderMAC()) && l.Flags&unix.IFF_LOOPBACK == 0
}

// linkProblem returns the reason why the interface cannot carry replies, or nil.
func (k *kernel) linkProblem(n *network) *Problem {
	object := "interface " + k.o.Interface
	switch l := n.link; {
	case l.Index == 0:
		return &Problem{object, "it does not exist", "create it, or name another one with --interface"}
	case !ethernet(l):
		return &Problem{object, "it has no Ethernet addresses", "name an Ethernet interface with --interface"}
	case l.Flags&unix.IFF_UP == 0:
		return &Problem{object, "it is down", "ip link set " + k.o.Interface + " up"}
	case !l.Up():
		return &Problem{object, "it has no carrier", "check the other end of the link"}
	case len(disjoint(k.o.Pool, vip.IPv6)) > 0 && !k.usable(n, vip.IPv6):
		return &Problem{object, "IPv6 is disabled", disabledIPv6(k.o.Interface).SetCommand("0")}
	}
	return nil
}

// problemOf returns the Problem for a failed kernel change.
func problemOf(object string, err error) Problem {
	remedy := "see the error; it is retried"
	if h := hint(err); h != "" {
		remedy = h
	}
	return Problem{Object: object, Detail: err.Error(), Remedy: remedy}
}

// reconcile installs missing objects, removes stale ones, and reads the result back. With restore
// false it only reads. It returns the names of the missing objects and the remaining problems.
func (k *kernel) reconcile(restore bool) (missing []string, problems []Problem) {
	n, err := k.observe()
	if err != nil {
		return nil, []Problem{problemOf("netlink", err)}
	}
	if p := k.linkProblem(n); p != nil {
		problems = append(problems, *p)
	}
	k.neighbors = slices.DeleteFunc(slices.Clone(n.neighbors), func(m rtnetlink.Neighbor) bool {
		return !neighborOf(m, n.link.Index)
	})
	var expected []uint32
	for _, m := range k.neighbors {
		if len(m.MAC) > 0 {
			expected = append(expected, fwmark(m.MAC))
		}
	}
	learned, err := readPeers(k.nft, expected...)
	if err != nil {
		return nil, []Problem{problemOf("nftables", err)}
	}
	if len(learned) > 0 { // empty after a flush by another process: keep the peers to restore
		k.peers.learned = learned
	}
	k.peers.update(k.neighbors)
	if k.peers.full() {
		problems = append(problems, Problem{
			"map " + peersMap, fmt.Sprintf("it is full: replies by way of a trench pod beside these %d are dropped", maxPeers),
			"find the host that sends from so many link addresses: nft list map netdev " + tableName + " " + peersMap,
		})
	}
	d := desired{
		pool: append(slices.Clone(k.o.Pool), k.stalePool(n)...), link: k.o.Interface,
		live: k.peers.live(), peers: k.peers.learned,
	}
	if !ethernet(n.link) {
		return nil, problems // keep the installed state: flows continue when the interface returns
	}
	afterStep(stepRead)
	name, err := k.ruleset(d, restore)
	if name != "" {
		missing = append(missing, name)
	} else {
		k.peers.learned = learned
	}
	if err != nil {
		return missing, append(problems, problemOf("nftables", err))
	}
	if name != "" && !restore {
		return missing, append(problems, Problem{"nftables", "missing: " + name, "it is restored"})
	}
	if err := errors.Join(k.peers.evict(k.nft, time.Now()), k.peers.addNeighbors(k.nft)); err != nil {
		return missing, append(problems, problemOf("nftables", err))
	}
	afterStep(stepRuleset)
	for _, step := range []struct {
		parts []part
		name  string
	}{
		{k.replyParts(n), stepReply}, {k.acceptParts(n), stepAccept}, {k.stale(n, false), stepStale},
	} {
		for _, p := range step.parts {
			missing = append(missing, p.name)
		}
		if !restore && len(step.parts) > 0 {
			return missing, append(problems, Problem{"routing", "missing: " + step.parts[0].name, "it is restored"})
		}
		if _, err := k.apply(step.parts); err != nil {
			return missing, append(problems, problemOf("routing", err))
		}
		afterStep(step.name)
	}
	if len(d.pool) > len(k.o.Pool) {
		d.pool = k.o.Pool
		if _, err = k.ruleset(d, restore); err != nil {
			return missing, append(problems, problemOf("nftables", err))
		}
	}
	afterStep(stepPool)
	return missing, problems
}

// probe triggers verification of the peers' neighbor entries. Rejections are ignored, because an
// entry may have expired since it was read.
func (k *kernel) probe() {
	if list := k.peers.probes(k.neighbors, time.Now()); len(list) > 0 {
		if _, err := k.rt.Do(list...); err != nil {
			k.o.Log.Warn("failed to probe neighbors", "error", err)
		}
	}
}

// cleanup removes everything in the reverse order of installation.
func (k *kernel) cleanup() (removed []string, err error) {
	n, err := k.observe()
	if err != nil {
		return nil, err
	}
	if removed, err = k.apply(k.stale(n, true)); err != nil {
		return removed, err
	}
	for _, f := range slices.Backward(tableFamilies[:]) {
		t := nft.Transaction{Table: nft.Table{Family: f, Name: tableName}}
		t.DeleteTable()
		switch err := k.nft.Commit(&t, nil); {
		case errors.Is(err, unix.ENOENT):
		case err != nil:
			return removed, err
		default:
			removed = append(removed, "nftables table "+t.Table.String())
		}
	}
	return removed, nil
}
