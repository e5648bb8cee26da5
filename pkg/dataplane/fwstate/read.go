package fwstate

import (
	"bytes"
	"errors"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Generation returns the ruleset generation, which every transaction increments.
func (conn *Conn) Generation() (uint32, error) { return conn.nft.Generation() }

// Flags of tables (NFTA_TABLE_FLAGS).
const (
	tableDormant = 0x1
	tableOwner   = 0x2
)

// ruleset is the content of the table without set elements.
type ruleset struct{ *nft.Ruleset }

func (content *ruleset) has(set string) bool {
	_, ok := content.Sets[set]
	return ok
}

// checkChain returns a [ConflictError] if a chain with this name has a different type.
func (content *ruleset) checkChain(want nft.Chain) error {
	if got, ok := content.Chains[want.Name]; ok {
		return conflict("chain", want.Name, want.Mismatch(got))
	}
	return nil
}

// checkSet returns a [ConflictError] if a set or map with this name has a different type.
func (content *ruleset) checkSet(kind string, want nft.Set) error {
	if got, ok := content.Sets[want.Name]; ok {
		return conflict(kind, want.Name, want.Mismatch(got))
	}
	return nil
}

// readRuleset reads the whole table, or only the common objects.
func (conn *Conn) readRuleset(all bool) (*ruleset, error) {
	flags, err := conn.nft.Flags(inet)
	switch {
	case err != nil:
		return nil, err
	case flags != nil && *flags&tableOwner != 0:
		// The kernel rejects changes of an owned table by every other socket.
		detail := "another process owns it, and it ends with that process"
		return nil, &ConflictError{Object: "table " + inet.String(), Detail: detail}
	case all || flags == nil:
		content, err := conn.nft.Dump(inet)
		return &ruleset{content}, err
	}
	content, err := conn.nft.readObjects(commonChains, conn.config.commonSets())
	content.Exists, content.Flags = true, *flags
	return content, err
}

// readObjects reads the named chains and sets one by one, because the table may have thousands.
func (reader reader) readObjects(chains []string, sets []nft.Set) (*ruleset, error) {
	content := &ruleset{nft.NewRuleset()}
	for _, name := range chains {
		chain, err := reader.Chain(inet, name)
		if err != nil {
			return content, err
		}
		if chain == nil {
			continue
		}
		content.Chains[name] = *chain
		rules, err := reader.Rules(inet, name)
		if err != nil {
			return content, err
		}
		content.Rules[name] = rules[name]
	}
	// Elements are not listed: a Maglev map has up to 65 537.
	for _, spec := range sets {
		set, err := reader.Set(inet, spec.Name)
		if err != nil {
			return content, err
		}
		if set != nil { // missing sets are created by Write
			content.Sets[spec.Name] = *set
		}
	}
	return content, nil
}

// inspectBase returns the first fault of the common objects, or "".
func (conn *Conn) inspectBase(content *ruleset) (string, error) {
	switch {
	case !content.Exists:
		return "the table is missing", nil
	case content.Flags&tableDormant != 0:
		return "the table is dormant", conn.inspectForeign(content)
	}
	// A repair would destroy objects of another process, so conflicts precede faults.
	if err := conn.inspectForeign(content); err != nil {
		return "", err
	}
	for _, want := range conn.config.baseChains() {
		got, found := content.Chains[want.Name]
		switch {
		case want.Name == checksChain: // without it packets are forwarded; see assignsTimeouts
		case !found:
			return "chain " + want.Name + " is missing", nil
		case want.Type != "" && got.Policy != want.Policy:
			return "the policy of chain " + want.Name + " is not accept", nil
		case !sameRules(content.Rules[want.Name], conn.config.baseRules(want.Name)):
			return "the rules of chain " + want.Name + " are others", nil
		}
	}
	if conn.config.Conntrack == ConntrackOn {
		// The notrack rules would exempt VIPs from connection tracking.
		for _, name := range commonChains[2:] {
			if slices.ContainsFunc(content.Rules[name], owned) {
				return "chain " + name + " is from a start without connection tracking", nil
			}
		}
	}
	for _, want := range conn.config.commonSets() {
		if !content.has(want.Name) {
			return "set " + want.Name + " is missing", nil
		}
		if missing, err := conn.missingFixed(want); err != nil || len(missing) > 0 {
			return "set " + want.Name + " lacks elements", err
		}
	}
	return "", nil
}

// assignsTimeouts reports whether the rules of checks are intact.
func (content *ruleset) assignsTimeouts(config Config) bool {
	got, found := content.Chains[checksChain]
	return found && got.Policy == nft.PolicyAccept &&
		sameRules(content.Rules[checksChain], config.baseRules(checksChain))
}

// inspectForeign returns a [ConflictError] if a needed common chain or set has a different type.
func (conn *Conn) inspectForeign(content *ruleset) error {
	for _, want := range conn.config.baseChains() {
		if err := content.checkChain(want); err != nil && want.Name != checksChain {
			return err
		}
	}
	for _, want := range conn.config.commonSets() {
		if err := content.checkSet("set", want); err != nil {
			return err
		}
	}
	return nil
}

func (conn *Conn) missingFixed(set nft.Set) ([]nft.Element, error) {
	if set.Elements == nil {
		return nil, nil
	}
	missing := slices.Clone(set.Elements)
	err := conn.nft.elements(set.Name, func(element nft.Element) {
		missing = slices.DeleteFunc(missing, func(e nft.Element) bool { return bytes.Equal(e.Key, element.Key) })
	})
	return missing, err
}

// ReadBase reports whether the common objects are intact, and chain checks, without which packets
// are forwarded. problem is the reason why none are.
func (conn *Conn) ReadBase() (base, checks bool, problem string, err error) {
	content, err := conn.readRuleset(false)
	if err != nil {
		return false, false, "", err
	}
	checks = content.assignsTimeouts(conn.config)
	if problem, err = conn.inspectBase(content); err != nil || problem != "" {
		return false, checks, problem, err
	}
	base, err = conn.commonRulesInstalled()
	return base, checks, "", err
}

// streamFrom returns a stream from its rules in r. It reads the Maglev maps and the ports.
func (conn *Conn) streamFrom(name string, content *ruleset) (*plan.KernelStream, error) {
	stream := &plan.KernelStream{Name: name}
	rules := content.Rules[plan.StreamChain(name)]
	for _, content := range rules {
		stream.Owned = stream.Owned || owned(content)
		// The kernel stores the seed only in the hash expressions of the rules.
		if owned(content) && content.Modulus != 0 && stream.Size == 0 {
			stream.Size, stream.Seed = content.Modulus, content.Seed
		}
	}
	sizes := true
	for _, family := range vip.Families {
		// A map of a different type is treated as missing; Write reports the conflict.
		got, found := content.Sets[plan.MaglevMap(family, name)]
		if !found || maglevSpec(family, name, got.Size).Mismatch(got) != "" || got.Size == 0 || got.Size > plan.MaxTable {
			continue
		}
		sizes = sizes && got.Size == stream.Size
		var err error
		if stream.Tables[family], err = conn.nft.readTable(got.Name, got.Size); err != nil {
			return nil, err
		}
	}
	var err error
	if stream.Match, err = conn.readMatch(name, content); err != nil {
		return nil, err
	}
	chain, found := content.Chains[plan.StreamChain(name)]
	// A stream without Maglev maps has no hash expression.
	known := stream.Size != 0 && stream.Seed != 0 || len(stream.Families()) == 0
	stream.ChainIntact = found && chain.Type == "" && sizes && known && sameRules(rules, conn.config.streamRules(stream))
	return stream, nil
}

// ReadStream reads the nftables objects of one stream; nil if none exists.
func (conn *Conn) ReadStream(name string) (*plan.KernelStream, error) {
	sets := []nft.Set{maglevSpec(vip.IPv4, name, 0), maglevSpec(vip.IPv6, name, 0), matchSpec(name)}
	content, err := conn.nft.readObjects([]string{plan.StreamChain(name)}, sets)
	if err != nil {
		return nil, err
	}
	stream, err := conn.streamFrom(name, content)
	if err != nil || len(content.Chains) == 0 && len(stream.Families()) == 0 {
		return nil, err
	}
	return stream, nil
}

// ReadTables returns a stream after a Write that changed only elements. If the kernel echoed all
// changed elements during the Write, no read is necessary. Otherwise it reads the Maglev maps and
// the ports, which is much faster than ReadStream.
func (conn *Conn) ReadTables(written plan.StreamWrite) (*plan.KernelStream, error) {
	known := written.Observed
	if stream := conn.reported.of(known); plan.SameStream(stream, &written.Desired) {
		return stream, nil
	}
	stream := *known
	var err error
	for family, table := range known.Tables {
		if table != nil && err == nil {
			stream.Tables[family], err = conn.nft.readTable(plan.MaglevMap(vip.Family(family), stream.Name),
				uint32(len(table)))
		}
	}
	if known.Match != nil && err == nil {
		stream.Match, err = conn.nft.readPorts(stream.Name)
	}
	if errors.Is(err, unix.ENOENT) {
		return conn.ReadStream(stream.Name) // another process removed a map
	}
	return &stream, err
}

// targetFrom parses a target from the rules of its chain and reports whether it is owned.
func (config Config) targetFrom(fwmark uint32, rules []nft.Rule) (target plan.KernelTarget, found bool) {
	target.FWMark = fwmark
	first := slices.IndexFunc(rules, owned)
	if first < 0 {
		return target, false
	}
	target.Label, target.Packets, target.Bytes = plan.ParseLabel(rules[first].Comment), rules[first].Packets,
		rules[first].Bytes
	target.ChainIntact = sameRules(rules, []nft.Rule{config.targetRule(target)})
	return target, true
}

// targetsFrom returns the targets for which want returns true, and the guests among them. It reads
// the live maps of their streams and of the streams in names.
func (conn *Conn) targetsFrom(
	rules map[string][]nft.Rule, want func(uint32) bool, names map[string]bool,
) (targets map[uint32]*plan.KernelTarget, guests map[plan.Guest]bool, err error) {
	targets, guests = map[uint32]*plan.KernelTarget{}, map[plan.Guest]bool{}
	streams := map[string]bool{}
	maps.Copy(streams, names)
	for chain, list := range rules {
		fwmark, owned := plan.ParseTargetChain(chain)
		if !owned || !want(fwmark) {
			continue
		}
		if target, found := conn.config.targetFrom(fwmark, list); found {
			targets[fwmark] = &target
			streams[target.Stream] = true
		}
	}
	for stream := range streams {
		for _, family := range vip.Families {
			live, err := conn.nft.readLive(family, stream)
			if err != nil {
				return nil, nil, err
			}
			for fwmark, chain := range live {
				if !want(fwmark) || chain != plan.TargetChain(fwmark) {
					continue
				}
				// An element whose chain lost its rule is reported, so that it is repaired or removed.
				if targets[fwmark] == nil {
					targets[fwmark] = &plan.KernelTarget{FWMark: fwmark}
				}
				if of := targets[fwmark].Stream; of != "" && of != stream {
					guests[plan.Guest{Stream: stream, FWMark: fwmark}] = true
				} else {
					targets[fwmark].Flows[family] = true
				}
			}
		}
	}
	return targets, guests, nil
}

// fewChains is the maximum number of objects to read individually rather than in one dump.
const fewChains = 16

// ReadTargets reads the nftables objects of targets. The result omits targets without objects.
func (conn *Conn) ReadTargets(fwmarks []uint32) (targets map[uint32]*plan.KernelTarget, err error) {
	wanted := make(map[uint32]bool, len(fwmarks))
	for _, fwmark := range fwmarks {
		wanted[fwmark] = true
	}
	rules, err := conn.targetRules(fwmarks)
	if err != nil {
		return nil, err
	}
	targets, _, err = conn.targetsFrom(rules, func(fwmark uint32) bool { return wanted[fwmark] }, nil)
	return targets, err
}

func (conn *Conn) targetRules(fwmarks []uint32) (map[string][]nft.Rule, error) {
	if len(fwmarks) > fewChains {
		return conn.nft.Rules(inet, "")
	}
	rules := map[string][]nft.Rule{}
	for _, fwmark := range fwmarks {
		some, err := conn.nft.Rules(inet, plan.TargetChain(fwmark))
		if err != nil {
			return nil, err
		}
		maps.Copy(rules, some)
	}
	return rules, nil
}

// Read reads the complete state: the table, and the rules and routes of these fwmarks and of the
// targets in the table. The caller compares the generation: a read of large maps takes longer than
// the pause between two transactions of another process, most of which change other tables.
func (conn *Conn) Read(fwmarks []uint32) (state *plan.KernelState, err error) {
	if state, err = conn.readContent(); err != nil {
		return nil, err
	}
	if err := conn.addRoutesTo(state.Targets, slices.AppendSeq(slices.Clone(fwmarks),
		maps.Keys(state.Targets))); err != nil {
		return state, err
	}
	common, err := conn.commonRulesInstalled()
	state.Base = state.Base && common
	return state, err
}

func (conn *Conn) readContent() (*plan.KernelState, error) {
	state := &plan.KernelState{
		Problem: "the table is missing", Streams: map[string]*plan.KernelStream{},
		Targets: map[uint32]*plan.KernelTarget{}, VIPs: map[vip.VIP]string{},
	}
	content, err := conn.readRuleset(true)
	if err != nil || !content.Exists {
		return state, err
	}
	if state.Problem, err = conn.inspectBase(content); err != nil {
		return nil, err
	}
	state.Base, state.Checks = state.Problem == "", content.assignsTimeouts(conn.config)
	// A stream that lost its chain still has maps, which Write must remove or fill.
	names := content.streams()
	for name := range names {
		if state.Streams[name], err = conn.streamFrom(name, content); err != nil {
			return nil, err
		}
	}
	all := func(uint32) bool { return true }
	if state.Targets, state.Guests, err = conn.targetsFrom(content.Rules, all, names); err != nil {
		return nil, err
	}
	state.VIPs, err = conn.ReadVIPs()
	return state, err
}

// streams returns the names of the streams with a chain or a map.
func (content *ruleset) streams() map[string]bool {
	names := map[string]bool{}
	add := func(name string, prefixes ...string) {
		for _, prefix := range prefixes {
			if stream, ok := strings.CutPrefix(name, prefix); ok {
				names[stream] = true
			}
		}
	}
	for name := range content.Chains {
		add(name, plan.StreamPrefix)
	}
	for name := range content.Sets {
		add(name, slices.Concat(plan.MaglevMaps[:], plan.LiveMaps[:])...)
	}
	return names
}
