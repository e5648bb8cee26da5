package replypath

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/lab"
)

// Flows of each protocol and family are answered through the pod of their newest packet.
func TestRepliesFollowPackets(t *testing.T) {
	x := newFixture(t, 2)
	p, _ := x.start(x.options())
	x.serve("80")
	x.complete(p)
	var flows []*flow
	for _, v := range vips {
		for _, network := range []string{"tcp", "udp"} {
			flows = append(flows, x.open(network, net.JoinHostPort(v, "80")))
		}
	}
	for _, pod := range []int{0, 1, 0} {
		x.via(pod)
		for _, f := range flows {
			f.mustEcho(5000) // UDP in fragments
		}
		for _, v := range vips {
			x.must(x.ping(v))
		}
	}
	for i, pod := range x.pods {
		if out := x.sh(pod, "cat /proc/net/nf_conntrack"); strings.Contains(out, "UNREPLIED") {
			t.Errorf("pod %d did not see all replies:\n%s", i, out)
		}
	}
	x.openFrom(x.target, "tcp", "", "20.0.0.1:80").mustEcho(1) // a flow without a peer
	var counts map[string]int
	x.must(x.target.Do(func() (err error) {
		counts, err = p.Flows(t.Context())
		return err
	}))
	if want := map[string]int{podMAC(2, 0): 6}; !maps.Equal(counts, want) {
		t.Errorf("flows %v, want %v", counts, want)
	}
}

// ICMP errors of the target reach the client, and path MTU discovery works in both directions.
func TestICMPErrors(t *testing.T) {
	x := newFixture(t, 1)
	p, _ := x.start(x.options())
	x.serve("80")
	x.complete(p)
	// The kernel sends an error for an IPv6 packet to a local route from an address of the interface
	// (icmp6_send), which needs a separate route to the client.
	x.sh(x.target, "ip -6 route add fd00:1::/64 via fd00:2::1")
	for _, v := range vips {
		if err := x.open("udp", net.JoinHostPort(v, "9")).echo(1); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("closed port of %s: %v", v, err)
		}
	}
	client := []string{"192.168.0.100", "fd00:1::100"}
	// Use a different VIP in the second direction, because each end announces its learned MTU.
	for _, direction := range []struct {
		narrow string // in the pod
		vips   []string
		sender *lab.NetNS
	}{
		{`ip route replace 20.0.0.0/8 via 172.16.0.100 mtu lock 1300
ip -6 route replace 2000::/16 via fd00:2::100 mtu lock 1300`, vips, x.client},
		{
			`ip route add 192.168.0.100 dev ext0 mtu lock 1300; ip -6 route add fd00:1::100 dev ext0 mtu lock 1300
ip route replace 20.0.0.0/8 via 172.16.0.100; ip -6 route replace 2000::/16 via fd00:2::100`,
			[]string{"20.0.0.2", "2000::2"},
			x.target,
		},
	} {
		x.sh(x.pods[0], direction.narrow)
		for i, v := range direction.vips {
			x.open("tcp", net.JoinHostPort(v, "80")).mustEcho(300_000)
			from, to := client[i], v
			if direction.sender == x.target {
				from, to = to, from
			}
			if out := x.sh(direction.sender, "ip route get "+to+" from "+from); !strings.Contains(out, "mtu 1300") {
				t.Errorf("no path MTU from %s: %s", from, out)
			}
		}
	}
}

func subnets(prefixes ...string) Options {
	return Options{Interface: "net0", Pool: pool("20.0.0.0/24"), PeerSubnets: pool(prefixes...)}
}

func TestValidate(t *testing.T) {
	for _, o := range []Options{subnets("172.16.0.0/24"), subnets("172.16.0.0/25", "fd00:2::/122", "fd00:2::1:0/122")} {
		if err := o.Validate(); err != nil {
			t.Errorf("256 addresses in %v: %v", o.PeerSubnets, err)
		}
	}
	for want, o := range map[string]Options{
		"":                                 {Interface: "net0", Pool: pool("20.0.0.0/24", "2000::/64", "20.0.1.1/32")},
		"interface \"\": its name":         {Pool: pool("20.0.0.0/24")},
		"the pool has no prefix":           {Interface: "net0"},
		"host bits set; use 20.0.0.0/24":   {Interface: "net0", Pool: pool("20.0.0.1/24")},
		"20.0.0.1/32 overlaps another one": {Interface: "net0", Pool: pool("20.0.0.0/24", "20.0.0.1/32")},
		"VIPs are unicast addresses":       {Interface: "net0", Pool: pool("0.0.0.0/0")},
		"fe80::/64: VIPs are unicast":      {Interface: "net0", Pool: pool("fe80::/64")},
		"172.16.0.1/24: name the trench":   subnets("172.16.0.1/24"),
		"20.0.0.128/25: name the trench":   subnets("20.0.0.128/25"),
		"fd00:2::1/128: name the trench":   subnets("172.16.0.0/24", "fd00:2::1/128"),
		"172.16.0.0/23: name the trench":   subnets("172.16.0.0/23"),
		"172.0.0.0/8: name the trench":     subnets("172.0.0.0/8"),
		"::/0: name the trench":            subnets("::/0"),
	} {
		err := o.Validate()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: got %v", want, err)
		}
	}
}

func TestProblemsOfStatus(t *testing.T) {
	problems := []Problem{{"interface net1", "does not exist", "attach the network"}, {"a", "b", "c"}}
	for want, s := range map[string]Status{
		"<nil>":                            {Complete: true},
		"the kernel state is not complete": {},
		"interface net1: does not exist; attach the network\na: b; c": {Problems: problems},
	} {
		if got := fmt.Sprint(s.Err()); got != want {
			t.Errorf("%+v: %s, want %s", s, got, want)
		}
	}
}
