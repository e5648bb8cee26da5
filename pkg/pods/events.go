package pods

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
)

const (
	// searchInterval is the time between two searches for new pods and attempts to reconnect.
	searchInterval = 2 * time.Second
	// orderDelay is the time in which new events of several pods are brought into order.
	orderDelay = 500 * time.Millisecond
	// maxSeen is the number of remembered events: 50 pods keep 1 000 of each program.
	maxSeen = 100_000
)

// Event is an event of a program, or a note about it.
type Event struct {
	Pod, Program string
	*adminv1.Event
	// Note is why events of the program may be missing; the Event is nil then.
	Note string
}

// passed identifies an event: a program counts its events from 1 at each start.
type passed struct {
	stream
	sequence uint64
	nanos    int64
}

type stream struct{ pod, program string }

// Events returns the kept events of all pods, ordered by time, after the notes.
func Events(ctx context.Context, source Source) ([]Event, error) {
	members, err := source.Members(ctx)
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	var all []Event
	err = each(ctx, members, func(ctx context.Context, i int, program string) {
		member, answer := members[i], &adminv1.ListEventsResponse{}
		problem := ask(ctx, source, member, program, "events", answer)
		mu.Lock()
		defer mu.Unlock()
		if problem != "" {
			all = append(all, Event{Pod: member.Name, Program: program, Note: problem})
		}
		for _, event := range answer.GetEvents() {
			all = append(all, Event{Pod: member.Name, Program: program, Event: event})
		}
	})
	slices.SortStableFunc(all, compareTime)
	return all, err
}

// compareTime orders events by time, and notes before events.
func compareTime(a, b Event) int { return a.GetTime().AsTime().Compare(b.GetTime().AsTime()) }

// Follow passes the kept events of all pods to take, and then new ones, also of new pods, until ctx
// ends or take returns an error. They are ordered by time, except for an event that arrives late.
func Follow(ctx context.Context, source Source, take func([]Event) error) error {
	kept, err := Events(ctx, source)
	if err != nil {
		return err
	}
	f := &follower{
		source: source, arrived: make(chan Event), ended: make(chan stream),
		seen: map[passed]bool{}, open: map[stream]bool{}, notes: map[stream]string{},
	}
	ctx, cancel := context.WithCancel(ctx)
	defer f.streams.Wait()
	defer cancel()
	search := time.NewTicker(searchInterval)
	defer search.Stop()
	f.accept(kept...)
	f.search(ctx)
	for {
		// A batch is complete orderDelay after its first event.
		var complete <-chan time.Time
		if len(f.batch) > 0 {
			complete = time.After(time.Until(f.first.Add(orderDelay)))
		}
		select {
		case <-ctx.Done():
			return nil
		case event := <-f.arrived:
			f.accept(event)
		case ended := <-f.ended:
			delete(f.open, ended)
		case <-search.C:
			f.search(ctx)
		case <-complete:
			slices.SortStableFunc(f.batch, compareTime)
			if err := take(f.batch); err != nil {
				return err
			}
			f.batch = nil
		}
	}
}

// follower reads the events of all programs. The goroutine of [Follow] owns it, except for source
// and the channels.
type follower struct {
	source  Source
	arrived chan Event
	ended   chan stream
	streams sync.WaitGroup

	// seen and older hold the passed events: a new connection sends all kept events again. Their times
	// do not identify them, because events of one decision share theirs.
	seen, older map[passed]bool
	open        map[stream]bool
	notes       map[stream]string // the last note
	batch       []Event
	first       time.Time // when the batch was begun
}

// accept adds events to the batch, each event once and each note once in a row.
func (f *follower) accept(events ...Event) {
	for _, event := range events {
		of := stream{event.Pod, event.Program}
		key := passed{of, event.GetSequence(), event.GetTime().AsTime().UnixNano()}
		switch {
		case event.Event == nil && f.notes[of] == event.Note, event.Event != nil && (f.seen[key] || f.older[key]):
			continue
		case event.Event == nil:
			f.notes[of] = event.Note
		default:
			f.seen[key], f.notes[of] = true, ""
		}
		if len(f.batch) == 0 {
			f.first = time.Now()
		}
		f.batch = append(f.batch, event)
	}
	if len(f.seen) > maxSeen {
		f.seen, f.older = map[passed]bool{}, f.seen
	}
}

// search connects to programs that are not connected.
func (f *follower) search(ctx context.Context) {
	members, err := f.source.Members(ctx)
	if err != nil {
		if ctx.Err() == nil {
			f.accept(Event{Note: err.Error()})
		}
		return
	}
	for _, member := range members {
		for _, program := range []string{Frontend, LB} {
			of := stream{member.Name, program}
			reason, exists := member.Programs[program]
			switch {
			case !exists || f.open[of]:
			case reason != "":
				f.accept(Event{Pod: of.pod, Program: program, Note: reason})
			default:
				f.open[of] = true
				f.streams.Go(func() { f.read(ctx, of) })
			}
		}
	}
}

// read follows the events of a program until the connection ends.
func (f *follower) read(ctx context.Context, of stream) {
	lines := &lineWriter{line: func(line []byte) error {
		event := &adminv1.Event{}
		if err := unmarshal(line, event); err != nil {
			return fmt.Errorf("unreadable event: %w", err)
		}
		return f.send(ctx, Event{Pod: of.pod, Program: of.program, Event: event})
	}}
	err := f.source.Run(ctx, of.pod, of.program, []string{of.program, "events", "--follow", "--output=json"}, lines)
	note := "the connection ended; connecting again"
	if err != nil {
		note = err.Error() + "; connecting again"
	}
	_ = f.send(ctx, Event{Pod: of.pod, Program: of.program, Note: note}) // fails only at the end
	select {
	case f.ended <- of:
	case <-ctx.Done():
	}
}

func (f *follower) send(ctx context.Context, event Event) error {
	select {
	case f.arrived <- event:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// lineWriter calls line for each complete line.
type lineWriter struct {
	line func([]byte) error
	rest []byte
}

func (w *lineWriter) Write(data []byte) (int, error) {
	w.rest = append(w.rest, data...)
	for {
		line, rest, complete := bytes.Cut(w.rest, []byte("\n"))
		if !complete {
			return len(data), nil
		}
		if err := w.line(line); err != nil {
			return 0, err
		}
		w.rest = rest
	}
}

// unmarshal parses JSON of a program, which may be newer and have more fields.
func unmarshal(data []byte, message proto.Message) error {
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(data, message)
}
