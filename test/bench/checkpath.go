package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// measureCheckPaths is the second part of row 14: the same targets checked at their own addresses
// and through their VIPs, in turn, by one lb with a data plane.
func measureCheckPaths(ctx context.Context, s *session) error {
	n := s.sizes([]int{1000}, []int{200})[0]
	return on(ctx, s, n/targetsPerStream, oneFamily, func(fx *fixture) error {
		if err := fx.startConnectedTargets(n); err != nil {
			return err
		}
		byAddress := Measurement{Row: 14, What: checksOf + "own address: share of one core", Method: vipgate, N: n, Unit: "%"}
		byVIP, ratio := byAddress, byAddress
		byVIP.What, ratio.What, ratio.Unit = checksOf+"VIP: share of one core", checksOf+"VIP: to own address", "×"
		share := func(via string) (float64, error) {
			text := strings.ReplaceAll(fx.targetsTrench(), "interval:", "via: "+via+", interval:")
			if err := fx.pod.WriteTrench(text); err != nil {
				return 0, err
			}
			if fx.pod.LB == nil {
				if err := fx.pod.StartLB("--dataplane=nftables"); err != nil {
					return 0, err
				}
			}
			if err := fx.pause(s.lasts(5*time.Second, 300*time.Millisecond)); err != nil { // checks restart
				return 0, err
			}
			if err := fx.waitTargets(n); err != nil {
				return 0, err
			}
			return fx.share(fx.pod.LB, s.lasts(15*time.Second, 300*time.Millisecond))
		}
		for range s.repeats(5, 1) {
			address, errAddress := share("address")
			vip, errVIP := share("vip")
			if err := errors.Join(errAddress, errVIP); err != nil {
				return err
			}
			byAddress.Samples, byVIP.Samples = append(byAddress.Samples, address), append(byVIP.Samples, vip)
			ratio.Samples = append(ratio.Samples, vip/address)
		}
		s.record(byAddress)
		s.record(byVIP)
		s.record(ratio)
		if err := fx.waitTargets(n); err != nil {
			return err
		}
		_, err := fx.endAll(fx.pod.LB)
		return err
	})
}

// startConnectedTargets starts targets on a network of the pod, which accept all VIPs. Their
// neighbor entries are permanent: dynamic ones would overflow the neighbor table.
func (fx *fixture) startConnectedTargets(n int) error {
	const link, port, podNetwork = "02:76:67:63:00:01", "pod0", "10.98.0.0/16"
	t := lab.NewTarget(fx.Backend, netip.AddrPortFrom(netip.IPv4Unspecified(), checkPort))
	var neighbors []string
	for i := range n {
		neighbors = append(neighbors, fmt.Sprintf("neigh add %s lladdr %s dev %s nud permanent",
			numberedTarget(i), link, lab.Internal))
	}
	const pod = "172.16.0.1"
	if err := errors.Join(
		fx.Backend.IP("link", "set", port, "address", link),
		fx.Backend.Batch("route add local "+targetsPrefix+" dev lo", "route add local 20.0.0.0/8 dev lo",
			"route add "+podNetwork+" via "+pod, "route add "+lab.PodExternal4.String()+" via "+pod),
		fx.Pod.Sysctl("net.ipv4.fib_multipath_hash_policy", "1"), fx.Pod.Sysctl("net.ipv6.fib_multipath_hash_policy", "1"),
		fx.Pod.Addr(lab.Internal, "10.98.0.1/15"), fx.Pod.Batch(neighbors...), t.Up(),
	); err != nil {
		return err
	}
	fx.ends = append(fx.ends, t.Down)
	return nil
}
