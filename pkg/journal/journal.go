package journal

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Options configure a journal.
type Options struct {
	Log      *slog.Logger
	Instance string // of this start; events are numbered within it
	// Count counts the VIPs of a decision with the same transition.
	Count func(transition Transition, vips int)
	// Attributes returns further attributes of a VIP's log line; nil if there are none.
	Attributes func(vip.VIP) []any
	// Known reports whether the VIP may get events. Requests for unknown VIPs without events fail.
	Known func(vip.VIP) bool
}

// Journal logs decisions and keeps the newest events. It implements the EventService. Its methods
// are safe for concurrent use, except for Begin and Record, which one goroutine calls.
type Journal struct {
	adminv1.UnimplementedEventServiceServer
	Options
	changes Changes
	changed *latest.Value[uint64] // counts additions of events

	mu     sync.Mutex
	events events
}

// New returns a journal without events.
func New(options Options) *Journal {
	return &Journal{
		Options: options, changes: Changes{index: map[explained]uint16{}}, changed: latest.New(uint64(0)),
	}
}

// Note records an event of the program itself.
func (journal *Journal) Note(detail string) { journal.Add(&adminv1.Event{Detail: detail}) }

// Add records events with the current time. The journal owns them from now on.
func (journal *Journal) Add(events ...*adminv1.Event) {
	entries := make([]entry, len(events))
	for i, event := range events {
		entries[i].event = event
	}
	journal.add(time.Now(), entries)
}

func (journal *Journal) add(at time.Time, entries []entry) {
	if len(entries) == 0 {
		return
	}
	journal.mu.Lock()
	for _, found := range entries {
		// One text that is not UTF-8 would make each answer with this event fail.
		found.event.Time, found.event.Detail = timestamppb.New(at), strings.ToValidUTF8(found.event.Detail, "?")
		journal.events.add(found)
	}
	journal.mu.Unlock()
	// After the unlock, because a watch that wakes takes the lock.
	journal.changed.Update(func(count uint64) uint64 { return count + 1 })
}

// Begin returns the empty changes of a decision about count VIPs, valid until the next Begin.
func (journal *Journal) Begin(count int) *Changes {
	changes := journal.changes.reset()
	changes.members = slices.Grow(changes.members, count)
	return changes
}

// Record counts, logs and records the changes of a decision. Up to [MaxSingle] VIPs have a log line
// and an event each; more share one.
func (journal *Journal) Record(at time.Time, position readiness.Position, changes *Changes) {
	// Members are found by binary search, and equal members are shared.
	slices.SortFunc(changes.members, compareMembers)
	changed, notable := 0, 0
	for _, part := range byTransition(changes.groups) {
		if part.Changed() {
			changed += part.count
		}
		if part.Notable() {
			notable += part.count
		}
		journal.Count(part.Transition, part.count)
	}
	journal.log(position, changes, changed)
	// Events also include new VIPs, whose state did not change.
	var entries []entry
	switch {
	case notable > MaxSingle:
		all := changes.summarize(Transition.Notable)
		journal.mu.Lock()
		vips := journal.events.share(changes, notable)
		journal.mu.Unlock()
		entries = []entry{{event: all.event(), many: vips}}
	case notable > 0:
		for _, member := range changes.members {
			if part := changes.groups[member.group]; part.Notable() {
				entries = append(entries, entry{event: part.event(member.vip), vip: member.vip})
			}
		}
	}
	for _, found := range entries {
		found.event.Position = position.Proto()
	}
	journal.add(at, entries)
}

// log logs a line for each VIP whose state changed, or one common line for many of them. At level
// debug, every VIP has a line.
func (journal *Journal) log(position readiness.Position, changes *Changes, changed int) {
	attributes := []any{"revision", position.Revision}
	if position.InstanceID != "" {
		attributes = slices.Insert(attributes, 0, any("instance_id"), any(position.InstanceID))
	}
	level, ctx := slog.LevelInfo, context.Background()
	if changed > MaxSingle {
		level = slog.LevelDebug
		all := changes.summarize(Transition.Changed)
		journal.Log.With(all.attributes()...).Info("VIPs changed", attributes...)
	}
	debug := journal.Log.Enabled(ctx, slog.LevelDebug)
	if changed == 0 && !debug || !journal.Log.Enabled(ctx, level) {
		return
	}
	for _, member := range changes.members {
		switch part := changes.groups[member.group]; {
		case part.Changed():
			message := "VIP changed"
			if part.To == Removed {
				message = "VIP removed"
			}
			line := slices.Concat([]any{"vip", member.vip, "from", part.From, "to", part.To, "reason", part.Reason}, attributes,
				[]any{"detail", part.detail})
			if journal.Attributes != nil {
				line = append(line, journal.Attributes(member.vip)...)
			}
			journal.Log.Log(ctx, level, message, line...)
		case debug && !part.New:
			line := []any{"vip", member.vip, "state", part.To, "reason", part.Reason}
			journal.Log.Debug("VIP reason changed", append(line, attributes...)...)
		}
	}
}

func (part *group) event(prefix vip.VIP) *adminv1.Event {
	return &adminv1.Event{Object: prefix.String(), From: part.From, To: part.To, Reason: part.Reason, Detail: part.detail}
}
