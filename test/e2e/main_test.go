package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// binaries is the folder of all programs.
var binaries string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Getenv(withoutMD5) != "" {
		fmt.Fprintln(os.Stderr, executeWithoutMD5())
		return 1
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the end-to-end tests need root for network namespaces: run as root")
		return 1
	}
	var err error
	if binaries, err = lab.Programs(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// waitTimeout bounds every wait for a required event: it is a liveness bound, far above the
// expected time.
const waitTimeout = 30 * time.Second

// fixture is one lab with a pod, two targets and a gateway.
type fixture struct {
	t *testing.T
	*lab.Lab
	pod     *lab.Pod
	gateway *lab.Gateway
	target1 []*lab.Target // one for each family
	target2 []*lab.Target

	sessionTimes map[string]time.Time
}

// The usual VIPs: target 1 serves the first two, target 2 the last two.
const (
	vipA4, vipA6 = "20.0.0.1/32", "2000::1/128"
	vipB4, vipB6 = "20.0.0.2/32", "2000::2/128"
)

const checkPort = 5000

// attractor is the head of the usual trench file, up to the streams.
func attractor() string {
	return fmt.Sprintf(`trench: trench-a
attractor:
  name: attractor-a-1
  vips: [%s, "%s", %s, "%s"]
  gateways:
    %s
    %s
`, vipA4, vipA6, vipB4, vipB6, lineA4, lineA6)
}

// Named like the directory of a lab: if this run is killed, the next one removes it.
func usualTrench() string {
	return attractor() + fmt.Sprintf(`streams:
  - name: stream-a
    vips: [%[1]s, "%[2]s"]
    check: {tcp: {port: %[9]d}, %[10]s}
    targets:
      - {name: target-1, ips: [%[5]s, "%[6]s"]}
  - name: stream-b
    vips: [%[3]s, "%[4]s"]
    check: {tcp: {port: %[9]d}, %[10]s}
    targets:
      - {name: target-2, ips: [%[7]s, "%[8]s"]}
`, vipA4, vipA6, vipB4, vipB6, lab.Target1v4, lab.Target1v6, lab.Target2v4, lab.Target2v6, checkPort, lab.CheckTimers)
}

// newFixture creates a lab with the usual trench and a gateway; lb and frontend do not run yet.
// Duplicate address detection of the pod's addresses is complete.
func newFixture(t *testing.T) *fixture {
	t.Helper()
	return newFixtureWith(t, lab.QuickDAD)
}

// newServing is newFixture with a running pod, whose frontend has additional flags, and the first
// targets up, whose VIPs are at the gateway.
func newServing(t *testing.T, targets int, flags ...string) *fixture {
	t.Helper()
	f := newFixture(t)
	f.up([][]*lab.Target{f.target1, f.target2}[:targets]...)
	f.startPod(flags...)
	f.wantRoutes(every()[:2*targets]...)
	return f
}

// newFixtureWith is newFixture with options of the lab.
func newFixtureWith(t *testing.T, options ...lab.Option) *fixture {
	t.Helper()
	l, err := lab.New(options...)
	harness.Must(t, err)
	f := &fixture{t: t, Lab: l, pod: &lab.Pod{Lab: l, Binaries: binaries}}
	t.Cleanup(f.close)
	for _, a := range []netip.Addr{lab.Target1v4, lab.Target1v6} {
		f.target1 = append(f.target1, lab.NewTarget(l.Backend, netip.AddrPortFrom(a, checkPort)))
	}
	for _, a := range []netip.Addr{lab.Target2v4, lab.Target2v6} {
		f.target2 = append(f.target2, lab.NewTarget(l.Backend, netip.AddrPortFrom(a, checkPort)))
	}
	f.must(f.pod.WriteTrench(usualTrench()))
	f.gateway, err = l.StartGateway(lab.GatewayA())
	f.must(err)
	return f
}

// close stops the lab and, after a failure, prints the logs.
func (f *fixture) close() {
	for _, t := range append(f.target1, f.target2...) {
		harness.Check(f.t, t.Down())
	}
	if f.t.Failed() {
		for _, p := range []*lab.Process{f.pod.LB, f.pod.Frontend, f.gateway.Process} {
			if p != nil {
				f.t.Logf("== last lines of %s\n%s", p.Name, p.Tail(60))
			}
		}
	}
	harness.Check(f.t, f.Close())
}

func (f *fixture) must(err error) {
	f.t.Helper()
	harness.Must(f.t, err)
}

func (f *fixture) up(targets ...[]*lab.Target) {
	f.t.Helper()
	for _, t := range slices.Concat(targets...) {
		f.must(t.Up())
	}
}

func (f *fixture) down(targets []*lab.Target) {
	f.t.Helper()
	for _, t := range targets {
		f.must(t.Down())
	}
}

// startPod starts lb, and the frontend with additional flags.
func (f *fixture) startPod(flags ...string) {
	f.t.Helper()
	f.must(f.pod.StartLB())
	f.must(f.pod.StartFrontend(flags...))
}

// wantRoutes waits until exactly these VIPs are in the gateway's table.
func (f *fixture) wantRoutes(prefixes ...string) {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	f.must(f.gateway.WantRoutes(ctx, prefixes...))
}

// waitFor waits until condition returns nil.
func (f *fixture) waitFor(condition func() error) {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	f.must(lab.Eventually(ctx, 10*time.Millisecond, condition))
}

// waitLog waits until a process has logged text.
func (f *fixture) waitLog(p *lab.Process, text string) {
	f.t.Helper()
	f.waitFor(func() error {
		if !strings.Contains(p.Output(), text) {
			return fmt.Errorf("%s has not printed %q", p.Name, text)
		}
		return nil
	})
}
