package readiness

import (
	"fmt"

	"github.com/vipgate/vipgate/pkg/vip"
)

// nameTable holds the VIPs that a watch has named, by their canonical text. It resolves names to
// VIPs, checks that a revision names each VIP once, and counts the VIPs of the watch's state. Each
// name costs one lookup and, if it is known, no allocation.
type nameTable struct {
	index map[string]int32 // canonical text to index in names
	names []name
	// next is the index after the last name. A load balancer sends VIPs in the same order each time,
	// so most names are at next and need no lookup.
	next int

	revision uint64 // staged revision
	stage    uint64 // number of staged revisions
	snapshot uint64 // stage of the newest snapshot: VIPs of earlier stages are not in the state
	staged   int    // number of VIPs in the current stage
	live     int    // VIPs in the state
}

// name is a VIP that a watch has named.
type name struct {
	vip     vip.VIP
	text    string // canonical
	stage   uint64 // newest stage that names it
	removed bool   // that stage removed the VIP
}

// begin starts to stage a revision.
func (t *nameTable) begin(revision uint64, snapshot bool) {
	t.revision = revision
	t.stage++
	t.staged, t.next = 0, 0
	if snapshot {
		t.snapshot, t.live = t.stage, 0
	}
}

// name returns the VIP of a text, and records that the current stage names it. A second time in one
// stage is an error.
func (t *nameTable) name(text string, removed bool) (vip.VIP, error) {
	i := t.next
	if i >= len(t.names) || t.names[i].text != text {
		at, known := t.index[text]
		if !known {
			v, err := vip.Parse(text)
			if err != nil {
				return v, err
			}
			at = t.insert(v)
		}
		i = int(at)
	}
	t.next = i + 1
	n := &t.names[i]
	switch {
	case n.stage == t.stage:
		return n.vip, fmt.Errorf("VIP %s is named twice in revision %d", n.vip, t.revision)
	case t.staged >= MaxVIPs:
		return n.vip, fmt.Errorf("revision %d names more than %d VIPs", t.revision, MaxVIPs)
	}
	switch was := n.isLive(t.snapshot); {
	case was && removed:
		t.live--
	case !was && !removed:
		t.live++
	}
	n.stage, n.removed = t.stage, removed
	t.staged++
	return n.vip, nil
}

// insert returns the index of a VIP and adds the VIP if it is missing. The VIP may exist although
// the lookup of its text failed, because a peer may send a text that is not canonical.
func (t *nameTable) insert(v vip.VIP) int32 {
	text := v.String()
	if i, known := t.index[text]; known {
		return i
	}
	if t.index == nil {
		t.index = make(map[string]int32)
	}
	i := int32(len(t.names))
	t.index[text] = i
	t.names = append(t.names, name{vip: v, text: text})
	return i
}

// isLive reports whether the VIP is in the state that began with the given snapshot.
func (n *name) isLive(snapshot uint64) bool { return n.stage >= snapshot && n.stage > 0 && !n.removed }

// nameSlack is the number of names that the table may hold in excess of twice the VIPs of the
// state.
const nameSlack = 1024

// compact discards the names of removed VIPs once they exceed half of the table. The size of the
// table stays proportional to the state, at an amortized constant cost per name.
func (t *nameTable) compact() {
	if len(t.names) <= 2*t.live+nameSlack {
		return
	}
	kept := nameTable{
		index: make(map[string]int32, t.live), names: make([]name, 0, t.live),
		revision: t.revision, stage: t.stage, snapshot: t.snapshot, staged: t.staged, live: t.live,
	}
	for _, n := range t.names {
		if n.isLive(t.snapshot) {
			kept.index[n.text] = int32(len(kept.names))
			kept.names = append(kept.names, n)
		}
	}
	*t = kept
}

// size returns the number of names in the table.
func (t *nameTable) size() int { return len(t.names) }
