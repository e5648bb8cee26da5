package bird

import (
	"log/slog"
	"slices"
	"strings"
)

// Event is one line that BIRD wrote to its log.
type Event struct {
	Level    string // "TRACE", "INFO", "WARN", "RMT", …; empty if the line has none
	Protocol string // empty for BIRD as a whole; with its channel, such as "LB.ipv4", on 3.x
	Text     string
}

// levels are the words that BIRD puts in angle brackets (log classes of its
// manual; sysdep/unix/log.c).
var levels = []string{"DBG", "TRACE", "INFO", "RMT", "WARN", "ERR", "AUTH", "FATAL", "BUG"}

// ParseEvent reads a line of BIRD's stderr: "DATE TIME <LEVEL> NAME: text", and
// on 3.x "bird: DATE TIME [thread] <LEVEL> …".
func ParseEvent(line string) Event {
	_, rest, ok := strings.Cut(line, "<")
	level, text, ok2 := strings.Cut(rest, "> ")
	if !ok || !ok2 || !slices.Contains(levels, level) {
		return Event{Text: strings.TrimSpace(line)}
	}
	e := Event{Level: level, Text: text}
	if name, message, ok := strings.Cut(text, ": "); ok && !strings.Contains(name, " ") {
		e.Protocol, e.Text = name, message
	}
	return e
}

// StateChanged tells whether the event is a change of state, of a protocol or
// of a channel. It hints that something of interest may have happened.
func (e Event) StateChanged() bool { return strings.HasPrefix(e.Text, "State changed to ") }

// trouble tells whether the event can be the reason of BIRD's end.
func (e Event) trouble() bool {
	switch e.Level {
	case "ERR", "FATAL", "BUG", "":
		return e.Text != "" && e.Text != shutdownCompleted
	}
	return false
}

// shutdownCompleted is BIRD's last word after it was told to end; it is FATAL
// only in name.
const shutdownCompleted = "Shutdown completed"

// level is how loud the event is for us. chatty raises what BIRD says when all
// is well to info.
func (e Event) level(chatty bool) slog.Level {
	if e.Text == shutdownCompleted || strings.Contains(e.Text, "without explicit authentication") {
		return slog.LevelDebug // an error and a warning only in name
	}
	switch e.Level {
	case "WARN", "":
		return slog.LevelWarn
	case "ERR", "FATAL", "BUG":
		return slog.LevelError
	}
	if chatty {
		return slog.LevelInfo
	}
	return slog.LevelDebug
}
