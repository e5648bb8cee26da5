package serving

import (
	"maps"
	"math/bits"
	"slices"
	"sort"
	"time"

	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// judged is one VIP of the attractor.
type judged struct {
	vip.VIP
	group *group
	// verdict is the result of the newest evaluation, without the VIP; nil before the first. VIPs
	// share it, and it never changes.
	verdict *readiness.VIPReadiness
	// installed is the stream to which the kernel is known to send the VIP; "" for none.
	installed string
	// leaves is the end of the drain of a VIP that left the trench file; zero if it did not.
	leaves time.Time
	// suspicion is why probes find the VIP dead through this pod; "" if they do not.
	suspicion string
}

// group is the set of VIPs of one family that the same streams list. Those in the same
// circumstances share a verdict.
type group struct {
	family  vip.Family
	streams []*stream // in the order of the trench file
	// owner serves the VIPs in the kernel: the stream whose name sorts first; nil for none.
	owner *stream
	// successor is the stream that serves the VIPs once it is ready; nil if owner stays.
	successor *stream
	memos     [circumstances]memo
}

// memo is a verdict of the evaluation with this number.
type memo struct {
	evaluation uint64
	verdict    *readiness.VIPReadiness
}

// The circumstances in which VIPs of one group differ, as bits of an index.
const (
	isDown        = 1 << iota // it is not ready, and would rise
	isForwarded               // by the kernel
	circumstances = 1 << iota // their number
)

// roster holds the VIPs of the attractor, and the VIPs that the next evaluation judges or removes.
type roster struct {
	vips    []judged              // in ascending order
	leaving map[vip.VIP]time.Time // see Leave
	suspect map[vip.VIP]string    // see Suspect
	moves   map[vip.VIP]Move      // see Move
	touched marks
	removed []vip.VIP
}

// extension is a group with one stream more.
type extension struct {
	group  *group
	stream *stream
}

// configure replaces the VIPs, which keep their verdicts. kernel is nil without a data plane.
func (r *roster) configure(vips []vip.VIP, kernel *kernel) {
	before := r.vips
	list := slices.Clone(vips)
	slices.SortFunc(list, vip.Compare)
	list = slices.Compact(list)
	var none [len(vip.Families)]*group
	for _, f := range vip.Families {
		none[f] = &group{family: f}
	}
	r.vips = make([]judged, len(list))
	// Both lists are sorted, so one pass over them finds the VIPs that remain.
	for i, v := range list {
		entry := &r.vips[i]
		entry.VIP, entry.group, entry.leaves = v, none[v.Family()], r.leaving[v]
		entry.suspicion = r.suspect[v]
		for len(before) > 0 && vip.Compare(before[0].VIP, v) < 0 {
			r.remove(&before[0])
			before = before[1:]
		}
		if len(before) > 0 && before[0].VIP == v {
			entry.verdict, entry.installed = before[0].verdict, before[0].installed
			before = before[1:]
		} else if kernel != nil {
			entry.installed = kernel.state.VIPs[v]
		}
	}
	for i := range before {
		r.remove(&before[i])
	}
	// A VIP may have been removed and added between two evaluations.
	r.removed = slices.DeleteFunc(r.removed, func(v vip.VIP) bool { return r.find(v, new(int)) != nil })
	r.touched.reset(len(r.vips))
	for i := range r.vips {
		r.touched.add(i)
	}
}

// Leave sets the VIPs that the next Configure contains although they left the trench file, with the
// ends of their drains. They are at most DRAINING.
func (evaluator *Evaluator) Leave(ends map[vip.VIP]time.Time) {
	evaluator.roster.leaving = maps.Clone(ends)
}

// Suspect replaces the VIPs that probes find dead through this pod, each with the reason. They stay
// ready, with a reason of their own. The map must not be changed afterwards.
func (evaluator *Evaluator) Suspect(vips map[vip.VIP]string) {
	before := evaluator.roster.suspect
	evaluator.roster.suspect = vips
	for _, changed := range []map[vip.VIP]string{before, vips} {
		for v := range changed {
			if entry := evaluator.roster.find(v, new(int)); entry != nil && entry.suspicion != vips[v] {
				entry.suspicion = vips[v]
				evaluator.roster.touch(v)
			}
		}
	}
}

// Move is the change of the stream that serves a VIP.
type Move struct{ From, To string }

// Move sets the VIPs that the next Configure leaves with their old streams, although it lists them
// in their new ones. They move with a later Configure, once [Evaluator.CanServe] holds.
func (evaluator *Evaluator) Move(moves map[vip.VIP]Move) {
	evaluator.roster.moves = maps.Clone(moves)
}

// Owners returns the stream that serves each VIP that is ready or drains.
func (evaluator *Evaluator) Owners() map[vip.VIP]string {
	owners := map[vip.VIP]string{}
	for i := range evaluator.roster.vips {
		entry := &evaluator.roster.vips[i]
		if owner := entry.group.owner; owner != nil && entry.attracts() {
			owners[entry.VIP] = owner.Name
		}
	}
	return owners
}

// CanServe reports whether a stream has enough ready targets for a VIP, and waits for no more.
func (evaluator *Evaluator) CanServe(name string, v vip.VIP) bool {
	stream := evaluator.streams[name]
	return stream != nil && stream.gathering.over && !stream.settles(v.Family()) &&
		stream.enough(stream.tallies[v.Family()].ready)
}

// attracts reports whether the VIP is ready, or drains.
func (entry *judged) attracts() bool {
	return entry.verdict != nil && entry.verdict.State != vip.NotReady
}

// Attracts reports whether a VIP is ready, or drains.
func (evaluator *Evaluator) Attracts(v vip.VIP) bool {
	entry := evaluator.roster.find(v, new(int))
	return entry != nil && entry.attracts()
}

// remove notes a VIP that is no longer configured.
func (r *roster) remove(entry *judged) {
	if entry.verdict != nil {
		r.removed = append(r.removed, entry.VIP)
	}
}

// find returns a configured VIP; nil for none. near is the expected index, and find advances it, so
// that one pass finds a list of VIPs in ascending order.
func (r *roster) find(v vip.VIP, near *int) *judged {
	if *near >= len(r.vips) || r.vips[*near].VIP != v {
		i, found := sort.Find(len(r.vips), func(i int) int { return vip.Compare(v, r.vips[i].VIP) })
		if *near = i; !found {
			return nil
		}
	}
	*near++
	return &r.vips[*near-1]
}

// owner returns the stream that serves a VIP in the kernel; nil for none. near is passed to find.
func (r *roster) owner(v vip.VIP, near *int) *stream {
	if entry := r.find(v, near); entry != nil {
		return entry.group.owner
	}
	return nil
}

// assign adds a stream to the groups of its VIPs. known caches the groups that were created so far.
func (r *roster) assign(added *stream, known map[extension]*group) {
	var sizes [len(vip.Families)]int
	for _, v := range added.VIPs {
		sizes[v.Family()]++
	}
	for f, size := range sizes {
		added.vips[f] = make([]int32, 0, size)
	}
	var near int
	var previous, extended *group // of the previous VIP; successive VIPs nearly always share them
	for _, v := range added.VIPs {
		entry := r.find(v, &near)
		if entry == nil {
			continue // not in the attractor
		}
		family := v.Family()
		added.vips[family] = append(added.vips[family], int32(near-1))
		if entry.group != previous {
			previous = entry.group
			extended = known[extension{previous, added}]
			if extended == nil {
				extended = &group{family: family, streams: append(slices.Clip(previous.streams), added), owner: previous.owner}
				if previous.owner == nil || added.Name < previous.owner.Name {
					extended.owner = added
				}
				known[extension{previous, added}] = extended
			}
		}
		entry.group = extended
	}
}

// keep makes the old streams the owners of the VIPs that move. Other streams do not have these
// VIPs, and the new ones prepare.
func (r *roster) keep(streams map[string]*stream) {
	known := map[extension]*group{}
	kept := map[*stream]vip.Set{} // by the streams that list the VIPs and do not serve them
	for v, move := range r.moves {
		entry, from, to := r.find(v, new(int)), streams[move.From], streams[move.To]
		if entry == nil || from == nil || to == nil {
			continue
		}
		before := entry.group
		if known[extension{before, from}] == nil {
			known[extension{before, from}] = &group{family: before.family, streams: before.streams, owner: from, successor: to}
		}
		entry.group = known[extension{before, from}]
		to.prepare[v.Family()] = true
		for _, other := range before.streams {
			if kept[other] == nil {
				kept[other] = vip.Set{}
			}
			if other != from {
				kept[other][v] = struct{}{}
			}
		}
	}
	for stream, vips := range kept {
		stream.VIPs = slices.DeleteFunc(slices.Clone(stream.VIPs), vips.Has)
	}
}

// touch schedules a VIP for judging if it is configured.
func (r *roster) touch(v vip.VIP) {
	var near int
	if r.find(v, &near) != nil {
		r.touched.add(near - 1)
	}
}

// touchStream schedules the VIPs of a stream for judging.
func (r *roster) touchStream(touched *stream) {
	for _, f := range vip.Families {
		r.touchFamily(touched, f)
	}
}

// touchFamily schedules the VIPs of one family of a stream for judging.
func (r *roster) touchFamily(touched *stream, f vip.Family) {
	for _, i := range touched.vips[f] {
		r.touched.add(int(i))
	}
}

// marks is a set of indices, which are taken in ascending order.
type marks struct {
	words    []uint64
	from, to int // the words that may have bits
}

// reset makes room for the indices below n, and clears the set.
func (m *marks) reset(n int) { *m = marks{words: make([]uint64, (n+63)/64)} }

func (m *marks) add(i int) {
	word := i / 64
	m.words[word] |= 1 << (i % 64)
	if m.from == m.to {
		m.from, m.to = word, word+1
	}
	m.from, m.to = min(m.from, word), max(m.to, word+1)
}

// take calls f with each index, ascending, and clears the set, at the cost of the indices' range.
func (m *marks) take(f func(i int)) {
	for word := m.from; word < m.to; word++ {
		for ; m.words[word] != 0; m.words[word] &= m.words[word] - 1 {
			f(word*64 + bits.TrailingZeros64(m.words[word]))
		}
	}
	m.from, m.to = 0, 0
}
