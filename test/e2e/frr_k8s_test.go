package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/speaker/frrk8s"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	frrK8sReload  = "/usr/lib/frr/frr-reload.py" // which frr-k8s runs after each change
	frrK8sTimeout = 2 * time.Minute              // the route maps of FRR follow a reload after 5 s
)

// frrK8s is a node on which frr-k8s runs FRR for MetalLB and for a trench pod. FRR calls the pod's
// frontend. The upstream routers gw1 and gw2 are BIRD.
type frrK8s struct {
	*fixture
	dir    string                  // of FRR
	birds  map[string]*lab.Process // by router
	places map[string]*lab.NetNS
}

// The trench has VIPs that the FRRConfiguration does not allow, one of which is MetalLB's.
const frrK8sTrench = `trench: trench-a
attractor:
  name: attractor-a
  vips: [20.0.0.1/32, 2000::1/128, 20.0.0.9/32, 2000::9/128, 198.51.100.1/32]
  gateways: [{name: gw1, address: 192.0.2.1, remoteASN: 64501, families: both}]
streams:
  - {name: v4, vips: [20.0.0.1/32], targets: [{name: v4, ips: [172.16.1.1]}], CHECK}
  - {name: v6, vips: [2000::1/128], targets: [{name: v6, ips: [fd00:16::1:1]}], CHECK}
  - name: refused
    vips: [20.0.0.9/32, 2000::9/128, 198.51.100.1/32]
    targets: [{name: refused, ips: [172.16.1.2, "fd00:16::1:2"]}]
    CHECK
`

// TestFRRK8s has FRR load what frr-k8s renders for MetalLB, then with the FRRConfiguration of the
// chart, and with that of a second trench. The trench's VIPs reach the router that is named, while
// they are ready; no other route does, and no other router has them. MetalLB's routes stay all the
// time.
func TestFRRK8s(t *testing.T) {
	t.Parallel()
	need(t, lab.KindFRR)
	if _, err := os.Stat(frrK8sReload); err != nil {
		lab.Skip(t, "frr-reload.py (Debian: apt-get install frr-pythontools)")
	}
	f := newFRRK8s(t)
	f.reload("metallb.conf")
	f.must(f.pod.StartLB())
	f.startAnnouncer()
	f.up(f.target1, f.target2)
	own := []string{"198.51.100.1/32", "2001:db8:100::1/128"}
	f.want("gw1", own...)
	f.want("gw2", own...)
	before := map[string]string{"gw1": f.routes("gw1", own...), "gw2": f.routes("gw2", own...)}

	vips := []string{"20.0.0.1/32", "2000::1/128"}
	f.reload("vipgate.conf")
	f.want("gw1", append(vips, own...)...)
	harness.WantText(t, f.routes("gw1", vips...), "BGP.as_path: 64500 4200000000", "BGP.next_hop: 192.0.2.10",
		"BGP.next_hop: 2001:db8::10 ")
	for _, address := range []string{"20.0.0.1", "2000::1"} { // the node forwards to the pod
		f.waitFor(func() error { // zebra installs routes after bgpd advertises them
			out, err := f.Gateway.Run(t.Context(), "ip", "route", "get", address)
			if err == nil && !strings.Contains(out, "dev trench0") {
				err = errors.New(out)
			}
			return err
		})
	}
	f.wantGatewayState(vips, own)

	f.must(f.target1[0].Down())
	f.want("gw1", append(own, vips[1])...)
	f.must(f.target1[0].Up())
	f.want("gw1", append(vips, own...)...)
	for _, loss := range []unix.Signal{unix.SIGKILL, unix.SIGSTOP} {
		begin := time.Now()
		f.must(f.pod.Frontend.Signal(loss))
		f.want("gw1", own...)
		t.Logf("%v: withdrawn after %v", loss, time.Since(begin).Round(time.Millisecond))
		f.must(f.pod.Frontend.Kill())
		f.startAnnouncer()
		f.want("gw1", append(vips, own...)...)
		t.Logf("announced %v after the loss", time.Since(begin).Round(time.Millisecond))
	}

	f.reload("two.conf")
	f.want("gw1", append(vips, own...)...)
	f.reload("metallb.conf")
	f.want("gw1", own...)
	for name, want := range before {
		if got := f.routes(name, own...); got != want {
			t.Errorf("%s: MetalLB's routes changed from\n%s\nto\n%s", name, want, got)
		}
		log := f.birds[name].Output()
		for _, prefix := range own {
			if added := strings.Count(log, "> added [best] "+prefix); added != 1 {
				t.Errorf("%s added MetalLB's route to %s %d times", name, prefix, added)
			}
		}
		for _, foreign := range []string{"20.0.0.9/32", "2000::9/128"} {
			if strings.Contains(log, foreign) {
				t.Errorf("%s got %s, which the FRRConfiguration does not allow", name, foreign)
			}
		}
		if name == "gw2" && (strings.Contains(log, vips[0]) || strings.Contains(log, vips[1])) {
			t.Error("gw2 got a VIP, but is no gateway of the trench")
		}
	}
}

// wantGatewayState writes the sessions of frr-k8s as kube does. They are displayed, but can be old:
// neither a session that is down nor the end of the writes withdraws a VIP.
func (f *frrK8s) wantGatewayState(vips, own []string) {
	f.t.Helper()
	f.writeSessions(time.Now(), "Established")
	f.waitStatus(`(?s)not confirmed that it receives VIPs.*gw1 .* up .*Established`)
	f.writeSessions(time.Now(), "Active")
	f.waitStatus(`gw1 .* DOWN .*Active`)
	f.want("gw1", append(vips, own...)...)
	f.writeSessions(time.Now().Add(-time.Hour), "Established")
	f.waitStatus(`see the status of kube`)
	f.want("gw1", append(vips, own...)...)
	f.writeSessions(time.Now(), "Established")
	f.waitStatus(`gw1 .* up .*Established`)
}

func (f *frrK8s) writeSessions(written time.Time, state string) {
	f.t.Helper()
	text, err := json.Marshal(frrk8s.File{
		Written: written, Node: "node-1", Sessions: []frrk8s.Session{{Peer: "192.0.2.1", State: state}},
	})
	f.must(err)
	f.must(durable.Replace(f.pod.TrenchFile()+frrk8s.Suffix, text, 0o640))
}

func newFRRK8s(t *testing.T) *frrK8s {
	t.Helper()
	f := &frrK8s{fixture: newFixture(t), birds: map[string]*lab.Process{}, places: map[string]*lab.NetNS{}}
	f.must(f.gateway.Process.Kill())
	f.pod.ProductTimers = true // the test stops the frontend
	f.must(f.pod.WriteTrench(strings.ReplaceAll(frrK8sTrench, "CHECK",
		fmt.Sprintf("check: {tcp: {port: %d}, %s}", checkPort, lab.CheckTimers))))
	f.dir = filepath.Join(f.Dir, "frr")
	t.Cleanup(func() {
		for name, p := range f.birds {
			if t.Failed() {
				t.Logf("== last lines of %s\n%s", name, p.Tail(30))
			}
			harness.Check(t, errors.Join(p.Kill(), f.places[name].Close()))
		}
	})
	f.must(f.Gateway.Batch("link add upstream type bridge", "link set upstream up", "addr add 192.0.2.10/24 dev upstream",
		"addr add 2001:db8::10/64 dev upstream nodad"))
	for i, name := range []string{"gw1", "gw2"} {
		place, err := lab.Create(lab.WithoutDAD)
		f.must(err)
		f.places[name] = place
		f.must(lab.Veth(f.Gateway, name, place, "up0"))
		f.must(f.Gateway.IP("link", "set", name, "master", "upstream"))
		f.must(place.Addr("up0", fmt.Sprintf("192.0.2.%d/24", i+1), fmt.Sprintf("2001:db8::%d/64", i+1)))
		f.startBIRD(name, fmt.Sprintf(`router id 192.0.2.%[1]d;
protocol bgp node {
  local 192.0.2.%[1]d port 10179 as 6450%[1]d; neighbor 192.0.2.10 as 64500; passive; hold time 3; debug {routes};
  ipv4 {import all; export none;}; ipv6 {import all; export none;};
}`, i+1))
	}
	f.startFRR()
	return f
}

// startFRR starts the daemons of frr-k8s with its arguments, without a configuration.
func (f *frrK8s) startFRR() {
	f.t.Helper()
	frr, err := user.Lookup("frr")
	f.must(err)
	uid, err := strconv.Atoi(frr.Uid)
	f.must(err)
	f.must(os.Mkdir(f.dir, 0o755))
	f.must(os.Chown(f.dir, uid, -1))
	f.must(os.Chmod(f.Dir, 0o755))
	f.must(os.WriteFile(filepath.Join(f.dir, "vtysh.conf"), []byte("service integrated-vtysh-config\n"), 0o644))
	for _, daemon := range [][]string{
		{"zebra"}, {"bfdd", "--bfdctl", filepath.Join(f.dir, "bfdd.sock")}, {"staticd"}, {"bgpd", "-p", "0"},
	} {
		name := daemon[0]
		p, err := f.Start(f.Gateway, name, append([]string{
			"/usr/lib/frr/" + name, "--vty_socket", f.dir, "-z", filepath.Join(f.dir, "zserv.api"),
			"-i", filepath.Join(f.dir, name+".pid"), "-f", os.DevNull, "-P", "0", "--log", "stdout",
		}, daemon[1:]...)...)
		f.must(err)
		f.eventually(func(ctx context.Context) error {
			_, err := f.Gateway.Run(ctx, "vtysh", "--vty_socket", f.dir, "--config_dir", f.dir, "-d", name, "-c", "show version")
			if err != nil {
				return fmt.Errorf("%w: %s", err, p.Tail(5))
			}
			return nil
		})
	}
}

// reload applies a rendered configuration as the reloader of frr-k8s does.
func (f *frrK8s) reload(name string) {
	f.t.Helper()
	ctx := harness.Context(f.t, frrK8sTimeout)
	out, err := exec.CommandContext(ctx, "python3", frrK8sReload, "--reload", "--overwrite", "--stdout",
		"--vty_socket", f.dir, "--confdir", f.dir, "--rundir", f.dir, "testdata/frr-k8s/"+name).CombinedOutput()
	if err != nil {
		f.t.Fatalf("failed to load %s: %v\n%s", name, err, out)
	}
}

// startAnnouncer starts the frontend with the flags of the chart. FRR has its address on the
// external network as a neighbor.
func (f *frrK8s) startAnnouncer() {
	f.t.Helper()
	args := f.pod.FrontendArgs("--speaker=external", "--speaker-address="+lab.GatewayA4.String(), "--speaker-as=64500",
		"--speaker-local-as=4200000000", "--speaker-listen=10179", "--gateway-state=frr-k8s")
	args = slices.DeleteFunc(args, func(arg string) bool { return strings.HasPrefix(arg, "--bird-") })
	var err error
	f.pod.Frontend, err = f.Start(f.Pod, "frontend", args...)
	f.must(err)
}

func (f *frrK8s) startBIRD(name, text string) {
	f.t.Helper()
	conf := filepath.Join(f.Dir, name+".conf")
	text = "log stderr all;\ndebug protocols {states};\nprotocol device {}\n" + text + "\n"
	f.must(os.WriteFile(conf, []byte(text), 0o644))
	p, err := lab.StartProcess(f.places[name], f.Dir, name, lab.BIRD(), "-f", "-c", conf, "-s", f.socket(name))
	f.must(err)
	f.birds[name] = p
	f.eventually(func(ctx context.Context) error {
		_, err := f.places[name].Run(ctx, "birdc", "-s", f.socket(name), "show", "status")
		return err
	})
}

func (f *frrK8s) socket(name string) string { return filepath.Join(f.Dir, name+".ctl") }

// bird runs a command of a BIRD.
func (f *frrK8s) bird(name string, command ...string) string {
	f.t.Helper()
	out, err := f.places[name].Run(harness.Context(f.t, frrK8sTimeout), "birdc",
		append([]string{"-s", f.socket(name)}, command...)...)
	f.must(err)
	return out
}

// birdTime is the time of a route, which BIRD displays with a jitter of a millisecond.
var birdTime = regexp.MustCompile(`\[node [0-9:.]+`)

// routes returns all that a router has for prefixes, without times.
func (f *frrK8s) routes(name string, prefixes ...string) string {
	f.t.Helper()
	var text strings.Builder
	for _, prefix := range prefixes {
		text.WriteString(f.bird(name, "show", "route", prefix, "all"))
	}
	return birdTime.ReplaceAllString(text.String(), "[node")
}

// want waits until a router has exactly these prefixes.
func (f *frrK8s) want(name string, prefixes ...string) {
	f.t.Helper()
	f.eventually(func(ctx context.Context) error {
		table, err := f.places[name].Run(ctx, "birdc", "-r", "-s", f.socket(name), "show", "route")
		if err != nil {
			return err
		}
		for _, prefix := range prefixes {
			if !strings.Contains(table, prefix+" ") {
				return fmt.Errorf("%s has no %s:\n%s", name, prefix, table)
			}
		}
		if got := strings.Count(table, "unicast ["); got != len(prefixes) {
			return fmt.Errorf("%s has %d routes, want %d:\n%s", name, got, len(prefixes), table)
		}
		return nil
	})
}

func (f *frrK8s) eventually(condition func(context.Context) error) {
	f.t.Helper()
	ctx := harness.Context(f.t, frrK8sTimeout)
	f.must(lab.Eventually(ctx, 10*time.Millisecond, func() error { return condition(ctx) }))
}
