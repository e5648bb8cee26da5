package lb

import (
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// departures keeps a VIP that leaves the trench file, or loses its last stream there, for the drain
// time of that stream: the stream and its targets stay in force, and the VIP drains.
type departures struct {
	file    *trench.Config // as it was read
	inForce *trench.Config // file with the departures
	ends    map[vip.VIP]time.Time
}

// configure returns the configuration to put in force for a trench file. serves reports whether a
// VIP attracts traffic; a VIP without traffic is removed immediately.
func (d *departures) configure(now time.Time, file *trench.Config, serves func(vip.VIP) bool) *trench.Config {
	before, ends := d.inForce, d.ends
	// find sets the ends again, without the VIPs that returned to the file.
	d.file, d.ends = file, map[vip.VIP]time.Time{}
	// Most files change only targets, and the search visits each VIP.
	if before != nil && (len(ends) > 0 || !sameVIPs(before, file)) {
		d.find(now, before, ends, serves)
	}
	d.merge(before)
	return d.inForce
}

// sameVIPs reports whether two configurations have the same streams with the same VIPs: nothing
// leaves.
func sameVIPs(a, b *trench.Config) bool {
	return slices.EqualFunc(a.Streams, b.Streams, func(s, t trench.Stream) bool {
		return s.Name == t.Name && slices.Equal(s.VIPs, t.VIPs)
	})
}

// find sets the ends of the VIPs that only streams of before list.
func (d *departures) find(now time.Time, before *trench.Config, ends map[vip.VIP]time.Time, serves func(vip.VIP) bool) {
	served := vip.Set{}
	for _, s := range d.file.Streams {
		for _, v := range s.VIPs {
			served[v] = struct{}{}
		}
	}
	// overlaps needs sorted VIPs; the file may list them in any order.
	next := slices.Clone(d.file.Attractor.VIPs)
	slices.SortFunc(next, vip.Compare)
	for _, s := range before.Streams {
		for _, v := range s.VIPs {
			// VIPs of a configuration must not overlap, so a new VIP ends the drain of an old one.
			if served.Has(v) || overlaps(next, v) {
				continue
			}
			// A VIP that already leaves keeps its end: another reload must not prolong the drain.
			end, leaves := ends[v]
			if !leaves && s.DrainTime > 0 && serves(v) {
				end = now.Add(s.DrainTime) // of several streams the longest
			}
			if end.After(now) && end.After(d.ends[v]) {
				d.ends[v] = end
			}
		}
	}
}

// overlaps reports whether a VIP shares addresses with a different VIP of a sorted list without
// overlaps.
func overlaps(sorted []vip.VIP, v vip.VIP) bool {
	i, found := slices.BinarySearchFunc(sorted, v, vip.Compare)
	return !found && (i > 0 && sorted[i-1].Overlaps(v) || i < len(sorted) && sorted[i].Overlaps(v))
}

// merge adds the departing VIPs to the file, with their streams from before.
func (d *departures) merge(before *trench.Config) {
	d.inForce = d.file
	if len(d.ends) == 0 {
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
			if _, leaves := d.ends[v]; leaves {
				leaving = append(leaving, v)
			}
		}
		if len(leaving) == 0 {
			continue
		}
		// A stream that stays has its new targets and settings, and forwards its old VIPs, too.
		if i, stays := index[s.Name]; stays {
			c.Streams[i].VIPs = slices.Concat(c.Streams[i].VIPs, leaving)
		} else {
			// A removed stream stays with its old targets, which still have flows of these VIPs.
			s.VIPs = leaving
			c.Streams = append(c.Streams, s)
		}
	}
	d.inForce = &c
}

// expire returns the configuration to put in force once a drain is over; nil if none is.
func (d *departures) expire(now time.Time) *trench.Config {
	over := false
	for v, end := range d.ends {
		if !end.After(now) {
			delete(d.ends, v)
			over = true
		}
	}
	if !over {
		return nil
	}
	// Only inForce has the streams of VIPs that still drain.
	d.merge(d.inForce)
	return d.inForce
}

// next returns when the first drain is over; zero if nothing leaves.
func (d *departures) next() (next time.Time) {
	for _, end := range d.ends {
		if next.IsZero() || end.Before(next) {
			next = end
		}
	}
	return next
}
