package bird

import (
	"math"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// Protocol is one protocol as `show protocols all` shows it.
type Protocol struct {
	Name      string
	Proto     string // "BGP"
	State     string // "up", "start", "down", …
	Info      string // "Established", "Active Socket: Connection refused", …
	BGPState  string // "Established", …; empty without one
	LastError string
	Imported  int
	Exported  int
	// HoldTimer is what is left of the hold time; only with HasHoldTimer.
	HoldTimer    time.Duration
	HasHoldTimer bool
}

// Up tells whether the BGP session is established.
func (p Protocol) Up() bool { return p.BGPState == "Established" && p.State == "up" }

// codeProtocol is the code of the head of a protocol in `show protocols`; its
// details have code 1006.
const codeProtocol = 1002

// ParseProtocols reads the answer to `show protocols all`. It goes by words:
// columns differ between versions. Channels of a protocol are added up.
func ParseProtocols(r Reply) []Protocol {
	var list []Protocol
	for _, l := range r {
		words := strings.Fields(l.Text)
		if len(words) == 0 {
			continue
		}
		// A head stands at the beginning of its line; a detail is indented, or,
		// when it comes first, "BGP state:" or "Created:" behind code 1006.
		if l.Code == codeProtocol && !strings.HasPrefix(l.Text, " ") && len(words) >= 4 {
			list = append(list, protocolHead(words))
			continue
		}
		if len(list) > 0 {
			protocolDetail(&list[len(list)-1], words)
		}
	}
	return list
}

// protocolHead reads "NAME PROTO TABLE STATE SINCE [INFO…]". SINCE is a clock, a
// date, or both.
func protocolHead(words []string) Protocol {
	p := Protocol{Name: words[0], Proto: words[1], State: words[3]}
	rest := words[4:]
	for len(rest) > 0 && isTime(rest[0]) {
		rest = rest[1:]
	}
	p.Info = strings.Join(rest, " ")
	return p
}

// isTime tells whether a word is a clock such as 05:27:00.796 or a date such as
// 2026-11-21.
func isTime(s string) bool {
	return len(s) >= 8 && s[0] >= '0' && s[0] <= '9' && strings.Trim(s, "0123456789:.-") == "" && strings.ContainsAny(s, ":-")
}

func protocolDetail(p *Protocol, words []string) {
	text := strings.Join(words, " ")
	switch {
	case strings.HasPrefix(text, "BGP state: "):
		p.BGPState = words[2]
	case strings.HasPrefix(text, "Last error: "):
		p.LastError = strings.TrimPrefix(text, "Last error: ")
	case strings.HasPrefix(text, "Hold timer: "):
		// "Hold timer: 2.181/3"; a hold time has 16 bits (RFC 4271 section 4.2).
		left, _, _ := strings.Cut(words[2], "/")
		if s, err := strconv.ParseFloat(left, 64); err == nil && s >= 0 && s <= math.MaxUint16 {
			p.HoldTimer, p.HasHoldTimer = time.Duration(s*float64(time.Second)), true
		}
	case words[0] == "Routes:":
		// "Routes: 1 imported, 0 filtered, 2 exported, 1 preferred"
		for i := 1; i+1 < len(words); i += 2 {
			n, err := strconv.ParseUint(words[i], 10, 32)
			if err != nil {
				return
			}
			switch strings.TrimRight(words[i+1], ",") {
			case "imported":
				p.Imported += int(n)
			case "exported":
				p.Exported += int(n)
			}
		}
	}
}

// ParseBFD reads the answer to `show bfd sessions`: the state of each peer, such
// as "Up".
func ParseBFD(r Reply) map[netip.Addr]string {
	sessions := map[netip.Addr]string{}
	for _, l := range r {
		// "IP address  Interface  State  Since  Interval  Timeout"
		words := strings.Fields(l.Text)
		if len(words) < 3 {
			continue
		}
		if a, err := netip.ParseAddr(words[0]); err == nil {
			sessions[a.WithZone("")] = words[2]
		}
	}
	return sessions
}
