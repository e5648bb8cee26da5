package serving

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/drains"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// plain is one target of one stream as a source has it.
type plain struct {
	name      string
	ips       []netip.Addr
	lifecycle targetset.Lifecycle
	end       time.Time
}

// address is one address that a VIP counts, with its target, and the end of its drain.
type address struct {
	name  string
	addr  netip.Addr
	state healthcheck.State // Ready, Draining or Drained
	end   time.Time
}

// model drives a trench file, a set, an evaluator and an index as the loop does, and knows the
// inputs.
type model struct {
	now  time.Time
	next time.Time

	file   *targetset.TrenchFile
	set    *targetset.Set
	e      *Evaluator
	index  *targetset.Index
	onGone targetset.SourceGonePolicy
	// offered is every offer, to build the same from scratch.
	offered [2]targetset.Offers

	// The inputs of the oracle.
	config     *trench.Config
	listed     map[string][]plain // targets in the trench file, by stream
	ghosts     map[string][]plain // targets that left it, the newest first
	lost       bool
	registered map[string][]plain
	orders     map[targetset.ID]time.Time
	health     map[healthcheck.Key]healthcheck.Health
}

var (
	modelVIPs    = []vip.VIP{vipA, vipB, vip6}
	modelStreams = []string{"s", "t"}
	modelNames   = []string{"a", "b", "c"}
	modelAddrs   = [][]netip.Addr{
		{netip.MustParseAddr("172.16.0.1"), netip.MustParseAddr("172.16.0.2"), netip.MustParseAddr("172.16.0.3")},
		{netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2"), netip.MustParseAddr("fd00::3")},
	}
	badAddr = netip.MustParseAddr("224.0.0.1")
)

func newModel(onGone targetset.SourceGonePolicy) *model {
	return &model{
		now: time.Unix(1000, 0), file: targetset.NewTrenchFile(onGone), set: targetset.New(), onGone: onGone,
		e: New(Options{}), index: targetset.NewIndex(),
		offered: [2]targetset.Offers{{}, {}}, config: &trench.Config{},
		listed: map[string][]plain{}, ghosts: map[string][]plain{}, registered: map[string][]plain{},
		orders: map[targetset.ID]time.Time{}, health: map[healthcheck.Key]healthcheck.Health{},
	}
}

func (w *model) policy() targetset.AddressPolicy {
	return targetset.AddressPolicy{VIPs: slices.SortedFunc(slices.Values(w.config.Attractor.VIPs), vip.Compare)}
}

// manual returns the drains by an operator.
func (w *model) manual() map[targetset.ID]drains.Drain {
	orders := map[targetset.ID]drains.Drain{}
	for id, end := range w.orders {
		orders[id] = drains.Drain{End: end}
	}
	return orders
}

// update performs the steps of the loop when the sources may have changed.
func (w *model) update(reloaded bool) {
	fromFile := w.file.Take()
	maps.Copy(w.offered[targetset.OriginFile], fromFile)
	w.set.Offer(targetset.OriginFile, fromFile)
	w.set.SetManualDrains(w.manual())
	changes := w.set.Update(w.now)
	w.next = changes.Next
	if reloaded {
		w.e.Configure(w.now, w.config, w.set.Members)
	} else {
		w.e.Retarget(w.now, changes.Streams, w.set.Members)
	}
	w.evaluate(w.checks())
}

func (w *model) evaluate(e healthcheck.Evaluation) {
	w.e.Evaluate(w.now, e)
	w.index.Publish(w.e.Targets())
}

// checks returns the report of a checker after the targets changed: new ones start.
func (w *model) checks() (e healthcheck.Evaluation) {
	are := map[healthcheck.Key]healthcheck.Health{}
	for _, s := range w.config.Streams {
		for _, m := range w.set.Members(s.Name) {
			for _, ip := range m.IPs {
				k := healthcheck.Key{Stream: s.Name, Name: m.Name, Addr: ip}
				if !s.Check.Families.Has(vip.FamilyOf(ip)) {
					continue
				}
				h, known := w.health[k]
				if !known {
					h = healthcheck.Health{Key: k, State: healthcheck.Starting, Since: w.now}
					e.Changed = append(e.Changed, h)
				}
				are[k] = h
			}
		}
	}
	for k := range w.health {
		if _, there := are[k]; !there {
			e.Removed = append(e.Removed, k)
		}
	}
	w.health = are
	return e
}

func (w *model) fall(keys []healthcheck.Key, to healthcheck.State) {
	var e healthcheck.Evaluation
	for _, k := range keys {
		h := healthcheck.Health{Key: k, State: to, Since: w.now}
		if to == healthcheck.NotReady {
			h.LastError = "connection refused"
		}
		w.health[k] = h
		e.Changed = append(e.Changed, h)
	}
	w.evaluate(e)
}

// addresses is the oracle of the set: it derives the addresses of a stream from its sources.
func (w *model) addresses(s trench.Stream) []address {
	var all []plain
	for _, list := range [][]plain{w.listed[s.Name], w.registered[s.Name], w.ghosts[s.Name]} {
		all = append(all, list...)
	}
	over := map[string][]netip.Addr{}
	for _, p := range all {
		if p.lifecycle == targetset.Terminating && !p.end.After(w.now) {
			over[p.name] = p.ips
		}
	}
	owner, ips, ends := map[netip.Addr]string{}, map[string][]netip.Addr{}, map[string]time.Time{}
	for _, p := range all {
		if _, isOver := over[p.name]; isOver || p.lifecycle == targetset.Leaving || slices.Contains(p.ips, badAddr) {
			continue
		}
		if !slices.ContainsFunc(p.ips, func(a netip.Addr) bool { return checked(s, a) }) {
			continue
		}
		have, known := ips[p.name]
		switch {
		case known && !slices.Equal(have, p.ips):
			continue
		case !known && slices.ContainsFunc(p.ips, func(a netip.Addr) bool { return owner[a] != "" }):
			continue
		}
		ips[p.name] = p.ips
		for _, a := range p.ips {
			owner[a] = p.name
		}
		if end, drains := ends[p.name]; p.lifecycle == targetset.Terminating && (!drains || p.end.Before(end)) {
			ends[p.name] = p.end
		}
	}
	var found []address
	for a, name := range owner {
		x := address{name: name, addr: a, state: healthcheck.Ready}
		if end, drains := ends[name]; drains {
			x.state, x.end = healthcheck.Draining, end
		}
		found = append(found, x)
	}
	// An address without a target belongs to the target that left it last.
	last := map[netip.Addr]plain{}
	for _, list := range [][]plain{w.ghosts[s.Name], w.registered[s.Name]} {
		for _, p := range list {
			if p.lifecycle != targetset.Leaving || !p.end.After(w.now) {
				continue
			}
			for _, a := range p.ips {
				if owner[a] == "" && a != badAddr && !slices.Contains(over[p.name], a) && p.end.After(last[a].end) {
					last[a] = p
				}
			}
		}
	}
	for a, p := range last {
		found = append(found, address{name: p.name, addr: a, state: healthcheck.Draining, end: p.end})
	}
	for i := range found {
		x := &found[i]
		end, drained := w.orders[targetset.ID{Stream: s.Name, Name: x.name}]
		switch {
		case !drained:
		case !end.After(w.now):
			x.state, x.end = healthcheck.Drained, end
		case x.state == healthcheck.Ready || end.Before(x.end):
			x.state, x.end = healthcheck.Draining, end
		}
	}
	return found
}

func checked(s trench.Stream, a netip.Addr) bool {
	return s.Check.Families == trench.BothFamilies || (s.Check.Families == trench.OnlyIPv4) == a.Is4()
}

// passes reports whether the checks of an address go well. One that is not checked is
// as the address that left or stayed with it.
func (w *model) passes(s trench.Stream, of address, all []address) bool {
	if checked(s, of.addr) {
		return w.health[healthcheck.Key{Stream: s.Name, Name: of.name, Addr: of.addr}].State == healthcheck.Ready
	}
	for _, m := range w.set.Members(s.Name) {
		if m.Name != of.name || !slices.Contains(m.IPs, of.addr) {
			continue
		}
		return slices.ContainsFunc(all, func(x address) bool {
			return x.name == of.name && slices.Contains(m.IPs, x.addr) && checked(s, x.addr) && w.passes(s, x, all)
		})
	}
	return false
}

// want is the oracle of one VIP.
func (w *model) want(v vip.VIP) (state vip.State, end time.Time, ready, total int) {
	state = vip.NotReady
	for _, s := range w.config.Streams {
		if !slices.Contains(s.VIPs, v) {
			continue
		}
		all := w.addresses(s)
		var here int
		var ends []time.Time
		for _, x := range all {
			if x.addr.Is4() != v.Prefix().Addr().Is4() {
				continue
			}
			total++
			switch {
			case !w.passes(s, x, all):
			case x.state == healthcheck.Ready:
				here++
			case x.state == healthcheck.Draining:
				ends = append(ends, x.end)
			}
		}
		ready += here
		if here >= s.MinReady {
			state = vip.Ready
			continue
		}
		for _, e := range ends {
			// Just before e, is there enough?
			n := here
			for _, other := range ends {
				if !other.Before(e) {
					n++
				}
			}
			if n >= s.MinReady && e.After(end) {
				end = e
			}
		}
	}
	if state == vip.Ready {
		return state, time.Time{}, ready, total
	}
	if !end.IsZero() {
		state = vip.Draining
	}
	return state, end, ready, total
}

func (w *model) check(t *rapid.T) {
	if len(w.e.roster.vips) != len(w.config.Attractor.VIPs) {
		t.Fatalf("%d VIPs are judged, there are %d", len(w.e.roster.vips), len(w.config.Attractor.VIPs))
	}
	for _, v := range w.config.Attractor.VIPs {
		got := w.e.of(v)
		state, end, ready, total := w.want(v)
		counts := int(got.ReadyTargets) == ready && int(got.TotalTargets) == total
		if !counts || got.State != state || !got.DrainEnd.Equal(end) {
			t.Fatalf("%s is %v until %v with %d/%d, want %v until %v with %d/%d", v,
				got.State, got.DrainEnd, got.ReadyTargets, got.TotalTargets, state, end, ready, total)
		}
		if (got.Reason == reasonDraining) != (state == vip.Draining) {
			t.Fatalf("%s is %v for the reason %v", v, state, got.Reason)
		}
	}
	w.checkFromScratch(t)
}

// checkFromScratch compares what many steps led to with what one leads to.
func (w *model) checkFromScratch(t *rapid.T) {
	set, fresh := targetset.New(), New(Options{})
	set.Configure(w.config.Streams, w.policy())
	for o, offers := range w.offered {
		set.Offer(targetset.Origin(o), offers)
	}
	set.SetManualDrains(w.manual())
	set.Update(w.now)
	for _, o := range []targetset.Origin{targetset.OriginFile, targetset.OriginRegistry} {
		if a, b := w.set.Problems(o), set.Problems(o); !slices.Equal(a, b) {
			t.Fatalf("problems of %v: %q, from scratch %q", o, a, b)
		}
	}
	fresh.Configure(w.now, w.config, set.Members)
	fresh.Evaluate(w.now, healthcheck.Evaluation{Changed: slices.Collect(maps.Values(w.health))})
	views, _ := fresh.Targets()
	for _, s := range w.config.Streams {
		if a, b := fmt.Sprint(w.set.Members(s.Name)), fmt.Sprint(set.Members(s.Name)); a != b {
			t.Fatalf("stream %s has %s, from scratch %s", s.Name, a, b)
		}
	}
	for _, v := range w.config.Attractor.VIPs {
		was, is := w.e.of(v), fresh.of(v)
		if was.Reason == reasonReconfigured && was.State == vip.NotReady {
			is.Reason = was.Reason // only the history of a VIP has this reason
		}
		if is != was {
			t.Fatalf("%s is %+v, from scratch %+v", v, was, is)
		}
	}
	slices.SortFunc(views, func(x, y targetset.View) int { return x.Compare(y.Key) })
	if got := w.index.List(nil); !slices.Equal(got, views) {
		t.Fatalf("the index has\n%+v\nfrom scratch\n%+v", got, views)
	}
}

// pass lets time go by as a punctual loop does. Between two looks nothing changes.
func (w *model) pass(t *rapid.T, d time.Duration) {
	for end := w.now.Add(d); ; {
		next := w.next
		if next.IsZero() || next.After(end) {
			next = end
		}
		if gap := next.Sub(w.now); gap > time.Microsecond {
			w.now = w.now.Add(gap / 2)
			w.check(t)
		}
		w.now = next
		if next.Equal(w.next) {
			w.update(false)
		}
		w.check(t)
		if !w.now.Before(end) {
			return
		}
	}
}

func drawAddresses(t *rapid.T, pool [][]netip.Addr) (ips []netip.Addr) {
	for _, family := range pool {
		if len(family) > 0 && rapid.IntRange(0, 4).Draw(t, "has the family") > 0 {
			ips = append(ips, rapid.SampledFrom(family).Draw(t, "address"))
		}
	}
	return ips
}

func drawVIPs(t *rapid.T, of []vip.VIP, least int) []vip.VIP {
	return rapid.SliceOfNDistinct(rapid.SampledFrom(of), least, len(of), rapid.ID).Draw(t, "VIPs")
}

// drawConfig draws a trench file that the parser would accept.
func (w *model) drawConfig(t *rapid.T) *trench.Config {
	c := &trench.Config{Attractor: trench.Attractor{VIPs: drawVIPs(t, modelVIPs, 1)}}
	for _, name := range modelStreams {
		if rapid.IntRange(0, 5).Draw(t, "without the stream") == 0 {
			continue
		}
		s := trench.Stream{
			Name: name, VIPs: drawVIPs(t, c.Attractor.VIPs, 1), MinReady: rapid.IntRange(1, 3).Draw(t, "min ready"),
			DrainTime: time.Duration(rapid.SampledFrom([]int{0, 1000, 3000}).Draw(t, "drain ms")) * time.Millisecond,
			Check: trench.Check{Families: rapid.SampledFrom([]trench.Families{
				trench.BothFamilies, trench.BothFamilies, trench.OnlyIPv4, trench.OnlyIPv6,
			}).Draw(t, "families")},
		}
		free := [][]netip.Addr{slices.Clone(modelAddrs[0]), slices.Clone(modelAddrs[1])}
		for _, n := range modelNames {
			ips := drawAddresses(t, free)
			if !slices.ContainsFunc(ips, func(a netip.Addr) bool { return checked(s, a) }) {
				continue
			}
			for f := range free {
				free[f] = slices.DeleteFunc(free[f], func(a netip.Addr) bool { return slices.Contains(ips, a) })
			}
			terminating := rapid.IntRange(0, 4).Draw(t, "terminating") == 0
			s.Targets = append(s.Targets, trench.Target{Name: n, IPs: ips, Terminating: terminating})
		}
		c.Streams = append(c.Streams, s)
	}
	return c
}

// reload puts a trench file into force, and notes what left it.
func (w *model) reload(c *trench.Config) {
	was, ghosts := w.listed, w.ghosts
	w.config, w.lost = c, false
	w.listed, w.ghosts = map[string][]plain{}, map[string][]plain{}
	for _, s := range c.Streams {
		for _, x := range s.Targets {
			p := plain{name: x.Name, ips: x.IPs}
			if x.Terminating {
				p.lifecycle, p.end = targetset.Terminating, w.now.Add(s.DrainTime)
				for _, old := range was[s.Name] {
					if old.name == p.name && old.lifecycle == targetset.Terminating {
						p.end = old.end
					}
				}
			}
			w.listed[s.Name] = append(w.listed[s.Name], p)
		}
		for _, old := range slices.Concat(was[s.Name], ghosts[s.Name]) {
			if slices.ContainsFunc(s.Targets, func(x trench.Target) bool {
				return x.Name == old.name && slices.Equal(x.IPs, old.ips)
			}) {
				continue
			}
			w.ghosts[s.Name] = append(w.ghosts[s.Name], leave(old, w.now.Add(s.DrainTime)))
		}
	}
	w.set.Configure(c.Streams, w.policy())
	w.file.Configure(w.now, c.Streams)
	w.update(true)
}

func leave(p plain, end time.Time) plain {
	if p.lifecycle == targetset.Active {
		p.end = end
	}
	p.lifecycle = targetset.Leaving
	return p
}

// lose has the trench file be gone.
func (w *model) lose() {
	w.file.Lose(w.now, errors.New("gone"))
	if !w.lost && w.onGone != targetset.Hold {
		for _, s := range w.config.Streams {
			var left []plain
			for _, p := range slices.Concat(w.listed[s.Name], w.ghosts[s.Name]) {
				left = append(left, leave(p, w.now.Add(s.DrainTime)))
			}
			if w.listed[s.Name], w.ghosts[s.Name] = nil, left; w.onGone == targetset.Drop {
				w.ghosts[s.Name] = nil
			}
		}
	}
	w.lost = true
	w.update(false)
}

// register has the registry offer other targets for a stream.
func (w *model) register(stream string, list []plain) {
	w.registered[stream] = list
	var offers []targetset.Offer
	for _, p := range list {
		offers = append(offers, targetset.Offer{
			Name: p.name, IPs: p.ips, Lifecycle: p.lifecycle, DrainEnd: p.end, Owner: "operator", Cause: "the model",
		})
	}
	w.offered[targetset.OriginRegistry][stream] = offers
	w.set.Offer(targetset.OriginRegistry, targetset.Offers{stream: offers})
}

func drawState(t *rapid.T) healthcheck.State {
	return rapid.SampledFrom([]healthcheck.State{
		healthcheck.Ready, healthcheck.Ready, healthcheck.NotReady, healthcheck.Overdue,
	}).Draw(t, "state")
}

func drawStream(t *rapid.T) string { return rapid.SampledFrom(modelStreams).Draw(t, "stream") }

func TestModelOfReadiness(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		policies := []targetset.SourceGonePolicy{targetset.Hold, targetset.Drain, targetset.Drop}
		w := newModel(rapid.SampledFrom(policies).Draw(t, "on file gone"))
		w.reload(w.drawConfig(t))
		steps := map[string]func(*rapid.T){
			"reload":       func(t *rapid.T) { w.reload(w.drawConfig(t)) },
			"reload same":  func(*rapid.T) { w.reload(w.config) },
			"file is gone": func(*rapid.T) { w.lose() },
			"register": func(t *rapid.T) {
				stream, name := drawStream(t), rapid.SampledFrom(modelNames).Draw(t, "name")
				p := plain{name: name, ips: drawAddresses(t, modelAddrs)}
				if rapid.IntRange(0, 9).Draw(t, "bad") == 0 {
					p.ips = []netip.Addr{badAddr}
				}
				list := slices.DeleteFunc(slices.Clone(w.registered[stream]), func(o plain) bool { return o.name == name })
				w.register(stream, append(list, p))
				w.update(false)
			},
			"registration ends": func(t *rapid.T) {
				stream := drawStream(t)
				list := slices.Clone(w.registered[stream])
				if len(list) == 0 {
					return
				}
				p := &list[rapid.IntRange(0, len(list)-1).Draw(t, "which")]
				p.lifecycle = rapid.SampledFrom([]targetset.Lifecycle{targetset.Leaving, targetset.Terminating}).Draw(t, "how")
				p.end = w.now.Add(time.Duration(rapid.IntRange(0, 4000).Draw(t, "ms")) * time.Millisecond)
				w.register(stream, list)
				w.update(false)
			},
			"registry tidies": func(*rapid.T) {
				for stream, list := range w.registered {
					w.register(stream, slices.DeleteFunc(slices.Clone(list), func(p plain) bool {
						return p.lifecycle != targetset.Active && !p.end.After(w.now)
					}))
				}
				w.update(false)
			},
			"drain": func(t *rapid.T) {
				id := targetset.ID{Stream: drawStream(t), Name: rapid.SampledFrom(modelNames).Draw(t, "name")}
				in := time.Duration(rapid.IntRange(0, 4000).Draw(t, "ms")) * time.Millisecond
				w.orders[id] = w.now.Add(in)
				w.update(false)
			},
			"undrain": func(*rapid.T) {
				clear(w.orders)
				w.update(false)
			},
			"all pass their checks": func(*rapid.T) { w.fall(slices.Collect(maps.Keys(w.health)), healthcheck.Ready) },
			"one changes": func(t *rapid.T) {
				if keys := slices.SortedFunc(maps.Keys(w.health), healthcheck.Key.Compare); len(keys) > 0 {
					k := rapid.SampledFrom(keys).Draw(t, "which")
					w.fall([]healthcheck.Key{k}, drawState(t))
				}
			},
			"time passes": func(t *rapid.T) {
				w.pass(t, time.Duration(rapid.IntRange(1, 4000).Draw(t, "ms"))*time.Millisecond)
			},
			"": func(t *rapid.T) { w.check(t) },
		}
		t.Repeat(steps)
	})
}
