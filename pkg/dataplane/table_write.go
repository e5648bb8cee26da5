package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// transaction gathers what the kernel does at once or not at all.
type transaction struct {
	messages
	// sets numbers the sets that it makes, so that rules of the same transaction can
	// name them.
	sets uint32
}

func (t *transaction) begin(kind, flags uint16) {
	t.messages.begin(nftMessage(kind), flags, familyInet, unix.NFNETLINK_V0, 0, 0)
}

func (t *transaction) addTable() {
	t.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE)
	t.text(unix.NFTA_TABLE_NAME, TableName)
	t.big(unix.NFTA_TABLE_FLAGS, 0) // wakes a dormant one
	t.end()
}

func (t *transaction) removeTable() {
	t.begin(unix.NFT_MSG_DELTABLE, 0)
	t.text(unix.NFTA_TABLE_NAME, TableName)
	t.end()
}

func (t *transaction) addChain(c chainSpec) {
	t.begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE)
	t.text(unix.NFTA_CHAIN_TABLE, TableName)
	t.text(unix.NFTA_CHAIN_NAME, c.name)
	if c.kind != "" {
		hook := t.open(unix.NFTA_CHAIN_HOOK)
		t.big(unix.NFTA_HOOK_HOOKNUM, c.hook)
		t.big(unix.NFTA_HOOK_PRIORITY, uint32(c.priority))
		t.shut(hook)
		t.big(unix.NFTA_CHAIN_POLICY, c.policy)
		t.text(unix.NFTA_CHAIN_TYPE, c.kind)
	}
	t.end()
}

func (t *transaction) removeChain(name string) {
	t.begin(unix.NFT_MSG_DELCHAIN, 0)
	t.text(unix.NFTA_CHAIN_TABLE, TableName)
	t.text(unix.NFTA_CHAIN_NAME, name)
	t.end()
}

func (t *transaction) addRule(chain string, r ruleSpec) error {
	if len(r.comment) > maxComment {
		return fmt.Errorf("rule %q of chain %s: a comment has at most %d bytes", r.comment, chain, maxComment)
	}
	t.begin(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND)
	t.text(unix.NFTA_RULE_TABLE, TableName)
	t.text(unix.NFTA_RULE_CHAIN, chain)
	t.bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, r.expressions)
	t.bytes(unix.NFTA_RULE_USERDATA, append(append([]byte{commentType, byte(len(r.comment) + 1)}, r.comment...), 0))
	t.end()
	return nil
}

// setRules brings ours among the rules of a chain to what they must be.
func (t *transaction) setRules(chain string, have []rule, want []ruleSpec) error {
	if sameRules(have, want) {
		return nil
	}
	t.removeRules(have)
	for _, r := range want {
		if err := t.addRule(chain, r); err != nil {
			return err
		}
	}
	return nil
}

// removeRules removes ours among the rules.
func (t *transaction) removeRules(have []rule) {
	for _, r := range have {
		if !r.ours() {
			continue
		}
		t.begin(unix.NFT_MSG_DELRULE, 0)
		t.text(unix.NFTA_RULE_TABLE, TableName)
		t.text(unix.NFTA_RULE_CHAIN, r.chain)
		t.bytes(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, r.handle))
		t.end()
	}
}

func (t *transaction) addSet(s setSpec) {
	t.sets++
	t.begin(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE)
	t.text(unix.NFTA_SET_TABLE, TableName)
	t.text(unix.NFTA_SET_NAME, s.name)
	t.big(unix.NFTA_SET_FLAGS, s.flags)
	t.big(unix.NFTA_SET_KEY_TYPE, s.keyType)
	t.big(unix.NFTA_SET_KEY_LEN, s.keySize)
	if s.flags&unix.NFT_SET_MAP != 0 {
		t.big(unix.NFTA_SET_DATA_TYPE, s.dataType)
		if s.dataType != dataVerdict {
			t.big(unix.NFTA_SET_DATA_LEN, s.data)
		}
	}
	t.big(unix.NFTA_SET_ID, t.sets)
	if s.size != 0 {
		desc := t.open(unix.NFTA_SET_DESC)
		t.big(unix.NFTA_SET_DESC_SIZE, s.size)
		t.shut(desc)
	}
	t.bytes(unix.NFTA_SET_USERDATA, s.userdata())
	t.end()
}

// userdata tells nft the byte order of keys and data, without which it does not show
// numbers as they are: types 0 and 1, four bytes, 1 is the host's and 2 the network's.
func (s setSpec) userdata() []byte {
	order := func(t uint32) byte {
		if t == typeMark {
			return 1
		}
		return 2
	}
	b := []byte{0, 4, order(s.keyType), 0, 0, 0}
	if s.dataType == typeMark {
		b = append(b, 1, 4, order(s.dataType), 0, 0, 0)
	}
	return b
}

func (t *transaction) removeSet(name string) {
	t.begin(unix.NFT_MSG_DELSET, 0)
	t.text(unix.NFTA_SET_TABLE, TableName)
	t.text(unix.NFTA_SET_NAME, name)
	t.end()
}

func (t *transaction) addElements(set string, list []element) {
	t.elements(unix.NFT_MSG_NEWSETELEM, set, list)
}

func (t *transaction) removeElements(set string, list []element) {
	t.elements(unix.NFT_MSG_DELSETELEM, set, list)
}

// commit sends the transaction and waits for the kernel's word. An empty one is none.
//
// Only the last message asks to be confirmed: the kernel reports refusals anyway, and
// a confirmation of each would overrun the socket.
func (f *fabric) commit(t *transaction, generation *uint32) error {
	if len(t.starts) == 0 {
		return nil
	}
	var m messages
	embrace := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	m.begin(unix.NFNL_MSG_BATCH_BEGIN, 0, embrace...)
	if generation != nil {
		// The kernel refuses it when the ruleset is another one by now.
		m.big(batchGeneration, *generation)
	}
	m.end()
	m.append(&t.messages)
	last := m.starts[len(m.starts)-1]
	m.b[last+6] |= unix.NLM_F_ACK
	m.begin(unix.NFNL_MSG_BATCH_END, 0, embrace...)
	m.end()
	if len(m.b) > f.nft.room {
		return fmt.Errorf("change %d things in nftables: they take %d bytes at once, and the socket's buffer has %d: give the process CAP_NET_ADMIN, or set net.core.wmem_max to more", len(t.starts), len(m.b), f.nft.room)
	}
	first, err := f.nft.send(&m)
	if err != nil {
		return fmt.Errorf("change nftables: %w", err)
	}
	f.nft.written += len(t.starts)
	end := first + uint32(len(m.starts)) - 1
	var refusals []error
	err = f.nft.receive(func(h unix.NlMsghdr, data []byte) (bool, error) {
		// Before the first message comes what is left of an exchange that failed.
		if h.Type != unix.NLMSG_ERROR || h.Seq-first > end-first {
			return false, nil
		}
		if err := parseError(h, data); err != nil && len(refusals) < 3 {
			refusals = append(refusals, fmt.Errorf("%s: %w", describe(&m, int(h.Seq-first)), err))
		}
		// What concerns the whole comes with the number of the message that begins it.
		return h.Seq == first || h.Seq >= end-1, nil
	})
	if err = errors.Join(append(refusals, err)...); err != nil {
		return fmt.Errorf("change nftables: %w", err)
	}
	f.committed++
	return nil
}

// transactions counts those that were done: the number of the ruleset rose by as much.
func (f *fabric) transactions() uint32 { return f.committed }

// batchGeneration is NFNL_BATCH_GENID.
const batchGeneration = 1

// describe says what a message of a transaction was to do.
func describe(m *messages, i int) string {
	if i <= 0 || i >= len(m.starts)-1 {
		return "transaction"
	}
	b := m.slice(i, i+1).b
	kind := uint16(b[4])
	what := map[uint16]string{
		unix.NFT_MSG_NEWTABLE: "add table", unix.NFT_MSG_DELTABLE: "delete table", unix.NFT_MSG_NEWCHAIN: "add chain", unix.NFT_MSG_DELCHAIN: "delete chain",
		unix.NFT_MSG_NEWRULE: "add rule to chain", unix.NFT_MSG_DELRULE: "delete rule of chain", unix.NFT_MSG_NEWSET: "add set", unix.NFT_MSG_DELSET: "delete set",
		unix.NFT_MSG_NEWSETELEM: "add elements to set", unix.NFT_MSG_DELSETELEM: "delete elements of set",
	}[kind]
	// In all of them attribute 1 is the table; what the message is about is attribute
	// 2 in messages of rules, sets and elements, and 3 in those of chains.
	name := uint16(2)
	if kind == unix.NFT_MSG_NEWCHAIN || kind == unix.NFT_MSG_DELCHAIN {
		name = unix.NFTA_CHAIN_NAME
	}
	if kind == unix.NFT_MSG_NEWTABLE || kind == unix.NFT_MSG_DELTABLE {
		return what + " inet " + TableName
	}
	return what + " inet " + TableName + " " + text(attribute(b[nlmsgLength+nfgenmsgLength:], name))
}

// writing is a change while it is worked out. What nothing leads to yet comes first,
// then entries of tables, then the rest.
type writing struct {
	*fabric
	first, last transaction
	fills       []fill
	// live are the maps of live targets by name, as they will be: nil is one that is
	// not there.
	live map[string]map[uint32]string
}

// fill are entries of one map that change.
type fill struct {
	set     string
	entries []entry
}

// entry is one entry that changes; number 0 is none.
type entry struct {
	index, number uint32
	// had: there is one that has to go before.
	had bool
}

// maxElements is how many elements one transaction changes. For each the kernel holds
// 4 KiB until all is done, and 10 µs go by, as soon as somebody listens for changes:
// 200 000 at once took 1.8 GB and 4 s (Linux 6.18). These fit a send buffer that could
// not be raised, too.
const maxElements = 6000

// elementsOf counts messages' elements.
func elementsOf(fills []fill) (n int) {
	for _, f := range fills {
		for _, e := range f.entries {
			if e.had {
				n++
			}
			if e.number != 0 {
				n++
			}
		}
	}
	return n
}

// write does one transaction, or, when it is about more elements than maxElements,
// several: at each moment between them every packet has a way, new or old.
func (f *fabric) write(c change) error {
	c, err := f.stepAside(c)
	if err != nil {
		return err
	}
	w := &writing{fabric: f, live: map[string]map[uint32]string{}}
	w.last.sets = 1 << 16 // apart from those of the first
	if c.base {
		if err := w.base(); err != nil {
			return err
		}
		if err := f.addCommonWays(); err != nil {
			return err
		}
	}
	if err := w.slotChains(c.slots); err != nil {
		return err
	}
	for _, s := range c.streams {
		if err := w.startLive(s); err != nil {
			return fmt.Errorf("stream %s: %w", s.want.name, err)
		}
	}
	if err := w.slotFlows(c.slots); err != nil {
		return err
	}
	for _, s := range c.streams {
		if err := w.stream(s); err != nil {
			return fmt.Errorf("stream %s: %w", s.want.name, err)
		}
	}
	if err := w.vips(c.vips); err != nil {
		return err
	}
	if err := w.removals(c); err != nil {
		return err
	}
	return w.commit()
}

// commit does what was worked out.
func (w *writing) commit() error {
	if elementsOf(w.fills) <= maxElements {
		for _, f := range w.fills {
			w.first.fill(f)
		}
		w.first.append(&w.last.messages)
		return w.fabric.commit(&w.first, nil)
	}
	if err := w.fabric.commit(&w.first, nil); err != nil {
		return err
	}
	if err := w.fillUp(w.fills); err != nil {
		return err
	}
	return w.fabric.commit(&w.last, nil)
}

// fillUp writes entries, in as many transactions as it takes. Of an entry that changes
// both steps are in the same.
func (f *fabric) fillUp(fills []fill) error {
	var t transaction
	n := 0
	for _, x := range fills {
		for part := range slices.Chunk(x.entries, maxElements/2) {
			if n += 2 * len(part); n > maxElements {
				if err := f.commit(&t, nil); err != nil {
					return err
				}
				t, n = transaction{}, 2*len(part)
			}
			t.fill(fill{x.set, part})
		}
	}
	return f.commit(&t, nil)
}

// fill writes entries.
func (t *transaction) fill(f fill) {
	var add, remove []element
	for _, e := range f.entries {
		key := nativeBytes(e.index)
		if e.had {
			remove = append(remove, element{key: key})
		}
		if e.number != 0 {
			add = append(add, element{key: key, data: e.number, hasData: true})
		}
	}
	t.removeElements(f.set, remove)
	t.addElements(f.set, add)
}

// liveOf returns a map of live targets as it is so far.
func (w *writing) liveOf(family vip.Family, stream string) (map[uint32]string, error) {
	name := liveMap(family, stream)
	if live, ok := w.live[name]; ok {
		return live, nil
	}
	live, err := w.readLive(family, stream)
	w.live[name] = live
	return live, err
}

// makeLive makes the map of a stream's live targets unless it is there.
func (w *writing) makeLive(family vip.Family, stream string, size uint32) error {
	live, err := w.liveOf(family, stream)
	if err != nil || live != nil {
		return err
	}
	w.first.addSet(liveSpec(family, stream, size))
	w.live[liveMap(family, stream)] = map[uint32]string{}
	return nil
}

// base makes and mends what no stream owns.
func (w *writing) base() error {
	r, err := w.readRuleset(false)
	if err != nil {
		return err
	}
	problem, err := w.inspectBase(r)
	if err != nil || problem == "" {
		return err
	}
	w.first.addTable()
	for _, want := range w.commonSets() {
		missing := want.fixed
		if _, ok := r.sets[want.name]; !ok {
			w.first.addSet(want)
		} else if want.fixed != nil {
			if missing, err = w.missingFixed(want); err != nil {
				return err
			}
		}
		var list []element
		for _, b := range missing {
			list = append(list, element{key: []byte{b}})
		}
		w.first.addElements(want.name, list)
	}
	for _, want := range w.baseChains() {
		if got, ok := r.chains[want.name]; !ok || got.policy != want.policy {
			w.first.addChain(want)
		}
		rules, err := w.baseRules(want.name)
		if err != nil {
			return err
		}
		if err := w.first.setRules(want.name, r.rules[want.name], rules); err != nil {
			return err
		}
	}
	if !w.o.Stateless {
		// Chains stay for somebody else's rules; sets for their elements.
		for _, name := range []string{notrackChain, defragmentChain} {
			w.first.removeRules(r.rules[name])
		}
	}
	return nil
}

// slotChains makes targets' chains.
func (w *writing) slotChains(slots []slotContent) error {
	numbers := make([]uint32, 0, len(slots))
	for _, s := range slots {
		numbers = append(numbers, s.number)
	}
	rules, err := w.targetRules(numbers)
	if err != nil {
		return err
	}
	for _, s := range slots {
		chain := targetChain(s.number)
		want, err := w.targetRule(s)
		if err != nil {
			return err
		}
		if len(rules[chain]) == 0 {
			w.first.addChain(chainSpec{name: chain})
		}
		if err := w.first.setRules(chain, rules[chain], []ruleSpec{want}); err != nil {
			return err
		}
	}
	return nil
}

// slotFlows has flows of targets live, or not.
func (w *writing) slotFlows(slots []slotContent) error {
	add, remove := map[string][]element{}, map[string][]element{}
	for _, s := range slots {
		for _, family := range vip.Families {
			name, chain := liveMap(family, s.stream), targetChain(s.number)
			if s.flows[family] {
				if err := w.makeLive(family, s.stream, 0); err != nil {
					return err
				}
			}
			live, err := w.liveOf(family, s.stream)
			if err != nil {
				return err
			}
			have, there := live[s.number]
			if there && have != chain {
				return &foreignError{object: fmt.Sprintf("element %d of map inet %s %s", s.number, TableName, name), detail: fmt.Sprintf("it leads to %q", have), stream: s.stream}
			}
			e := element{key: nativeBytes(s.number)}
			switch {
			case s.flows[family] && !there:
				e.chain = chain
				live[s.number] = chain
				add[name] = append(add[name], e)
			case !s.flows[family] && there:
				delete(live, s.number)
				remove[name] = append(remove[name], e)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(remove)) {
		w.last.removeElements(name, remove[name])
	}
	for _, name := range slices.Sorted(maps.Keys(add)) {
		w.first.addElements(name, add[name])
	}
	return nil
}

// stream makes and mends one stream's chain and maps.
func (w *writing) stream(s streamWrite) error {
	want, now := &s.want, s.now
	if err := want.check(); err != nil {
		return err
	}
	stands := rulesStand(s)
	referred := false
	if !stands {
		rules, err := w.startStream(want)
		if err != nil {
			return err
		}
		w.last.removeRules(rules)
		referred = slices.ContainsFunc(rules, func(r rule) bool { return r.ours() })
	}
	for _, family := range vip.Families {
		if err := w.streamLive(family, want, stands); err != nil {
			return err
		}
		if err := w.streamTable(family, want, now, referred); err != nil {
			return err
		}
		if err := w.removeSpare(family, want.name, stands); err != nil {
			return err
		}
	}
	if stands {
		return nil
	}
	rules, err := w.streamRules(want)
	if err != nil {
		return err
	}
	for _, r := range rules {
		if err := w.last.addRule(streamChain(want.name), r); err != nil {
			return err
		}
	}
	return nil
}

func (s *streamContent) check() error {
	if s.size == 0 || s.size > maxTable || s.seed == 0 {
		return fmt.Errorf("a table of %d entries with seed %d cannot be", s.size, s.seed)
	}
	for _, table := range s.tables {
		if table != nil && len(table) != int(s.size) {
			return fmt.Errorf("a table of %d entries for the size %d", len(table), s.size)
		}
	}
	return nil
}

// rulesStand tells whether a stream's rules need no change.
func rulesStand(s streamWrite) bool {
	if s.now == nil || !s.now.chain || s.now.size != s.want.size || s.now.seed != s.want.seed {
		return false
	}
	for _, family := range vip.Families {
		if len(s.now.tables[family]) != len(s.want.tables[family]) {
			return false
		}
	}
	return true
}

// startStream makes a stream's chain unless it is there, and returns its rules.
func (w *writing) startStream(want *streamContent) ([]rule, error) {
	name := streamChain(want.name)
	got, err := w.readChain(name)
	if err != nil {
		return nil, err
	}
	if got == nil {
		w.first.addChain(chainSpec{name: name})
		return nil, nil
	}
	if detail := (chainSpec{name: name}).same(*got); detail != "" {
		return nil, &foreignError{object: "chain inet " + TableName + " " + name, detail: detail, stream: want.name}
	}
	rules, err := w.readRules(name)
	return rules[name], err
}

// streamTable makes, changes or removes one table. One of another size that rules
// refer to is replaced when they are.
func (w *writing) streamTable(family vip.Family, want, now *streamContent, referred bool) error {
	table := want.tables[family]
	var have []uint32
	if now != nil {
		have = now.tables[family]
	}
	spec := maglevSpec(family, want.name, want.size)
	if have != nil && len(have) == len(table) {
		w.fills = append(w.fills, fill{spec.name, differences(have, table)})
		return nil
	}
	got, err := w.readSet(spec.name)
	if err != nil {
		return err
	}
	at, later := &w.first, false
	if got != nil {
		if detail := spec.same(*got); detail != "" {
			return &foreignError{object: "map inet " + TableName + " " + spec.name, detail: detail, stream: want.name}
		}
		if referred {
			at, later = &w.last, true
		}
		at.removeSet(spec.name)
	}
	if table == nil {
		return nil
	}
	at.addSet(spec)
	x := fill{spec.name, differences(nil, table)}
	if later {
		w.last.fill(x)
	} else {
		w.fills = append(w.fills, x)
	}
	return nil
}

// removeSpare removes what is left of a replacement that stepAside began.
func (w *writing) removeSpare(family vip.Family, stream string, stands bool) error {
	if stands {
		return nil
	}
	got, err := w.readSet(spareMap(family, stream))
	if err != nil || got == nil {
		return err
	}
	w.last.removeSet(got.name)
	return nil
}

// startLive makes the maps of live targets of a stream that has tables.
func (w *writing) startLive(s streamWrite) error {
	if rulesStand(s) {
		return nil // they name the maps
	}
	for _, family := range s.want.families() {
		spec := liveSpec(family, s.want.name, s.want.size)
		got, err := w.readSet(spec.name)
		if err != nil {
			return err
		}
		if got != nil {
			if detail := spec.same(*got); detail != "" {
				return &foreignError{object: "map inet " + TableName + " " + spec.name, detail: detail, stream: s.want.name}
			}
		}
		if err := w.makeLive(family, s.want.name, s.want.size); err != nil {
			return err
		}
	}
	return nil
}

// streamLive replaces the map of live targets of a stream whose table has another size
// now.
func (w *writing) streamLive(family vip.Family, want *streamContent, stands bool) error {
	if stands {
		return nil // its rules name the map
	}
	// That of a family without a table stays: its targets say when flows end.
	if want.tables[family] == nil {
		return nil
	}
	name, spec := liveMap(family, want.name), liveSpec(family, want.name, want.size)
	got, err := w.readSet(name)
	if err != nil || got == nil || got.size == spec.size {
		return err
	}
	live, err := w.liveOf(family, want.name)
	if err != nil {
		return err
	}
	w.last.removeSet(name)
	w.last.addSet(spec)
	var list []element
	for _, number := range slices.Sorted(maps.Keys(live)) {
		if live[number] != "" {
			list = append(list, element{key: nativeBytes(number), chain: live[number]})
		}
	}
	w.last.addElements(name, list)
	return nil
}

// differences are the entries that differ between two tables; nil is an empty one.
func differences(have, want []uint32) []entry {
	var list []entry
	for i, number := range want {
		var was uint32
		if have != nil {
			was = have[i]
		}
		if was != number {
			list = append(list, entry{index: uint32(i), number: number, had: was != 0})
		}
	}
	return list
}

// vips has VIPs lead to streams.
func (w *writing) vips(change map[vip.VIP]string) error {
	if len(change) == 0 {
		return nil
	}
	have, err := w.readVIPElements(hostMaps, netMaps)
	if err != nil {
		return err
	}
	own := map[vip.VIP]string{}
	if w.o.Stateless {
		if own, err = w.readVIPElements(ownHosts, ownNets); err != nil {
			return err
		}
	}
	for _, v := range slices.SortedFunc(maps.Keys(change), vip.Compare) {
		set, chain := setOf(v, hostMaps, netMaps), ""
		if change[v] != "" {
			chain = streamChain(change[v])
		}
		was, there := have[v]
		switch {
		case there && !strings.HasPrefix(was, streamPrefix):
			if chain != "" {
				return &foreignError{object: fmt.Sprintf("element %s of map inet %s %s", v, TableName, set), detail: fmt.Sprintf("it leads to %q", was), v: v}
			}
			continue
		case there && was != chain:
			w.last.removeElements(set, prefixElements(v, ""))
		}
		if chain != "" && was != chain {
			w.last.addElements(set, prefixElements(v, chain))
		}
		if !w.o.Stateless {
			continue
		}
		set = setOf(v, ownHosts, ownNets)
		if _, there = own[v]; there != (chain != "") {
			if there {
				w.last.removeElements(set, prefixElements(v, ""))
			} else {
				w.last.addElements(set, prefixElements(v, ""))
			}
		}
	}
	return nil
}

// removals removes streams and targets.
func (w *writing) removals(c change) error {
	for _, stream := range c.removeStreams {
		if got, err := w.readChain(streamChain(stream)); err != nil {
			return err
		} else if got != nil {
			w.last.removeChain(streamChain(stream))
		}
		for _, family := range vip.Families {
			for _, spec := range []setSpec{maglevSpec(family, stream, 0), liveSpec(family, stream, 0), spareSpec(family, stream, 0)} {
				if got, err := w.readSet(spec.name); err != nil {
					return err
				} else if got != nil && spec.same(*got) == "" {
					w.last.removeSet(spec.name)
				}
			}
			w.live[liveMap(family, stream)] = nil
		}
	}
	return w.removeTargets(c.removeSlots)
}

// removeTargets removes targets' chains and what leads there.
func (w *writing) removeTargets(numbers []uint32) error {
	if len(numbers) == 0 {
		return nil
	}
	rules, err := w.targetRules(numbers)
	if err != nil {
		return err
	}
	remove := map[string][]element{}
	for _, n := range numbers {
		s, ours, err := w.slotFrom(n, rules[targetChain(n)])
		if err != nil {
			return err
		}
		for _, family := range vip.Families {
			if !ours {
				continue
			}
			live, err := w.liveOf(family, s.stream)
			if err != nil {
				return err
			}
			if live[n] == targetChain(n) {
				name := liveMap(family, s.stream)
				remove[name] = append(remove[name], element{key: nativeBytes(n)})
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(remove)) {
		w.last.removeElements(name, remove[name])
	}
	for _, n := range numbers {
		if got, err := w.readChain(targetChain(n)); err != nil {
			return err
		} else if got != nil {
			w.last.removeChain(targetChain(n))
		}
	}
	return nil
}
