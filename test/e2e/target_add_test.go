package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// addFixture has load balancers that one DNS name resolves to, each in a separate namespace, and a
// host with two addresses that registers with them.
type addFixture struct {
	*fixture
	dir  string
	host *lab.NetNS
	dns  *nameServer
	lbs  []*addLB
}

// addLB is a load balancer of an addFixture.
type addLB struct {
	*lab.Process
	f     *addFixture
	dir   string
	ns    *lab.NetNS
	addr  netip.Addr
	count int // number of starts
}

const addPort = "7790"

var addHost = [...]string{"172.31.0.1", "172.31.0.2"}

func newAddFixture(t *testing.T, lbs int) *addFixture {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", fmt.Sprintf("vg-%d-", os.Getpid()))
	f := &addFixture{fixture: &fixture{t: t}, dir: dir, host: lab.NewNetNS(t)}
	f.must(err)
	t.Cleanup(func() { f.must(os.RemoveAll(dir)) })
	f.must(f.host.IP("link", "add", "br0", "type", "bridge"))
	f.must(f.host.IP("link", "set", "br0", "up"))
	f.must(f.host.Addr("br0", addHost[0]+"/24", addHost[1]+"/24"))
	application, err := f.host.Listen("tcp4", fmt.Sprintf(":%d", checkPort)) // for checks
	f.must(err)
	t.Cleanup(func() { f.must(application.Close()) })
	f.dns = newNameServer(t, f.host, "lb.trench-a.test")
	f.must(os.WriteFile(f.path("resolv.conf"), []byte("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"), 0o644))
	f.must(os.WriteFile(f.path("trench.yaml"), []byte(registryTrench()), 0o644))
	for i := range lbs {
		l := &addLB{f: f, dir: f.path(fmt.Sprintf("lb-%d", i)), ns: lab.NewNetNS(t)}
		l.addr = netip.AddrFrom4([4]byte{172, 31, 0, byte(11 + i)})
		port := fmt.Sprintf("port%d", i)
		f.must(lab.Veth(l.ns, "net1", f.host, port))
		f.must(f.host.IP("link", "set", port, "master", "br0"))
		f.must(l.ns.Addr("net1", l.addr.String()+"/24"))
		f.must(os.Mkdir(l.dir, 0o755))
		f.lbs = append(f.lbs, l)
	}
	return f
}

func (f *addFixture) path(name string) string { return filepath.Join(f.dir, name) }

// process starts a process that ends with the test.
func (f *addFixture) process(ns *lab.NetNS, name string, args ...string) *lab.Process {
	f.t.Helper()
	p, err := lab.StartProcess(ns, f.dir, name, args...)
	f.must(err)
	f.t.Cleanup(func() {
		if f.t.Failed() {
			f.t.Logf("== last lines of %s\n%s", p.Name, p.Tail(40))
		}
		f.must(p.Kill())
	})
	return p
}

func (l *addLB) admin() string { return "--admin-socket=unix://" + filepath.Join(l.dir, "admin.sock") }

// start starts the load balancer and waits until its registry is served.
func (l *addLB) start() {
	l.f.t.Helper()
	l.count++
	l.Process = l.f.process(l.ns, fmt.Sprintf("%s-%d", filepath.Base(l.dir), l.count), append([]string{
		filepath.Join(binaries, "lb"), "run", "--trench-file=" + l.f.path("trench.yaml"), l.admin(),
		"--socket=unix://" + filepath.Join(l.dir, "lb.sock"), "--identity=dev",
		"--dev-authority-dir=" + l.f.path("authority"), "--spiffe-id=" + lab.LBID, "--frontend-id=" + lab.FrontendID,
		"--state-dir=" + filepath.Join(l.dir, "state"), "--log-format=text",
		"--registry-address=" + net.JoinHostPort(l.addr.String(), addPort),
	}, registry...)...)
	l.f.waitLog(l.Process, "serving readiness")
}

// targets returns the output of `lb target list`.
func (l *addLB) targets() string {
	l.f.t.Helper()
	ctx := harness.Context(l.f.t, waitTimeout)
	out, err := l.ns.Run(ctx, filepath.Join(binaries, "lb"), "target", "list", l.admin())
	l.f.must(err)
	return out
}

// want waits until exactly these targets, in order, are ready at the load balancer.
func (l *addLB) want(names ...string) {
	l.f.t.Helper()
	l.f.waitFor(func() error {
		out := l.targets()
		var ready []string
		for line := range strings.Lines(out) {
			if words := strings.Fields(line); len(words) > 3 && words[3] == "ready" {
				ready = append(ready, words[1])
			}
		}
		if !slices.Equal(ready, names) {
			return fmt.Errorf("%s has the targets\n%swant %v", l.addr, out, names)
		}
		return nil
	})
}

// line returns the output line of `target add` for one load balancer.
func (l *addLB) line(text string) string {
	return net.JoinHostPort(l.addr.String(), addPort) + ": " + text
}

// add starts `target add` for the application at one of the addresses. It uses the system's
// resolver, with a separate resolv.conf.
func (f *addFixture) add(i int) *lab.Process {
	f.t.Helper()
	name := fmt.Sprintf("app-%d", i)
	return f.process(f.host, name, "unshare", "--mount", "sh", "-c",
		`mount --bind "$0" /etc/resolv.conf && exec "$@"`, f.path("resolv.conf"),
		filepath.Join(binaries, "target"), "add", name, "--stream=stream-a", "--ip="+addHost[i],
		"--registry=lb.trench-a.test:"+addPort, "--lb-id="+lab.LBID, "--identity=dev",
		"--dev-authority-dir="+f.path("authority"), "--spiffe-id="+lab.AppID,
		"--admin-socket=unix://"+f.path("add-"+name+".sock"))
}

// wantStatus waits until `target status` contains these lines, with words separated by one space.
func (f *addFixture) wantStatus(lines ...string) {
	f.t.Helper()
	f.waitFor(func() error {
		ctx := harness.Context(f.t, waitTimeout)
		out, err := f.host.Run(ctx, filepath.Join(binaries, "target"), "status",
			"--admin-socket="+f.path("none.sock"))
		if out == "" {
			return err // the exit status reports overall health
		}
		got := strings.Join(strings.Fields(out), " ")
		for _, line := range lines {
			if !strings.Contains(got, line) {
				return fmt.Errorf("target status does not say %q:\n%s", line, out)
			}
		}
		return nil
	})
}

// One call registers with every load balancer that a DNS name resolves to, as long as the name has
// its address.
func TestTargetAddFollowsName(t *testing.T) {
	t.Parallel()
	f := newAddFixture(t, 3)
	first, second, third := f.lbs[0], f.lbs[1], f.lbs[2]
	first.start()
	second.start()
	f.dns.set(first.addr, second.addr, netip.MustParseAddr("fd00:31::11")) // the first's IPv6
	app := f.add(0)
	f.waitLog(app, first.line("stream-a/app-0 172.31.0.1: ready"))
	f.waitLog(app, second.line("stream-a/app-0 172.31.0.1: ready"))
	const row = "stream-a app-0 172.31.0.1 lb.trench-a.test:7790 "
	f.wantStatus(row+"172.31.0.11:7790 READY", row+"172.31.0.12:7790 READY")

	third.start()
	f.dns.set(first.addr, second.addr, third.addr)
	third.want("app-0")

	f.dns.stop()
	f.waitLog(app, "lb.trench-a.test:7790: lookup failed")
	f.wantStatus(row+"- LOOKUP FAILED", "172.31.0.11:7790 READY", "172.31.0.12:7790 READY", "172.31.0.13:7790 READY")
	for _, l := range f.lbs {
		l.want("app-0")
	}
	if strings.Contains(app.Output(), "deregistering") {
		t.Error("a failed lookup ended a registration")
	}
	if strings.Contains(app.Output(), "[fd00:31::11]") {
		t.Error("both addresses of one load balancer were called")
	}

	f.dns.set(first.addr, third.addr)
	f.dns.start()
	f.waitLog(app, second.line("stream-a/app-0 172.31.0.1: gone"))
	second.want()
	first.want("app-0")
	third.want("app-0")

	// A hung lb delays neither new nor repeated registrations with the remaining lbs.
	f.must(first.Signal(unix.SIGSTOP))
	other := f.add(1)
	third.want("app-0", "app-1")
	f.must(third.Kill())
	f.wantStatus("172.31.0.13:7790 NOT REGISTERED")
	f.must(os.RemoveAll(filepath.Join(third.dir, "state")))
	third.start()
	third.want("app-0", "app-1")
	f.dns.set(first.addr, second.addr, third.addr)
	second.want("app-0", "app-1")
	f.must(app.Signal(syscall.SIGTERM))
	second.want("app-1")
	third.want("app-1")
	f.wantExit(app, 1) // the hung lb did not confirm the deregistration
	if want := "172.31.0.11:7790: the target could not be deregistered"; !strings.Contains(app.Tail(1), want) {
		t.Errorf("ended with\n%s\nwant %s", app.Tail(1), want)
	}

	f.must(first.Signal(unix.SIGCONT))
	first.want("app-1")
	f.stop(other)
	for _, l := range f.lbs {
		l.want()
	}
}
