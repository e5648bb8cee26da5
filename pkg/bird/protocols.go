package bird

import (
	"strconv"
	"strings"
	"time"
)

// Protocol is one protocol as `show protocols all` shows it.
type Protocol struct {
	Name      string
	Proto     string // "BGP"
	State     string // "up", "start", "down", …
	Info      string // "Established", "Active        Socket: Connection refused", …
	BGPState  string // "Established", …; empty without one
	Neighbor  string
	LastError string
	// HoldTimer is what is left of the hold time; zero or less when it is over
	// and BIRD has not noticed, or when there is none. HasHoldTimer tells which.
	HoldTimer    time.Duration
	HasHoldTimer bool
	Imported     int
	Exported     int
}

// Up tells whether the BGP session is established.
func (p Protocol) Up() bool { return p.BGPState == "Established" && p.State == "up" }

// Codes of the lines of `show protocols all`.
const (
	codeProtocol = 1002
	codeDetail   = 1006
)

// ParseProtocols reads the answer to `show protocols all`. It goes by words:
// columns differ between versions. Channels of a protocol are added up.
func ParseProtocols(r Reply) []Protocol {
	var list []Protocol
	for _, l := range r {
		words := strings.Fields(l.Text)
		if len(words) == 0 {
			continue
		}
		// BIRD puts the detail lines of a protocol behind code 1006, and its
		// head behind 1002, but continuation lines carry whichever came last.
		if l.Code == codeProtocol && !strings.HasPrefix(l.Text, " ") && len(words) >= 4 && !strings.HasSuffix(words[0], ":") {
			list = append(list, protocolHead(words))
			continue
		}
		if len(list) > 0 {
			protocolDetail(&list[len(list)-1], words)
		}
	}
	return list
}

// protocolHead reads "NAME PROTO TABLE STATE SINCE [INFO…]". The time is one
// word or two.
func protocolHead(words []string) Protocol {
	p := Protocol{Name: words[0], Proto: words[1], State: words[3]}
	rest := words[4:]
	if len(rest) > 0 {
		rest = rest[1:] // the time, or its date
	}
	if len(rest) > 0 && isClock(rest[0]) {
		rest = rest[1:]
	}
	p.Info = strings.Join(rest, " ")
	return p
}

func isClock(s string) bool {
	return len(s) >= 8 && s[2] == ':' && s[5] == ':' && s[0] >= '0' && s[0] <= '9'
}

func protocolDetail(p *Protocol, words []string) {
	text := strings.Join(words, " ")
	switch {
	case strings.HasPrefix(text, "BGP state: "):
		p.BGPState = words[2]
	case strings.HasPrefix(text, "Neighbor address: "):
		p.Neighbor = words[2]
	case strings.HasPrefix(text, "Last error: "):
		p.LastError = strings.TrimPrefix(text, "Last error: ")
	case strings.HasPrefix(text, "Hold timer: "):
		// "Hold timer: 2.181/3"
		left, _, _ := strings.Cut(words[2], "/")
		if s, err := strconv.ParseFloat(left, 64); err == nil {
			p.HoldTimer, p.HasHoldTimer = time.Duration(s*float64(time.Second)), true
		}
	case words[0] == "Routes:":
		// "Routes: 1 imported, 0 filtered, 2 exported, 1 preferred"
		for i := 1; i+1 < len(words); i += 2 {
			n, err := strconv.Atoi(words[i])
			if err != nil {
				return
			}
			switch strings.TrimRight(words[i+1], ",") {
			case "imported":
				p.Imported += n
			case "exported":
				p.Exported += n
			}
		}
	}
}

// ParseBFD reads the answer to `show bfd sessions`: address → state.
func ParseBFD(r Reply) map[string]string {
	sessions := map[string]string{}
	for _, l := range r {
		// "IP address  Interface  State  Since  Interval  Timeout"
		if words := strings.Fields(l.Text); len(words) >= 4 && strings.ContainsAny(words[0], ".:") && !strings.HasSuffix(words[0], ":") {
			sessions[words[0]] = words[2]
		}
	}
	return sessions
}

// Event is one line that BIRD wrote to its log.
type Event struct {
	Level    string // "TRACE", "INFO", "WARN", "RMT", …; empty if the line has none
	Protocol string // without channel; empty for BIRD as a whole
	Text     string

	dropped int // lines before it that were lost
}

// ParseEvent reads a line of BIRD's stderr: "DATE TIME <LEVEL> NAME: text",
// and on 3.x "bird: DATE TIME [thread] <LEVEL> …".
func ParseEvent(line string) Event {
	_, rest, ok := strings.Cut(line, "<")
	level, text, ok2 := strings.Cut(rest, "> ")
	if !ok || !ok2 {
		return Event{Text: strings.TrimSpace(line)}
	}
	e := Event{Level: level, Text: text}
	if name, message, ok := strings.Cut(text, ": "); ok && !strings.Contains(name, " ") {
		e.Protocol, e.Text = name, message
	}
	return e
}

// StateChanged tells whether the event is a protocol's change of state. Lines of
// channels, "LB.ipv4: …" on 3.x, are not.
func (e Event) StateChanged() bool {
	return strings.HasPrefix(e.Text, "State changed to ") && !strings.Contains(e.Protocol, ".ipv")
}
