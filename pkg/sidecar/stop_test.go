package sidecar

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/pkg/logs"
	shell "github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/replypath"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// stopVariable makes the test binary run a target until SIGTERM, which with "stop" stops the target
// and with "end" ends its context.
const stopVariable = "VIPGATE_TARGET_TEST"

func TestMain(m *testing.M) {
	if mode := os.Getenv(stopVariable); mode != "" {
		if err := runUntilSignal(mode); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

func runUntilSignal(mode string) error {
	terminated, cancel := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer cancel()
	ctx, stop := context.Background(), terminated.Done()
	if strings.Contains(mode, "end") {
		ctx, stop = terminated, nil
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	return Run(ctx, Options{
		ReplyPath: replypath.Options{
			Pool:      []netip.Prefix{netip.MustParsePrefix("20.0.0.0/24"), netip.MustParsePrefix("2000::/64")},
			Interface: "net0", Log: log,
		},
		Settings: shell.Settings{
			AdminSocket: "unix://" + os.Getenv("VIPGATE_TARGET_SOCKET"), HealthAddr: "0.0.0.0:7783",
			Log: log, Level: &logs.Level{},
		},
	}, stop)
}

// A stop leaves the kernel state, so that flows continue, until Cleanup removes all of it.
func TestStateAfterStop(t *testing.T) {
	for _, mode := range []string{"stop", "end"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			must := func(err error) {
				t.Helper()
				harness.Must(t, err)
			}
			ns, other := lab.NewNetNS(t), lab.NewNetNS(t)
			must(lab.Veth(ns, "net0", other, "net0"))
			must(ns.Addr("net0", "172.16.0.1/24", "fd00:16::1/64"))
			dir, err := os.MkdirTemp("", "vg")
			must(err)
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			state := func() string {
				out, err := ns.Run(t.Context(), "sh", "-ec", `nft list tables; ip rule; ip -6 rule
ip route show table all proto 180; ip -6 route show table all proto 180; ip neigh show nud permanent`)
				must(err)
				return out
			}
			before := state()
			cmd := exec.CommandContext(t.Context(), os.Args[0])
			cmd.Env = append(os.Environ(), stopVariable+"="+mode, "VIPGATE_TARGET_SOCKET="+filepath.Join(dir, "admin.sock"))
			var out strings.Builder
			cmd.Stderr = &out
			must(ns.Start(cmd))
			installed := func() bool {
				s := state()
				return strings.Contains(s, "local 2000::/64") && strings.Contains(s, "local 20.0.0.0/24") &&
					strings.Count(s, "vipgate-target") == 5 && strings.Count(s, "lookup 7667") == 2
			}
			await.True(t, "installed state", installed)
			if mode == "stop" {
				checkHealth(t, ns)
			}
			last := watchReadiness(t, filepath.Join(dir, "admin.sock"))
			must(cmd.Process.Signal(unix.SIGTERM))
			if err := cmd.Wait(); err != nil {
				t.Errorf("%v: %s", err, out.String())
			}
			if got := last(); got != healthv1.HealthCheckResponse_NOT_SERVING {
				t.Errorf("the last readiness before the end is %v", got)
			}
			if !installed() {
				t.Errorf("not installed any more: %s", state())
			}
			must(ns.Do(func() error {
				_, err := replypath.Cleanup(t.Context())
				return err
			}))
			if after := state(); after != before {
				t.Errorf("before\n%s\nafter\n%s", before, after)
			}
		})
	}
}

// watchReadiness watches until the target ends, and returns its last status then.
func watchReadiness(t *testing.T, socket string) (last func() healthv1.HealthCheckResponse_ServingStatus) {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	harness.Must(t, err)
	watch, err := healthv1.NewHealthClient(conn).Watch(t.Context(), &healthv1.HealthCheckRequest{Service: Readiness})
	harness.Must(t, err)
	first, err := watch.Recv()
	harness.Must(t, err)
	return func() healthv1.HealthCheckResponse_ServingStatus {
		defer conn.Close()
		status := first.GetStatus()
		for {
			r, err := watch.Recv()
			if err != nil {
				return status
			}
			status = r.GetStatus()
		}
	}
}

// checkHealth takes the interface down and up. Readiness follows, and the health port of VIPs is
// closed.
func checkHealth(t *testing.T, ns *lab.NetNS) {
	t.Helper()
	ask := func(address, service string) healthv1.HealthCheckResponse_ServingStatus {
		t.Helper()
		dial := func(ctx context.Context, _ string) (conn net.Conn, err error) {
			err = ns.Do(func() error {
				conn, err = (&net.Dialer{}).DialContext(ctx, "tcp", address+":7783")
				return err
			})
			return conn, err
		}
		conn, err := grpc.NewClient("passthrough:target", grpc.WithContextDialer(dial),
			grpc.WithTransportCredentials(insecure.NewCredentials()))
		harness.Must(t, err)
		defer conn.Close()
		r, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
		if err != nil {
			return healthv1.HealthCheckResponse_UNKNOWN
		}
		return r.GetStatus()
	}
	for _, up := range []bool{true, false, true} {
		state, want := "up", healthv1.HealthCheckResponse_SERVING
		if !up {
			state, want = "down", healthv1.HealthCheckResponse_NOT_SERVING
		}
		harness.Must(t, ns.IP("link", "set", "net0", state))
		for _, service := range []string{Readiness, ReplyPath, "20.0.0.1", "2000::1"} {
			await.True(t, "net0 "+state+": "+service, func() bool { return ask("127.0.0.1", service) == want })
		}
		if got := ask("127.0.0.1", Liveness); got != healthv1.HealthCheckResponse_SERVING {
			t.Errorf("net0 %s: Liveness %v", state, got)
		}
		if got := ask("20.0.0.1", Liveness); got != healthv1.HealthCheckResponse_UNKNOWN {
			t.Errorf("net0 %s: a VIP answers %v", state, got)
		}
	}
}
