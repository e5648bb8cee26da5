package midstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Generations holds the sets of targets that streams had, by stream.
type Generations map[string]plan.Generations

// Installed is the state of a stream in the kernel.
type Installed struct {
	Stream  *plan.InstalledStream
	Targets map[string]plan.InstalledTarget
	// Earlier holds the earlier sets of targets in the trench file.
	Earlier [][len(vip.Families)][]string
	// Stale: its targets or tables changed since the last Note.
	Stale bool
}

// Keeper remembers the sets of targets of streams, and derives the content of the tables from them.
// Only its owner's goroutine may call it, except Write.
type Keeper struct {
	// apply writes the tables and read reads their counters; nil if the tables are left alone, as in a
	// cleanup.
	apply       func(streams Streams, known *Streams) (difference string, err error)
	read        func() (Counters, error)
	generations map[string]*plan.Generations
	// published has a copy of the generations for Write; fresh: they changed since.
	published *latest.Value[Generations]
	fresh     bool
	slots     map[string]*slots
	// streams is the content of the tables since applied; failure is the last error.
	streams Streams
	applied bool
	failure error
}

// slots holds the asked targets of a stream.
type slots struct {
	asked [len(vip.Families)][copies]map[uint32]netip.Addr
	// everyone: sets of targets are unknown, so that all targets are asked.
	everyone bool
	// content is the content of the tables, if derived from the present state; nil for a family
	// without any target to ask.
	content [len(vip.Families)]*Stream
	derived bool
}

// NewKeeper returns a keeper that writes no tables before UseKernel.
func NewKeeper() Keeper {
	return Keeper{
		generations: map[string]*plan.Generations{}, published: latest.New[Generations](nil),
		slots: map[string]*slots{},
	}
}

// UseKernel lets the keeper write the tables.
func (keeper *Keeper) UseKernel(conn *fwstate.Conn, mode Mode) {
	keeper.apply = func(streams Streams, known *Streams) (string, error) {
		return Apply(conn.NFTables(), mode, streams, known)
	}
	keeper.read = func() (Counters, error) { return Read(conn.NFTables()) }
}

// Writes reports whether the keeper writes tables.
func (keeper *Keeper) Writes() bool { return keeper.apply != nil }

// Written reports whether the last write of the tables succeeded, and whether there are any.
func (keeper *Keeper) Written() (applied, tables bool) {
	return keeper.applied, !keeper.streams.Empty()
}

func generationsFile(stateDir string) string { return filepath.Join(stateDir, "generations.json") }

// Load reads an earlier process's generations. It moves a corrupt file aside: new flows need none.
func (keeper *Keeper) Load(stateDir string, log *slog.Logger) error {
	if stateDir == "" {
		return nil
	}
	var stored Generations
	file := generationsFile(stateDir)
	_, _, err := durable.Read(file, &stored)
	if errors.Is(err, durable.ErrCorrupt) {
		durable.SetAside(file, err, time.Now(), log)
		return nil
	}
	for name, generations := range stored {
		keeper.generations[name] = &generations
	}
	if err != nil {
		return fmt.Errorf("failed to read the earlier sets of targets: %w", err)
	}
	return nil
}

// writeInterval is the shortest time between two writes of the generations.
const writeInterval = time.Second

// Write writes new generations to the state directory until ctx ends. The disk may hang, so the
// owner of the keeper does not do it.
func (keeper *Keeper) Write(ctx context.Context, stateDir string, log *slog.Logger) {
	for {
		generations, changed := keeper.published.Get()
		if generations != nil {
			if err := durable.Write(generationsFile(stateDir), generations); err != nil {
				log.Warn("failed to write the earlier sets of targets", "error", err)
			}
		}
		// Targets often change together.
		select {
		case <-ctx.Done():
			return
		case <-time.After(writeInterval):
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// Expect derives the asked targets of a stream from tables that are about to be in force: from then
// on packets of flows in their slots reach the current targets.
func (keeper *Keeper) Expect(name string, installed Installed, tables [len(vip.Families)][]string, now time.Time) {
	next := *keeper.of(name)
	next.Note(tables, now)
	keeper.slots[name] = &slots{asked: askedSlots(installed, next.Sets()), everyone: !next.Complete(now)}
}

func (keeper *Keeper) of(name string) *plan.Generations {
	if keeper.generations[name] == nil {
		keeper.generations[name] = &plan.Generations{}
	}
	return keeper.generations[name]
}

// Note notes the tables of a stream in force, and reports whether its asked targets may differ.
func (keeper *Keeper) Note(name string, installed Installed, now time.Time) (changed bool) {
	generations, stale := keeper.of(name), installed.Stale
	if generations.Note(installed.Stream.Tables, now) {
		stale, keeper.fresh = true, true
	}
	known := keeper.slots[name]
	if known == nil {
		known, stale = &slots{}, true
		keeper.slots[name] = known
	}
	if everyone := !generations.Complete(now); everyone != known.everyone {
		known.everyone, changed = everyone, true
	}
	if stale {
		known.asked, changed = askedSlots(installed, generations.Sets()), true
	}
	known.derived = known.derived && !changed
	return changed
}

// Forget forgets the streams for which gone reports true, and reports whether there are any. It
// ends a round of Note.
func (keeper *Keeper) Forget(gone func(name string) bool) (changed bool) {
	for name := range keeper.generations {
		if gone(name) {
			delete(keeper.generations, name)
			delete(keeper.slots, name)
			changed = true
		}
	}
	if changed || keeper.fresh {
		keeper.published.Set(keeper.copyGenerations())
		keeper.fresh = false
	}
	return changed
}

// keepsFlows reports whether the kernel sends packets of a target's flows to it.
func keepsFlows(target plan.InstalledTarget, family vip.Family) bool {
	return target.Stage != plan.StageRemoving && target.Flows[family] && target.IPs[family].IsValid()
}

// askedSlots returns the addresses of the earlier targets of each slot, by family.
func askedSlots(
	installed Installed, generations [][len(vip.Families)][]string,
) (asked [len(vip.Families)][copies]map[uint32]netip.Addr) {
	stream := installed.Stream
	for _, family := range vip.Families {
		var sets [][]string
		for _, tables := range slices.Concat(installed.Earlier, generations) {
			sets = append(sets, tables[family])
		}
		keep := func(name string) bool { return keepsFlows(installed.Targets[name], family) }
		for slot, names := range plan.Earlier(stream.Size, stream.Seed, stream.Tables[family], sets, copies, keep) {
			for order, name := range names {
				if asked[family][order] == nil {
					asked[family][order] = map[uint32]netip.Addr{}
				}
				asked[family][order][slot] = installed.Targets[name].IPs[family]
			}
		}
	}
	return asked
}

// Streams returns the content of the tables. Link returns the link-layer address of a target;
// relinked: others may have changed since the last call.
func (keeper *Keeper) Streams(
	installed func(name string) (Installed, bool), link func(netip.Addr) plan.LinkAddress, relinked bool,
) (streams Streams) {
	for _, name := range slices.Sorted(maps.Keys(keeper.slots)) {
		state, found := installed(name)
		if !found {
			continue
		}
		slots := keeper.slots[name]
		if !slots.derived || state.Stale || relinked {
			slots.derive(name, state, link)
		}
		for _, family := range vip.Families {
			if stream := slots.content[family]; stream != nil {
				streams[family] = append(streams[family], *stream)
			}
		}
	}
	return streams
}

func (slots *slots) derive(name string, installed Installed, link func(netip.Addr) plan.LinkAddress) {
	slots.derived = true
	for _, family := range vip.Families {
		stream := slots.stream(name, installed, family)
		slots.content[family] = stream
		if stream == nil {
			continue
		}
		for _, target := range installed.Targets {
			if keepsFlows(target, family) {
				stream.FWMarks[target.FWMark] = link(target.IPs[family])
			}
		}
	}
}

// stream returns a stream that asks all of its targets while sets of targets are unknown and the
// targets are few, otherwise the earlier targets of its slots; nil without any target to ask.
func (slots *slots) stream(name string, installed Installed, family vip.Family) *Stream {
	stream := &Stream{
		Name: name, Size: installed.Stream.Size, Seed: installed.Stream.Seed,
		FWMarks: map[uint32]plan.LinkAddress{},
		SCTP:    slices.ContainsFunc(installed.Stream.Match, func(port plan.Port) bool { return port.Protocol == plan.SCTP }),
	}
	everyone := map[uint32]netip.Addr{}
	for _, target := range installed.Targets {
		if keepsFlows(target, family) {
			everyone[target.FWMark] = target.IPs[family]
		}
	}
	switch count := len(everyone); {
	case slots.everyone && count >= 2 && count <= MaxEveryone:
		stream.Everyone = everyone
	case len(slots.asked[family][0]) > 0:
		stream.Asked = slots.asked[family]
	default:
		return nil
	}
	return stream
}

// Differs reports whether streams differ from the content of the tables.
func (keeper *Keeper) Differs(streams Streams) bool {
	return !keeper.applied || !streams.equal(&keeper.streams)
}

// Apply writes the tables and returns their first difference from streams before. Foreign: another
// process may have changed them.
func (keeper *Keeper) Apply(streams Streams, foreign bool, log *slog.Logger) (difference string, applied bool) {
	var known *Streams
	if keeper.applied && !foreign {
		known = &keeper.streams
	}
	difference, err := keeper.apply(streams, known)
	if err != nil {
		if keeper.failure == nil || keeper.failure.Error() != err.Error() {
			log.Warn("failed to write the tables for flows of other pods", "error", err)
		}
		keeper.failure, keeper.applied = err, false
		return "", false
	}
	keeper.streams, keeper.applied, keeper.failure = streams, true, nil
	return difference, true
}

// Asks returns whether a target other than the current one may have flows of a slot; nil if none.
func (keeper *Keeper) Asks(name string) func(family vip.Family, slot uint32) bool {
	var streams [len(vip.Families)]*Stream
	for _, family := range vip.Families {
		streams[family] = find(keeper.streams[family], name)
	}
	if streams == [len(vip.Families)]*Stream{} {
		return nil
	}
	return func(family vip.Family, slot uint32) bool {
		stream := streams[family]
		if stream == nil {
			return false
		}
		_, asked := stream.Asked[0][slot]
		return asked || stream.asksEveryone()
	}
}

// View describes the flows of other pods for operators.
type View struct {
	Generations Generations
	// Everyone has the streams of which all targets are asked.
	Everyone map[string]bool
	Packets  Counters
}

// View returns the present view.
func (keeper *Keeper) View() (view View, err error) {
	view.Generations, view.Everyone = keeper.copyGenerations(), map[string]bool{}
	for _, family := range vip.Families {
		for _, stream := range keeper.streams[family] {
			if stream.asksEveryone() {
				view.Everyone[stream.Name] = true
			}
		}
	}
	if !keeper.streams.Empty() {
		view.Packets, err = keeper.read()
	}
	return view, err
}

func (keeper *Keeper) copyGenerations() Generations {
	copied := Generations{}
	for name, generations := range keeper.generations {
		copied[name] = *generations
	}
	return copied
}
