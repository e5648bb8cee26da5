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
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/test/lab"
)

// quick makes a drain short; it is for both programs.
const quick = "--drain-time=200ms"

// quickSettle shortens what follows a withdrawal; it is the frontend's.
const quickSettle = "--settle=50ms"

// What a gateway can hear of a VIP.
const (
	announced   = "announced"
	depreferred = "de-preferred"
	withdrawn   = "withdrawn"
)

// trace is everything that the gateway heard so far.
func (w *world) trace() []lab.RouteUpdate {
	w.t.Helper()
	trace, err := w.gateway.Trace()
	w.must(err)
	return trace
}

// mark is a place in the gateway's trace: now.
func (w *world) mark() int {
	w.t.Helper()
	return len(w.trace())
}

// heard is what the gateway heard of a prefix after a mark.
func (w *world) heard(mark int, prefix string) []lab.RouteUpdate {
	w.t.Helper()
	p := netip.MustParsePrefix(prefix)
	return slices.DeleteFunc(w.trace()[mark:], func(h lab.RouteUpdate) bool { return h.Prefix != p })
}

// story names what was heard, in order. De-preferred is only what carries both
// the community and the three prepended AS numbers (design section 5).
func story(heard []lab.RouteUpdate) []string {
	words := []string{}
	for _, h := range heard {
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

// wantStory fails unless the gateway heard exactly this of a prefix after a mark.
func (w *world) wantStory(mark int, prefix string, want ...string) {
	w.t.Helper()
	if got := w.heard(mark, prefix); !slices.Equal(story(got), want) {
		w.t.Fatalf("the gateway heard of %s %v, want %v: %v", prefix, story(got), want, got)
	}
}

// wantNothing fails if the gateway heard anything of these prefixes after a mark.
func (w *world) wantNothing(mark int, prefixes ...string) {
	w.t.Helper()
	for _, p := range prefixes {
		w.wantStory(mark, p)
	}
}

// waitHeard waits until the last that the gateway heard of a prefix after a mark
// is this.
func (w *world) waitHeard(mark int, prefix, want string) lab.RouteUpdate {
	w.t.Helper()
	var last lab.RouteUpdate
	w.waitFor(func() error {
		heard := w.heard(mark, prefix)
		if got := story(heard); len(got) == 0 || got[len(got)-1] != want {
			return fmt.Errorf("the gateway heard of %s %v, and not yet that it is %s", prefix, got, want)
		}
		last = heard[len(heard)-1]
		return nil
	})
	return last
}

// waitLogs waits until a process, or an earlier one of its name, has printed a
// text for the nth time.
func (w *world) waitLogs(p *lab.Process, text string, n int) {
	w.t.Helper()
	w.waitFor(func() error {
		if got := strings.Count(p.Output(), text); got < n {
			return fmt.Errorf("%s has printed %q %d times, want %d", p.Name, text, got, n)
		}
		return nil
	})
}

// waitPast waits until a moment is over, for what must not happen before it.
func (w *world) waitPast(t time.Time) {
	w.t.Helper()
	w.waitFor(func() error {
		if left := time.Until(t); left > 0 {
			return fmt.Errorf("%v are left", left)
		}
		return nil
	})
}

// wantExit waits for the end of a process and fails unless its exit status is this.
func (w *world) wantExit(p *lab.Process, want int) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	got, err := p.Wait(ctx)
	w.must(err)
	if got != want {
		w.t.Errorf("%s ended with exit status %d, want %d", p.Name, got, want)
	}
}

// wantRunning fails if a process has ended.
func (w *world) wantRunning(processes ...*lab.Process) {
	w.t.Helper()
	for _, p := range processes {
		select {
		case <-p.Done():
			w.t.Errorf("%s has ended", p.Name)
		default:
		}
	}
}

// run runs lb or frontend with a sub-command in the pod and returns what it
// printed and its exit status.
func (w *world) run(program string, args ...string) (string, int) {
	w.t.Helper()
	return w.runIn(w.Pod, program, args...)
}

// runIn is run in another namespace.
func (w *world) runIn(ns *lab.NetNS, program string, args ...string) (string, int) {
	w.t.Helper()
	p, err := w.Start(ns, fmt.Sprintf("%s-%s-%d", program, args[0], time.Now().UnixNano()), append([]string{binaries + "/" + program}, args...)...)
	w.must(err)
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	status, err := p.Wait(ctx)
	w.must(err)
	return p.Output(), status
}

// birdPID is the process id of the pod's BIRD, from its pid file.
func (w *world) birdPID() int {
	w.t.Helper()
	b, err := os.ReadFile(w.pod.BirdSocket() + ".pid")
	w.must(err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	w.must(err)
	return pid
}

// runs tells whether a process of the pod is there; a zombie is not.
func (w *world) runs(pid int) bool {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	pids, err := w.Pod.Processes(ctx)
	w.must(err)
	return slices.Contains(pids, pid)
}

// dial returns a connection to a plain listener of the pod; a "/" makes it a
// unix socket.
func (w *world) dial(addr string) *grpc.ClientConn {
	w.t.Helper()
	network := "tcp"
	if strings.Contains(addr, "/") {
		network = "unix"
	}
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return w.dialPod(ctx, network, addr) }))
	w.must(err)
	w.t.Cleanup(func() { conn.Close() })
	return conn
}

// wantHealth waits until a health service of the pod says this.
func (w *world) wantHealth(addr, service string, want healthv1.HealthCheckResponse_ServingStatus) {
	w.t.Helper()
	client := healthv1.NewHealthClient(w.dial(addr))
	w.waitFor(func() error {
		got, err := client.Check(w.t.Context(), &healthv1.HealthCheckRequest{Service: service})
		if err != nil {
			return err
		}
		if got.GetStatus() != want {
			return fmt.Errorf("service %q is %s, want %s", service, got.GetStatus(), want)
		}
		return nil
	})
}

// lbStatus is what the lb's admin socket says.
func (w *world) lbStatus() *lbv1.Status {
	w.t.Helper()
	r, err := lbv1.NewLBServiceClient(w.dial(w.pod.LBAdmin())).GetStatus(w.t.Context(), &lbv1.GetStatusRequest{})
	w.must(err)
	return r.GetStatus()
}

// frontendStatus is what the frontend's admin socket says.
func (w *world) frontendStatus() *frontendv1.Status {
	w.t.Helper()
	r, err := frontendv1.NewFrontendServiceClient(w.dial(w.pod.FrontendAdmin())).GetStatus(w.t.Context(), &frontendv1.GetStatusRequest{})
	w.must(err)
	return r.GetStatus()
}

// get is a page of one of the pod's HTTP listeners.
func (w *world) get(addr, path string) string {
	w.t.Helper()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: w.dialPod}
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	w.must(err)
	answer, err := (&http.Client{Transport: transport}).Do(request)
	w.must(err)
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	w.must(err)
	return string(b)
}

// dialPod opens a connection from within the pod.
func (w *world) dialPod(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	err = w.Pod.Do(func() (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, network, addr)
		return err
	})
	return conn, err
}
