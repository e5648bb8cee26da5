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
	"github.com/vipgate/vipgate/pkg/vip"
)

// errorPriority is how long a BGP or TCP-MD5 error takes precedence over a socket error. It
// exceeds the time of BIRD's next attempt, because a gateway that refuses a session with a
// NOTIFICATION resets the next connection.
const errorPriority = 10 * time.Second

// sessionError is why a BGP session does not come up, or was lost.
type sessionError struct {
	text   string
	at     time.Time
	socket bool // an error of the TCP connection
}

// replaces reports whether e takes the place of an earlier error.
func (e sessionError) replaces(old sessionError) bool {
	return e.text != "" && (!e.socket || old.socket || old.text == "" || e.at.Sub(old.at) >= errorPriority)
}

// Prefixes of BIRD's errors in `show protocols`; the first two are NOTIFICATIONs. BIRD's log omits
// "BGP " from the first.
const (
	sentError     = "BGP Error: "
	receivedError = "Received: "
	socketError   = "Socket: "
)

func isNotification(text string) bool {
	return strings.HasPrefix(text, sentError) || strings.HasPrefix(text, receivedError)
}

// sessionErrors holds the last error of each session under its current configuration. The zero
// value is ready to use.
type sessionErrors struct {
	md5 md5Counters // owned by Supervisor.Run

	mu       sync.Mutex
	sessions map[string]*sessionRecord // by gateway
}

type sessionRecord struct {
	session Session
	last    sessionError
	// notification is the last NOTIFICATION since the session was up; it outlives later errors.
	notification sessionError
	// polled and up are the error and the state at the last poll: BIRD may show an error longer than
	// the session that it belongs to.
	polled string
	up     bool
	// started reports whether BIRD has started the protocol with this configuration. Until then it
	// shuts down the protocol of the earlier configuration and shows that protocol's error.
	started bool
}

// logged records a NOTIFICATION from BIRD's log, as BIRD may clear the error before the next poll.
func (errs *sessionErrors) logged(event stateEvent, at time.Time) {
	name, ok := strings.CutPrefix(event.Protocol, gatewayPrefix)
	if !ok || event.Level != "RMT" {
		return
	}
	text := event.Text
	if strings.HasPrefix("BGP "+text, sentError) {
		text = "BGP " + text
	}
	errs.mu.Lock()
	defer errs.mu.Unlock()
	if record := errs.sessions[name]; record != nil && isNotification(text) {
		record.fail(sessionError{text: text, at: at})
	}
}

// describe sets LastError and Notification of each BGP gateway that is down. At the call LastError
// is the error that BIRD shows. sessions lists the sessions of the configuration that BIRD loaded: a
// session whose configuration has changed since the last poll has no earlier error.
func (errs *sessionErrors) describe(
	at time.Time, gateways []GatewayState, protocols map[string]Protocol, sessions []Session,
) {
	signing := errs.md5.problems(at, gateways, sessions)
	errs.mu.Lock()
	defer errs.mu.Unlock()
	// A session with a new configuration starts without the errors of the previous one.
	records := make(map[string]*sessionRecord, len(sessions))
	for _, session := range sessions {
		record := errs.sessions[session.Name]
		if record == nil || !record.session.equal(session) {
			record = &sessionRecord{session: session}
		}
		records[session.Name] = record
	}
	errs.sessions = records
	for i := range gateways {
		gateway := &gateways[i]
		record := records[gateway.Name]
		if record == nil || gateway.Protocol != trench.BGP || gateway.Problem != "" {
			continue
		}
		if gateway.isLacking {
			continue // the session is up without this family
		}
		if gateway.Up {
			// BIRD shows the last error also while the session is up.
			if record.last.at.Before(gateway.Since) {
				record.last, record.notification = sessionError{}, sessionError{}
			}
			record.polled, record.up, record.started = gateway.LastError, true, true
			continue
		}
		state := protocols[gatewayPrefix+gateway.Name].State
		record.started = record.started || state == "start" || state == "up"
		if record.started {
			record.observe(at, gateway.LastError)
		}
		// The kernel counts rejected signatures; BIRD itself only sees a timeout.
		if problem := signing[gateway.Name]; problem != "" {
			record.last = sessionError{text: "TCP-MD5: " + problem, at: at}
		}
		gateway.LastError, gateway.LastErrorAt = record.session.explain(record.last.text), record.last.at
		gateway.Notification = record.session.explain(record.notification.text)
		gateway.NotificationAt = record.notification.at
	}
}

func (r *sessionRecord) fail(e sessionError) {
	if r.last = e; isNotification(e.text) {
		r.notification = e
	}
}

// observe records the error that BIRD shows for a session that is down.
func (r *sessionRecord) observe(at time.Time, text string) {
	changed := text != r.polled || r.up
	r.polled, r.up = text, false
	is := sessionError{text: text, at: at, socket: strings.HasPrefix(text, socketError)}
	// An error from the log stays: it has details that `show protocols` omits.
	if changed && !strings.HasPrefix(r.last.text, text) && is.replaces(r.last) {
		r.fail(is)
	}
}

// equal reports whether two sessions have the same configuration in BIRD.
func (session Session) equal(other Session) bool {
	a, b := session.BFD, other.BFD
	session.BFD, other.BFD = nil, nil
	return session == other && (a == nil) == (b == nil) && (a == nil || *a == *b)
}

// explain adds the remedy to an error.
func (session Session) explain(text string) string {
	is := func(error string) bool { return isNotification(text) && strings.Contains(text, ": "+error) }
	switch {
	case is("Bad peer AS") && strings.HasPrefix(text, sentError):
		text += fmt.Sprintf("; the gateway has another AS number than remoteASN %d", session.RemoteASN)
	case is("Bad peer AS"):
		text += fmt.Sprintf("; the gateway expects another AS number than localASN %d", session.LocalASN)
	case is("Unacceptable hold time"):
		text += fmt.Sprintf("; set the hold time of the gateway to %v, at least 3s", session.HoldTime)
	case is("Required capability missing"):
		families := strings.Join(vip.Texts(session.FamilyList()), " and ")
		text += fmt.Sprintf("; activate %s unicast for this session at the gateway", families)
	case is("Maximum number of prefixes reached"):
		text += "; raise the prefix limit of the gateway above the number of VIPs, and clear the session there"
	}
	return text
}

// The kernel's counters of TCP segments that it dropped for their signature (TCP-MD5, RFC 2385),
// of the whole network namespace.
const (
	md5NotFound   = iota // without a signature, from a peer with a key
	md5Unexpected        // with a signature, from a peer without a key
	md5Failure           // with the signature of another key
	md5Kinds
)

var md5Names = [md5Kinds]string{"TCPMD5NotFound", "TCPMD5Unexpected", "TCPMD5Failure"}

// md5Texts explain the counters with a remedy. The counters do not identify the sender.
var md5Texts = [md5Kinds]string{
	"the gateway does not sign (unsigned TCP segments arrive); set the password at the gateway, " +
		"or remove passwordFile",
	"the gateway signs, and this side does not (signed TCP segments arrive); set passwordFile, " +
		"or remove the password at the gateway",
	"the passwords of both sides differ (TCP segments with a wrong signature arrive)",
}

// md5Interval separates two reads of the counters.
const md5Interval = 200 * time.Millisecond

// md5Counters attributes increments of the counters to the gateways that are down and whose
// password setting matches the kind of error.
type md5Counters struct {
	at       time.Time // time of last; zero if all sessions were up
	last     [md5Kinds]uint64
	counters func() ([md5Kinds]uint64, error) // [readMD5] if nil
}

// problems returns the signing problem of each gateway that a counter's increment may concern.
func (c *md5Counters) problems(at time.Time, gateways []GatewayState, sessions []Session) map[string]string {
	var suspects [md5Kinds][]string
	down := false
	for _, gateway := range gateways {
		i := slices.IndexFunc(sessions, func(s Session) bool { return s.Name == gateway.Name })
		switch {
		case gateway.Protocol != trench.BGP || gateway.Up || gateway.isLacking || gateway.Problem != "" || i < 0:
			continue
		case sessions[i].Password != "":
			suspects[md5NotFound] = append(suspects[md5NotFound], gateway.Name)
			suspects[md5Failure] = append(suspects[md5Failure], gateway.Name)
		default:
			suspects[md5Unexpected] = append(suspects[md5Unexpected], gateway.Name)
		}
		down = true
	}
	if !down {
		// Increments while all sessions are up concern no gateway, so the next read is a new baseline.
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
		return nil // BIRD's own errors are still reported
	}
	before, first := c.last, c.at.IsZero()
	c.last, c.at = now, at
	// The counters are totals of the network namespace: only an increment is evidence.
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
			// The counters do not identify the sender.
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
				counters[kind], _ = strconv.ParseUint(words[i], 10, 64) // 0 if invalid
			}
		}
		return counters
	}
	return counters
}
