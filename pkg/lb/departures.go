package lb

import (
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/serving"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxMove bounds how long a VIP stays with its old stream while the new one is not ready. It is
// enough for new targets to start, be checked and register.
const maxMove = 30 * time.Second

// departures keeps a VIP that leaves the trench file, or loses its last stream there, for the drain
// time of that stream: the stream and its targets stay in force, and the VIP drains. It keeps a VIP
// that moves to another stream, too, until that stream is ready.
type departures struct {
	file    *trench.Config // as it was read
	inForce *trench.Config // file with the departures
	ends    map[vip.VIP]time.Time
	moves   map[vip.VIP]move
}

// move is the change of the stream that serves a VIP, with its latest end.
type move struct {
	serving.Move
	end time.Time
}

// mover knows which VIPs attract traffic, and the streams that serve them or can do so.
type mover interface {
	Owners() map[vip.VIP]string
	Attracts(vip.VIP) bool
	CanServe(stream string, v vip.VIP) bool
}

// configure returns the configuration for a trench file. A VIP without traffic leaves or moves now.
func (d *departures) configure(now time.Time, file *trench.Config, mover mover) *trench.Config {
	before, old := d.inForce, *d
	// find sets both again, without the VIPs that returned to the file, or to their stream.
	d.file, d.ends, d.moves = file, map[vip.VIP]time.Time{}, map[vip.VIP]move{}
	// Most files change only targets, and the search visits each VIP.
	if before != nil && (len(old.ends)+len(old.moves) > 0 || !sameVIPs(before, file)) {
		d.find(now, old, mover.Owners())
	}
	d.merge(before)
	return d.inForce
}

// sameVIPs reports whether two configurations have equal streams with equal VIPs: nothing leaves.
func sameVIPs(a, b *trench.Config) bool {
	return slices.EqualFunc(a.Streams, b.Streams, func(s, t trench.Stream) bool {
		return s.Name == t.Name && slices.Equal(s.VIPs, t.VIPs)
	})
}

// find sets the ends of the VIPs that only streams of the old configuration list, and the moves.
// owners maps the VIPs that attract traffic to their streams.
func (d *departures) find(now time.Time, old departures, owners map[vip.VIP]string) {
	served := map[vip.VIP]string{} // by the stream whose name sorts first
	for _, s := range d.file.Streams {
		for _, v := range s.VIPs {
			if by, known := served[v]; !known || s.Name < by {
				served[v] = s.Name
			}
		}
	}
	// overlaps needs sorted VIPs; the file may list them in any order.
	next := slices.Clone(d.file.Attractor.VIPs)
	slices.SortFunc(next, vip.Compare)
	for _, s := range old.inForce.Streams {
		for _, v := range s.VIPs {
			to, stays := served[v]
			if stays && to != s.Name && owners[v] == s.Name {
				d.moves[v] = move{serving.Move{From: s.Name, To: to}, now.Add(maxMove)}
				// Another reload must not prolong the same move.
				if was := old.moves[v]; was.Move == d.moves[v].Move {
					d.moves[v] = was
				}
			}
			// VIPs of a configuration must not overlap, so a new VIP ends the drain of an old one.
			if stays || overlaps(next, v) {
				continue
			}
			// A VIP that already leaves keeps its end: another reload must not prolong the drain.
			end, leaves := old.ends[v]
			if !leaves && s.DrainTime > 0 && owners[v] != "" {
				end = now.Add(s.DrainTime) // of several streams the longest
			}
			if end.After(now) && end.After(d.ends[v]) {
				d.ends[v] = end
			}
		}
	}
}

// overlaps reports whether a VIP overlaps a different one of a sorted list without overlaps.
func overlaps(sorted []vip.VIP, v vip.VIP) bool {
	i, found := slices.BinarySearchFunc(sorted, v, vip.Compare)
	return !found && (i > 0 && sorted[i-1].Overlaps(v) || i < len(sorted) && sorted[i].Overlaps(v))
}

// merge adds the departing VIPs to the file, with their streams from before.
func (d *departures) merge(before *trench.Config) {
	d.inForce = d.file
	if len(d.ends)+len(d.moves) == 0 {
		return
	}
	// Copy before appending: d.file is merged again after each drain.
	c := *d.file
	c.Attractor.VIPs, c.Streams = slices.Clone(c.Attractor.VIPs), slices.Clone(c.Streams)
	configured := vip.NewSet(c.Attractor.VIPs...)
	for v := range d.ends {
		if !configured.Has(v) {
			c.Attractor.VIPs = append(c.Attractor.VIPs, v)
		}
	}
	index := make(map[string]int, len(c.Streams))
	for i, s := range c.Streams {
		index[s.Name] = i
	}
	// before contains earlier departures, so their drains survive another reload.
	for _, s := range before.Streams {
		var leaving []vip.VIP
		for _, v := range s.VIPs {
			if _, leaves := d.ends[v]; leaves || d.moves[v].From == s.Name {
				leaving = append(leaving, v)
			}
		}
		if len(leaving) == 0 {
			continue
		}
		// A stream that stays has its new targets and settings, and forwards its old VIPs, too.
		if i, stays := index[s.Name]; stays {
			has := vip.NewSet(c.Streams[i].VIPs...)
			c.Streams[i].VIPs = slices.Concat(c.Streams[i].VIPs, slices.DeleteFunc(leaving, has.Has))
		} else {
			// A removed stream stays with its old targets, which still have flows of these VIPs.
			s.VIPs = leaving
			c.Streams = append(c.Streams, s)
		}
	}
	d.inForce = &c
}

// expire returns the configuration to put in force once a drain or a move is over; nil if none is.
// late lists the moves that ended before their streams were ready.
func (d *departures) expire(now time.Time, mover mover) (config *trench.Config, late []move) {
	over := false
	for v, end := range d.ends {
		if !end.After(now) {
			delete(d.ends, v)
			over = true
		}
	}
	for v, move := range d.moves {
		expired := !move.end.After(now)
		if !expired && !arrives(mover, v, move) {
			continue
		}
		if expired {
			late = append(late, move)
		}
		delete(d.moves, v)
		over = true
	}
	if !over {
		return nil, nil
	}
	// Only inForce has the streams of VIPs that still drain or move.
	d.merge(d.inForce)
	return d.inForce, late
}

// arrives reports whether a move can end: the new stream is ready, or the old one serves no longer.
func arrives(mover mover, v vip.VIP, move move) bool {
	return mover.CanServe(move.To, v) || !mover.Attracts(v)
}

// next returns when the first drain or move is over; zero if nothing leaves.
func (d *departures) next(now time.Time, mover mover) (next time.Time) {
	for _, end := range d.ends {
		next = targetset.Soonest(next, end)
	}
	for v, move := range d.moves {
		if arrives(mover, v, move) {
			return now
		}
		next = targetset.Soonest(next, move.end)
	}
	return next
}

// moving returns the VIPs that stay with their old streams.
func (d *departures) moving() map[vip.VIP]serving.Move {
	moving := make(map[vip.VIP]serving.Move, len(d.moves))
	for v, move := range d.moves {
		moving[v] = move.Move
	}
	return moving
}
