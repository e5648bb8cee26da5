package main

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/lab"
)

// queried is the name in the DNS queries of checks, and dnsCheck such a check.
const (
	queried  = "www.example.org"
	dnsCheck = "dns: {port: 53, name: " + queried + "}"
)

// nameServer answers DNS queries to every address of a target, from that address.
type nameServer struct {
	failing atomic.Bool // every answer is SERVFAIL
	conns   []net.PacketConn
	readers sync.WaitGroup
}

func startNameServer(ns *lab.NetNS) (*nameServer, error) {
	s := &nameServer{}
	listen := net.ListenConfig{Control: freebind}
	for _, network := range []string{"udp4", "udp6"} {
		var conn net.PacketConn
		if err := ns.Do(func() (err error) {
			conn, err = listen.ListenPacket(context.Background(), network, ":53")
			return err
		}); err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.conns = append(s.conns, conn)
		read, err := reader4(conn)
		if network == "udp6" {
			read, err = reader6(conn)
		}
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.readers.Go(func() { s.serve(read) })
	}
	return s, nil
}

// freebind lets a socket send from an IPv6 VIP, which is no address of an interface.
func freebind(network, _ string, conn syscall.RawConn) (err error) {
	if network != "udp6" {
		return nil
	}
	failed := conn.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_FREEBIND, 1)
	})
	return errors.Join(failed, err)
}

// reader receives a query and returns its length and a function that answers it.
type reader func(query []byte) (n int, answer func([]byte) error, err error)

func reader4(conn net.PacketConn) (reader, error) {
	p := ipv4.NewPacketConn(conn)
	return func(query []byte) (int, func([]byte) error, error) {
		n, to, from, err := p.ReadFrom(query)
		return n, func(answer []byte) error {
			_, err := p.WriteTo(answer, &ipv4.ControlMessage{Src: to.Dst}, from)
			return err
		}, err
	}, p.SetControlMessage(ipv4.FlagDst, true)
}

func reader6(conn net.PacketConn) (reader, error) {
	p := ipv6.NewPacketConn(conn)
	return func(query []byte) (int, func([]byte) error, error) {
		n, to, from, err := p.ReadFrom(query)
		return n, func(answer []byte) error {
			_, err := p.WriteTo(answer, &ipv6.ControlMessage{Src: to.Dst}, from)
			return err
		}, err
	}, p.SetControlMessage(ipv6.FlagDst, true)
}

// serve answers queries until the socket is closed. An answer that cannot be sent, such as during a
// fault of the network, is lost like a packet.
func (s *nameServer) serve(read reader) {
	query := make([]byte, 512)
	for {
		n, send, err := read(query)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error about an earlier answer
		}
		if answer, err := s.answer(query[:n]); err == nil {
			_ = send(answer)
		}
	}
}

func (s *nameServer) answer(query []byte) ([]byte, error) {
	var m dnsmessage.Message
	if err := m.Unpack(query); err != nil {
		return nil, err
	}
	m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
	switch {
	case s.failing.Load():
		m.RCode = dnsmessage.RCodeServerFailure
	case len(m.Questions) == 1 && m.Questions[0].Type == dnsmessage.TypeA:
		q := m.Questions[0]
		m.Answers = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class},
			Body:   &dnsmessage.AResource{A: [4]byte{192, 0, 2, 1}},
		}}
	}
	return m.Pack()
}

func (s *nameServer) close() error {
	var errs []error
	for _, conn := range s.conns {
		errs = append(errs, conn.Close())
	}
	s.readers.Wait()
	return errors.Join(errs...)
}

// resolves reports whether a name server answers without an error, as the check of a script does.
func resolves(ctx context.Context, ns *lab.NetNS, server netip.Addr) bool {
	dial := func(ctx context.Context, network, _ string) (conn net.Conn, err error) {
		err = ns.Do(func() error {
			conn, err = new(net.Dialer).DialContext(ctx, network, netip.AddrPortFrom(server, 53).String())
			return err
		})
		return conn, err
	}
	resolver := net.Resolver{PreferGo: true, Dial: dial}
	_, err := resolver.LookupNetIP(ctx, "ip4", queried+".")
	return err == nil
}
