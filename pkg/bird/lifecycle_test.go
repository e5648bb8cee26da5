package bird_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
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

// fake writes an executable that accepts the check of the configuration and otherwise runs the
// script.
func fake(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "bird")
	text := "#!/bin/sh\nfor a; do [ \"$a\" = -p ] && exit 0; done\n" + script + "\n"
	harness.Must(t, os.WriteFile(path, []byte(text), 0o700))
	return path
}

func TestRestartBackoff(t *testing.T) {
	p := newPod(t, "lo", func(o *bird.Options) { o.Executable = fake(t, "echo 'bird: the reason' >&2; exit 3") })
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4)}, nil)
	p.Start()
	s := p.await("restarts", func(s bird.State) bool { return s.Restarts >= 4 && s.PID == 0 })
	if s.Alive || s.Err == nil || !strings.Contains(s.Err.Error(), "exit status 3: bird: the reason") {
		t.Errorf("state %+v", s)
	}
	if len(s.Gateways) != 1 || s.Gateways[0].Up {
		t.Errorf("gateways %+v", s.Gateways)
	}
	log := p.Log.String()
	for _, wait := range []string{"wait=100ms", "wait=200ms", "wait=400ms", "wait=800ms"} {
		if strings.Count(log, wait) != 1 {
			t.Errorf("%q is not once in the log", wait)
		}
	}
}

func TestStopEndsUnresponsiveBIRD(t *testing.T) {
	p := newPod(t, "lo", func(o *bird.Options) { o.Executable = fake(t, "exec sleep 600") })
	p.Configure(nil, nil)
	p.Start()
	s := p.await("started", func(s bird.State) bool { return s.PID != 0 })
	if s.Alive {
		t.Errorf("state %+v", s)
	}
	p.Stop()
	if err := syscall.Kill(s.PID, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("process %d is still there: %v", s.PID, err)
	}
}

func TestMissingBIRDIsReported(t *testing.T) {
	p := newPod(t, "lo", func(o *bird.Options) { o.Executable = "/nonexistent/bird" })
	p.Configure(nil, nil)
	p.Start()
	s := p.await("an error", func(s bird.State) bool { return s.Err != nil })
	if !strings.Contains(s.Err.Error(), "/nonexistent/bird") {
		t.Errorf("%v", s.Err)
	}
}

func TestStopEndsBIRDAndWaitsForIt(t *testing.T) {
	for name, stopped := range map[string]bool{"by asking": false, "by force, when it is hung": true} {
		t.Run(name, func(t *testing.T) {
			p, gw, _ := bothUp(t, routerConfig{})
			p.Announce(announce.Announced, vip4, vip6)
			await.True(t, "VIPs at the gateway", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
			pid := p.State().Load().PID
			if stopped {
				kill(t, pid, syscall.SIGSTOP)
			}
			p.Stop()
			if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
				t.Errorf("BIRD is still there: %v", err)
			}
			if killed := strings.Contains(p.Log.String(), "killing it"); killed != stopped {
				t.Errorf("killed: %v", killed)
			}
			await.True(t, "no VIP at the gateway", func() bool { return !gw.Has(vip4) && !gw.Has(vip6) })
		})
	}
}

func TestUnwritableConfigurationIsRetried(t *testing.T) {
	p, _, _ := bothUp(t, routerConfig{})
	before := p.State().Load()
	// A write to a directory fails even for root.
	blocked := filepath.Join(p.Options.Dir, "vipgate.conf.new.tmp")
	harness.Must(t, os.Mkdir(blocked, 0o700))
	ghost := gatewayOf(vip.IPv4,
		func(g *trench.Gateway) { g.Name, g.Address = "ghost", netip.MustParseAddr("169.254.100.77") })
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4), ghost}, []vip.VIP{vip4})
	s := p.await("trouble", func(s bird.State) bool { return s.ConfigErr != nil })
	if !s.Alive || s.ConfigFailures == 0 || !up("gateway-ipv4")(s) {
		t.Errorf("state %+v", s)
	}
	// A BIRD that is killed in this state restarts with the configuration on the disk.
	kill(t, s.PID, syscall.SIGKILL)
	p.await("back", func(s bird.State) bool { return s.PID != before.PID && s.Restarts == 1 && up("gateway-ipv4")(s) })
	harness.Must(t, os.Remove(blocked))
	p.await("taken", func(s bird.State) bool {
		return s.ConfigErr == nil && s.Configures > before.Configures && up("gateway-ipv4")(s) && len(s.Gateways) == 2 &&
			s.Gateways[1].Problem == ""
	})
	left, err := filepath.Glob(filepath.Join(p.Options.Dir, "*"))
	harness.Must(t, err)
	for _, f := range left {
		if strings.HasSuffix(f, ".new") || strings.HasSuffix(f, ".tmp") {
			t.Errorf("%s was left behind", f)
		}
	}
}

func TestSessionFollowsInterfaceAddress(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4, vip.IPv6)
	l.Router(routerConfig{})
	run(t, "ip", "addr", "del", "169.254.100.1/24", "dev", l.Dev)
	p := newPod(t, l.Dev)
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4), gatewayOf(vip.IPv6)}, []vip.VIP{vip4, vip6})
	p.Start()
	s := p.await("IPv6 session", up("gateway-ipv6"))
	if s.Gateways[0].Up || !strings.Contains(s.Gateways[0].Problem, "no ipv4 address") {
		t.Errorf("IPv4: %+v", s.Gateways[0])
	}
	ipv6Since := s.Gateways[1].Since

	run(t, "ip", "addr", "add", "169.254.100.1/24", "dev", l.Dev)
	s = p.await("IPv4 session", up("gateway-ipv4", "gateway-ipv6"))
	ipv4Since := s.Gateways[0].Since

	// An additional address causes no restart, even if the kernel lists it first.
	run(t, "ip", "addr", "add", "fd00:100::2/64", "dev", l.Dev, "nodad")
	polled := time.Now().Add(2500 * time.Millisecond) // two resolve intervals
	s = p.await("later polls", func(s bird.State) bool { return s.At.After(polled) })
	if !s.Gateways[0].Since.Equal(ipv4Since) || !s.Gateways[1].Since.Equal(ipv6Since) || s.Configures != 1 {
		t.Errorf("another address changed the sessions: %+v", s)
	}

	run(t, "ip", "addr", "del", "169.254.100.1/24", "dev", l.Dev)
	s = p.await("IPv4 problem", func(s bird.State) bool { return s.Gateways[0].Problem != "" })
	if s.Gateways[0].Up || !s.Gateways[1].Since.Equal(ipv6Since) {
		t.Errorf("state %+v", s)
	}
	// The gateway expects the frontend at .1, so BIRD's source address matters.
	run(t, "ip", "addr", "add", "169.254.100.3/24", "dev", l.Dev)
	p.await("a session from the other address", func(s bird.State) bool { return s.Gateways[0].Problem == "" })
	await.True(t, "the other address in the configuration", func() bool {
		b, err := os.ReadFile(filepath.Join(p.Options.Dir, "vipgate.conf"))
		return err == nil && strings.Contains(string(b), "local 169.254.100.3 port")
	})
	if s := p.State().Load(); !s.Gateways[1].Since.Equal(ipv6Since) || !s.Gateways[1].Up {
		t.Errorf("the IPv6 session was touched: %+v", s.Gateways[1])
	}
}

func TestSessionWaitsForDAD(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t)
	run(t, "ip", "-n", l.Namespace, "addr", "add", "fd00:100::150/64", "dev", "gw0", "nodad")
	l.Router(routerConfig{})
	// With three probes a second apart the address is tentative for long enough to be seen.
	path := "/proc/sys/net/ipv6/conf/" + l.Dev + "/"
	for file, value := range map[string]string{"accept_dad": "1", "dad_transmits": "3"} {
		harness.Must(t, os.WriteFile(path+file, []byte(value), 0))
	}
	p := newPod(t, l.Dev)
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv6)}, []vip.VIP{vip6})
	run(t, "ip", "addr", "add", "fd00:100::1/64", "dev", l.Dev)
	p.Start()
	s := p.await("the reason",
		func(s bird.State) bool { return s.Alive && len(s.Gateways) == 1 && s.Gateways[0].Problem != "" })
	if !strings.Contains(s.Gateways[0].Problem, "duplicate address detection runs") {
		t.Errorf("problem %q", s.Gateways[0].Problem)
	}
	s = p.await("the session", up("gateway-ipv6"))
	if strings.Contains(p.Log.String(), "Cannot assign") || s.Restarts != 0 {
		t.Errorf("BIRD had trouble with the address: %+v", s)
	}
	// A link that comes back has its addresses checked again; the session and the configuration
	// stay as they are.
	before := s.Configures
	run(t, "ip", "-n", l.Namespace, "link", "set", "gw0", "down")
	p.await("the session down", down("gateway-ipv6"))
	run(t, "ip", "-n", l.Namespace, "link", "set", "gw0", "up")
	run(t, "ip", "-n", l.Namespace, "addr", "replace", "fd00:100::150/64", "dev", "gw0", "nodad")
	s = p.await("the session back", up("gateway-ipv6"))
	if s.Configures != before {
		t.Errorf("configured %d times for a link that went and came", s.Configures-before)
	}
}

func TestBIRDLogFileRotation(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4)
	const size = 4000
	p := newPod(t, l.Dev, func(o *bird.Options) { o.LogFileSize = size })
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4)}, []vip.VIP{vip4})
	p.Start()
	p.await("BIRD alive", func(s bird.State) bool { return s.Alive })
	path := filepath.Join(p.Options.Dir, "bird.log")
	await.True(t, "a second file", func() bool {
		if _, err := ask(p.Options.Socket, `restart "LB"`); err != nil {
			t.Fatal(err)
		}
		_, err := os.Stat(path + ".1")
		return err == nil
	})
	for _, f := range []string{path, path + ".1"} {
		info, err := os.Stat(f)
		if err != nil || info.Size() > size {
			t.Errorf("%s: %v, %v", f, info.Size(), err)
		}
	}
	// The supervisor receives the lines as well.
	if !strings.Contains(p.Log.String(), "bird: Started") {
		t.Error("BIRD's lines are not in our log")
	}
}

func TestBIRDLogLevels(t *testing.T) {
	for _, verbose := range []bool{false, true} {
		t.Run(fmt.Sprint(verbose), func(t *testing.T) {
			run(t, "ip", "link", "set", "lo", "up")
			l := newLink(t, vip.IPv4)
			p := newPod(t, l.Dev, func(o *bird.Options) { o.LogBIRD = verbose })
			p.Configure(nil, nil)
			p.Start()
			want := `level=DEBUG msg="bird: Started"`
			if verbose {
				want = `level=INFO msg="bird: Started"`
			}
			await.True(t, want, func() bool { return strings.Contains(p.Log.String(), want) })
		})
	}
}

func TestKernelRoutesECMP(t *testing.T) {
	for _, ecmp := range []bool{false, true} {
		t.Run(fmt.Sprint(ecmp), func(t *testing.T) {
			run(t, "ip", "link", "set", "lo", "up")
			a, b := newLink(t, vip.IPv4), newLink(t)
			// The second gateway is reached over the same interface: a bridge joins the links.
			bridge := "br" + a.Dev[2:]
			run(t, "ip", "link", "add", bridge, "type", "bridge")
			t.Cleanup(func() { run(t, "ip", "link", "del", bridge) })
			run(t, "ip", "addr", "flush", "dev", a.Dev)
			for _, args := range [][]string{
				{"link", "set", a.Dev, "master", bridge},
				{"link", "set", b.Dev, "master", bridge},
				{"link", "set", bridge, "up"},
				{"addr", "add", "169.254.100.1/24", "dev", bridge},
			} {
				run(t, "ip", args...)
			}
			run(t, "ip", "-n", b.Namespace, "addr", "add", "169.254.100.151/24", "dev", "gw0")
			a.Router(routerConfig{})
			b.Router(routerConfig{Address4: "169.254.100.151"})
			p := newPod(t, bridge, func(o *bird.Options) { o.ECMP = ecmp })
			second := gatewayOf(vip.IPv4,
				func(g *trench.Gateway) { g.Name, g.Address = "second", netip.MustParseAddr("169.254.100.151") })
			p.Configure([]trench.Gateway{gatewayOf(vip.IPv4), second}, []vip.VIP{vip4})
			p.Start()
			p.await("both sessions", up("gateway-ipv4", "second"))
			hops := func() (n int) {
				table := run(t, "ip", "-4", "route", "show", "table", "all", "proto", "bird")
				for _, gateway := range []string{"via 169.254.100.150", "via 169.254.100.151"} {
					if strings.Contains(table, gateway) {
						n++
					}
				}
				return n
			}
			want := 1
			if ecmp {
				want = 2
			}
			await.True(t, fmt.Sprintf("%d next hops", want), func() bool {
				s := p.State().Load()
				return s.Gateways[0].Imported == 1 && s.Gateways[1].Imported == 1 && hops() == want
			})
		})
	}
}

// BIRD reads the kernel again only after its scan time.
func TestRemovedKernelRoutesAreExportedAgain(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4, vip.IPv6)
	l.Router(routerConfig{})
	p := newPod(t, l.Dev, func(o *bird.Options) { o.KernelScanTime = time.Hour })
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4), gatewayOf(vip.IPv6)}, nil)
	p.Start()
	p.await("both sessions", up("gateway-ipv4", "gateway-ipv6"))
	for _, family := range []string{"-4", "-6"} {
		routes := func() bool {
			return strings.Contains(run(t, "ip", family, "route", "show", "table", "all", "proto", "bird"), "default via")
		}
		await.True(t, "the routes of the gateway", routes)
		run(t, "ip", family, "route", "flush", "table", fmt.Sprint(tableID))
		p.ExportRoutes() // BIRD 3.4 did it already
		await.True(t, "the routes again", routes)
	}
}

// A session loss must be reported within milliseconds. The test sets no bound, since the machine
// may be busy; it only logs the latency.
func TestLogLineReportsSessionLoss(t *testing.T) {
	p, gw, _ := bothUp(t, routerConfig{})
	var took []time.Duration
	for range 5 {
		states := make(chan time.Time, 1)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		go func() {
			for {
				s, changed := p.State().Get()
				if down("gateway-ipv4")(s) {
					states <- time.Now()
					return
				}
				select {
				case <-changed:
				case <-ctx.Done():
					close(states)
					return
				}
			}
		}()
		begin := time.Now()
		gw.Command(`disable "trench4"`)
		seen, ok := <-states
		cancel()
		if !ok {
			t.Fatal("the loss was never known")
		}
		took = append(took, seen.Sub(begin))
		gw.Command(`enable "trench4"`)
		p.await("session back", up("gateway-ipv4"))
	}
	slices.Sort(took)
	t.Logf("known after %v (median %v)", took, took[len(took)/2])
}

// Another process configures BIRD with another file.
func TestForeignConfigurationIsReplaced(t *testing.T) {
	p, gw, _ := bothUp(t, routerConfig{})
	p.Announce(announce.Announced, vip4, vip6)
	foreign := filepath.Join(t.TempDir(), "bird.conf")
	harness.Must(t, os.WriteFile(foreign, []byte("router id 9.9.9.9;\nprotocol device { }\n"), 0o600))
	if _, err := ask(p.Options.Socket, `configure "`+foreign+`"`); err != nil {
		t.Fatal(err)
	}
	p.await("sessions lost", down("gateway-ipv4"))
	p.await("sessions restored", up("gateway-ipv4", "gateway-ipv6"))
	await.True(t, "VIPs at the gateway", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
	if n := p.State().Load().Restores; n != 1 {
		t.Errorf("configured again %d times, want 1", n)
	}
}
