package e2e

import (
	"bytes"
	"cmp"
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

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// plantedCause is one cause of a dark VIP. The zero values of vip and status are vipA4 and 1.
type plantedCause struct {
	name   string
	plant  func()
	want   []string // parts of the explanation: the broken step with its cause, and the remedy
	repair func()
	vip    string
	isGood bool   // the VIP stays advertised
	again  func() // plants a cause that ended by itself
}

// explainFixture is a pod whose admin sockets are in one folder with their default names.
type explainFixture struct {
	*fixture
	plane  *dataPlaneFixture
	folder string
}

func newExplainFixture(t *testing.T) *explainFixture {
	t.Helper()
	plane := newDataPlaneFixture(t)
	plane.ctx = harness.Context(t, 20*waitTimeout) // 49 steps
	// A gateway that connects would end some of the causes.
	config := plane.GatewayConfig()
	config.Passive = true
	plane.must(plane.gateway.Process.Kill())
	var err error
	plane.gateway, err = plane.StartGateway(config)
	plane.must(err)
	f := &explainFixture{&fixture{t: t, Lab: plane.Lab, pod: plane.pod, gateway: plane.gateway}, plane, t.TempDir()}
	f.must(os.Symlink(f.pod.FrontendAdmin(), filepath.Join(f.folder, "frontend.sock")))
	f.must(os.Symlink(f.pod.LBAdmin(), filepath.Join(f.folder, "lb.sock")))
	return f
}

// explain returns the explanation of a VIP and the exit status.
func (f *explainFixture) explain(vip string) (string, int) {
	f.t.Helper()
	return f.run("frontend", "explain", vip, "--admin-socket="+filepath.Join(f.folder, "frontend.sock"))
}

// wantExplained waits until the explanation has an exit status and parts.
func (f *explainFixture) wantExplained(status int, vip string, parts ...string) {
	f.t.Helper()
	f.waitFor(func() error { return f.explained(status, vip, parts...) })
}

func (f *explainFixture) explained(status int, vip string, parts ...string) error {
	out, got := f.explain(vip)
	line := strings.Join(strings.Fields(out), " ") // the columns depend on the longest cell
	for _, part := range append(parts, "") {
		if got != status || !strings.Contains(line, part) {
			return fmt.Errorf("exit status %d, want %d and %q:\n%s", got, status, part, out)
		}
	}
	return nil
}

// trenchWith returns a plant that edits the trench file by pairs of old and new texts.
func (f *explainFixture) trenchWith(pairs ...string) func() {
	return func() {
		f.t.Helper()
		text := dataPlaneTrench(1)
		for i := 0; i < len(pairs); i += 2 {
			if strings.Count(text, pairs[i]) != 1 {
				f.t.Fatalf("%q is not once in the trench file:\n%s", pairs[i], text)
			}
			text = strings.Replace(text, pairs[i], pairs[i+1], 1)
		}
		f.must(f.pod.WriteTrench("maxRemoval: 100\n" + text))
	}
}

func (f *explainFixture) shell(line string) func() {
	return func() { f.t.Helper(); f.podShell(line) }
}

// plantAll plants each cause and repairs it in the same pod.
func (f *explainFixture) plantAll(causes []plantedCause) {
	f.t.Helper()
	for _, cause := range causes {
		began, vip, status := time.Now(), cmp.Or(cause.vip, vipA4), 1
		if cause.isGood {
			status = 0
		}
		cause.plant()
		f.waitFor(func() error {
			err := f.explained(status, vip, cause.want...)
			if err != nil && cause.again != nil {
				cause.again()
			}
			return err
		})
		if vip != vipA6 {
			vip = vipA4 // the planted VIP may not be in the usual file
		}
		cause.repair()
		f.wantExplained(0, vip, "and receives the VIP")
		f.t.Logf("%s: %v", cause.name, time.Since(began).Round(time.Millisecond))
	}
}

// `frontend explain` names the cause and a remedy that can be typed for each of 49 planted causes,
// in
// a pod with a real lb, frontend, BIRD, kernel, `target run` and gateway.
func TestExplain(t *testing.T) {
	t.Parallel()
	f := newExplainFixture(t)
	f.usual()
	f.startLB()()
	f.startFrontend()()
	for _, v := range []string{vipA4, vipA6} {
		f.wantExplained(0, v, "ok gate advertised since", "next hop ", ", AS path 8103)")
	}
	f.wantExplained(2, "20.0.0.1/24", "host bits")
	f.plantAll(f.edits())
	f.plantAll(f.sessions())
	f.plantAll(f.operators())
	f.plantAll(f.kernel())
	f.plantAll(f.processes())
}

func (f *explainFixture) usual() { f.trenchWith()() }

func (f *explainFixture) startLB(flags ...string) func() {
	return func() {
		f.t.Helper()
		f.must(f.pod.StartLB(append([]string{noDrain, "--dataplane=nftables"}, flags...)...))
	}
}

func (f *explainFixture) startFrontend(flags ...string) func() {
	return func() {
		f.t.Helper()
		f.must(f.pod.StartFrontend(append([]string{noDrain, shortSettle, "--flap-backoff=off"}, flags...)...))
	}
}

func inOrder(steps ...func()) func() {
	return func() {
		for _, step := range steps {
			step()
		}
	}
}

// edits are mistakes in the trench file.
func (f *explainFixture) edits() []plantedCause {
	const vips, target = "    vips: [20.0.0.1/32, ", `{name: target-1, ips: [172.16.1.1, "fd00:16::1:1"]`
	attractor := "  vips: [20.0.0.1/32, \"2000::1/128\"]\n  gateways"
	return []plantedCause{
		{
			name: "VIP in no stream", plant: f.trenchWith(vips, "    vips: ["),
			want: []string{"NO stream no stream has the VIP next: add it to the vips of a stream"}, repair: f.usual,
		},
		{
			name:   "VIP not in the attractor",
			plant:  f.trenchWith(attractor, strings.Replace(attractor, "20.0.0.1/32, ", "", 1), vips, "    vips: ["),
			want:   []string{"NO trench file of frontend The VIP is not among", "next: add it to attractor.vips"},
			repair: f.usual,
		},
		{
			name: "refused trench file", vip: "20.0.0.3/32",
			plant: f.trenchWith(attractor, strings.Replace(attractor, "[", "[20.0.0.3/24, ", 1)),
			want: []string{
				"the file on disk is refused",
				"VIP 20.0.0.3/24 has host bits set; use 20.0.0.0/24, or 20.0.0.3/32",
				"next: correct the file: `lb validate FILE`",
			}, repair: f.usual,
		},
		{
			name: "unknown VIP", vip: "20.0.0.99/32", plant: func() {},
			want:   []string{"NO trench file of lb", "next: add it to attractor.vips and to the vips of a stream"},
			repair: f.usual,
		},
		{
			name: "minReady too high", plant: f.trenchWith("    check:", "    minReady: 2\n    check:"),
			want:   []string{"1 of 1 ready, needs 2", "next: add targets to stream-a, or lower its minReady to 1"},
			repair: f.usual,
		},
		{
			name: "wrong check port", plant: f.trenchWith("port: 5000", "port: 5001"),
			want:   []string{"port 5001: connection refused", "next: start the application", "correct the port of the check"},
			repair: f.usual,
		},
		{
			name: "HTTP check of a TCP service", plant: f.trenchWith("tcp: {port", "http: {port"),
			want: []string{"target-1 at 172.16.1.1 is", "does the check fit the application"}, repair: f.usual,
		},
		{
			name: "terminating target", plant: f.trenchWith("drainTime: 4s", "drainTime: 1h", target,
				target+", terminating: true"),
			want:   []string{"is draining: ", "next: list the target again in the stream, without terminating"},
			repair: f.usual,
		},
		{
			name: "stream without targets", plant: f.trenchWith("      - "+target+"}\n", "      []\n"),
			want: []string{"no longer in the trench file", "next: list the target again"}, repair: f.usual,
		},
		{
			name: "wrong target address", plant: f.trenchWith("172.16.1.1", "172.16.9.9"),
			want:   []string{"target-1 at 172.16.9.9 is not ready", "next: correct the address in ips; `ping` it"},
			repair: f.usual,
		},
		{
			name: "target on no connected network", plant: f.trenchWith("172.16.1.1", "10.9.9.9"),
			want: []string{
				"10.9.9.9 is on no connected network",
				"next: it is retried; check that the target is on a connected",
			},
			repair: f.usual,
		},
		{
			name: "targets of the other family only", plant: f.trenchWith("172.16.1.1, ", ""),
			want: []string{"0 of 0 ready", "next: add an ipv4 address to ips of its targets"}, repair: f.usual,
		},
	}
}

// gatewayWith edits the gateway of IPv4. A session with other parameters waits for its turn.
func (f *explainFixture) gatewayWith(more string) func() {
	return f.applied(f.trenchWith(lineA4, with(more, lineA4)[0]))
}

// applied edits the file, and ends the wait of the session, unless its turn has come meanwhile.
func (f *explainFixture) applied(edit func()) func() {
	return func() {
		f.t.Helper()
		before, err := os.ReadFile(f.birdConf())
		f.must(err)
		edit()
		f.waitFor(func() error {
			for _, gateway := range f.frontendStatus().GetGateways() {
				if strings.HasPrefix(gateway.GetChange(), "change pending") {
					f.operate(0, "applied now", "apply-now")
					return nil
				}
			}
			now, err := os.ReadFile(f.birdConf())
			if err == nil && bytes.Equal(before, now) {
				err = errors.New("no change is pending, or was applied")
			}
			return err
		})
	}
}

// sessions are causes at the gateways.
func (f *explainFixture) sessions() []plantedCause {
	hold := 9 // seconds
	change := func() { f.trenchWith(lineA4, with(fmt.Sprintf("holdTime: %ds", hold), lineA4)[0])() }
	inspect := "`birdc \"show protocols all 'NBR-gateway-a4'\"`"
	return []plantedCause{
		{
			name: "remote AS", plant: f.gatewayWith("remoteASN: 64999"),
			want: []string{
				"Bad peer AS", "the gateway has another AS number than remoteASN 64999",
				"next: correct remoteASN or localASN of the gateway", inspect,
			}, repair: f.usual,
		},
		{
			name: "local AS", plant: f.gatewayWith("localASN: 64998"),
			want:   []string{"Bad peer AS: 64998", "next: correct remoteASN or localASN of the gateway"},
			repair: f.usual,
		},
		{
			name: "port", plant: f.gatewayWith("remotePort: 10180"),
			want: []string{"Connection refused", "next: start BGP at the router", "or correct remotePort"}, repair: f.usual,
		},
		{
			name: "address", plant: f.applied(f.trenchWith(lab.GatewayA4.String(), "169.254.100.99")),
			want:   []string{"NO gateway gateway-a4 is down", "next: `ping 169.254.100.99` from here"},
			repair: f.usual,
		},
		{
			name: "gateways of the other family only", plant: f.trenchWith("    "+lineA4+"\n", ""),
			want:   []string{"no gateway of the VIP's family is configured next: add one with an ipv4 address"},
			repair: f.usual,
		},
		{
			name: "missing password", plant: f.trenchWith(lineA4, strings.TrimSuffix(lineA4,
				"}")+", passwordFile: /nonexistent.key}"),
			want: []string{"password file /nonexistent.key does not exist next: create the file"}, repair: f.usual,
		},
		{
			name: "password of one side", plant: f.applied(func() {
				key := f.path("gateway.key")
				f.must(os.WriteFile(key, []byte("secret\n"), 0o600))
				f.trenchWith(lineA4, strings.TrimSuffix(lineA4, "}")+", passwordFile: "+key+"}")()
			}),
			want:   []string{"it does not answer next: `ping 169.254.100.150` from here; correct its address, VLAN or password"},
			repair: f.usual,
		},
		{
			name:  "gateway without a hold time",
			plant: func() { f.regateway(func(c *lab.GatewayConfig) { c.HoldSeconds = -1 }) },
			want: []string{
				"NO gateway gateway-a4 is down", "hold time",
				"next: give the router a hold time of at least 3 s",
			},
			repair: func() { f.regateway(func(c *lab.GatewayConfig) { c.HoldSeconds = 0 }) },
		},
		{
			name: "static gateway without BFD", plant: f.applied(f.trenchWith(lineA4, staticA4)),
			want: []string{
				"NO gateway gateway-a4 is down",
				"it does not answer next: configure BFD to this pod at the gateway",
			},
			repair: f.applied(f.usual),
		},
		{
			name: "change waits for its turn", isGood: true, plant: change,
			want: []string{"ok gateway gateway-a4 is up", "change pending: hold time"}, repair: f.usual,
			again: func() {
				conf, err := os.ReadFile(f.birdConf())
				f.must(err)
				// The pod's turn is 1 s of 2 min, at any time: the next change waits for the next one.
				if strings.Contains(string(conf), fmt.Sprintf("hold time %d;", hold)) {
					hold++
					change()
				}
			},
		},
		{
			name: "dead gateway", plant: func() { f.must(f.gateway.Process.Kill()) },
			want: []string{"NO gateway gateway-a4 is down", "next: ", inspect}, repair: func() { f.must(f.gateway.Start()) },
		},
		{name: "routes beyond the import limit", isGood: true, plant: func() {
			f.must(f.pod.Frontend.Kill())
			f.regateway(func(c *lab.GatewayConfig) {
				c.Routes = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("198.51.100.0/24")}
			})
			f.startFrontend("--import-routes=all", "--import-limit=1")()
		}, want: []string{"!! gateway gateway-a4 is up", "or raise --import-limit"}, repair: func() {
			f.must(f.pod.Frontend.Kill())
			f.regateway(func(c *lab.GatewayConfig) { c.Routes = nil })
			f.startFrontend()()
		}},
		{
			name: "session disabled in BIRD", plant: f.birdc("disable 'NBR-gateway-a4'"),
			want:   []string{"disabled in BIRD next: `birdc \"enable 'NBR-gateway-a4'\"`"},
			repair: f.birdc("enable 'NBR-gateway-a4'"),
		},
		{
			name: "no route back", plant: func() { f.gatewayDefaults("disable") },
			want:   []string{"NO RouteBack/ipv4 no gateway gives a route back", "next: have one send a default route"},
			repair: func() { f.gatewayDefaults("enable") },
		},
	}
}

func (f *explainFixture) birdc(command string) func() {
	birdc := filepath.Join(filepath.Dir(lab.BIRD()), "birdc")
	return f.shell(fmt.Sprintf("%s -s %s \"%s\"", birdc, f.pod.BirdSocket(), command))
}

// operators are orders of operators, and failures of the target.
func (f *explainFixture) operators() []plantedCause {
	operate := func(args ...string) func() { return func() { f.t.Helper(); f.operate(0, "", args...) } }
	target := f.plane.Targets[0]
	return []plantedCause{
		{
			name: "drained gateway", plant: operate("drain", "--force", "--gateway=gateway-a4"),
			want:   []string{"drained by an operator next: `frontend undrain --gateway=gateway-a4`"},
			repair: operate("undrain", "--gateway=gateway-a4"),
		},
		{
			name: "drained VIP", plant: operate("drain", "--force", vipA4),
			want: []string{"NO gate", "An operator asked", "`frontend undrain` ends the drain"}, repair: operate("undrain",
				vipA4),
		},
		{
			name: "drained target", plant: f.lbDo("target", "drain", "target-1"),
			want:   []string{"by an operator next: `lb target undrain target-1 --stream=stream-a`"},
			repair: f.lbDo("target", "undrain", "target-1"),
		},
		{
			name: "application down", plant: func() { f.must(target.Unhealthy()) },
			want:   []string{"the application does not listen on 20.0.0.1 next: start the application"},
			repair: func() { f.must(target.Start()) },
		},
		{
			name: "no target run", plant: func() {
				f.must(target.Sidecar.Kill())
				_, err := target.NS.Run(f.t.Context(), binaries+"/target", "cleanup")
				f.must(err)
			}, want: []string{`no "target run" runs there next: ` + "`target run` with --pool and --interface"},
			repair: func() {
				_, err := f.Start(target.NS, "target-again", target.Sidecar.Args...)
				f.must(err)
			},
		},
	}
}

func (f *explainFixture) lbDo(args ...string) func() {
	return func() {
		f.t.Helper()
		_, err := f.plane.lb(args...)
		f.must(err)
	}
}

// kernel are changes of the pod's kernel state.
func (f *explainFixture) kernel() []plantedCause {
	return []plantedCause{
		{
			name: "rp_filter", plant: f.shell("sysctl -w net.ipv4.conf.all.rp_filter=1"),
			want:   []string{"NO SourceRouting/ipv4 strict reverse path filtering", "next: run sysctl -w net.ipv4.conf"},
			repair: f.shell("sysctl -w net.ipv4.conf.all.rp_filter=0"),
		},
		{
			name: "IPv4 forwarding", plant: f.shell("sysctl -w net.ipv4.ip_forward=0"),
			want:   []string{"NO data plane net.ipv4.ip_forward", "next: sysctl -w net.ipv4.ip_forward=1"},
			repair: f.shell("sysctl -w net.ipv4.ip_forward=1"),
		},
		{
			name: "IPv6 forwarding", vip: vipA6, plant: f.shell("sysctl -w net.ipv6.conf.all.forwarding=0"),
			want:   []string{"NO data plane net.ipv6.conf.all.forwarding", "next: sysctl -w net.ipv6.conf.all.forwarding=1"},
			repair: f.shell("sysctl -w net.ipv6.conf.all.forwarding=1"),
		},
		{
			name: "local address", plant: f.shell("ip addr add 20.0.0.1/32 dev lo"),
			want: []string{
				"NO data plane VIP 20.0.0.1/32: 20.0.0.1 is an address of this network namespace",
				"next: ip address del 20.0.0.1/32 dev",
			}, repair: f.shell("ip addr del 20.0.0.1/32 dev lo"),
		},
		{
			name: "diverted replies", plant: f.shell("ip route add default via 172.16.1.1 dev int0 table 4096 metric 1"),
			want: []string{
				"NO SourceRouting/ipv4",
				"next: remove the ipv4 route to 0.0.0.0/0 via 172.16.1.1 metric 1 table 4096",
			},
			repair: f.shell("ip route del default table 4096 metric 1"),
		},
		{
			name: "rule deleted under a hold", plant: inOrder(f.lbDo("hold"), f.shell("ip rule del prio 92")),
			want:   []string{"NO data plane another process changed policy rules", "next: `lb reconcile`, or `lb resume`"},
			repair: f.lbDo("resume"),
		},
		{
			name: "table deleted under a hold", plant: inOrder(f.lbDo("hold"), f.shell("nft delete table inet vipgate-lb")),
			want: []string{
				"another process changed table inet vipgate-lb: the table is missing",
				"`lb resume` under a hold",
			},
			repair: f.lbDo("resume"),
		},
		{
			name: "link toward the gateways down", plant: f.shell("ip link set ext-vlan down"),
			want:   []string{"NO gateway gateway-a4 is down", "`ip -br link`"},
			repair: f.shell("ip link set ext-vlan up; ip -6 addr replace fd00:100::1/64 dev ext-vlan nodad"),
		},
		{
			name: "link toward the targets down", plant: f.shell("ip link set int0 down"),
			want:   []string{"link int0 is down", "NO readiness"},
			repair: f.shell("ip link set int0 up; ip -6 addr replace fd00:16::1/64 dev int0 nodad"),
		},
	}
}

// processes are processes that do not run, hang, or run with other flags.
func (f *explainFixture) processes() []plantedCause {
	killLB := func() { f.t.Helper(); f.must(f.pod.LB.Kill()) }
	killFrontend := func() { f.t.Helper(); f.must(f.pod.Frontend.Kill()) }
	signalLB := func(s syscall.Signal) func() { return func() { f.t.Helper(); f.must(f.pod.LB.Signal(s)) } }
	// other starts a program that authorizes another SPIFFE ID.
	other := func(program, flag string, args []string) func() {
		return func() {
			f.t.Helper()
			args := slices.DeleteFunc(args, func(a string) bool { return strings.HasPrefix(a, flag) })
			p, err := f.Start(f.Pod, program, append(args, flag+"spiffe://vipgate.demo/other")...)
			f.must(err)
			*map[string]**lab.Process{"lb": &f.pod.LB, "frontend": &f.pod.Frontend}[program] = p
		}
	}
	follows := func() { f.t.Helper(); f.wantExplained(0, vipA4, "and receives the VIP") }
	const lost, never = "next: does the lb container run, and what does it log?", "next: the load balancer's line"
	return []plantedCause{
		{
			name: "lb killed", plant: killLB,
			want: []string{"NO lease", lost, "lb was not asked", "connection refused", "`lb explain"}, repair: f.startLB(),
		},
		{
			name: "lb hangs", plant: inOrder(killLB, f.startLB("--lease=1s"), follows, signalLB(syscall.SIGSTOP)),
			want:   []string{"NO lease STALE", lost, "it did not answer within 2s: it hangs, or has no CPU"},
			repair: signalLB(syscall.SIGCONT),
		},
		{
			name: "BIRD hangs", plant: inOrder(killFrontend, f.startFrontend(lab.BIRDTimer), follows,
				func() { f.must(syscall.Kill(f.birdPID(), syscall.SIGSTOP)) }),
			want: []string{"NO BIRD", "BIRD_HUNG", "next: BIRD's lines in the frontend's log"}, repair: func() {},
		},
		{
			name:  "lb does not accept the frontend",
			plant: inOrder(killLB, other("lb", "--frontend-id=", f.pod.LBArgs(noDrain, "--dataplane=nftables"))),
			want:  []string{"NO lease", "last error: ", "--frontend-id", lost}, repair: inOrder(killLB, f.startLB()),
		},
		{
			name: "wrong lb-id", plant: inOrder(killFrontend, other("frontend", "--lb-id=", f.pod.FrontendArgs(noDrain,
				shortSettle))),
			want: []string{"NO lease", "spiffe://vipgate.demo/other", never}, repair: inOrder(killFrontend,
				f.startFrontend()),
		},
		{
			name: "wrong trust domain", plant: inOrder(killFrontend,
				f.startFrontend("--spiffe-id=spiffe://elsewhere/frontend")),
			want: []string{"NO lease never seen", "last error: ", never}, repair: inOrder(killFrontend, f.startFrontend()),
		},
		{
			name: "socket not mounted", plant: inOrder(killFrontend,
				f.startFrontend("--lb-socket=unix:///nonexistent/lb.sock")),
			want: []string{
				"NO lease never seen", "the readiness socket /nonexistent/lb.sock does not exist",
				"--lb-socket of frontend",
				never,
			}, repair: inOrder(killFrontend, f.startFrontend()),
		},
		{
			name: "no readiness file", plant: inOrder(killLB, killFrontend, f.makeReadinessDir, func() {
				f.startDirectoryFrontend(noDrain)
			}),
			want: []string{
				"NO readiness not ready", "lb-ready-stream-a",
				"next: the directory, and the process that writes it",
			},
			repair: inOrder(killFrontend, f.startLB(), f.startFrontend()),
		},
		{
			name: "frontend down", plant: killFrontend,
			want:   []string{"frontend: the process does not answer on its admin socket"},
			repair: f.startFrontend(),
		},
	}
}
