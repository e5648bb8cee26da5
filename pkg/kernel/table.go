package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"reflect"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
)

// netlinkTimeout bounds every exchange. A slow dump of 50 000 elements takes a tenth of it.
const netlinkTimeout = 5 * time.Second

// TableName is the name of the nftables table, of family inet.
const TableName = "vipgate"

// Limits of one transaction; an IPv6 range takes 64 bytes.
const (
	// spansPerMessage fit one attribute of at most 64 KiB.
	spansPerMessage = 500
	// spansPerBatch fit one sendmsg within the default send buffer, 212 992 bytes: a pod in a user
	// namespace cannot raise it.
	spansPerBatch = 2000
	// sendBuffer has space for half a million ranges that must be swapped in one transaction. An
	// unused buffer takes no memory.
	sendBuffer = 64 << 20
	// maxReplaced is the number of ranges per family in the transaction that replaces the table;
	// later transactions add the remaining ranges. For each element the kernel keeps a message of 4
	// KiB until the end of the transaction, 80 MiB for both families.
	maxReplaced = 5000
	// readAttempts bounds how often a read is repeated because another process changed the ruleset.
	readAttempts = 5
)

// table is the nftables table: its desired form and its observed content.
type table struct {
	o   Options
	nft *nftables.Conn
	// generation reads the generation ID of the ruleset, and elements reads a set; tests replace
	// them.
	generation func() (uint32, error)
	elements   func(*nftables.Set) ([]nftables.SetElement, error)

	// observed is the content of the sets at generationID. It is nil before the first read and while
	// the table differs from its desired form; problem describes the difference.
	observed     *content
	generationID uint32
	problem      string
	// filled is the desired set for which the observed content needs no change.
	filled *vip.Set
	// replaced is the desired set that was written in place of an unreadable table; nil after a
	// successful read.
	replaced *vip.Set
}

func newTable(o Options) (*table, error) {
	// The library opens a socket for each exchange, so a late reply cannot be taken for the reply to
	// the next request.
	nft, err := nftables.New(nftables.WithSockOptions(func(c *netlink.Conn) error {
		// Raising the buffer requires a privilege; without it all but the largest swaps fit.
		_ = c.SetWriteBuffer(sendBuffer)
		err := errors.Join(
			c.SetDeadline(time.Now().Add(netlinkTimeout)),
			c.SetOption(netlink.CapAcknowledge, true), // error replies need not contain the request
			largeDumps(c),
		)
		if err != nil {
			return fmt.Errorf("failed to configure nftables socket: %w", err)
		}
		return nil
	}))
	if err != nil {
		return nil, fmt.Errorf("failed to open nftables: %w", err)
	}
	return &table{o: o, nft: nft, generation: generation, elements: nft.GetSetElements}, nil
}

// largeDumps makes the kernel send dumps in messages of 32 KiB: the kernel uses the size of the
// largest buffer that the socket has received into. Since the kernel walks the set from the start
// for each message, the dump of a large set takes an eighth of the time.
func largeDumps(c *netlink.Conn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	noop, err := binary.Append(nil, binary.NativeEndian, unix.NlMsghdr{
		Len: unix.SizeofNlMsghdr, Type: unix.NLMSG_NOOP, Flags: unix.NLM_F_REQUEST | unix.NLM_F_ACK,
	})
	controlErr := raw.Control(func(fd uintptr) {
		if err = unix.Sendto(int(fd), noop, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err == nil {
			// The kernel queues the acknowledgment before sendto returns.
			_, _, err = unix.Recvfrom(int(fd), make([]byte, 32<<10), unix.MSG_DONTWAIT)
		}
	})
	return errors.Join(controlErr, err)
}

func (t *table) table() *nftables.Table {
	return &nftables.Table{Name: TableName, Family: nftables.TableFamilyINet}
}

func (t *table) set(f vip.Family) *nftables.Set {
	// Without an ID the library increments an unguarded global counter.
	s := &nftables.Set{Table: t.table(), ID: uint32(f) + 1, Interval: true, Name: "vip4", KeyType: nftables.TypeIPAddr}
	if f == vip.IPv6 {
		s.Name, s.KeyType = "vip6", nftables.TypeIP6Addr
	}
	return s
}

// chains returns the chains with the marking rules. Prerouting marks forwarded packets before the
// route lookup. Output marks local packets after their first lookup; its type "route" makes the
// kernel repeat the lookup with the mark.
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

// rules returns `ip saddr @vip4 meta mark set meta mark & ~mask | mark`, and the same for IPv6.
func (t *table) rules(c *nftables.Chain) []*nftables.Rule {
	native := func(x uint32) []byte { return binary.NativeEndian.AppendUint32(nil, x) }
	var rules []*nftables.Rule
	for _, f := range vip.Families {
		// Offset and length of the source address (RFC 791, RFC 8200).
		offset, length, proto := uint32(12), uint32(4), byte(unix.NFPROTO_IPV4)
		if f == vip.IPv6 {
			offset, length, proto = 8, 16, unix.NFPROTO_IPV6
		}
		rules = append(rules, &nftables.Rule{Table: t.table(), Chain: c, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
			&expr.Lookup{SourceRegister: 1, SetName: t.set(f).Name},
			&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(^t.o.Mask), Xor: native(t.o.Mark)},
			&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
		}})
	}
	return rules
}

// generation returns the generation ID of the ruleset. While it is unchanged, the table need not
// be read again.
func generation() (uint32, error) {
	s, err := nlmsg.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return 0, err
	}
	defer s.Close()
	return s.Generation()
}

// content holds the ranges in the sets of a table whose sets and chains have their desired form.
type content [len(vip.Families)][]span

// ensure installs the chains and, unless desired is nil, the VIPs' ranges in the sets. It reports
// whether it changed the table and whether the table could not be read. After a change, also a
// failed one, it reads the table back into observed.
func (t *table) ensure(desired *vip.Set) (changed, unreadable bool, err error) {
	if err := t.read(); err != nil {
		// An unreadable table, such as one with a set too large for the deadline, must not prevent the
		// installation of the desired content. It is replaced once per desired set.
		if desired == nil || desired == t.replaced {
			return false, true, err
		}
		t.o.Log.Warn("nftables table cannot be read, replacing it", "error", err)
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
		t.o.Log.Info("nftables table has drifted", "problem", t.problem, "replace", replace)
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
	if desired == nil || desired == t.filled {
		return changed, false, nil
	}
	filled := false
	for _, f := range vip.Families {
		modified, fillErr := t.fill(f, disjoint(*desired, f))
		filled, err = filled || modified, errors.Join(err, fillErr)
	}
	if !filled {
		t.filled = desired
		return changed, false, err
	}
	readErr := t.read()
	return true, readErr != nil, errors.Join(err, readErr)
}

// needsReplacement reports whether a transaction failed because an existing object is
// incompatible.
func needsReplacement(err error) bool {
	return errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)
}

// read reads the table unless the ruleset is unchanged. It sets problem when the table differs
// from its desired form.
func (t *table) read() error {
	before, err := t.generation()
	if err != nil || t.observed != nil && before == t.generationID {
		return err
	}
	t.observed, t.filled = nil, nil
	for range readAttempts {
		observed, problem, err := t.inspect()
		if err != nil {
			return err
		}
		after, err := t.generation()
		if err != nil {
			return err
		}
		if after == before {
			t.observed, t.problem, t.generationID = observed, problem, after
			return nil
		}
		before = after
	}
	return fmt.Errorf("failed to read nftables table inet %s: the ruleset changed %d times meanwhile",
		TableName, readAttempts)
}

// inspect returns the content of the sets, or a description of the first difference of table,
// chains or sets from their desired form.
func (t *table) inspect() (observed *content, problem string, err error) {
	table, err := t.nft.ListTableOfFamily(TableName, nftables.TableFamilyINet)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, "the table is missing", nil
	case err != nil:
		return nil, "", fmt.Errorf("failed to read nftables table inet %s: %w", TableName, err)
	case table.Flags != 0:
		return nil, fmt.Sprintf("the table has flags %#x (1: dormant)", table.Flags), nil
	}
	chains, err := t.nft.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, "", fmt.Errorf("failed to list chains: %w", err)
	}
	for _, want := range t.chains() {
		i := slices.IndexFunc(chains, func(c *nftables.Chain) bool {
			return c.Table.Name == TableName && c.Name == want.Name
		})
		if i < 0 {
			return nil, "chain " + want.Name + " is missing", nil
		}
		got := *chains[i]
		if got.Table = want.Table; !reflect.DeepEqual(&got, want) {
			return nil, "chain " + want.Name + " has another type", nil
		}
		rules, err := t.nft.GetRules(want.Table, want)
		if err != nil {
			return nil, "", fmt.Errorf("failed to read the rules of chain %s: %w", want.Name, err)
		}
		if !slices.EqualFunc(rules, t.rules(want), func(g, w *nftables.Rule) bool {
			return reflect.DeepEqual(g.Exprs, w.Exprs)
		}) {
			return nil, "chain " + want.Name + " has other rules", nil
		}
	}
	observed = new(content)
	for _, f := range vip.Families {
		want := t.set(f)
		got, err := t.nft.GetSetByName(want.Table, want.Name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, "set " + want.Name + " is missing", nil
		case err != nil:
			return nil, "", fmt.Errorf("failed to read set %s: %w", want.Name, err)
		case !got.Interval || got.KeyType.Bytes != want.KeyType.Bytes || got.IsMap || got.Constant ||
			got.HasTimeout || got.Dynamic || got.Concatenation:
			return nil, "set " + want.Name + " has another type", nil
		}
		elems, err := t.elements(want)
		if err != nil {
			return nil, "", fmt.Errorf("failed to read set %s: %w", want.Name, err)
		}
		observed[f] = spans(elems)
	}
	return observed, "", nil
}

// build writes the table in one transaction, so that no packet passes without its mark. Sets of
// the desired form keep their elements. With replace, build replaces the table, including the
// VIPs' ranges.
func (t *table) build(vips *vip.Set, replace bool) error {
	if replace {
		t.nft.AddTable(t.table())
		t.nft.DelTable(t.table())
	}
	t.nft.AddTable(t.table()) // activates a dormant table
	for _, f := range vip.Families {
		s := t.set(f)
		err := t.nft.AddSet(s, nil)
		if replace && vips != nil {
			ranges := disjoint(*vips, f)
			err = errors.Join(err, t.queue(s, change{add: ranges[:min(len(ranges), maxReplaced)]}))
		}
		if err != nil {
			return fmt.Errorf("failed to encode set %s: %w", s.Name, err)
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
	t.o.Log.Info("nftables table written", "table", "inet "+TableName)
	return nil
}

// fill brings one set to its desired content. It reports whether it tried to change the set.
func (t *table) fill(f vip.Family, want []span) (changed bool, err error) {
	s := t.set(f)
	changes := steps(t.observed[f], want)
	if len(changes) == 0 {
		return false, nil
	}
	added, removed := 0, 0
	for _, c := range changes {
		if err := t.apply(s, c); err != nil {
			// Another process added ranges that conflict with the computed change. Replace the whole
			// content in one transaction, which leaves no gap either.
			t.o.Log.Warn("set could not be changed, replacing its content", "set", s.Name, "error", err)
			t.nft.FlushSet(s)
			if err := t.apply(s, change{add: want}); err != nil {
				return true, err
			}
			break
		}
		added, removed = added+len(c.add), removed+len(c.del)
	}
	t.o.Log.Info("VIP set updated", "set", s.Name, "added", added, "removed", removed, "ranges", len(want))
	return true, nil
}

func (t *table) apply(s *nftables.Set, c change) error {
	err := t.queue(s, c)
	if err == nil {
		err = t.nft.Flush()
	}
	if err != nil {
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
	return errors.Join(errs...)
}

func (t *table) remove() error {
	t.nft.DelTable(t.table())
	if err := t.nft.Flush(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("failed to delete nftables table inet %s: %w", TableName, err)
	}
	return nil
}
