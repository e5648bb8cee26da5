package frontendcmd

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/bird/path"
	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/speaker"
	"github.com/vipgate/vipgate/pkg/speaker/birdview"
	"github.com/vipgate/vipgate/pkg/speaker/bmp"
	"github.com/vipgate/vipgate/pkg/speaker/frrk8s"
	"github.com/vipgate/vipgate/pkg/speaker/gobgpview"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// SpeakerFlags select the BGP speaker that exports VIPs to the gateways.
type SpeakerFlags struct {
	Speaker             string       `help:"bird: run BIRD; external: announce VIPs to a BGP speaker that another program runs and configures." enum:"bird,external" default:"bird" group:"External speaker"`
	SpeakerAddress      string       `help:"The speaker's address, with a port unless that is 179 or --speaker-listen is set." placeholder:"ADDR[:PORT]" group:"External speaker"`
	SpeakerLocal        netip.Addr   `help:"The frontend's address in the session with the speaker, and the next hop of VIPs of its family. When absent that of the external interface, and its IPv6 address the next hop of IPv6 VIPs." placeholder:"ADDR" group:"External speaker"`
	SpeakerListen       uint16       `help:"Port of --speaker-local on which the frontend accepts the speaker's connection, instead of connecting, as frr-k8s needs it." placeholder:"PORT" group:"External speaker"`
	SpeakerAS           uint32       `name:"speaker-as" help:"The speaker's AS number." placeholder:"ASN" group:"External speaker"`
	SpeakerLocalAS      uint32       `name:"speaker-local-as" help:"The frontend's AS number; the speaker's when absent, for iBGP." placeholder:"ASN" group:"External speaker"`
	SpeakerNextHop      []netip.Addr `help:"Next hop of the VIPs of its family, that the speaker can resolve; repeatable." placeholder:"ADDR" group:"External speaker"`
	SpeakerPasswordFile string       `help:"File with the TCP-MD5 password of this session, or none. When absent /etc/vipgate/speaker-password, if it exists." placeholder:"FILE|none" group:"External speaker"`
	GatewayState        string       `help:"Source of the state of gateway sessions: frr, bgpd's socket; frr-k8s, its BGPSessionStates, which kube writes beside the trench file; bird, its control socket; gobgp, its gRPC API; bmp, BMP from the speaker; none, every gateway counts as up." enum:"frr,frr-k8s,bird,gobgp,bmp,none" default:"frr" group:"External speaker"`
	SpeakerSocket       string       `help:"Socket or file of --gateway-state, the address of GoBGP's API, or the address that receives BMP; its kind's usual one when absent." placeholder:"SOCKET|ADDR:PORT" group:"External speaker"`
	SourceRouting       string       `help:"on: replies from VIPs take the gateways' routes; off: another program routes them. auto: on with --speaker=bird." enum:"auto,on,off" default:"auto" group:"Kernel"`

	given []string // flags of one kind of speaker that the user set
}

// Flags that only one kind of speaker has.
var (
	externalFlags = []string{
		"speaker-address", "speaker-local", "speaker-listen", "speaker-as", "speaker-local-as", "speaker-next-hop",
		"speaker-password-file", "gateway-state", "speaker-socket",
	}
	birdFlags = []string{
		"bird-socket", "bird-executable", "lb-bgp-port", "lb-bgp-hold-time", "import-routes", "import-limit", "ecmp",
		"static-vips",
	}
)

// DefaultBMP is the address that receives BMP; IANA assigned the port.
const DefaultBMP = "127.0.0.1:11019"

// sockets are the usual sockets and addresses of kinds of --gateway-state.
var sockets = map[string]string{
	"frr": speaker.DefaultFRR, "bird": birdview.DefaultSocket, "gobgp": gobgpview.DefaultAddress, "bmp": DefaultBMP,
}

// Socket returns the socket or address of --gateway-state.
func (f *SpeakerFlags) Socket() string { return cmp.Or(f.SpeakerSocket, sockets[f.GatewayState]) }

// view opens the view of --gateway-state.
func (f *SpeakerFlags) view(log *slog.Logger) (speaker.View, error) {
	switch socket := f.Socket(); f.GatewayState {
	case "frr":
		return speaker.NewFRR(socket), nil
	case "frr-k8s":
		return frrk8s.NewView(socket), nil
	case "bird":
		return birdview.New(socket), nil
	case "gobgp":
		if strings.HasPrefix(socket, "/") {
			socket = "unix://" + socket
		}
		return gobgpview.New(socket)
	case "bmp":
		station := bmp.New(socket, log)
		// The user of a speaker that does not listen is unknown.
		if f.SpeakerListen == 0 {
			station.Speaker, _ = f.Peer()
		}
		return station, nil
	default:
		return nil, nil
	}
}

// Complete adds what a session on an interface implies: the local address, and the next hop of IPv6
// VIPs over IPv4. An address that is missing is refused by CheckSpeaker.
func (f *SpeakerFlags) Complete(device, trenchFile string) {
	if f.GatewayState == "frr-k8s" {
		f.SpeakerSocket = cmp.Or(f.SpeakerSocket, trenchFile+frrk8s.Suffix)
	}
	peer, err := f.Peer()
	if !f.IsExternal() || f.SpeakerLocal.IsValid() || err != nil {
		return
	}
	f.SpeakerLocal, _ = path.Local(device, trench.Gateway{Address: peer.Addr()})
	if len(f.SpeakerNextHop) > 0 || !f.SpeakerLocal.Is4() {
		return
	}
	addresses, _ := path.Addresses(device)
	for _, address := range addresses {
		if address.Addr.Is6() && address.Addr.IsGlobalUnicast() && !address.Duplicate() {
			f.SpeakerNextHop = []netip.Addr{address.Addr}
			return
		}
	}
}

// Record records which flags of one kind of speaker the user set.
func (f *SpeakerFlags) Record(parsed *kong.Context) {
	for _, name := range append(externalFlags, birdFlags...) {
		if cli.Given(parsed, name) {
			f.given = append(f.given, name)
		}
	}
}

// IsExternal reports whether another program runs the speaker.
func (f *SpeakerFlags) IsExternal() bool { return f.Speaker == "external" }

// RoutesSource reports whether the frontend owns source routing.
func (f *SpeakerFlags) RoutesSource() bool {
	return f.SourceRouting == "on" || f.SourceRouting == "auto" && !f.IsExternal()
}

// CheckSpeaker refuses flags of the other kind of speaker, and incomplete ones.
func (f *SpeakerFlags) CheckSpeaker(r *cli.Refusals) {
	other, remedy := externalFlags, "add --speaker=external, or leave it out"
	if f.IsExternal() {
		other, remedy = birdFlags, "another program runs the speaker; leave it out, or use --speaker=bird"
	}
	for _, name := range f.given {
		for _, of := range other {
			r.If(name == of, "--%s has no effect with --speaker=%s: %s", name, f.Speaker, remedy)
		}
	}
	if !f.IsExternal() {
		r.If(f.SourceRouting == "off", "--source-routing=off needs --speaker=external: BIRD's routes are in a table of "+
			"their own, which only source routing uses")
		return
	}
	peer, err := f.Peer()
	r.If(err != nil, "--speaker-address=%s: %w: write the speaker's address, such as 10.0.0.1 or [fd00::1]:179",
		f.SpeakerAddress, err)
	r.If(!f.SpeakerLocal.IsValid(), "--speaker-local is required: an address of this host that the speaker "+
		"has as a neighbor; the external interface has none in the speaker's subnet")
	r.If(f.SpeakerLocal.IsLoopback() && f.GatewayState == "frr",
		"--speaker-local=%s: FRR has no route to it; use another address, see docs/speakers.md", f.SpeakerLocal)
	r.If(f.SpeakerAS == 0, "--speaker-as is required: the speaker's AS number")
	for i, hop := range f.SpeakerNextHop {
		for _, before := range f.SpeakerNextHop[:i] {
			r.If(hop.Is4() == before.Is4(),
				"--speaker-next-hop=%s: VIPs of its family have the next hop %s already; leave out one", hop, before)
		}
	}
	if err == nil && f.SpeakerLocal.IsValid() {
		r.If(peer.Addr().Is4() != f.SpeakerLocal.Is4(),
			"--speaker-address=%s and --speaker-local=%s are of different families: the session needs one",
			f.SpeakerAddress, f.SpeakerLocal)
	}
	r.If(f.HasPassword() && !filepath.IsAbs(f.PasswordFile()),
		"--speaker-password-file=%s: write an absolute path, or none", f.SpeakerPasswordFile)
}

// Peer returns the speaker's address and port.
func (f *SpeakerFlags) Peer() (netip.AddrPort, error) {
	if address, err := netip.ParseAddr(f.SpeakerAddress); err == nil {
		return netip.AddrPortFrom(address, 179), nil
	}
	return netip.ParseAddrPort(f.SpeakerAddress)
}

// LocalAS is the AS number of the frontend.
func (f *SpeakerFlags) LocalAS() uint32 { return cmp.Or(f.SpeakerLocalAS, f.SpeakerAS) }

const (
	maxPassword  = 80 // bytes of a TCP-MD5 key
	passwordFile = "/etc/vipgate/speaker-password"
)

// PasswordFile returns the file of the password of the session with the speaker.
func (f *SpeakerFlags) PasswordFile() string { return cmp.Or(f.SpeakerPasswordFile, passwordFile) }

// HasPassword reports whether the session with the speaker is to have a password.
func (f *SpeakerFlags) HasPassword() bool { return f.SpeakerPasswordFile != "none" }

// External returns the options of an external speaker, or nil for BIRD. routerID is the BGP
// identifier, if it is set.
func (f *SpeakerFlags) External(routerID netip.Addr, log *slog.Logger) (*frontend.ExternalSpeaker, error) {
	if !f.IsExternal() {
		return nil, nil
	}
	peer, err := f.Peer()
	if err != nil {
		return nil, err
	}
	session := announce.Options{
		Speaker: "the speaker", Local: f.SpeakerLocal, Peer: peer, PeerAS: f.SpeakerAS,
		LocalAS: f.LocalAS(), ID: routerID,
	}
	if f.SpeakerListen != 0 {
		session.Listen = netip.AddrPortFrom(f.SpeakerLocal, f.SpeakerListen)
	}
	if !session.ID.IsValid() && !f.SpeakerLocal.Is4() {
		session.ID = bird.RouterID()
	}
	for _, hop := range f.SpeakerNextHop {
		session.NextHops[vip.FamilyOf(hop)] = hop
	}
	session.Password, err = f.Password()
	switch {
	case !f.HasPassword(), f.SpeakerPasswordFile == "" && errors.Is(err, fs.ErrNotExist):
		log.Warn("any process with the address of the speaker, or of the frontend, can take the session: it has no "+
			"password; speaker-config creates one", "speaker", peer, "frontend", f.SpeakerLocal)
	case err != nil:
		return nil, err
	}
	view, err := f.view(log)
	return &frontend.ExternalSpeaker{Session: session, View: view}, err
}

// Password reads the password of the session with the speaker.
func (f *SpeakerFlags) Password() (string, error) {
	content, err := files.Read(f.PasswordFile(), maxPassword+2) // a line end
	if err != nil {
		return "", fmt.Errorf("--speaker-password-file: %w", err)
	}
	password := strings.TrimRight(string(content), "\r\n")
	if password == "" || len(password) > maxPassword {
		return "", fmt.Errorf("--speaker-password-file=%s: a password has 1 to %d bytes", f.PasswordFile(), maxPassword)
	}
	return password, nil
}
