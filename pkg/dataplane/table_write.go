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
	shift := len(m.b)
	m.b = append(m.b, t.b...)
	for _, at := range t.starts {
		m.starts = append(m.starts, at+shift)
	}
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
	return nil
}

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

// writing is a change while it is worked out.
type writing struct {
	*fabric
	transaction
	// live are the maps of live targets by name, as they will be: nil is one that is
	// not there.
	live map[string]map[uint32]string
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
	w.addSet(liveSpec(family, stream, size))
	w.live[liveMap(family, stream)] = map[uint32]string{}
	return nil
}

// write does one transaction.
func (f *fabric) write(c change) error {
	w := &writing{fabric: f, live: map[string]map[uint32]string{}}
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
		if err := w.stream(s); err != nil {
			return fmt.Errorf("stream %s: %w", s.want.name, err)
		}
	}
	if err := w.slotFlows(c.slots); err != nil {
		return err
	}
	if err := w.vips(c.vips); err != nil {
		return err
	}
	if err := w.removals(c); err != nil {
		return err
	}
	return f.commit(&w.transaction, nil)
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
	w.addTable()
	for _, want := range w.commonSets() {
		missing := want.fixed
		if _, ok := r.sets[want.name]; !ok {
			w.addSet(want)
		} else if want.fixed != nil {
			if missing, err = w.missingFixed(want); err != nil {
				return err
			}
		}
		var list []element
		for _, b := range missing {
			list = append(list, element{key: []byte{b}})
		}
		w.addElements(want.name, list)
	}
	for _, want := range w.baseChains() {
		if got, ok := r.chains[want.name]; !ok || got.policy != want.policy {
			w.addChain(want)
		}
		rules, err := w.baseRules(want.name)
		if err != nil {
			return err
		}
		if err := w.setRules(want.name, r.rules[want.name], rules); err != nil {
			return err
		}
	}
	if !w.o.Stateless {
		// Chains stay for somebody else's rules; sets for their elements.
		for _, name := range []string{notrackChain, defragmentChain} {
			w.removeRules(r.rules[name])
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
			w.addChain(chainSpec{name: chain})
		}
		if err := w.setRules(chain, rules[chain], []ruleSpec{want}); err != nil {
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
		w.removeElements(name, remove[name])
	}
	for _, name := range slices.Sorted(maps.Keys(add)) {
		w.addElements(name, add[name])
	}
	return nil
}

// stream makes and mends one stream's chain and maps.
func (w *writing) stream(s streamWrite) error {
	want, now := &s.want, s.now
	if want.size == 0 || want.size > maxTable || want.seed == 0 {
		return fmt.Errorf("a table of %d entries with seed %d cannot be", want.size, want.seed)
	}
	chain := streamChain(want.name)
	rulesStand := now != nil && now.chain && now.size == want.size && now.seed == want.seed
	resized := false
	for _, family := range vip.Families {
		resized = resized || now != nil && len(now.tables[family]) != len(want.tables[family])
	}
	if !rulesStand || resized {
		if err := w.clearStream(want); err != nil {
			return err
		}
	}
	for _, family := range vip.Families {
		name := maglevMap(family, want.name)
		var have []uint32
		if now != nil {
			have = now.tables[family]
		}
		table := want.tables[family]
		if table != nil && len(table) != int(want.size) {
			return fmt.Errorf("a table of %d entries for the size %d", len(table), want.size)
		}
		if err := w.streamLive(family, want, now); err != nil {
			return err
		}
		if have == nil || len(have) != len(table) {
			got, err := w.readSet(name)
			if err != nil {
				return err
			}
			spec := maglevSpec(family, want.name, want.size)
			if got != nil {
				if detail := spec.same(*got); detail != "" {
					return &foreignError{object: "map inet " + TableName + " " + name, detail: detail, stream: want.name}
				}
				// Rules that name it are gone by now.
				w.removeSet(name)
			}
			if table == nil {
				continue
			}
			have = nil
			w.addSet(spec)
		}
		w.entries(name, have, table)
	}
	if !rulesStand || resized {
		rules, err := w.streamRules(want)
		if err != nil {
			return err
		}
		for _, r := range rules {
			if err := w.addRule(chain, r); err != nil {
				return err
			}
		}
	}
	return nil
}

// streamLive makes the map of live targets of a stream that has a table, of the size
// that is right for it, and removes that of one that has none any more.
func (w *writing) streamLive(family vip.Family, want, now *streamContent) error {
	var had []uint32
	if now != nil {
		had = now.tables[family]
	}
	table := want.tables[family]
	if table != nil && len(had) == len(table) && now.chain {
		return nil // its rules name the map
	}
	name, spec := liveMap(family, want.name), liveSpec(family, want.name, want.size)
	got, err := w.readSet(name)
	if err != nil {
		return err
	}
	if got != nil {
		if detail := spec.same(*got); detail != "" {
			return &foreignError{object: "map inet " + TableName + " " + name, detail: detail, stream: want.name}
		}
		if table != nil && got.size == spec.size {
			return nil
		}
	}
	live, err := w.liveOf(family, want.name)
	if err != nil {
		return err
	}
	if got != nil {
		w.removeSet(name)
		w.live[name] = nil
	}
	if table == nil {
		return nil
	}
	w.addSet(spec)
	w.live[name] = map[uint32]string{}
	var list []element
	for _, number := range slices.Sorted(maps.Keys(live)) {
		if live[number] != "" {
			w.live[name][number] = live[number]
			list = append(list, element{key: nativeBytes(number), chain: live[number]})
		}
	}
	w.addElements(name, list)
	return nil
}

// clearStream makes a stream's chain and takes our rules out of it.
func (w *writing) clearStream(want *streamContent) error {
	name := streamChain(want.name)
	got, err := w.readChain(name)
	if err != nil {
		return err
	}
	if got == nil {
		w.addChain(chainSpec{name: name})
		return nil
	}
	if detail := (chainSpec{name: name}).same(*got); detail != "" {
		return &foreignError{object: "chain inet " + TableName + " " + name, detail: detail, stream: want.name}
	}
	rules, err := w.readRules(name)
	if err != nil {
		return err
	}
	w.removeRules(rules[name])
	return nil
}

// entries writes what is different between two tables; nil is an empty one.
func (w *writing) entries(set string, have, want []uint32) {
	var add, remove []element
	for i, number := range want {
		var was uint32
		if have != nil {
			was = have[i]
		}
		if was == number {
			continue
		}
		key := nativeBytes(uint32(i))
		if was != 0 {
			remove = append(remove, element{key: key})
		}
		if number != 0 {
			add = append(add, element{key: key, data: number, hasData: true})
		}
	}
	w.removeElements(set, remove)
	w.addElements(set, add)
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
			w.removeElements(set, prefixElements(v, ""))
		}
		if chain != "" && was != chain {
			w.addElements(set, prefixElements(v, chain))
		}
		if !w.o.Stateless {
			continue
		}
		set = setOf(v, ownHosts, ownNets)
		if _, there = own[v]; there != (chain != "") {
			if there {
				w.removeElements(set, prefixElements(v, ""))
			} else {
				w.addElements(set, prefixElements(v, ""))
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
			w.removeChain(streamChain(stream))
		}
		for _, family := range vip.Families {
			for _, spec := range []setSpec{maglevSpec(family, stream, 0), liveSpec(family, stream, 0)} {
				if got, err := w.readSet(spec.name); err != nil {
					return err
				} else if got != nil && spec.same(*got) == "" {
					w.removeSet(spec.name)
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
		w.removeElements(name, remove[name])
	}
	for _, n := range numbers {
		if got, err := w.readChain(targetChain(n)); err != nil {
			return err
		} else if got != nil {
			w.removeChain(targetChain(n))
		}
	}
	return nil
}
