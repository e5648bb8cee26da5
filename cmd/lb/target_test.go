package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/registrytest"
)

// registryFixture serves targets on an admin socket and over mTLS.
type registryFixture struct {
	*registrytest.Registry
	t *testing.T
	// admin and socket are unix sockets, tcp is HOST:PORT.
	admin, socket, tcp string
	// client are the flags of a client over mTLS.
	client []string
	drains *drainRecorder
}

// drainRecorder is an LBService that records drains.
type drainRecorder struct {
	lbv1.UnimplementedLBServiceServer
	mu    sync.Mutex
	calls []string
}

func (d *drainRecorder) DrainTargets(_ context.Context, r *lbv1.DrainTargetsRequest) (*lbv1.DrainTargetsResponse,
	error,
) {
	d.note("drain %q %v %v", r.GetStream(), r.GetNames(), r.GetDrainFor().AsDuration())
	return &lbv1.DrainTargetsResponse{Drained: []string{"s/" + r.GetNames()[0]}}, nil
}

func (d *drainRecorder) UndrainTargets(_ context.Context, r *lbv1.UndrainTargetsRequest) (*lbv1.UndrainTargetsResponse,
	error,
) {
	d.note("undrain %q %v", r.GetStream(), r.GetNames())
	return &lbv1.UndrainTargetsResponse{Undrained: []string{"s/" + r.GetNames()[0]}}, nil
}

func (d *drainRecorder) note(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, fmt.Sprintf(format, args...))
}

func newRegistryFixture(t *testing.T, drainTime time.Duration) *registryFixture {
	t.Helper()
	ca := identitytest.NewCA(t, "example.org")
	dir := identitytest.ShortDir(t)
	d := &registryFixture{
		Registry: registrytest.New(t, ca, drainTime), t: t, drains: &drainRecorder{},
		admin: filepath.Join(dir, "admin.sock"), socket: filepath.Join(dir, "lb.sock"),
	}
	svid := filepath.Join(dir, "svid")
	ca.WriteFiles(svid, ca.SVID(ca.ID("/app"), time.Hour))
	d.client = []string{"--lb-id=" + ca.ID("/lb").String(), "--identity=files", "--svid-dir=" + svid}
	d.Serve("unix", d.admin, true, func(s grpc.ServiceRegistrar) { lbv1.RegisterLBServiceServer(s, d.drains) })
	d.Serve("unix", d.socket, false)
	d.tcp, _ = d.Serve("tcp", "127.0.0.1:0", false)
	return d
}

// command runs a command, which prints to out.
func command(t *testing.T, out *harness.Log, args ...string) error {
	t.Helper()
	parsed, err := parser(t).Parse(args)
	if err != nil {
		return err
	}
	parsed.BindTo(context.Background(), (*context.Context)(nil))
	return parsed.Run(&cli.Output{Writer: out})
}

func mustPrint(t *testing.T, want string, args ...string) {
	t.Helper()
	var out harness.Log
	if err := command(t, &out, args...); err != nil {
		t.Fatalf("lb %s: %v", strings.Join(args, " "), err)
	}
	if !strings.Contains(out.String(), want) {
		t.Errorf("lb %s printed\n%s\nwant\n%s", strings.Join(args, " "), out.String(), want)
	}
}

// keep starts `target add` on the admin socket. A send to stops is a signal.
func (d *registryFixture) keep(out *harness.Log, name string) (stops chan struct{}, ended chan error) {
	d.t.Helper()
	stops, ended = make(chan struct{}, 2), make(chan error, 1)
	c := targetAddCommand{AdminFlags: cli.AdminFlags{AdminSocket: d.admin}}
	c.Name, c.Stream, c.IP = name, "s", []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	go func() { ended <- c.run(context.Background(), &cli.Output{Writer: out}, stops) }()
	return stops, ended
}

// SIGTERM takes the target away gently, on each way to the registry.
func TestTargetAddIsALeaseThatSIGTERMEnds(t *testing.T) {
	d := newRegistryFixture(t, 50*time.Millisecond)
	for name, flags := range map[string][]string{
		"admin": {"--admin-socket=" + d.admin},
		"unix":  append([]string{"--registry=unix://" + d.socket}, d.client...),
		"tcp":   append([]string{"--registry=" + d.tcp}, d.client...),
	} {
		t.Run(name, func(t *testing.T) {
			var out harness.Log
			ended := make(chan error, 1)
			args := append([]string{"target", "add", "a", "--stream=s", "--ip=10.0.0.1", "--ip=fd00::1", "--grace=3s"}, flags...)
			go func() { ended <- command(t, &out, args...) }()
			await.True(t, "the target being ready", func() bool {
				return strings.Contains(out.String(), "s/a 10.0.0.1: ready") && strings.Contains(out.String(), "s/a fd00::1: ready")
			})
			if !strings.Contains(out.String(), "the target stays for 3s") {
				t.Errorf("printed\n%s", out.String())
			}
			harness.Must(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
			harness.Must(t, await.Receive(t, "the end of the command", ended))
			harness.WantText(t, out.String(), "deregistering\n", "s/a fd00::1: gone\n")
			await.True(t, "the end of the target", func() bool { return len(d.States()) == 0 })
		})
	}
}

func TestASecondSignalEndsTargetAddAtOnce(t *testing.T) {
	d := newRegistryFixture(t, time.Hour)
	var out harness.Log
	stops, ended := d.keep(&out, "a")
	await.True(t, "the target being ready", func() bool { return strings.Contains(out.String(), "ready") })
	stops <- struct{}{}
	await.True(t, "the drain", func() bool { return strings.Contains(out.String(), "draining: ") })
	stops <- struct{}{}
	harness.Must(t, await.Receive(t, "the end of the command", ended))
	if len(d.States()) != 1 {
		t.Error("the target does not drain on")
	}
}

func TestTargetAddEndsWhenRefused(t *testing.T) {
	d := newRegistryFixture(t, time.Hour)
	var out harness.Log
	for want, args := range map[string][]string{
		"no stream":                    {"--stream=nowhere", "--ip=10.0.0.1"},
		"multicast":                    {"--stream=s", "--ip=224.0.0.1"},
		"are of one family":            {"--stream=s", "--ip=10.0.0.1", "--ip=10.0.0.2"},
		"must not be negative":         {"--stream=s", "--ip=10.0.0.1", "--grace=-1s"},
		"missing flags: --ip":          {"--stream=s"},
		"unable to parse IP":           {"--stream=s", "--ip=pod-1"},
		"--registry needs --lb-id":     {"--stream=s", "--ip=10.0.0.1", "--registry=127.0.0.1:1"},
		"write unix:///PATH":           {"--stream=s", "--ip=10.0.0.1", "--registry=here", "--lb-id=spiffe://a/b"},
		"no identity: set --identity=": {"--stream=s", "--ip=10.0.0.1", "--registry=127.0.0.1:1", "--lb-id=spiffe://a/b"},
	} {
		err := command(t, &out, append([]string{"target", "add", "a", "--admin-socket=" + d.admin}, args...)...)
		harness.WantError(t, err, want)
	}
	_, first := d.keep(&out, "a")
	await.True(t, "the first registration", func() bool { return len(d.States()) == 1 })
	var second harness.Log
	stops, ended := d.keep(&second, "a")
	err := await.Receive(t, "the end of the command", first)
	harness.WantError(t, err, "another call registered a")
	await.True(t, "the second registration", func() bool { return strings.Contains(second.String(), "ready") })
	// An operator removes it: there is nothing to do any more.
	mustPrint(t, "deregistered in stream s: a; flows continue for 0s", "target", "remove", "a", "--stream=s",
		"--drain-time=0s", "--admin-socket="+d.admin)
	if err := await.Receive(t, "the end of the command", ended); err != nil {
		t.Errorf("the second ended with %v", err)
	}
	close(stops)
}

// The load balancer comes back, on another connection.
func TestTargetAddRegistersAgain(t *testing.T) {
	dir := identitytest.ShortDir(t)
	admin := filepath.Join(dir, "admin.sock")
	var out harness.Log
	ended := make(chan error, 1)
	go func() {
		ended <- command(t, &out, "target", "add", "a", "--stream=s", "--ip=10.0.0.1", "--admin-socket="+admin)
	}()
	await.True(t, "a complaint", func() bool { return strings.Contains(out.String(), "not registered, trying again") })
	for n := 1; n <= 2; n++ {
		f := &flakyService{leave: make(chan struct{})}
		l, err := net.Listen("unix", admin)
		harness.Must(t, err)
		server := grpc.NewServer(grpc.WaitForHandlers(true))
		targetv1.RegisterTargetServiceServer(server, f)
		stop := harness.Serve(t, server, l)
		await.True(t, "the registration", func() bool { return strings.Count(out.String(), "registered at") == n })
		if n == 2 {
			harness.Must(t, syscall.Kill(os.Getpid(), syscall.SIGINT))
			harness.Check(t, await.Receive(t, "the end of the command", ended))
		}
		stop()
	}
}

// flakyService takes a registration and holds it until it is deregistered.
type flakyService struct {
	targetv1.UnimplementedTargetServiceServer
	leave chan struct{}
}

func (f *flakyService) Register(_ *targetv1.RegisterRequest,
	s grpc.ServerStreamingServer[targetv1.RegisterResponse],
) error {
	if err := s.Send(&targetv1.RegisterResponse{Grace: durationpb.New(time.Second)}); err != nil {
		return err
	}
	select {
	case <-f.leave:
		return nil
	case <-s.Context().Done():
		return s.Context().Err()
	}
}

func (f *flakyService) Deregister(context.Context, *targetv1.DeregisterRequest) (*targetv1.DeregisterResponse, error) {
	close(f.leave)
	return &targetv1.DeregisterResponse{DrainFor: durationpb.New(0)}, nil
}

func TestTargetListAndDrains(t *testing.T) {
	d := newRegistryFixture(t, time.Hour)
	admin := "--admin-socket=" + d.admin
	mustPrint(t, "no targets\n", "target", "list", admin)
	var out harness.Log
	stops, ended := d.keep(&out, "a")
	await.True(t, "the target being ready", func() bool { return strings.Contains(out.String(), "ready") })
	mustPrint(t, "s       a       10.0.0.1  ready", "target", "list", admin)
	mustPrint(t, "no targets\n", "target", "list", "--stream=other", admin)
	mustPrint(t, "operator", "target", "list", "--stream=s", admin)
	over := append([]string{"target", "list", "--registry=" + d.tcp}, d.client...)
	mustPrint(t, "s       a       10.0.0.1  ready", over...)

	var text harness.Log
	harness.Must(t, command(t, &text, "target", "list", "-o", "json", admin))
	var list struct {
		Targets []struct{ Name, State string }
	}
	if err := json.Unmarshal([]byte(text.String()), &list); err != nil || len(list.Targets) != 1 ||
		list.Targets[0].State != "STATE_READY" {
		t.Errorf("%v: %s", err, text.String())
	}
	var watched harness.Log
	watch := make(chan error, 1)
	go func() { watch <- command(t, &watched, "target", "list", "--watch", admin) }()
	await.True(t, "the first list", func() bool { return strings.Contains(watched.String(), "1 of 1 addresses") })
	mustPrint(t, "flows continue for 0s",
		append([]string{"target", "remove", "a", "--stream=s", "--drain-time=0s"}, admin)...)
	await.True(t, "the empty list", func() bool { return strings.Contains(watched.String(), "no targets") })
	harness.Must(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	harness.Check(t, await.Receive(t, "the end of the command", watch))
	harness.Check(t, await.Receive(t, "the end of the command", ended))
	close(stops)

	mustPrint(t, "drained: s/a\n", "target", "drain", "a", "b", "--stream=s", "--drain-time=30s", admin)
	mustPrint(t, "no longer drained: s/a\n", "target", "undrain", "a", admin)
	if got, want := strings.Join(d.drains.calls, ", "), `drain "s" [a b] 30s, undrain "" [a]`; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	for want, args := range map[string][]string{
		"no registered target":          {"remove", "x", "--stream=s", admin},
		"missing flags: --stream":       {"remove", "x", admin},
		"must not be negative":          {"drain", "x", "--drain-time=-1s", admin},
		"is `lb run` running here":      {"list", "--admin-socket=/nowhere/lb.sock"},
		`expected "<name> ..."`:         {"undrain", admin},
		"the trench file has no stream": {"list", "--stream=nowhere", admin},
		"does not answer":               append([]string{"list", "--registry=unix:///nowhere/lb.sock"}, d.client...),
	} {
		harness.WantError(t, command(t, &out, append([]string{"target"}, args...)...), want)
	}
}

func TestTargetAddFailsToDeregister(t *testing.T) {
	for _, registered := range []bool{false, true} {
		admin := filepath.Join(identitytest.ShortDir(t), "admin.sock")
		l, err := net.Listen("unix", admin)
		harness.Must(t, err)
		server := grpc.NewServer(grpc.WaitForHandlers(true))
		if registered {
			targetv1.RegisterTargetServiceServer(server, &flakyService{})
		}
		d := &registryFixture{t: t, admin: admin}
		stopServer := func() {}
		if registered {
			stopServer = harness.Serve(t, server, l)
		} else {
			harness.Must(t, l.Close())
		}
		var out harness.Log
		stops, ended := d.keep(&out, "a")
		if registered {
			await.True(t, "the registration", func() bool { return strings.Contains(out.String(), "registered at") })
			stopServer()
		}
		await.True(t, "a complaint", func() bool { return strings.Contains(out.String(), "trying again") })
		stops <- struct{}{}
		err = await.Receive(t, "the end of the command", ended)
		if registered && (err == nil || !strings.Contains(err.Error(), "could not be deregistered, its grace ends it")) {
			t.Errorf("got %v", err)
		}
		if !registered && err != nil {
			t.Errorf("nothing was registered: %v", err)
		}
	}
}

// The command fails before it needs a socket.
func TestTwoAddressesOfOneFamilyAreRefused(t *testing.T) {
	c := targetAddCommand{TargetFlags: cli.TargetFlags{
		Name: "a", Stream: "s",
		IP: []netip.Addr{netip.MustParseAddr("fd00::1"), netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")},
	}}
	var refused *cli.UsageError
	if err := c.Run(t.Context(), &cli.Output{Writer: io.Discard}); !errors.As(err, &refused) ||
		!strings.Contains(err.Error(), "--ip=10.0.0.1 and --ip=10.0.0.2 are of one family") {
		t.Errorf("got %v", err)
	}
}
