package journal

import (
	"context"
	"log/slog"
	"slices"
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
func (j *Journal) Note(detail string) { j.Add(&adminv1.Event{Detail: detail}) }

// Add records events with the current time. The journal owns them from now on.
func (j *Journal) Add(events ...*adminv1.Event) {
	entries := make([]entry, len(events))
	for i, event := range events {
		entries[i].event = event
	}
	j.add(time.Now(), entries)
}

func (j *Journal) add(at time.Time, entries []entry) {
	if len(entries) == 0 {
		return
	}
	j.mu.Lock()
	for _, e := range entries {
		e.event.Time = timestamppb.New(at)
		j.events.add(e)
	}
	j.mu.Unlock()
	j.changed.Update(func(n uint64) uint64 { return n + 1 })
}

// Begin returns the empty changes of a decision about n VIPs. They are valid until the next Begin.
func (j *Journal) Begin(n int) *Changes {
	c := j.changes.reset()
	c.members = slices.Grow(c.members, n)
	return c
}

// Record counts, logs and records the changes of a decision. Up to [MaxSingle] VIPs have a log line
// and an event each; more share one.
func (j *Journal) Record(at time.Time, position readiness.Position, changes *Changes) {
	slices.SortFunc(changes.members, compareMembers)
	changed, notable := 0, 0
	for _, g := range byTransition(changes.groups) {
		if g.Changed() {
			changed += g.count
		}
		if g.Notable() {
			notable += g.count
		}
		j.Count(g.Transition, g.count)
	}
	j.log(position, changes, changed)
	// Events also include new VIPs, whose state did not change.
	var entries []entry
	switch {
	case notable > MaxSingle:
		all := changes.summarize(Transition.Notable)
		j.mu.Lock()
		vips := j.events.share(changes, notable)
		j.mu.Unlock()
		entries = []entry{{event: all.event(), many: vips}}
	case notable > 0:
		for _, m := range changes.members {
			if g := changes.groups[m.group]; g.Notable() {
				entries = append(entries, entry{event: g.event(m.vip), vip: m.vip})
			}
		}
	}
	for _, e := range entries {
		e.event.Position = position.Proto()
	}
	j.add(at, entries)
}

// log logs a line for each VIP whose state changed, or one common line for many of them. At level
// debug, every VIP has a line.
func (j *Journal) log(position readiness.Position, changes *Changes, changed int) {
	attributes := []any{"revision", position.Revision}
	if position.InstanceID != "" {
		attributes = slices.Insert(attributes, 0, any("instance_id"), any(position.InstanceID))
	}
	level, ctx := slog.LevelInfo, context.Background()
	if changed > MaxSingle {
		level = slog.LevelDebug
		all := changes.summarize(Transition.Changed)
		j.Log.With(all.attributes()...).Info("VIPs changed", attributes...)
	}
	debug := j.Log.Enabled(ctx, slog.LevelDebug)
	if changed == 0 && !debug || !j.Log.Enabled(ctx, level) {
		return
	}
	for _, m := range changes.members {
		switch g := changes.groups[m.group]; {
		case g.Changed():
			message := "VIP changed"
			if g.To == Removed {
				message = "VIP removed"
			}
			line := slices.Concat([]any{"vip", m.vip, "from", g.From, "to", g.To, "reason", g.Reason}, attributes,
				[]any{"detail", g.detail})
			if j.Attributes != nil {
				line = append(line, j.Attributes(m.vip)...)
			}
			j.Log.Log(ctx, level, message, line...)
		case debug && !g.New:
			j.Log.With(attributes...).Debug("VIP reason changed", "vip", m.vip, "state", g.To, "reason", g.Reason)
		}
	}
}

// event returns the event of one VIP of the group.
func (g *group) event(v vip.VIP) *adminv1.Event {
	return &adminv1.Event{Object: v.String(), From: g.From, To: g.To, Reason: g.Reason, Detail: g.detail}
}
