package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
)

// TableName is the name of the nftables table, of family inet.
const TableName = "vipgate"

// inet is the table without its content.
var inet = nft.Table{Family: unix.NFPROTO_INET, Name: TableName}

const (
	// spansPerBatch fit one sendmsg within the default send buffer, 212 992 bytes: a pod in a user
	// namespace cannot raise it. An IPv6 range takes 64 bytes.
	spansPerBatch = 2000
	// maxReplaced is the number of ranges in the transaction that replaces the content of a set;
	// later transactions add the remaining ranges. For each element the kernel keeps a message of 4
	// KiB until the end of the transaction, 40 MiB.
	maxReplaced = 5000
	// readAttempts bounds how often a read is repeated because another process changed the ruleset.
	readAttempts = 5
)

// table is the nftables table: its desired form and its observed content.
type table struct {
	o    Options
	form nft.Table
	// generation reads the generation ID of the ruleset, and ranges reads a set; tests replace them.
	generation func(*nft.Conn) (uint32, error)
	ranges     func(*nft.Conn, vip.Family) ([]nft.Range, error)

	// observed is the sets' content at generationID; nil before the first read and after a failed one.
	observed     *content
	generationID uint32
	// filled is the desired set for which the observed content needs no change.
	filled *vip.Set
	// replaced is the desired set written in place of an unreadable one; nil after a successful read.
	replaced *vip.Set
}

var setNames = [...]string{"vip4", "vip6"}

func newTable(options Options) *table {
	table := &table{o: options, form: inet, generation: (*nft.Conn).Generation, ranges: readRanges}
	var rules []nft.Rule
	for _, family := range vip.Families {
		set := nft.AddressSet(setNames[family], family, unix.NFT_SET_INTERVAL)
		set.Volatile = true
		table.form.Sets = append(table.form.Sets, set)
		rules = append(rules, options.rule(family))
	}
	// Prerouting marks forwarded packets before the route lookup. Output marks local packets after
	// their first lookup; its type "route" makes the kernel repeat the lookup with the mark.
	prerouting := nft.Chain{
		Name: "prerouting", Type: "filter", Hook: unix.NF_INET_PRE_ROUTING, Policy: nft.PolicyAccept, Rules: rules,
		Priority: int32(*nftables.ChainPriorityMangle),
	}
	output := prerouting
	output.Name, output.Type, output.Hook = "output", "route", unix.NF_INET_LOCAL_OUT
	table.form.Chains = []nft.Chain{prerouting, output}
	return table
}

// rule returns `ip saddr @vip4 meta mark set meta mark & ~mask | mark`, or the same for IPv6.
func (options Options) rule(family vip.Family) nft.Rule {
	native := func(value uint32) []byte { return binary.NativeEndian.AppendUint32(nil, value) }
	// Offset and length of the source address (RFC 791, RFC 8200).
	offset, length, protocol := uint32(12), uint32(4), byte(unix.NFPROTO_IPV4)
	if family == vip.IPv6 {
		offset, length, protocol = 8, 16, unix.NFPROTO_IPV6
	}
	return nft.NewRule(inet.Family, "",
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocol}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
		&expr.Lookup{SourceRegister: 1, SetName: setNames[family]},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(^options.Mask), Xor: native(options.Mark)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	)
}

// content holds the ranges in the sets of a table.
type content [len(vip.Families)][]nft.Range

func readRanges(conn *nft.Conn, family vip.Family) ([]nft.Range, error) {
	var list []nft.Element
	_, err := conn.Elements(inet, setNames[family], func(element nft.Element) { list = append(list, element) })
	return nft.Ranges(list), err
}

// ensure installs the chains and, unless desired is nil, the VIPs' ranges in the sets. It reports
// whether it changed the table and whether the table could not be read. After a change, also a
// failed one, it reads the table back into observed.
func (table *table) ensure(desired *vip.Set) (changed, unreadable bool, err error) {
	// A connection belongs to the namespace of the calling thread.
	conn, err := nft.Dial()
	if err != nil {
		return false, true, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if changed, err = table.read(conn); err != nil {
		// An unreadable content, such as one too large for the deadline, must not prevent the
		// installation of the desired one. It is replaced once per desired set, unless another process
		// only interrupted the read.
		_, rejected := errors.AsType[*nft.Error](err)
		if rejected || errors.Is(err, nlmsg.ErrInterrupted) || desired == nil || desired == table.replaced {
			return changed, !rejected, err
		}
		table.o.Log.Warn("VIP sets cannot be read, replacing their content", "error", err)
		for _, family := range vip.Families {
			if err := replace(conn, setNames[family], disjoint(*desired, family)); err != nil {
				return true, true, err
			}
		}
		if _, err := table.read(conn); err != nil {
			table.replaced = desired
			return true, true, err
		}
		changed, err = true, nil
	}
	table.replaced = nil
	if desired == nil || desired == table.filled {
		return changed, false, nil
	}
	// One family must not wait for the repair of the other.
	filled := false
	for _, family := range vip.Families {
		modified, fillErr := table.fill(conn, family, disjoint(*desired, family))
		filled, err = filled || modified, errors.Join(err, fillErr)
	}
	if !filled {
		table.filled = desired
		return changed, false, err
	}
	_, readErr := table.read(conn)
	return true, readErr != nil, errors.Join(err, readErr)
}

// read repairs the form of the table and reads its sets, unless the ruleset is unchanged. It
// reports whether it changed the table.
func (table *table) read(conn *nft.Conn) (changed bool, err error) {
	id, err := table.generation(conn)
	if err != nil || table.observed != nil && id == table.generationID {
		return false, err
	}
	last := table.observed
	table.observed, table.filled = nil, nil
	for range readAttempts {
		difference, before, err := conn.Ensure(table.form)
		if difference != "" {
			changed = true
			table.o.Log.Info("nftables table has drifted, writing it", "missing", difference)
		}
		if err != nil {
			return changed, err
		}
		var observed content
		for _, family := range vip.Families {
			if observed[family], err = table.ranges(conn, family); err != nil {
				return changed, fmt.Errorf("failed to read set %s: %w", setNames[family], err)
			}
		}
		after, err := table.generation(conn)
		if err != nil {
			return changed, err
		}
		// Listings without a transaction between them, and equal listings in a row, have the content of
		// one ruleset: the transactions changed other tables.
		if after == before || last != nil && slices.Equal(last[vip.IPv4], observed[vip.IPv4]) &&
			slices.Equal(last[vip.IPv6], observed[vip.IPv6]) {
			// After a transaction during the listing, the older generation causes another read.
			table.observed, table.generationID = &observed, before
			return changed, nil
		}
		last = &observed
	}
	return changed, fmt.Errorf("failed to read nftables table %s: %w, %d times", inet, nlmsg.ErrInterrupted,
		readAttempts)
}

// replace replaces the content of a set. Its first ranges are replaced in one transaction: a packet
// finds them before and after. In a set that the transaction creates it would not.
func replace(conn *nft.Conn, set string, want []nft.Range) error {
	for rest, flush := want, true; flush || len(rest) > 0; flush = false {
		part := rest[:min(len(rest), maxReplaced)]
		if err := (change{add: part}).commit(conn, set, flush); err != nil {
			return err
		}
		rest = rest[len(part):]
	}
	return nil
}

// fill gives one set its desired content. It reports whether it tried to change the set.
func (table *table) fill(conn *nft.Conn, family vip.Family, want []nft.Range) (changed bool, err error) {
	name := setNames[family]
	changes := steps(table.observed[family], want)
	if len(changes) == 0 {
		return false, nil
	}
	added, removed := 0, 0
	for _, part := range changes {
		if err := part.commit(conn, name, false); err != nil {
			// Another process added ranges that conflict with the computed change.
			table.o.Log.Warn("set could not be changed, replacing its content", "set", name, "error", err)
			if err := replace(conn, name, want); err != nil {
				return true, err
			}
			break
		}
		added, removed = added+len(part.add), removed+len(part.del)
	}
	table.o.Log.Info("VIP set updated", "set", name, "added", added, "removed", removed, "ranges", len(want))
	return true, nil
}

// commit changes a set in one transaction, after flushing it if flush is set.
func (change change) commit(conn *nft.Conn, set string, flush bool) error {
	transaction := nft.Transaction{Table: inet}
	if flush {
		transaction.FlushSet(set)
	}
	transaction.DeleteElements(set, elements(change.del))
	transaction.AddElements(set, elements(change.add))
	if err := conn.Commit(&transaction, nil); err != nil {
		return fmt.Errorf("failed to change set %s by +%d -%d ranges: %w", set, len(change.add), len(change.del), err)
	}
	return nil
}

// removeTable deletes the table, if it exists.
func removeTable() error {
	conn, err := nft.Dial()
	if err != nil {
		return err
	}
	_, err = conn.Remove(inet)
	return errors.Join(err, conn.Close())
}
