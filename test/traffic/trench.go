package traffic

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
)

const (
	pods     = 3
	gateways = 2
	targets  = 10
	// waitTimeout bounds the waits of a scenario. It detects a hang and is far above every expected
	// duration: an application whose flows broke stops after 30 s, and some scenarios stop two.
	waitTimeout = 2 * time.Minute
	// pollInterval is the interval at which a condition is checked.
	pollInterval = 20 * time.Millisecond
)

// detection is the BFD configuration of the pods, and gatewayMultiplier that of the gateways: either
// side detects a loss after 5 s, so that a stall of the machine does not cause one.
const (
	detection         = "{minTx: 200ms, minRx: 200ms, multiplier: 25}"
	gatewayMultiplier = 25
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
	// Downloads: half of the flows only receive.
	Downloads bool
	// BFD guards the sessions with the gateways, which otherwise do not detect the loss of a pod.
	BFD bool
	// LB are additional arguments of lb run.
	LB []string
	// Targets is the initial number of targets, 1 to 10.
	Targets int
	// History: each lb starts as one that has seen every set of targets.
	History bool
	// SharedAuthority gives all pods one development authority, in the folder of the topology.
	SharedAuthority bool
	// Replies is the reply route of the targets, and Once the target whose sidecar exits.
	Replies lab.Replies
	Once    int
}

// Trench is three pods with targets and two gateways.
type Trench struct {
	*lab.Topology
	o    Options
	lost int // the pod that was lost; 0 for none

	mu      sync.Mutex
	present int             // targets 1 to present are in the trench file
	ending  map[string]bool // announced as terminating
	earlier []string        // the targets of an earlier generation, in the trench file
}

// Open starts everything and waits until the gateways spread flows over all pods.
// The caller closes the trench.
func Open(ctx context.Context, o Options) (_ *Trench, err error) {
	y, err := lab.NewTopology(lab.TopologyConfig{
		Pods: pods, Gateways: gateways, Targets: targets, VIPs: VIPs(), Binaries: o.Binaries,
		Replies: o.Replies, OnceTarget: o.Once,
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
	if err := y.StartGateways(func(c *lab.GatewayConfig) {
		c.BFD, c.BFDMultiplier = o.BFD, gatewayMultiplier
	}); err != nil {
		return nil, err
	}
	if o.SharedAuthority {
		if err := os.Mkdir(t.Authority(), 0o700); err != nil {
			return nil, fmt.Errorf("development authority: %w", err)
		}
	}
	for _, p := range y.Pods {
		if o.SharedAuthority {
			if err := os.Symlink(t.Authority(), p.Authority()); err != nil {
				return nil, fmt.Errorf("development authority: %w", err)
			}
		}
		if err := t.start(p); err != nil {
			return nil, err
		}
	}
	return t, t.settle(ctx)
}

// Authority returns the folder of the shared development authority.
func (t *Trench) Authority() string { return filepath.Join(t.Dir, "authority") }

// start starts both programs of a pod.
func (t *Trench) start(p *lab.Pod) error {
	return errors.Join(t.startLB(p), t.startFrontend(p))
}

func (t *Trench) startLB(p *lab.Pod) error {
	args := append([]string{"--dataplane=nftables"}, t.o.LB...)
	if t.o.Control {
		args = append(args, "--drain-time=0s")
	}
	if t.o.History {
		if err := knowHistory(p); err != nil {
			return err
		}
	}
	return p.StartLB(args...)
}

func (t *Trench) startFrontend(p *lab.Pod) error {
	if t.o.Control {
		return p.StartFrontend("--gating=off", "--drain-time=0s", "--settle=0s", "--ecmp")
	}
	return p.StartFrontend("--ecmp")
}

// write writes the trench file of every pod.
func (t *Trench) write() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	// A drain is longer than a stall of the machine. The control does not drain.
	drain, bfd := "4s", ""
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
			fmt.Fprintf(&b, "    - {name: %s-v%d, address: \"%s\", remoteASN: %d, %s%s}\n", g.Name, 4+2*f, address,
				g.LocalAS, lab.HoldTime, bfd)
		}
	}
	fmt.Fprintf(&b, `streams:
  - name: stream-a
    vips: [20.0.0.1/32, "2000::1/128"]
    check: {tcp: {port: %d}, %s}
    drainTime: %s
`, lab.HealthPort, strings.Replace(lab.CheckTimers, "rise: 1", "rise: 2", 1), drain)
	if len(t.earlier) > 0 {
		fmt.Fprintf(&b, "    earlier: [{targets: [%s]}]\n", strings.Join(t.earlier, ", "))
	}
	b.WriteString("    targets:\n")
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
	return errors.Join(t.wantTargets(ctx, admin.Ready(t.names()...)), t.wantVia(ctx, t.without(0)...))
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

// wantDown waits until these targets are not ready in any pod.
func (t *Trench) wantDown(ctx context.Context, names ...string) error {
	return t.wantTargets(ctx, func(have map[string]targetv1.State) error {
		for _, name := range names {
			if have[name] == targetv1.State_STATE_READY {
				return fmt.Errorf("%s is ready", name)
			}
		}
		return nil
	})
}

// wantTargets waits until the targets of every pod that is not lost satisfy a condition.
func (t *Trench) wantTargets(ctx context.Context, condition admin.Condition) error {
	ctx, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	return lab.Eventually(ctx, pollInterval, func() error { return admin.WantTargets(ctx, t.Topology, condition, t.lost) })
}

// wantEgress waits until the frontend of a pod has a session with the gateway in
// every family.
func (t *Trench) wantEgress(ctx context.Context, p *lab.Pod) error {
	ctx, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	return lab.Eventually(ctx, pollInterval, func() error { return admin.WantServing(ctx, p.FrontendAdmin(), "Egress") })
}

// CheckAsymmetry returns an error unless replies of either family left through the gateway that did
// not forward their flow: each gateway only forwards the replies to the clients of its peer.
func (t *Trench) CheckAsymmetry(ctx context.Context) error {
	for _, gateway := range []*lab.NetNS{t.Gateway, t.Second} {
		out, err := gateway.Run(ctx, "nstat", "-asz", "IpForwDatagrams", "Ip6OutForwDatagrams")
		if err != nil {
			return err
		}
		for _, counter := range []string{"IpForwDatagrams", "Ip6OutForwDatagrams"} {
			if !regexp.MustCompile(counter + ` +[1-9]`).MatchString(out) {
				return fmt.Errorf("gateway %s forwarded no reply:\n%s", gateway.Name(), out)
			}
		}
	}
	return nil
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
