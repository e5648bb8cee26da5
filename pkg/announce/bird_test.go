package announce

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/template"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// waitLimit bounds every wait for a condition.
const waitLimit = 20 * time.Second

// bird is a real BIRD with a loopback session as pkg/bird configures it.
type bird struct {
	t      *testing.T
	dir    string
	Addr   netip.Addr
	Peer   netip.Addr
	Port   uint16
	AS     uint32
	PeerAS uint32

	Password string
	Channel6 bool

	Preference int
	Hold       int // seconds

	cmd *exec.Cmd
	log *bytes.Buffer
}

var birdConf = template.Must(template.New("bird.conf").Parse(`
log stderr all;
router id 192.0.2.1;
debug protocols { states };
protocol device { scan time 1; }
filter lb_in {
	if net ~ [ 0.0.0.0/0 ] then reject;
	bgp_path.empty;
	dest = RTD_BLACKHOLE;
	preference = {{.Preference}};
	accept;
}
filter lb_in6 {
	if net ~ [ ::/0 ] then reject;
	bgp_path.empty;
	dest = RTD_BLACKHOLE;
	preference = {{.Preference}};
	accept;
}
protocol bgp LB {
	local {{.Addr}} port {{.Port}} as {{.AS}};
	neighbor {{.Peer}} as {{.PeerAS}};
	multihop 1; passive; strict bind;
	hold time {{.Hold}}; keepalive time 1; error wait time 1, 1;
	{{with .Password}}password "{{.}}";{{end}}
	ipv4 { import filter lb_in; export none; import limit 200000 action restart; };
	{{if .Channel6}}ipv6 { import filter lb_in6; export none; import limit 200000 action restart; };{{end}}
}
`))

// newBird prepares a BIRD on its own loopback address. It runs after start.
func newBird(t *testing.T) *bird {
	t.Helper()
	lab.Need(t, "bird")
	dir, err := os.MkdirTemp("/tmp", "vg")
	harness.Must(t, err)
	b := &bird{
		t: t, dir: dir, AS: 8103, PeerAS: LocalAS, Channel6: true, Preference: 200, Hold: 3,
		Addr: randomLoopback(), Peer: randomLoopback(),
	}
	b.Port = freePort(t, b.Addr)
	t.Cleanup(func() {
		b.kill()
		os.RemoveAll(dir)
		if t.Failed() {
			t.Logf("bird's log:\n%s", b.log)
		}
	})
	return b
}

func randomLoopback() netip.Addr {
	return netip.AddrFrom4([4]byte{127, byte(1 + rand.IntN(254)), byte(rand.IntN(256)), byte(1 + rand.IntN(254))})
}

func freePort(t *testing.T, a netip.Addr) uint16 {
	t.Helper()
	l, err := net.Listen("tcp4", netip.AddrPortFrom(a, 0).String())
	harness.Must(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port()
}

// write writes the configuration and returns its path.
func (b *bird) write() string {
	b.t.Helper()
	var conf bytes.Buffer
	harness.Must(b.t, birdConf.Execute(&conf, b))
	path := filepath.Join(b.dir, "bird.conf")
	harness.Must(b.t, os.WriteFile(path, conf.Bytes(), 0o600))
	return path
}

// configure reloads the configuration of a running BIRD.
func (b *bird) configure() {
	b.t.Helper()
	b.write()
	b.command("configure")
}

func (b *bird) start() {
	b.t.Helper()
	path := b.write()
	b.log = new(bytes.Buffer)
	b.cmd = exec.Command("bird", "-f", "-c", path, "-s", b.socket(), "-P", filepath.Join(b.dir, "pid"))
	b.cmd.Stderr = b.log
	harness.Must(b.t, b.cmd.Start())
	await.True(b.t, "bird answers", func() bool { _, err := b.tryCommand("show status"); return err == nil })
}

func (b *bird) kill() {
	if b.cmd == nil {
		return
	}
	_ = b.cmd.Process.Kill()
	_ = b.cmd.Wait()
	b.cmd = nil
}

func (b *bird) socket() string { return filepath.Join(b.dir, "ctl") }

func (b *bird) tryCommand(command string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "birdc", append([]string{"-s", b.socket()},
		strings.Fields(command)...)...).CombinedOutput()
	return string(out), err
}

func (b *bird) command(command string) string {
	b.t.Helper()
	out, err := b.tryCommand(command)
	if err != nil {
		b.t.Fatalf("birdc %s: %v\n%s", command, err, out)
	}
	return out
}

// options returns the options of a session with this BIRD.
func (b *bird) options() Options {
	return Options{
		Local: b.Peer, Peer: netip.AddrPortFrom(b.Addr, b.Port), PeerAS: b.AS,
		Password: b.Password, HoldTime: time.Duration(b.Hold) * time.Second,
		Log: slog.New(slog.NewTextHandler(b.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
}

// run runs the announcer with a live gate until the returned function, or the end of the test,
// stops it.
func run(t *testing.T, a *Announcer) (stop func()) {
	t.Helper()
	stopBeats := sendHeartbeats(a)
	stopRun := runWithoutHeartbeats(t, a)
	stop = sync.OnceFunc(func() {
		stopRun()
		stopBeats()
	})
	t.Cleanup(stop)
	return stop
}

func runWithoutHeartbeats(t *testing.T, a *Announcer) (stop func()) {
	t.Helper()
	return harness.Run(t, a.Run)
}

// sendHeartbeats replaces the gate's loop.
func sendHeartbeats(a *Announcer) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		a.Heartbeat(time.Now())
		for {
			select {
			case <-tick.C:
				a.Heartbeat(time.Now())
			case <-done:
				return
			}
		}
	})
	return sync.OnceFunc(func() { close(done); wg.Wait() })
}

// awaitState waits until ok returns true for the state.
func awaitState(t *testing.T, a *Announcer, what string, ok func(State) bool) State {
	t.Helper()
	deadline := time.NewTimer(waitLimit)
	defer deadline.Stop()
	for {
		s, changed := a.State().Get()
		if ok(s) {
			return s
		}
		select {
		case <-changed:
		case <-deadline.C:
			t.Fatalf("not within %s: %s; state %+v", waitLimit, what, s)
		}
	}
}

var routeCount = regexp.MustCompile(`(\d+) of \d+ routes`)

// routes counts BIRD's routes of a family.
func (b *bird) routes(f vip.Family) int {
	b.t.Helper()
	out := b.command(fmt.Sprintf("show route table master%s count", strings.TrimPrefix(f.String(), "ipv")))
	m := routeCount.FindStringSubmatch(out)
	if m == nil {
		b.t.Fatalf("no count in %q", out)
	}
	n, err := strconv.Atoi(m[1])
	harness.Must(b.t, err)
	return n
}

func (b *bird) awaitRoutes(v4, v6 int) {
	b.t.Helper()
	await.True(b.t, fmt.Sprintf("bird has %d and %d routes", v4, v6), func() bool {
		return b.routes(vip.IPv4) == v4 && b.routes(vip.IPv6) == v6
	})
}

var routeLine = regexp.MustCompile(`(?m)^(\S+/\d+)\s+blackhole|^\tBGP.(next_hop|as_path|community): ?(.*)$`)

// received returns BIRD's routes with the attributes that the announcer sets.
func (b *bird) received() map[string]map[string]string {
	b.t.Helper()
	routes := make(map[string]map[string]string)
	var current map[string]string
	for _, m := range routeLine.FindAllStringSubmatch(b.command("show route all"), -1) {
		if m[1] != "" {
			current = make(map[string]string)
			routes[m[1]] = current
			continue
		}
		current[m[2]] = m[3]
	}
	return routes
}

func TestBirdHoldsPostedVIPs(t *testing.T) {
	for _, signed := range []bool{true, false} {
		t.Run(fmt.Sprintf("signed=%t", signed), func(t *testing.T) {
			b := newBird(t)
			if signed {
				if err := ProbeMD5(); err != nil {
					lab.Skip(t, "a kernel with TCP_MD5SIG: "+err.Error())
				}
				b.Password = NewPassword()
			}
			b.start()
			a := New(b.options())
			a.Post(Batch{Changes: advertisements{
				vipA: Announced, vipB: Depreferred, vip.Require("20.1.0.0/17"): Announced,
				vipC: Announced, vip.Require("2000::2/128"): Depreferred, vip.Require("2000:1::/65"): Announced,
			}.list(), Revision: 1})
			stop := run(t, a)
			awaitState(t, a, "announced", func(s State) bool { return s.Written == 1 })
			b.awaitRoutes(3, 3)
			up4 := map[string]string{"as_path": "", "next_hop": b.Peer.String()}
			up6 := map[string]string{"as_path": "", "next_hop": "100::1"}
			leaving := func(m map[string]string) map[string]string {
				m = maps.Clone(m)
				m["community"] = "(65535,0)"
				return m
			}
			want := map[string]map[string]string{
				"20.0.0.1/32": up4, "20.0.0.2/32": leaving(up4), "20.1.0.0/17": up4,
				"2000::1/128": up6, "2000::2/128": leaving(up6), "2000:1::/65": up6,
			}
			if diff := cmp.Diff(want, b.received()); diff != "" {
				t.Errorf("at first: %s", diff)
			}

			a.Post(Batch{Changes: advertisements{vipA: Depreferred, vipB: Withdrawn, vipC: Withdrawn}.list(), Revision: 2})
			b.awaitRoutes(2, 2)
			want["20.0.0.1/32"] = leaving(up4)
			delete(want, "20.0.0.2/32")
			delete(want, "2000::1/128")
			if diff := cmp.Diff(want, b.received()); diff != "" {
				t.Errorf("after changes: %s", diff)
			}

			stop()
			b.awaitRoutes(0, 0)
			b.kill()
			log := b.log.String()
			if !strings.Contains(log, "Received: Administrative shutdown") {
				t.Error("bird saw no Cease")
			}
			if strings.Contains(log, "Invalid") || strings.Contains(log, "Error:") {
				t.Error("bird complains")
			}
		})
	}
}

func TestBirdHungGateStaysWithdrawn(t *testing.T) {
	t.Parallel() // it waits for seconds
	b := newBird(t)
	b.start()
	a := New(b.options())
	a.Post(Batch{Changes: advertisements{vipA: Announced, vipC: Announced}.list(), Revision: 1})
	runWithoutHeartbeats(t, a)
	stopBeats := sendHeartbeats(a)
	t.Cleanup(stopBeats)
	b.awaitRoutes(1, 1)
	stopBeats()
	b.awaitRoutes(0, 0) // caused by its hold timer
	s := awaitState(t, a, "down", func(s State) bool { return !s.Established })
	if !strings.HasSuffix(s.LastError.Error(), bgp.NewNotificationErrorCode(4, 0).String()) {
		t.Errorf("got %v, want hold timer expired", s.LastError)
	}
	_, changed := a.State().Get()
	select {
	case <-changed:
		t.Errorf("something was tried without a beat: %+v", a.State().Load())
	case <-time.After(4 * maxBackoff):
	}
	t.Cleanup(sendHeartbeats(a))
	b.awaitRoutes(1, 1)
}

func TestBirdRestartGetsNewestTable(t *testing.T) {
	b := newBird(t)
	b.start()
	a := New(b.options())
	a.Post(Batch{Changes: advertisements{vipA: Announced, vipC: Announced}.list(), Revision: 1})
	run(t, a)
	b.awaitRoutes(1, 1)
	b.kill()
	awaitState(t, a, "down", func(s State) bool { return !s.Established })
	a.Post(Batch{Changes: advertisements{vipB: Announced, vipC: Withdrawn}.list(), Revision: 2})
	b.start()
	b.awaitRoutes(2, 0)
	awaitState(t, a, "revision 2", func(s State) bool { return s.Written == 2 && s.Announced4 == 2 && s.Announced6 == 0 })
}

func TestBirdRestartsTheSession(t *testing.T) {
	b := newBird(t)
	b.start()
	a := New(b.options())
	a.Post(Batch{Changes: advertisements{vipA: Announced, vipC: Announced}.list(), Revision: 1})
	run(t, a)
	b.awaitRoutes(1, 1)
	b.command("restart LB")
	awaitState(t, a, "a second session", func(s State) bool { return s.Sessions == 2 && s.Written == 1 })
	b.awaitRoutes(1, 1)
	b.command("disable LB")
	awaitState(t, a, "down", func(s State) bool { return !s.Established })
	b.awaitRoutes(0, 0)
	b.command("enable LB")
	b.awaitRoutes(1, 1)
}

func TestBirdReloadKeepsSession(t *testing.T) {
	b := newBird(t)
	b.Hold = 60 // only a restart may end the session, not starvation
	b.start()
	a := New(b.options())
	a.Post(Batch{Changes: advertisements{vipA: Announced, vipC: Announced}.list(), Revision: 1})
	run(t, a)
	b.awaitRoutes(1, 1)
	// BIRD requests the routes again with ROUTE-REFRESH when the filter changes.
	b.Preference = 150
	b.configure()
	await.True(b.t, "the new filter was applied", func() bool {
		return strings.Count(b.command("show route"), "(150)") == 2
	})
	if s := a.State().Load(); s.Sessions != 1 || !s.Established {
		t.Errorf("got %+v", s)
	}
}

func TestHungBirdHoldTime(t *testing.T) {
	t.Parallel() // it waits for seconds
	b := newBird(t)
	b.start()
	a := New(b.options())
	a.Post(Batch{Changes: advertisements{vipA: Announced}.list(), Revision: 1})
	run(t, a)
	b.awaitRoutes(1, 0)
	harness.Must(t, b.cmd.Process.Signal(syscall.SIGSTOP))
	s := awaitState(t, a, "down", func(s State) bool { return !s.Established && s.Sessions == 1 })
	if !strings.Contains(s.LastError.Error(), "silent") {
		t.Errorf("got %v", s.LastError)
	}
	a.Post(Batch{Changes: advertisements{vipA: Withdrawn, vipB: Announced}.list(), Revision: 2})
	harness.Must(t, b.cmd.Process.Signal(syscall.SIGCONT))
	await.True(b.t, "bird has only the newest", func() bool {
		_, a := b.received()[vipA.String()]
		_, b := b.received()[vipB.String()]
		return b && !a
	})
}

func TestSessionErrors(t *testing.T) {
	tests := []struct {
		name string
		bird func(*bird)
		us   func(*Options)
		want string
	}{
		{"wrong peer AS", nil, func(o *Options) { o.PeerAS = 8104 }, "BIRD has AS 8103, expected AS 8104"},
		{"BIRD expects another AS", func(b *bird) { b.PeerAS = 4200000001 }, nil, "bad peer as"},
		{"no IPv6 channel", func(b *bird) { b.Channel6 = false }, nil, "BIRD has no ipv6 channel in the session"},
		{
			"BIRD has a password, we have none", func(b *bird) { b.Password = NewPassword() },
			func(o *Options) { o.Password = "" }, "timeout",
		},
		{
			"another password", func(b *bird) { b.Password = NewPassword() }, func(o *Options) { o.Password = NewPassword() },
			"another TCP-MD5 key",
		},
		{"password missing in BIRD", nil, func(o *Options) { o.Password = NewPassword() }, "another TCP-MD5 key"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBird(t)
			if tt.bird != nil {
				tt.bird(b)
			}
			b.start()
			o := b.options()
			if tt.us != nil {
				tt.us(&o)
			}
			a := New(o)
			a.Post(Batch{Changes: advertisements{vipA: Announced}.list(), Revision: 1})
			run(t, a)
			s := awaitState(t, a, "an error", func(s State) bool {
				return s.LastError != nil && strings.Contains(s.LastError.Error(), tt.want)
			})
			if s.Sessions != 0 {
				t.Errorf("got %+v", s)
			}
			if n := b.routes(vip.IPv4); n != 0 {
				t.Errorf("bird has %d routes", n)
			}
		})
	}
}

func TestManyVIPsAndFlips(t *testing.T) {
	b := newBird(t)
	b.Hold = 60 // only an error may end the session, not starvation
	b.start()
	a := New(b.options())
	all := advertisements{}
	for _, v := range manyVIPs(50_000) {
		all[v] = Announced
	}
	a.Post(Batch{Changes: all.list(), Revision: 1})
	run(t, a)
	s := awaitState(t, a, "announced", func(s State) bool { return s.Written == 1 })
	if s.Announced4 != 25_000 || s.Announced6 != 25_000 {
		t.Errorf("got %+v", s)
	}
	b.awaitRoutes(25_000, 25_000)
	for i := range 1001 { // ends withdrawn
		a.Post(Batch{Changes: advertisements{
			numbered(i % 7): Advertisement(i % 3),
			numbered(42):    Advertisement(2 * (i % 2)),
		}.list(), Revision: uint64(2 + i)})
	}
	a.Post(Batch{
		Changes:  advertisements{numbered(0): Withdrawn, numbered(1): Withdrawn, numbered(2): Withdrawn}.list(),
		Revision: 5000,
	})
	for i := range 7 {
		a.Post(Batch{Changes: advertisements{numbered(i): Withdrawn}.list(), Revision: uint64(5001 + i)})
	}
	awaitState(t, a, "the last revision", func(s State) bool { return s.Written == 5007 })
	b.awaitRoutes(25_000-5, 25_000-3) // 0, 2, 4, 6 and 42; 1, 3, 5
	if s := a.State().Load(); s.Sessions != 1 {
		t.Errorf("%d sessions", s.Sessions)
	}
}
