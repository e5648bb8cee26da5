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
func (f *Conn) Generation() (uint32, error) { return f.nft.Generation() }

// readConsistently repeats a read until the ruleset generation is equal before and after it.
func (f *Conn) readConsistently(object string, read func() error) error {
	_, err := f.nft.ReadConsistently(object, read)
	return err
}

// Flags of tables (NFTA_TABLE_FLAGS).
const (
	tableDormant = 0x1
	tableOwner   = 0x2
)

// ruleset is the content of the table without set elements.
type ruleset struct{ *nft.Ruleset }

func (r *ruleset) has(set string) bool {
	_, ok := r.Sets[set]
	return ok
}

// checkChain returns a [ConflictError] if a chain with this name has a different type.
func (r *ruleset) checkChain(want nft.Chain) error {
	if got, ok := r.Chains[want.Name]; ok {
		return conflict("chain", want.Name, want.Mismatch(got))
	}
	return nil
}

// checkSet returns a [ConflictError] if a set or map with this name has a different type.
func (r *ruleset) checkSet(kind string, want nft.Set) error {
	if got, ok := r.Sets[want.Name]; ok {
		return conflict(kind, want.Name, want.Mismatch(got))
	}
	return nil
}

// readRuleset reads the whole table, or only the common objects.
func (f *Conn) readRuleset(all bool) (*ruleset, error) {
	flags, err := f.nft.Flags(inet)
	switch {
	case err != nil:
		return nil, err
	case flags != nil && *flags&tableOwner != 0:
		detail := "another process owns it, and it ends with that process"
		return nil, &ConflictError{Object: "table " + inet.String(), Detail: detail}
	case all || flags == nil:
		r, err := f.nft.Dump(inet)
		return &ruleset{r}, err
	}
	r, err := f.readObjects(commonChains, f.config.commonSets())
	r.Exists, r.Flags = true, *flags
	return r, err
}

// readObjects reads the named chains and sets individually, because the table may contain
// thousands of objects.
func (f *Conn) readObjects(chains []string, sets []nft.Set) (*ruleset, error) {
	r := &ruleset{nft.NewRuleset()}
	for _, name := range chains {
		chain, err := f.nft.Chain(inet, name)
		if err != nil {
			return r, err
		}
		if chain == nil {
			continue
		}
		r.Chains[name] = *chain
		rules, err := f.nft.Rules(inet, name)
		if err != nil {
			return r, err
		}
		r.Rules[name] = rules[name]
	}
	for _, spec := range sets {
		set, err := f.nft.Set(inet, spec.Name)
		if err != nil {
			return r, err
		}
		if set != nil {
			r.Sets[spec.Name] = *set
		}
	}
	return r, nil
}

// inspectBase returns the first fault of the common objects, or "".
func (f *Conn) inspectBase(r *ruleset) (string, error) {
	switch {
	case !r.Exists:
		return "the table is missing", nil
	case r.Flags&tableDormant != 0:
		return "the table is dormant", f.inspectForeign(r)
	}
	if err := f.inspectForeign(r); err != nil {
		return "", err
	}
	for _, want := range f.config.baseChains() {
		got, ok := r.Chains[want.Name]
		if !ok {
			return "chain " + want.Name + " is missing", nil
		}
		if want.Type != "" && got.Policy != want.Policy {
			return "the policy of chain " + want.Name + " is not accept", nil
		}
		if !sameRules(r.Rules[want.Name], f.config.baseRules(want.Name)) {
			return "the rules of chain " + want.Name + " are others", nil
		}
	}
	if f.config.Conntrack == ConntrackOn {
		for _, name := range commonChains[1:] {
			if slices.ContainsFunc(r.Rules[name], owned) {
				return "chain " + name + " is from a start without connection tracking", nil
			}
		}
	}
	for _, want := range f.config.commonSets() {
		if !r.has(want.Name) {
			return "set " + want.Name + " is missing", nil
		}
		if missing, err := f.missingFixed(want); err != nil || len(missing) > 0 {
			return "set " + want.Name + " lacks elements", err
		}
	}
	return "", nil
}

// inspectForeign returns a [ConflictError] if a common chain or set has a different type.
func (f *Conn) inspectForeign(r *ruleset) error {
	for _, want := range f.config.baseChains() {
		if err := r.checkChain(want); err != nil {
			return err
		}
	}
	for _, want := range f.config.commonSets() {
		if err := r.checkSet("set", want); err != nil {
			return err
		}
	}
	return nil
}

// missingFixed returns the missing fixed elements of a set.
func (f *Conn) missingFixed(s nft.Set) ([]nft.Element, error) {
	if s.Elements == nil {
		return nil, nil
	}
	missing := slices.Clone(s.Elements)
	err := f.elements(s.Name, func(e nft.Element) {
		missing = slices.DeleteFunc(missing, func(m nft.Element) bool { return bytes.Equal(m.Key, e.Key) })
	})
	return missing, err
}

// ReadBase reports whether the common objects are intact. problem is the reason why no packets are
// forwarded.
func (f *Conn) ReadBase() (base bool, problem string, err error) {
	err = f.readConsistently("table inet "+plan.TableName, func() error {
		r, err := f.readRuleset(false)
		if err != nil {
			return err
		}
		problem, err = f.inspectBase(r)
		return err
	})
	if err != nil || problem != "" {
		return false, problem, err
	}
	base, err = f.commonRulesInstalled()
	return base, "", err
}

// streamFrom returns a stream from its rules in r. It reads the Maglev maps and the ports.
func (f *Conn) streamFrom(name string, r *ruleset) (*plan.KernelStream, error) {
	s := &plan.KernelStream{Name: name}
	rules := r.Rules[plan.StreamChain(name)]
	for _, r := range rules {
		s.Owned = s.Owned || owned(r)
		if owned(r) && r.Modulus != 0 && s.Size == 0 {
			s.Size, s.Seed = r.Modulus, r.Seed
		}
	}
	sizes := true
	for _, family := range vip.Families {
		// A map of a different type is treated as missing; Write reports the conflict.
		got, ok := r.Sets[plan.MaglevMap(family, name)]
		if !ok || maglevSpec(family, name, got.Size).Mismatch(got) != "" || got.Size == 0 || got.Size > plan.MaxTable {
			continue
		}
		sizes = sizes && got.Size == s.Size
		var err error
		if s.Tables[family], err = f.readTable(got.Name, got.Size); err != nil {
			return nil, err
		}
	}
	var err error
	if s.Match, err = f.readMatch(name, r); err != nil {
		return nil, err
	}
	chain, ok := r.Chains[plan.StreamChain(name)]
	known := s.Size != 0 && s.Seed != 0 || len(s.Families()) == 0
	s.ChainIntact = ok && chain.Type == "" && sizes && known && sameRules(rules, f.config.streamRules(s))
	return s, nil
}

// ReadStream reads the nftables objects of one stream; nil if none exists.
func (f *Conn) ReadStream(name string) (s *plan.KernelStream, err error) {
	err = f.readConsistently("stream "+name, func() error {
		sets := []nft.Set{maglevSpec(vip.IPv4, name, 0), maglevSpec(vip.IPv6, name, 0), matchSpec(name)}
		r, err := f.readObjects([]string{plan.StreamChain(name)}, sets)
		if err != nil {
			return err
		}
		if s, err = f.streamFrom(name, r); err == nil && len(r.Chains) == 0 && len(s.Families()) == 0 {
			s = nil
		}
		return err
	})
	return s, err
}

// ReadTables returns a stream after a Write that changed only elements. If the kernel echoed all
// changed elements during the Write, no read is necessary. Otherwise it reads the Maglev maps and
// the ports, which is much faster than ReadStream.
func (f *Conn) ReadTables(w plan.StreamWrite) (*plan.KernelStream, error) {
	known := w.Observed
	if s := f.reported.of(known); plan.SameStream(s, &w.Desired) {
		return s, nil
	}
	s := *known
	err := f.readConsistently("maps of stream "+s.Name, func() (err error) {
		for family, table := range known.Tables {
			if table == nil {
				continue
			}
			if s.Tables[family], err = f.readTable(plan.MaglevMap(vip.Family(family), s.Name), uint32(len(table))); err != nil {
				return err
			}
		}
		if known.Match != nil {
			s.Match, err = f.readPorts(s.Name)
		}
		return err
	})
	if errors.Is(err, unix.ENOENT) {
		return f.ReadStream(s.Name) // another process removed a map
	}
	return &s, err
}

// targetFrom parses a target from the rules of its chain and reports whether it is owned.
func (c Config) targetFrom(fwmark uint32, rules []nft.Rule) (t plan.KernelTarget, found bool) {
	t.FWMark = fwmark
	i := slices.IndexFunc(rules, owned)
	if i < 0 {
		return t, false
	}
	t.Label, t.Packets, t.Bytes = plan.ParseLabel(rules[i].Comment), rules[i].Packets, rules[i].Bytes
	t.ChainIntact = sameRules(rules, []nft.Rule{c.targetRule(t)})
	return t, true
}

// targetsFrom returns the targets for which want returns true. It reads the live maps of their
// streams and of the streams in names.
func (f *Conn) targetsFrom(
	rules map[string][]nft.Rule, want func(uint32) bool, names map[string]bool,
) (map[uint32]*plan.KernelTarget, error) {
	targets, streams := map[uint32]*plan.KernelTarget{}, map[string]bool{}
	maps.Copy(streams, names)
	for chain, list := range rules {
		fwmark, ok := plan.ParseTargetChain(chain)
		if !ok || !want(fwmark) {
			continue
		}
		if t, found := f.config.targetFrom(fwmark, list); found {
			targets[fwmark] = &t
			streams[t.Stream] = true
		}
	}
	for stream := range streams {
		for _, family := range vip.Families {
			live, err := f.readLive(family, stream)
			if err != nil {
				return nil, err
			}
			for fwmark, chain := range live {
				if !want(fwmark) || chain != plan.TargetChain(fwmark) {
					continue
				}
				if targets[fwmark] == nil {
					targets[fwmark] = &plan.KernelTarget{FWMark: fwmark}
				}
				targets[fwmark].Flows[family] = true
			}
		}
	}
	return targets, nil
}

// fewChains is the maximum number of objects to read individually rather than in one dump.
const fewChains = 16

// ReadTargets reads the nftables objects of targets. The result omits targets without objects.
func (f *Conn) ReadTargets(fwmarks []uint32) (targets map[uint32]*plan.KernelTarget, err error) {
	wanted := make(map[uint32]bool, len(fwmarks))
	for _, n := range fwmarks {
		wanted[n] = true
	}
	err = f.readConsistently("targets", func() error {
		rules, err := f.targetRules(fwmarks)
		if err != nil {
			return err
		}
		targets, err = f.targetsFrom(rules, func(n uint32) bool { return wanted[n] }, nil)
		return err
	})
	return targets, err
}

func (f *Conn) targetRules(fwmarks []uint32) (map[string][]nft.Rule, error) {
	if len(fwmarks) > fewChains {
		return f.nft.Rules(inet, "")
	}
	rules := map[string][]nft.Rule{}
	for _, n := range fwmarks {
		some, err := f.nft.Rules(inet, plan.TargetChain(n))
		if err != nil {
			return nil, err
		}
		maps.Copy(rules, some)
	}
	return rules, nil
}

// Read reads the complete state: the table, and the rules and routes of these fwmarks and of the
// targets in the table.
func (f *Conn) Read(fwmarks []uint32) (c *plan.KernelState, err error) {
	if err = f.readConsistently("table inet "+plan.TableName, func() error {
		c, err = f.readContent()
		return err
	}); err != nil {
		return nil, err
	}
	if err := f.addRoutesTo(c.Targets, slices.AppendSeq(slices.Clone(fwmarks), maps.Keys(c.Targets))); err != nil {
		return c, err
	}
	common, err := f.commonRulesInstalled()
	c.Base = c.Base && common
	return c, err
}

func (f *Conn) readContent() (*plan.KernelState, error) {
	c := &plan.KernelState{
		Problem: "the table is missing", Streams: map[string]*plan.KernelStream{},
		Targets: map[uint32]*plan.KernelTarget{}, VIPs: map[vip.VIP]string{},
	}
	r, err := f.readRuleset(true)
	if err != nil || !r.Exists {
		return c, err
	}
	if c.Problem, err = f.inspectBase(r); err != nil {
		return nil, err
	}
	c.Base = c.Problem == ""
	names := r.streams()
	for name := range names {
		if c.Streams[name], err = f.streamFrom(name, r); err != nil {
			return nil, err
		}
	}
	if c.Targets, err = f.targetsFrom(r.Rules, func(uint32) bool { return true }, names); err != nil {
		return nil, err
	}
	c.VIPs, err = f.ReadVIPs()
	return c, err
}

// streams returns the names of the streams with a chain or a map.
func (r *ruleset) streams() map[string]bool {
	names := map[string]bool{}
	add := func(name string, prefixes ...string) {
		for _, prefix := range prefixes {
			if stream, ok := strings.CutPrefix(name, prefix); ok {
				names[stream] = true
			}
		}
	}
	for name := range r.Chains {
		add(name, plan.StreamPrefix)
	}
	for name := range r.Sets {
		add(name, slices.Concat(plan.MaglevMaps[:], plan.LiveMaps[:])...)
	}
	return names
}
