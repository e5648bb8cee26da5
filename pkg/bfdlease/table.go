package bfdlease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// TableName is the name of the nftables table, of family inet.
	TableName = "vipgate-bfd"
	// netlinkTimeout bounds every netlink exchange; a normal one takes less than 1 ms.
	netlinkTimeout = time.Second
	// controlPort is the UDP port of BFD control packets (RFC 5881 section 4).
	controlPort = 3784
)

// content is the desired content of the table.
type content struct {
	gateways []netip.Addr
	attract  Families
	rest     time.Duration // timeout of the elements of attract
	token    token
}

// token is the secret that authorizes a packet to refresh the lease.
type token [16]byte

func dial() (*nftables.Conn, error) {
	// The library opens a socket for each exchange, so a late reply cannot be taken for the reply to
	// the next request.
	c, err := nftables.New(nftables.WithSockOptions(func(c *netlink.Conn) error {
		return c.SetDeadline(time.Now().Add(netlinkTimeout))
	}))
	if err != nil {
		return nil, fmt.Errorf("failed to open nftables: %w", err)
	}
	return c, nil
}

func table() *nftables.Table {
	return &nftables.Table{Name: TableName, Family: nftables.TableFamilyINet}
}

// Sets have explicit IDs: without one the library increments an unguarded global counter.

// attractSet holds the attracting families; its elements expire.
func attractSet() *nftables.Set {
	return &nftables.Set{
		Table: table(), ID: 1, Name: "attract", KeyType: nftables.TypeNFProto, HasTimeout: true,
		Dynamic: true, // refreshed by refreshRule
	}
}

// gatewaySet holds the addresses of a family's static gateways.
func gatewaySet(f vip.Family) *nftables.Set {
	if f == vip.IPv6 {
		return &nftables.Set{Table: table(), ID: 3, Name: "gateways6", KeyType: nftables.TypeIP6Addr}
	}
	return &nftables.Set{Table: table(), ID: 2, Name: "gateways4", KeyType: nftables.TypeIPAddr}
}

func protocolOf(f vip.Family) byte {
	if f == vip.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// refreshPort is the destination port of refresh packets: the discard port (RFC 863) of
// localhost. The packets reach no socket.
const refreshPort = 9

// refreshRule returns `ip daddr 127.0.0.1 udp dport 9 @th,64,128 TOKEN update @attract {
// @th,192,8 timeout 3s } drop`. Unlike a transaction, a refresh by a packet does not change the
// generation of the ruleset. Each new generation makes source routing and data plane read their
// tables again.
func refreshRule(c *nftables.Chain, secret token) *nftables.Rule {
	localhost := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	const udpHeader = 8
	return &nftables.Rule{Table: table(), Chain: c, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.NFPROTO_IPV4}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: localhost.AsSlice()},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{0, refreshPort}},
		&expr.Payload{
			DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: udpHeader, Len: uint32(len(secret)),
		},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: secret[:]},
		&expr.Payload{
			DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: udpHeader + uint32(len(secret)), Len: 1,
		},
		&expr.Dynset{
			SrcRegKey: 1, SetID: attractSet().ID, SetName: attractSet().Name,
			Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: Timeout,
		},
		&expr.Verdict{Kind: expr.VerdictDrop},
	}}
}

// refreshTable refreshes the elements of the attracting families. The rule's drop verdict makes
// each write fail with EPERM; any other result means that the rule is missing.
func refreshTable(c content) error {
	conn, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: refreshPort})
	if err != nil {
		return fmt.Errorf("failed to open a socket: %w", err)
	}
	defer conn.Close()
	for _, f := range vip.Families {
		if !c.attract[f] {
			continue
		}
		_, err := conn.Write(append(c.token[:len(c.token):len(c.token)], protocolOf(f)))
		if !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("rule in nftables table inet %s is missing: a packet was not dropped (%w)",
				TableName, cmp.Or(err, errPassed))
		}
	}
	return nil
}

var errPassed = errors.New("it was sent")

// rules returns `udp dport 3784 ip daddr @gateways4 meta nfproto != @attract drop`, and the same
// for IPv6.
func rules(c *nftables.Chain) []*nftables.Rule {
	var list []*nftables.Rule
	for _, f := range vip.Families {
		// Offset and length of the destination address (RFC 791, RFC 8200).
		offset, length := uint32(16), uint32(4)
		if f == vip.IPv6 {
			offset, length = 24, 16
		}
		list = append(list, &nftables.Rule{Table: table(), Chain: c, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocolOf(f)}},
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{controlPort >> 8, controlPort & 0xff}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
			&expr.Lookup{SourceRegister: 1, SetName: gatewaySet(f).Name},
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
			&expr.Lookup{SourceRegister: 1, SetName: attractSet().Name, Invert: true},
			&expr.Verdict{Kind: expr.VerdictDrop},
		}})
	}
	return list
}

// writeTable writes the table in one transaction. If the existing table has incompatible objects,
// a second transaction replaces it.
func writeTable(c content) error {
	err := write(c, false)
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		err = write(c, true)
	}
	if err != nil {
		return fmt.Errorf("failed to write nftables table inet %s: %w", TableName, err)
	}
	return nil
}

func write(c content, replace bool) error {
	nft, err := dial()
	if err != nil {
		return err
	}
	if replace {
		nft.AddTable(table())
		nft.DelTable(table())
	}
	nft.AddTable(table()) // activates a dormant table
	elements := [len(vip.Families)][]nftables.SetElement{}
	for _, a := range c.gateways {
		elements[vip.FamilyOf(a)] = append(elements[vip.FamilyOf(a)], nftables.SetElement{Key: a.AsSlice()})
	}
	var attract []nftables.SetElement
	for _, f := range vip.Families {
		if c.attract[f] {
			attract = append(attract, nftables.SetElement{Key: []byte{protocolOf(f)}, Timeout: c.rest})
		}
	}
	var errs []error
	put := func(s *nftables.Set, elements []nftables.SetElement) {
		errs = append(errs, nft.AddSet(s, nil))
		// The kernel does not change the timeout of an existing element.
		nft.FlushSet(s)
		if len(elements) > 0 {
			errs = append(errs, nft.SetAddElements(s, elements))
		}
	}
	put(attractSet(), attract)
	for _, f := range vip.Families {
		put(gatewaySet(f), elements[f])
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("failed to encode the sets: %w", err)
	}
	accept := nftables.ChainPolicyAccept
	chain := &nftables.Chain{
		Name: "output", Table: table(), Policy: &accept, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityRaw,
	}
	nft.AddChain(chain)
	nft.FlushChain(chain)
	nft.AddRule(refreshRule(chain, c.token))
	for _, r := range rules(chain) {
		nft.AddRule(r)
	}
	return nft.Flush()
}

// generation returns the generation ID of the ruleset, which every transaction changes.
func generation() (uint32, error) {
	s, err := nlmsg.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return 0, err
	}
	g, err := s.Generation()
	return g, errors.Join(err, s.Close())
}

// Cleanup removes the table, if it exists, from the network namespace of the calling thread.
func Cleanup(ctx context.Context) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return removeTable()
}

func removeTable() error {
	nft, err := dial()
	if err != nil {
		return err
	}
	nft.DelTable(table())
	if err := nft.Flush(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("failed to delete nftables table inet %s: %w", TableName, err)
	}
	return nil
}
