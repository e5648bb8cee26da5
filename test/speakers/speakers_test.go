// Package speakers tests the views of BGP speakers, and the configurations that speakerconfig
// renders, with the daemons.
package speakers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/speaker"
	"github.com/vipgate/vipgate/pkg/speaker/birdview"
	"github.com/vipgate/vipgate/pkg/speaker/bmp"
	"github.com/vipgate/vipgate/pkg/speaker/gobgpview"
	"github.com/vipgate/vipgate/pkg/speakerconfig"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// announcerCommand makes this program an announcer, which a test can kill.
const announcerCommand = "announce"

// withPolicy makes the announcer send MED 50 and two prepends.
const withPolicy = "policy"

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == announcerCommand {
		if err := announcer(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// The speakers wait for announcers at an address of the pod's loopback interface. GoBGP takes no
// next hop of 127.0.0.0/8.
var (
	address = netip.MustParseAddrPort("10.77.0.1:10179")
	local   = netip.MustParseAddr("10.77.0.2")
)

// announcer announces VIPs until it is killed.
func announcer(vips []string) error {
	a := announce.New(announce.Options{Local: local, Peer: address, PeerAS: lab.PodAS, Log: slog.Default()})
	batch, route := announce.Batch{Revision: 1}, announce.Route{Advertisement: announce.Announced}
	if vips[0] == withPolicy {
		vips, route.Prepend, route.Attributes = vips[1:], 2, announce.Metrics{MED: 50}.Attributes(nil, nil)
	}
	for _, text := range vips {
		batch.Changes = append(batch.Changes,
			announce.Change{VIP: vip.Require(text), Route: route})
	}
	a.Post(batch)
	go func() {
		for now := range time.Tick(announce.MaxHeartbeatAge / 4) {
			a.Heartbeat(now)
		}
	}()
	return a.Run(context.Background())
}

// fixture is a lab with a speaker in the pod, and a receiver that plays the gateway.
type fixture struct {
	t *testing.T
	*lab.Lab
	gateway *lab.Receiver
	view    speaker.View
	start   func() *lab.Process // the speaker
	daemon  *lab.Process
	station *bmp.Station
}

const timeout = 20 * time.Second

// trenchFile has the VIPs of the tests.
func trenchFile(vips []string) string {
	return fmt.Sprintf("trench: trench-a\nattractor:\n  name: attractor-a\n  vips: [\"%s\"]\n  gateways:\n"+
		"    - {name: a4, address: %s, connectRetryTime: 1s}\n    - {name: a6, address: %q, connectRetryTime: 1s}\n",
		strings.Join(vips, `", "`), lab.GatewayA4, lab.GatewayA6)
}

// numbered returns IPv4 VIPs, and one of IPv6.
func numbered(count int) []string {
	vips := []string{"2000::1/128"}
	for i := range count {
		vips = append(vips, fmt.Sprintf("20.0.%d.%d/32", i>>8, i&0xff))
	}
	return vips
}

// newLab creates a lab with a receiver and a BMP station.
func newLab(t *testing.T) *fixture {
	t.Helper()
	l, err := lab.New()
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, l.Close()) })
	f := &fixture{t: t, Lab: l}
	harness.Must(t, l.Pod.Addr("lo", "10.77.0.1/30", "10.77.0.2/30"))
	f.gateway, err = lab.StartReceiver(l.Gateway, lab.ReceiverConfig{Local: []netip.Addr{lab.GatewayA4, lab.GatewayA6}})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, f.gateway.Close()) })
	f.station = bmp.New("127.0.0.1:1790", slog.New(slog.DiscardHandler))
	stop := l.Pod.Background(t, f.station.Run)
	t.Cleanup(stop)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("== speaker\n%s", f.daemon.Tail(60))
		}
	})
	return f
}

// newFixture starts a speaker. A kind is "gobgp" or a path of BIRD. edit changes the configuration;
// nil keeps it.
func newFixture(t *testing.T, kind string, vips []string, edit func(string) string) *fixture {
	t.Helper()
	f := newLab(t)
	l := f.Lab
	config, err := trenchfile.Parse("trench.yaml", []byte(trenchFile(vips)), trench.DefaultDefaults())
	harness.Must(t, err)
	side := speakerconfig.Speaker{
		Address: address, AS: lab.PodAS, Frontend: local, FrontendAS: announce.LocalAS, RouterID: lab.PodExternal4,
		BMP: netip.MustParseAddrPort("127.0.0.1:1790"), Gateways: config.Attractor.Gateways,
		Prepends: strings.HasPrefix(t.Name(), "TestPolicy"),
	}
	for _, v := range config.Attractor.VIPs {
		side.VIPs = append(side.VIPs, v.Prefix())
	}
	path, socket := filepath.Join(l.Dir, "speaker.conf"), filepath.Join(l.Dir, "speaker.sock")
	program, name := []string{"gobgpd", "-f", path, "--api-hosts", "unix://" + socket, "--pprof-disable"}, "gobgp"
	if kind != "gobgp" {
		program, name = []string{kind, "-f", "-c", path, "-s", socket}, "bird"
		f.view = birdview.New(socket)
	} else {
		view, err := gobgpview.New("unix://" + socket)
		harness.Must(t, err)
		t.Cleanup(func() { harness.Must(t, view.Close()) })
		f.view = view
	}
	text, err := side.Text(name)
	harness.Must(t, err)
	if edit != nil {
		text = edit(text)
	}
	if name == "bird" {
		text = "log stderr all;\n" + text
	}
	harness.Must(t, os.WriteFile(path, []byte(text), 0o600))
	f.start = func() *lab.Process {
		t.Helper()
		_ = os.Remove(socket) // a killed daemon leaves it
		p, err := l.Start(l.Pod, name, program...)
		harness.Must(t, err)
		f.daemon = p
		return p
	}
	f.start()
	return f
}

// announce starts an announcer.
func (f *fixture) announce(vips []string) *lab.Process {
	f.t.Helper()
	p, err := f.Start(f.Pod, "announcer", append([]string{os.Args[0], announcerCommand}, vips...)...)
	harness.Must(f.t, err)
	return p
}

func (f *fixture) eventually(condition func() error) {
	f.t.Helper()
	harness.Must(f.t, lab.Eventually(harness.Context(f.t, timeout), 5*time.Millisecond, condition))
}

// wantVIPs waits until the gateway has exactly these VIPs, with the speaker's AS as the only one.
func (f *fixture) wantVIPs(vips ...string) {
	f.t.Helper()
	want := slices.Sorted(slices.Values(vips))
	f.eventually(func() error {
		var got []string
		for prefix, attributes := range f.gateway.Table() {
			if !slices.Equal(attributes.ASPath, []uint32{lab.PodAS}) {
				f.t.Fatalf("%s has the path %v", prefix, attributes.ASPath)
			}
			got = append(got, prefix.String())
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			return fmt.Errorf("the gateway has %v, want %v", got, want)
		}
		return nil
	})
}

// wantSession waits until a view has a session with the gateway in a state. exported is -1 if
// unknown.
func (f *fixture) wantSession(view speaker.View, peer netip.Addr, up bool, exported int) speaker.Session {
	f.t.Helper()
	var found speaker.Session
	f.eventually(func() error {
		_, list, err := view.Sessions(f.t.Context())
		if err != nil {
			return err
		}
		i := slices.IndexFunc(list, func(s speaker.Session) bool { return s.Peer == peer && s.Family == vip.FamilyOf(peer) })
		if i < 0 || list[i].Up != up || list[i].Exported != exported {
			return fmt.Errorf("sessions %+v, want %s up %t with %d routes", list, peer, up, exported)
		}
		found = list[i]
		return nil
	})
	return found
}

// wantDown waits until a view has no session with the gateway that is up.
func (f *fixture) wantDown(view speaker.View, peer netip.Addr) {
	f.t.Helper()
	f.eventually(func() error {
		_, list, err := view.Sessions(f.t.Context())
		if err != nil || slices.ContainsFunc(list, func(s speaker.Session) bool { return s.Peer == peer && s.Up }) {
			return fmt.Errorf("sessions %+v: %w", list, err)
		}
		return nil
	})
}

// wantExported waits until the daemon confirms that it sends these VIPs to a gateway.
func (f *fixture) wantExported(peer netip.Addr, vips ...string) {
	f.t.Helper()
	f.eventually(func() error {
		set, err := f.view.Exported(f.t.Context(), peer, vip.FamilyOf(peer))
		if got := vip.Texts(set.Sorted()); err != nil || !slices.Equal(got, vips) {
			return fmt.Errorf("%s gets %v, want %v: %w", peer, got, vips, err)
		}
		return nil
	})
}

// kinds are the speakers of this machine.
func kinds(t *testing.T, each func(t *testing.T, kind string)) {
	t.Helper()
	t.Parallel()
	for _, version := range append(lab.BIRDs(), "GoBGP") {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			kind := "gobgp"
			if version == "GoBGP" {
				if lacks := lab.MissingForGoBGP(); lacks != "" {
					lab.Skip(t, lacks)
				}
			} else {
				var err error
				if kind, err = lab.BIRDOf(version); err != nil || kind == "" {
					lab.Skip(t, "BIRD "+version+" (test/setup/birds.sh)")
				}
			}
			each(t, kind)
		})
	}
}

// The announcer's VIPs and no other prefix reach the gateway, the daemon confirms them, and the
// view follows sessions, the announcer's death and the daemon's.
func TestViewsFollowDaemons(t *testing.T) {
	kinds(t, func(t *testing.T, kind string) {
		f := newFixture(t, kind, numbered(2), nil)
		announced := append(numbered(2), "30.0.0.1/32") // of no trench
		process := f.announce(announced)
		f.wantVIPs(numbered(2)...)
		f.wantSession(f.view, lab.GatewayA4, true, 2)
		f.wantSession(f.view, lab.GatewayA6, true, 1)
		f.wantExported(lab.GatewayA4, "20.0.0.0/32", "20.0.0.1/32")
		f.wantExported(lab.GatewayA6, "2000::1/128")
		if kind == "gobgp" {
			f.wantSession(f.station, lab.GatewayA4, true, -1)
		}

		harness.Must(t, process.Signal(syscall.SIGKILL))
		f.wantVIPs()
		f.wantExported(lab.GatewayA4)
		f.announce(announced)
		f.wantVIPs(numbered(2)...)

		harness.Must(t, f.gateway.Refuse())
		f.gateway.Reset()
		f.wantSession(f.view, lab.GatewayA4, false, 0)
		if kind == "gobgp" {
			if session := f.wantSession(f.station, lab.GatewayA4, false, -1); session.LastError == "" {
				t.Error("BMP has no reason")
			}
		}
		f.wantExported(lab.GatewayA4)
		harness.Must(t, f.gateway.Listen())
		f.wantVIPs(numbered(2)...)

		harness.Must(t, f.daemon.Kill())
		f.eventually(func() error {
			if _, _, err := f.view.Sessions(t.Context()); err == nil {
				return fmt.Errorf("the view of a dead daemon has no error")
			}
			return nil
		})
		f.wantVIPs()
		f.start()
		f.wantVIPs(numbered(2)...)
		f.wantSession(f.view, lab.GatewayA4, true, 2)
	})
}

// MED and prepends of a policy reach the gateway through BIRD, and prepends through GoBGP.
func TestPolicyReachesGateway(t *testing.T) {
	kinds(t, func(t *testing.T, kind string) {
		f := newFixture(t, kind, numbered(2), nil)
		f.announce(append([]string{withPolicy}, numbered(2)...))
		med, path := uint32(50), []uint32{lab.PodAS, lab.PodAS, lab.PodAS}
		if kind == "gobgp" {
			med, path = 0, append(path, lab.PodAS)
		}
		f.eventually(func() error {
			table := f.gateway.Table()
			for prefix, attributes := range table {
				if !slices.Equal(attributes.ASPath, path) || attributes.MED != med {
					return fmt.Errorf("%s has %+v", prefix, attributes)
				}
			}
			if len(table) != 3 {
				return fmt.Errorf("%d routes", len(table))
			}
			return nil
		})
	})
}

// FRR without `bmp monitor` sends its sessions, and nothing about routes.
func TestBMPFollowsFRR(t *testing.T) {
	t.Parallel()
	if lacks := lab.MissingForFRR(); lacks != "" {
		lab.Skip(t, lacks)
	}
	f := newLab(t)
	path := filepath.Join(f.Dir, "bgpd.conf")
	harness.Must(t, os.WriteFile(path, fmt.Appendf(nil, `log stdout
router bgp %[1]d
 bgp router-id %[2]s
 no bgp ebgp-requires-policy
 neighbor %[3]s remote-as %[4]d
 neighbor %[3]s port %[5]d
 neighbor %[3]s timers 1 3
 neighbor %[3]s timers connect 1
 bmp targets vipgate
  bmp connect 127.0.0.1 port 1790 min-retry 100 max-retry 1000
 exit
exit
`, lab.PodAS, lab.PodExternal4, lab.GatewayA4, lab.GatewayAS, lab.BGPPort), 0o600))
	start := func() {
		t.Helper()
		var err error
		f.daemon, err = f.Start(f.Pod, "bgpd", "/usr/lib/frr/bgpd", "-f", path, "-i", f.Dir+"/bgpd.pid",
			"--vty_socket", f.Dir, "-n", "-Z", "-S", "-M", "bmp", "-p", "0", "-P", "0")
		harness.Must(t, err)
	}
	start()
	f.wantSession(f.station, lab.GatewayA4, true, -1)
	if version, _, _ := f.station.Sessions(t.Context()); !strings.HasPrefix(version, "FRRouting ") {
		t.Errorf("version %q", version)
	}
	if _, err := f.station.Exported(t.Context(), lab.GatewayA4, vip.IPv4); !errors.Is(err, speaker.ErrUnknown) {
		t.Errorf("exported: %v", err)
	}
	harness.Must(t, f.gateway.Refuse())
	f.gateway.Reset()
	f.wantDown(f.station, lab.GatewayA4)
	harness.Must(t, f.gateway.Listen())
	f.wantSession(f.station, lab.GatewayA4, true, -1)
	harness.Must(t, f.daemon.Kill())
	f.eventually(func() error {
		if _, _, err := f.station.Sessions(t.Context()); err == nil {
			return errors.New("the view of a dead daemon has no error")
		}
		return nil
	})
	start()
	f.wantSession(f.station, lab.GatewayA4, true, -1)
}

// A VIP that the speaker's export filter drops is not confirmed.
func TestFilteredVIPIsNotConfirmed(t *testing.T) {
	kinds(t, func(t *testing.T, kind string) {
		f := newFixture(t, kind, numbered(2), func(text string) string {
			if kind == "gobgp" {
				const policy = "# Gateways get VIPs only.\n[[policy-definitions]]\n  name = \"vipgate-out\"\n"
				return strings.Replace(text, policy, `[[defined-sets.prefix-sets]]
  prefix-set-name = "dropped"
  [[defined-sets.prefix-sets.prefix-list]]
    ip-prefix = "20.0.0.0/32"
`+policy+`  [[policy-definitions.statements]]
    [policy-definitions.statements.conditions.match-prefix-set]
      prefix-set = "dropped"
    [policy-definitions.statements.actions]
      route-disposition = "reject-route"
`, 1)
			}
			return strings.ReplaceAll(text, "export filter {\n", "export filter {\nif net = 20.0.0.0/32 then reject;\n")
		})
		f.announce(numbered(2))
		f.wantVIPs("20.0.0.1/32", "2000::1/128")
		f.wantSession(f.view, lab.GatewayA4, true, 1)
		f.wantExported(lab.GatewayA4, "20.0.0.1/32")
	})
}
