package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// poolTrench is a trench file with one stream of two targets for one VIP of each family.
func poolTrench() string {
	return strings.Replace(attractor(), fmt.Sprintf(`, %s, "%s"`, vipB4, vipB6), "", 1) + fmt.Sprintf(`streams:
  - name: stream-a
    vips: [%s, "%s"]
    check: {tcp: {port: %d}, interval: 1s, timeout: 200ms, rise: 2, fall: 2}
    targets:
      - {name: target-1, ips: [%s, "%s"]}
      - {name: target-2, ips: [%s, "%s"]}
`, vipA4, vipA6, checkPort, lab.Target1v4, lab.Target1v6, lab.Target2v4, lab.Target2v6)
}

// detectDuplicates sets an interface down and up again, so that duplicate address detection starts
// for its link-local address and for an added address.
func detectDuplicates(t *testing.T, ns *lab.NetNS, device, address string) {
	t.Helper()
	harness.Must(t, errors.Join(
		ns.Sysctl("net.ipv6.conf.all.accept_dad", "1"), ns.Sysctl("net.ipv6.conf."+device+".accept_dad", "1"),
		ns.Sysctl("net.ipv6.conf."+device+".dad_transmits", "1"),
		ns.Batch("link set "+device+" down", "link set "+device+" up", "addr add "+address+" dev "+device),
	))
}

// firstRise matches the numbers of ready targets and of all targets at the time when lb first
// reported a VIP as ready.
var firstRise = `VIP changed" vip=%s from=.+ to=ready .*ready_targets=(\d+) total_targets=(\d+)`

func waitFirstRise(t *testing.T, lb *lab.Process, vip string) (ready, total string) {
	t.Helper()
	pattern := regexp.MustCompile(fmt.Sprintf(firstRise, regexp.QuoteMeta(vip)))
	ctx := harness.Context(t, waitTimeout)
	harness.Must(t, lab.Eventually(ctx, 10*time.Millisecond, func() error {
		m := pattern.FindStringSubmatch(lb.Output())
		if m == nil {
			return fmt.Errorf("lb has not reported %s as ready", vip)
		}
		ready, total = m[1], m[2]
		return nil
	}))
	return ready, total
}

// wantFirstRise waits until a VIP is ready, and fails unless both of its targets were ready.
func wantFirstRise(t *testing.T, lb *lab.Process, vip string) {
	t.Helper()
	if ready, total := waitFirstRise(t, lb, vip); ready != "2" || total != "2" {
		t.Errorf("%s first rose with %s of %s targets", vip, ready, total)
	}
}

// A pod starts while its IPv6 addresses are tentative: checks that fail during that time have no
// result, so that the VIP rises with all of its targets.
func TestFirstRiseWaitsForDAD(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.must(f.pod.WriteTrench(poolTrench()))
	f.up(f.target1, f.target2)
	detectDuplicates(t, f.pod.Namespace(), lab.Internal, "fd00:16::1/64")
	f.startPod()
	for _, vip := range []string{vipA4, vipA6} {
		wantFirstRise(t, f.pod.LB, vip)
	}
	f.wantRoutes(vipA4, vipA6)
}

// While duplicate address detection runs on the interface to the targets, VIPs rise whose checks
// have a usable source address: IPv4 VIPs, and IPv6 VIPs if there is such an IPv6 address.
func TestFirstVIPDoesNotWaitForDAD(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, detection string
		routes          []string
	}{
		{"tentative link-local address", " nodad", []string{vipA4, vipA6}},
		{"tentative addresses", "", []string{vipA4}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := newFixtureWith(t)
			f.up(f.target1)
			pod := f.pod.Namespace()
			// The address is tentative until the test ends: detection sends 255 solicitations, a
			// second apart.
			f.must(pod.Sysctl("net.ipv6.conf."+lab.Internal+".dad_transmits", "255"))
			f.must(pod.Batch("link set "+lab.Internal+" down", "link set "+lab.Internal+" up",
				"addr add fd00:16::1/64 dev "+lab.Internal+c.detection))
			f.startPod()
			f.wantRoutes(c.routes...)
			if c.detection == "" { // a pod that serves IPv6 already must stay
				f.waitFrontend("Started", false, vipA6+" is not judged yet")
				f.wantHealth(lab.FrontendHealth, "Readiness", healthNotServing)
			}
			out, err := pod.Run(t.Context(), "ip", "-6", "addr", "show", "dev", lab.Internal, "tentative")
			if err != nil || !strings.Contains(out, "fe80::") {
				t.Errorf("the link-local address is not tentative: %v\n%s", err, out)
			}
		})
	}
}

// With a data plane a VIP rises once the kernel has all of its targets.
func TestFirstRiseWithDataPlane(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	// The check interval is long: targets that failed at the start return one by one.
	f.must(f.WriteTrench(strings.Replace(dataPlaneTrench(1, 2), lab.CheckTimers,
		"interval: 1s, timeout: 200ms, rise: 2, fall: 2", 1)))
	detectDuplicates(t, f.pod.Namespace(), lab.Internal, lab.PodInternal(1)[1].String()+"/64")
	f.start()
	for _, vip := range f.VIPs {
		wantFirstRise(t, f.pod.LB, netip.PrefixFrom(vip, vip.BitLen()).String())
	}
}

// The lb waits for a target with a late first check result before it installs any target.
func TestDataPlaneWaitsForLateTarget(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	f.must(f.WriteTrench(strings.Replace(dataPlaneTrench(1, 2), lab.CheckTimers,
		"interval: 1s, timeout: 300ms, rise: 1, fall: 9", 1)))
	// Two checks of each family time out, of 60 bytes (IPv4) and 80 bytes (IPv6).
	_, err := f.Targets[1].NS.Run(f.ctx, "nft", fmt.Sprintf("add table inet late;"+
		"add chain inet late in { type filter hook input priority 0; };"+
		"add rule inet late in meta nfproto ipv4 tcp dport %[1]d quota until 150 bytes drop;"+
		"add rule inet late in meta nfproto ipv6 tcp dport %[1]d quota until 200 bytes drop", lab.HealthPort))
	f.must(err)
	f.start()
	for _, vip := range f.VIPs {
		wantFirstRise(t, f.pod.LB, netip.PrefixFrom(vip, vip.BitLen()).String())
	}
	out, err := f.Targets[1].NS.Run(f.ctx, "nft", "list", "table", "inet", "late")
	f.must(err)
	if strings.Count(out, "used") != 2 {
		t.Errorf("not every family of target-2 was late:\n%s", out)
	}
}

// A stream that a reload adds rises like a stream at the start.
func TestNewStreamRisesWithAllTargets(t *testing.T) {
	t.Parallel()
	const silent = "fd00:16::1:99"
	f := newFixture(t)
	pool := poolTrench()
	f.must(f.pod.WriteTrench(pool[:strings.Index(pool, "streams:")]))
	f.up(f.target1, f.target2)
	f.must(f.pod.StartLB())
	f.waitLog(f.pod.LB, "readiness is synced")
	// Target 2 does not answer: its result takes fall checks, each of which times out.
	pool = strings.Replace(pool, lab.Target2v6.String(), silent, 1)
	f.must(f.pod.WriteTrench(pool))
	ready, total := waitFirstRise(t, f.pod.LB, vipA6)
	if ready != "1" || total != "2" {
		t.Errorf("%s first rose with %s of %s targets", vipA6, ready, total)
	}
	// Before that two checks time out.
	at := func(line string) time.Time {
		m := regexp.MustCompile(`time=(\S+) .*` + line).FindStringSubmatch(f.pod.LB.Output())
		if m == nil {
			t.Fatalf("lb has not logged %s", line)
		}
		when, err := time.Parse(time.RFC3339Nano, m[1])
		f.must(err)
		return when
	}
	if took := at(`VIP changed" vip=` + vipA6 +
		` .*to=ready`).Sub(at("new configuration in force")); took < 2*200*time.Millisecond {
		t.Errorf("%s rose after %v, before target-2 had a check result", vipA6, took)
	}
}

// IPv4 is advertised immediately, IPv6 only after its gateway's session: until then the pod is not
// ready, so that another pod that advertises both families is kept.
func TestReadyWaitsForEveryFamily(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	f.control("disable trench1")
	f.startPod()
	f.wantRoutes(vipA4, vipB4)
	f.wantHealth(lab.FrontendHealth, "Egress", healthServing)
	f.wantHealth(lab.FrontendHealth, "Readiness", healthNotServing)
	f.waitFrontend("Started", false, vipA6, "no_gateway: gateway-a6")
	f.control("enable trench1")
	f.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
	f.wantHealth(lab.FrontendHealth, "vip/"+vipA6, healthServing)
	f.wantRoutes(every()...)

	// Readiness waits for every family only at the start; a later loss concerns one family.
	f.control("disable trench1")
	f.wantRoutes(vipA4, vipB4)
	f.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
}

// The wait at the start is bounded, and the health detail lists the missing VIPs.
func TestReadyTimeout(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	f.control("disable trench1")
	f.startPod("--ready-timeout=1s")
	f.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
	f.waitLog(f.pod.Frontend, "ready after --ready-timeout")
	out, _ := f.run("frontend", "status", "--admin-socket=unix://"+f.pod.FrontendAdmin())
	if want := "VIP " + vipA6 + " is ready and not advertised"; !strings.Contains(out, "Ready, although") ||
		!strings.Contains(out, want) {
		t.Errorf("the status does not say %q:\n%s", want, out)
	}
}

// A pod that starts with an invalid ConfigMap waits for a valid one.
func TestRefusedFileAtStart(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	bad := strings.Replace(usualTrench(), "name: attractor-a-1", "nome: attractor-a-1", 1)
	f.must(f.pod.WriteTrench(bad))
	f.startPod("--ready-timeout=0s")
	where := f.pod.TrenchFile() + ":3: attractor.nome: unknown field"
	f.waitFrontend("Readiness", false, where)
	f.waitLB("Readiness", false, where)
	for program, addr := range map[string]string{"lb": lab.LBHealth, "frontend": lab.FrontendHealth} {
		if out, code := f.run(program, "healthcheck", "--health-address="+addr); code != 1 ||
			!strings.Contains(out, where) {
			t.Errorf("%s healthcheck: exit status %d, %q does not say %q", program, code, out, where)
		}
		out, code := f.run(program, "status",
			"--admin-socket=unix://"+map[string]string{
				"lb":       f.pod.LBAdmin(),
				"frontend": f.pod.FrontendAdmin(),
			}[program])
		if code != 0 || !strings.Contains(out, "NOT READY") || !strings.Contains(out, where) {
			t.Errorf("%s status: exit status %d, without %q:\n%s", program, code, where, out)
		}
	}
	f.waitLog(f.pod.LB, "running without VIPs")
	f.waitLog(f.pod.Frontend, "running without VIPs")
	f.wantRoutes()

	f.must(f.pod.WriteTrench(usualTrench()))
	f.wantRoutes(vipA4, vipA6)
	f.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
	f.wantHealth(lab.LBHealth, "Readiness", healthServing)
	f.wantRunning(f.pod.LB, f.pod.Frontend)

	// A container that restarts with an invalid file keeps the source routing of its VIPs: their
	// last answers must not leave by the primary network.
	f.must(f.pod.Frontend.Kill())
	f.must(f.pod.WriteTrench(bad))
	f.must(f.pod.StartFrontend())
	f.waitFrontend("SourceRouting", true)
	f.waitFrontend("Readiness", false, where)
	for _, set := range []string{"vip4", "vip6"} {
		if out, err := f.pod.Namespace().Run(t.Context(), "nft", "list", "set", "inet", "vipgate", set); err != nil ||
			!strings.Contains(out, "elements") {
			t.Errorf("%s lost its VIPs: %v\n%s", set, err, out)
		}
	}
}

// lb keeps its data plane, too: it forwards as long as the frontend advertises.
func TestRefusedFileKeepsDataPlane(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	f.start()
	before := f.kernel()
	f.must(f.pod.LB.Kill())
	f.must(f.pod.WriteTrench("trench: [\n"))
	f.must(f.pod.StartLB("--dataplane=nftables"))
	f.waitOutput("none is, and there are no VIPs", "status")
	if after := f.kernel(); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
	f.must(f.pod.WriteTrench(dataPlaneTrench(1, 2)))
	f.must(f.WantVia(f.ctx, 1))
	f.waitOutput("confirmed   desired state", "status")
	if after := f.kernel(); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
}

// A new pod has the addresses of an old one: the tables of neighbors without traffic from the pod
// are corrected as well, at the start and when an address appears later.
func TestOwnAddressesAreAnnounced(t *testing.T) {
	t.Parallel()
	const elsewhere = "02:00:00:00:00:99"
	f := newFixture(t)
	f.up(f.target1)
	outside, inside := lab.NewNetNS(t), lab.NewNetNS(t)
	internal6 := "fd00:16::1"
	neighbors := []struct {
		ns                 *lab.NetNS
		wire               *lab.NetNS
		device, own, known string
	}{
		{outside, f.Gateway, "trench0", "169.254.100.77/24", lab.PodExternal4.String()},
		{outside, f.Gateway, "trench0", "fd00:100::77/64", lab.PodExternal6.String()},
		{inside, f.Backend, "pod0", "172.16.0.77/16", "172.16.0.1"},
		{inside, f.Backend, "pod0", "fd00:16::77/64", internal6},
	}
	for i, n := range neighbors {
		if i%2 == 0 {
			f.must(n.wire.IP("link", "add", "link", n.device, "name", "near", "netns", n.ns.Name(), "type", "macvlan",
				"mode", "bridge"))
			f.must(n.ns.IP("link", "set", "near", "up"))
		}
		f.must(n.ns.Addr("near", n.own))
	}
	stale := func() {
		for _, n := range neighbors {
			f.must(n.ns.IP("neigh", "replace", n.known, "lladdr", elsewhere, "nud", "reachable", "dev", "near"))
		}
	}
	corrected := func() {
		t.Helper()
		for _, n := range neighbors {
			f.waitFor(func() error {
				out, err := n.ns.Run(t.Context(), "ip", "neigh", "show", n.known)
				if err == nil && strings.Contains(out, elsewhere) {
					err = fmt.Errorf("the neighbor entry is stale: %s", out)
				}
				return err
			})
		}
	}
	stale()
	f.startPod()
	corrected()

	pod := f.pod.Namespace()
	for device, address := range map[string]string{lab.External: lab.PodExternal6.String(), lab.Internal: internal6} {
		f.must(pod.IP("addr", "del", address+"/64", "dev", device))
	}
	stale()
	f.must(pod.Addr(lab.External, lab.PodExternal6.String()+"/64"))
	f.must(pod.Addr(lab.Internal, internal6+"/64"))
	for _, n := range []int{0, 2} { // IPv4 stayed
		f.must(neighbors[n].ns.IP("neigh", "del", neighbors[n].known, "dev", "near"))
	}
	corrected()
}
