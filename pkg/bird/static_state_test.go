package bird

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/bfdlease"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/turns"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func staticSession(name, address string, bfd *trench.BFD) Session {
	return Session{
		Gateway: trench.Gateway{
			Name: name, Address: netip.MustParseAddr(address), Protocol: trench.Static, BFD: bfd,
		},
		Path: turns.Path{Local: netip.MustParseAddr("169.254.100.1")},
	}
}

func staticInput() renderInput {
	in := fullInput()
	bfd := &trench.BFD{MinTx: 100 * time.Millisecond, MinRx: 200 * time.Millisecond, Multiplier: 5}
	in.Sessions = append(in.Sessions,
		staticSession(strings.Repeat("x", 60), "169.254.100.151", bfd), staticSession("s6", "fd00::151", bfd),
		staticSession("no-bfd", "169.254.100.152", nil))
	return in
}

func TestRenderStatic(t *testing.T) {
	in := staticInput()
	vrrp := in
	vrrp.VRRP = []netip.Addr{netip.MustParseAddr("169.254.100.7"), netip.MustParseAddr("169.254.100.8")}
	for name, tt := range map[string]struct {
		in           renderInput
		want, absent []string
	}{
		"gateways": {
			in,
			[]string{
				"min tx interval 100 ms; min rx interval 200 ms; multiplier 5;",
				"protocol static 'NBR-s6' {\n\tipv6 { import all; };\n\troute ::/0 via fd00::151%'ext-vlan' bfd;\n}",
				"protocol static 'EGR-s6' {\n\tipv6 { preference 50; import all; };\n" +
					"\troute ::/0 via fd00::151%'ext-vlan';\n}",
				"\troute 0.0.0.0/0 via 169.254.100.152%'ext-vlan';\n}", "if source = RTS_STATIC then accept;",
			},
			[]string{"EGR-no-bfd", "VRRP"},
		},
		"VRRP": {
			vrrp,
			[]string{
				"protocol static 'VRRP4' {\n\tipv4 { import all; };\n\troute 0.0.0.0/0 via 169.254.100.7%'ext-vlan' onlink;\n" +
					"\troute 0.0.0.0/0 via 169.254.100.8%'ext-vlan' onlink;\n}",
				"ipv6 { import none; };\n\troute ::/0 via fd00::151%'ext-vlan' bfd;", "import none;\n\t\tnext hop self;",
			},
			[]string{"EGR-", "VRRP6", "import filter NBR"},
		},
		"BGP only": {
			fullInput(),
			[]string{`filter KERNEL_OUT { if source = RTS_BGP && proto != "LB" then accept; reject; }`},
			[]string{"RTS_STATIC", "protocol static", "debug { states, events }"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			content, err := render(tt.in)
			harness.Must(t, err)
			checkWithBIRD(t, content)
			for _, s := range tt.want {
				if !strings.Contains(string(content), s) {
					t.Errorf("%q is missing in\n%s", s, content)
				}
			}
			for _, s := range tt.absent {
				if strings.Contains(string(content), s) {
					t.Errorf("%q is in\n%s", s, content)
				}
			}
		})
	}
	if got := fmt.Sprint(in.heldDown()); got != "[169.254.100.151 fd00::151]" {
		t.Errorf("addresses with a lease: %s", got)
	}
}

func TestStaticGatewayState(t *testing.T) {
	now := time.Now()
	on, off := bfdlease.State{Attract: bfdlease.Families{true, true}}, bfdlease.State{}
	raised := on
	raised.Since = [len(vip.Families)]time.Time{now.Add(-raiseTime + time.Millisecond), now}
	for name, tt := range map[string]struct {
		protocol, bfd    string
		lease            bfdlease.State
		up, held, usable bool
		state            string
	}{
		"held down":         {"up", "Init", off, false, true, true, StateHeld},
		"not yet down":      {"up", "Up", off, true, true, true, StateHeld},
		"up":                {"up", "Up", on, true, false, true, "Up"},
		"released":          {"up", "Init", raised, false, false, true, "Init"},
		"down":              {"up", "Down", on, false, false, false, "Down"},
		"no session":        {"up", "", on, false, false, false, "Down"},
		"disabled":          {"down", "", off, false, false, false, "down"},
		"disabled in force": {"down", "", on, false, false, false, "down"},
	} {
		t.Run(name, func(t *testing.T) {
			g := staticSession("g", "10.0.0.1", &trench.BFD{}).Gateway
			v := resolution{gateways: []trench.Gateway{g}}
			protocols := map[string]Protocol{
				"NBR-g": {Name: "NBR-g", State: tt.protocol},
				"EGR-g": {Name: "EGR-g", State: "up", Channels: channels(Channel{Imported: 1}, Channel{})},
			}
			// A BFD session whose address ends with the gateway's address must not match.
			bfd := map[netip.Addr]string{netip.MustParseAddr("110.0.0.1"): "Up"}
			if tt.bfd != "" {
				bfd[g.Address] = tt.bfd
			}
			got := v.states(now, protocols, bfd, tt.lease, State{})[0]
			if got.Up != tt.up || got.Held != tt.held || got.Usable != tt.usable || got.State != tt.state ||
				got.Protocol != trench.Static || got.Warning != "" {
				t.Errorf("got %+v", got)
			}
			if exported := exports([]GatewayState{got}, [len(vip.Families)]int{7, 7}); exported != !(tt.up && tt.held) {
				t.Errorf("withdrawal is confirmed: %v", exported)
			}
		})
	}
}

func TestBFDIsMatchedByWholeAddress(t *testing.T) {
	got := parseBFD(replyOf(t, "1020-NBR-BFD:\n"+
		" IP address                Interface  State      Since         Interval  Timeout\n"+
		" 110.0.0.1                 ext-vlan   Up         05:27:00.000    0.100    0.300\n0000 \n"))
	if state, ok := got[netip.MustParseAddr("10.0.0.1")]; ok || len(got) != 1 {
		t.Errorf("10.0.0.1 has state %q of %v", state, got)
	}
}

func TestDroppedBFDPacketIsNoError(t *testing.T) {
	e := parseEvent("bird: 2026-11-22 17:44:10.190 [0002] <ERR> NBR-BFD: Socket error: Operation not permitted")
	if e.isError() || e.level(false) != slog.LevelDebug {
		t.Errorf("level %v of %+v", e.level(false), e)
	}
	e = parseEvent("2026-11-22 17:44:10.190 <ERR> NBR-BFD: Socket error: Network is down")
	if !e.isError() || e.level(false) != slog.LevelError {
		t.Errorf("level %v of %+v", e.level(false), e)
	}
}
