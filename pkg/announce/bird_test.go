package announce

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
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
	"testing"
	"text/template"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// patience bounds every wait for something that must happen.
const patience = 20 * time.Second

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

	mu  sync.Mutex
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
	accept;
}
filter lb_in6 {
	if net ~ [ ::/0 ] then reject;
	bgp_path.empty;
	dest = RTD_BLACKHOLE;
	accept;
}
protocol bgp LB {
	local {{.Addr}} port {{.Port}} as {{.AS}};
	neighbor {{.Peer}} as {{.PeerAS}};
	multihop 1; passive; strict bind;
	hold time 3; keepalive time 1; error wait time 1, 1;
	{{with .Password}}password "{{.}}";{{end}}
	ipv4 { preference 200; import filter lb_in; export none; import limit 200000 action restart; };
	{{if .Channel6}}ipv6 { preference 200; import filter lb_in6; export none; import limit 200000 action restart; };{{end}}
}
`))

// newBird prepares a BIRD on a loopback address of its own. It runs after start.
func newBird(t *testing.T) *bird {
	t.Helper()
	if _, err := exec.LookPath("bird"); err != nil {
		t.Skip("needs bird:", err)
	}
	dir, err := os.MkdirTemp("/tmp", "vg")
	if err != nil {
		t.Fatal(err)
	}
	b := &bird{
		t: t, dir: dir, AS: 8103, PeerAS: DefaultLocalAS, Channel6: true,
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
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port()
}

func (b *bird) start() {
	b.t.Helper()
	var conf bytes.Buffer
	if err := birdConf.Execute(&conf, b); err != nil {
		b.t.Fatal(err)
	}
	path := filepath.Join(b.dir, "bird.conf")
	if err := os.WriteFile(path, conf.Bytes(), 0o600); err != nil {
		b.t.Fatal(err)
	}
	b.log = new(bytes.Buffer)
	b.cmd = exec.Command("bird", "-f", "-c", path, "-s", b.socket(), "-P", filepath.Join(b.dir, "pid"))
	b.cmd.Stderr = b.log
	if err := b.cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.eventually("bird answers", func() bool { _, err := b.try("show status"); return err == nil })
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

func (b *bird) try(command string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "birdc", append([]string{"-s", b.socket()}, strings.Fields(command)...)...).CombinedOutput()
	return string(out), err
}

func (b *bird) ask(command string) string {
	b.t.Helper()
	out, err := b.try(command)
	if err != nil {
		b.t.Fatalf("birdc %s: %v\n%s", command, err, out)
	}
	return out
}

func (b *bird) eventually(what string, ok func() bool) {
	b.t.Helper()
	eventually(b.t, what, ok)
}

// eventually polls, for there is no event to wait for in another process.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

// options are those that fit the BIRD.
func (b *bird) options() Options {
	return Options{
		Local: b.Peer, Peer: netip.AddrPortFrom(b.Addr, b.Port), PeerAS: b.AS,
		Password: b.Password, Log: slog.New(slog.NewTextHandler(testLog{b.t}, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
}

type testLog struct{ t *testing.T }

func (l testLog) Write(p []byte) (int, error) {
	l.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// run runs the announcer with a lively gate until the returned function, or
// the end of the test, stops it.
func run(t *testing.T, a *Announcer) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := a.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	stopBeats := beats(a)
	stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		stopBeats()
	})
	t.Cleanup(stop)
	return stop
}

// beats plays the gate's loop.
func beats(a *Announcer) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		a.Beat(time.Now())
		for {
			select {
			case <-tick.C:
				a.Beat(time.Now())
			case <-done:
				return
			}
		}
	})
	return sync.OnceFunc(func() { close(done); wg.Wait() })
}

// awaitState waits until ok holds of the state.
func awaitState(t *testing.T, a *Announcer, what string, ok func(State) bool) State {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		s, changed := a.State().Get()
		if ok(s) {
			return s
		}
		select {
		case <-changed:
		case <-deadline.C:
			t.Fatalf("not within %s: %s; state %+v", patience, what, s)
		}
	}
}

var routeCount = regexp.MustCompile(`(\d+) of \d+ routes`)

// routes counts BIRD's routes of a family.
func (b *bird) routes(f vip.Family) int {
	b.t.Helper()
	out := b.ask(fmt.Sprintf("show route table master%s count", strings.TrimPrefix(f.String(), "ipv")))
	m := routeCount.FindStringSubmatch(out)
	if m == nil {
		b.t.Fatalf("no count in %q", out)
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

func (b *bird) awaitRoutes(v4, v6 int) {
	b.t.Helper()
	b.eventually(fmt.Sprintf("bird has %d and %d routes", v4, v6), func() bool {
		return b.routes(vip.IPv4) == v4 && b.routes(vip.IPv6) == v6
	})
}

func TestTwoFamiliesReachBird(t *testing.T) {
	b := newBird(t)
	b.Password = NewPassword()
	b.start()
	a := New(b.options())
	a.Post(Batch{Changes: map[vip.VIP]Advertisement{
		vip.Require("20.0.0.1/32"): Announced, vip.Require("20.0.0.2/32"): Depreferred,
		vip.Require("2000::1/128"): Announced, vip.Require("2000::2/128"): Depreferred,
	}, Revision: 1})
	run(t, a)
	awaitState(t, a, "announced", func(s State) bool { return s.Written == 1 })
	b.awaitRoutes(2, 2)
	t.Log(b.ask("show route all"))
}
