package bird

import (
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Protocol is one protocol in the output of `show protocols all`.
type Protocol struct {
	Name  string
	Proto string // "BGP"
	State string // "up", "start", "down", …
	// Neighbor is the peer of a BGP session; zero if the session waits for any peer of a range. A
	// link-local address has a zone.
	Neighbor  netip.Addr
	Info      string // "Established", "Active Socket: Connection refused", …
	BGPState  string // "Established", …; empty without one
	LastError string
	// Channels holds the families; the zero value for one that the protocol does not have.
	Channels [len(vip.Families)]Channel
	// HoldTimer is the remaining hold time; valid only with HasHoldTimer.
	HoldTimer    time.Duration
	HasHoldTimer bool
	HoldTime     time.Duration // the lower offer of both sides; 0 if unknown
}

// Channel is one family of a protocol.
type Channel struct {
	Configured bool // the protocol has the family
	Up         bool
	Imported   int
	Exported   int
	// ImportLimit is the limit of imported routes; zero without a limit. LimitHit reports whether
	// BIRD shows that it ignored routes.
	ImportLimit int
	LimitHit    bool
}

// Imported counts the imported routes of all channels.
func (protocol Protocol) Imported() int {
	return protocol.Channels[vip.IPv4].Imported + protocol.Channels[vip.IPv6].Imported
}

// Up reports whether the BGP session is established.
func (protocol Protocol) Up() bool {
	return protocol.BGPState == "Established" && protocol.State == "up"
}

// codeProtocol is the code of a protocol's first line in `show protocols`; details have code 1006.
const codeProtocol = 1002

// ParseProtocols parses the reply to `show protocols all`. It splits lines into words, since
// columns differ between versions.
func ParseProtocols(reply Reply) []Protocol {
	var list []Protocol
	family := vip.IPv4 // of the channel that the lines describe
	for _, line := range reply {
		if !relevant(line) {
			continue
		}
		words := strings.Fields(line.Text)
		if len(words) == 0 {
			continue
		}
		// Neither a protocol's first line nor its first detail is indented, but the detail has code 1006.
		if line.Code == codeProtocol && !strings.HasPrefix(line.Text, " ") && len(words) >= 4 {
			list, family = append(list, protocolHead(words)), vip.IPv4
			continue
		}
		if len(list) > 0 {
			family = protocolDetail(&list[len(list)-1], family, words)
		}
	}
	return list
}

// relevant reports whether ParseProtocols may need a line, so that most lines are not split.
func relevant(line replyLine) bool {
	text := strings.TrimSpace(line.Text)
	return line.Code == codeProtocol && !strings.HasPrefix(line.Text, " ") ||
		slices.ContainsFunc(details[:], func(name string) bool { return strings.HasPrefix(text, name) })
}

// details lists the first words of the details that protocolDetail parses.
var details = [...]string{"BGP", "Neighbor", "Last", "Hold", "Channel", "State", "Import", "Routes"}

// protocolHead parses "NAME PROTO TABLE STATE SINCE [INFO…]". SINCE is a time, a date, or both.
func protocolHead(words []string) Protocol {
	protocol := Protocol{Name: words[0], Proto: words[1], State: words[3]}
	rest := words[4:]
	for len(rest) > 0 && isTime(rest[0]) {
		rest = rest[1:]
	}
	protocol.Info = strings.Join(rest, " ")
	return protocol
}

// isTime reports whether a word is a time such as 05:27:00.796 or a date such as 2026-11-21.
func isTime(s string) bool {
	return len(s) >= 8 && s[0] >= '0' && s[0] <= '9' && strings.ContainsAny(s, ":-") &&
		strings.Trim(s, "0123456789:.-") == ""
}

// protocolDetail parses a detail, in the channel of a family, and returns the family of the next.
func protocolDetail(p *Protocol, family vip.Family, words []string) vip.Family {
	name, value, _ := strings.Cut(strings.Join(words, " "), ":")
	value = strings.TrimSpace(value)
	switch channel := &p.Channels[family]; name {
	case "Channel ipv4":
		p.Channels[vip.IPv4].Configured = true
		return vip.IPv4
	case "Channel ipv6":
		p.Channels[vip.IPv6].Configured = true
		return vip.IPv6
	case "State":
		channel.Up = value == "UP"
	case "Neighbor address":
		text, zone, _ := strings.Cut(value, "%")
		if a, err := netip.ParseAddr(text); err == nil && a.IsLinkLocalUnicast() {
			p.Neighbor = a.WithZone(zone) // an IPv4 address has no zone
		} else if err == nil {
			p.Neighbor = a
		}
	case "BGP state":
		p.BGPState = value
	case "Last error":
		p.LastError = value
	case "Hold timer":
		// "2.181/3"; a hold time has 16 bits (RFC 4271 section 4.2).
		left, negotiated, _ := strings.Cut(value, "/")
		if s, err := strconv.ParseFloat(left, 64); err == nil && s >= 0 && s <= math.MaxUint16 {
			p.HoldTimer, p.HasHoldTimer = time.Duration(s*float64(time.Second)), true
			n, _ := strconv.ParseUint(negotiated, 10, 16) // 0 if invalid
			p.HoldTime = time.Duration(n) * time.Second
		}
	case "Import limit":
		// "1000", and " [HIT]" after it
		limit, hit, _ := strings.Cut(value, " ")
		if n, err := strconv.ParseUint(limit, 10, 32); err == nil {
			channel.ImportLimit, channel.LimitHit = int(n), hit == "[HIT]"
		}
	case "Routes":
		// "1 imported, 0 filtered, 2 exported, 1 preferred"
		for part := range strings.SplitSeq(value, ", ") {
			count, what, _ := strings.Cut(part, " ")
			n, err := strconv.ParseUint(count, 10, 32)
			if err != nil {
				break
			}
			switch what {
			case "imported":
				channel.Imported = int(n)
			case "exported":
				channel.Exported = int(n)
			}
		}
	}
	return family
}

// BIRD's names of states of BFD sessions: up, and down while packets of the peer arrive.
const (
	bfdUp   = "Up"
	bfdInit = "Init"
)

// parseBFD parses the reply to `show bfd sessions` into the state of each peer, such as "Up".
func parseBFD(reply Reply) map[netip.Addr]string {
	sessions := map[netip.Addr]string{}
	for _, line := range reply {
		// "IP address  Interface  State  Since  Interval  Timeout"
		words := strings.Fields(line.Text)
		if len(words) < 3 {
			continue
		}
		if a, err := netip.ParseAddr(words[0]); err == nil {
			sessions[a.WithZone("")] = words[2]
		}
	}
	return sessions
}
