package target

import (
	"container/heap"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

const (
	// unknownWait is how long a silent fall is held back at most while it is not
	// known whether the network is dark. A look takes 250 ms when nobody answers
	// and one round trip when somebody does; it may have to wait for the one before.
	unknownWait = 750 * time.Millisecond
	// darkGrace is how long a network that was seen dark is taken for dark while
	// nothing is known of it. The look is repeated each second.
	darkGrace = 2500 * time.Millisecond
	// maxAsked is how many segments are asked about at once. Targets of further
	// ones are never held.
	maxAsked = 256
)

// SuddenOptions say what a sudden loss is and what follows from it.
type SuddenOptions struct {
	// Share of all targets that must be exceeded; off by default.
	Share Share
	// Hold lets fallen targets go on counting as ready while a sudden loss is
	// suspected. Otherwise only the reason of their VIPs changes.
	Hold bool
}

// NetworkView tells what is known of the network that leads to an address.
type NetworkView interface {
	// Of tells whether nothing at all on that network could be reached since
	// then: dark. known is false as long as nobody can say; detail is for people.
	// The address is one of those of Verdict.Ask.
	Of(addr netip.Addr, now, since time.Time) (dark, known bool, detail string)
	// Seen is when that was seen. As long as it stays the same, Of says the same
	// until what is known becomes too old.
	Seen() time.Time
}

// Verdict is what follows for readiness from an Evaluate.
type Verdict struct {
	// Suspect is true while a sudden loss is suspected; Detail says why, in at
	// most some 200 bytes.
	Suspect bool
	Detail  string
	// Touched are the keys for which Held or Suspected may answer differently
	// than before, in no order.
	Touched []Key
	// Next is when Evaluate must be called again at the latest, even if nothing
	// changes; zero: not before something does.
	Next time.Time
	// Ask are the addresses whose networks shall be looked at from now on; none:
	// nothing is asked. At most 256. It must not be changed, and is the same slice
	// until others are asked.
	Ask []netip.Addr
}

// Sudden suspects the network rather than the targets when most of them fall at
// once. It is pure logic: no clock, no goroutine, no I/O. It is for one caller.
//
// A fall is the step of a target from Ready to NotReady with [Health.Silent].
// When more than the share of all targets fell within one check interval (interval
// + timeout of each target's own check), on networks that are dark since the first
// of these falls, a sudden loss is suspected. Falls that are not silent are none;
// targets that were never ready, are drained or removed count for nothing, also
// not among all. Keys are counted, but two keys of one name or of one address make
// no mass.
//
// Without Hold nothing is ever held: a suspicion changes the reason, not the
// state. With Hold a fallen target is held, that is, counts as ready,
//   - while its fall is pending: its network is dark, and the share may yet be
//     exceeded; until interval + timeout after the fall at the latest. As long as
//     nothing is known of the network, 750 ms at the latest.
//   - while it is suspected, without limit.
//   - after the suspicion until its own next check has ended: interval + timeout
//     at the latest; if that succeeds, until it rises, rise times that at the
//     latest. Whoever fell on the bare news that the network is back would
//     withdraw every VIP at the end of each outage.
//
// The suspicion about a network ends when a target on it answers anything, rightly
// or wrongly, or when the network is no longer known to be dark for 2.5 s. What
// has fallen is never raised by a suspicion that comes later.
//
// Networks are told apart by the /24 or /64 of the targets, each of which is taken
// to lie in one network; 256 of them are asked about at once. After a restart
// nothing is known, so nothing is suspected before targets were ready.
//
// The caller must pass each target again when its Silent changes, not only its
// state: else an answer is not noticed before the target rises.
type Sudden struct {
	o SuddenOptions
	// whole are the targets that were ever ready and may fall or have fallen; true:
	// is ready.
	whole    map[Key]bool
	fallen   map[Key]*fallen
	segments map[netip.Prefix]*segment
	asked    []*segment // of segments, at most maxAsked
	ask      []netip.Addr
	askStale bool      // asked is not as ask
	seen     time.Time // which view the segments were judged by
	due      time.Time // when to judge them again, whatever the view; zero: never
	ends     fallenByEnd
	touched  map[Key]struct{}
	check    func(Key) trench.Check
	now      time.Time
}

// phase is where a fallen target stands.
type phase uint8

const (
	// pending: fell within its last interval.
	pending phase = iota
	// suspected: its fall is part of a sudden loss.
	suspected
	// recovering: the suspicion is over, its next check decides.
	recovering
)

// fallen is a target that fell silently and about which there is more to say.
type fallen struct {
	Key
	phase   phase
	held    bool
	segment *segment // nil when recovering
	// rising: a check succeeded since.
	rising bool
	// end is when the phase ends; a suspected target is not in Sudden.ends.
	end   time.Time
	index int
}

// segment is a part of the network with targets that fell.
type segment struct {
	prefix netip.Prefix
	// probe is the target's address that stands for it.
	probe  netip.Addr
	asked  bool
	judged bool
	// since is when the first of its members fell.
	since   time.Time
	members map[Key]*fallen // pending or suspected
	// dark: it was dark at darkAt, and nothing is known that speaks against it.
	dark   bool
	darkAt time.Time
	detail string
	// blind: nothing was known of it for too long; no member is held.
	blind bool
	// suspect: its members are suspected as they fall.
	suspect bool
}

// NewSudden returns a Sudden that knows no targets.
func NewSudden(o SuddenOptions) *Sudden {
	return &Sudden{
		o: o, whole: map[Key]bool{}, fallen: map[Key]*fallen{}, segments: map[netip.Prefix]*segment{}, touched: map[Key]struct{}{},
	}
}

// Held tells whether a target that is not ready counts as ready.
func (s *Sudden) Held(k Key) bool {
	f := s.fallen[k]
	return f != nil && f.held
}

// Suspected tells whether a target's fall is part of a suspected sudden loss.
func (s *Sudden) Suspected(k Key) bool {
	f := s.fallen[k]
	return f != nil && f.phase == suspected
}

// Evaluate takes over what the checks say and tells what follows at now, which
// never goes back. check returns the check of a target; the zero Check, for one
// that is no longer configured, holds nothing. view may be nil: nothing is known.
// The cost follows the changes.
func (s *Sudden) Evaluate(now time.Time, changed []Health, removed []Key, check func(Key) trench.Check, view NetworkView) Verdict {
	if s.o.Share == 0 {
		return Verdict{}
	}
	s.now, s.check = now, check
	for _, k := range removed {
		delete(s.whole, k)
		s.drop(k)
	}
	for _, h := range changed {
		s.take(h)
	}
	// After all falls: an answer that is as late speaks against each of them.
	for _, h := range changed {
		if g := s.segments[segmentOf(h.Addr)]; g != nil && answered(h) && !h.LastCheck.Before(g.since) {
			s.light(g)
		}
	}
	s.judgeAll(view)
	for len(s.ends) > 0 && !s.ends[0].end.After(now) {
		s.drop(s.ends[0].Key)
	}
	s.suspect()
	return s.verdict()
}

// answered tells whether a target's last check got any answer.
func answered(h Health) bool {
	return !h.Silent && !h.LastCheck.IsZero() && (h.State == Ready || h.State == NotReady)
}

// window is within how much time falls of targets with such a check are one event.
func window(c trench.Check) time.Duration { return c.Interval + c.Timeout }

// segmentOf returns the part of the network that an address is taken to lie in.
func segmentOf(a netip.Addr) netip.Prefix {
	bits := 64
	if a.Is4() {
		bits = 24
	}
	return netip.PrefixFrom(a, bits).Masked()
}

// take notes what a target's state means for itself.
func (s *Sudden) take(h Health) {
	wasReady, known := s.whole[h.Key]
	switch {
	case h.State == Ready:
		s.whole[h.Key] = true
		s.drop(h.Key)
		return
	case h.State != NotReady && h.State != Overdue:
		delete(s.whole, h.Key)
	case known:
		s.whole[h.Key] = false
	}
	f := s.fallen[h.Key]
	switch {
	case wasReady && h.State == NotReady && h.Silent:
		s.fall(h)
	case f == nil:
	case h.State != NotReady:
		s.drop(h.Key)
	case h.Silent:
		if f.phase == recovering {
			s.drop(h.Key)
		}
	case h.LastError != "" || f.phase == pending:
		s.drop(h.Key)
	case !f.rising:
		f.rising = true
		s.recover(f, time.Duration(max(1, s.check(h.Key).Rise))*window(s.check(h.Key)))
	}
}

// fall begins with what fell just now.
func (s *Sudden) fall(h Health) {
	at := h.Since
	if at.IsZero() || at.After(s.now) {
		at = s.now
	}
	w := window(s.check(h.Key))
	end := at.Add(w)
	prefix := segmentOf(h.Addr)
	g := s.segments[prefix]
	late := !end.After(s.now) && (g == nil || !g.suspect)
	if w <= 0 || late {
		return
	}
	if g == nil {
		g = &segment{prefix: prefix, probe: h.Addr, since: at, members: map[Key]*fallen{}, asked: len(s.asked) < maxAsked}
		s.segments[prefix] = g
		if g.asked {
			s.asked, s.askStale = append(s.asked, g), true
		}
	}
	if !g.suspect && at.Before(g.since) {
		g.since = at
	}
	f := &fallen{Key: h.Key, segment: g, end: end, held: s.o.Hold && g.asked && (g.dark || !g.blind)}
	s.fallen[h.Key], g.members[h.Key] = f, f
	s.touched[h.Key] = struct{}{}
	if g.suspect {
		f.phase = suspected
		return
	}
	heap.Push(&s.ends, f)
}

// drop lets a target be what its checks say.
func (s *Sudden) drop(k Key) {
	f := s.fallen[k]
	if f == nil {
		return
	}
	if f.phase != suspected {
		heap.Remove(&s.ends, f.index)
	}
	s.leave(f)
	delete(s.fallen, k)
	s.touched[k] = struct{}{}
}

// leave takes a target out of its segment, and ends one without members.
func (s *Sudden) leave(f *fallen) {
	g := f.segment
	if g == nil {
		return
	}
	f.segment = nil
	delete(g.members, f.Key)
	if len(g.members) > 0 {
		return
	}
	delete(s.segments, g.prefix)
	for i, a := range s.asked {
		if a == g {
			s.asked, s.askStale = slices.Delete(s.asked, i, i+1), true
			break
		}
	}
}

// recover has the next check of a suspected target decide.
func (s *Sudden) recover(f *fallen, within time.Duration) {
	if !f.held || within <= 0 {
		s.drop(f.Key)
		return
	}
	s.leave(f)
	f.end = s.now.Add(within)
	if f.phase == recovering {
		heap.Fix(&s.ends, f.index)
		return
	}
	f.phase = recovering
	heap.Push(&s.ends, f)
	s.touched[f.Key] = struct{}{}
}

// light ends all suspicion about a segment: something on it was reached.
func (s *Sudden) light(g *segment) {
	for k, f := range g.members {
		if f.phase == suspected {
			s.recover(f, window(s.check(k)))
		} else {
			s.drop(k)
		}
	}
}

// judgeAll judges the segments that are new, and all of them when there may be
// something new to know.
func (s *Sudden) judgeAll(view NetworkView) {
	all := !s.due.IsZero() && !s.now.Before(s.due)
	if view != nil && !view.Seen().Equal(s.seen) {
		s.seen, all = view.Seen(), true
	}
	if !all && !slices.ContainsFunc(s.asked, func(g *segment) bool { return !g.judged }) {
		return
	}
	for _, g := range slices.Clone(s.asked) { // judge may end segments
		if all || !g.judged {
			g.judged = true
			s.judge(g, view)
		}
	}
}

// judge takes over what is known of a segment's network.
func (s *Sudden) judge(g *segment, view NetworkView) {
	var dark, known bool
	var detail string
	if view != nil {
		dark, known, detail = view.Of(g.probe, s.now, g.since)
	}
	switch {
	case known && dark:
		g.dark, g.darkAt, g.detail = true, s.now, detail
	case known, g.dark && s.now.Sub(g.darkAt) >= darkGrace:
		s.light(g)
	case !g.dark && !g.blind && s.now.Sub(g.since) >= unknownWait:
		g.blind = true
		for k, f := range g.members {
			if f.held {
				f.held = false
				s.touched[k] = struct{}{}
			}
		}
	}
}

// suspect begins a suspicion, or extends it to a segment that is dark since.
func (s *Sudden) suspect() {
	var members, already int
	for _, g := range s.asked {
		if g.dark {
			members += len(g.members)
		}
		if g.suspect {
			already++
		}
	}
	if already == 0 && (!s.o.Share.exceeded(members, len(s.whole)) || !s.several()) {
		return
	}
	for _, g := range s.asked {
		if !g.dark || g.suspect {
			continue
		}
		g.suspect = true
		for k, f := range g.members {
			heap.Remove(&s.ends, f.index)
			f.phase = suspected
			s.touched[k] = struct{}{}
		}
	}
}

// several tells whether those who fell in the dark have more than one name and
// more than one address.
func (s *Sudden) several() bool {
	var first *fallen
	var name, addr bool
	for _, g := range s.asked {
		if !g.dark {
			continue
		}
		for _, f := range g.members {
			if first == nil {
				first = f
			}
			name = name || f.Name != first.Name
			addr = addr || f.Addr != first.Addr
			if name && addr {
				return true
			}
		}
	}
	return false
}

func (s *Sudden) verdict() Verdict {
	var v Verdict
	soon := func(t time.Time) {
		if v.Next.IsZero() || t.Before(v.Next) {
			v.Next = t
		}
	}
	var members int
	if s.askStale {
		s.ask, s.askStale = nil, false
		for _, g := range s.asked {
			s.ask = append(s.ask, g.probe)
		}
	}
	v.Ask = s.ask
	for _, g := range s.asked {
		switch {
		case g.dark:
			soon(g.darkAt.Add(darkGrace))
		case !g.blind:
			soon(g.since.Add(unknownWait))
		}
		if g.suspect {
			members += len(g.members)
			if !v.Suspect {
				v.Suspect, v.Detail = true, g.detail
			}
		}
	}
	if v.Suspect {
		v.Detail = fmt.Sprintf("%d of %d targets fell at once without a word: %s", members, len(s.whole), v.Detail)
	}
	s.due = v.Next
	if len(s.ends) > 0 {
		soon(s.ends[0].end)
	}
	for k := range s.touched {
		v.Touched = append(v.Touched, k)
	}
	clear(s.touched)
	return v
}

// fallenByEnd is a heap of those fallen whose phase ends at a time.
type fallenByEnd []*fallen

func (e fallenByEnd) Len() int           { return len(e) }
func (e fallenByEnd) Less(i, j int) bool { return e[i].end.Before(e[j].end) }
func (e fallenByEnd) Swap(i, j int) {
	e[i], e[j] = e[j], e[i]
	e[i].index, e[j].index = i, j
}

func (e *fallenByEnd) Push(x any) {
	f := x.(*fallen)
	f.index = len(*e)
	*e = append(*e, f)
}

func (e *fallenByEnd) Pop() any {
	old := *e
	f := old[len(old)-1]
	old[len(old)-1] = nil
	*e = old[:len(old)-1]
	return f
}
