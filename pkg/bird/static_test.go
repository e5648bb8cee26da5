package bird_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

// A static gateway sends to a VIP while its route, which follows the BFD session, is installed.

// Numbers of missed BFD packets, 100 ms apart, after which a side detects a loss: quickly, or later
// than a machine stalls.
const (
	quickDetection   = 3
	patientDetection = 30
)

// staticGateway returns the static gateway's configuration in the trench, with Router's BFD
// parameters.
func staticGateway(f vip.Family) trench.Gateway { return staticGatewayWith(f, quickDetection) }

func staticGatewayWith(f vip.Family, multiplier int) trench.Gateway {
	return trench.Gateway{
		Name: "gateway-" + f.String(), Address: gatewayAddress(f), Protocol: trench.Static,
		BFD: &trench.BFD{MinTx: 100 * time.Millisecond, MinRx: 100 * time.Millisecond, Multiplier: multiplier},
	}
}

func staticPod(t *testing.T, change ...func(*bird.Options)) (*pod, *router, *link) {
	t.Helper()
	return staticPodWith(t, quickDetection, change...)
}

func staticPodWith(t *testing.T, multiplier int, change ...func(*bird.Options)) (*pod, *router, *link) {
	t.Helper()
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4, vip.IPv6)
	gw := l.Router(routerConfig{Static: true, Multiplier: multiplier})
	p := newPod(t, l.Dev, change...)
	p.Configure([]trench.Gateway{staticGatewayWith(vip.IPv4, multiplier), staticGatewayWith(vip.IPv6, multiplier)},
		[]vip.VIP{vip4, vip6})
	return p, gw, l
}

// table returns the routes of a family in the kernel's table.
func table(f string) string {
	// The table does not exist before its first route.
	out, _ := exec.Command("ip", f, "route", "show", "table", strconv.Itoa(tableID)).CombinedOutput()
	return string(out)
}

func held(name string) func(bird.State) bool {
	return func(s bird.State) bool {
		for _, g := range s.Gateways {
			if g.Name == name {
				return g.Held && !g.Up && g.Usable && g.BFD != "" && g.BFD != "Up"
			}
		}
		return false
	}
}

// released reports whether the sessions are up in a state that postdates their release. BIRD may
// bring a session up before the supervisor has read the lease that passed its packets.
func released(names ...string) func(bird.State) bool {
	return func(s bird.State) bool {
		return up(names...)(s) && !slices.ContainsFunc(s.Gateways, func(g bird.GatewayState) bool { return g.Held })
	}
}

func TestStaticGatewayFollowsAttraction(t *testing.T) {
	p, gw, _ := staticPodWith(t, patientDetection) // IPv6 must not be touched
	p.Start()
	p.await("both held down", func(s bird.State) bool { return held("gateway-ipv4")(s) && held("gateway-ipv6")(s) })
	holds(t, 1500*time.Millisecond, "no VIP at the gateway", func() bool { return !gw.Has(vip4) && !gw.Has(vip6) })
	await.True(t, "egress while held down", func() bool {
		return strings.Contains(table("-4"), "default via 169.254.100.150") &&
			strings.Contains(table("-6"), "default via fd00:100::150")
	})

	p.Attract(true, true)
	s := p.await("both up", released("gateway-ipv4", "gateway-ipv6"))
	if g := s.Gateways[0]; !g.Usable || g.State != "Up" || g.BFD != "Up" || g.Imported != 1 {
		t.Errorf("state %+v", g)
	}
	await.True(t, "VIPs at the gateway", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
	since := p.Gateway("gateway-ipv6").Since

	var egress []string
	for range 2 {
		begin := time.Now()
		p.Attract(false, true)
		await.True(t, "IPv4 withdrawn", func() bool {
			egress = append(egress, table("-4"))
			return !gw.Has(vip4)
		})
		gone := time.Since(begin)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		err := p.Confirm(ctx)
		cancel()
		harness.Must(t, err)
		t.Logf("withdrawn after %v, confirmed after %v", gone, time.Since(begin))
		p.await("held down", held("gateway-ipv4"))
		begin = time.Now()
		p.Attract(true, true)
		p.await("up", up("gateway-ipv4"))
		await.True(t, "VIP at the gateway", func() bool { return gw.Has(vip4) })
		t.Logf("up after %v", time.Since(begin))
	}
	for _, routes := range egress {
		if !strings.Contains(routes, "default via 169.254.100.150") {
			t.Fatalf("no egress route during a withdrawal: %q", routes)
		}
	}
	if g := p.Gateway("gateway-ipv6"); !g.Up || !g.Since.Equal(since) {
		t.Errorf("the session of the other family was touched: %+v", g)
	}
	if log := p.Log.String(); strings.Contains(log, "level=ERROR") {
		t.Errorf("errors in the log:\n%s", p.Log)
	}
}

// Confirm must not report a withdrawal that the gateway has not detected.
func TestStaticWithdrawalIsConfirmedByGateway(t *testing.T) {
	p, gw, _ := staticPod(t)
	p.Start()
	p.Attract(true, true)
	p.await("both up", up("gateway-ipv4", "gateway-ipv6"))
	for range 5 {
		p.await("both up", up("gateway-ipv4", "gateway-ipv6"))
		p.Attract(false, false)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		err := p.Confirm(ctx)
		cancel()
		if err != nil || gw.Has(vip4) || gw.Has(vip6) {
			t.Fatalf("confirmed with %v while the gateway has routes: %v, %v", err, gw.Has(vip4), gw.Has(vip6))
		}
		p.Attract(true, true)
	}
}

func TestStaticReconfiguration(t *testing.T) {
	p, gw, _ := staticPodWith(t, patientDetection)
	static4 := staticGatewayWith(vip.IPv4, patientDetection)
	static6 := staticGatewayWith(vip.IPv6, patientDetection)
	p.Start()
	p.await("both held down", func(s bird.State) bool { return held("gateway-ipv4")(s) && held("gateway-ipv6")(s) })
	p.Attract(false, true)
	p.await("IPv6 up", up("gateway-ipv6"))
	since := p.Gateway("gateway-ipv6").Since
	await.True(t, "VIP at the gateway", func() bool { return gw.Has(vip6) })
	unchanged := func() bool {
		g, has4, has6 := p.Gateway("gateway-ipv6"), gw.Has(vip4), gw.Has(vip6)
		ok := !has4 && has6 && g.Up && g.Since.Equal(since)
		if !ok {
			t.Logf("IPv4 VIP at the gateway: %t, IPv6 VIP: %t; up since %v until now: %+v", has4, has6, since, g)
		}
		return ok
	}
	ghost := gatewayOf(vip.IPv4)
	ghost.Name, ghost.Address = "ghost", ghost.Address.Next()
	for i, gateways := range [][]trench.Gateway{
		{static4, static6, ghost},
		{static4, static6},
	} {
		before := p.State().Load().Configures
		p.Configure(gateways, []vip.VIP{vip4, vip6, vip.Require(fmt.Sprintf("20.0.1.%d/32", i))})
		p.await("configuration loaded", func(s bird.State) bool { return s.Configures > before })
		holds(t, 1500*time.Millisecond, "sessions as they were", unchanged)
	}
	// Another configuration of BIRD by an operator.
	for _, command := range []string{`disable "NBR-gateway-ipv4"`, `enable "NBR-gateway-ipv4"`, "configure"} {
		if _, err := ask(p.Options.Socket, command); err != nil {
			t.Fatal(err)
		}
		holds(t, 1200*time.Millisecond, "sessions as they were after "+command, unchanged)
	}
	// A gateway that is removed and added again is under the lease.
	p.Configure([]trench.Gateway{static6}, []vip.VIP{vip4, vip6})
	p.await("one gateway", func(s bird.State) bool { return len(s.Gateways) == 1 })
	p.Configure([]trench.Gateway{static4, static6}, []vip.VIP{vip4, vip6})
	p.await("it is held down again", held("gateway-ipv4"))
	holds(t, 1500*time.Millisecond, "sessions as they were", unchanged)
}

// A new BIRD starts with sessions that are held down.
func TestStaticRestartOfBIRD(t *testing.T) {
	p, gw, _ := staticPod(t)
	p.Start()
	p.Attract(false, true)
	p.await("IPv6 up", up("gateway-ipv6"))
	kill(t, p.State().Load().PID, syscall.SIGKILL)
	p.await("another BIRD", func(s bird.State) bool { return s.Restarts > 0 && s.Alive })
	p.await("IPv6 up", up("gateway-ipv6"))
	holds(t, 1500*time.Millisecond, "IPv4 withdrawn", func() bool { return !gw.Has(vip4) })
}

// The kernel ends the sessions of a frontend that is killed or stopped.
func TestStaticLeaseExpires(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			p, gw, l := staticPodWith(t, patientDetection)
			frontend := exec.Command("/proc/self/exe", "-test.run", "^TestFrontendToBeKilled$")
			frontend.Env = append(os.Environ(), frontendVariable+"="+p.Options.Dir+" "+l.Dev+" static")
			harness.Must(t, frontend.Start())
			ended := make(chan struct{})
			go func() { defer close(ended); _ = frontend.Wait() }()
			t.Cleanup(func() { _ = frontend.Process.Kill(); <-ended })
			await.True(t, "VIPs at the gateway", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
			holds(t, 4*time.Second, "refreshed lease", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
			pid := servedBy(t, p.Options.Socket)
			begin := time.Now()
			kill(t, frontend.Process.Pid, signal)
			await.True(t, "withdrawal", func() bool { return !gw.Has(vip4) && !gw.Has(vip6) })
			t.Logf("withdrawn after %v", time.Since(begin))
			if servedBy(t, p.Options.Socket) != pid {
				t.Fatal("BIRD ended with the frontend")
			}
			if signal == syscall.SIGSTOP {
				kill(t, frontend.Process.Pid, syscall.SIGCONT)
				await.True(t, "VIPs at the gateway again", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
				kill(t, frontend.Process.Pid, syscall.SIGKILL)
			}
			<-ended
			p.Start()
			p.await("held down by the second frontend", held("gateway-ipv4"))
			p.Attract(true, true)
			p.await("up", up("gateway-ipv4", "gateway-ipv6"))
		})
	}
}

// The sender of orders hangs while the process runs.
func TestStaticOldOrderExpires(t *testing.T) {
	p, gw, _ := staticPod(t)
	p.Start()
	p.Attract(true, true)
	await.True(t, "VIPs at the gateway", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
	begin := time.Now()
	p.attract.Store(nil)
	await.True(t, "withdrawal", func() bool { return !gw.Has(vip4) && !gw.Has(vip6) })
	t.Logf("withdrawn after %v", time.Since(begin))
	p.await("held down", held("gateway-ipv4"))
	p.Attract(true, true)
	p.await("up", up("gateway-ipv4", "gateway-ipv6"))
}

func TestStaticBesideBGP(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4, vip.IPv6)
	const multiplier = 2 * patientDetection // at intervals of 50 ms
	l.Router(routerConfig{BFD: true, Multiplier: multiplier})
	p := newPod(t, l.Dev)
	bfd := &trench.BFD{MinTx: 50 * time.Millisecond, MinRx: 50 * time.Millisecond, Multiplier: multiplier}
	withoutBFD := staticGateway(vip.IPv4)
	withoutBFD.Name, withoutBFD.Address, withoutBFD.BFD = "no-bfd", withoutBFD.Address.Next(), nil
	absent := staticGateway(vip.IPv6) // no router has its address
	absent.Address = absent.Address.Next()
	p.Configure([]trench.Gateway{
		gatewayOf(vip.IPv4, func(g *trench.Gateway) { g.BFD = bfd }), absent, withoutBFD,
	}, []vip.VIP{vip4, vip6})
	p.Start()
	s := p.await("BGP with BFD up beside static gateways", func(s bird.State) bool {
		return up("gateway-ipv4", "no-bfd")(s) && held("gateway-ipv6")(s) && s.Gateways[0].BFD == "Up"
	})
	if g := s.Gateways[2]; !g.Usable || g.Held || g.State != bird.StateNoBFD ||
		!strings.Contains(g.Warning, "cannot be withdrawn") {
		t.Errorf("static gateway without BFD: %+v", g)
	}
	since := s.Gateways[0].Since
	p.Attract(true, true)
	p.await("static gateway without a peer is not usable",
		func(s bird.State) bool { return !s.Gateways[1].Held && !s.Gateways[1].Usable && s.Gateways[0].Usable })
	p.Attract(false, false)
	p.await("held down again, and not usable", func(s bird.State) bool {
		g := s.Gateways[1]
		return g.Held && !g.Up && !g.Usable
	})
	if g := p.Gateway("gateway-ipv4"); !g.Up || !g.Since.Equal(since) {
		t.Errorf("the BGP session was touched: %+v", g)
	}
}

func TestStaticVRRP(t *testing.T) {
	p, gw, _ := staticPod(t, func(o *bird.Options) {
		o.ECMP = true
		for _, a := range []string{"169.254.100.7", "169.254.100.8", "fd00:100::7"} {
			o.VRRP = append(o.VRRP, netip.MustParseAddr(a))
		}
	})
	p.Start()
	p.Attract(true, true)
	s := p.await("both up", up("gateway-ipv4", "gateway-ipv6"))
	if g := s.Gateways[0]; g.Imported != 2 {
		t.Errorf("%d routes in place of the gateway's, want 2: %+v", g.Imported, g)
	}
	await.True(t, "VIPs at the gateway", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
	await.True(t, "routes via VRRP addresses", func() bool {
		return strings.Contains(table("-4"), "via 169.254.100.7") && strings.Contains(table("-4"), "via 169.254.100.8") &&
			strings.Contains(table("-6"), "via fd00:100::7")
	})
	if all := table("-4") + table("-6"); strings.Contains(all, ".150") || strings.Contains(all, "::150") {
		t.Errorf("a route of a gateway is in the kernel:\n%s", all)
	}
}

func TestStaticECMP(t *testing.T) {
	for _, ecmp := range []bool{false, true} {
		t.Run(fmt.Sprint(ecmp), func(t *testing.T) {
			run(t, "ip", "link", "set", "lo", "up")
			l := newLink(t, vip.IPv4)
			p := newPod(t, l.Dev, func(o *bird.Options) { o.ECMP = ecmp })
			one := staticGateway(vip.IPv4)
			one.BFD = nil
			other := one
			other.Name, other.Address = "other", one.Address.Next()
			p.Configure([]trench.Gateway{one, other}, []vip.VIP{vip4})
			p.Start()
			p.await("both usable", up("gateway-ipv4", "other"))
			await.True(t, "default routes", func() bool {
				routes := table("-4")
				hops := strings.Count(routes, "via 169.254.100.15")
				return hops == 2 && ecmp || hops == 1 && !ecmp
			})
		})
	}
}
