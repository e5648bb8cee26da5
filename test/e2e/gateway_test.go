package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

type healthStatus = healthv1.HealthCheckResponse_ServingStatus

const healthServing, healthNotServing = healthv1.HealthCheckResponse_SERVING, healthv1.HealthCheckResponse_NOT_SERVING

// Lines of the usual trench file.
var (
	lineA4 = fmt.Sprintf("- {name: gateway-a4, address: %s, %s}", lab.GatewayA4, lab.HoldTime)
	lineA6 = fmt.Sprintf("- {name: gateway-a6, address: %q, %s}", lab.GatewayA6, lab.HoldTime)
	lineB4 = fmt.Sprintf("- {name: gateway-b4, address: %s, remoteASN: %d, %s}", lab.GatewayB4, lab.GatewayBAS,
		lab.HoldTime)
	lineB6 = fmt.Sprintf("- {name: gateway-b6, address: %q, remoteASN: %d, %s}", lab.GatewayB6, lab.GatewayBAS,
		lab.HoldTime)
)

// edited returns the usual trench file after replacing texts, in pairs of old and new.
func edited(t *testing.T, pairs ...string) string {
	t.Helper()
	text := usualTrench()
	for i := 0; i < len(pairs); i += 2 {
		if strings.Count(text, pairs[i]) != 1 {
			t.Fatalf("%q is not once in the trench file:\n%s", pairs[i], text)
		}
		text = strings.Replace(text, pairs[i], pairs[i+1], 1)
	}
	return text
}

// with adds fields to lines of gateways. A hold time replaces the usual one.
func with(fields string, lines ...string) []string {
	var list []string
	for _, line := range lines {
		if strings.Contains(fields, "holdTime:") {
			line = strings.Replace(line, ", "+lab.HoldTime, "", 1)
		}
		if fields != "" {
			line = strings.TrimSuffix(line, "}") + ", " + fields + "}"
		}
		list = append(list, line)
	}
	return list
}

// regateway restarts the gateway with another configuration, before the pod starts.
func (f *fixture) regateway(change func(*lab.GatewayConfig)) {
	f.t.Helper()
	f.must(f.gateway.Process.Kill())
	change(&f.gateway.GatewayConfig)
	f.must(f.gateway.Start())
}

// second starts a second gateway on the same link.
func (f *fixture) second() *lab.Gateway {
	f.t.Helper()
	f.must(
		f.Gateway.Addr("trench0", netip.PrefixFrom(lab.GatewayB4, 24).String(),
			netip.PrefixFrom(lab.GatewayB6, 64).String()),
	)
	b, err := f.StartGateway(lab.GatewayB())
	f.must(err)
	return b
}

// wantRoutesAt is wantRoutes for any gateway.
func (f *fixture) wantRoutesAt(g *lab.Gateway, prefixes ...string) {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	f.must(g.WantRoutes(ctx, prefixes...))
}

// control sends a command to the gateway's BIRD over its control socket.
func (f *fixture) control(command string) {
	f.t.Helper()
	var c *lab.Control
	f.waitFor(func() (err error) { // the gateway may be starting
		c, err = f.gateway.Control(f.t.Context())
		return err
	})
	defer c.Close()
	_, err := c.Command(command)
	f.must(err)
}

// waitGateway waits until the frontend's status of a gateway satisfies a condition.
func (f *fixture) waitGateway(name string, wanted func(*frontendv1.GatewayStatus) bool) *frontendv1.GatewayStatus {
	f.t.Helper()
	var found *frontendv1.GatewayStatus
	f.waitFor(func() error {
		for _, g := range f.frontendStatus().GetGateways() {
			if g.GetName() == name {
				if found = g; wanted(g) {
					return nil
				}
			}
		}
		return fmt.Errorf("status of gateway %s: %v", name, found)
	})
	return found
}

func isUp(g *frontendv1.GatewayStatus) bool   { return g.GetUp() }
func isDown(g *frontendv1.GatewayStatus) bool { return !g.GetUp() }

// sessions returns the state of each session of the gateway's BIRD, and the time of its last
// change. BIRD derives that time from the age at each call and may be off by a millisecond: a time
// close to the previous one is replaced by it.
func (f *fixture) sessions() map[string]string {
	f.t.Helper()
	lines := map[string]string{}
	if f.sessionTimes == nil {
		f.sessionTimes = map[string]time.Time{}
	}
	for line := range strings.Lines(f.waitGatewayState("show protocols")) {
		if words := strings.Fields(line); len(words) > 4 && strings.HasPrefix(words[0], "trench") {
			const layout = "15:04:05.000"
			at, err := time.Parse(layout, words[4])
			f.must(err)
			if before := f.sessionTimes[words[0]]; at.Sub(before).Abs() > 100*time.Millisecond {
				f.sessionTimes[words[0]] = at
			}
			words[4] = f.sessionTimes[words[0]].Format(layout)
			lines[words[0]] = strings.Join(words, " ")
		}
	}
	return lines
}

// table returns the routes of the pod's table for VIP traffic.
func (f *fixture) table(family string) string {
	f.t.Helper()
	// The table does not exist before its first route.
	out, err := f.Pod.Run(f.t.Context(), "ip", family, "route", "show", "table", "4096")
	if err != nil && !strings.Contains(out, "does not exist") {
		f.t.Fatal(err)
	}
	return out
}

// waitTable waits until the table of VIP traffic contains all routes in has.
func (f *fixture) waitTable(family string, has ...string) {
	f.t.Helper()
	f.waitFor(func() error {
		for _, h := range has {
			if out := f.table(family); !strings.Contains(out, h) {
				return fmt.Errorf("%q is not in table 4096:\n%s", h, out)
			}
		}
		return nil
	})
}

// healthRecord records every status of a health service of the frontend.
type healthRecord struct {
	f       *fixture
	service string

	mu      sync.Mutex
	seen    []healthStatus
	waited  int           // number of statuses in seen that wait has returned
	changed chan struct{} // closed at the next status
}

// recordHealth starts recording a service.
func (f *fixture) recordHealth(service string) *healthRecord {
	f.t.Helper()
	ctx, cancel := context.WithCancel(f.t.Context())
	stream, err := healthv1.NewHealthClient(f.dial(lab.FrontendHealth)).Watch(
		ctx, &healthv1.HealthCheckRequest{Service: service},
	)
	f.must(err)
	r := &healthRecord{f: f, service: service, changed: make(chan struct{})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			m, err := stream.Recv()
			if err != nil {
				return // the frontend or the test ends
			}
			r.mu.Lock()
			r.seen = append(r.seen, m.GetStatus())
			close(r.changed)
			r.changed = make(chan struct{})
			r.mu.Unlock()
		}
	}()
	f.t.Cleanup(func() { cancel(); <-done })
	return r
}

// wait waits for a status after the last one that it returned.
func (r *healthRecord) wait(want healthStatus) {
	r.f.t.Helper()
	timer := time.NewTimer(waitTimeout)
	defer timer.Stop()
	for {
		r.mu.Lock()
		changed := r.changed
		i := slices.Index(r.seen[r.waited:], want)
		if i >= 0 {
			r.waited += i + 1
		}
		seen := fmt.Sprint(r.seen)
		r.mu.Unlock()
		if i >= 0 {
			return
		}
		select {
		case <-changed:
		case <-timer.C:
			r.f.t.Fatalf("%s is not %s after %v: it was %s", r.service, want, waitTimeout, seen)
		}
	}
}

// wantOnly fails unless the service had one state since the last wait: a service of a pod that
// starts may follow its routes at the gateway by milliseconds.
func (r *healthRecord) wantOnly(want healthStatus) {
	r.f.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if seen := r.seen[max(r.waited-1, 0):]; !slices.Equal(seen, []healthStatus{want}) {
		r.f.t.Errorf("%s was %v, want only %v", r.service, seen, want)
	}
}

// A lost gateway session affects its family only (docs/architecture.md#failure-table). With BIRD's
// default timers sessions recover after minutes (docs/bird.md#gateway-sessions); here each of
// three consecutive losses recovers within seconds.
func TestGatewaySessionRecovery(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	f.waitGateway("gateway-a4", isUp)
	egress, other := f.recordHealth("Egress/ipv4"), f.recordHealth("Egress/ipv6")
	egress.wait(healthServing)
	other.wait(healthServing)
	mark, ipv6, want := f.mark(), f.sessions()["trench1"], []string{}
	for i := range 3 {
		lost := time.Now()
		f.control(`restart "trench0"`)
		egress.wait(healthNotServing)
		egress.wait(healthServing)
		want = append(want, withdrawn, announced)
		f.waitFor(func() error {
			if got := changes(f.updates(mark, vipA4)); !slices.Equal(got, want) {
				return fmt.Errorf("the gateway received for %s %v, want %v", vipA4, got, want)
			}
			return nil
		})
		t.Logf("loss %d: back after %v", i+1, time.Since(lost).Round(time.Millisecond))
	}
	f.wantNoUpdates(mark, vipA6)
	if now := f.sessions()["trench1"]; now != ipv6 {
		t.Errorf("the IPv6 session was %q and is %q", ipv6, now)
	}

	// A gateway that crashes sends no NOTIFICATION and loses its routes.
	lost := time.Now()
	f.must(f.gateway.Process.Kill())
	egress.wait(healthNotServing)
	other.wait(healthNotServing)
	f.wantHealth(lab.FrontendHealth, "Egress", healthNotServing)
	f.must(f.gateway.Start())
	f.wantRoutes(vipA4, vipA6)
	egress.wait(healthServing)
	other.wait(healthServing)
	f.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
	t.Logf("crash: back after %v", time.Since(lost).Round(time.Millisecond))
}

// Like TestGatewaySessionRecovery, for lost links.
func TestLinkRecovery(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.must(f.Gateway.Sysctl("net.ipv6.conf.trench0.keep_addr_on_down", "1"))
	f.regateway(func(c *lab.GatewayConfig) { c.HoldSeconds = 3 })
	f.up(f.target1)
	f.startPod()
	f.wantRoutes(vipA4, vipA6)
	bird := f.birdPID()
	records := []*healthRecord{
		f.recordHealth("Egress"), f.recordHealth("Egress/ipv4"), f.recordHealth("Egress/ipv6"), f.recordHealth("Readiness"),
	}
	for _, r := range records {
		r.wait(healthServing)
	}
	for i := range 3 {
		f.must(f.Gateway.IP("link", "set", "trench0", "down"))
		for _, r := range records {
			r.wait(healthNotServing)
		}
		f.wantRoutes()
		back := time.Now()
		f.must(f.Gateway.IP("link", "set", "trench0", "up"))
		f.wantRoutes(vipA4, vipA6)
		for _, r := range records {
			r.wait(healthServing)
		}
		t.Logf("loss %d: back %v after the link", i+1, time.Since(back).Round(time.Millisecond))
	}
	if now := f.birdPID(); now != bird {
		t.Errorf("BIRD is %d now, it was %d", now, bird)
	}
}

// BFD down is a lost gateway session (docs/architecture.md#failure-table).
func TestBFDDownLosesGateway(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	// The hold time is long, so that only BFD can detect the loss.
	f.regateway(func(c *lab.GatewayConfig) { c.BFD, c.BFDMultiplier = true, 8 })
	f.must(f.pod.WriteTrench(edited(t, lineA4, with("bfd: {minTx: 500ms, minRx: 500ms, multiplier: 8}", lineA4)[0])))
	f.up(f.target1)
	f.startPod()
	f.wantRoutes(vipA4, vipA6)
	up := f.waitGateway("gateway-a4", func(g *frontendv1.GatewayStatus) bool { return g.GetUp() && g.GetBfd() == "Up" })
	f.wantNoWildcard("-u")
	mark := f.mark()

	// Drop all IPv4 packets, in both directions, without an error.
	f.nft("add table inet lost; add chain inet lost in { type filter hook input priority 0; }; add rule inet lost in " +
		"meta nfproto ipv4 drop; " +
		"add chain inet lost out { type filter hook output priority 0; }; add rule inet lost out meta nfproto ipv4 drop")
	down := f.waitGateway("gateway-a4", isDown)
	if !strings.Contains(down.GetLastError(), "BFD") || down.GetSince().AsTime().Equal(up.GetSince().AsTime()) {
		t.Errorf("status: %v", down)
	}
	f.wantHealth(lab.FrontendHealth, "Egress/ipv4", healthNotServing)
	f.wantHealth(lab.FrontendHealth, "Egress/ipv6", healthServing)
	f.wantRoutes(vipA6)
	f.nft("delete table inet lost")
	f.wantRoutes(vipA4, vipA6)
	f.waitGateway("gateway-a4", func(g *frontendv1.GatewayStatus) bool { return g.GetUp() && g.GetBfd() == "Up" })
	f.wantUpdates(mark, vipA4, withdrawn, announced)
	f.wantNoUpdates(mark, vipA6)
}

// nft runs a command of nftables in the gateways' namespace.
func (f *fixture) nft(command string) {
	f.t.Helper()
	_, err := f.Gateway.Run(f.t.Context(), "nft", command)
	f.must(err)
}

// Row 4 of the gate (docs/architecture.md#the-gate): the loss of the family's last gateway
// withdraws its VIPs, the loss of one of several does not.
func TestLossOfOneGatewayOfTwo(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	b := f.second()
	f.must(f.pod.WriteTrench(edited(t, lineA6, lineA6+"\n    "+lineB4+"\n    "+lineB6)))
	f.up(f.target1)
	f.startPod("--ecmp")
	f.wantRoutes(vipA4, vipA6)
	f.wantRoutesAt(b, vipA4, vipA6)
	f.waitTable("-4", "via "+lab.GatewayA4.String(), "via "+lab.GatewayB4.String())
	f.waitTable("-6", "via "+lab.GatewayA6.String(), "via "+lab.GatewayB6.String())
	records := []*healthRecord{
		f.recordHealth("Egress"), f.recordHealth("Egress/ipv4"), f.recordHealth("Egress/ipv6"),
		f.recordHealth("vip/" + vipA4),
	}
	for _, r := range records {
		r.wait(healthServing)
	}
	mark, sessions := f.mark(), f.sessions()

	f.must(b.Process.Kill())
	for _, name := range []string{"gateway-b4", "gateway-b6"} {
		f.waitGateway(name, isDown)
	}
	// VIP traffic uses the remaining gateway.
	for family, gateway := range map[string]netip.Addr{"-4": lab.GatewayB4, "-6": lab.GatewayB6} {
		f.waitFor(func() error {
			if out := f.table(family); strings.Contains(out, "via "+gateway.String()) {
				return fmt.Errorf("the lost gateway is still in table 4096:\n%s", out)
			}
			return nil
		})
	}
	f.waitTable("-4", "default via "+lab.GatewayA4.String())
	f.waitTable("-6", "default via "+lab.GatewayA6.String())
	// The remaining gateway still receives changes.
	f.up(f.target2)
	f.wantRoutes(every()...)
	f.must(b.Start())
	f.wantRoutesAt(b, every()...)
	for _, name := range []string{"gateway-b4", "gateway-b6"} {
		f.waitGateway(name, isUp)
	}
	f.wantNoUpdates(mark, vipA4, vipA6)
	if now := f.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}
	for _, r := range records {
		r.wantOnly(healthServing)
	}
}

// De-preferred: GRACEFUL_SHUTDOWN and a worse path (docs/adr/0020-de-preference.md).
func TestDrainToEBGPAndIBGPGateways(t *testing.T) {
	t.Parallel()
	for name, as := range map[string]uint32{"eBGP": lab.GatewayAS, "iBGP": lab.PodAS} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.regateway(func(c *lab.GatewayConfig) { c.LocalAS = as })
			remote := fmt.Sprintf(", remoteASN: %d}", as)
			f.must(f.pod.WriteTrench(edited(t, lineA4, strings.TrimSuffix(lineA4, "}")+remote, lineA6,
				strings.TrimSuffix(lineA6, "}")+remote)))
			f.up(f.target1)
			f.startPod("--drain-time=10m")
			f.wantRoutes(vipA4, vipA6)
			us := strconv.Itoa(lab.PodAS)
			usual := func(r lab.Route) bool {
				if as == lab.PodAS {
					return len(r.ASPath) == 0 && r.LocalPref == "100" && !r.GracefulShutdown()
				}
				return slices.Equal(r.ASPath, []string{us}) && !r.GracefulShutdown()
			}
			worse := func(r lab.Route) bool {
				if as == lab.PodAS {
					return len(r.ASPath) == 0 && r.LocalPref == "0" && r.GracefulShutdown()
				}
				return slices.Equal(r.ASPath, []string{us, us, us, us}) && r.GracefulShutdown()
			}
			wait := func(what string, wanted func(lab.Route) bool) {
				t.Helper()
				f.waitFor(func() error {
					routes, err := f.gateway.Routes(t.Context())
					if err != nil {
						return err
					}
					for _, v := range []string{vipA4, vipA6} {
						if r, ok := routes[netip.MustParsePrefix(v)]; !ok || !wanted(r) {
							return fmt.Errorf("%s is not %s: %+v", v, what, r)
						}
					}
					return nil
				})
			}
			wait("as usual", usual)
			admin := "--admin-socket=unix://" + f.pod.FrontendAdmin()
			if out, status := f.run("frontend", "drain", "--all", "--force", admin); status != 0 {
				t.Fatalf("frontend drain ended with %d: %s", status, out)
			}
			wait("de-preferred", worse)
			if out, status := f.run("frontend", "undrain", admin); status != 0 {
				t.Fatalf("frontend undrain ended with %d: %s", status, out)
			}
			wait("as usual again", usual)
		})
	}
}

// A missing password takes its gateway down with a reason; it is never treated as empty
// (docs/bird.md#configuration).
func TestGatewayWithPassword(t *testing.T) {
	t.Parallel()
	const password = "correct horse #;'{}"
	f := newFixture(t)
	f.regateway(func(c *lab.GatewayConfig) { c.Password = password })
	key4, key6 := filepath.Join(f.Dir, "a4.key"), filepath.Join(f.Dir, "a6.key")
	write := func(path, text string) {
		t.Helper()
		f.must(os.WriteFile(path+".new", []byte(text), 0o600))
		f.must(os.Rename(path+".new", path))
	}
	write(key4, password+"\n")
	f.must(f.pod.WriteTrench(edited(t,
		lineA4, strings.TrimSuffix(lineA4, "}")+", passwordFile: "+key4+"}",
		lineA6, strings.TrimSuffix(lineA6, "}")+", passwordFile: "+key6+"}")))
	f.up(f.target1)
	f.startPod()

	// A valid password, then a missing one: the reason is reported, and no unsigned connection is
	// attempted.
	f.wantRoutes(vipA4)
	missing := f.waitGateway("gateway-a6", isDown)
	if want := "password file " + key6 + " does not exist"; !strings.Contains(missing.GetState(), want) {
		t.Errorf("status of the gateway without its password: %v, want %q", missing, want)
	}
	if listening, err := f.Pod.Run(t.Context(), "ss", "-Hltn"); err != nil ||
		strings.Contains(listening, lab.PodExternal6.String()) {
		t.Errorf("there is a session without its password: %v\n%s", err, listening)
	}
	mark := f.mark()

	// With a wrong password, each kernel rejects the packets of its peer.
	failures := f.md5Failures()
	write(key6, "wrong\n")
	f.waitFor(func() error {
		if now := f.md5Failures(); now <= failures {
			return fmt.Errorf("no packet with a wrong signature came")
		}
		return nil
	})
	f.waitGateway("gateway-a6", func(g *frontendv1.GatewayStatus) bool {
		return isDown(g) && strings.Contains(g.GetLastError(), "TCP-MD5: the passwords of both sides differ")
	})
	f.wantRoutes(vipA4)

	// Invalid passwords, then the valid one. BIRD's strings have no escape for a quote.
	write(key6, `quo"te`)
	f.waitGateway("gateway-a6", func(g *frontendv1.GatewayStatus) bool { return strings.Contains(g.GetState(), "quote") })
	write(key6, "two\nlines\n")
	f.waitGateway(
		"gateway-a6", func(g *frontendv1.GatewayStatus) bool {
			return strings.Contains(g.GetState(),
				"control character")
		},
	)
	write(key6, password)
	f.wantRoutes(vipA4, vipA6)
	f.waitGateway("gateway-a6", isUp)
	f.wantNoUpdates(mark, vipA4)
	for _, text := range []string{f.pod.Frontend.Output(), f.pod.LB.Output()} {
		if strings.Contains(text, password) {
			t.Error("the password is in a log")
		}
	}
}

// md5Failures counts the packets that the kernels of pod and gateways rejected for a wrong
// signature (TcpExtTCPMD5Failure of nstat(8)).
func (f *fixture) md5Failures() int {
	f.t.Helper()
	total := 0
	for _, ns := range []*lab.NetNS{f.Pod, f.Gateway} {
		out, err := ns.Run(f.t.Context(), "cat", "/proc/net/netstat")
		f.must(err)
		var names []string
		for line := range strings.Lines(out) {
			words := strings.Fields(line)
			if len(words) == 0 || words[0] != "TcpExt:" {
				continue
			}
			if names == nil {
				names = words
			} else if i := slices.Index(names, "TCPMD5Failure"); i > 0 && i < len(words) {
				n, err := strconv.Atoi(words[i])
				f.must(err)
				total += n
			}
		}
	}
	return total
}

// A gateway leaks routes: only its default route is imported, or as many routes as the limit.
func TestGatewayLeaksRoutes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.regateway(func(c *lab.GatewayConfig) {
		for i := range 50 {
			c.Routes = append(c.Routes, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 66, byte(i), 0}), 24))
		}
	})
	f.up(f.target1)
	f.startPod()
	f.wantRoutes(vipA4, vipA6)
	imported := func(count uint32) func(*frontendv1.GatewayStatus) bool {
		return func(g *frontendv1.GatewayStatus) bool { return g.GetImported() == count }
	}
	f.waitGateway("gateway-a4", imported(1))
	f.waitTable("-4", "default via "+lab.GatewayA4.String())
	f.wantHealth(lab.FrontendHealth, "Imports", healthServing)
	if out := f.table("-4"); strings.Contains(out, "10.66.") {
		t.Errorf("leaked routes are in table 4096:\n%s", out)
	}

	f.stop(f.pod.Frontend)
	f.must(f.pod.StartFrontend("--import-routes=all", "--import-limit=10"))
	f.wantRoutes(vipA4, vipA6)
	f.waitGateway("gateway-a4", imported(10))
	f.wantHealth(lab.FrontendHealth, "Imports", healthNotServing)
	f.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
	f.waitStatus("gateway gateway-a4: import limit reached with 10 routes")
	if n := strings.Count(f.table("-4"), " via "); n > 10 {
		t.Errorf("%d routes are in table 4096, more than the limit", n)
	}
}

// With --import-routes=all a gateway's routes are imported into table 4096, except prefixes that
// overlap a VIP: a reflected VIP must not win over the announced one (docs/bird.md#gateway-sessions).
func TestReflectedVIPIsIgnored(t *testing.T) {
	t.Parallel()
	const wide, narrow, beside = "20.0.1.0/24", "20.0.1.128/25", "20.0.0.0/16"
	f := newFixture(t)
	f.regateway(func(c *lab.GatewayConfig) {
		for _, p := range []string{vipA4, vipA6, wide, narrow, beside} {
			c.Routes = append(c.Routes, netip.MustParsePrefix(p))
		}
	})
	b := f.second()
	f.must(f.pod.WriteTrench(edited(t,
		lineA6, lineA6+"\n    "+lineB4+"\n    "+lineB6,
		fmt.Sprintf("vips: [%s, %q, %s, %q]", vipA4, vipA6, vipB4, vipB6), fmt.Sprintf(
			"vips: [%s, %q, %s, %q, %s]", vipA4, vipA6, vipB4, vipB6, wide,
		),
		fmt.Sprintf("vips: [%s, %q]\n", vipB4, vipB6), fmt.Sprintf("vips: [%s, %q, %s]\n", vipB4, vipB6, wide))))
	f.startPod("--import-routes=all")
	// First the gateway's routes arrive, except the routes for VIPs.
	f.waitTable("-4", "default via "+lab.GatewayA4.String(), beside+" via "+lab.GatewayA4.String())
	f.waitTable("-6", "default via "+lab.GatewayA6.String())
	none := func() {
		t.Helper()
		f.wantRoutesAt(b)
		for _, route := range []string{"20.0.0.1", "20.0.1.", "2000::1"} {
			for _, family := range []string{"-4", "-6"} {
				if out := f.table(family); strings.Contains(out, route) {
					t.Errorf("a reflected VIP is in table 4096:\n%s", out)
				}
			}
		}
	}
	none()
	f.up(f.target1, f.target2)
	f.wantRoutesAt(b, append(every(), wide)...)
	routes, err := b.Routes(t.Context())
	f.must(err)
	for _, r := range routes {
		if !slices.Equal(r.ASPath, []string{strconv.Itoa(lab.PodAS)}) ||
			(r.NextHop != lab.PodExternal4 && r.NextHop != lab.PodExternal6) {
			t.Errorf("the second gateway has a route that the pod did not send: %+v", r)
		}
	}
	// The routes of a withdrawn VIP are removed.
	f.down(f.target1)
	f.down(f.target2)
	none()
}
