package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// netlinkTimeout bounds every exchange with nftables. A dump of 50 000 elements takes a tenth of it
// on a slow machine.
const netlinkTimeout = 5 * time.Second

// TableName is the name of the nftables table, of family inet.
const TableName = "vipgate"

// Limits of one transaction. The kernel takes it in one sendmsg, which must fit the socket's send
// buffer (212 992 bytes by default, and raising it needs a privilege that a pod in a user namespace
// lacks), and the elements of one message are one attribute of at most 64 KiB. An IPv6 range takes
// 64 bytes.
const (
	spansPerMessage = 500
	spansPerBatch   = 2000
)

// maxReplaced bounds the ranges of a family in the one transaction that replaces the table, the
// others follow: for each element the kernel keeps a message of 4 KiB for listeners until the end
// of the transaction, 80 MiB for 5 000 ranges of both families.
const maxReplaced = 5000

// sendBuffer is asked for when ranges that must be swapped together exceed a batch. 64 MiB hold
// half a million ranges; it costs nothing until it is used.
const sendBuffer = 64 << 20

// table is the nftables table: its desired form and its observed content.
type table struct {
	o   Options
	log *slog.Logger
	nft *nftables.Conn
	// generation reads the generation ID of the kernel's ruleset, elements a set's content; tests
	// replace them.
	generation func() (uint32, error)
	elements   func(*nftables.Set) ([]nftables.SetElement, error)

	// observed is the content of the sets in the ruleset with generationID; nil before the first
	// read and while problem is how the table differs from its desired form.
	observed     *content
	generationID uint32
	problem      string
	// filled are the desired VIPs for which filledWith, the observed content, needs no change.
	filled     *vip.Set
	filledWith *content
	// replaced are the VIPs that replaced a table that could not be read since.
	replaced *vip.Set
}

func newTable(o Options, log *slog.Logger) (*table, error) {
	// The connection is opened for each exchange: nothing of a failed one can be taken for the
	// answer to the next one.
	nft, err := nftables.New(nftables.WithSockOptions(func(c *netlink.Conn) error {
		if err := c.SetDeadline(time.Now().Add(netlinkTimeout)); err != nil {
			return fmt.Errorf("nftables deadline: %w", err)
		}
		// Raising the buffer is a privilege; without it all but the largest swaps fit.
		_ = c.SetWriteBuffer(sendBuffer)
		// An error need not bring the whole request back.
		return errors.Join(c.SetOption(netlink.CapAcknowledge, true), largeDumps(c))
	}))
	if err != nil {
		return nil, fmt.Errorf("failed to open nftables: %w", err)
	}
	return &table{o: o, log: log, nft: nft, generation: generation, elements: nft.GetSetElements}, nil
}

// largeDumps has the kernel fill buffers of 32 KiB in dumps: it goes by the largest buffer that the
// socket received into, and the library begins with a page. Of a set the kernel walks all elements
// again for each buffer, so that the dump of a large one takes an eighth of the time.
func largeDumps(c *netlink.Conn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("nftables socket: %w", err)
	}
	noop := make([]byte, unix.NLMSG_HDRLEN)
	binary.NativeEndian.PutUint32(noop, unix.NLMSG_HDRLEN)
	binary.NativeEndian.PutUint16(noop[4:], unix.NLMSG_NOOP)
	binary.NativeEndian.PutUint16(noop[6:], unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	var sendErr, receiveErr error
	err = raw.Control(func(fd uintptr) {
		if sendErr = unix.Sendto(int(fd), noop, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); sendErr == nil {
			// The kernel has acknowledged before sendto returned.
			_, _, receiveErr = unix.Recvfrom(int(fd), make([]byte, 32<<10), unix.MSG_DONTWAIT)
		}
	})
	if err := errors.Join(err, sendErr, receiveErr); err != nil {
		return fmt.Errorf("nftables socket: %w", err)
	}
	return nil
}

func (t *table) table() *nftables.Table {
	return &nftables.Table{Name: TableName, Family: nftables.TableFamilyINet}
}

func (t *table) set(f vip.Family) *nftables.Set {
	// The number names the set within one transaction.
	s := &nftables.Set{Table: t.table(), ID: uint32(f) + 1, Interval: true, Name: "vip4", KeyType: nftables.TypeIPAddr}
	if f == vip.IPv6 {
		s.Name, s.KeyType = "vip6", nftables.TypeIP6Addr
	}
	return s
}

// chains marks forwarded packets before they are routed, and packets of this host after their first
// route; the type "route" makes the kernel route them again with the mark.
func (t *table) chains() []*nftables.Chain {
	accept := nftables.ChainPolicyAccept
	return []*nftables.Chain{
		{
			Name: "prerouting", Table: t.table(), Policy: &accept, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle,
		},
		{
			Name: "output", Table: t.table(), Policy: &accept, Type: nftables.ChainTypeRoute,
			Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityMangle,
		},
	}
}

// rules returns the two rules of each chain: `ip saddr @vip4 meta mark set meta
// mark & ~mask | mark`, and the same for IPv6.
func (t *table) rules(c *nftables.Chain) []*nftables.Rule {
	native := func(x uint32) []byte { return binary.NativeEndian.AppendUint32(nil, x) }
	var rules []*nftables.Rule
	for _, f := range vip.Families {
		// Where the source address lies in the header (RFC 791, RFC 8200).
		offset, length, proto := uint32(12), uint32(4), byte(unix.NFPROTO_IPV4)
		if f == vip.IPv6 {
			offset, length, proto = 8, 16, unix.NFPROTO_IPV6
		}
		s := t.set(f)
		rules = append(rules, &nftables.Rule{Table: t.table(), Chain: c, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
			&expr.Lookup{SourceRegister: 1, SetName: s.Name, SetID: s.ID},
			&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(^t.o.Mask), Xor: native(t.o.Mark)},
			&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
		}})
	}
	return rules
}

// generation returns the generation ID of the kernel's ruleset, which changes with every
// transaction of any process. An unchanged table need not be read again.
func generation() (id uint32, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("failed to read the generation of the nftables ruleset: %w", err)
		}
	}()
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(netlinkTimeout)); err != nil {
		return 0, err
	}
	msgs, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: netlink.Request},
		Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0},
	})
	if err != nil {
		return 0, err
	}
	for _, m := range msgs {
		ad, err := attributes(m)
		if err != nil {
			return 0, err
		}
		for ad.Next() {
			if ad.Type() == unix.NFTA_GEN_ID {
				return ad.Uint32(), nil
			}
		}
	}
	return 0, errors.New("the reply has none")
}

// attributes decodes those behind the header of a message of nftables.
func attributes(m netlink.Message) (*netlink.AttributeDecoder, error) {
	if len(m.Data) < 4 {
		return nil, errors.New("truncated message")
	}
	ad, err := netlink.NewAttributeDecoder(m.Data[4:])
	if err == nil {
		ad.ByteOrder = binary.BigEndian
	}
	return ad, err
}

// content is the observed content of the sets, while sets and chains have their desired form:
// packets from the addresses in the sets are marked.
type content struct {
	spans   [len(vip.Families)][]span
	covered [len(vip.Families)]coverage
}

// ensure installs the chains and, unless desired is nil, the VIPs' ranges in the sets. It reports
// whether it changed anything, and whether the kernel could not be read. The content that was read
// back at the end, also after a failure, is in observed.
func (t *table) ensure(desired *vip.Set) (changed, unreadable bool, err error) {
	if err := t.read(); err != nil {
		// A table that cannot be read, such as one with a set too large for the deadline, must not
		// prevent the desired content. One attempt for each content is enough.
		if desired == nil || desired == t.replaced {
			return false, true, err
		}
		t.log.Warn("nftables table cannot be read, replacing it", "error", err)
		if err := t.build(desired, true); err != nil {
			return true, true, err
		}
		if err := t.read(); err != nil {
			t.replaced = desired
			return true, true, err
		}
		changed = true
	}
	t.replaced = nil
	for _, replace := range []bool{false, true} {
		if t.observed != nil {
			break
		}
		t.log.Info("nftables table has drifted", "problem", t.problem, "replace", replace)
		if err := t.build(desired, replace); err != nil && (replace || !needsReplacement(err)) {
			return true, false, err
		}
		if err := t.read(); err != nil {
			return true, true, err
		}
		changed = true
	}
	if t.observed == nil {
		return true, false, fmt.Errorf("nftables table inet %s differs after it was written: %s", TableName, t.problem)
	}
	if desired == nil || desired == t.filled && t.observed == t.filledWith {
		return changed, false, nil
	}
	filled := false
	for _, f := range vip.Families {
		modified, fillErr := t.fill(f, disjoint(*desired, f))
		filled, err = filled || modified, errors.Join(err, fillErr)
	}
	if !filled {
		t.filled, t.filledWith = desired, t.observed
		return changed, false, err
	}
	readErr := t.read()
	return true, readErr != nil, errors.Join(err, readErr)
}

// needsReplacement reports whether a transaction failed on an object of another type, which cannot
// be changed in place.
func needsReplacement(err error) bool {
	return errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)
}

// readAttempts bounds how often a read is repeated because another process changed the ruleset.
const readAttempts = 5

// read reads the table unless the ruleset is unchanged. It sets problem when the table differs from
// its desired form.
func (t *table) read() error {
	before, err := t.generation()
	if err != nil {
		return err
	}
	for range readAttempts {
		if t.observed != nil && before == t.generationID {
			return nil
		}
		t.observed = nil
		if t.problem, err = t.inspect(); err != nil {
			return err
		}
		var now content
		for _, f := range vip.Families {
			if t.problem != "" {
				break
			}
			elems, err := t.elements(t.set(f))
			if err != nil {
				return fmt.Errorf("failed to read set %s: %w", t.set(f).Name, err)
			}
			now.spans[f] = spans(elems)
			now.covered[f] = newCoverage(now.spans[f])
		}
		after, err := t.generation()
		if err != nil {
			return err
		}
		if after != before {
			before = after
			continue
		}
		if t.problem == "" {
			t.observed, t.generationID = &now, after
		}
		return nil
	}
	return fmt.Errorf("failed to read nftables table inet %s: the ruleset changed %d times meanwhile",
		TableName, readAttempts)
}

// build writes the table in one transaction, so that no packet leaks meanwhile. Sets of the desired
// form keep their elements; with replace, the table is replaced, ranges of the VIPs included.
func (t *table) build(vips *vip.Set, replace bool) error {
	if replace {
		t.nft.AddTable(t.table())
		t.nft.DelTable(t.table())
	}
	t.nft.AddTable(t.table()) // activates a dormant one
	for _, f := range vip.Families {
		if err := t.nft.AddSet(t.set(f), nil); err != nil {
			return fmt.Errorf("failed to encode set %s: %w", t.set(f).Name, err)
		}
		if !replace || vips == nil {
			continue
		}
		ranges := disjoint(*vips, f)
		if err := t.queue(t.set(f), change{add: ranges[:min(len(ranges), maxReplaced)]}); err != nil {
			return err
		}
	}
	for _, c := range t.chains() {
		t.nft.AddChain(c)
		t.nft.FlushChain(c)
		for _, r := range t.rules(c) {
			t.nft.AddRule(r)
		}
	}
	if err := t.nft.Flush(); err != nil {
		return fmt.Errorf("failed to write nftables table inet %s: %w", TableName, err)
	}
	t.log.Info("nftables table written", "table", "inet "+TableName)
	return nil
}

// fill brings one set from its observed to its desired content. It reports whether it tried to
// change anything.
func (t *table) fill(f vip.Family, want []span) (changed bool, err error) {
	s := t.set(f)
	changes := steps(t.observed.spans[f], want)
	if len(changes) == 0 {
		return false, nil
	}
	added, removed := 0, 0
	for _, c := range changes {
		if err := t.apply(s, c); err != nil {
			// Another process added ranges that deltas cannot express. One transaction for all of
			// the content leaves no gap either.
			t.log.Warn("set could not be changed, replacing its content", "set", s.Name, "error", err)
			t.nft.FlushSet(s)
			if err := t.apply(s, change{add: want}); err != nil {
				return true, err
			}
			break
		}
		added, removed = added+len(c.add), removed+len(c.del)
	}
	t.log.Info("VIP set updated", "set", s.Name, "added", added, "removed", removed, "ranges", len(want))
	return true, nil
}

func (t *table) apply(s *nftables.Set, c change) error {
	if err := t.queue(s, c); err != nil {
		return err
	}
	if err := t.nft.Flush(); err != nil {
		return fmt.Errorf("failed to change set %s by +%d -%d ranges: %w", s.Name, len(c.add), len(c.del), err)
	}
	return nil
}

func (t *table) queue(s *nftables.Set, c change) error {
	var errs []error
	for part := range slices.Chunk(c.del, spansPerMessage) {
		errs = append(errs, t.nft.SetDeleteElements(s, elements(part)))
	}
	for part := range slices.Chunk(c.add, spansPerMessage) {
		errs = append(errs, t.nft.SetAddElements(s, elements(part)))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("failed to encode elements of set %s: %w", s.Name, err)
	}
	return nil
}

func (t *table) remove() error {
	t.nft.DelTable(t.table())
	if err := t.nft.Flush(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("failed to delete nftables table inet %s: %w", TableName, err)
	}
	return nil
}
