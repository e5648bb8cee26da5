package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"reflect"
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

// TableName is the name of our nftables table, of family inet.
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

// table is our nftables table: what it must be, and what the kernel has.
type table struct {
	o   Options
	log *slog.Logger
	nft *nftables.Conn
	// generation reads the number of the kernel's ruleset, elements a set's content; tests replace
	// them.
	generation func() (uint32, error)
	elements   func(*nftables.Set) ([]nftables.SetElement, error)

	// seen is the content of the kernel while its ruleset has the number generation; nil before the
	// first look and when problem says what is not as it must be.
	seen    *content
	number  uint32
	problem string
	// filled are the VIPs to which filledWith was found to need no change.
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
		return nil, fmt.Errorf("open nftables: %w", err)
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
	s := &nftables.Set{Table: t.table(), ID: uint32(f) + 1, Interval: true}
	if f == vip.IPv4 {
		s.Name, s.KeyType = "vip4", nftables.TypeIPAddr
	} else {
		s.Name, s.KeyType = "vip6", nftables.TypeIP6Addr
	}
	return s
}

// chains marks forwarded packets before they are routed, and packets of this host after their first
// route; the type "route" makes the kernel route them again with the mark.
func (t *table) chains() []*nftables.Chain {
	accept := nftables.ChainPolicyAccept
	return []*nftables.Chain{
		{Name: "prerouting", Table: t.table(), Policy: &accept, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle},
		{Name: "output", Table: t.table(), Policy: &accept, Type: nftables.ChainTypeRoute, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityMangle},
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

// generation returns the number of the kernel's ruleset, which changes with every transaction of
// anybody. It is cheap, so that an unchanged table need not be read again.
func generation() (uint32, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return 0, fmt.Errorf("open nfnetlink: %w", err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(netlinkTimeout)); err != nil {
		return 0, fmt.Errorf("nfnetlink deadline: %w", err)
	}
	msgs, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: netlink.Request},
		Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0},
	})
	if err != nil {
		return 0, fmt.Errorf("read the ruleset's generation: %w", err)
	}
	for _, m := range msgs {
		if len(m.Data) < 4 {
			continue
		}
		ad, err := netlink.NewAttributeDecoder(m.Data[4:])
		if err != nil {
			return 0, fmt.Errorf("read the ruleset's generation: %w", err)
		}
		ad.ByteOrder = binary.BigEndian
		for ad.Next() {
			if ad.Type() == unix.NFTA_GEN_ID {
				return ad.Uint32(), nil
			}
		}
	}
	return 0, errors.New("read the ruleset's generation: the kernel does not tell it")
}

// content is what the kernel was seen to have. Sets and chains were as they must be, so that
// packets from the addresses in the sets are marked.
type content struct {
	spans   [len(vip.Families)][]span
	covered [len(vip.Families)]coverage
}

// ensure makes the chains stand and, unless wanted is nil, the sets hold exactly the VIPs' ranges.
// It tells whether it had to change something. What was read back at the end, also when not all of
// that was possible, is in seen. blind tells that the kernel could not be read.
func (t *table) ensure(wanted *vip.Set) (changed, blind bool, err error) {
	if err := t.read(); err != nil {
		// What cannot be read, such as a set too large for the deadline, must not keep the wanted
		// content out. Once per content is enough while that helps nothing.
		if wanted == nil || wanted == t.replaced {
			return false, true, err
		}
		t.log.Warn("nftables table cannot be read, replacing it", "error", err)
		if err := t.build(wanted, true); err != nil {
			return true, true, err
		}
		if err := t.read(); err != nil {
			t.replaced = wanted
			return true, true, err
		}
		changed = true
	}
	t.replaced = nil
	var errs []error
	if t.seen == nil {
		t.log.Info("nftables table does not stand", "problem", t.problem)
		changed = true
		errs = append(errs, t.build(wanted, false))
		if err := t.read(); err != nil {
			return changed, true, errors.Join(append(errs, err)...)
		}
	}
	if t.seen == nil {
		errs = append(errs, fmt.Errorf("nftables table inet %s does not stand: %s", TableName, t.problem))
		return changed, false, errors.Join(errs...)
	}
	if wanted == nil || wanted == t.filled && t.seen == t.filledWith {
		return changed, false, errors.Join(errs...)
	}
	filled := false
	for _, f := range vip.Families {
		did, err := t.fill(f, disjoint(*wanted, f))
		filled = filled || did
		errs = append(errs, err)
	}
	if !filled {
		t.filled, t.filledWith = wanted, t.seen
		return changed, false, errors.Join(errs...)
	}
	if err := t.read(); err != nil {
		return true, true, errors.Join(append(errs, err)...)
	}
	return true, false, errors.Join(errs...)
}

// readAttempts bounds how often a look is repeated because somebody changed the ruleset meanwhile.
const readAttempts = 5

// read looks at the kernel unless the ruleset is the one seen last. It leaves the reason in problem
// when something is not as it must be.
func (t *table) read() error {
	before, err := t.generation()
	if err != nil {
		return err
	}
	for range readAttempts {
		if t.seen != nil && before == t.number {
			return nil
		}
		t.seen = nil
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
				return fmt.Errorf("read set %s: %w", t.set(f).Name, err)
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
			t.seen, t.number = &now, after
		}
		return nil
	}
	return fmt.Errorf("read nftables table inet %s: the ruleset changed %d times meanwhile", TableName, readAttempts)
}

// inspect tells what is wrong with table, sets, chains and rules; "" is nothing.
func (t *table) inspect() (string, error) {
	got, err := t.nft.ListTableOfFamily(TableName, nftables.TableFamilyINet)
	if errors.Is(err, fs.ErrNotExist) {
		return "the table is missing", nil
	}
	if err != nil {
		return "", fmt.Errorf("read nftables table inet %s: %w", TableName, err)
	}
	if got.Flags != 0 {
		return fmt.Sprintf("the table has flags %#x (1: dormant)", got.Flags), nil
	}
	for _, f := range vip.Families {
		problem, err := t.inspectSet(t.set(f))
		if problem != "" || err != nil {
			return problem, err
		}
	}
	for _, c := range t.chains() {
		problem, err := t.inspectChain(c)
		if problem != "" || err != nil {
			return problem, err
		}
	}
	return "", nil
}

func (t *table) inspectSet(want *nftables.Set) (string, error) {
	got, err := t.nft.GetSetByName(want.Table, want.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return "set " + want.Name + " is missing", nil
	}
	if err != nil {
		return "", fmt.Errorf("read set %s: %w", want.Name, err)
	}
	if !got.Interval || got.KeyType.Bytes != want.KeyType.Bytes || got.IsMap || got.Constant || got.HasTimeout || got.Dynamic || got.Concatenation {
		return "set " + want.Name + " is of another kind", nil
	}
	return "", nil
}

func (t *table) inspectChain(want *nftables.Chain) (string, error) {
	got, err := t.findChain(want.Name)
	if err != nil {
		return "", err
	}
	if got == nil {
		return "chain " + want.Name + " is missing", nil
	}
	if !sameHook(got, want) || got.Policy == nil || *got.Policy != *want.Policy {
		return "chain " + want.Name + " is of another kind", nil
	}
	rules, err := t.nft.GetRules(want.Table, want)
	if err != nil {
		return "", fmt.Errorf("read the rules of chain %s: %w", want.Name, err)
	}
	if !slices.EqualFunc(rules, t.rules(want), sameRule) {
		return "the rules of chain " + want.Name + " are others", nil
	}
	return "", nil
}

// findChain returns our chain of that name, or nil.
func (t *table) findChain(name string) (*nftables.Chain, error) {
	chains, err := t.nft.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("list chains: %w", err)
	}
	for _, c := range chains {
		if c.Table.Name == TableName && c.Name == name {
			return c, nil
		}
	}
	return nil, nil
}

// sameHook tells whether two base chains are called at the same place.
func sameHook(got, want *nftables.Chain) bool {
	return got.Type == want.Type && got.Hooknum != nil && *got.Hooknum == *want.Hooknum && got.Priority != nil && *got.Priority == *want.Priority
}

func sameRule(got, want *nftables.Rule) bool {
	return slices.EqualFunc(got.Exprs, want.Exprs, func(g, w expr.Any) bool {
		if l, ok := w.(*expr.Lookup); ok {
			// The kernel does not keep the number that named the set in the transaction.
			l.SetID = 0
		}
		return reflect.DeepEqual(g, w)
	})
}

// build writes the table in one transaction. Sets that are as they must be keep their elements;
// with replace, or when something cannot be changed in place, the table is replaced together with
// the ranges of the VIPs. So no packet leaks meanwhile.
func (t *table) build(vips *vip.Set, replace bool) error {
	if !replace {
		var err error
		if replace, err = t.mustRebuild(); err != nil {
			return err
		}
	}
	if replace {
		t.nft.AddTable(t.table())
		t.nft.DelTable(t.table())
	}
	t.nft.AddTable(t.table()) // wakes a dormant one
	for _, f := range vip.Families {
		if err := t.nft.AddSet(t.set(f), nil); err != nil {
			return fmt.Errorf("describe set %s: %w", t.set(f).Name, err)
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
		return fmt.Errorf("write nftables table inet %s: %w", TableName, err)
	}
	t.log.Info("nftables table written", "table", "inet "+TableName)
	return nil
}

// mustRebuild tells whether something of the table has a kind that cannot be changed in place.
func (t *table) mustRebuild() (bool, error) {
	for _, f := range vip.Families {
		want := t.set(f)
		problem, err := t.inspectSet(want)
		if err != nil {
			return false, err
		}
		if problem == "" {
			continue
		}
		if _, err := t.nft.GetSetByName(want.Table, want.Name); err == nil {
			return true, nil
		}
	}
	for _, want := range t.chains() {
		got, err := t.findChain(want.Name)
		if err != nil {
			return false, err
		}
		if got != nil && !sameHook(got, want) {
			return true, nil
		}
	}
	return false, nil
}

// fill brings one set from what it has to what it should have. It tells whether it tried to change
// anything.
func (t *table) fill(f vip.Family, want []span) (changed bool, err error) {
	s := t.set(f)
	changes := steps(t.seen.spans[f], want)
	if len(changes) == 0 {
		return false, nil
	}
	added, removed := 0, 0
	for _, c := range changes {
		if err := t.apply(s, c); err != nil {
			// Somebody put in what our deltas cannot express. One transaction for all leaves no gap
			// either.
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

// steps returns the transactions that lead from have to want: new ranges first, then ranges that
// must be swapped since they overlap, leftovers last.
func steps(have, want []span) []change {
	add, swaps, del := diff(have, want)
	var out []change
	for part := range slices.Chunk(add, spansPerBatch) {
		out = append(out, change{add: part})
	}
	out = append(out, swaps...)
	for part := range slices.Chunk(del, spansPerBatch) {
		out = append(out, change{del: part})
	}
	return out
}

// apply does one change of a set in one transaction.
func (t *table) apply(s *nftables.Set, c change) error {
	if err := t.queue(s, c); err != nil {
		return err
	}
	if err := t.nft.Flush(); err != nil {
		return fmt.Errorf("change set %s by +%d -%d ranges: %w", s.Name, len(c.add), len(c.del), err)
	}
	return nil
}

// queue puts a change of a set into the next transaction.
func (t *table) queue(s *nftables.Set, c change) error {
	for part := range slices.Chunk(c.del, spansPerMessage) {
		if err := t.nft.SetDeleteElements(s, elements(part)); err != nil {
			return fmt.Errorf("describe elements of set %s: %w", s.Name, err)
		}
	}
	for part := range slices.Chunk(c.add, spansPerMessage) {
		if err := t.nft.SetAddElements(s, elements(part)); err != nil {
			return fmt.Errorf("describe elements of set %s: %w", s.Name, err)
		}
	}
	return nil
}

// remove removes the table with all that is in it.
func (t *table) remove() error {
	t.nft.DelTable(t.table())
	if err := t.nft.Flush(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete nftables table inet %s: %w", TableName, err)
	}
	return nil
}
