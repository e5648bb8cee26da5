package fwstate

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Generation returns the generation of the ruleset, which every transaction of every process
// increments.
func (f *Conn) Generation() (uint32, error) {
	var m nlmsg.Messages
	m.Begin(nftMessage(unix.NFT_MSG_GETGEN), 0, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
	data, err := f.nft.Get(m.End())
	if err != nil {
		return 0, fmt.Errorf("read the ruleset's generation: %w", err)
	}
	if len(data) < nlmsg.NFHeaderLen {
		return 0, errors.New("read the ruleset's generation: empty answer")
	}
	return nlmsg.Uint32BE(nlmsg.Attribute(data[nlmsg.NFHeaderLen:], unix.NFTA_GEN_ID)), nil
}

// A ruleset that another process changes during a read is read again, within these bounds.
const (
	readFor      = 5 * time.Second
	readAttempts = 10
)

// readConsistently repeats a read until the ruleset did not change during it.
func (f *Conn) readConsistently(what string, read func() error) error {
	began := time.Now()
	before, err := f.Generation()
	if err != nil {
		return err
	}
	for attempt := 1; ; attempt++ {
		err := read()
		if err != nil && !errors.Is(err, nlmsg.ErrInterrupted) {
			return fmt.Errorf("read %s: %w", what, err)
		}
		after, failed := f.Generation()
		if failed != nil {
			return failed
		}
		if err == nil && before == after {
			return nil
		}
		if attempt >= readAttempts && time.Since(began) > readFor {
			return fmt.Errorf("read %s: %w, %d times", what, nlmsg.ErrInterrupted, attempt)
		}
		before = after
	}
}

// Flags of tables (NFTA_TABLE_FLAGS).
const (
	tableDormant = 0x1
	tableOwner   = 0x2
)

// readTableFlags reads the flags of the table, and reports whether it exists.
func (f *Conn) readTableFlags() (flags uint32, there bool, err error) {
	var m nlmsg.Messages
	m.Begin(nftMessage(unix.NFT_MSG_GETTABLE), 0, familyInet, unix.NFNETLINK_V0, 0, 0)
	m.Text(unix.NFTA_TABLE_NAME, plan.TableName)
	data, err := f.nft.Get(m.End())
	if errors.Is(err, unix.ENOENT) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("read table inet %s: %w", plan.TableName, err)
	}
	if len(data) < nlmsg.NFHeaderLen {
		return 0, false, nil
	}
	return nlmsg.Uint32BE(nlmsg.Attribute(data[nlmsg.NFHeaderLen:], unix.NFTA_TABLE_FLAGS)), true, nil
}

// ruleset is the content of the table, except most elements.
type ruleset struct {
	exists bool
	flags  uint32
	chains map[string]chainSpec
	sets   map[string]setSpec
	rules  map[string][]rule
}

// readRuleset reads everything, or only the objects that no stream owns.
func (f *Conn) readRuleset(all bool) (*ruleset, error) {
	r := &ruleset{}
	var err error
	if r.flags, r.exists, err = f.readTableFlags(); err != nil || !r.exists {
		return r, err
	}
	if r.flags&tableOwner != 0 {
		return nil, &ConflictError{Object: "table inet " + plan.TableName, Detail: "another process owns it, and it ends with that process"}
	}
	if !all {
		return r, f.readCommon(r)
	}
	if r.chains, err = f.readChains(); err != nil {
		return nil, err
	}
	if r.sets, err = f.readSets(); err != nil {
		return nil, err
	}
	r.rules, err = f.readRules("")
	return r, err
}

// readCommon reads the chains, rules and sets that no stream owns one by one: the table may
// have thousands of others.
func (f *Conn) readCommon(r *ruleset) error {
	r.chains, r.sets, r.rules = map[string]chainSpec{}, map[string]setSpec{}, map[string][]rule{}
	for _, name := range []string{preroutingChain, notrackChain, defragmentChain} {
		chain, err := f.readChain(name)
		if err != nil {
			return err
		}
		if chain == nil {
			continue
		}
		r.chains[name] = *chain
		rules, err := f.readRules(name)
		if err != nil {
			return err
		}
		r.rules[name] = rules[name]
	}
	for _, want := range f.commonSets() {
		set, err := f.readSet(want.name)
		if err != nil {
			return err
		}
		if set != nil {
			r.sets[want.name] = *set
		}
	}
	return nil
}

// inspectBase returns what is wrong with the objects that no stream owns, "" for nothing.
func (f *Conn) inspectBase(r *ruleset) (string, error) {
	switch {
	case !r.exists:
		return "the table is missing", nil
	case r.flags&tableDormant != 0:
		return "the table is dormant", f.inspectForeign(r)
	}
	if err := f.inspectForeign(r); err != nil {
		return "", err
	}
	for _, want := range f.baseChains() {
		got, ok := r.chains[want.name]
		if !ok {
			return "chain " + want.name + " is missing", nil
		}
		if want.kind != "" && got.policy != want.policy {
			return "the policy of chain " + want.name + " is not accept", nil
		}
		rules, err := f.baseRules(want.name)
		if err != nil {
			return "", err
		}
		if !sameRules(r.rules[want.name], rules) {
			return "the rules of chain " + want.name + " are others", nil
		}
	}
	if !f.config.Stateless {
		for _, name := range []string{notrackChain, defragmentChain} {
			if slices.ContainsFunc(r.rules[name], func(r rule) bool { return r.owned() }) {
				return "chain " + name + " is from a start without connection tracking", nil
			}
		}
	}
	for _, want := range f.commonSets() {
		if _, ok := r.sets[want.name]; !ok {
			return "set " + want.name + " is missing", nil
		}
		if want.fixed == nil {
			continue
		}
		missing, err := f.missingFixed(want)
		if err != nil {
			return "", err
		}
		if len(missing) > 0 {
			return "set " + want.name + " lacks elements", nil
		}
	}
	return "", nil
}

// inspectForeign returns a [ConflictError] if an object with the name of a common chain or set
// is of another kind.
func (f *Conn) inspectForeign(r *ruleset) error {
	for _, want := range f.baseChains() {
		if got, ok := r.chains[want.name]; ok {
			if detail := want.mismatch(got); detail != "" {
				return &ConflictError{Object: "chain inet " + plan.TableName + " " + want.name, Detail: detail}
			}
		}
	}
	for _, want := range f.commonSets() {
		if got, ok := r.sets[want.name]; ok {
			if detail := want.mismatch(got); detail != "" {
				return &ConflictError{Object: "set inet " + plan.TableName + " " + want.name, Detail: detail}
			}
		}
	}
	return nil
}

// missingFixed returns the elements that a set with fixed elements lacks.
func (f *Conn) missingFixed(s setSpec) ([]byte, error) {
	missing := slices.Clone(s.fixed)
	err := f.dumpElements(s.name, func(e []byte) {
		key := nlmsg.Attribute(nlmsg.Attribute(e, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE)
		missing = slices.DeleteFunc(missing, func(b byte) bool { return bytes.Equal(key, []byte{b}) })
	})
	return missing, err
}

// streamFrom reads the maps of a stream whose chain has these rules.
func (f *Conn) streamFrom(name string, chain *chainSpec, rules []rule, set func(string) (*setSpec, error)) (*plan.KernelStream, error) {
	s := &plan.KernelStream{Name: name}
	for _, r := range rules {
		s.Owned = s.Owned || r.owned()
		if r.owned() && r.size != 0 && s.Size == 0 {
			s.Size, s.Seed = r.size, r.seed
		}
	}
	sizes := true
	for _, family := range vip.Families {
		got, err := set(plan.MaglevMap(family, name))
		if err != nil {
			return nil, err
		}
		if got == nil {
			continue
		}
		// A map of another kind counts as missing; Write reports the conflict.
		if maglevSpec(family, name, got.size).mismatch(*got) != "" || got.size == 0 || got.size > plan.MaxTable {
			continue
		}
		sizes = sizes && got.size == s.Size
		if s.Tables[family], err = f.readTable(got.name, got.size); err != nil {
			return nil, err
		}
	}
	if chain == nil || chain.kind != "" || !sizes || s.Size == 0 || s.Seed == 0 {
		return s, nil
	}
	want, err := f.streamRules(s)
	if err != nil {
		return nil, err
	}
	s.ChainIntact = sameRules(rules, want)
	return s, nil
}

// ReadStream reads the nftables objects of one stream; nil if none exists.
func (f *Conn) ReadStream(name string) (s *plan.KernelStream, err error) {
	err = f.readConsistently("stream "+name, func() error {
		s = nil
		chain, err := f.readChain(plan.StreamChain(name))
		if err != nil {
			return err
		}
		var rules map[string][]rule
		if chain != nil {
			if rules, err = f.readRules(plan.StreamChain(name)); err != nil {
				return err
			}
		}
		got, err := f.streamFrom(name, chain, rules[plan.StreamChain(name)], f.readSet)
		if err == nil && (chain != nil || len(got.Families()) > 0) {
			s = got
		}
		return err
	})
	return s, err
}

// slotFrom returns the target whose chain has these rules, and reports whether one of them
// belongs to the data plane.
func (f *Conn) slotFrom(number uint32, rules []rule) (plan.KernelTarget, bool, error) {
	s := plan.KernelTarget{FWMark: number}
	for _, r := range rules {
		if !r.owned() {
			continue
		}
		s.Label = plan.ParseLabel(r.comment)
		s.Packets, s.Bytes = r.packets, r.bytes
		want, err := f.targetRule(s)
		if err != nil {
			return s, false, err
		}
		s.ChainIntact = sameRules(rules, []ruleSpec{want})
		return s, true, nil
	}
	return s, false, nil
}

// slotsFrom returns the targets for which want returns true. It reads the live maps of their
// streams and of the named ones.
func (f *Conn) slotsFrom(rules map[string][]rule, want func(uint32) bool, names map[string]bool) (map[uint32]*plan.KernelTarget, error) {
	slots, streams := map[uint32]*plan.KernelTarget{}, map[string]bool{}
	maps.Copy(streams, names)
	for chain, list := range rules {
		number, ok := plan.ParseTargetChain(chain)
		if !ok || !want(number) {
			continue
		}
		s, ours, err := f.slotFrom(number, list)
		if err != nil {
			return nil, err
		}
		if ours {
			slots[number] = &s
			streams[s.Stream] = true
		}
	}
	for stream := range streams {
		for _, family := range vip.Families {
			live, err := f.readLive(family, stream)
			if err != nil {
				return nil, err
			}
			for number, chain := range live {
				if !want(number) || chain != plan.TargetChain(number) {
					continue
				}
				if slots[number] == nil {
					slots[number] = &plan.KernelTarget{FWMark: number}
				}
				slots[number].Flows[family] = true
			}
		}
	}
	return slots, nil
}

// fewChains bounds the objects that are read one by one instead of all at once.
const fewChains = 16

// ReadTargets reads the nftables objects of some targets. A target without any is not in the
// result.
func (f *Conn) ReadTargets(numbers []uint32) (slots map[uint32]*plan.KernelTarget, err error) {
	wanted := make(map[uint32]bool, len(numbers))
	for _, n := range numbers {
		wanted[n] = true
	}
	err = f.readConsistently("targets", func() error {
		rules, err := f.targetRules(numbers)
		if err != nil {
			return err
		}
		slots, err = f.slotsFrom(rules, func(n uint32) bool { return wanted[n] }, nil)
		return err
	})
	return slots, err
}

// targetRules reads the rules of the chains of targets.
func (f *Conn) targetRules(numbers []uint32) (map[string][]rule, error) {
	if len(numbers) > fewChains {
		return f.readRules("")
	}
	rules := map[string][]rule{}
	for _, n := range numbers {
		some, err := f.readRules(plan.TargetChain(n))
		if err != nil {
			return nil, err
		}
		rules[plan.TargetChain(n)] = some[plan.TargetChain(n)]
	}
	return rules, nil
}

// Read reads the whole data plane: the table, and the rules and routes of these fwmarks and of
// the targets in the table.
func (f *Conn) Read(numbers []uint32) (c *plan.KernelState, err error) {
	err = f.readConsistently("table inet "+plan.TableName, func() error {
		c, err = f.readContent()
		return err
	})
	if err != nil {
		return nil, err
	}
	for n := range c.Targets {
		numbers = append(numbers, n)
	}
	common, err := f.readAllRoutes(numbers, c.Targets)
	c.Base = c.Base && common
	return c, err
}

// readContent reads the table.
func (f *Conn) readContent() (*plan.KernelState, error) {
	c := &plan.KernelState{Problem: "the table is missing", Streams: map[string]*plan.KernelStream{}, Targets: map[uint32]*plan.KernelTarget{}, VIPs: map[vip.VIP]string{}}
	r, err := f.readRuleset(true)
	if err != nil || !r.exists {
		return c, err
	}
	if c.Problem, err = f.inspectBase(r); err != nil {
		return nil, err
	}
	c.Base = c.Problem == ""
	set := func(name string) (*setSpec, error) {
		if s, ok := r.sets[name]; ok {
			return &s, nil
		}
		return nil, nil
	}
	names := map[string]bool{}
	for name := range r.chains {
		if stream, ok := strings.CutPrefix(name, plan.StreamPrefix); ok {
			names[stream] = true
		}
	}
	for name := range r.sets {
		for _, family := range vip.Families {
			for _, prefix := range []string{plan.MaglevMaps[family], plan.LiveMaps[family]} {
				if stream, ok := strings.CutPrefix(name, prefix); ok {
					names[stream] = true
				}
			}
		}
	}
	for name := range names {
		var chain *chainSpec
		if got, ok := r.chains[plan.StreamChain(name)]; ok {
			chain = &got
		}
		s, err := f.streamFrom(name, chain, r.rules[plan.StreamChain(name)], set)
		if err != nil {
			return nil, err
		}
		c.Streams[name] = s
	}
	if c.Targets, err = f.slotsFrom(r.rules, func(uint32) bool { return true }, names); err != nil {
		return nil, err
	}
	c.VIPs, err = f.ReadVIPs()
	return c, err
}
