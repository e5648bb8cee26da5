package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// kindsRatioGoal bounds the cost of a check over UDP, compared with one of TCP.
const kindsRatioGoal = "max ≤ 1.5"

// checksOf begins the names of the measurements of row 14 that compare checks.
const checksOf = "targets checked each second, "

// measureCheckKinds is the third part of row 14: the same targets checked over TCP, UDP and DNS, in
// turn, by one lb.
func measureCheckKinds(ctx context.Context, s *session) error {
	n := s.sizes([]int{1000}, []int{200})[0]
	return on(ctx, s, n/targetsPerStream, oneFamily, func(fx *fixture) error {
		if err := errors.Join(fx.startTargets(), fx.startEcho()); err != nil {
			return err
		}
		tcp := fmt.Sprintf("tcp: {port: %d}", checkPort)
		share := func(check string) (float64, error) {
			if err := fx.pod.WriteTrench(strings.ReplaceAll(fx.targetsTrench(), tcp, check)); err != nil {
				return 0, err
			}
			if fx.pod.LB == nil {
				if err := fx.pod.StartLB(); err != nil {
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
		shares, ratios := map[string]*Measurement{}, map[string]*Measurement{}
		kinds := []struct{ name, check string }{
			{"TCP", tcp},
			{"UDP", fmt.Sprintf("udp: {port: %d, send: ping-of-16-bytes}", checkPort)},
			{"DNS", fmt.Sprintf("dns: {port: %d, name: www.example.org}", checkPort)},
		}
		for _, kind := range kinds {
			shares[kind.name] = &Measurement{
				Row: 14, What: checksOf + kind.name + ": share of one core", Method: vipgate, N: n,
				Unit: "%",
			}
			ratios[kind.name] = &Measurement{
				Row: 14, What: checksOf + kind.name + ": to TCP", Method: vipgate, N: n, Unit: "×",
				Goal: kindsRatioGoal,
			}
		}
		for range s.repeats(5, 1) {
			var first float64
			for i, kind := range kinds {
				took, err := share(kind.check)
				if err != nil {
					return err
				}
				shares[kind.name].Samples = append(shares[kind.name].Samples, took)
				if i == 0 {
					first = took
				}
				ratios[kind.name].Samples = append(ratios[kind.name].Samples, took/first)
			}
		}
		for i, kind := range kinds {
			s.record(*shares[kind.name])
			if i > 0 {
				s.record(*ratios[kind.name])
			}
		}
		_, err := fx.endAll(fx.pod.LB)
		return err
	})
}

// startEcho returns each datagram to the targets, from the address that received it, with the bit
// that makes a DNS query a response.
func (fx *fixture) startEcho() error {
	var conn *net.UDPConn
	if err := fx.Backend.Do(func() (err error) {
		any4 := netip.AddrPortFrom(netip.IPv4Unspecified(), checkPort)
		if conn, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(any4)); err != nil {
			return err
		}
		raw, err := conn.SyscallConn()
		if err != nil {
			return err
		}
		errControl := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
		})
		return errors.Join(err, errControl)
	}); err != nil {
		return fmt.Errorf("echo of row 14: %w", err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		var packet, control [512]byte
		for {
			length, controlLength, _, from, err := conn.ReadMsgUDPAddrPort(packet[:], control[:])
			if err != nil {
				return
			}
			if length > 2 {
				packet[2] |= 0x80
			}
			_, _, _ = conn.WriteMsgUDPAddrPort(packet[:length], control[:controlLength], from)
		}
	}()
	fx.ends = append(fx.ends, func() error {
		err := conn.Close()
		<-done
		return err
	})
	return nil
}
