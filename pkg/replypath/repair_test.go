package replypath

import (
	"net"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/lab"
)

// Objects that another process or the kernel removes are restored, and flows continue.
func TestRestores(t *testing.T) {
	t.Run("all", func(t *testing.T) { restores(t) })
	t.Run("subnets", func(t *testing.T) { restores(t, "172.16.0.0/28", "fd00:2::/124") })
}

func restores(t *testing.T, subnets ...string) {
	x := newFixture(t, 2)
	o := x.options()
	o.PeerSubnets = pool(subnets...)
	p, _ := x.start(o)
	x.serve("80")
	x.complete(p)
	x.awaitPeers(p, podMAC(2, 0), podMAC(2, 1))
	x.via(1)
	x.open("udp", "20.0.0.1:80").mustEcho(1)
	x.via(0)
	var flows []*flow
	for _, v := range vips {
		flows = append(flows, x.open("tcp", net.JoinHostPort(v, "80")))
	}
	await.True(t, "live peers", func() bool {
		return strings.Contains(x.state(), "32768-65535 : ") && peer(p, podMAC(2, 1)).Seen
	})
	before := x.state()
	for name, command := range map[string]string{
		"ruleset":      "nft flush ruleset",
		"table":        "nft delete table arp vipgate-target",
		"chain":        "nft flush chain inet vipgate-target output",
		"pool element": "nft delete element inet vipgate-target pool4 '{ 20.0.0.0/24 }'",
		"live":         "nft flush map inet vipgate-target live",
		"foreign rule": "nft add rule netdev vipgate-target egress drop",
		"dormant":      "nft add table inet vipgate-target '{ flags dormant; }'",
		"rules":        "ip rule del priority 80; ip -6 rule del priority 80",
		"routes":       "ip route flush table 7667; ip -6 route flush table 7667",
		"local routes": "ip route del local 20.0.0.0/24 table local; ip -6 route del local 2000::/64 table local",
		"neighbors":    "ip neigh del 169.254.76.67 dev net0; ip -6 neigh del fe80::7667:1 dev net0",
		"neighbor states": "ip neigh change 169.254.76.67 dev net0 lladdr 02:76:67:00:00:01 nud stale\n" +
			"ip -6 neigh change fe80::7667:1 dev net0 lladdr 02:76:67:00:00:01 nud reachable",
		"neighbor addresses": "ip neigh change 169.254.76.67 dev net0 lladdr 02:76:67:00:00:02 nud permanent",
		"link down, up":      "ip link set net0 down; ip link set net0 up; ip addr replace fd00:2::100/64 dev net0 nodad",
	} {
		repairs := p.Status().Repairs
		x.sh(x.target, command)
		await.True(t, name, func() bool { s := p.Status(); return s.Repairs > repairs && s.Complete })
		await.True(t, name+": state as before", func() bool { return x.state() == before })
		if !peer(p, podMAC(2, 1)).Seen {
			t.Errorf("%s: the peer was forgotten", name)
		}
		for _, f := range flows {
			if err := f.echo(100); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// A map that another process empties in the moment in which the live peers change is drift, too.
func TestDriftWhilePeersChange(t *testing.T) {
	x := newFixture(t, 1)
	var missing string
	x.must(x.target.Do(func() error {
		kernel, err := dial(x.options())
		if err != nil {
			return err
		}
		defer kernel.close()
		index, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		state := desired{pool: x.options().Pool, link: link, index: index.Index, live: []uint32{1}}
		if _, err := kernel.ruleset(state, true); err != nil {
			return err
		}
		if err := exec.Command("nft", "flush", "map", "inet", tableName, liveMap).Run(); err != nil {
			return err
		}
		state.live = []uint32{2}
		missing, err = kernel.ruleset(state, false)
		return err
	}))
	if want := "nftables map inet vipgate-target live"; missing != want {
		t.Errorf("%q is missing, want %q", missing, want)
	}
}

// state returns the kernel state without counters, timeouts and other volatile fields.
func (x *fixture) state() string {
	out := x.sh(x.target, `nft list ruleset; { ip rule; ip -6 rule; } | grep "proto 180" || true
ip route show table all proto 180; ip -6 route show table all proto 180
ip neigh show nud permanent; ip -6 neigh show nud permanent`)
	var lines []string
	for line := range strings.Lines(out) {
		if line, counter, ok := strings.Cut(line, "counter packets"); ok {
			lines = append(lines, line+counter[strings.LastIndex(counter, " "):])
		} else if !strings.Contains(line, "expires") {
			lines = append(lines, line)
		}
	}
	slices.Sort(lines) // the peers map keeps its position, recreated sets do not
	return strings.Join(lines, "")
}

// Nothing is installed for an interface that cannot carry replies.
func TestUnusableInterface(t *testing.T) {
	x := newFixture(t, 0)
	for name, problem := range map[string]string{"none0": "it does not exist", "lo": "it has no Ethernet addresses"} {
		o := x.options()
		o.Interface = name
		p, stop := x.start(o)
		await.True(t, name+": "+problem, func() bool {
			s := p.Status()
			return len(s.Problems) == 1 && s.Problems[0].Detail == problem
		})
		if err := x.target.Do(func() error {
			_, err := Install(t.Context(), o)
			return err
		}); err == nil || !strings.Contains(err.Error(), problem) {
			t.Errorf("%s: --once: %v", name, err)
		}
		stop()
		if state := strings.TrimSpace(x.state()); state != "" {
			t.Errorf("%s: installed %s", name, state)
		}
	}
}

// An interface that is down, at either end, is a problem with its remedy until it is up.
func TestLinkProblems(t *testing.T) {
	x := &fixture{TB: t, target: lab.NewNetNS(t)}
	other := lab.NewNetNS(t)
	x.must(lab.Veth(x.target, link, other, "wire"))
	x.must(x.target.Addr(link, "172.16.0.100/24", "fd00:2::100/64"))
	p, _ := x.start(x.options())
	for _, end := range []struct {
		ns             *lab.NetNS
		link           string
		detail, remedy string
	}{
		{x.target, link, "it is down", "ip link set net0 up"},
		{other, "wire", "it has no carrier", "check the other end of the link"},
	} {
		x.complete(p)
		x.must(end.ns.IP("link", "set", end.link, "down"))
		await.True(t, end.detail, func() bool {
			s := p.Status()
			return len(s.Problems) > 0 && s.Problems[0] == Problem{"interface net0", end.detail, end.remedy} && !s.Complete
		})
		x.must(end.ns.IP("link", "set", end.link, "up"))
	}
	x.complete(p)
}

// The state is restored on an interface that is deleted and recreated, and the flow continues.
func TestInterfaceReturns(t *testing.T) {
	x := newFixture(t, 1)
	x.must(x.target.IP("link", "del", link))
	p, _ := x.start(x.options())
	x.serve("80")
	await.True(t, "problem", func() bool {
		s := p.Status()
		return len(s.Problems) == 1 && s.Problems[0].Detail == "it does not exist"
	})
	create := func() {
		x.wire(x.target, link, "int", "02:00:00:00:04:00", "172.16.0.100/24", "fd00:2::100/64")
		x.complete(p)
	}
	create()
	flows := []*flow{x.open("tcp", "20.0.0.1:80"), x.open("tcp", "[2000::1]:80")}
	complete := p.Status().Since
	x.must(x.target.IP("link", "del", link))
	await.True(t, "incomplete", func() bool { s := p.Status(); return !s.Complete && s.Since.After(complete) })
	incomplete := p.Status().Since
	create()
	if s := p.Status(); !s.Since.After(incomplete) {
		t.Errorf("complete since %v, and incomplete since %v", s.Since, incomplete)
	}
	for _, f := range flows {
		f.mustEcho(100)
	}
}

// Without IPv6 on the interface, IPv4 works and the problem names the parameter.
func TestIPv6Disabled(t *testing.T) {
	x := newFixture(t, 1)
	x.must(x.target.Sysctl("net.ipv6.conf."+link+".disable_ipv6", "1"))
	p, _ := x.start(x.options())
	x.serve("80")
	await.True(t, "problem", func() bool {
		s := p.Status()
		return len(s.Problems) == 1 && s.Problems[0].Remedy == "sysctl -w net.ipv6.conf.net0.disable_ipv6=0"
	})
	x.open("tcp", "20.0.0.1:80").mustEcho(100)
	x.must(x.target.Sysctl("net.ipv6.conf."+link+".disable_ipv6", "0"))
	x.complete(p)
}

// A start with a different interface takes over the flows and removes the state of the old
// interface.
func TestOtherInterface(t *testing.T) {
	x := newFixture(t, 1)
	p, stop := x.start(x.options())
	x.serve("80")
	x.complete(p)
	flows := []*flow{x.open("tcp", "20.0.0.1:80"), x.open("tcp", "[2000::1]:80")}
	stop()
	x.wire(x.target, "net1", "int", "02:00:00:00:04:01", "172.16.0.101/24", "fd00:2::101/64")
	x.sh(x.target, "ip route add 10.7.0.0/16 dev net1 table 7668 proto 180") // of another version
	o := x.options()
	o.Interface = "net1"
	p, _ = x.start(o)
	x.complete(p)
	if state := x.state(); strings.Contains(state, link) || strings.Contains(state, "7668") {
		t.Errorf("left of %s: %s", link, state)
	}
	x.sh(x.pods[0], "ip route replace 20.0.0.0/8 via 172.16.0.101; ip -6 route replace 2000::/16 via fd00:2::101")
	x.sh(x.target, "ip addr flush dev net0; ip link set net0 down")
	for _, f := range flows {
		f.mustEcho(100)
	}
}

// The rate of restorations decreases while a process removes a rule repeatedly.
func TestBacksOffFromCompetingWriter(t *testing.T) {
	x := newFixture(t, 0)
	p, _ := x.start(x.options())
	x.complete(p)
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "while :; do ip rule del priority 80 2>/dev/null; done")
	x.must(x.target.Start(cmd))
	await.True(t, "delay", func() bool { return p.Status().Repairs >= 4 })
	began := time.Now()
	await.True(t, "another repair", func() bool { return p.Status().Repairs >= 5 })
	if d := time.Since(began); d < 4*minBackoff {
		t.Errorf("the fifth repair after %v", d)
	}
	await.True(t, "problem", func() bool {
		s := p.Status()
		return !s.Complete && len(s.Problems) == 1 && strings.HasPrefix(s.Problems[0].Detail, "missing: rule")
	})
	x.must(cmd.Process.Kill())
	_ = cmd.Wait()
	x.complete(p)
}
