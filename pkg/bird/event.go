package bird

import (
	"log/slog"
	"slices"
	"strings"
)

// stateEvent is one line that BIRD wrote to its log.
type stateEvent struct {
	Level    string // "TRACE", "INFO", "WARN", "RMT", …; empty if the line has none
	Protocol string // empty for BIRD as a whole; with its channel, such as "LB.ipv4", on 3.x
	Text     string
}

// levels are BIRD's log classes, which it writes in angle brackets (sysdep/unix/log.c).
var levels = []string{"DBG", "TRACE", "INFO", "RMT", "WARN", "ERR", "AUTH", "FATAL", "BUG"}

// parseEvent parses a line of BIRD's stderr: "DATE TIME <LEVEL> NAME: text", and on 3.x "bird:
// DATE TIME [thread] <LEVEL> …".
func parseEvent(line string) stateEvent {
	_, rest, ok := strings.Cut(line, "<")
	level, text, ok2 := strings.Cut(rest, "> ")
	if !ok || !ok2 || !slices.Contains(levels, level) {
		return stateEvent{Text: strings.TrimSpace(line)}
	}
	event := stateEvent{Level: level, Text: text}
	if name, message, ok := strings.Cut(text, ": "); ok && !strings.Contains(name, " ") {
		event.Protocol, event.Text = name, message
	}
	return event
}

const stateChanged = "State changed to "

// StateChanged reports whether the event is a state change of a protocol or a channel.
func (event stateEvent) StateChanged() bool { return strings.HasPrefix(event.Text, stateChanged) }

// isError reports whether the event can be the cause of BIRD's exit.
func (event stateEvent) isError() bool {
	switch event.Level {
	case "ERR", "FATAL", "BUG", "":
		return event.Text != "" && event.Text != shutdownCompleted && !event.dropped()
	}
	return false
}

// dropped reports whether the event is a send error of a BFD packet that the kernel dropped,
// which is expected while a static gateway is held down.
func (event stateEvent) dropped() bool {
	return event.Protocol == bfdName && strings.HasPrefix(event.Text, "Socket error: Operation not permitted")
}

// shutdownCompleted is BIRD's last line after SIGTERM; BIRD logs it as FATAL.
const shutdownCompleted = "Shutdown completed"

// level returns the event's level in the frontend's log; verbose raises debug to info.
func (event stateEvent) level(verbose bool) slog.Level {
	if event.dropped() || event.Text == shutdownCompleted ||
		strings.Contains(event.Text, "without explicit authentication") {
		return slog.LevelDebug // expected, although BIRD logs an error and a warning
	}
	switch event.Level {
	case "WARN", "":
		return slog.LevelWarn
	case "ERR", "FATAL", "BUG":
		return slog.LevelError
	}
	if verbose {
		return slog.LevelInfo
	}
	return slog.LevelDebug
}
