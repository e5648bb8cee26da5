package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	frrK8sReload  = "/usr/lib/frr/frr-reload.py" // which frr-k8s runs after each change
	frrK8sTimeout = 20 * time.Second             // the route maps of FRR follow a reload after 5 s
	// frrK8sHang bounds a lost session: hold time and a KEEPALIVE, or a closed connection.
	frrK8sHang = 6 * time.Second
)

// frrK8s is a node on which frr-k8s runs FRR for MetalLB and for a trench pod. A BIRD that listens
// plays the pod's announcer; the upstream routers are BIRD, too.
type frrK8s struct {
	*lab.Lab
	t      *testing.T
	dir    string                  // of FRR
	birds  map[string]*lab.Process // announcer, gw1, gw2
	places map[string]*lab.NetNS   // of the birds
}

// TestFRRK8s has FRR load what frr-k8s renders for MetalLB, then with the FRRConfiguration of the
// chart, and with that of a second trench. The trench's VIPs reach the router that is named, while
// the announcer has them; no other route does, and no other router has them. MetalLB's routes stay
// all the time.
func TestFRRK8s(t *testing.T) {
	need(t, lab.KindFRR)
	if _, err := os.Stat(frrK8sReload); err != nil {
		lab.Skip(t, "frr-reload.py (Debian: apt-get install frr-pythontools)")
	}
	f := newFRRK8s(t)
	f.reload("metallb.conf")
	f.startAnnouncer()
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
		f.eventually(func(ctx context.Context) error { // zebra installs routes after bgpd advertises them
			out, err := f.Gateway.Run(ctx, "ip", "route", "get", address)
			if err == nil && !strings.Contains(out, "dev trench0") {
				err = errors.New(out)
			}
			return err
		})
	}

	f.bird("announcer", "disable", "vips4")
	f.want("gw1", append(own, vips[1])...)
	f.bird("announcer", "enable", "vips4")
	f.want("gw1", append(vips, own...)...)
	for name, lose := range map[string]func(*lab.Process) error{
		"killed":  (*lab.Process).Kill,
		"stopped": func(p *lab.Process) error { return p.Signal(unix.SIGSTOP) },
	} {
		begin := time.Now()
		harness.Must(t, lose(f.birds["announcer"]))
		f.want("gw1", own...)
		took := time.Since(begin)
		t.Logf("%s: withdrawn after %v", name, took.Round(time.Millisecond))
		if took > frrK8sHang {
			t.Errorf("%s: withdrawn after %v, want at most %v", name, took, frrK8sHang)
		}
		harness.Must(t, f.birds["announcer"].Kill())
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
		log, err := os.ReadFile(f.birds[name].Log)
		harness.Must(t, err)
		for _, foreign := range []string{"20.0.0.9/32", "2000::9/128"} {
			if strings.Contains(string(log), foreign) {
				t.Errorf("%s got %s, which is no VIP", name, foreign)
			}
		}
		if name == "gw2" && (strings.Contains(string(log), vips[0]) || strings.Contains(string(log), vips[1])) {
			t.Error("gw2 got a VIP, for which the trench does not name it")
		}
	}
}

func newFRRK8s(t *testing.T) *frrK8s {
	t.Helper()
	l, err := lab.New()
	harness.Must(t, err)
	f := &frrK8s{Lab: l, t: t, birds: map[string]*lab.Process{}, places: map[string]*lab.NetNS{"announcer": l.Pod}}
	f.dir = filepath.Join(l.Dir, "frr")
	t.Cleanup(func() {
		for name, p := range f.birds {
			if t.Failed() {
				t.Logf("== last lines of %s\n%s", name, p.Tail(30))
			}
		}
		errs := []error{l.Close()}
		for name, place := range f.places {
			if name != "announcer" {
				errs = append(errs, place.Close())
			}
		}
		harness.Check(t, errors.Join(errs...))
	})
	must := func(err error) { t.Helper(); harness.Must(t, err) }
	must(l.Gateway.Batch("link add upstream type bridge", "link set upstream up", "addr add 192.0.2.10/24 dev upstream",
		"addr add 2001:db8::10/64 dev upstream nodad"))
	for i, name := range []string{"gw1", "gw2"} {
		place, err := lab.Create(lab.WithoutDAD)
		must(err)
		f.places[name] = place
		must(lab.Veth(l.Gateway, name, place, "up0"))
		must(l.Gateway.IP("link", "set", name, "master", "upstream"))
		must(place.Addr("up0", fmt.Sprintf("192.0.2.%d/24", i+1), fmt.Sprintf("2001:db8::%d/64", i+1)))
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
	harness.Must(f.t, err)
	uid, err := strconv.Atoi(frr.Uid)
	harness.Must(f.t, err)
	harness.Must(f.t, os.Mkdir(f.dir, 0o755))
	harness.Must(f.t, os.Chown(f.dir, uid, -1))
	harness.Must(f.t, os.Chmod(f.Dir, 0o755))
	harness.Must(f.t, os.WriteFile(filepath.Join(f.dir, "vtysh.conf"), []byte("service integrated-vtysh-config\n"), 0o644))
	for _, daemon := range [][]string{
		{"zebra"}, {"bfdd", "--bfdctl", filepath.Join(f.dir, "bfdd.sock")}, {"staticd"}, {"bgpd", "-p", "0"},
	} {
		name := daemon[0]
		p, err := f.Start(f.Gateway, name, append([]string{
			"/usr/lib/frr/" + name, "--vty_socket", f.dir, "-z", filepath.Join(f.dir, "zserv.api"),
			"-i", filepath.Join(f.dir, name+".pid"), "-f", os.DevNull, "-P", "0", "--log", "stdout",
		}, daemon[1:]...)...)
		harness.Must(f.t, err)
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

// startAnnouncer starts the pod's side. It has two routes that are no VIPs, and claims one of
// MetalLB's.
func (f *frrK8s) startAnnouncer() {
	f.t.Helper()
	f.startBIRD("announcer", `router id 169.254.100.1;
protocol static vips4 {ipv4; route 20.0.0.1/32 blackhole;}
protocol static vips6 {ipv6; route 2000::1/128 blackhole;}
protocol static foreign4 {ipv4; route 20.0.0.9/32 blackhole; route 198.51.100.1/32 blackhole;}
protocol static foreign6 {ipv6; route 2000::9/128 blackhole;}
protocol bgp announcer {
  local 169.254.100.1 port 10179 as 4200000000; neighbor 169.254.100.150 as 64500; passive; hold time 3;
  graceful restart off; long lived graceful restart off; multihop;
  ipv4 {import none; export all; next hop address 169.254.100.1;};
  ipv6 {import none; export all; next hop address fd00:100::1;};
}`)
}

func (f *frrK8s) startBIRD(name, text string) {
	f.t.Helper()
	conf := filepath.Join(f.Dir, name+".conf")
	text = "log stderr all;\ndebug protocols {states};\nprotocol device {}\n" + text + "\n"
	harness.Must(f.t, os.WriteFile(conf, []byte(text), 0o644))
	p, err := lab.StartProcess(f.places[name], f.Dir, name, lab.BIRD(), "-f", "-c", conf, "-s", f.socket(name))
	harness.Must(f.t, err)
	f.birds[name] = p
	f.t.Cleanup(func() { harness.Check(f.t, p.Kill()) })
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
	harness.Must(f.t, err)
	return out
}

// routes returns all that a router has for prefixes, with the times of the last changes.
func (f *frrK8s) routes(name string, prefixes ...string) string {
	f.t.Helper()
	var text strings.Builder
	for _, prefix := range prefixes {
		text.WriteString(f.bird(name, "show", "route", prefix, "all"))
	}
	return text.String()
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
	harness.Must(f.t, lab.Eventually(ctx, 10*time.Millisecond, func() error { return condition(ctx) }))
}
