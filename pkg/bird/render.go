package bird

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"text/template"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// The loopback session (design section 7). Both AS numbers are for private use
// (RFC 6996); no gateway may use ours.
const (
	LoopbackAS     = trench.LoopbackASN // of the announcer
	LoopbackPeerAS = 4200000001         // of BIRD; the path is emptied, so nobody sees it
	LoopbackName   = "LB"
	gatewayPrefix  = "NBR-"
	bfdName        = "NBR-BFD"
)

var (
	loopbackBIRD  = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	loopbackLocal = netip.AddrFrom4([4]byte{127, 0, 0, 2})
)

// Session is one gateway session as it goes into the configuration.
type Session struct {
	trench.Gateway
	Local    netip.Addr // our address on the external interface
	Password string     // validated by ParsePassword
}

// RenderInput is everything that the configuration is made of.
type RenderInput struct {
	RouterID     netip.Addr
	Interface    string
	LoopbackPort uint16
	// Password signs the loopback session; empty signs nothing.
	Password    string
	TableID     uint32
	ECMP        bool
	ScanTime    time.Duration
	LogFile     string // empty: none
	LogFileSize int
	Sessions    []Session
	// VIPs are refused from gateways: a reflected VIP must not win over ours.
	VIPs []vip.VIP
}

// maskedPassword stands for every secret in what people see.
const maskedPassword = "********"

// Masked returns the input without secrets.
func (in RenderInput) Masked() RenderInput {
	if in.Password != "" {
		in.Password = maskedPassword
	}
	sessions := make([]Session, len(in.Sessions))
	for i, s := range in.Sessions {
		if s.Password != "" {
			s.Password = maskedPassword
		}
		sessions[i] = s
	}
	in.Sessions = sessions
	return in
}

var configuration = template.Must(template.New("bird.conf").Funcs(template.FuncMap{
	"seconds": func(d time.Duration) int { return max(1, int(d/time.Second)) },
	"ms":      func(d time.Duration) int { return max(1, int(d/time.Millisecond)) },
}).Parse(`# Written by vipgate, and replaced by it: changes get lost.
log stderr all;
{{- if .LogFile}}
log "{{.LogFile}}" {{.LogFileSize}} "{{.LogFile}}.1" all;
{{- end}}
debug protocols { states };
router id {{.RouterID}};

# Bounds how long BIRD before 2.14 can sleep over scheduled work.
protocol device { scan time 1; }

# What the announcer says over loopback; it leaves with the session.
filter LB_IN_4 { if net = 0.0.0.0/0 then reject; bgp_path.empty; dest = RTD_BLACKHOLE; accept; }
filter LB_IN_6 { if net = ::/0 then reject; bgp_path.empty; dest = RTD_BLACKHOLE; accept; }

protocol bgp '{{.Names.Loopback}}' {
	local {{.Names.BIRD}} port {{.LoopbackPort}} as {{.Names.BIRDAS}};
	neighbor {{.Names.Announcer}} as {{.Names.AnnouncerAS}};
	multihop 1;
	passive;
	strict bind;
	graceful restart off;
	long lived graceful restart off;
	hold time 3;
	keepalive time 1;
	error wait time 1, 1;
{{- if .Password}}
	password "{{.Password}}";
{{- end}}
	ipv4 { preference 200; import limit 200000 action restart; import filter LB_IN_4; export none; };
	ipv6 { preference 200; import limit 200000 action restart; import filter LB_IN_6; export none; next hop address ::1; };
}

# From gateways: whatever they send, but no VIP.
filter NBR_IN_4 { {{if .VIP4}}if net ~ [ {{.VIP4}} ] then reject; {{end}}accept; }
filter NBR_IN_6 { {{if .VIP6}}if net ~ [ {{.VIP6}} ] then reject; {{end}}accept; }

# Gateways' routes are for VIP traffic only: they go to a table of their own.
filter KERNEL_OUT { if source = RTS_BGP && proto != "{{.Names.Loopback}}" then accept; reject; }
protocol kernel KERNEL4 {
	scan time {{seconds .ScanTime}};
	kernel table {{.TableID}};
{{- if .ECMP}}
	merge paths yes;
{{- end}}
	ipv4 { import none; export filter KERNEL_OUT; };
}
protocol kernel KERNEL6 {
	scan time {{seconds .ScanTime}};
	kernel table {{.TableID}};
{{- if .ECMP}}
	merge paths yes;
{{- end}}
	ipv6 { import none; export filter KERNEL_OUT; };
}
{{- if .BFD}}

protocol bfd '{{.Names.BFD}}' {
	strict bind;
	accept direct;
	interface "{{.Interface}}" { };
}
{{- end}}
{{- range .Sessions}}

protocol bgp 'NBR-{{.Name}}' {
	interface "{{$.Interface}}";
	local {{.Local}} port {{.LocalPort}} as {{.LocalASN}};
	neighbor {{.Address}} port {{.RemotePort}} as {{.RemoteASN}};
	direct;
	strict bind;
	graceful restart off;
	long lived graceful restart off;
	hold time {{seconds .HoldTime}};
	# RFC 4271 lets a gateway offer 0: a session that never expires.
	min hold time 3;
	connect delay time 1;
	connect retry time 5;
	# BIRD counts it from the return of a lost link and then refuses the gateway's
	# connections as well: it must not grow with each loss.
	error wait time 1, 1;
{{- if .BFD}}
	bfd { min tx interval {{ms .BFD.MinTx}} ms; min rx interval {{ms .BFD.MinRx}} ms; multiplier {{.BFD.Multiplier}}; };
{{- end}}
{{- if .Password}}
	password "{{.Password}}";
{{- end}}
	{{if .Address.Is4}}ipv4{{else}}ipv6{{end}} {
		import filter {{if .Address.Is4}}NBR_IN_4{{else}}NBR_IN_6{{end}};
		next hop self;
		export filter {
			if proto != "{{$.Names.Loopback}}" then reject;
			# GRACEFUL_SHUTDOWN (RFC 8326), which many gateways ignore: make the path worse as well.
			if (65535,0) ~ bgp_community then {
{{- if eq .LocalASN .RemoteASN}}
				bgp_local_pref = 0;
{{- else}}
				bgp_path.prepend({{.LocalASN}});
				bgp_path.prepend({{.LocalASN}});
				bgp_path.prepend({{.LocalASN}});
{{- end}}
			}
			accept;
		};
	};
}
{{- end}}
`))

// names are the names and numbers that the template shares with the code.
type names struct {
	Loopback, BFD       string
	BIRD, Announcer     netip.Addr
	BIRDAS, AnnouncerAS uint32
}

// Render writes the configuration. It holds secrets unless in is masked. The
// same bytes work on BIRD 2.0.12 to 3.x.
func Render(in RenderInput) ([]byte, error) {
	for what, name := range map[string]string{"interface": in.Interface, "log file": in.LogFile} {
		if strings.ContainsFunc(name, unspeakable) {
			return nil, fmt.Errorf("BIRD's configuration: the name of the %s, %q, holds a quote, a wildcard or a control character", what, name)
		}
	}
	var set [len(vip.Families)][]string
	for _, v := range in.VIPs {
		// "+" takes more specific prefixes in; a covering one, such as a
		// default route, is what gateways are for.
		set[v.Family()] = append(set[v.Family()], v.String()+"+")
	}
	data := struct {
		RenderInput
		VIP4, VIP6 string
		BFD        bool
		Names      names
	}{
		RenderInput: in, VIP4: strings.Join(set[vip.IPv4], ", "), VIP6: strings.Join(set[vip.IPv6], ", "),
		Names: names{LoopbackName, bfdName, loopbackBIRD, loopbackLocal, LoopbackPeerAS, LoopbackAS},
	}
	for _, s := range in.Sessions {
		data.BFD = data.BFD || s.BFD != nil
	}
	var out bytes.Buffer
	if err := configuration.Execute(&out, data); err != nil {
		return nil, fmt.Errorf("BIRD's configuration: %w", err)
	}
	return out.Bytes(), nil
}

// unspeakable tells whether a character cannot stand in a name: BIRD 2.0.12 has no
// escapes in strings, and takes interfaces' names for patterns.
func unspeakable(c rune) bool { return c < ' ' || c == 0x7f || strings.ContainsRune(`"*?[\`, c) }
