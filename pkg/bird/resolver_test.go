package bird

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/bfdlease"
	"github.com/vipgate/vipgate/pkg/bird/path"
	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/turns"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func addr(prefix string) rtnetlink.Address {
	p := netip.MustParsePrefix(prefix)
	return rtnetlink.Address{Addr: p.Addr(), Network: p.Masked()}
}

func secondary(a rtnetlink.Address) rtnetlink.Address {
	a.Flags |= unix.IFA_F_SECONDARY
	return a
}

// resolverFixture is a resolver with scripted addresses.
type resolverFixture struct {
	*resolver
	addrs []rtnetlink.Address
	err   error
}

func attractorOf(gateways ...trench.Gateway) trench.Attractor {
	return trench.Attractor{
		Interface: "ext-vlan", Gateways: gateways, VIPs: []vip.VIP{vip.Require("20.0.0.1/32")},
	}
}

func newAround(t *testing.T, gateways ...trench.Gateway) *resolverFixture {
	t.Helper()
	s := NewSupervisor(Options{RouterID: netip.MustParseAddr("10.1.1.1")})
	s.Configure(attractorOf(gateways...))
	a := &resolverFixture{resolver: s.resolver}
	a.kernel.Addresses = func(string) ([]rtnetlink.Address, error) { return a.addrs, a.err }
	return a
}

// resolveAgain resolves and publishes, and reports whether the resolution changed.
func (a *resolverFixture) resolveAgain() (resolution, bool) {
	v, changed := a.resolve(context.Background(), a.desired.Load(), State{}, a.result.Load())
	a.result.Set(v)
	return v, changed
}

func someGateway() trench.Gateway {
	return trench.Gateway{
		Name: "a", Address: netip.MustParseAddr("10.0.0.9"), LocalASN: 8103, RemoteASN: 8104, LocalPort: 179, RemotePort: 179,
		HoldTime: 3 * time.Second,
	}
}

func TestFailedAddressReadKeepsSessions(t *testing.T) {
	a := newAround(t, someGateway())
	a.err = errors.New("interrupted")
	if v, _ := a.resolveAgain(); len(v.input.Sessions) != 0 || !strings.Contains(v.problems["a"], "interrupted") {
		t.Fatalf("nothing was known yet: %+v", v)
	}
	a.addrs, a.err = []rtnetlink.Address{addr("10.0.0.1/24")}, nil
	if v, changed := a.resolveAgain(); len(v.input.Sessions) != 1 || !changed ||
		!strings.Contains(string(v.content), "local 10.0.0.1 port 179") {
		t.Fatalf("an address appeared: changed %v, %+v", changed, v.problems)
	}
	a.addrs, a.err = nil, errors.New("interrupted")
	if v, changed := a.resolveAgain(); len(v.input.Sessions) != 1 || changed {
		t.Fatalf("a failed read ended the session: %+v", v.problems)
	}
	a.err = nil
	if v, changed := a.resolveAgain(); len(v.input.Sessions) != 0 || !changed ||
		!strings.Contains(v.problems["a"], "interface ext-vlan: no ipv4 address") {
		t.Fatalf("the address went: changed %v, %+v", changed, v.problems)
	}
	a.addrs = []rtnetlink.Address{addr("10.0.0.1/24")}
	a.resolveAgain()
	a.err = path.ErrNoInterface
	if v, _ := a.resolveAgain(); len(v.input.Sessions) != 0 {
		t.Fatal("the interface went")
	}
	a.err = errors.New("interrupted")
	if v, _ := a.resolveAgain(); len(v.input.Sessions) != 0 {
		t.Fatal("addresses of an interface that had gone came back")
	}
}

func TestAddedAddressKeepsSession(t *testing.T) {
	a := newAround(t, someGateway())
	a.addrs = []rtnetlink.Address{addr("10.0.0.1/24")}
	first, _ := a.resolveAgain()
	a.addrs = []rtnetlink.Address{addr("10.0.0.2/25"), secondary(addr("10.0.0.1/24"))}
	v, changed := a.resolveAgain()
	if changed || &v.content[0] != &first.content[0] {
		t.Fatalf("changed %v:\n%s", changed, v.content)
	}
	a.addrs = []rtnetlink.Address{addr("10.0.0.2/25")}
	if v, changed := a.resolveAgain(); !changed || v.input.Sessions[0].Local != netip.MustParseAddr("10.0.0.2") {
		t.Fatalf("changed %v: %+v", changed, v.input.Sessions)
	}
}

func TestBadPasswordFileDisablesGateway(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	with := someGateway()
	with.PasswordFile = file
	without := someGateway()
	without.Name, without.Address = "b", netip.MustParseAddr("10.0.0.8")
	a := newAround(t, with, without)
	a.addrs = []rtnetlink.Address{addr("10.0.0.1/24")}
	expect := func(problem string) {
		t.Helper()
		v, _ := a.resolveAgain()
		if len(v.input.Sessions) != 1 || v.input.Sessions[0].Name != "b" || !strings.Contains(v.problems["a"], problem) ||
			!strings.Contains(v.problems["a"], file) {
			t.Errorf("%d sessions, problems %v; want %q", len(v.input.Sessions), v.problems, problem)
		}
	}
	expect("does not exist")
	a.options.ExplainPassword = func(path string) string { return "explained " + path }
	expect("does not exist: explained " + file)
	a.options.ExplainPassword = func(string) string { return "" }
	expect("does not exist")
	for content, problem := range map[string]string{
		"": "empty", "\n": "empty", "a\"b": "quote",
		strings.Repeat("x", 81): "81 bytes",
	} {
		harness.Must(t, os.WriteFile(file, []byte(content), 0o600))
		expect(problem)
	}
	harness.Must(t, os.WriteFile(file, []byte("s3cret\n"), 0o600))
	v, _ := a.resolveAgain()
	if len(v.problems) != 0 || !strings.Contains(string(v.content), `password "s3cret";`) {
		t.Errorf("problems %v", v.problems)
	}
	harness.Must(t, os.Remove(file))
	expect("does not exist") // and never a session without a password
	if v, _ := a.resolveAgain(); strings.Contains(string(v.content), "NBR-a") {
		t.Error("the session is there without its password")
	}
}

func TestSessionsFollowTheInterface(t *testing.T) {
	s := NewSupervisor(Options{RouterID: netip.MustParseAddr("10.1.1.1")})
	a := &resolverFixture{resolver: s.resolver}
	a.kernel.Addresses = func(name string) ([]rtnetlink.Address, error) {
		if name == "broken" {
			return nil, errors.New("netlink failed")
		}
		return []rtnetlink.Address{addr(map[string]string{"eth1": "10.0.0.1/24", "eth2": "10.0.0.2/24"}[name])}, nil
	}
	for name, local := range map[string]string{"eth1": "10.0.0.1", "eth2": "10.0.0.2"} {
		attractor := attractorOf(someGateway())
		attractor.Interface = name
		s.Configure(attractor)
		v, _ := a.resolveAgain()
		if len(v.input.Sessions) != 1 || v.input.Sessions[0].Local.String() != local {
			t.Errorf("%s: sessions %+v, problems %v", name, v.input.Sessions, v.problems)
		}
		if !strings.Contains(string(v.content), fmt.Sprintf("interface %q;", name)) {
			t.Errorf("%s is not in the configuration", name)
		}
	}
	// The last known addresses of another interface are not used.
	attractor := attractorOf(someGateway())
	attractor.Interface = "broken"
	s.Configure(attractor)
	if v, _ := a.resolveAgain(); len(v.input.Sessions) != 0 || v.problems["a"] != "netlink failed" {
		t.Errorf("sessions %+v, problems %v", v.input.Sessions, v.problems)
	}
}

func TestResolverPublishesChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := latest.New(desired{})
		s := newResolver(NewSupervisor(Options{}).options, w)
		wakes := make(chan func(), 1)
		s.listen = func(wake func()) (*rtnetlink.Listener, error) { wakes <- wake; return rtnetlink.NewListener(), nil }
		have := []rtnetlink.Address{addr("10.0.0.1/24")}
		s.kernel.Addresses = func(string) ([]rtnetlink.Address, error) { return have, nil }
		done := make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		defer func() { cancel(); <-done }()
		go func() { defer close(done); s.run(ctx) }()
		published := func(d time.Duration) bool {
			_, changed := s.result.Get()
			<-time.After(d)
			synctest.Wait()
			select {
			case <-changed:
				return true
			default:
				return false
			}
		}
		if published(10 * time.Second) {
			t.Error("resolution without desired configuration")
		}
		_, changed := s.result.Get()
		begin := time.Now()
		w.Set(desired{attractor: attractorOf(someGateway()), generation: 1})
		if <-changed; !time.Now().Equal(begin) {
			t.Error("it waited for the next poll")
		}
		if published(10 * time.Second) {
			t.Error("resolution published without a change")
		}
		have = nil
		if !published(2*checkInterval) || len(s.result.Load().problems) != 1 {
			t.Errorf("the address went: %+v", s.result.Load())
		}
		have = []rtnetlink.Address{addr("10.0.0.1/24")}
		if (<-wakes)(); !published(notifyPause) || len(s.result.Load().problems) != 0 {
			t.Errorf("the kernel notified of the address: %+v", s.result.Load())
		}
	})
}

// A family that the gateway has not activated delays no turn of the session.
func TestTurnWithoutFamily(t *testing.T) {
	hold := 3 * time.Second
	step := func(a *resolverFixture) resolution {
		var now resolution
		var attractor trench.Attractor
		state := State{Alive: true, PID: 1, Loaded: 1}
		for i, name := range []string{"a", "b"} {
			gateway := someGateway()
			gateway.Name, gateway.HoldTime, gateway.Families = name, hold, trench.SessionBoth
			gateway.Address = netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})
			attractor.Gateways = append(attractor.Gateways, gateway)
			now.desired = append(now.desired, turns.Session{Gateway: gateway})
			state.Gateways = append(state.Gateways,
				GatewayState{Name: name, Family: vip.IPv4, Up: true, Exported: 5, Announced: 5},
				GatewayState{Name: name, Family: vip.IPv6, Announced: 5, isLacking: true})
		}
		a.takeTurns(desired{attractor: attractor}, state, &now, 1)
		return now
	}
	a := newAround(t)
	a.plan.Drain = time.Minute
	step(a)
	step(a)
	hold *= 2
	if now := step(a); now.changes["a"].Phase != turns.Draining || now.changes["b"].Phase != turns.Pending {
		t.Errorf("changes %+v", now.changes)
	}
}

func TestPreview(t *testing.T) {
	o := Options{Password: "SECRET", LogFileSize: 1000, Dir: "/x", ImportAll: true}
	a := attractorOf(someGateway())
	a.Interface = "no-such-interf"
	content, problems, err := o.Preview(a)
	got := string(content)
	if err != nil || strings.Contains(got, "SECRET") || !strings.Contains(got, maskedPassword) ||
		!strings.Contains(got, `log "/x/bird.log" 1000`) || !strings.Contains(got, "20.0.0.1/32+") ||
		!strings.Contains(problems["a"], "interface no-such-interf does not exist") {
		t.Errorf("%v, %v, %s", err, problems, got)
	}
}

// A secret mount that hangs must not end a session, and a FIFO is refused without blocking.
func TestBlockedPasswordFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	harness.Must(t, os.WriteFile(path, []byte("secret\n"), 0o600))
	g := someGateway()
	g.PasswordFile = path
	a := newAround(t, g)
	a.addrs = []rtnetlink.Address{addr("10.0.0.1/24")}
	if v, _ := a.resolveAgain(); len(v.input.Sessions) != 1 {
		t.Fatalf("no session: %+v", v.problems)
	}

	release := make(chan struct{})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := files.Do(ended, a.calls[path], path,
		func() (struct{}, error) { <-release; return struct{}{}, nil }); err == nil {
		t.Fatal("the call does not hang")
	}
	if v, changed := a.resolveAgain(); len(v.input.Sessions) != 1 || changed {
		t.Errorf("a hung mount ended the session: %+v", v.problems)
	}
	defer close(release)

	// The first read never ends, and the file that takes its place is read. It has another inode,
	// since both exist for a moment.
	harness.Must(t, errors.Join(syscall.Mkfifo(path+".new", 0o600), os.Rename(path+".new", path)))
	for deadline := time.Now().Add(10 * time.Second); ; {
		v, _ := a.resolveAgain()
		if len(v.input.Sessions) == 0 && strings.Contains(v.problems["a"], "not a regular file") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the FIFO was not refused: %+v", v.problems)
		}
	}
}

func TestStatesWithoutBIRD(t *testing.T) {
	g, other := someGateway(), someGateway()
	other.Name = "b"
	v := resolution{gateways: []trench.Gateway{g, other}, problems: map[string]string{"b": "no address"}}
	before := State{ConfigErr: errors.New("refused"), Gateways: []GatewayState{{Name: "a", Up: true}}}
	got := v.states(time.Now(), nil, nil, bfdlease.State{}, before)
	if got[0].Up || got[0].State != "BIRD is not running" || got[0].Problem != "" {
		t.Errorf("got %+v", got[0])
	}
	if got[1].State != "" || got[1].Problem != "no address" {
		t.Errorf("got %+v", got[1])
	}
}
