package serving

import (
	"maps"
	"math/bits"
	"slices"
	"sort"
	"time"

	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
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
}

// group is the set of VIPs of one family that the same streams list. Those in the same
// circumstances share a verdict.
type group struct {
	family  vip.Family
	streams []*stream // in the order of the trench file
	// owner serves the VIPs in the kernel: the stream whose name sorts first; nil for none.
	owner *stream
	memos [circumstances]memo
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

// extension is a group with one stream more.
type extension struct {
	group  *group
	stream *stream
}

// configureVIPs replaces the VIPs. Those that remain keep their verdicts.
func (e *Evaluator) configureVIPs(c *trench.Config) {
	before := e.vips
	list := slices.Clone(c.Attractor.VIPs)
	slices.SortFunc(list, vip.Compare)
	list = slices.Compact(list)
	var none [len(vip.Families)]*group
	for _, f := range vip.Families {
		none[f] = &group{family: f}
	}
	e.vips = make([]judged, len(list))
	for i, v := range list {
		j := &e.vips[i]
		j.VIP, j.group, j.leaves = v, none[v.Family()], e.leaving[v]
		for len(before) > 0 && vip.Compare(before[0].VIP, v) < 0 {
			e.remove(&before[0])
			before = before[1:]
		}
		if len(before) > 0 && before[0].VIP == v {
			j.verdict, j.installed = before[0].verdict, before[0].installed
			before = before[1:]
		} else if e.kernel != nil {
			j.installed = e.kernel.state.VIPs[v]
		}
	}
	for i := range before {
		e.remove(&before[i])
	}
	e.removed = slices.DeleteFunc(e.removed, func(v vip.VIP) bool { return e.find(v, new(int)) != nil })
	e.touched.reset(len(e.vips))
	for i := range e.vips {
		e.touched.add(i)
	}
}

// Leave sets the VIPs that the next Configure contains although they left the trench file, with the
// ends of their drains. They are at most DRAINING.
func (e *Evaluator) Leave(ends map[vip.VIP]time.Time) { e.leaving = maps.Clone(ends) }

// Attracts reports whether a VIP is ready, or drains.
func (e *Evaluator) Attracts(v vip.VIP) bool {
	j := e.find(v, new(int))
	return j != nil && j.verdict != nil && j.verdict.State != vip.NotReady
}

// remove notes a VIP that is no longer configured.
func (e *Evaluator) remove(j *judged) {
	if j.verdict != nil {
		e.removed = append(e.removed, j.VIP)
	}
}

// find returns a configured VIP; nil for none. near is the expected index, and find advances it, so
// that one pass finds a list of VIPs in ascending order.
func (e *Evaluator) find(v vip.VIP, near *int) *judged {
	if *near >= len(e.vips) || e.vips[*near].VIP != v {
		i, found := sort.Find(len(e.vips), func(i int) int { return vip.Compare(v, e.vips[i].VIP) })
		if *near = i; !found {
			return nil
		}
	}
	*near++
	return &e.vips[*near-1]
}

// assign adds a stream to the groups of its VIPs. known caches the groups that were created so far.
func (e *Evaluator) assign(s *stream, known map[extension]*group) {
	var numbers [len(vip.Families)]int
	for _, v := range s.VIPs {
		numbers[v.Family()]++
	}
	for f, n := range numbers {
		s.vips[f] = make([]int32, 0, n)
	}
	var near int
	var of, extended *group // of the previous VIP; successive VIPs nearly always share it
	for _, v := range s.VIPs {
		j := e.find(v, &near)
		if j == nil {
			continue
		}
		f := v.Family()
		s.vips[f] = append(s.vips[f], int32(near-1))
		if j.group != of {
			of = j.group
			extended = known[extension{of, s}]
			if extended == nil {
				extended = &group{family: f, streams: append(slices.Clip(of.streams), s), owner: of.owner}
				if of.owner == nil || s.Name < of.owner.Name {
					extended.owner = s
				}
				known[extension{of, s}] = extended
			}
		}
		j.group = extended
	}
}

// touch schedules a VIP for judging if it is configured.
func (e *Evaluator) touch(v vip.VIP) {
	var near int
	if e.find(v, &near) != nil {
		e.touched.add(near - 1)
	}
}

// touchStream schedules the VIPs of a stream for judging.
func (e *Evaluator) touchStream(s *stream) {
	for _, f := range vip.Families {
		e.touchFamily(s, f)
	}
}

// touchFamily schedules the VIPs of one family of a stream for judging.
func (e *Evaluator) touchFamily(s *stream, f vip.Family) {
	for _, i := range s.vips[f] {
		e.touched.add(int(i))
	}
}

// marks is a set of indices, which are taken in ascending order.
type marks struct {
	words    []uint64
	from, to int // the words that may have bits
}

// reset makes room for the indices below n, and clears the set.
func (m *marks) reset(n int) { *m = marks{words: make([]uint64, (n+63)/64)} }

// add adds an index.
func (m *marks) add(i int) {
	w := i / 64
	m.words[w] |= 1 << (i % 64)
	if m.from == m.to {
		m.from, m.to = w, w+1
	}
	m.from, m.to = min(m.from, w), max(m.to, w+1)
}

// take calls f with each index, in ascending order, and clears the set. Its cost follows the range
// of the indices.
func (m *marks) take(f func(i int)) {
	for w := m.from; w < m.to; w++ {
		for ; m.words[w] != 0; m.words[w] &= m.words[w] - 1 {
			f(w*64 + bits.TrailingZeros64(m.words[w]))
		}
	}
	m.from, m.to = 0, 0
}
