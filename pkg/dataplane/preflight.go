package dataplane

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// probeTable is made and deleted again within one transaction, so that nobody sees it.
const probeTable = TableName + "-probe"

// Preflight tells what the network namespace of the calling thread lacks, each with
// the command that mends it. It changes nothing.
func Preflight(o Options) []Problem {
	o = o.withDefaults()
	if problem := lacksCapability(); problem != nil {
		return []Problem{*problem} // nothing else can be seen without
	}
	f, err := newFabric(o)
	if err != nil {
		return []Problem{{Object: "netlink", Detail: err.Error(), Remedy: "run it on a Linux kernel with netlink sockets"}}
	}
	problems := f.lacksModules()
	for _, p := range f.lacksSettings() {
		problems = append(problems, p.Problem)
	}
	if err := f.close(); err != nil {
		problems = append(problems, Problem{Object: "netlink", Detail: err.Error()})
	}
	return problems
}

func lacksCapability() *Problem {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData // version 3 has two words for 64 capabilities
	if err := unix.Capget(&header, &data[0]); err != nil {
		return &Problem{Object: "CAP_NET_ADMIN", Detail: fmt.Sprintf("the capabilities of this process cannot be read: %v", err)}
	}
	if data[0].Effective&(1<<unix.CAP_NET_ADMIN) != 0 {
		return nil
	}
	return &Problem{
		Object: "CAP_NET_ADMIN", Detail: "this process may not change nftables and routing",
		Remedy: `add NET_ADMIN to the container: securityContext: {capabilities: {add: ["NET_ADMIN"]}}`,
	}
}

// kernelPart is an expression of nftables, the module that has it, and what it means
// to be without.
type kernelPart struct {
	module, what string
	expression   expr.Any
}

// lacks tells which of these parts the kernel refuses.
func (f *fabric) lacks(parts ...kernelPart) []Problem {
	var problems []Problem
	for _, p := range parts {
		if err := f.probe(p.expression); err != nil {
			problems = append(problems, Problem{Object: p.module, Detail: fmt.Sprintf("%s: %v", p.what, err), Remedy: "modprobe " + p.module})
		}
	}
	return problems
}

// lacksModules tells which parts of the kernel are missing, by asking for them.
func (f *fabric) lacksModules() []Problem {
	if err := f.probe(nil); err != nil {
		return []Problem{{Object: "nf_tables", Detail: fmt.Sprintf("nftables of the family inet do not work: %v", err), Remedy: "modprobe nf_tables"}}
	}
	r := register(0)
	problems := f.lacks(
		kernelPart{"nft_hash", "the kernel cannot hash flows", &expr.Hash{SourceRegister: r, DestRegister: r, Length: 4, Modulus: 2, Seed: 1, Type: expr.HashTypeJenkins}},
		// Also without connection tracking: it is what puts fragments together.
		kernelPart{"nft_ct", "the kernel cannot ask connection tracking", &expr.Ct{Key: expr.CtKeyMARK, Register: r}},
	)
	for _, family := range f.families() {
		jumped := false
		if err := f.listPolicy(family, func(r policyRule) { jumped = jumped || f.jumpsOver(r) }); err != nil {
			problems = append(problems, Problem{
				Object: "policy routing", Detail: fmt.Sprintf("the kernel cannot choose a routing table by mark: %v", err),
				Remedy: "run a kernel with CONFIG_IP_MULTIPLE_TABLES and CONFIG_IPV6_MULTIPLE_TABLES",
			})
		}
		if jumped {
			problems = append(problems, Problem{
				Object: fmt.Sprintf("%s policy rules of priority %d and %d", family, f.o.Priority, f.o.Priority+1),
				Detail: "there are some of somebody else, which packets that are for no target would jump over",
				Remedy: "choose three priorities in a row that nobody has, the first with --dataplane-priority; ip rule show lists all",
			})
		}
	}
	return problems
}

// jumpsOver tells whether a rule of somebody else would stand between our first one and
// the one that it leads to. The frontend has two rules, at 100 and 101 by default.
func (f *fabric) jumpsOver(r policyRule) bool {
	first := uint32(f.o.Priority)
	return r.protocol != RouteProtocol && (r.priority == first || r.priority == first+1)
}

// probe makes a table with a base chain, and a rule with one expression, and deletes
// it within the same transaction.
func (f *fabric) probe(e expr.Any) error {
	var t transaction
	t.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE)
	t.text(unix.NFTA_TABLE_NAME, probeTable)
	t.end()
	t.begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE)
	t.text(unix.NFTA_CHAIN_TABLE, probeTable)
	t.text(unix.NFTA_CHAIN_NAME, "probe")
	t.end()
	if e != nil {
		rule, err := newRule("", &expr.Meta{Key: expr.MetaKeyMARK, Register: register(0)}, e)
		if err != nil {
			return err
		}
		t.begin(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND)
		t.text(unix.NFTA_RULE_TABLE, probeTable)
		t.text(unix.NFTA_RULE_CHAIN, "probe")
		t.bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, rule.expressions)
		t.end()
	}
	t.begin(unix.NFT_MSG_DELTABLE, 0)
	t.text(unix.NFTA_TABLE_NAME, probeTable)
	t.end()
	return f.commit(&t, nil)
}

// setting is a kernel parameter that must have one value.
type setting struct {
	family      vip.Family
	name, value string
	detail      string
	drops       bool
}

// lacksSettings returns the kernel parameters that keep packets of VIPs from their route.
func (f *fabric) lacksSettings() []settingProblem {
	const (
		spread = "packets of one flow are spread over gateways by addresses only"
		// A packet that this host makes in answer to one with a target's mark, such as
		// "fragmentation needed", would go to the target instead of the client.
		reflect = "ICMP errors of this host about VIP traffic go to targets instead of clients"
	)
	settings := []setting{
		{vip.IPv4, "net.ipv4.ip_forward", "1", "IPv4 packets are not forwarded", true},
		{vip.IPv4, "net.ipv4.fib_multipath_hash_policy", "1", spread, false},
		{vip.IPv4, "net.ipv4.fwmark_reflect", "0", reflect, true},
	}
	if !f.noIPv6 && sysctl("net.ipv6.conf.all.disable_ipv6") != "1" {
		settings = append(settings,
			setting{vip.IPv6, "net.ipv6.conf.all.forwarding", "1", "IPv6 packets are not forwarded", true},
			setting{vip.IPv6, "net.ipv6.fib_multipath_hash_policy", "1", spread, false},
			setting{vip.IPv6, "net.ipv6.fwmark_reflect", "0", reflect, true},
		)
	}
	var problems []settingProblem
	for _, s := range settings {
		// What the kernel does not have cannot be wrong.
		if got := sysctl(s.name); got != "" && got != s.value {
			problems = append(problems, settingProblem{Problem{Object: s.name, Detail: fmt.Sprintf("it is %s: %s", got, s.detail), Remedy: "sysctl -w " + s.name + "=" + s.value}, s.family, s.drops})
		}
	}
	more, err := f.lacksReversePath()
	for _, p := range more {
		problems = append(problems, settingProblem{p, vip.IPv4, true})
	}
	if err != nil {
		problems = append(problems, settingProblem{Problem{Object: "interfaces", Detail: err.Error()}, vip.IPv4, false})
	}
	return problems
}

// lacksReversePath tells on which interfaces the kernel takes VIP traffic for forged.
//
// The larger value of "all" and of the interface counts (ip-sysctl). Strict filtering
// (1) wants the way to a packet's source to lead back through the interface that it
// came in by. The sources are clients and, in the answers of targets, VIPs: to both
// leads the default route of the main table, if any, so that only its interface is
// safe. Loose filtering (2) wants any route to the source.
func (f *fabric) lacksReversePath() ([]Problem, error) {
	links, err := f.links()
	if err != nil {
		return nil, err
	}
	way, err := f.mainWay()
	if err != nil {
		return nil, err
	}
	all := number(sysctl("net.ipv4.conf.all.rp_filter"))
	var problems []Problem
	for _, l := range links {
		if !l.up || l.loopback {
			continue
		}
		own := number(sysctl(interfaceSetting(l.name, "rp_filter")))
		detail := ""
		switch max(all, own) {
		case 1:
			if l.index != way {
				detail = "strict reverse path filtering drops packets of VIPs that arrive on it"
			}
		case 2:
			if way == 0 {
				detail = "reverse path filtering drops packets from VIPs, to which no route leads"
			}
		}
		if detail != "" {
			remedy := "sysctl -w " + escapedSetting(l.name, "rp_filter") + "=0"
			if all != 0 {
				remedy = "sysctl -w net.ipv4.conf.all.rp_filter=0 " + escapedSetting(l.name, "rp_filter") + "=0"
			}
			problems = append(problems, Problem{Object: escapedSetting(l.name, "rp_filter"), Detail: fmt.Sprintf("it is %d, that of all is %d: %s", own, all, detail), Remedy: remedy})
		}
		if sysctl("net.ipv4.ip_forward") == "1" && sysctl(interfaceSetting(l.name, "forwarding")) == "0" {
			name := escapedSetting(l.name, "forwarding")
			problems = append(problems, Problem{Object: name, Detail: "it is 0: IPv4 packets that come in by this interface are not forwarded", Remedy: "sysctl -w " + name + "=1"})
		}
	}
	return problems, nil
}

// mainWay returns the interface to which packets without a mark leave for the world;
// 0 if there is none.
func (f *fabric) mainWay() (int, error) {
	r, err := f.lookup(vip.IPv4, 0)
	if err != nil || r == nil || r.kind != unix.RTN_UNICAST {
		return 0, err
	}
	return int(r.link), nil
}

// interfaceSetting is a path below /proc/sys: names of interfaces may have dots.
func interfaceSetting(link, name string) string {
	return "net/ipv4/conf/" + link + "/" + name
}

// escapedSetting is the name for sysctl, in which dots and slashes trade places when
// the first separator is a slash.
func escapedSetting(link, name string) string {
	if strings.Contains(link, ".") {
		return interfaceSetting(link, name)
	}
	return "net.ipv4.conf." + link + "." + name
}

// sysctl reads a kernel parameter by its name, or by its path if it has slashes; ""
// is one that is not there.
func sysctl(name string) string {
	if !strings.Contains(name, "/") {
		name = strings.ReplaceAll(name, ".", "/")
	}
	b, err := os.ReadFile(filepath.Join("/proc/sys", name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0
	}
	return n
}
