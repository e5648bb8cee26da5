package bird

import (
	"bufio"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func replyOf(t *testing.T, text string) Reply {
	t.Helper()
	r, err := readReply(bufio.NewReader(strings.NewReader(text)))
	harness.Must(t, err)
	return r
}

// replyIn returns a recorded reply of BIRD's control socket.
func replyIn(t *testing.T, name string) Reply {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	harness.Must(t, err)
	return replyOf(t, string(b))
}

func channels(ipv4, ipv6 Channel) (both [2]Channel) {
	both[vip.IPv4], both[vip.IPv6] = ipv4, ipv6
	return both
}

// exported counts the exported routes of all channels.
func (protocol Protocol) exported() int {
	return protocol.Channels[vip.IPv4].Exported + protocol.Channels[vip.IPv6].Exported
}

func TestProtocolsOfBIRD2012(t *testing.T) {
	want := []Protocol{
		{Name: "NBR-BFD", Proto: "BFD", State: "up"},
		{
			Name: "NBR-a4", Proto: "BGP", State: "up", Info: "Established", BGPState: "Established",
			Neighbor:  netip.MustParseAddr("169.254.100.150"),
			Channels:  channels(Channel{Configured: true, Up: true, Imported: 1}, Channel{}),
			HoldTimer: 2531 * time.Millisecond, HasHoldTimer: true, HoldTime: 3 * time.Second,
		},
		{
			Name: "NBR-a6", Proto: "BGP", State: "up", Info: "Established", BGPState: "Established",
			Neighbor:  netip.MustParseAddr("fd00:100::150"),
			Channels:  channels(Channel{}, Channel{Configured: true, Up: true, Imported: 1}),
			HoldTimer: 1606 * time.Millisecond, HasHoldTimer: true, HoldTime: 3 * time.Second,
		},
		{
			Name: "NBR-off.subnet", Proto: "BGP", State: "start", Info: "Idle", BGPState: "Idle",
			Neighbor: netip.MustParseAddr("10.9.9.9"), Channels: channels(Channel{Configured: true}, Channel{}),
		},
		{
			Name: "NBR-gone", Proto: "BGP", State: "start", Info: "Active Socket: No route to host", BGPState: "Active",
			LastError: "Socket: No route to host", Neighbor: netip.MustParseAddr("169.254.100.99"),
			Channels: channels(Channel{Configured: true}, Channel{}),
		},
	}
	got := ParseProtocols(replyIn(t, "protocols-2.0.12.txt"))
	for i := range got {
		if i < len(want) {
			got[i].HoldTimer, want[i].HoldTimer = 0, 0 // differs with every capture
		}
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Error(diff)
	}
	for _, p := range got {
		if up := p.Name == "NBR-a4" || p.Name == "NBR-a6"; p.Up() != up {
			t.Errorf("%s: up is %v", p.Name, p.Up())
		}
	}
}

func TestProtocolsInOtherForms(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want []Protocol
	}{
		"3.x: more on the first detail line, wider tables": {
			text: "2002-Name       Proto      Table      State  Since         Info\n" +
				"1002-NBR-a      BGP        ---        up     2026-11-21 05:27:01  Established   \n" +
				"1006-  Created:            05:27:00.796\n" +
				"   BGP state:          Established\n" +
				"     Hold timer:       2.181/3\n" +
				"   Channel ipv4\n" +
				"     Routes:         3 imported, 1 filtered, 7 exported, 3 preferred\n" +
				"     Route change stats:     received   rejected   filtered    ignored  RX limit      limit   accepted\n" +
				"       Import updates:              3          0          0          0         0          0          3\n" +
				" \n" +
				"0000 \n",
			want: []Protocol{{
				Name: "NBR-a", Proto: "BGP", State: "up", Info: "Established", BGPState: "Established",
				Channels:  channels(Channel{Configured: true, Imported: 3, Exported: 7}, Channel{}),
				HoldTimer: 2181 * time.Millisecond, HasHoldTimer: true, HoldTime: 3 * time.Second,
			}},
		},
		"two channels": {
			text: "1002-NBR-a BGP --- up 2026-11-21 Established\n1006-  BGP state:          Established\n" +
				"   Channel ipv4\n     State:          UP\n     Routes:         1 imported, 2 exported, 1 preferred\n" +
				"   Channel ipv6\n     State:          DOWN\n     Routes:         10 imported, 20 exported, 1 preferred\n0000 \n",
			want: []Protocol{{
				Name: "NBR-a", Proto: "BGP", State: "up", Info: "Established", BGPState: "Established",
				Channels: channels(
					Channel{Configured: true, Up: true, Imported: 1, Exported: 2},
					Channel{Configured: true, Imported: 10, Exported: 20},
				),
			}},
		},
		"heads without details": {
			text: "2002-Name Proto Table State Since Info\n1002-device1    Device     ---        up     05:27:00.796  \n" +
				" KERNEL4    Kernel     master4    up     05:27:00.796  \n" +
				" NBR-gone   BGP        ---        start  05:27:00.796  Connect       Socket: No route to host\n0000 \n",
			want: []Protocol{
				{Name: "device1", Proto: "Device", State: "up"},
				{Name: "KERNEL4", Proto: "Kernel", State: "up"},
				{Name: "NBR-gone", Proto: "BGP", State: "start", Info: "Connect Socket: No route to host"},
			},
		},
		"error that contains a time": {
			text: "1002-NBR-a BGP --- start 05:27:00.796 Idle BGP Error: Hold timer expired\n0000 \n",
			want: []Protocol{{Name: "NBR-a", Proto: "BGP", State: "start", Info: "Idle BGP Error: Hold timer expired"}},
		},
		"a number that is none": {
			text: "1002-NBR-a BGP --- up 05:27:00 Established\n1006-  Routes:         many imported, 2 exported\n   Hold " +
				"timer:       soon/3\n0000 \n",
			want: []Protocol{{Name: "NBR-a", Proto: "BGP", State: "up", Info: "Established"}},
		},
		"none matches":         {text: "8003 No protocols match\n"},
		"a detail before any":  {text: "1006-  BGP state: Established\n0000 \n"},
		"a head that is short": {text: "1002-NBR-a BGP\n0000 \n"},
	} {
		t.Run(name, func(t *testing.T) {
			got := ParseProtocols(replyOf(t, tt.text))
			if diff := cmp.Diff(tt.want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestUnestablishedSessionIsDown(t *testing.T) {
	for _, p := range []Protocol{
		{State: "start", BGPState: "Established"}, {State: "up", BGPState: "Close"}, {
			State:    "stop",
			BGPState: "Established",
		}, {State: "up"}, {},
	} {
		if p.Up() {
			t.Errorf("%+v is up", p)
		}
	}
}

func TestBFDSessions(t *testing.T) {
	want := map[netip.Addr]string{
		netip.MustParseAddr("169.254.100.150"): "Up",
		netip.MustParseAddr("169.254.100.99"):  "Down",
		netip.MustParseAddr("fd00:100::150"):   "Up",
	}
	if diff := cmp.Diff(want, parseBFD(replyIn(t, "bfd-2.0.12.txt")),
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
	other := parseBFD(replyOf(t,
		"1020-NBR-BFD:\n IP address                Interface  State      Since         Interval  Timeout\n"+
			" fe80::1                   ext-vlan   Init       2026-11-21 05:27:00    0.100    0.300   extra\n"+
			" 2001:db8::                ext-vlan   Up\n0000 \n"))
	if other[netip.MustParseAddr("fe80::1")] != "Init" || other[netip.MustParseAddr("2001:db8::")] != "Up" ||
		len(other) != 2 {
		t.Errorf("other forms: %v", other)
	}
	if none := parseBFD(replyOf(t, "0013 There is no BFD protocol running\n")); len(none) != 0 {
		t.Errorf("no BFD: %v", none)
	}
}

func TestParseEvent(t *testing.T) {
	for _, tt := range []struct {
		line  string
		want  stateEvent
		state bool
	}{
		{
			"2026-11-21 05:27:01.682 <TRACE> NBR-a4: State changed to up",
			stateEvent{"TRACE", "NBR-a4", "State changed to up"},
			true,
		},
		{
			"bird: 2026-11-21 05:27:01.682 [0001] <TRACE> NBR-a4: State changed to stop",
			stateEvent{"TRACE", "NBR-a4", "State changed to stop"},
			true,
		},
		{
			"bird: 2026-11-21 05:27:01.682 [0001] <TRACE> LB.ipv4: State changed to up",
			stateEvent{"TRACE", "LB.ipv4", "State changed to up"},
			true,
		},
		// A name may look like a channel's.
		{
			"2026-11-21 05:27:01.682 <TRACE> NBR-gw.ipv4: State changed to up",
			stateEvent{"TRACE", "NBR-gw.ipv4", "State changed to up"},
			true,
		},
		{"2026-11-21 05:27:15.452 <INFO> Reconfiguring", stateEvent{"INFO", "", "Reconfiguring"}, false},
		{
			"2026-11-21 05:27:17.675 <INFO> Disabling protocol NBR-a4",
			stateEvent{"INFO", "", "Disabling protocol NBR-a4"},
			false,
		},
		{"2026-11-21 05:27:28.146 <FATAL> Shutdown completed", stateEvent{"FATAL", "", "Shutdown completed"}, false},
		{
			"2026-11-21 05:27:28.146 <RMT> NBR-a4: Received: Hold timer expired",
			stateEvent{"RMT", "NBR-a4", "Received: Hold timer expired"},
			false,
		},
		{"2026-11-21 05:27:28.146 <WARN> a <b> c: d", stateEvent{"WARN", "", "a <b> c: d"}, false},
		{
			"bird: /etc/bird/x.conf:1:1 syntax error, unexpected <EOF> here",
			stateEvent{"", "", "bird: /etc/bird/x.conf:1:1 syntax error, unexpected <EOF> here"},
			false,
		},
		{"", stateEvent{}, false},
		{"<TRACE>", stateEvent{Text: "<TRACE>"}, false},
		{"\x00\xff<", stateEvent{Text: "\x00\xff<"}, false},
	} {
		got := parseEvent(tt.line)
		if got != tt.want || got.StateChanged() != tt.state {
			t.Errorf("ParseEvent(%q) = %+v, state changed %v; want %+v, %v", tt.line, got, got.StateChanged(), tt.want, tt.state)
		}
	}
}

func TestEventLogLevels(t *testing.T) {
	for line, want := range map[string]struct{ quiet, verbose slog.Level }{
		"x <TRACE> NBR-a: State changed to up": {slog.LevelDebug, slog.LevelInfo},
		"x <INFO> Started":                     {slog.LevelDebug, slog.LevelInfo},
		"x <RMT> NBR-a: Received: Cease":       {slog.LevelDebug, slog.LevelInfo},
		"x <WARN> something":                   {slog.LevelWarn, slog.LevelWarn},
		"x <ERR> something":                    {slog.LevelError, slog.LevelError},
		"x <BUG> something":                    {slog.LevelError, slog.LevelError},
		"no level at all":                      {slog.LevelWarn, slog.LevelWarn},
		"x <FATAL> Shutdown completed":         {slog.LevelDebug, slog.LevelDebug},
	} {
		e := parseEvent(line)
		if e.level(false) != want.quiet || e.level(true) != want.verbose {
			t.Errorf("%q: %v, chatty %v; want %v, %v", line, e.level(false), e.level(true), want.quiet, want.verbose)
		}
	}
}

// Log lines of a session that comes up trigger TCP_NODELAY before any poll.
func TestSessionUpLine(t *testing.T) {
	for line, want := range map[string]bool{
		"2026-11-21 07:19:49.867 <TRACE> NBR-a4: State changed to up":                true,
		"bird: 2026-11-21 07:21:56.041 [0000] <TRACE> NBR-a4: State changed to up":   true,
		"2026-11-21 07:19:49.867 <TRACE> NBR-a4: State changed to start":             false,
		"2026-11-21 07:19:49.867 <TRACE> LB: State changed to up":                    false,
		"bird: 2026-11-21 07:21:56.041 [0000] <TRACE> KERNEL4: State changed to up":  false,
		"bird: 2026-11-21 07:21:56.041 [0000] <TRACE> NBR-a4: State changed to down": false,
	} {
		s := NewSupervisor(Options{})
		s.event(parseEvent(line))
		if got := len(s.sessionUp) == 1; got != want {
			t.Errorf("%s: %t, want %t", line, got, want)
		}
	}
}

// A result for the connection of an earlier session does not apply to a new session.
func TestNoDelayOfEarlierSession(t *testing.T) {
	address, up := netip.MustParseAddr("192.0.2.1"), time.Now()
	attempt := func(at time.Time, err error) *noDelay {
		return &noDelay{at, map[netip.Addr]bool{address: err == nil}, err}
	}
	refused := errors.New("refused")
	for name, x := range map[string]struct {
		attempt *noDelay
		set     bool
		problem string
	}{
		"none yet":        {},
		"earlier":         {attempt(up.Add(-time.Nanosecond), nil), false, ""},
		"earlier refused": {attempt(up.Add(-time.Nanosecond), refused), false, ""},
		"of this session": {attempt(up, nil), true, ""},
		"refused":         {attempt(up, refused), false, "refused"},
	} {
		list := []GatewayState{{Address: address, Protocol: trench.BGP, Up: true, Since: up}}
		x.attempt.describe(list)
		if g := list[0]; g.NoDelay != x.set || g.NoDelayProblem != x.problem {
			t.Errorf("%s: %t, %q", name, g.NoDelay, g.NoDelayProblem)
		}
	}
}
