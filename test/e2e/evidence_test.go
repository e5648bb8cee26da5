package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// Drain times of both programs.
const (
	noDrain = "--drain-time=0s"
	// longDrain lasts until a test ends it by a command, or by a second SIGTERM.
	longDrain = "--drain-time=1h"
	// visibleDrain ends by itself, after the gateway has received the de-preferred routes: also if the
	// machine stalls in between, which would merge them with the withdrawals.
	visibleDrain = "--drain-time=4s"
)

// longGrace is a grace period that the restart of an lb on a busy machine does not outlast.
const longGrace = "--stale-grace=1m"

// shortSettle shortens the frontend's wait after a withdrawal.
const shortSettle = "--settle=50ms"

// The updates that a gateway can receive for a VIP.
const (
	announced   = "announced"
	depreferred = "de-preferred"
	withdrawn   = "withdrawn"
)

// trace returns all updates that the gateway has received.
func (f *fixture) trace() []lab.RouteUpdate {
	f.t.Helper()
	trace, err := f.gateway.Trace()
	f.must(err)
	return trace
}

// mark returns the current position in the gateway's trace.
func (f *fixture) mark() int {
	f.t.Helper()
	return len(f.trace())
}

// updates returns the updates of a prefix that the gateway received after mark.
func (f *fixture) updates(mark int, prefix string) []lab.RouteUpdate {
	f.t.Helper()
	p := netip.MustParsePrefix(prefix)
	return slices.DeleteFunc(f.trace()[mark:], func(h lab.RouteUpdate) bool { return h.Prefix != p })
}

// changes names the received updates, in order. A de-preferred update has both the community and
// the three prepended AS numbers (docs/adr/0020-de-preference.md).
func changes(received []lab.RouteUpdate) []string {
	words := []string{}
	for _, h := range received {
		long := len(h.ASPath) == 4
		switch {
		case h.Withdrawn:
			words = append(words, withdrawn)
		case h.GracefulShutdown() && long:
			words = append(words, depreferred)
		case !h.GracefulShutdown() && !long:
			words = append(words, announced)
		default:
			words = append(words, "half "+depreferred)
		}
	}
	return words
}

// wantUpdates waits until the gateway has received exactly these updates of a prefix after mark:
// BIRD's status is ahead of what a gateway has read. An update too many fails at once.
func (f *fixture) wantUpdates(mark int, prefix string, want ...string) {
	f.t.Helper()
	f.wantRouterUpdates(f.gateway, mark, prefix, want...)
}

// wantNoUpdates fails if the gateway received an update of the prefixes after mark.
func (f *fixture) wantNoUpdates(mark int, prefixes ...string) {
	f.t.Helper()
	for _, p := range prefixes {
		f.wantUpdates(mark, p)
	}
}

// waitUpdate waits until the last update of a prefix that the gateway received after mark is want.
func (f *fixture) waitUpdate(mark int, prefix, want string) lab.RouteUpdate {
	f.t.Helper()
	var last lab.RouteUpdate
	f.waitFor(func() error {
		received := f.updates(mark, prefix)
		if got := changes(received); len(got) == 0 || got[len(got)-1] != want {
			return fmt.Errorf("the gateway received for %s %v, and not yet %s", prefix, got, want)
		}
		last = received[len(received)-1]
		return nil
	})
	return last
}

// waitLogs waits until a process, including earlier processes of its name, has logged text n
// times.
func (f *fixture) waitLogs(p *lab.Process, text string, n int) {
	f.t.Helper()
	f.waitFor(func() error {
		if got := strings.Count(p.Output(), text); got < n {
			return fmt.Errorf("%s has printed %q %d times, want %d", p.Name, text, got, n)
		}
		return nil
	})
}

// waitPast waits until t, to check that an event does not happen before it.
func (f *fixture) waitPast(t time.Time) {
	f.t.Helper()
	f.waitFor(func() error {
		if left := time.Until(t); left > 0 {
			return fmt.Errorf("%v are left", left)
		}
		return nil
	})
}

// wantExit waits for the end of a process and fails unless its exit status is want.
func (f *fixture) wantExit(p *lab.Process, want int) {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	got, err := p.Wait(ctx)
	f.must(err)
	if got != want {
		f.t.Errorf("%s ended with exit status %d, want %d", p.Name, got, want)
	}
}

// stop ends a process with SIGTERM, and fails unless its exit status is 0.
func (f *fixture) stop(p *lab.Process) {
	f.t.Helper()
	f.must(p.Signal(syscall.SIGTERM))
	f.wantExit(p, 0)
}

// wantRunning fails if a process has ended.
func (f *fixture) wantRunning(processes ...*lab.Process) {
	f.t.Helper()
	for _, p := range processes {
		select {
		case <-p.Done():
			f.t.Errorf("%s has ended", p.Name)
		default:
		}
	}
}

// run runs lb or frontend with a sub-command in the pod and returns its output and exit status.
func (f *fixture) run(program string, args ...string) (string, int) {
	f.t.Helper()
	return f.runIn(f.Pod, program, args...)
}

// runIn is run in another namespace.
func (f *fixture) runIn(ns *lab.NetNS, program string, args ...string) (string, int) {
	f.t.Helper()
	p, err := f.Start(ns, fmt.Sprintf("%s-%s-%d", program, args[0], time.Now().UnixNano()),
		append([]string{binaries + "/" + program}, args...)...)
	f.must(err)
	ctx := harness.Context(f.t, waitTimeout)
	status, err := p.Wait(ctx)
	f.must(err)
	return p.Output(), status
}

// birdPID is the process id of the pod's BIRD, from its pid file.
func (f *fixture) birdPID() int {
	f.t.Helper()
	b, err := os.ReadFile(f.pod.BirdSocket() + ".pid")
	f.must(err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	f.must(err)
	return pid
}

// runs reports whether a process of the pod runs; a zombie does not.
func (f *fixture) runs(pid int) bool {
	f.t.Helper()
	pids, err := f.Pod.Processes()
	f.must(err)
	return slices.Contains(pids, pid)
}

// dial connects to a plaintext listener of the pod; an addr with "/" is the path of a unix socket.
func (f *fixture) dial(addr string) *grpc.ClientConn {
	f.t.Helper()
	network := "tcp"
	if strings.Contains(addr, "/") {
		network = "unix"
	}
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn,
			error,
		) {
			return f.dialPod(ctx, network, addr)
		}))
	f.must(err)
	f.t.Cleanup(func() { conn.Close() })
	return conn
}

// wantHealth waits until a health service of the pod has the state want.
func (f *fixture) wantHealth(addr, service string, want healthv1.HealthCheckResponse_ServingStatus) {
	f.t.Helper()
	client := healthv1.NewHealthClient(f.dial(addr))
	f.waitFor(func() error {
		got, err := client.Check(f.t.Context(), &healthv1.HealthCheckRequest{Service: service})
		if err != nil {
			return err
		}
		if got.GetStatus() != want {
			return fmt.Errorf("service %q is %s, want %s", service, got.GetStatus(), want)
		}
		return nil
	})
}

// lbStatus returns the status from the lb's admin socket.
func (f *fixture) lbStatus() *lbv1.Status {
	f.t.Helper()
	s, err := lbv1.NewLBServiceClient(f.dial(f.pod.LBAdmin())).GetStatus(f.t.Context(), &adminv1.GetStatusRequest{})
	f.must(err)
	return s
}

// frontendStatus returns the status from the frontend's admin socket.
func (f *fixture) frontendStatus() *frontendv1.Status {
	f.t.Helper()
	s, err := frontendv1.NewFrontendServiceClient(f.dial(f.pod.FrontendAdmin())).GetStatus(
		f.t.Context(), &adminv1.GetStatusRequest{},
	)
	f.must(err)
	return s
}

// get returns a page of one of the pod's HTTP listeners.
func (f *fixture) get(addr, path string) string {
	f.t.Helper()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: f.dialPod}
	ctx := harness.Context(f.t, waitTimeout)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	f.must(err)
	answer, err := (&http.Client{Transport: transport}).Do(request)
	f.must(err)
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	f.must(err)
	return string(b)
}

// dialPod opens a connection from within the pod.
func (f *fixture) dialPod(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	err = f.Pod.Do(func() (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, network, addr)
		return err
	})
	return conn, err
}
