package bird

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// sessionsFixture polls two gateways, a and b, whose errors a test sets.
type sessionsFixture struct {
	t        *testing.T
	errors   sessionErrors
	now      time.Time
	sessions []Session
	counters [md5Kinds]uint64
	failing  bool // the counters cannot be read
	states   map[string]GatewayState
}

func newSessionsFixture(t *testing.T, passwords ...string) *sessionsFixture {
	f := &sessionsFixture{t: t, now: time.Unix(1000, 0), states: map[string]GatewayState{}}
	f.errors.md5.counters = func() ([md5Kinds]uint64, error) {
		if f.failing {
			return [md5Kinds]uint64{}, errors.New("no counters")
		}
		return f.counters, nil
	}
	for i, password := range passwords {
		g := trench.Gateway{Name: string(rune('a' + i)), LocalASN: 1, RemoteASN: 2, BFD: &trench.BFD{Multiplier: 3}}
		f.sessions = append(f.sessions, Session{Gateway: g, Password: password})
	}
	return f
}

// up marks a session that is up. It may be followed by an earlier error, which some BIRD versions
// keep.
const up = "up"

// poll observes the errors that BIRD shows, by gateway, or up. A second passes.
func (f *sessionsFixture) poll(shown ...string) {
	f.now = f.now.Add(time.Second)
	f.pollIn("start", shown...)
}

func (f *sessionsFixture) pollIn(state string, shown ...string) {
	var gateways []GatewayState
	protocols := map[string]Protocol{}
	for i, text := range shown {
		g := GatewayState{Name: f.sessions[i].Name, Since: f.now}
		g.LastError, g.Up = strings.CutPrefix(text, up)
		if was, ok := f.states[g.Name]; ok && was.Up == g.Up {
			g.Since = was.Since
		}
		gateways = append(gateways, g)
		protocols[gatewayPrefix+g.Name] = Protocol{State: state}
	}
	f.errors.describe(f.now, gateways, protocols, f.sessions)
	for _, g := range gateways {
		f.states[g.Name] = g
	}
}

func (f *sessionsFixture) log(gateway, text string) {
	f.errors.logged(stateEvent{Level: "RMT", Protocol: gatewayPrefix + gateway, Text: text}, f.now)
}

// want checks the error of a gateway and its age.
func (f *sessionsFixture) want(gateway, text string, age time.Duration) {
	f.t.Helper()
	g := f.states[gateway]
	at := f.now.Add(-age)
	if text == "" {
		at = time.Time{}
	}
	if g.LastError != text || !g.LastErrorAt.Equal(at) {
		f.t.Errorf("gateway %s: error %q of %v, want %q of %v", gateway, g.LastError, g.LastErrorAt, text, at)
	}
}

const second = time.Second

func TestLastErrorOfSession(t *testing.T) {
	const refused, reset, hold = "Socket: Connection refused", "Socket: Connection reset by peer",
		"BGP Error: Hold timer expired"
	t.Run("kept when BIRD clears it", func(t *testing.T) {
		f := newSessionsFixture(t, "")
		f.poll(refused)
		f.poll("")
		f.want("a", refused, second)
	})
	t.Run("seen in the log only", func(t *testing.T) {
		f := newSessionsFixture(t, "", "")
		f.poll("", "")
		f.log("a", "Received: Connection rejected")
		f.errors.logged(stateEvent{Level: "TRACE", Protocol: "NBR-b", Text: "Received: Cease"}, f.now)
		f.errors.logged(stateEvent{Level: "RMT", Protocol: "LB", Text: "Received: Cease"}, f.now)
		f.log("b", "Invalid route 10.0.0.0/33 withdrawn")
		f.poll("", "")
		f.want("a", "Received: Connection rejected", second)
		f.want("b", "", 0)
	})
	t.Run("detail and time of the log", func(t *testing.T) {
		f := newSessionsFixture(t, "")
		f.poll("")
		f.log("a", "Error: Bad message length: 5")
		f.poll("BGP Error: Bad message length")
		f.want("a", "BGP Error: Bad message length: 5", second)
		f.log("a", "Error: Bad message length: 5")
		f.poll("BGP Error: Bad message length")
		f.want("a", "BGP Error: Bad message length: 5", second)
	})
	t.Run("a reset follows a NOTIFICATION", func(t *testing.T) {
		f := newSessionsFixture(t, "")
		f.poll(hold)
		f.poll(reset)
		f.want("a", hold, second)
		f.poll(hold) // shown once more: the error occurred again
		f.want("a", hold, 2*second)
	})
	t.Run("a gateway that is gone since", func(t *testing.T) {
		f := newSessionsFixture(t, "")
		f.poll(hold)
		for range int(errorPriority/second) - 2 {
			f.poll("")
		}
		f.poll(reset)
		f.want("a", hold, errorPriority-second)
		f.poll(refused)
		f.want("a", refused, 0)
	})
	t.Run("a NOTIFICATION outlives errors of the connection", func(t *testing.T) {
		f := newSessionsFixture(t, "")
		f.poll("Received: Maximum number of prefixes reached")
		at := f.now
		for range 2 * int(errorPriority/second) {
			f.poll("")
		}
		f.poll(refused)
		f.want("a", refused, 0)
		const want = "Received: Maximum number of prefixes reached; raise the prefix limit of the gateway above the " +
			"number of VIPs, and clear the session there"
		if g := f.states["a"]; g.Notification != want || !g.NotificationAt.Equal(at) {
			t.Errorf("NOTIFICATION %q of %v, want %q of %v", g.Notification, g.NotificationAt, want, at)
		}
		f.poll(up)
		f.poll(up)
		f.poll("")
		if g := f.states["a"]; g.Notification != "" {
			t.Errorf("NOTIFICATION %q from before the session", g.Notification)
		}
	})
	t.Run("errors of one kind", func(t *testing.T) {
		f := newSessionsFixture(t, "")
		for _, text := range []string{refused, reset, hold, "Received: Cease", "BGP Error: Bad message length"} {
			f.poll(text)
			f.want("a", text, 0)
		}
	})
	t.Run("another configuration", func(t *testing.T) {
		f := newSessionsFixture(t, "", "")
		f.poll(refused, refused)
		same := *f.sessions[1].BFD
		f.sessions[0].Password, f.sessions[1].BFD = "secret", &same
		f.pollIn("stop", refused, refused) // the session of the old configuration
		f.want("a", "", 0)
		f.poll("", refused)
		f.want("a", "", 0)
		f.want("b", refused, second)
		f.sessions[1].BFD = &trench.BFD{Multiplier: 4}
		f.poll("", "")
		f.want("b", "", 0)
		f.sessions[1].BFD = nil
		f.poll("", refused)
		f.want("b", refused, 0)
	})
	t.Run("a session that came up", func(t *testing.T) {
		f := newSessionsFixture(t, "")
		f.poll(refused)
		f.poll("up")
		f.poll("up")
		f.poll("")
		f.want("a", "", 0)
		f.poll("up")
		f.pollIn("stop", hold) // the loss, while BIRD still stops the session
		f.want("a", hold, 0)
		f.poll("up")
		f.poll(hold)
		f.want("a", hold, 0)
		f.poll(up + hold)
		f.poll(up + hold)
		f.poll(hold) // again, as BIRD does not show the end of the first error
		f.want("a", hold, 0)
	})
	t.Run("a loss that is logged before the poll sees it", func(t *testing.T) {
		f := newSessionsFixture(t, "")
		f.poll(up)
		f.poll(up)
		f.log("a", "Error: Hold timer expired")
		f.poll(up)
		f.poll("")
		f.want("a", hold, 2*second)
	})
	t.Run("numbers of the configuration", func(t *testing.T) {
		f := newSessionsFixture(t, "", "")
		f.poll("BGP Error: Bad peer AS", "Received: Bad peer AS")
		f.want("a", "BGP Error: Bad peer AS; the gateway has another AS number than remoteASN 2", 0)
		f.want("b", "Received: Bad peer AS; the gateway expects another AS number than localASN 1", 0)
	})
}

// The counters are of the whole network namespace: an error names the gateways that they may
// concern.
func TestTCPMD5Attribution(t *testing.T) {
	const (
		unsigned = "TCP-MD5: the gateway does not sign (unsigned TCP segments arrive); set the password at " +
			"the gateway, or remove passwordFile"
		signed = "TCP-MD5: the gateway signs, and this side does not (signed TCP segments arrive); set " +
			"passwordFile, or remove the password at the gateway"
		differ = "TCP-MD5: the passwords of both sides differ (TCP segments with a wrong signature arrive)"
	)
	for _, tt := range []struct {
		name      string
		passwords []string
		shown     []string
		increase  [md5Kinds]uint64
		want      []string
	}{
		{"unsigned", []string{"x", ""}, []string{"", ""}, [md5Kinds]uint64{md5NotFound: 1}, []string{unsigned, ""}},
		{"signed", []string{"x", ""}, []string{"", ""}, [md5Kinds]uint64{md5Unexpected: 1}, []string{"", signed}},
		{"another key", []string{"x", ""}, []string{"", ""}, [md5Kinds]uint64{md5Failure: 1}, []string{differ, ""}},
		{
			"two candidates",
			[]string{"x", "y"},
			[]string{"", ""},
			[md5Kinds]uint64{md5Failure: 1},
			[]string{differ + "; this concerns at least one of a, b", differ + "; this concerns at least one of a, b"},
		},
		{"one is up", []string{"x", "y"}, []string{"up", ""}, [md5Kinds]uint64{md5Failure: 1}, []string{"", differ}},
		{"no increase", []string{"x", ""}, []string{"", ""}, [md5Kinds]uint64{}, []string{"", ""}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newSessionsFixture(t, tt.passwords...)
			f.counters = [md5Kinds]uint64{7, 8, 9} // of an earlier fault
			f.poll(tt.shown...)
			for kind, n := range tt.increase {
				f.counters[kind] += n
			}
			f.poll(tt.shown...)
			for i, want := range tt.want {
				f.want(f.sessions[i].Name, want, 0)
			}
			f.failing = true
			f.poll(tt.shown...)
			for i, want := range tt.want {
				f.want(f.sessions[i].Name, want, second)
			}
		})
	}
	t.Run("fast polls", func(t *testing.T) {
		f := newSessionsFixture(t, "x")
		reads := 0
		f.errors.md5.counters = func() ([md5Kinds]uint64, error) { reads++; return f.counters, nil }
		for range 101 { // half a second
			f.now = f.now.Add(5 * time.Millisecond)
			f.pollIn("start", "")
		}
		if want := 3; reads != want {
			t.Errorf("the counters were read %d times, want %d", reads, want)
		}
		f.counters[md5NotFound]++
		for range int(md5Interval / (5 * time.Millisecond)) {
			f.now = f.now.Add(5 * time.Millisecond)
			f.pollIn("start", "")
		}
		if got := f.states["a"].LastError; got != unsigned {
			t.Errorf("error %q, want %q", got, unsigned)
		}
	})
	t.Run("increased while all sessions were up", func(t *testing.T) {
		f := newSessionsFixture(t, "x")
		f.poll("")
		f.poll("up")
		f.counters[md5Failure]++
		f.poll("up")
		f.poll("")
		f.want("a", "", 0)
	})
	t.Run("newer than an error of BGP", func(t *testing.T) {
		f := newSessionsFixture(t, "x")
		f.poll("BGP Error: Hold timer expired")
		f.counters[md5NotFound]++
		f.poll("BGP Error: Hold timer expired")
		f.poll("BGP Error: Hold timer expired")
		f.want("a", unsigned, second)
	})
}

func TestParseMD5(t *testing.T) {
	const content = "TcpExt: SyncookiesSent TCPMD5NotFound TCPMD5Unexpected TCPMD5Failure\n" +
		"TcpExt: 1 2 3 4\nIpExt: InNoRoutes\nIpExt: 5\n"
	if got, want := parseMD5(content), [md5Kinds]uint64{2, 3, 4}; got != want {
		t.Errorf("counters %v, want %v", got, want)
	}
	for _, content := range []string{"", "TcpExt: TCPMD5NotFound\n", "TcpExt: TCPMD5NotFound\nTcpExt:\n"} {
		if got := parseMD5(content); got != [md5Kinds]uint64{} {
			t.Errorf("counters %v of %q", got, content)
		}
	}
}
