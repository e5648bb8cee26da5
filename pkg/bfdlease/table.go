package bfdlease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// TableName is the name of the nftables table, of family inet.
	TableName = "vipgate-bfd"
	// controlPort is the UDP port of BFD control packets (RFC 5881 section 4).
	controlPort = 3784
)

type content struct {
	gateways []netip.Addr
	attract  Families
	rest     time.Duration // timeout of the elements of attract
	token    token
}

// token is the secret that authorizes a packet to refresh the lease.
type token [16]byte

// inet is the table without its content.
var inet = nft.Table{Family: unix.NFPROTO_INET, Name: TableName}

// Names of the sets.
const attractSet = "attract"

var gatewaySets = [...]string{"gateways4", "gateways6"}

func (content content) description() nft.Table {
	// The elements of the attracting families expire unless refreshRule refreshes them.
	attract := nft.Set{
		Name: attractSet, Flags: unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL, KeyType: nft.TypeFamily, KeyLen: 1,
		Size: 1<<16 - 1, // the kernel gives it a set that rules update
	}
	table := inet
	output := nft.Chain{
		Name: "output", Type: "filter", Hook: unix.NF_INET_LOCAL_OUT, Policy: nft.PolicyAccept,
		Priority: int32(*nftables.ChainPriorityRaw), Rules: []nft.Rule{refreshRule(content.token)},
	}
	for _, family := range vip.Families {
		if content.attract[family] {
			attract.Elements = append(attract.Elements, nft.Element{Key: []byte{protocolOf(family)}, Timeout: content.rest})
		}
		gateways := nft.AddressSet(gatewaySets[family], family, 0)
		for _, address := range content.gateways {
			if vip.FamilyOf(address) == family {
				gateways.Elements = append(gateways.Elements, nft.Element{Key: address.AsSlice()})
			}
		}
		table.Sets = append(table.Sets, gateways)
		output.Rules = append(output.Rules, dropRule(family))
	}
	table.Sets = append(table.Sets, attract)
	table.Chains = []nft.Chain{output}
	return table
}

func protocolOf(family vip.Family) byte {
	if family == vip.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// refreshPort is the destination port of refresh packets: the discard port (RFC 863) of
// localhost. The packets reach no socket.
const refreshPort = 9

// refreshRule returns `ip daddr 127.0.0.1 udp dport 9 @th,64,128 TOKEN update @attract { @th,192,8
// timeout 3s } drop`. Unlike a transaction, a refresh by a packet does not change the generation of
// the ruleset. Each new generation makes source routing and data plane read their tables again.
func refreshRule(secret token) nft.Rule {
	localhost := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	const udpHeader = 8
	return nft.NewRule(inet.Family, "",
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
			SrcRegKey: 1, SetName: attractSet, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: Timeout,
		},
		&expr.Verdict{Kind: expr.VerdictDrop},
	)
}

// refreshTable refreshes the elements of the attracting families. The rule's drop verdict makes
// each write fail with EPERM; any other result means that the rule is missing.
func refreshTable(content content) error {
	conn, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: refreshPort})
	if err != nil {
		return fmt.Errorf("failed to open a socket: %w", err)
	}
	defer conn.Close()
	for _, family := range vip.Families {
		if !content.attract[family] {
			continue
		}
		_, err := conn.Write(append(content.token[:len(content.token):len(content.token)], protocolOf(family)))
		if !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("rule in nftables table inet %s is missing: a packet was not dropped (%w)",
				TableName, cmp.Or(err, errPassed))
		}
	}
	return nil
}

var errPassed = errors.New("it was sent")

// dropRule returns `udp dport 3784 ip daddr @gateways4 meta nfproto != @attract drop`, or IPv6's.
func dropRule(family vip.Family) nft.Rule {
	// Offset and length of the destination address (RFC 791, RFC 8200).
	offset, length := uint32(16), uint32(4)
	if family == vip.IPv6 {
		offset, length = 24, 16
	}
	return nft.NewRule(inet.Family, "",
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocolOf(family)}},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{controlPort >> 8, controlPort & 0xff}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
		&expr.Lookup{SourceRegister: 1, SetName: gatewaySets[family]},
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Lookup{SourceRegister: 1, SetName: attractSet, Invert: true},
		&expr.Verdict{Kind: expr.VerdictDrop},
	)
}

// inKernel calls do with a connection.
func inKernel(do func(*nft.Conn) error) error {
	conn, err := nft.Dial()
	if err != nil {
		return err
	}
	return errors.Join(do(conn), conn.Close())
}

// writeTable replaces the table in one transaction.
func writeTable(content content) error {
	return inKernel(func(conn *nft.Conn) error {
		var transaction nft.Transaction
		transaction.Replace(content.description(), nil)
		return conn.Commit(&transaction, nil)
	})
}

// intact reports whether the table has its content.
func intact(content content) (same bool, err error) {
	err = inKernel(func(conn *nft.Conn) error {
		_, difference, err := conn.Inspect(content.description())
		same = difference == ""
		return err
	})
	return same, err
}

// generation returns the generation ID of the ruleset, which every transaction changes.
func generation() (id uint32, err error) {
	err = inKernel(func(conn *nft.Conn) error {
		id, err = conn.Generation()
		return err
	})
	return id, err
}

// Cleanup removes the table, if it exists, from the network namespace of the calling thread.
func Cleanup(ctx context.Context) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return removeTable()
}

func removeTable() error {
	return inKernel(func(conn *nft.Conn) error {
		_, err := conn.Remove(inet)
		return err
	})
}
