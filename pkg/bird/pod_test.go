package bird_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

// The tests in this file run a real BIRD in the network namespace that TestMain created for this
// process, and a real BIRD in a separate namespace for each gateway.

// patience bounds every wait for something that must happen.
const patience = 20 * time.Second

const (
	localAS  = 8103
	remoteAS = 4248829953
	bgpPort  = 10179
	tableID  = 4096
)

var (
	vip4 = vip.Require("20.0.0.1/32")
	vip6 = vip.Require("2000::1/128")
)

// link is a veth between this process's namespace and a gateway's.
type link struct {
	t         *testing.T
	Dev       string // in the pod
	Namespace string // the gateway's
}

// newLink makes a veth with 169.254.100.1/24 and fd00:100::1/64 in the pod and .150 and ::150 on
// the gateway's. Addresses that are not wanted are left out.
func newLink(t *testing.T, families ...vip.Family) *link {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("needs root for network namespaces")
	}
	id := fmt.Sprintf("%06x", rand.Uint32N(1<<24))
	l := &link{t: t, Dev: "vg" + id, Namespace: "vgbird-" + id}
	run(t, "ip", "netns", "add", l.Namespace)
	t.Cleanup(func() { run(t, "ip", "netns", "del", l.Namespace) })
	run(t, "ip", "link", "add", l.Dev, "type", "veth", "peer", "name", "gw0", "netns", l.Namespace)
	run(t, "ip", "-n", l.Namespace, "link", "set", "lo", "up")
	run(t, "ip", "-n", l.Namespace, "link", "set", "gw0", "up")
	run(t, "ip", "link", "set", l.Dev, "up")
	for _, f := range families {
		l.Address(f)
	}
	return l
}

// Address adds the addresses of a family on both sides.
func (l *link) Address(f vip.Family) {
	l.t.Helper()
	ours, theirs := "169.254.100.1/24", "169.254.100.150/24"
	if f == vip.IPv6 {
		ours, theirs = "fd00:100::1/64", "fd00:100::150/64"
	}
	run(l.t, "ip", "-n", l.Namespace, "addr", "add", theirs, "dev", "gw0", "nodad")
	run(l.t, "ip", "addr", "add", ours, "dev", l.Dev, "nodad")
}

func gatewayAddress(f vip.Family) netip.Addr {
	if f == vip.IPv6 {
		return netip.MustParseAddr("fd00:100::150")
	}
	return netip.MustParseAddr("169.254.100.150")
}

// gatewayOf returns the gateway's configuration in the trench.
func gatewayOf(f vip.Family, change ...func(*trench.Gateway)) trench.Gateway {
	g := trench.Gateway{
		Name: "gateway-" + f.String(), Address: gatewayAddress(f), LocalASN: localAS, RemoteASN: remoteAS,
		LocalPort: bgpPort, RemotePort: bgpPort, HoldTime: 3 * time.Second,
	}
	for _, c := range change {
		c(&g)
	}
	return g
}

// router is a BIRD that runs as the gateway.
type router struct {
	t      *testing.T
	link   *link
	dir    string
	cmd    *exec.Cmd
	exited chan struct{}
}

// routerConfig holds the differences between routers.
type routerConfig struct {
	AS       uint32
	Password string
	BFD      bool
	Quiet    bool // sends no default route
	NoHold   bool // offers a hold time of 0
	Extra4   string
	Static   bool   // no BGP: static routes to the VIPs that follow BFD
	Address4 string // 169.254.100.150 if empty
	// Multiplier is the number of missed BFD packets that ends a session; of BFD 20 if 0.
	Multiplier int
}

func (l *link) Router(c routerConfig) *router {
	l.t.Helper()
	c.AS = cmp.Or(c.AS, remoteAS)
	dir, err := os.MkdirTemp("/tmp", "vg")
	harness.Must(l.t, err)
	l.t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r := &router{t: l.t, link: l, dir: dir}
	harness.Must(l.t, os.WriteFile(r.config(), []byte(c.text()), 0o600))
	r.Start()
	l.t.Cleanup(r.Kill)
	return r
}

func (c routerConfig) text() string {
	var b strings.Builder
	fmt.Fprintln(&b, "log stderr all; router id 10.9.9.9; protocol device { scan time 1; }")
	if !c.Quiet {
		fmt.Fprintf(&b, "protocol static { ipv4; route 0.0.0.0/0 blackhole; %s }\n", c.Extra4)
		fmt.Fprintln(&b, "protocol static { ipv6; route ::/0 blackhole; }")
	}
	if c.Address4 == "" {
		c.Address4 = "169.254.100.150"
	}
	hold := "3"
	if c.NoHold {
		hold = "0"
	}
	if c.Static {
		fmt.Fprintf(&b, "protocol bfd { interface \"gw0\" { min rx interval 100 ms; min tx interval 100 ms; "+
			"multiplier %d; }; }\n", c.Multiplier)
		fmt.Fprintln(&b, "protocol static v4 { ipv4; route 20.0.0.1/32 via 169.254.100.1%'gw0' bfd; }")
		fmt.Fprintln(&b, "protocol static v6 { ipv6; route 2000::1/128 via fd00:100::1%'gw0' bfd; }")
		return b.String()
	}
	options := "strict bind; direct; hold time " + hold +
		"; connect delay time 1; connect retry time 1; error wait time 1, 2; error forget time 10;"
	if c.Password != "" {
		options += fmt.Sprintf(" password %q;", c.Password)
	}
	if c.BFD {
		fmt.Fprintf(&b, "protocol bfd { interface \"*\" { min rx interval 50 ms; min tx interval 50 ms; "+
			"multiplier %d; }; }\n", cmp.Or(c.Multiplier, 20))
		options += " bfd on;"
	}
	for _, s := range []struct{ name, family, ours, peer string }{
		{"trench4", "ipv4", c.Address4, "169.254.100.1"},
		{"trench6", "ipv6", "fd00:100::150", "fd00:100::1"},
	} {
		fmt.Fprintf(&b, "protocol bgp %s { interface \"gw0\"; local %s port %d as %d; neighbor %s port %d as %d; %s %s { "+
			"import all; export where source = RTS_STATIC; next hop self; }; }\n",
			s.name, s.ours, bgpPort, c.AS, s.peer, bgpPort, localAS, options, s.family)
	}
	return b.String()
}

func (r *router) config() string { return filepath.Join(r.dir, "bird.conf") }
func (r *router) socket() string { return filepath.Join(r.dir, "bird.ctl") }

// Start starts the router's BIRD.
func (r *router) Start() {
	r.t.Helper()
	r.cmd = exec.Command("ip", "netns", "exec", r.link.Namespace, systemBIRD, "-f", "-c", r.config(), "-s", r.socket())
	harness.Must(r.t, r.cmd.Start())
	exited, cmd := make(chan struct{}), r.cmd
	r.exited = exited
	go func() { defer close(exited); _ = cmd.Wait() }()
	await.True(r.t, "the router answers", func() bool {
		_, err := ask(r.socket(), "show status")
		return err == nil
	})
}

// Reconfigure loads another configuration.
func (r *router) Reconfigure(c routerConfig) {
	r.t.Helper()
	c.AS = cmp.Or(c.AS, remoteAS)
	harness.Must(r.t, os.WriteFile(r.config(), []byte(c.text()), 0o600))
	r.Command("configure")
}

// Kill ends the router by SIGKILL.
func (r *router) Kill() {
	_ = r.cmd.Process.Kill()
	<-r.exited
}

// Routes returns the lines of `show route all` for a prefix, or nil without a route.
func (r *router) Route(v vip.VIP) []string {
	reply, err := ask(r.socket(), "show route all "+v.String())
	if err != nil {
		return nil
	}
	var lines []string
	for _, l := range reply {
		lines = append(lines, strings.TrimSpace(l.Text))
	}
	return lines
}

func (r *router) Has(v vip.VIP) bool {
	for _, l := range r.Route(v) {
		if strings.HasPrefix(l, v.String()+" ") {
			return true
		}
	}
	return false
}

// Attribute returns the value of a BGP attribute of a route.
func (r *router) Attribute(v vip.VIP, name string) string {
	for _, l := range r.Route(v) {
		if rest, ok := strings.CutPrefix(l, "BGP."+name+":"); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

func (r *router) Command(command string) {
	r.t.Helper()
	if _, err := ask(r.socket(), command); err != nil {
		r.t.Fatal(err)
	}
}

func ask(socket, command string) (bird.Reply, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := bird.Dial(ctx, socket)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.Command(ctx, command)
}

// pod is the frontend's half: a Supervisor and the announcer.
type pod struct {
	*bird.Supervisor
	t         *testing.T
	dev       string
	Options   bird.Options
	Announcer *announce.Announcer
	Log       *harness.Log
	revision  uint64
	attract   atomic.Pointer[[len(vip.Families)]bool]
	stop      func()
}

const loopbackPassword = "0123456789abcdef"

func newPod(t *testing.T, dev string, change ...func(*bird.Options)) *pod {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "vg")
	harness.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	log := &harness.Log{}
	p := &pod{t: t, Log: log, dev: dev}
	p.Options = bird.Options{
		Executable: birdExecutable, Dir: dir, Socket: filepath.Join(dir,
			"bird.ctl"), RouterID: netip.MustParseAddr("10.1.1.1"),
		LoopbackPort: 1790, Password: loopbackPassword, TableID: tableID, KernelScanTime: 10 * time.Second,
		Log: log.Logger(),
	}
	for _, c := range change {
		c(&p.Options)
	}
	p.Supervisor = bird.NewSupervisor(p.Options)
	p.Announcer = announce.New(announce.Options{
		Peer: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"),
			p.Options.LoopbackPort), PeerAS: bird.LoopbackPeerAS, Password: p.Options.Password,
	})
	t.Cleanup(func() {
		p.Stop()
		if t.Failed() {
			t.Logf("log:\n%s", log)
		}
	})
	return p
}

// Start runs the supervisor and the announcer until Stop.
func (p *pod) Start() {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = p.Supervisor.Run(ctx) })
	wg.Go(func() { _ = p.Announcer.Run(ctx) })
	wg.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			p.Announcer.Heartbeat(time.Now())
			if families := p.attract.Load(); families != nil {
				p.Supervisor.Attract(time.Now(), *families)
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	p.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
}

// Attract orders the attracting families until the next call.
func (p *pod) Attract(ipv4, ipv6 bool) {
	families := [len(vip.Families)]bool{ipv4, ipv6}
	p.attract.Store(&families)
	p.Supervisor.Attract(time.Now(), families)
}

// Configure sets gateways and VIPs on the pod's device.
func (p *pod) Configure(gateways []trench.Gateway, vips []vip.VIP) {
	p.Supervisor.Configure(trench.Attractor{Interface: p.dev, Gateways: gateways, VIPs: vips})
}

func (p *pod) Stop() {
	if p.stop != nil {
		p.stop()
	}
}

// Announce advertises VIPs and waits until the UPDATEs were written to BIRD.
func (p *pod) Announce(how announce.Advertisement, vips ...vip.VIP) {
	p.t.Helper()
	var changes []announce.Change
	for _, v := range vips {
		changes = append(changes, announce.Change{VIP: v, Route: announce.Route{Advertisement: how}})
	}
	p.revision++
	p.Announcer.Post(announce.Batch{Changes: changes, Revision: p.revision, Cause: time.Now()})
	await.True(p.t, "the announcer wrote", func() bool {
		s := p.Announcer.State().Load()
		p.Expect(s.Announced4, s.Announced6)
		return s.Established && s.Written >= p.revision
	})
}

// Gateway returns the state of one gateway.
func (p *pod) Gateway(name string) bird.GatewayState {
	for _, g := range p.State().Load().Gateways {
		if g.Name == name {
			return g
		}
	}
	return bird.GatewayState{}
}

// await waits for a state of the supervisor.
func (p *pod) await(what string, ok func(bird.State) bool) bird.State {
	p.t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		s, changed := p.State().Get()
		if ok(s) {
			return s
		}
		select {
		case <-changed:
		case <-timer.C:
			p.t.Fatalf("not seen in %s: %s; state %+v", patience, what, s)
		}
	}
}

func up(names ...string) func(bird.State) bool {
	return func(s bird.State) bool {
		n := 0
		for _, g := range s.Gateways {
			for _, name := range names {
				if g.Name == name && g.Up {
					n++
				}
			}
		}
		return s.Alive && n == len(names)
	}
}

func down(name string) func(bird.State) bool {
	return func(s bird.State) bool {
		for _, g := range s.Gateways {
			if g.Name == name {
				return !g.Up
			}
		}
		return false
	}
}

// holds fails the test if a condition becomes false within d.
func holds(t *testing.T, d time.Duration, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(d)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if !ok() {
			t.Fatalf("did not hold: %s", what)
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			return
		}
	}
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func kill(t *testing.T, pid int, s syscall.Signal) {
	t.Helper()
	if pid <= 1 {
		t.Fatalf("no process to signal: pid %d", pid)
	}
	harness.Must(t, syscall.Kill(pid, s))
}
