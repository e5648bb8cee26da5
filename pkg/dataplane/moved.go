package dataplane

import (
	"maps"
	"net/netip"

	"github.com/vipgate/vipgate/pkg/dataplane/midstream"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// movedDrift is a difference in the tables of package midstream.
var movedDrift = plan.Drift{Object: "tables ip and ip6 " + plan.TableName}

// installation returns the kernel state of a stream for package midstream, and whether it has one.
func (record *streamRecord) installation(desired *plan.Stream) (midstream.Installed, bool) {
	if record == nil || record.installed == nil {
		return midstream.Installed{}, false
	}
	installed := midstream.Installed{
		Stream: record.installed, Targets: record.targets, Stale: record.slotsStale,
	}
	if desired != nil {
		installed.Earlier = desired.Earlier
	}
	return installed, true
}

// updateMoved notes the sets of targets in force, and writes the tables for flows of other pods if
// they change or another process changed nftables.
func (engine *engine) updateMoved(desired *plan.Desired) {
	if !engine.moved.Writes() || engine.readErr != nil || desired == nil {
		return
	}
	now := engine.now()
	applied, _ := engine.moved.Written()
	changed := !applied || engine.linksChanged
	for name, record := range engine.streams {
		stream := desired.Streams[name]
		installed, found := record.installation(stream)
		if !found || installed.Stream.Stage != plan.StageApplied || stream == nil {
			continue
		}
		changed = engine.moved.Note(name, installed, now) || changed
		record.slotsStale = false
	}
	changed = engine.moved.Forget(func(name string) bool { return desired.Streams[name] == nil }) || changed
	repair := engine.rulesetRead && len(engine.holds.until) == 0 &&
		engine.repairs.due([]plan.Drift{movedDrift}, now, false)
	if !changed && !repair {
		return
	}
	streams := engine.movedStreams()
	changed = engine.moved.Differs(streams)
	// Without streams there are no tables, and nothing to repair.
	if _, tables := engine.moved.Written(); !changed && (!repair || !tables) {
		engine.rulesetRead = engine.rulesetRead && tables
		return
	}
	if difference := engine.writeMoved(streams); difference != "" && !changed {
		drift := movedDrift
		drift.Detail = difference
		engine.repairs.note(now, []plan.Drift{drift}, nil)
	}
}

// movedStreams returns the content of the tables for flows of other pods.
func (engine *engine) movedStreams() midstream.Streams {
	read, relinked := false, engine.linksChanged
	engine.linksChanged = false
	return engine.moved.Streams(func(name string) (midstream.Installed, bool) {
		return engine.streams[name].installation(nil)
	}, func(target netip.Addr) plan.LinkAddress {
		// The checks of a new target resolved its address after the network was read.
		if engine.network.LinkAddresses[target] == (plan.LinkAddress{}) && !read {
			read = true
			if network, err := engine.kernel.ReadNetwork(); err == nil { // the next step reports the error
				engine.linksChanged = engine.linksChanged || !maps.Equal(engine.network.LinkAddresses, network.LinkAddresses)
				engine.network.LinkAddresses = network.LinkAddresses
			}
		}
		return engine.network.LinkAddresses[target]
	}, relinked)
}

// writeMoved writes the tables, and returns their first difference from streams before.
func (engine *engine) writeMoved(streams midstream.Streams) string {
	difference, applied := engine.moved.Apply(streams, engine.rulesetRead, engine.log)
	if applied {
		engine.rulesetRead = false
		engine.fast.passes++
	}
	return difference
}

// prepareMoved writes the tables before targets enter a Maglev table: from then on packets of flows
// in their slots reach them. Targets that leave have no time for that.
func (a *application) prepareMoved() {
	if !a.moved.Writes() {
		return
	}
	prepared := false
	for _, change := range a.changes {
		if !change.Write || change.Remove || !change.Gains(change.input.Installed) {
			continue
		}
		if installed, found := change.record.installation(a.desired.Streams[change.Name]); found {
			a.moved.Expect(change.Name, installed, change.Stream.Tables, a.now())
			prepared = true
		}
	}
	if !prepared {
		return
	}
	if streams := a.movedStreams(); a.moved.Differs(streams) {
		a.writeMoved(streams)
	}
}
