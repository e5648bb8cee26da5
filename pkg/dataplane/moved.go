package dataplane

import (
	"context"
	"errors"
	"maps"
	"math"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/midstream"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Generations holds the sets of targets that streams had, by stream.
type Generations map[string]plan.Generations

// moved keeps the tables for flows that gateways move to this pod from another one.
type moved struct {
	// apply writes the tables; nil if they are left alone, as in a cleanup.
	apply func(streams, known midstream.Streams) (difference string, err error)
	// read reads the counters of the tables.
	read func() (midstream.Counters, error)
	// enabled: connection tracking is on, and marks have a bit that no fwmark has.
	enabled bool
	// generations are copied to published with each new one.
	generations map[string]*plan.Generations
	published   *latest.Value[Generations]
	// streams is the content of the tables since applied; failure is the last error.
	streams midstream.Streams
	applied bool
	failure error
}

// asked maps the slots of a stream to the addresses of earlier targets, by order.
type asked = [2]map[uint32]netip.Addr

// movedDrift is a difference in the tables of package midstream.
var movedDrift = plan.Drift{Object: "tables ip and ip6 " + plan.TableName}

func newMoved(options Options) moved {
	return moved{
		enabled:     options.Conntrack == ConntrackOn && options.Mask != math.MaxUint32,
		generations: map[string]*plan.Generations{}, published: latest.New[Generations](nil),
	}
}

func generationsFile(options Options) string {
	return filepath.Join(options.StateDir, "generations.json")
}

// loadGenerations reads the generations of an earlier process. A corrupt file is moved aside: new
// flows do not need it.
func (moved *moved) loadGenerations(options Options) error {
	if options.StateDir == "" || !moved.enabled {
		return nil
	}
	var stored Generations
	file := generationsFile(options)
	_, _, err := durable.Read(file, &stored)
	if errors.Is(err, durable.ErrCorrupt) {
		durable.SetAside(file, err, time.Now(), options.Log)
		return nil
	}
	for name, generations := range stored {
		moved.generations[name] = &generations
	}
	return err
}

// writeGenerations writes new generations to the state directory until ctx ends. The disk may hang,
// so this is not done by the goroutine of the engine.
func (plane *Plane) writeGenerations(ctx context.Context) {
	for {
		generations, changed := plane.e.moved.published.Get()
		if generations != nil {
			if err := durable.Write(generationsFile(plane.e.options), generations); err != nil {
				plane.e.log.Warn("failed to write the earlier sets of targets", "error", err)
			}
		}
		// Targets often change together.
		select {
		case <-ctx.Done():
			return
		case <-time.After(generationsInterval):
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// generationsInterval is the shortest time between two writes of the generations.
const generationsInterval = time.Second

// updateMoved notes the sets of targets in force, and writes the tables if they change or another
// process changed nftables.
func (engine *engine) updateMoved(desired *plan.Desired) {
	moved := &engine.moved
	if moved.apply == nil || engine.readErr != nil || desired == nil {
		return
	}
	now := engine.now()
	changed := !moved.applied || engine.linksChanged
	if moved.enabled {
		changed = engine.noteGenerations(desired, now) || changed
	}
	repair := engine.rulesetRead && len(engine.holds.until) == 0 &&
		engine.repairs.due([]plan.Drift{movedDrift}, now, false)
	if !changed && !repair {
		return
	}
	streams := engine.movedStreams()
	changed = !moved.applied || !reflect.DeepEqual(streams, moved.streams)
	// Without streams there are no tables, and nothing to repair.
	if !changed && (!repair || moved.streams.Empty()) {
		engine.rulesetRead = engine.rulesetRead && !moved.streams.Empty()
		engine.linksChanged = false
		return
	}
	if difference := engine.writeMoved(streams); difference != "" && !changed {
		drift := movedDrift
		drift.Detail = difference
		engine.repairs.note(now, []plan.Drift{drift}, nil)
	}
}

// writeMoved writes the tables, and returns their first difference from streams before.
func (engine *engine) writeMoved(streams midstream.Streams) string {
	moved := &engine.moved
	known := moved.streams
	if engine.rulesetRead || !moved.applied {
		known = midstream.Streams{}
	}
	difference, err := moved.apply(streams, known)
	if err != nil {
		if moved.failure == nil || moved.failure.Error() != err.Error() {
			engine.log.Warn("failed to write the tables for flows of other pods", "error", err)
		}
		moved.failure, moved.applied = err, false
		return ""
	}
	moved.streams, moved.applied, moved.failure = streams, true, nil
	engine.rulesetRead, engine.linksChanged = false, false
	return difference
}

// prepareMoved writes the tables before targets enter a Maglev table: from then on packets of flows
// in their slots reach them. Targets that leave have no time for that.
func (a *application) prepareMoved() {
	if a.moved.apply == nil || !a.moved.enabled {
		return
	}
	prepared := false
	for _, change := range a.changes {
		if !change.Write || change.Remove || !change.Gains(change.input.Installed) {
			continue
		}
		var next plan.Generations
		if generations := a.moved.generations[change.Name]; generations != nil {
			next = *generations
		} else {
			a.moved.generations[change.Name] = &plan.Generations{}
		}
		next.Note(change.Stream.Tables, a.now())
		change.record.everyone = !next.Complete(a.now())
		sets := slices.Concat(a.desired.Streams[change.Name].Earlier, next.Sets())
		change.record.asked, prepared = change.record.askedSlots(sets), true
	}
	if !prepared {
		return
	}
	if streams := a.movedStreams(); !reflect.DeepEqual(streams, a.moved.streams) {
		a.writeMoved(streams)
	}
}

// noteGenerations notes the sets of targets in force, and reports whether the slots of a stream
// with earlier targets changed.
func (engine *engine) noteGenerations(desired *plan.Desired, now time.Time) (changed bool) {
	fresh := false
	for name, record := range engine.streams {
		stream := desired.Streams[name]
		if record.installed == nil || record.installed.Stage != plan.StageApplied || stream == nil {
			continue
		}
		generations := engine.moved.generations[name]
		if generations == nil {
			generations = &plan.Generations{}
			engine.moved.generations[name] = generations
		}
		if generations.Note(record.installed.Tables, now) {
			record.slotsStale, fresh = true, true
		}
		if everyone := !generations.Complete(now); everyone != record.everyone {
			record.everyone, changed = everyone, true
		}
		if record.slotsStale {
			record.slotsStale, changed = false, true
			record.asked = record.askedSlots(slices.Concat(stream.Earlier, generations.Sets()))
		}
	}
	for name := range engine.moved.generations {
		if desired.Streams[name] == nil {
			delete(engine.moved.generations, name)
			fresh, changed = true, true
		}
	}
	if fresh {
		engine.moved.published.Set(engine.moved.copyGenerations())
	}
	return changed
}

// keepsFlows reports whether the kernel sends packets of a target's flows to it.
func keepsFlows(target plan.InstalledTarget, family vip.Family) bool {
	return target.Stage != plan.StageRemoving && target.Flows[family] && target.IPs[family].IsValid()
}

// askedSlots returns the addresses of the earlier targets of each slot, by family.
func (record *streamRecord) askedSlots(earlier [][len(vip.Families)][]string) (slots [len(vip.Families)]asked) {
	stream := record.installed
	for _, family := range vip.Families {
		var sets [][]string
		for _, tables := range earlier {
			sets = append(sets, tables[family])
		}
		keep := func(name string) bool { return keepsFlows(record.targets[name], family) }
		for slot, names := range plan.Earlier(stream.Size, stream.Seed, stream.Tables[family], sets, len(asked{}), keep) {
			for order, name := range names {
				if slots[family][order] == nil {
					slots[family][order] = map[uint32]netip.Addr{}
				}
				slots[family][order][slot] = record.targets[name].IPs[family]
			}
		}
	}
	return slots
}

// movedStreams returns the streams with slots that had earlier targets.
func (engine *engine) movedStreams() (streams midstream.Streams) {
	engine.linksRead = false
	if !engine.moved.enabled {
		return streams
	}
	for _, name := range slices.Sorted(maps.Keys(engine.moved.generations)) {
		record := engine.streams[name]
		if record == nil || record.installed == nil {
			continue
		}
		for _, family := range vip.Families {
			if stream := engine.movedStream(name, record, family); stream != nil {
				streams[family] = append(streams[family], *stream)
			}
		}
	}
	return streams
}

// movedStream returns a stream that asks all of its targets while sets of targets are unknown and the
// targets are few, otherwise the earlier targets of its slots; nil without any target to ask.
func (engine *engine) movedStream(name string, record *streamRecord, family vip.Family) *midstream.Stream {
	stream := &midstream.Stream{
		Name: name, Size: record.installed.Size, Seed: record.installed.Seed,
		FWMarks: map[uint32]plan.LinkAddress{}, Everyone: map[uint32]netip.Addr{},
	}
	for _, target := range record.targets {
		if keepsFlows(target, family) {
			stream.Everyone[target.FWMark] = target.IPs[family]
		}
	}
	if count := len(stream.Everyone); !record.everyone || count < 2 || count > midstream.MaxEveryone {
		if len(record.asked[family][0]) == 0 {
			return nil
		}
		stream.Asked = record.asked[family]
	}
	for fwmark, address := range stream.Everyone {
		stream.FWMarks[fwmark] = engine.linkAddress(address)
	}
	if stream.Asked[0] != nil {
		stream.Everyone = nil
	}
	return stream
}

// linkAddress returns the link-layer address of a target. The checks of a new target resolved it
// after the network was read.
func (engine *engine) linkAddress(target netip.Addr) plan.LinkAddress {
	link := engine.network.LinkAddresses[target]
	if link != (plan.LinkAddress{}) || engine.linksRead {
		return link
	}
	engine.linksRead = true
	network, err := engine.kernel.ReadNetwork()
	if err != nil {
		return link // the next step reads it again, and reports the error
	}
	engine.network.LinkAddresses = network.LinkAddresses
	return network.LinkAddresses[target]
}

// Moved describes the flows of other pods for operators.
type Moved struct {
	Generations Generations
	Packets     midstream.Counters
}

func (moved *moved) view() (view Moved, err error) {
	view.Generations = moved.copyGenerations()
	if !moved.streams.Empty() {
		view.Packets, err = moved.read()
	}
	return view, err
}

func (moved *moved) copyGenerations() Generations {
	copied := Generations{}
	for name, generations := range moved.generations {
		copied[name] = *generations
	}
	return copied
}

// useKernel lets the engine write the tables.
func (moved *moved) useKernel(conn *fwstate.Conn, mask uint32) {
	moved.apply = func(streams, known midstream.Streams) (string, error) {
		return midstream.Apply(conn.NFTables(), mask, streams, known)
	}
	moved.read = func() (midstream.Counters, error) { return midstream.Read(conn.NFTables()) }
}
