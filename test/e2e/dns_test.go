package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// nameServer is a DNS server at 127.0.0.1:53 in a network namespace.
type nameServer struct {
	t    *testing.T
	ns   *lab.NetNS
	name string // of all its records

	mu      sync.Mutex
	answers []netip.Addr
	conn    net.PacketConn // nil if it is down
	done    chan struct{}
}

func newNameServer(t *testing.T, ns *lab.NetNS, name string) *nameServer {
	t.Helper()
	s := &nameServer{t: t, ns: ns, name: name + "."}
	s.start()
	t.Cleanup(func() {
		if s.conn != nil {
			s.stop()
		}
	})
	return s
}

// set sets the addresses of the name.
func (s *nameServer) set(ips ...netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers = ips
}

func (s *nameServer) start() {
	s.t.Helper()
	harness.Must(s.t, s.ns.Do(func() (err error) {
		s.conn, err = net.ListenPacket("udp", "127.0.0.1:53")
		return err
	}))
	s.done = make(chan struct{})
	go s.serve(s.conn, s.done)
}

// stop closes the socket, so that the kernel refuses further queries.
func (s *nameServer) stop() {
	s.t.Helper()
	harness.Check(s.t, s.conn.Close())
	<-s.done
	s.conn = nil
}

func (s *nameServer) serve(conn net.PacketConn, done chan<- struct{}) {
	defer close(done)
	query := make([]byte, 512)
	for {
		n, from, err := conn.ReadFrom(query)
		if err != nil {
			return // closed
		}
		answer, err := s.answer(query[:n])
		if err == nil {
			_, err = conn.WriteTo(answer, from)
		}
		if err != nil {
			s.t.Errorf("DNS server: %v", err)
		}
	}
}

// answer returns the addresses of the name for the query type, and NXDOMAIN for any other name.
func (s *nameServer) answer(query []byte) ([]byte, error) {
	var q dnsmessage.Message
	if err := q.Unpack(query); err != nil || len(q.Questions) != 1 {
		return nil, fmt.Errorf("query with %d questions: %w", len(q.Questions), err)
	}
	question := q.Questions[0]
	a := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: q.ID, Response: true, Authoritative: true, RecursionDesired: q.RecursionDesired},
		Questions: q.Questions,
	}
	head := dnsmessage.ResourceHeader{Name: question.Name, Type: question.Type, Class: question.Class}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !strings.EqualFold(question.Name.String(), s.name) {
		a.RCode = dnsmessage.RCodeNameError
		return a.Pack()
	}
	for _, ip := range s.answers {
		switch {
		case question.Type == dnsmessage.TypeA && ip.Is4():
			a.Answers = append(a.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AResource{A: ip.As4()}})
		case question.Type == dnsmessage.TypeAAAA && ip.Is6():
			a.Answers = append(a.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AAAAResource{AAAA: ip.As16()}})
		}
	}
	return a.Pack()
}
