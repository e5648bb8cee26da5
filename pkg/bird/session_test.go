package bird_test

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

func TestRouterIDOfIPv6OnlyHost(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv6)
	gw := l.Router(routerConfig{})
	p := newPod(t, l.Dev, func(o *bird.Options) { o.RouterID = netip.Addr{} })
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4), gatewayOf(vip.IPv6)}, []vip.VIP{vip4, vip6})
	p.Start()
	s := p.await("IPv6 session", up("gateway-ipv6"))
	if s.Gateways[0].Up || s.Gateways[0].Problem == "" {
		t.Errorf("the IPv4 gateway has no address to speak from: %+v", s.Gateways[0])
	}
	p.Announce(announce.Announced, vip6)
	await.True(t, "VIP at the gateway", func() bool { return gw.Has(vip6) })
	l.Address(vip.IPv4)
	p.await("IPv4 session once there is an address", up("gateway-ipv4", "gateway-ipv6"))
}

var deviceOf = regexp.MustCompile(`%[a-z0-9]+`)

func TestNoWildcardListener(t *testing.T) {
	bothUp(t, routerConfig{})
	allowed := map[string]bool{"127.0.0.1:1790": true, "169.254.100.1:10179": true, "[fd00:100::1]:10179": true}
	out := run(t, "ss", "-Hltn")
	lines := bufio.NewScanner(strings.NewReader(out))
	seen := 0
	for lines.Scan() {
		if f := strings.Fields(lines.Text()); len(f) > 3 {
			seen++
			// "ss" names the device that BIRD bound the socket to.
			if address := deviceOf.ReplaceAllString(f[3], ""); !allowed[address] {
				t.Errorf("listener on %s", f[3])
			}
		}
	}
	if seen != len(allowed) {
		t.Errorf("%d listeners, want %d:\n%s", seen, len(allowed), out)
	}
}

// BIRD disables a protocol whose port another process uses; the supervisor enables it again.
func TestPortTakenAtStart(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4)
	gw := l.Router(routerConfig{})
	for _, address := range []string{"127.0.0.1:1790", "169.254.100.1:10179"} {
		taken, err := net.Listen("tcp", address)
		harness.Must(t, err)
		defer taken.Close()
		p := newPod(t, l.Dev)
		p.Configure([]trench.Gateway{gatewayOf(vip.IPv4)}, []vip.VIP{vip4})
		p.Start()
		await.True(t, "retry", func() bool {
			return strings.Contains(p.Log.String(), "BIRD could not open a listening socket, retrying")
		})
		harness.Must(t, taken.Close())
		p.await("session", up("gateway-ipv4"))
		p.Announce(announce.Announced, vip4)
		await.True(t, "VIP at the gateway", func() bool { return gw.Has(vip4) })
		p.Stop()
		await.True(t, "withdrawal", func() bool { return !gw.Has(vip4) })
	}
}

func TestPasswordFileAppears(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4, vip.IPv6)
	l.Router(routerConfig{Password: "s3cret #;'{}"})
	p := newPod(t, l.Dev)
	file := filepath.Join(p.Options.Dir, "key")
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4, func(g *trench.Gateway) { g.PasswordFile = file })}, []vip.VIP{vip4})
	p.Start()
	s := p.await("problem",
		func(s bird.State) bool { return s.Alive && len(s.Gateways) == 1 && s.Gateways[0].Problem != "" })
	if !strings.Contains(s.Gateways[0].Problem, file) {
		t.Errorf("problem %q does not name the file", s.Gateways[0].Problem)
	}
	for bad, why := range map[string]string{"": "empty", "a\"b\n": "quote"} {
		harness.Must(t, os.WriteFile(file, []byte(bad), 0o600))
		s := p.await("the reason", func(s bird.State) bool { return strings.Contains(s.Gateways[0].Problem, why) })
		if s.Gateways[0].Up {
			t.Fatalf("password %q was taken", bad)
		}
	}
	harness.Must(t, os.WriteFile(file, []byte("s3cret #;'{}\n"), 0o600))
	p.await("signed session up", up("gateway-ipv4"))
	if strings.Contains(p.Log.String(), "s3cret") || strings.Contains(p.Log.String(), loopbackPassword) {
		t.Error("a secret is in the log")
	}
	info, err := os.Stat(filepath.Join(p.Options.Dir, "vipgate.conf"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the configuration: %v, %v", info, err)
	}
}

// A changed password affects only its session.
func TestPasswordChangeLeavesOtherSessions(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4, vip.IPv6)
	l.Router(routerConfig{Password: "s3cret"})
	p := newPod(t, l.Dev)
	var gateways []trench.Gateway
	files := map[vip.Family]string{}
	write := func(f vip.Family, password string) {
		harness.Must(t, os.WriteFile(files[f], []byte(password), 0o600))
	}
	for _, f := range vip.Families {
		files[f] = filepath.Join(p.Options.Dir, "key-"+f.String())
		write(f, "s3cret")
		gateways = append(gateways, gatewayOf(f, func(g *trench.Gateway) { g.PasswordFile = files[f] }))
	}
	p.Configure(gateways, []vip.VIP{vip4, vip6})
	p.Start()
	p.await("both sessions up", func(s bird.State) bool { return up("gateway-ipv4")(s) && up("gateway-ipv6")(s) })
	since := p.Gateway("gateway-ipv6").Since
	write(vip.IPv4, "another")
	p.await("the session with the other password down", func(s bird.State) bool { return !up("gateway-ipv4")(s) })
	write(vip.IPv4, "s3cret")
	p.await("it is up again", up("gateway-ipv4"))
	if g := p.Gateway("gateway-ipv6"); !g.Up || !g.Since.Equal(since) {
		t.Errorf("the other session was restarted: up %v, since %v, before %v", g.Up, g.Since, since)
	}
}

func TestBFDEndsSessionBeforeTCP(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4, vip.IPv6)
	gw := l.Router(routerConfig{BFD: true})
	p := newPod(t, l.Dev)
	bfd := &trench.BFD{MinTx: 50 * time.Millisecond, MinRx: 50 * time.Millisecond, Multiplier: 3}
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4, func(g *trench.Gateway) { g.BFD, g.HoldTime = bfd, 90*time.Second })},
		[]vip.VIP{vip4})
	p.Start()
	p.await("session and BFD up", func(s bird.State) bool { return up("gateway-ipv4")(s) && s.Gateways[0].BFD == "Up" })
	begin := time.Now()
	kill(t, routerPID(t, gw), syscall.SIGSTOP)
	s := p.await("session lost", down("gateway-ipv4"))
	t.Logf("lost after %s: %+v", time.Since(begin), s.Gateways[0])
	kill(t, routerPID(t, gw), syscall.SIGCONT)
	p.await("session back", up("gateway-ipv4"))
}

func TestHoldTimeEndsSilentSession(t *testing.T) {
	p, gw, _ := bothUp(t, routerConfig{})
	begin := time.Now()
	kill(t, routerPID(t, gw), syscall.SIGSTOP)
	p.await("session lost", down("gateway-ipv4"))
	t.Logf("lost after %s", time.Since(begin))
	kill(t, routerPID(t, gw), syscall.SIGCONT)
	p.await("sessions back", up("gateway-ipv4", "gateway-ipv6"))
}

// RFC 4271 section 4.2 lets a gateway offer 0, so that the session never expires.
func TestGatewayWithoutHoldTimeIsRefused(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4, vip.IPv6)
	gw := l.Router(routerConfig{NoHold: true})
	p := newPod(t, l.Dev)
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4)}, []vip.VIP{vip4})
	p.Start()
	p.await("the reason", func(s bird.State) bool {
		return len(s.Gateways) == 1 && !s.Gateways[0].Up && strings.Contains(s.Gateways[0].LastError, "hold time")
	})
	if log := p.Log.String(); strings.Contains(log, "gateway session up") ||
		strings.Count(log, "gateway session failed") != 1 {
		t.Error("the session came up, or its failure is not once in the log")
	}
	gw.Reconfigure(routerConfig{})
	p.await("the session with a hold time", up("gateway-ipv4"))
}

// routerPID returns the PID of BIRD: `ip netns exec` replaces itself by the command.
func routerPID(t *testing.T, r *router) int {
	t.Helper()
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", r.cmd.Process.Pid))
	if err != nil || exe != systemBIRD {
		t.Fatalf("the router is %q: %v", exe, err)
	}
	return r.cmd.Process.Pid
}
