package e2e

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

const kindsTrench = `trench: trench-a
attractor:
  name: attractor-a-1
  vips: [30.0.0.0/28, "3000::/124"]
  gateways:
    %s
    %s
streams:
`

// checkKinds are the checks of the test, each with its VIPs 30.0.0.N and 3000::N. A reason of both
// families has a bar in between.
var checkKinds = []struct{ name, check, refused, wrong string }{
	{
		"http", `http: {port: 80, method: POST, headers: ["X-Probe: 1"], path: /healthz, status: "200"}`,
		"connection refused", "status 503, wanted 200",
	},
	{
		"udp", `udp: {port: 5060, send: "hex:70696e67", expect: pong}`, "ICMP port unreachable from VIP",
		"does not contain pong: nope",
	},
	{
		"dns", `dns: {port: 53, name: www.example.org, recursion: true, answer: '^192\.0\.2\.1$'}`,
		"ICMP port unreachable from VIP", "rcode SERVFAIL, wanted NOERROR",
	},
	{
		"dns-tcp", `dns: {port: 53, name: www.example.org, recursion: true, transport: tcp}`, "connection refused",
		"rcode SERVFAIL, wanted NOERROR",
	},
	{"ntp", `ntp: {port: 123}`, "ICMP port unreachable from VIP", "unsynchronized (leap indicator 3), stratum 0"},
	// Of IPv4 and IPv6: protocol unreachable, unrecognized next header.
	{"sctp", `sctp: {port: 2905}`, "ICMP ", "chunk type 3, wanted INIT ACK|an answer with another verification tag"},
}

// kindsTarget is a target with servers of each kind.
type kindsTarget struct {
	viaVIPTarget
	dir       string
	processes []*lab.Process
	state     atomic.Value // of the servers in this process: "good", "wrong" or "hung"
}

// file writes a configuration file, and returns its path.
func (x *kindsTarget) file(name, format string, args ...any) string {
	x.t.Helper()
	path := filepath.Join(x.dir, name)
	x.must(os.WriteFile(path, []byte(fmt.Sprintf(format, args...)), 0o644))
	return path
}

func kindPort(n int) string {
	_, port, _ := strings.Cut(checkKinds[n].check, "port: ")
	return port[:strings.IndexAny(port, ",}")]
}

// start starts all servers. Wrong ones answer, and do not serve.
func (x *kindsTarget) start(state string) {
	x.t.Helper()
	x.state.Store(state)
	good := state == "good"
	text := func(ifGood, ifWrong string) string {
		if good {
			return ifGood
		}
		return ifWrong
	}
	nginx := x.file("nginx.conf", `daemon off; master_process off; pid %[1]s/nginx.pid; error_log stderr;
events {}
http { access_log off; keepalive_timeout 0;
server { listen 80; listen [::]:80;
  location /healthz {
    if ($request_method != POST) { return 405; }
    if ($http_x_probe != 1) { return 400; }
    return %[2]s;
  }
  location / { return 200; } } }
`, x.dir, text("200", "503"))
	unbound := x.file("unbound.conf", `server:
  do-daemonize: no
  chroot: ""
  username: ""
  directory: "%[1]s"
  pidfile: "%[1]s/unbound.pid"
  use-syslog: no
  module-config: "iterator"
  interface: 30.0.0.3
  interface: 3000::3
  interface: 30.0.0.4
  interface: 3000::4
  access-control: 0.0.0.0/0 allow
  access-control: ::/0 allow
%[2]s
remote-control:
  control-enable: no
forward-zone:
  name: "."
  forward-addr: 127.0.0.1@1
`, x.dir, text("  local-data: \"www.example.org. A 192.0.2.1\"", ""))
	chrony := x.file("chrony.conf", `port 123
cmdport 0
bindaddress 30.0.0.5
bindaddress 3000::5
allow all
pidfile %[1]s/chronyd.pid
%[2]s
`, x.dir, text("local stratum 5", ""))
	for _, command := range [][]string{
		{"nginx", "-p", x.dir, "-c", nginx},
		{"unbound", "-d", "-c", unbound},
		{"chronyd", "-d", "-x", "-u", "root", "-f", chrony},
	} {
		process, err := lab.StartProcess(x.ns, x.dir, command[0], command...)
		x.must(err)
		x.processes = append(x.processes, process)
	}
	for _, vip := range []string{"30.0.0.2", "3000::2"} {
		x.answer("udp", netip.AddrPortFrom(netip.MustParseAddr(vip), 5060).String(), func(request []byte, _ bool) []byte {
			answer := map[string]string{"good": "pong", "wrong": "nope"}[x.state.Load().(string)]
			if string(request) != "ping" || answer == "" {
				return nil
			}
			return []byte(answer)
		})
	}
	// Wrong answers of IPv4 have another chunk, those of IPv6 another tag.
	x.answer("ip4:132", "30.0.0.6", func(request []byte, wrong bool) []byte { return answerSCTP(request, wrong, false) })
	x.answer("ip6:132", "3000::6", func(request []byte, wrong bool) []byte { return answerSCTP(request, false, wrong) })
}

// answer serves packets in the target's namespace.
func (x *kindsTarget) answer(network, address string, answer func(request []byte, wrong bool) []byte) {
	x.t.Helper()
	var conn net.PacketConn
	x.must(x.ns.Do(func() (err error) {
		conn, err = net.ListenPacket(network, address)
		return err
	}))
	x.closes = append(x.closes, func() { _ = conn.Close() })
	x.wg.Go(func() {
		buffer := make([]byte, 2048)
		for {
			length, from, err := conn.ReadFrom(buffer)
			if err != nil {
				return
			}
			if reply := answer(buffer[:length], x.state.Load() == "wrong"); reply != nil && x.state.Load() != "hung" {
				_, _ = conn.WriteTo(reply, from)
			}
		}
	})
}

// answerSCTP answers INIT with INIT ACK, or wrong with SACK or another tag.
func answerSCTP(request []byte, wrongChunk, wrongTag bool) []byte {
	sum := append([]byte(nil), request...)
	clear(sum[8:12])
	if len(request) < 32 || request[12] != 1 || binary.BigEndian.Uint16(request[2:]) != 2905 ||
		crc32.Checksum(sum, crc32.MakeTable(crc32.Castagnoli)) != binary.LittleEndian.Uint32(request[8:]) {
		return nil // such as ABORT
	}
	reply := make([]byte, 32)
	copy(reply, []byte{request[2], request[3], request[0], request[1]})
	copy(reply[4:8], request[16:20])
	copy(reply[12:], []byte{2, 0, 0, 20, 0, 0, 0, 9, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1})
	if wrongChunk {
		reply = append(reply[:12], 3, 0, 0, 4)
	}
	if wrongTag {
		reply[7]++
	}
	binary.LittleEndian.PutUint32(reply[8:], crc32.Checksum(reply, crc32.MakeTable(crc32.Castagnoli)))
	return reply
}

// end ends all servers.
func (x *kindsTarget) end() {
	x.t.Helper()
	for _, process := range x.processes {
		x.must(process.Kill())
	}
	x.processes = nil
	x.stop()
}

// hang stops all servers without closing their sockets, or continues them.
func (x *kindsTarget) hang(signal syscall.Signal, state string) {
	x.t.Helper()
	x.state.Store(state)
	for _, process := range x.processes {
		x.must(process.Signal(signal))
	}
}

// newKindsFixture returns a pod without processes, and targets without servers.
func newKindsFixture(t *testing.T, targets int) (f *dataPlaneFixture, servers []*kindsTarget) {
	t.Helper()
	lab.Need(t, "nginx", "unbound", "chronyd")
	if lack := lab.MissingForTopology(); lack != "" {
		lab.Skip(t, lack)
	}
	topology, err := lab.NewTopology(lab.TopologyConfig{
		Pods: 1, Targets: targets, VIPs: []netip.Addr{netip.MustParseAddr("20.0.0.1")}, Binaries: binaries, Replies: lab.ECMP,
		Options: []lab.Option{lab.QuickDAD},
	})
	harness.Must(t, err)
	f = &dataPlaneFixture{t: t, Topology: topology, ctx: harness.Context(t, 4*waitTimeout), pod: topology.Pods[0]}
	t.Cleanup(func() {
		if t.Failed() && f.pod.LB != nil {
			t.Logf("== last lines of lb\n%s", f.pod.LB.Tail(60))
		}
		harness.Check(t, topology.Close())
	})
	for _, app := range topology.Targets {
		servers = append(servers, newKindsTarget(t, app))
	}
	return f, servers
}

func newKindsTarget(t *testing.T, app *lab.App) *kindsTarget {
	t.Helper()
	x := &kindsTarget{viaVIPTarget: viaVIPTarget{t: t, ns: app.NS}, dir: t.TempDir()}
	for n := range checkKinds {
		x.vips = append(x.vips, fmt.Sprintf("30.0.0.%d", n+1), fmt.Sprintf("3000::%d", n+1))
	}
	pod := lab.PodInternal(1)
	x.must(x.ns.Batch(
		fmt.Sprintf("route add default via %s table 300", pod[0]), fmt.Sprintf("route add default via %s table 300", pod[1]),
	))
	x.each("addr add VIP dev lo nodad")
	x.each("rule add from VIP lookup 300 priority 20")
	// The kernel limits ICMP errors to one per second and address.
	x.must(errors.Join(x.ns.Sysctl("net.ipv4.icmp_ratelimit", "0"), x.ns.Sysctl("net.ipv6.icmp.ratelimit", "0")))
	t.Cleanup(x.end)
	return x
}

// TestCheckKinds runs servers of each kind: healthy, ended, behind a firewall, with wrong answers,
// and hung. At last one of two hung web servers loses requests until its checks fail.
func TestCheckKinds(t *testing.T) {
	t.Parallel()
	f, servers := newKindsFixture(t, 2)
	x, second := servers[0], servers[1]
	trench := fmt.Sprintf(kindsTrench, lineA4, lineA6)
	for n, kind := range checkKinds {
		trench += fmt.Sprintf("  - name: %[1]s\n    vips: [30.0.0.%[2]d/32, \"3000::%[2]d/128\"]\n"+
			"    check: {%[3]s, %[4]s}\n"+
			"    targets:\n      - {name: target-1, ips: [%[5]s, \"%[6]s\"]}\n", kind.name, n+1, kind.check,
			lab.CheckTimers, lab.TargetAddrs(1)[0], lab.TargetAddrs(1)[1])
		if n == 0 {
			trench += fmt.Sprintf("      - {name: target-2, ips: [%s, \"%s\"]}\n", lab.TargetAddrs(2)[0], lab.TargetAddrs(2)[1])
		}
	}
	// The VIPs of streams are those of the attractor.
	trench = strings.Replace(trench, `[30.0.0.0/28, "3000::/124"]`, "["+strings.Join(x.prefixes(), ", ")+"]", 1)
	f.must(f.WriteTrench(trench))
	x.start("good")
	second.start("good")
	f.must(f.pod.StartLB("--dataplane=nftables"))

	// want waits until the checks of target-1 fail for these reasons; "": it is ready.
	want := func(step string, reason func(kind int) string) {
		t.Helper()
		var last string
		err := lab.Eventually(f.ctx, 10*time.Millisecond, func() (err error) {
			if last, err = f.lb("status"); err != nil {
				return err
			}
			for n, kind := range checkKinds {
				for family, vip := range []string{fmt.Sprintf("30.0.0.%d", n+1), fmt.Sprintf("3000::%d", n+1)} {
					reasons := strings.Split(reason(n), "|")
					text := strings.ReplaceAll(reasons[min(family, len(reasons)-1)], "VIP", vip)
					if !slices.ContainsFunc(strings.Split(last, "\n"), func(line string) bool {
						words := strings.Fields(line)
						return len(words) > 3 && words[0] == kind.name && words[1] == "target-1" &&
							words[2] == lab.TargetAddrs(1)[family].String() && strings.Contains(line, text) &&
							strings.Contains(line, "  not ready  ") == (text != "")
					}) {
						return fmt.Errorf("%s: %s has no row with %q", step, kind.name, text)
					}
				}
			}
			return nil
		})
		if err != nil {
			t.Fatalf("%v\n%s", err, last)
		}
		t.Logf("%s\n%s", step, last)
	}
	healthy := func(int) string { return "" }
	want("all is well", healthy)

	x.end()
	want("the servers have ended", func(n int) string {
		return "port " + kindPort(n) + ": " + checkKinds[n].refused
	})
	x.start("wrong")
	want("the servers answer wrong", func(n int) string { return checkKinds[n].wrong })
	x.end()
	x.start("good")
	want("the servers are back", healthy)

	x.ns.Shell(t, "nft add table inet silent; nft 'add chain inet silent in { type filter hook input priority 0; }'; "+
		"nft 'add rule inet silent in meta l4proto { udp, sctp } drop'; "+
		"nft 'add rule inet silent in tcp dport { 53, 80 } drop'")
	accepts := func(n int) string {
		return "VIP port " + kindPort(n) + ": no answer, although the target accepts packets to it; does the application hang"
	}
	want("a firewall drops the packets", func(n int) string {
		if strings.HasPrefix(checkKinds[n].check, "http") || strings.HasPrefix(checkKinds[n].check, "dns") {
			return "VIP port " + kindPort(n) + ": no answer, and none at"
		}
		return accepts(n)
	})
	x.ns.Shell(t, "nft delete table inet silent")
	want("no firewall", healthy)

	x.hang(syscall.SIGSTOP, "hung")
	want("the servers hang", func(n int) string {
		if name := checkKinds[n].name; name == "http" || name == "dns-tcp" {
			return "VIP port " + kindPort(n) + ": connected, but no answer in 500ms"
		}
		return accepts(n)
	})
	x.hang(syscall.SIGCONT, "good")
	want("the servers continue", healthy)
	wantShortLoss(f, x)
}

// prefixes returns the VIPs as prefixes.
func (x *kindsTarget) prefixes() (all []string) {
	for _, vip := range x.vips {
		address := netip.MustParseAddr(vip)
		all = append(all, `"`+netip.PrefixFrom(address, address.BitLen()).String()+`"`)
	}
	return all
}

// wantShortLoss hangs one of two web servers. Clients lose requests until its checks fail, and none
// after that.
func wantShortLoss(f *dataPlaneFixture, x *kindsTarget) {
	f.t.Helper()
	var err error
	f.gateway, err = f.StartGateway(f.GatewayConfig())
	f.must(err)
	f.must(f.pod.StartFrontend("--ecmp"))
	client := &http.Client{
		Timeout: 300 * time.Millisecond, Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, network, address string) (conn net.Conn, err error) {
				err = f.Gateway.Do(func() (err error) {
					var dialer net.Dialer
					conn, err = dialer.DialContext(ctx, network, address)
					return err
				})
				return conn, err
			},
		},
	}
	request := func() error {
		response, err := client.Get("http://30.0.0.1/")
		if err != nil {
			return err
		}
		return response.Body.Close()
	}
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, request))
	var wg sync.WaitGroup
	var mu sync.Mutex
	lost, answered := 0, 0
	hung := time.Now()
	x.hang(syscall.SIGSTOP, "hung")
	pace := time.NewTicker(20 * time.Millisecond)
	defer pace.Stop()
	ctx, cancel := context.WithCancel(f.ctx)
	defer cancel()
	wg.Go(func() {
		for ctx.Err() == nil {
			wg.Go(func() {
				err := request()
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					lost++
				} else {
					answered++
				}
			})
			<-pace.C
		}
	})
	// Until both outcomes were seen, and the checks have failed.
	f.must(lab.Eventually(f.ctx, 20*time.Millisecond, func() error {
		mu.Lock()
		seen := lost > 0 && answered > 0
		mu.Unlock()
		if !seen {
			return errors.New("no request was lost, or none answered")
		}
		out, err := f.lb("status")
		for line := range strings.Lines(out) {
			words := strings.Fields(line)
			if len(words) > 3 && words[0] == "http" && words[2] == lab.TargetAddrs(1)[0].String() &&
				strings.Contains(line, "  not ready  ") {
				return nil
			}
		}
		return errors.Join(err, errors.New("the hung server is ready"))
	}))
	f.waitOutput("confirmed   desired state", "status")
	f.t.Logf("the checks failed %v after the server hung", time.Since(hung))
	cancel()
	wg.Wait()
	f.t.Logf("%d requests were lost, %d answered", lost, answered)
	client.Timeout = waitTimeout
	for range 100 {
		if err := request(); err != nil {
			f.t.Errorf("a request was lost after the checks had failed: %v", err)
		}
		<-pace.C
	}
	x.hang(syscall.SIGCONT, "good")
}
