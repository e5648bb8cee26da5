package change

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Reconnect is about the time from the reset of a BGP session until the gateway has all VIPs
// again, as measured with BIRD at both ends.
const Reconnect = time.Second

// RestartTime returns about how long the restart of all sessions takes, one after another. Each
// session is de-preferred for the drain time before it is reset.
func (change *Change) RestartTime(drain time.Duration) time.Duration {
	var total time.Duration
	for _, gateway := range change.ChangedGateways {
		if gateway.Restarts {
			total += drain + Reconnect
		}
	}
	return total
}

// Text returns the changes for an operator: a line for each object, with the sign + if it is
// added, - if it is removed, and ~ if it changes.
func (change *Change) Text(drain time.Duration) string {
	if change.Empty() {
		return "no change\n"
	}
	var text strings.Builder
	change.VIPs.write(&text, "VIP")
	change.Gateways.write(&text, "gateway")
	for _, gateway := range change.ChangedGateways {
		what := "changes"
		if gateway.Restarts {
			what = "session restarts"
		}
		fmt.Fprintf(&text, "~ gateway %s: %s (%s)\n", gateway.Name, what, strings.Join(gateway.Fields.Fields, ", "))
	}
	change.Streams.write(&text, "stream")
	for _, stream := range change.ChangedStreams {
		text.WriteString(stream.line())
	}
	for _, field := range change.Others {
		fmt.Fprintf(&text, "~ %s\n", field)
	}
	if total := change.RestartTime(drain); total > 0 {
		fmt.Fprintf(&text, "sessions restart one after another, each in about %v: %v in all\n", drain+Reconnect, total)
	}
	return text.String()
}

func (names *Names) write(text *strings.Builder, kind string) {
	for _, name := range names.Added {
		fmt.Fprintf(text, "+ %s %s\n", kind, name)
	}
	for _, name := range names.Removed {
		fmt.Fprintf(text, "- %s %s\n", kind, name)
	}
}

func (stream *Stream) line() string {
	what := "changes"
	if stream.Table {
		what = "table changes"
	}
	fields := slices.Clone(stream.Fields.Fields)
	if at := slices.Index(fields, "check"); stream.Check {
		fields[at] = "check: the old one decides until targets pass the new one"
	}
	if last := len(fields) - 1; fields[last] == "targets" {
		fields[last] = fmt.Sprintf("targets: %d added, %d removed", stream.TargetsAdded, stream.TargetsRemoved)
	}
	return fmt.Sprintf("~ stream %s: %s (%s)\n", stream.Name, what, strings.Join(fields, ", "))
}
