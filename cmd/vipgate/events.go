package main

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/pods"
	"github.com/vipgate/vipgate/pkg/status"
)

type eventsCommand struct {
	outputFlags
	Follow bool `short:"f" help:"Continue with new events, also of new pods, until Ctrl-C; with -o json one object in each line." env:"-"`
}

func (c *eventsCommand) Run(ctx context.Context, out *cli.Output, line *commandLine) error {
	source, err := line.source()
	if err != nil {
		return err
	}
	printer := &eventPrinter{out: out, json: c.Output == "json"}
	if !c.Follow {
		all, err := pods.Events(ctx, source)
		if err != nil {
			return err
		}
		if err := printer.print(all); err != nil {
			return err
		}
		return exit(!printer.notes)
	}
	ctx, cancel := cli.Following(ctx)
	defer cancel()
	return pods.Follow(ctx, source, printer.print)
}

// eventPrinter prints events as a continued table, or as one JSON object in each line.
type eventPrinter struct {
	out   *cli.Output
	json  bool
	notes bool // there were notes
	log   status.PodEventLog
}

func (p *eventPrinter) print(events []pods.Event) error {
	for _, event := range events {
		p.notes = p.notes || event.Note != ""
		if !p.json {
			p.out.Printf("%s", p.log.Row(event.Pod, event.Program, event.Event, event.Note))
			continue
		}
		line := struct {
			Pod     string          `json:"pod,omitempty"`
			Program string          `json:"program,omitempty"`
			Note    string          `json:"note,omitempty"`
			Event   json.RawMessage `json:"event,omitempty"`
		}{Pod: event.Pod, Program: event.Program, Note: event.Note}
		if event.Event != nil {
			text, err := status.JSON(event.Event, false)
			if err != nil {
				return err
			}
			line.Event = json.RawMessage(text)
		}
		text, err := json.Marshal(line)
		if err != nil {
			return fmt.Errorf("failed to render an event as JSON: %w", err)
		}
		p.out.Printf("%s\n", text)
	}
	return nil
}
