package traffic

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	pods     = 3
	gateways = 2
	targets  = 10
	// waitTimeout bounds every wait. It detects a hang and is far above every expected duration.
	waitTimeout = 60 * time.Second
	// pollInterval is the interval at which a condition is checked.
	pollInterval = 20 * time.Millisecond
)

// detection is the BFD configuration of the pods: gateways detect a loss after 5 × 200 ms, so
// that a machine that is busy for some hundred milliseconds does not cause one.
const detection = "{minTx: 200ms, minRx: 300ms, multiplier: 5}"

// Checks of the targets, as in the trench file: a loss is detected after Fall × Interval.
const (
	Interval = 200 * time.Millisecond
	Fall     = 3
)

// VIPs returns the addresses to which clients send requests.
func VIPs() []netip.Addr {
	return []netip.Addr{netip.MustParseAddr("20.0.0.1"), netip.MustParseAddr("2000::1")}
}

// Options configure a Trench.
type Options struct {
	Binaries string // the folder of lb, frontend and target
	// Control runs the pods with --gating=off and without drains.
	Control bool
	// BFD guards the sessions with the gateways, which then detect the loss of a pod after a
	// second, otherwise after their hold time of 3 s.
	BFD bool
	// LB are additional arguments of lb run.
	LB []string
	// Targets is the initial number of targets, 1 to 10.
	Targets int
	// Replies is the reply route of the targets.
	Replies lab.Replies
}

// Trench is three pods with targets and two gateways.
type Trench struct {
	*lab.Topology
	o    Options
	lost int // the pod that was lost; 0 for none

	mu      sync.Mutex
	present int             // targets 1 to present are in the trench file
	ending  map[string]bool // announced as terminating
}

// Open starts everything and waits until the gateways spread flows over all pods.
// The caller closes the trench.
func Open(ctx context.Context, o Options) (_ *Trench, err error) {
	y, err := lab.NewTopology(lab.TopologyConfig{
		Pods: pods, Gateways: gateways, Targets: targets, VIPs: VIPs(), Binaries: o.Binaries, Replies: o.Replies,
	})
	if err != nil {
		return nil, err
	}
	t := &Trench{Topology: y, o: o, present: o.Targets, ending: map[string]bool{}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%w\n%s", err, t.Logs()), t.Close())
		}
	}()
	for _, a := range y.Targets {
		if err := a.Start(); err != nil {
			return nil, err
		}
	}
	if err := t.write(); err != nil {
		return nil, err
	}
	if err := y.StartGateways(func(c *lab.GatewayConfig) { c.BFD = o.BFD }); err != nil {
		return nil, err
	}
	for _, p := range y.Pods {
		if err := t.start(p); err != nil {
			return nil, err
		}
	}
	return t, t.settle(ctx)
}

// start starts both programs of a pod.
func (t *Trench) start(p *lab.Pod) error {
	return errors.Join(t.startLB(p), t.startFrontend(p))
}

func (t *Trench) startLB(p *lab.Pod) error {
	args := append([]string{"--dataplane=nftables"}, t.o.LB...)
	if t.o.Control {
		args = append(args, "--drain-time=0s")
	}
	return p.StartLB(args...)
}

func (t *Trench) startFrontend(p *lab.Pod) error {
	if t.o.Control {
		return p.StartFrontend("--gating=off", "--drain-time=0s", "--settle=0s", "--ecmp")
	}
	return p.StartFrontend("--ecmp")
}

// stop ends both programs of a pod, as when a pod is deleted.
func (t *Trench) stop(ctx context.Context, p *lab.Pod) error {
	for _, x := range []*lab.Process{p.LB, p.Frontend} {
		if err := x.Signal(syscall.SIGTERM); err != nil {
			return err
		}
	}
	for _, x := range []*lab.Process{p.LB, p.Frontend} {
		if status, err := x.Wait(ctx); err != nil || status != 0 {
			return errors.Join(fmt.Errorf("%s ended with status %d", x.Name, status), err)
		}
	}
	return nil
}

// write writes the trench file of every pod.
func (t *Trench) write() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	// The control does not drain.
	drain, bfd := "1s", ""
	if t.o.Control {
		drain = "0s"
	}
	if t.o.BFD {
		bfd = ", bfd: " + detection
	}
	b.WriteString(`trench: trench-a
attractor:
  name: attractor-a-1
  vips: [20.0.0.1/32, "2000::1/128"]
  gateways:
`)
	for _, g := range []lab.GatewayConfig{lab.GatewayA(), lab.GatewayB()} {
		for f, address := range g.Local {
			fmt.Fprintf(&b, "    - {name: %s-v%d, address: \"%s\", remoteASN: %d%s}\n", g.Name, 4+2*f, address,
				g.LocalAS, bfd)
		}
	}
	fmt.Fprintf(&b, `streams:
  - name: stream-a
    vips: [20.0.0.1/32, "2000::1/128"]
    check: {tcp: {port: %d}, interval: %s, timeout: %s, rise: 2, fall: %d}
    drainTime: %s
    targets:
`, lab.HealthPort, Interval, Interval, Fall, drain)
	for n, a := range t.Targets[:t.present] {
		own := lab.TargetAddrs(n + 1)
		fmt.Fprintf(&b, "      - {name: %s, ips: [%s, \"%s\"], terminating: %t}\n", a.Name, own[0], own[1], t.ending[a.Name])
	}
	return t.WriteTrench(b.String())
}

// scale changes how many targets are in the trench file.
func (t *Trench) scale(n int) error {
	t.mu.Lock()
	t.present = n
	t.mu.Unlock()
	return t.write()
}

// announce sets in the trench file whether targets are ending.
func (t *Trench) announce(ends bool, names ...string) error {
	t.mu.Lock()
	for _, name := range names {
		t.ending[name] = ends
	}
	t.mu.Unlock()
	return t.write()
}

// names returns the targets in the trench file.
func (t *Trench) names() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var names []string
	for _, a := range t.Targets[:t.present] {
		names = append(names, a.Name)
	}
	return names
}

// settle waits until every target is ready in every pod that is not lost, and the gateways use
// all of these pods.
func (t *Trench) settle(ctx context.Context) error {
	return errors.Join(t.wantStates(ctx, func(have map[string]targetv1.State) error {
		for _, name := range t.names() {
			if have[name] != targetv1.State_STATE_READY {
				return fmt.Errorf("%s is %v, want it ready", name, have[name])
			}
		}
		return nil
	}), t.wantVia(ctx, t.without(0)...))
}

// without returns the pods that are not lost, except one.
func (t *Trench) without(pod int) []int {
	var numbers []int
	for n := range t.Pods {
		if n+1 != pod && n+1 != t.lost {
			numbers = append(numbers, n+1)
		}
	}
	return numbers
}

// wantVia is WantVia with a timeout.
func (t *Trench) wantVia(ctx context.Context, pods ...int) error {
	ctx, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	return t.WantVia(ctx, pods...)
}

// wantGone waits until no pod has a target with one of these names.
func (t *Trench) wantGone(ctx context.Context, names ...string) error {
	return t.wantStates(ctx, func(have map[string]targetv1.State) error {
		for _, name := range names {
			if state, ok := have[name]; ok {
				return fmt.Errorf("%s is %v, want it gone", name, state)
			}
		}
		return nil
	})
}

// wantDown waits until these targets are not ready in any pod.
func (t *Trench) wantDown(ctx context.Context, names ...string) error {
	return t.wantStates(ctx, func(have map[string]targetv1.State) error {
		for _, name := range names {
			if have[name] == targetv1.State_STATE_READY {
				return fmt.Errorf("%s is ready", name)
			}
		}
		return nil
	})
}

// wantStates waits until the targets of every pod satisfy a condition.
func (t *Trench) wantStates(ctx context.Context, condition func(map[string]targetv1.State) error) error {
	ctx, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	for _, n := range t.without(0) {
		conn, err := grpc.NewClient("unix:"+t.Pods[n-1].LBAdmin(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return err
		}
		err = lab.Eventually(ctx, pollInterval, func() error {
			have, err := states(ctx, conn)
			if err != nil {
				return fmt.Errorf("pod %d: %w", n, err)
			}
			if err := condition(have); err != nil {
				return fmt.Errorf("pod %d: %w; it has %v", n, err, slices.Sorted(maps.Keys(have)))
			}
			return nil
		})
		if err := errors.Join(err, conn.Close()); err != nil {
			return err
		}
	}
	return nil
}

// wantEgress waits until the frontend of a pod has a session with the gateway in
// every family.
func (t *Trench) wantEgress(ctx context.Context, p *lab.Pod) error {
	ctx, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+p.FrontendAdmin(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	err = lab.Eventually(ctx, pollInterval, func() error {
		answer, err := healthv1.NewHealthClient(conn).Check(
			ctx, &healthv1.HealthCheckRequest{Service: "Egress"}, grpc.WaitForReady(true),
		)
		if err == nil && answer.GetStatus() != healthv1.HealthCheckResponse_SERVING {
			err = fmt.Errorf("the frontend's Egress is %v", answer.GetStatus())
		}
		return err
	})
	return errors.Join(err, conn.Close())
}

// states returns the states of the targets in one pod: the worst of their addresses.
func states(ctx context.Context, conn *grpc.ClientConn) (map[string]targetv1.State, error) {
	have := map[string]targetv1.State{}
	list, err := targetv1.NewTargetServiceClient(conn).List(ctx, &targetv1.ListRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}
	for _, x := range list.GetTargets() {
		if was, seen := have[x.GetName()]; !seen || was == targetv1.State_STATE_READY {
			have[x.GetName()] = x.GetState()
		}
	}
	return have, nil
}

// app returns a target by its name.
func (t *Trench) app(name string) *lab.App {
	i := slices.IndexFunc(t.Targets, func(a *lab.App) bool { return a.Name == name })
	return t.Targets[i] // names come from names()
}

// Logs returns the ends of the logs of all programs, for failure messages.
func (t *Trench) Logs() string {
	var b strings.Builder
	for n, p := range t.Pods {
		for _, x := range []*lab.Process{p.LB, p.Frontend} {
			if x != nil {
				fmt.Fprintf(&b, "--- pod %d, %s (pid %d):\n%s\n", n+1, x.Name, x.PID(), x.Tail(40))
			}
		}
	}
	return b.String()
}
