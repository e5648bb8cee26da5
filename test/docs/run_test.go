package docs

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/meridio/nsp"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
)

// The VIPs of the pod, and the port of its target. docs/operations.md uses the same names and
// addresses.
const (
	vip4, vip6 = "20.0.0.1/32", "2000::1/128"
	checkPort  = 5000
)

var trenchFile = fmt.Sprintf(`trench: trench-a
attractor:
  name: attractor-a-1
  vips: [%s, "%s"]
  gateways:
    - {name: gateway-a-1, address: %s, %[8]s}
    - {name: gateway-a-2, address: "%[4]s", %[8]s}
streams:
  - name: stream-a-1
    vips: [%[1]s, "%[2]s"]
    check: {tcp: {port: %[5]d}, via: address, interval: 500ms, timeout: 500ms, rise: 1, fall: 10}
    match: [{protocols: [tcp], ports: [%[5]d]}]
    targets:
      - {name: target-1, ips: [%[6]s, "%[7]s"]}
`, vip4, vip6, lab.GatewayA4, lab.GatewayA6, checkPort, lab.Target1v4, lab.Target1v6, lab.HoldTime)

// reader runs the commands of a document in a shell in the pod.
type reader struct {
	pod   *lab.Pod
	at    *lab.NetNS        // where the commands run
	tools string            // the folder of the programs that scripts call by name
	paths *strings.Replacer // replaces the paths in the document by the paths of the pod
	env   []string
}

// newReader starts a pod with two VIPs that are advertised.
func newReader(t *testing.T) *reader {
	t.Helper()
	l, err := lab.New(lab.QuickDAD)
	harness.Must(t, err)
	p := &lab.Pod{Lab: l, Binaries: binaries}
	must := func(err error) {
		t.Helper()
		harness.Must(t, err)
	}
	var targets []*lab.Target
	t.Cleanup(func() {
		if t.Failed() && p.LB != nil && p.Frontend != nil {
			t.Logf("== last lines of lb\n%s\n== last lines of frontend\n%s", p.LB.Tail(40), p.Frontend.Tail(40))
		}
		for _, target := range targets {
			must(target.Down())
		}
		must(l.Close())
	})
	must(prepareForwarding(l))
	// Health checks connect to the target's own addresses, clients to the VIPs.
	for _, a := range []netip.Addr{lab.Target1v4, lab.Target1v6, address(vip4), address(vip6)} {
		target := lab.NewTarget(l.Backend, netip.AddrPortFrom(a, checkPort))
		must(target.Up())
		targets = append(targets, target)
	}
	must(p.WriteTrench(trenchFile))
	gateway, err := l.StartGateway(lab.GatewayA())
	must(err)
	must(p.StartLB("--source=file", "--source=registry", "--target-id="+lab.AppID, "--dataplane=nftables"))
	must(p.StartFrontend())
	ctx := harness.Context(t, waitTimeout)
	must(gateway.WantRoutes(ctx, vip4, vip6))

	r := &reader{pod: p, at: l.Pod, tools: filepath.Join(l.Dir, "tools")}
	must(os.Mkdir(r.tools, 0o700))
	must(r.wrap("lb", p.LBArgs()))
	must(r.wrap("frontend", p.FrontendArgs()))
	built, err := filepath.Abs(filepath.Join(root, "bin", "tools"))
	must(err)
	r.env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "PATH=") }),
		"PATH="+strings.Join(
			[]string{r.tools, built, filepath.Dir(lab.BIRD()), os.Getenv("PATH"), "/usr/sbin", "/sbin"}, ":",
		),
		"SVID="+filepath.Join(l.Dir, "operator"), "AUTHORITY="+p.Authority())
	r.paths = strings.NewReplacer(
		"/run/vipgate/frontend.sock", p.FrontendAdmin(),
		"/run/vipgate/lb.sock", p.LBAdmin(),
		"/var/lib/meridio/lb.sock", p.Socket(),
		"/var/run/bird/bird.ctl", p.BirdSocket(),
		"spiffe://vipgate.local/operator", lab.OperatorID,
		// The only target has the first fwmark.
		"5003", "5000", "0x138b", "0x1388",
	)
	r.connect(t)
	return r
}

// connect opens a connection to a VIP, which the commands about a packet's path need.
func (r *reader) connect(t *testing.T) {
	t.Helper()
	var conn net.Conn
	err := r.pod.Lab.Gateway.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", netip.AddrPortFrom(address(vip4), checkPort).String(), waitTimeout)
		return err
	})
	if err != nil {
		out, _ := r.do(t, "lb status; nft list ruleset; ip rule; ip route show table all")
		t.Fatalf("a client of the VIP: %v\n%s", err, out)
	}
	t.Cleanup(func() { conn.Close() })
}

// address returns the only address of a VIP.
func address(vip string) netip.Addr { return netip.MustParsePrefix(vip).Addr() }

// prepareForwarding sets the pod's sysctls as docs/dataplane.md requires, gives the target the
// VIPs and a reply route, and the gateway a route to the VIP.
func prepareForwarding(l *lab.Lab) error {
	return errors.Join(
		l.Pod.Sysctl("net.ipv4.conf.all.rp_filter", "0"),
		l.Pod.Sysctl("net.ipv4.fib_multipath_hash_policy", "1"),
		l.Pod.Sysctl("net.ipv6.fib_multipath_hash_policy", "1"),
		l.Backend.Addr("lo", vip4, vip6),
		l.Backend.IP("route", "add", "default", "via", "172.16.0.1", "table", "100"),
		l.Backend.IP("rule", "add", "from", address(vip4).String(), "lookup", "100", "priority", "100"),
		l.Backend.IP("-6", "route", "add", "default", "via", "fd00:16::1", "table", "100"),
		l.Backend.IP("-6", "rule", "add", "from", address(vip6).String(), "lookup", "100", "priority", "100"),
		l.Gateway.IP("route", "add", vip4, "via", lab.PodExternal4.String()),
	)
}

// wrap creates a wrapper of a program that sets the flags of a running one as variables, as the
// containers of the deployment do.
func (r *reader) wrap(name string, run []string) error {
	var script strings.Builder
	script.WriteString("#!/bin/sh\n")
	for _, arg := range run[2:] {
		flag, value, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		fmt.Fprintf(&script, "export VIPGATE_%s='%s'\n", strings.ToUpper(strings.ReplaceAll(flag, "-", "_")), value)
	}
	fmt.Fprintf(&script, "exec '%s' \"$@\"\n", run[0])
	return os.WriteFile(filepath.Join(r.tools, name), []byte(script.String()), 0o700)
}

// command is a script in the pod's network namespace, in a separate process group, with its
// output in the folder of the lab.
func (r *reader) command(ctx context.Context, script string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", r.paths.Replace(script))
	cmd.Env, cmd.Dir = r.env, r.pod.Lab.Dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = waitTimeout
	return cmd
}

// do runs a script to its end and returns its output.
func (r *reader) do(t *testing.T, script string) (string, error) {
	t.Helper()
	ctx := harness.Context(t, waitTimeout)
	cmd := r.command(ctx, script)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := r.at.Start(cmd); err != nil {
		return "", err
	}
	err := cmd.Wait()
	return out.String(), err
}

// remedies maps each program that a script can need, except frontend and lb, to the command that
// installs it.
var remedies = map[string]string{
	"birdc": "Debian: apt-get install bird2", "curl": "Debian: apt-get install curl", "grpcurl": "make tools",
	"ip": "Debian: apt-get install iproute2", "nft": "Debian: apt-get install nftables",
	"nstat": "Debian: apt-get install iproute2", "openssl": "Debian: apt-get install openssl",
	"ss": "Debian: apt-get install iproute2",
}

// toolPattern matches the names of the programs.
var toolPattern = regexp.MustCompile(`\b(birdc|curl|grpcurl|ip|nft|nstat|openssl|ss)\b`)

// need skips the test if the machine lacks a program that this block or an earlier block that it
// builds on needs.
func (r *reader) need(t *testing.T, b block) {
	t.Helper()
	tools := toolPattern.FindAllString(b.text, -1)
	if b.info == logOfLB {
		tools = append(tools, "grpcurl")
	}
	for _, tool := range tools {
		if _, err := r.do(t, "command -v "+tool); err != nil {
			lab.Skip(t, "missing: "+tool+" ("+remedies[tool]+")")
		}
	}
}

// settled waits until all VIPs are advertised: an earlier script may have withdrawn some for a
// moment.
func (r *reader) settled(t *testing.T) {
	t.Helper()
	ctx := harness.Context(t, waitTimeout)
	err := lab.Eventually(ctx, 10*time.Millisecond, func() error {
		out, err := r.do(t, "frontend status")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	harness.Must(t, err)
}

// scripts are the methods by which the test can run a block.
var scripts = map[string]func(*reader, *testing.T, string){
	"sh run-by-test":        (*reader).runs,
	"sh run-by-test=stream": (*reader).streams,
	"sh run-by-test=fails":  (*reader).fails,
	logOfLB:                 (*reader).logged,
}

// logOfLB is the info string of a block with lines that the log of lb must hold.
const logOfLB = "text log-of-lb"

func (r *reader) runs(t *testing.T, script string) {
	if out, err := r.do(t, script); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// streams runs each line until it has printed something and ends it. With SIGTERM: a shell that
// runs the tests in the background has them, and their children, ignore SIGINT.
func (r *reader) streams(t *testing.T, script string) {
	for text := range strings.Lines(script) {
		ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
		cmd := r.command(ctx, "exec "+text)
		out, err := cmd.StdoutPipe()
		harness.Must(t, err)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		harness.Must(t, r.at.Start(cmd))
		lines := bufio.NewScanner(out)
		n := 0
		for n < 5 && lines.Scan() {
			n++
		}
		// It fails only if the process has ended; the exit status is not checked.
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
		_ = cmd.Wait()
		cancel()
		if n < 5 {
			t.Errorf("%sonly %d lines\n%s", text, n, stderr.String())
		}
	}
}

// fails runs lines, each of which must fail.
func (r *reader) fails(t *testing.T, script string) {
	for text := range strings.Lines(script) {
		out, err := r.do(t, text)
		var exit *exec.ExitError
		// The shell uses 126 and more: the program was not run.
		if !errors.As(err, &exit) || exit.ExitCode() >= 126 {
			t.Errorf("%s%v, want a refusal\n%s", text, err, out)
		}
	}
}

// logged waits until the log of lb holds the documented lines.
func (r *reader) logged(t *testing.T, text string) {
	for want := range strings.Lines(text) {
		parts := strings.Split(strings.TrimSpace(r.paths.Replace(want)), "…")
		for i := range parts {
			parts[i] = regexp.QuoteMeta(parts[i])
		}
		pattern := regexp.MustCompile(strings.Join(parts, ".*"))
		ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
		err := lab.Eventually(ctx, 10*time.Millisecond, func() error {
			if !pattern.MatchString(r.pod.LB.Output()) {
				return fmt.Errorf("lb has not logged %s", pattern)
			}
			return nil
		})
		cancel()
		harness.Check(t, err)
	}
}

func TestOperationsCommandsRun(t *testing.T) {
	r := newReader(t)
	// The first aid uses the SVID of the reference, and shows the log lines of its denials.
	r.follow(t, reference(t), 10)
	r.follow(t, operations(t), 15)
	t.Run("health services", r.healthServicesAreDocumented)
}

func TestDataPlaneCommandsRun(t *testing.T) {
	newReader(t).follow(t, read(t, filepath.Join(root, "docs", "dataplane.md")), 8)
}

// TestTargetCommandsRun follows the document in the target's namespace, which `target` keeps.
func TestTargetCommandsRun(t *testing.T) {
	r := newReader(t)
	l, socket := r.pod.Lab, filepath.Join(r.pod.Lab.Dir, "target.sock")
	run := []string{
		filepath.Join(binaries, "target"), "run", "--pool=20.0.0.0/24,2000::/64", "--interface=pod0",
		"--admin-socket=unix://" + socket,
	}
	harness.Must(t, r.wrap("target", run))
	p, err := l.Start(l.Backend, "target", run...)
	harness.Must(t, err)
	r.at = l.Backend
	ctx := harness.Context(t, waitTimeout)
	if err := lab.Eventually(ctx, 10*time.Millisecond, func() error {
		_, err := r.do(t, "target status")
		return err
	}); err != nil {
		t.Fatalf("%v\n%s", err, p.Output())
	}
	r.connect(t)
	r.follow(t, read(t, filepath.Join(root, "docs", "targets.md")), 5)
}

// follow runs the marked blocks of a document, at least this number of them.
func (r *reader) follow(t *testing.T, d *document, least int) {
	ran := 0
	for _, b := range d.blocks {
		run, marked := scripts[b.info]
		if !marked {
			if strings.Contains(b.info, "run-by-test") || strings.Contains(b.info, "log-of") {
				t.Errorf("line %d: no method to run %q", b.line, b.info)
			}
			continue
		}
		ran++
		t.Run(fmt.Sprintf("line %d", b.line), func(t *testing.T) {
			r.need(t, b)
			r.settled(t)
			run(r, t, b.text)
		})
	}
	if ran < least {
		t.Errorf("only %d blocks are marked", ran)
	}
	r.settled(t) // an operator who follows the document leaves the pod as it was
}

// healthServicesAreDocumented compares the served health services with the documented ones. VIPs
// are not listed.
func (r *reader) healthServicesAreDocumented(t *testing.T) {
	for socket, above := range map[string]string{r.pod.FrontendAdmin(): frontendServices, r.pod.LBAdmin(): lbServices} {
		ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
		list, err := admin.Call(socket, func(conn *grpc.ClientConn) (*healthv1.HealthListResponse, error) {
			return healthv1.NewHealthClient(conn).List(ctx, &healthv1.HealthListRequest{})
		})
		cancel()
		harness.Must(t, err)
		documented := set(append(documentedServices(t, above), "")...)
		// Services of Meridio's pod are not served in this pod.
		for _, name := range []string{nsp.Condition, frontend.HealthSocket} {
			if _, served := list.GetStatuses()[name]; served {
				t.Errorf("health service %s is served without Meridio", name)
			}
			delete(documented, name)
		}
		for name := range list.GetStatuses() {
			if !documented[name] {
				t.Errorf("health service %q is served and not documented under %q", name, above)
			}
			delete(documented, name)
		}
		delete(documented, "vip/PREFIX")
		for name := range documented {
			t.Errorf("health service %q is documented under %q and not served", name, above)
		}
	}
}
