package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/vipgate/vipgate/test/load"
)

// wireGateway makes a namespace a gateway that chooses among the pods by a hash of the flow.
func wireGateway(ns *NetNS, seed string, addr4, addr6 netip.Addr) error {
	return errors.Join(
		ns.Addr("trench0", prefix(addr4, externalBits4), prefix(addr6, externalBits6)),
		hashFlows(ns), enableForwarding(ns),
		// Linux 6.11 and newer; in older kernels all namespaces share a seed.
		ns.sysctlIfExists("net.ipv4.fib_multipath_hash_seed", seed),
		// Replies of the other gateway's flows arrive and leave by the same link.
		ns.Sysctl("net.ipv4.conf.all.send_redirects", "0"), ns.Sysctl("net.ipv4.conf.trench0.send_redirects", "0"),
		// Ports of clients, enough of them for the requests of a minute.
		ns.Sysctl("net.ipv4.ip_local_port_range", "10240 65535"),
		ns.Sysctl("net.ipv4.ip_local_reserved_ports", "31000-31999"), // of vipgate-probe
	)
}

// wireSecondGateway connects a second gateway to the external network.
func (t *Topology) wireSecondGateway() error {
	ns, err := Create(WithoutDAD)
	if err != nil {
		return err
	}
	t.Second = ns
	return errors.Join(
		Veth(ns, "trench0", t.Gateway, "gateway2"),
		t.Gateway.Batch("link set gateway2 master trench0"),
		wireGateway(ns, "2", GatewayB4, GatewayB6),
		// To clients beyond the first gateway.
		ns.Batch("route add 0.0.0.0/0 via "+GatewayA4.String(), "route add ::/0 via "+GatewayA6.String()),
	)
}

// gateways returns the namespaces of the gateways.
func (t *Topology) gateways() []*NetNS {
	if t.Second == nil {
		return []*NetNS{t.Gateway}
	}
	return []*NetNS{t.Gateway, t.Second}
}

// GatewayConfig returns the configuration of the first gateway: the usual one, with every pod as
// a neighbour.
func (t *Topology) GatewayConfig() GatewayConfig { return t.withPods(GatewayA()) }

// withPods makes every pod a neighbour of a gateway.
func (t *Topology) withPods(c GatewayConfig) GatewayConfig {
	local := c.Local
	c.Local, c.Peers = nil, nil
	for n := range t.Pods {
		c.Local = append(c.Local, local...)
		c.Peers = append(c.Peers, PodExternal(n+1)...)
	}
	return c
}

// StartGateways starts a BIRD in each gateway's namespace; Close ends it. The change, which may be
// nil, is applied to each configuration.
func (t *Topology) StartGateways(change func(*GatewayConfig)) error {
	for i, c := range []GatewayConfig{GatewayA(), GatewayB()}[:len(t.gateways())] {
		c = t.withPods(c)
		if change != nil {
			change(&c)
		}
		router, err := t.StartRouter(KindBIRD, t.gateways()[i], c)
		if err != nil {
			return err
		}
		t.Routers = append(t.Routers, router)
	}
	return nil
}

// LoseGateway is the sudden loss of the second gateway as a router: its BIRD is killed, it forwards
// nothing, and its clients reach the VIPs by the first one.
func (t *Topology) LoseGateway() error {
	errs := []error{
		t.Second.Sysctl("net.ipv4.ip_forward", "0"), t.Second.Sysctl("net.ipv6.conf.all.forwarding", "0"),
	}
	for _, p := range t.Routers[1].Processes() {
		errs = append(errs, p.Kill())
	}
	return errors.Join(append(errs, t.Second.IP("route", "flush", "proto", "bird"),
		t.Second.IP("-6", "route", "flush", "proto", "bird"))...)
}

// ReturnGateway lets the second gateway route again.
func (t *Topology) ReturnGateway() error {
	return errors.Join(enableForwarding(t.Second), t.Routers[1].Start())
}

// Via returns the pods to which the first gateway's kernel sends packets to a VIP, none when it
// has no route to it.
func (t *Topology) Via(vip netip.Addr) ([]int, error) { return t.viaOf(t.Gateway, vip) }

// viaOf is Via of any gateway.
func (t *Topology) viaOf(gateway *NetNS, vip netip.Addr) ([]int, error) {
	weights, err := t.weightsOf(gateway, vip)
	return slices.Sorted(maps.Keys(weights)), err
}

// Weights returns the weights of the pods in the first gateway's kernel, 0 for a single next hop.
func (t *Topology) Weights(vip netip.Addr) (map[int]int, error) { return t.weightsOf(t.Gateway, vip) }

func (t *Topology) weightsOf(gateway *NetNS, vip netip.Addr) (map[int]int, error) {
	hops, err := gateway.nextHops(netip.PrefixFrom(vip, vip.BitLen()))
	if err != nil {
		return nil, err
	}
	weights := map[int]int{}
	for n := range t.Pods {
		for _, address := range t.hopAddresses(n + 1) {
			if weight, has := hops[address]; has {
				weights[n+1] = weight
			}
		}
	}
	return weights, nil
}

// hopAddresses returns the addresses by which a pod may appear as a next hop.
func (t *Topology) hopAddresses(pod int) []netip.Addr {
	external := PodExternal(pod)
	return []netip.Addr{external[0], external[1], addr("fe80::76:67ff:fe02:%x", t.Pods[pod-1].replaced<<8|pod)}
}

// WantVia waits until the kernel of each gateway sends packets to any of the VIPs to exactly
// these pods.
func (t *Topology) WantVia(ctx context.Context, pods ...int) error {
	want := slices.Sorted(slices.Values(pods))
	return Eventually(ctx, pollInterval, func() error {
		for i, gateway := range t.gateways() {
			for _, vip := range t.VIPs {
				got, err := t.viaOf(gateway, vip)
				if err != nil {
					return err
				}
				if !slices.Equal(got, want) {
					return fmt.Errorf("gateway %d sends what is for %s to the pods %v, want %v", i+1, vip, got, want)
				}
			}
		}
		return nil
	})
}

// Load starts clients in the gateways' namespaces, in turn: rate requests per second and flows,
// spread over the VIPs. The caller sets the other fields of the configuration.
func (t *Topology) Load(ctx context.Context, rate, flows int, c load.Config) (*load.Generator, error) {
	var sockets atomic.Uint64
	gateways := t.gateways()
	c.Rate, c.Flows, c.Inside = rate, flows, func(create func() error) error {
		// The VIPs alternate, too: each gateway gets two sockets in a row, one of each family.
		return gateways[sockets.Add(1)/2%uint64(len(gateways))].Do(create)
	}
	c.Requests, c.FlowsTo = nil, nil
	for _, vip := range t.VIPs {
		c.Requests = append(c.Requests, netip.AddrPortFrom(vip, RequestPort))
		c.FlowsTo = append(c.FlowsTo, netip.AddrPortFrom(vip, FlowPort))
	}
	return load.Start(ctx, c)
}
