package bird

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// errorPriority is how long an error of BGP or of TCP-MD5 is not replaced by an error of the socket:
// longer than BIRD needs for another attempt. A gateway that refuses a session with a NOTIFICATION
// resets the next connection.
const errorPriority = 10 * time.Second

// sessionError is why a BGP session does not come up, or was lost.
type sessionError struct {
	text   string
	at     time.Time
	socket bool // an error of the TCP connection
}

// replaces reports whether an error is reported instead of an earlier one.
func (e sessionError) replaces(old sessionError) bool {
	return e.text != "" && (!e.socket || old.socket || old.text == "" || e.at.Sub(old.at) >= errorPriority)
}

// BIRD's names of errors in `show protocols`. Its log has no "BGP " before the first.
const (
	sentError     = "BGP Error: "
	receivedError = "Received: "
	socketError   = "Socket: "
	badPeerAS     = "Bad peer AS"
)

// sessionErrors holds the last error of each session under its present configuration. The zero
// value is usable.
type sessionErrors struct {
	md5 md5Counters // owned by Supervisor.Run

	mu       sync.Mutex
	sessions map[string]*sessionRecord // by gateway
}

type sessionRecord struct {
	session Session
	last    sessionError
	// polled and up are of the last poll: BIRD may show an error for longer than one session.
	polled string
	up     bool
	// started: the protocol was started with this configuration. Before, BIRD shuts the one of an
	// earlier configuration down, and shows its error.
	started bool
}

// logged records a NOTIFICATION in BIRD's log: BIRD may have cleared the error by the next poll.
func (s *sessionErrors) logged(e Event, at time.Time) {
	name, ok := strings.CutPrefix(e.Protocol, gatewayPrefix)
	if !ok || e.Level != "RMT" {
		return
	}
	text := e.Text
	if strings.HasPrefix("BGP "+text, sentError) {
		text = "BGP " + text
	} else if !strings.HasPrefix(text, receivedError) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if record := s.sessions[name]; record != nil {
		record.last = sessionError{text: text, at: at}
	}
}

// describe sets the last error in the states of the BGP gateways that are down, which have the one
// that BIRD shows. sessions are those of the configuration that BIRD loaded: a session that differs
// from that of the last poll has no earlier error.
func (s *sessionErrors) describe(
	at time.Time, gateways []GatewayState, protocols map[string]Protocol, sessions []Session,
) {
	signing := s.md5.problems(at, gateways, sessions)
	s.mu.Lock()
	defer s.mu.Unlock()
	records := make(map[string]*sessionRecord, len(sessions))
	for _, session := range sessions {
		record := s.sessions[session.Name]
		if record == nil || !record.session.equal(session) {
			record = &sessionRecord{session: session}
		}
		records[session.Name] = record
	}
	s.sessions = records
	for i := range gateways {
		g := &gateways[i]
		record := records[g.Name]
		if record == nil || g.Protocol != trench.BGP || g.Problem != "" {
			continue
		}
		if g.Up {
			if record.last.at.Before(g.Since) {
				record.last = sessionError{}
			}
			record.polled, record.up, record.started = g.LastError, true, true
			continue
		}
		state := protocols[gatewayPrefix+g.Name].State
		record.started = record.started || state == "start" || state == "up"
		if record.started {
			record.observe(at, g.LastError)
		}
		if problem := signing[g.Name]; problem != "" {
			record.last = sessionError{text: "TCP-MD5: " + problem, at: at}
		}
		g.LastError, g.LastErrorAt = record.session.explain(record.last.text), record.last.at
	}
}

// observe takes the error that BIRD shows of a session that is down.
func (r *sessionRecord) observe(at time.Time, text string) {
	changed := text != r.polled || r.up
	r.polled, r.up = text, false
	is := sessionError{text: text, at: at, socket: strings.HasPrefix(text, socketError)}
	// The log has the detail of an error that `show protocols` lacks.
	if changed && !strings.HasPrefix(r.last.text, text) && is.replaces(r.last) {
		r.last = is
	}
}

// equal reports whether two sessions have the same configuration in BIRD.
func (s Session) equal(other Session) bool {
	a, b := s.BFD, other.BFD
	s.BFD, other.BFD = nil, nil
	return s == other && (a == nil) == (b == nil) && (a == nil || *a == *b)
}

// explain returns the error with the part of the configuration that it refers to.
func (s Session) explain(text string) string {
	if !strings.Contains(text, badPeerAS) {
		return text
	}
	if strings.HasPrefix(text, sentError) {
		return fmt.Sprintf("%s; the gateway has another AS number than remoteASN %d", text, s.RemoteASN)
	}
	return fmt.Sprintf("%s; the gateway expects another AS number than localASN %d", text, s.LocalASN)
}

// The kernel's counters of TCP segments that it dropped for their signature (TCP-MD5, RFC 2385), of
// the whole network namespace.
const (
	md5NotFound   = iota // without a signature, from a peer with a key
	md5Unexpected        // with a signature, from a peer without a key
	md5Failure           // with the signature of another key
	md5Kinds
)

var md5Names = [md5Kinds]string{"TCPMD5NotFound", "TCPMD5Unexpected", "TCPMD5Failure"}

// md5Texts say which side lacks what. The sender of the segments is not in the counters.
var md5Texts = [md5Kinds]string{
	"the gateway does not sign (unsigned TCP segments arrive); set the password at the gateway, " +
		"or remove passwordFile",
	"the gateway signs, and this side does not (signed TCP segments arrive); set passwordFile, " +
		"or remove the password at the gateway",
	"the passwords of both sides differ (TCP segments with a wrong signature arrive)",
}

// md5Interval separates two reads of the counters.
const md5Interval = 200 * time.Millisecond

// md5Counters attributes the counters to gateways: those without a session whose password fits.
type md5Counters struct {
	at       time.Time // of last; zero: all sessions were up
	last     [md5Kinds]uint64
	counters func() ([md5Kinds]uint64, error) // [readMD5] if nil
}

// problems returns by gateway what increased since the last read, if that concerns the gateway.
func (c *md5Counters) problems(at time.Time, gateways []GatewayState, sessions []Session) map[string]string {
	var suspects [md5Kinds][]string
	down := false
	for _, g := range gateways {
		i := slices.IndexFunc(sessions, func(s Session) bool { return s.Name == g.Name })
		switch {
		case g.Protocol != trench.BGP || g.Up || g.Problem != "" || i < 0:
			continue
		case sessions[i].Password != "":
			suspects[md5NotFound] = append(suspects[md5NotFound], g.Name)
			suspects[md5Failure] = append(suspects[md5Failure], g.Name)
		default:
			suspects[md5Unexpected] = append(suspects[md5Unexpected], g.Name)
		}
		down = true
	}
	if !down {
		c.at = time.Time{}
		return nil
	}
	if at.Sub(c.at) < md5Interval {
		return nil
	}
	read := c.counters
	if read == nil {
		read = readMD5
	}
	now, err := read()
	if err != nil {
		return nil // without the counters BIRD's errors remain
	}
	before, first := c.last, c.at.IsZero()
	c.last, c.at = now, at
	if first {
		return nil
	}
	problems := map[string]string{}
	for kind, names := range suspects {
		for _, name := range names {
			if now[kind] == before[kind] {
				continue
			}
			problems[name] = md5Texts[kind]
			if len(names) > 1 {
				problems[name] += "; this concerns at least one of " + strings.Join(names, ", ")
			}
		}
	}
	return problems
}

// readMD5 reads the counters of this network namespace.
func readMD5() (counters [md5Kinds]uint64, err error) {
	content, err := os.ReadFile("/proc/self/net/netstat")
	if err != nil {
		return counters, err
	}
	return parseMD5(string(content)), nil
}

// parseMD5 reads the counters in pairs of lines, "TcpExt: NAME …" and "TcpExt: VALUE …".
func parseMD5(content string) (counters [md5Kinds]uint64) {
	var names []string
	for line := range strings.Lines(content) {
		words := strings.Fields(line)
		if len(words) == 0 || words[0] != "TcpExt:" {
			continue
		}
		if names == nil {
			names = words
			continue
		}
		for kind, name := range md5Names {
			if i := slices.Index(names, name); i >= 0 && i < len(words) {
				counters[kind], _ = strconv.ParseUint(words[i], 10, 64) // 0 without a number
			}
		}
		return counters
	}
	return counters
}
