package bird_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
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

// bothUp starts a pod with a gateway of each family and waits for the sessions.
func bothUp(t *testing.T, r routerConfig, change ...func(*trench.Gateway)) (*pod, *router, *link) {
	t.Helper()
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4, vip.IPv6)
	gw := l.Router(r)
	p := newPod(t, l.Dev)
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4, change...), gatewayOf(vip.IPv6, change...)}, []vip.VIP{vip4, vip6})
	p.Start()
	p.await("both sessions up", up("gateway-ipv4", "gateway-ipv6"))
	return p, gw, l
}

func TestGatewayReceivesAnnouncedVIPs(t *testing.T) {
	for _, tt := range []struct {
		name                   string
		as                     uint32
		path, depreferred, lp0 string
	}{
		{name: "eBGP", as: remoteAS, path: "8103", depreferred: "8103 8103 8103 8103", lp0: "100"},
		{name: "iBGP", as: localAS, path: "", depreferred: "", lp0: "0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, gw, _ := bothUp(t, routerConfig{AS: tt.as}, func(g *trench.Gateway) { g.RemoteASN = int64(tt.as) })
			for _, v := range []vip.VIP{vip4, vip6} {
				if gw.Has(v) {
					t.Fatalf("%s is advertised before it was announced", v)
				}
			}
			p.Announce(announce.Announced, vip4, vip6)
			for _, v := range []vip.VIP{vip4, vip6} {
				await.True(t, v.String()+" at the gateway", func() bool { return gw.Has(v) })
				if path := gw.Attribute(v, "as_path"); path != tt.path {
					t.Errorf("%s has path %q, want %q", v, path, tt.path)
				}
			}
			if nh := gw.Attribute(vip4, "next_hop"); nh != "169.254.100.1" {
				t.Errorf("next hop %q is not that of the pod", nh)
			}
			if nh := gw.Attribute(vip6, "next_hop"); !strings.HasPrefix(nh, "fd00:100::1") {
				t.Errorf("next hop %q is not that of the pod", nh)
			}
			p.Announce(announce.Depreferred, vip4, vip6)
			for _, v := range []vip.VIP{vip4, vip6} {
				await.True(t, v.String()+" de-preferred", func() bool { return gw.Attribute(v, "community") == "(65535,0)" })
				if path := gw.Attribute(v, "as_path"); path != tt.depreferred {
					t.Errorf("de-preferred %s has path %q, want %q", v, path, tt.depreferred)
				}
				// The gateway sets its default local preference on eBGP routes.
				if lp := gw.Attribute(v, "local_pref"); lp != tt.lp0 {
					t.Errorf("de-preferred %s has local preference %q, want %q", v, lp, tt.lp0)
				}
			}
			p.Announce(announce.Withdrawn, vip4, vip6)
			ctx := harness.Context(t, patience)
			harness.Must(t, p.Confirm(ctx))
			for _, v := range []vip.VIP{vip4, vip6} {
				await.True(t, v.String()+" gone", func() bool { return !gw.Has(v) })
			}
		})
	}
}

// BIRD exports gateways' default routes to the kernel table, with ImportAll also further routes
// up to the limit, and never VIPs.
func TestImports(t *testing.T) {
	const routes = "route 20.0.0.1/32 blackhole; route 20.0.0.0/24 blackhole; route 10.0.1.0/24 blackhole; " +
		"route 10.0.2.0/24 blackhole;"
	for _, tt := range []struct {
		name    string
		as      uint32
		change  func(*bird.Options)
		routes  int
		blocked bool
	}{
		{"default routes, eBGP", remoteAS, func(*bird.Options) {}, 1, false},
		{"default routes, iBGP", localAS, func(*bird.Options) {}, 1, false},
		{"all", remoteAS, func(o *bird.Options) { o.ImportAll = true }, 4, false},
		{"limit", remoteAS, func(o *bird.Options) { o.ImportAll, o.ImportLimit = true, 3 }, 3, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			run(t, "ip", "link", "set", "lo", "up")
			l := newLink(t, vip.IPv4, vip.IPv6)
			l.Router(routerConfig{AS: tt.as, Extra4: routes})
			p := newPod(t, l.Dev, tt.change)
			as := func(g *trench.Gateway) { g.RemoteASN = int64(tt.as) }
			p.Configure([]trench.Gateway{gatewayOf(vip.IPv4, as), gatewayOf(vip.IPv6, as)}, []vip.VIP{vip4, vip6})
			p.Start()
			p.await("the routes", func(s bird.State) bool {
				return len(s.Gateways) == 2 && s.Gateways[0].Imported == tt.routes && s.Gateways[1].Imported == 1 &&
					s.Gateways[0].ImportsBlocked == tt.blocked
			})
			table := func(f string) string {
				// The table does not exist before its first route.
				out, _ := exec.Command("ip", f, "route", "show", "table", strconv.Itoa(tableID)).CombinedOutput()
				return string(out)
			}
			await.True(t, "the routes in the kernel", func() bool {
				return strings.Count(table("-4"), " via 169.254.100.150") == tt.routes &&
					strings.Contains(table("-6"), "default via fd00:100::150")
			})
			if !tt.blocked && !strings.Contains(table("-4"), "default via") {
				t.Errorf("no default route:\n%s", table("-4"))
			}
			if warning := p.State().Load().Gateways[0].Warning; strings.Contains(warning, "--import-limit") != tt.blocked {
				t.Errorf("warning %q", warning)
			}
			p.Announce(announce.Announced, vip4, vip6)
			p.await("VIPs exported",
				func(s bird.State) bool { return s.Gateways[0].Exported == 1 && s.Gateways[1].Exported == 1 })
			if all := table("-4") + table("-6"); strings.Contains(all, "20.0.0.1 ") || strings.Contains(all, "2000::1") {
				t.Fatalf("a VIP is in the kernel:\n%s", all)
			}
		})
	}
}

func TestSessionRecoversAfterEachLoss(t *testing.T) {
	p, gw, _ := bothUp(t, routerConfig{})
	p.Announce(announce.Announced, vip4, vip6)
	for i := range 3 {
		await.True(t, "VIP at the gateway", func() bool { return gw.Has(vip4) })
		gw.Command(`restart "trench4"`)
		lost := time.Now()
		s := p.await("session lost", down("gateway-ipv4"))
		seen := time.Since(lost)
		if !s.Gateways[1].Up {
			t.Error("the IPv6 session went with it")
		}
		p.await("session back", up("gateway-ipv4", "gateway-ipv6"))
		t.Logf("loss %d: seen after %s, back after %s", i+1, seen, time.Since(lost))
	}
	p.await("all exported again", func(s bird.State) bool { return s.Gateways[0].Exported == 1 })
}

func TestEndedBIRDIsRestarted(t *testing.T) {
	for name, end := range map[string]func(*testing.T, *pod){
		"kill -9": func(t *testing.T, p *pod) { kill(t, p.State().Load().PID, syscall.SIGKILL) },
		"exit 0":  func(t *testing.T, p *pod) { _, _ = ask(p.Options.Socket, "down") },
	} {
		t.Run(name, func(t *testing.T) {
			p, gw, _ := bothUp(t, routerConfig{})
			p.Announce(announce.Announced, vip4, vip6)
			await.True(t, "VIP at the gateway", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
			pid := p.State().Load().PID
			end(t, p)
			s := p.await("BIRD gone", func(s bird.State) bool { return !s.Alive && s.PID == 0 })
			if s.Err == nil || s.Gateways[0].Up {
				t.Errorf("state of a dead BIRD: %+v", s)
			}
			s = p.await("BIRD back", up("gateway-ipv4", "gateway-ipv6"))
			if s.PID == pid || s.Restarts != 1 {
				t.Errorf("pid %d (was %d), %d restarts", s.PID, pid, s.Restarts)
			}
			await.True(t, "VIPs at the gateway again", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
		})
	}
}

func TestPausedBIRDIsKept(t *testing.T) {
	p, gw, _ := bothUp(t, routerConfig{})
	p.Announce(announce.Announced, vip4, vip6)
	await.True(t, "VIP at the gateway", func() bool { return gw.Has(vip4) })
	s := p.State().Load()
	kill(t, s.PID, syscall.SIGSTOP)
	holds(t, time.Second, "BIRD counts as alive, the VIP stays",
		func() bool { return p.State().Load().Alive && gw.Has(vip4) })
	kill(t, s.PID, syscall.SIGCONT)
	stopped := time.Now()
	now := p.await("BIRD answers", func(s bird.State) bool { return s.At.After(stopped) })
	if now.PID != s.PID || now.Restarts != 0 || !now.Gateways[0].Up {
		t.Fatalf("state after the stop: %+v", now)
	}
}

func TestHungBIRDIsReplaced(t *testing.T) {
	p, gw, _ := bothUp(t, routerConfig{})
	p.Announce(announce.Announced, vip4, vip6)
	await.True(t, "VIP at the gateway", func() bool { return gw.Has(vip4) })
	pid := p.State().Load().PID
	kill(t, pid, syscall.SIGSTOP)
	begin := time.Now()
	s := p.await("BIRD counts as hung", func(s bird.State) bool { return !s.Alive })
	t.Logf("hung after %s: %v", time.Since(begin), s.Err)
	p.await("another BIRD", func(s bird.State) bool { return s.PID != 0 && s.PID != pid })
	t.Logf("replaced after %s", time.Since(begin))
	p.await("sessions back", up("gateway-ipv4", "gateway-ipv6"))
	await.True(t, "VIPs at the gateway again", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
}

// frontendVariable makes the test binary run as a frontend until it is killed: a supervisor and
// an announcer of both VIPs. Its value contains the directory and the interface.
const frontendVariable = "VIPGATE_TEST_FRONTEND"

// TestFrontendToBeKilled is the body of the process that another test kills.
func TestFrontendToBeKilled(t *testing.T) {
	dir, dev, isFrontend := strings.Cut(os.Getenv(frontendVariable), " ")
	if !isFrontend {
		return
	}
	dev, static := strings.CutSuffix(dev, " static")
	p := newPod(t, dev, func(o *bird.Options) { o.Dir, o.Socket = dir, filepath.Join(dir, "bird.ctl") })
	gateways := []trench.Gateway{gatewayOf(vip.IPv4), gatewayOf(vip.IPv6)}
	if static {
		gateways = []trench.Gateway{staticGateway(vip.IPv4), staticGateway(vip.IPv6)}
	}
	p.Configure(gateways, []vip.VIP{vip4, vip6})
	p.Start()
	p.Attract(static, static)
	p.Announce(announce.Announced, vip4, vip6)
	<-t.Context().Done()
}

func TestOrphanWithdrawsAndIsTerminated(t *testing.T) {
	for name, forget := range map[string]bool{"pid file": false, "control socket only": true} {
		t.Run(name, func(t *testing.T) {
			run(t, "ip", "link", "set", "lo", "up")
			l := newLink(t, vip.IPv4, vip.IPv6)
			gw := l.Router(routerConfig{})
			p := newPod(t, l.Dev)
			frontend := exec.Command("/proc/self/exe", "-test.run", "^TestFrontendToBeKilled$")
			frontend.Env = append(os.Environ(), frontendVariable+"="+p.Options.Dir+" "+l.Dev)
			harness.Must(t, frontend.Start())
			ended := make(chan struct{})
			go func() { defer close(ended); _ = frontend.Wait() }()
			t.Cleanup(func() { _ = frontend.Process.Kill(); <-ended })
			await.True(t, "VIPs of the first frontend", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
			pid := servedBy(t, p.Options.Socket)

			second := newPod(t, l.Dev, func(o *bird.Options) { *o = p.Options })
			second.Configure(nil, nil)
			if err := second.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "in use by another frontend") {
				t.Fatalf("a second frontend on the same socket: %v", err)
			}

			kill(t, frontend.Process.Pid, syscall.SIGKILL)
			begin := time.Now()
			await.True(t, "BIRD withdraws", func() bool { return !gw.Has(vip4) && !gw.Has(vip6) })
			t.Logf("withdrawn after %s", time.Since(begin))
			if servedBy(t, p.Options.Socket) != pid {
				t.Fatal("BIRD went with the frontend: there is no orphan")
			}
			if forget {
				harness.Must(t, os.Remove(p.Options.Socket+".pid"))
			}
			// The kernel closes the files of a killed process one after another: its lock on the
			// control socket may outlive its connection to BIRD.
			<-ended
			p.Configure([]trench.Gateway{gatewayOf(vip.IPv4), gatewayOf(vip.IPv6)}, []vip.VIP{vip4, vip6})
			p.Start()
			p.await("sessions of the second frontend", up("gateway-ipv4", "gateway-ipv6"))
			if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil {
				t.Fatalf("the orphan still runs: %s", exe)
			}
			p.Announce(announce.Announced, vip4, vip6)
			await.True(t, "VIPs of the second frontend", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
		})
	}
}

func servedBy(t *testing.T, socket string) int {
	t.Helper()
	ctx := harness.Context(t, patience)
	c, err := bird.Dial(ctx, socket)
	harness.Must(t, err)
	defer c.Close()
	return c.PID
}

// An orphan has the same executable and the same control socket; one match is not sufficient.
func TestForeignProcessInPIDFileSurvives(t *testing.T) {
	for name, command := range map[string]func(p *pod) []string{
		"neither": func(*pod) []string { return []string{"sleep", "600"} },
		"our socket only": func(p *pod) []string {
			return []string{
				"sh", "-c", "read forever", "sh", "-s", p.Options.Socket,
				"-f",
			}
		},
		"our program only": func(p *pod) []string {
			return []string{birdExecutable, "-f", "-c", idleBIRD(t), "-s", p.Options.Socket + ".other"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, "ip", "link", "set", "lo", "up")
			l := newLink(t, vip.IPv4)
			p := newPod(t, l.Dev)
			args := command(p)
			other := exec.Command(args[0], args[1:]...)
			stdin, err := other.StdinPipe()
			harness.Must(t, err)
			harness.Must(t, other.Start())
			ended := make(chan struct{})
			go func() { defer close(ended); _ = other.Wait() }()
			t.Cleanup(func() { _ = other.Process.Kill(); _ = stdin.Close(); <-ended })
			harness.Must(t, os.WriteFile(p.Options.Socket+".pid", fmt.Appendf(nil, "%d\n", other.Process.Pid), 0o600))
			p.Configure(nil, nil)
			p.Start()
			p.await("BIRD alive", func(s bird.State) bool { return s.Alive })
			select {
			case <-ended:
				t.Fatal("a process that is not our BIRD was ended")
			default:
			}
		})
	}
}

// idleBIRD is a configuration with which BIRD does nothing.
func idleBIRD(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "bird.conf")
	harness.Must(t, os.WriteFile(path, []byte("router id 10.3.3.3; protocol device {}\n"), 0o600))
	return path
}

func TestReconfigurationLeavesOtherSessionsUp(t *testing.T) {
	p, gw, _ := bothUp(t, routerConfig{})
	p.Announce(announce.Announced, vip4, vip6)
	await.True(t, "VIP at the gateway", func() bool { return gw.Has(vip4) })
	before := p.State().Load()
	more := []vip.VIP{vip4, vip6, vip.Require("20.0.0.2/32"), vip.Require("20.1.0.0/24")}
	ghost := gatewayOf(vip.IPv4,
		func(g *trench.Gateway) { g.Name, g.Address = "ghost", netip.MustParseAddr("169.254.100.77") })
	steps := []struct {
		name     string
		gateways []trench.Gateway
		vips     []vip.VIP
	}{
		{"gateway and VIPs added", []trench.Gateway{gatewayOf(vip.IPv4), ghost, gatewayOf(vip.IPv6)}, more},
		{"gateway and VIPs removed", []trench.Gateway{gatewayOf(vip.IPv4)}, []vip.VIP{vip4}},
	}
	for i, step := range steps {
		p.Configure(step.gateways, step.vips)
		p.await(step.name, func(s bird.State) bool {
			return s.Configures == before.Configures+uint64(i)+1 && len(s.Gateways) == len(step.gateways)
		})
		after := p.await("session", up("gateway-ipv4"))
		if after.PID != before.PID || !after.Gateways[0].Since.Equal(before.Gateways[0].Since) {
			t.Fatalf("%s: session restarted: %+v", step.name, after)
		}
	}
	if !gw.Has(vip4) {
		t.Error("the VIP went away")
	}
	if log := p.Log.String(); strings.Contains(log, "State changed to down") &&
		strings.Contains(log, "protocol=NBR-gateway-ipv4 bird_level=TRACE msg=\"bird: State changed to down\"") {
		t.Error("the session went down meanwhile")
	}
}

// blockedHandler is a log handler that blocks on BIRD's lines until released.
type blockedHandler struct {
	slog.Handler
	released chan struct{}
	blocks   chan struct{} // closed by the first line that has to wait
	once     sync.Once
}

func (h *blockedHandler) Handle(_ context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, "bird: ") {
		h.once.Do(func() { close(h.blocks) })
		<-h.released
	}
	return nil
}

func (h *blockedHandler) Enabled(context.Context, slog.Level) bool { return true }

func TestBlockedLogDoesNotBlockBIRD(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4, vip.IPv6)
	l.Router(routerConfig{})
	h := &blockedHandler{Handler: slog.DiscardHandler, released: make(chan struct{}), blocks: make(chan struct{})}
	p := newPod(t, l.Dev, func(o *bird.Options) { o.Log = slog.New(h) })
	t.Cleanup(func() { close(h.released) }) // before the pod stops, which waits for its log
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4)}, []vip.VIP{vip4})
	p.Start()
	p.await("session up", up("gateway-ipv4"))
	<-h.blocks
	// Each writes about five lines of 70 bytes; a pipe holds 64 KiB.
	for i := range 700 {
		if _, err := ask(p.Options.Socket, `restart "LB"`); err != nil {
			t.Fatalf("BIRD does not answer after %d restarts of a session: %v", i, err)
		}
	}
	after := time.Now()
	if s := p.await("BIRD answers", func(s bird.State) bool { return s.At.After(after) }); s.Restarts != 0 ||
		!s.Gateways[0].Up {
		t.Fatalf("state: %+v", s)
	}
}

func TestConfirmWaitsForWithdrawals(t *testing.T) {
	p, gw, _ := bothUp(t, routerConfig{})
	confirm := func(patience time.Duration) error {
		ctx := harness.Context(t, patience)
		return p.Confirm(ctx)
	}
	p.Announce(announce.Announced, vip4, vip6)
	harness.Must(t, confirm(patience))
	p.Expect(0, 1)
	if err := confirm(200 * time.Millisecond); err == nil {
		t.Fatal("confirmed although a VIP is still exported")
	}
	p.Announce(announce.Withdrawn, vip4)
	harness.Must(t, confirm(patience))
	if !gw.Has(vip6) {
		t.Error("the other family's VIP went with it")
	}
	kill(t, p.State().Load().PID, syscall.SIGSTOP)
	if err := confirm(200 * time.Millisecond); err == nil {
		t.Fatal("a BIRD that does not answer confirmed something")
	}
	kill(t, p.State().Load().PID, syscall.SIGCONT)
}

// BIRD before 2.14 may sleep instead of feeding a new session: see Expect.
func TestManyVIPsCauseNoStall(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4, vip.IPv6)
	gw := l.Router(routerConfig{})
	p := newPod(t, l.Dev)
	var many []vip.VIP
	for i := range 10_000 {
		v, err := vip.FromPrefix(netip.PrefixFrom(netip.AddrFrom4([4]byte{20, 1, byte(i >> 8), byte(i)}), 32))
		harness.Must(t, err)
		many = append(many, v)
	}
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4)}, many)
	p.Start()
	p.Announce(announce.Announced, many...)
	exported := func(n int) func(bird.State) bool {
		return func(s bird.State) bool { return up("gateway-ipv4")(s) && s.Gateways[0].Exported == n }
	}
	p.await("all exported", exported(len(many)))
	last := many[len(many)-1]
	for range 3 {
		gw.Command(`restart "trench4"`)
		p.await("session lost", down("gateway-ipv4"))
		p.await("session back", up("gateway-ipv4"))
		begin := time.Now()
		p.await("all exported", exported(len(many)))
		await.True(t, "the last VIP at the gateway", func() bool { return gw.Has(last) })
		t.Logf("10 000 VIPs %s after the session came up", time.Since(begin))
	}
	begin := time.Now()
	p.Announce(announce.Depreferred, many...)
	await.True(t, "the last VIP de-preferred", func() bool { return gw.Attribute(last, "community") == "(65535,0)" })
	t.Logf("10 000 VIPs de-preferred after %s", time.Since(begin))
	begin = time.Now()
	p.Announce(announce.Withdrawn, many...)
	p.await("all withdrawn", exported(0))
	await.True(t, "the last VIP gone", func() bool { return !gw.Has(last) })
	t.Logf("10 000 VIPs withdrawn after %s", time.Since(begin))
}

func TestRefusedConfigurationKeepsPrevious(t *testing.T) {
	p, gw, _ := bothUp(t, routerConfig{})
	p.Announce(announce.Announced, vip4)
	await.True(t, "VIP at the gateway", func() bool { return gw.Has(vip4) })
	before := p.State().Load()
	// The trench file refuses such a name; BIRD does too.
	bad := gatewayOf(vip.IPv6, func(g *trench.Gateway) { g.Name = "a'b" })
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4), bad}, []vip.VIP{vip4})
	s := p.await("refused", func(s bird.State) bool { return s.ConfigErr != nil })
	if !s.Alive || s.PID != before.PID || !s.Gateways[0].Up {
		t.Fatalf("state: %+v", s)
	}
	polled := time.Now().Add(2500 * time.Millisecond)
	s = p.await("later polls", func(s bird.State) bool { return s.At.After(polled) })
	if !strings.Contains(s.Gateways[1].Problem, "BIRD refused") {
		t.Errorf("the gateway does not say why it has no session: %+v", s.Gateways[1])
	}
	if n := strings.Count(p.Log.String(), "failed to configure BIRD"); n != 1 {
		t.Errorf("complained %d times about the same configuration", n)
	}
	// A BIRD that is killed in this state restarts with the configuration that it accepted last.
	kill(t, s.PID, syscall.SIGKILL)
	p.await("session back", func(s bird.State) bool { return s.PID != before.PID && s.Restarts == 1 && s.Gateways[0].Up })
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4)}, []vip.VIP{vip4})
	p.await("no complaint any more",
		func(s bird.State) bool { return s.ConfigErr == nil && len(s.Gateways) == 1 && s.Gateways[0].Up })
}
