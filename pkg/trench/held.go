package trench

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Held lists the removals of a valid configuration that wait; see pkg/trench/change.
type Held struct {
	// ID identifies the removals by their names; "" if nothing is held. It is the same in every pod.
	ID string
	// VIPs are sorted. Base are the VIPs in force before the hold; nil without VIPs.
	VIPs, Base []vip.VIP
	// Gateways are the last ones of a family.
	Gateways []string
	// Streams would lose all passing targets. Checks are streams whose new check too few targets pass.
	Streams, Checks []string
	// Whole reports whether the rest of the configuration waits, too, because it is invalid together
	// with the held objects.
	Whole bool
}

// Count returns the number of held objects.
func (held Held) Count() int {
	return len(held.VIPs) + len(held.Gateways) + len(held.Streams) + len(held.Checks)
}

// String lists the removals.
func (held Held) String() string {
	var parts []string
	if len(held.VIPs) > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d VIPs (%s)", len(held.VIPs), len(held.Base), first(held.VIPs)))
	}
	if len(held.Gateways) > 0 {
		parts = append(parts, "the last gateways of a family ("+first(held.Gateways)+")")
	}
	if len(held.Streams) > 0 {
		parts = append(parts, "all targets of streams ("+first(held.Streams)+")")
	}
	if len(held.Checks) > 0 {
		parts = append(parts, "the old checks of streams ("+first(held.Checks)+"), whose targets fail the new ones")
	}
	return strings.Join(parts, ", ")
}

// Targets identifies the held removals of targets and checks, with their streams; "" for none.
func (held Held) Targets() string {
	held = held.part(func(id string) bool { return !strings.HasPrefix(id, "v") })
	if held.ID == "" {
		return ""
	}
	return fmt.Sprintf("%s: the removal of %s waits for a confirmation", held.ID, held)
}

// part returns the removals whose part of the identifier is accepted.
func (held Held) part(accepted func(id string) bool) Held {
	refused := func(id string) bool { return !accepted(id) }
	held.ID = strings.Join(slices.DeleteFunc(strings.Split(held.ID, ","), refused), ",")
	has := func(kind string) bool { return strings.Contains(","+held.ID, ","+kind) }
	if !has("v") {
		held.VIPs, held.Gateways = nil, nil
	}
	if !has("t") {
		held.Streams = nil
	}
	if !has("c") {
		held.Checks = nil
	}
	return held
}

// Problem describes the removals and the remedy for status; "" if nothing is held.
func (held Held) Problem() string {
	if held.ID == "" {
		return ""
	}
	scope := "the rest of the configuration is in force"
	if held.Whole {
		scope = "the whole change waits, because its rest conflicts with them"
	}
	commands := "`lb confirm " + held.ID + "`" // only lb holds targets and checks
	if len(held.VIPs)+len(held.Gateways) > 0 {
		commands = "`frontend confirm " + held.ID + "` and " + commands
	}
	return fmt.Sprintf("%s: the removal of %s waits for a confirmation, %s; correct the configuration to cancel, "+
		"or confirm with %s, or `confirm: %s` in the trench file", held.ID, held, scope, commands, held.ID)
}

// confirm returns the removals that an identifier identifies; all for "". A part of either suffices:
// lb holds other removals than its frontend, whose status names the identifier of both.
func (held Held) confirm(identifier string) (part Held, err error) {
	part = held.part(func(id string) bool { return identifier == "" || strings.Contains(identifier, id) })
	switch {
	case held.ID == "":
		err = errors.New("no removal waits for a confirmation")
	case part.ID == "":
		err = fmt.Errorf("%s does not wait for a confirmation; %s does: the removal of %s", Quote(identifier),
			held.ID, held)
	}
	return part, err
}

// first returns the first items of a list as text.
func first[Item any](list []Item) string {
	const enough = 5
	texts := make([]string, 0, enough)
	for _, item := range list[:min(len(list), enough)] {
		texts = append(texts, fmt.Sprint(item))
	}
	if more := len(list) - enough; more > 0 {
		texts = append(slices.Clip(texts), fmt.Sprintf("and %d more", more))
	}
	return strings.Join(texts, ", ")
}
