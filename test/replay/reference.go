package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

const (
	scriptInterval = time.Second
	scriptTimeout  = 500 * time.Millisecond
)

// script is the common pattern in a pod: BIRD advertises static routes, the kernel forwards to
// targets by multipath routes, and a loop checks the targets once a second, rewrites both and runs
// birdc configure.
type script struct {
	pod  *lab.Pod
	addr []netip.Addr // of the pod, toward the gateways

	mu      sync.Mutex
	targets []int    // configured ones
	up      [2][]int // healthy targets of each stream at the last poll
	listed  []string // VIPs in the configuration
	hold    int
	end     context.CancelFunc // nil while the loop does not run
	loop    sync.WaitGroup
	dir     string
}

// startReference starts BIRD in a pod with every VIP, and the loop.
func (fx *fixture) startReference(pod int) error {
	s := &script{pod: fx.Pods[pod], addr: lab.PodExternal(pod + 1), hold: 3, dir: fx.Pods[pod].Dir}
	for n := 1; n <= targets; n++ {
		if strings.Contains(fx.text, targetLine(n)) {
			s.targets = append(s.targets, n)
		}
	}
	for _, vip := range vips {
		s.listed = append(s.listed, vip.String())
	}
	fx.scripts[pod] = s
	return s.start(fx, 0)
}

// start starts BIRD, and after a delay the loop.
func (s *script) start(fx *fixture, delay time.Duration) error {
	s.up = [2][]int{}
	for _, n := range s.targets {
		s.up[(n-1)/2] = append(s.up[(n-1)/2], n)
	}
	if err := s.write(); err != nil {
		return err
	}
	var err error
	s.pod.Frontend, err = fx.Start(s.pod.NS, "reference-bird", lab.BIRD(), "-f", "-c", s.path("bird.conf"), "-s",
		s.path("bird.ctl"))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.end = cancel
	s.loop.Go(func() {
		for sleep(ctx, delay) {
			s.poll(ctx)
			delay = scriptInterval
		}
	})
	return nil
}

// stop ends the loop.
func (s *script) stop() {
	s.end()
	s.loop.Wait()
}

// restart restarts BIRD and, after a delay, the loop: nothing forwards until its first round.
func (s *script) restart(fx *fixture, delay time.Duration) error {
	s.stop()
	if err := kill(s.pod.Frontend); err != nil {
		return err
	}
	for _, vip := range vips {
		_ = s.pod.NS.IP("route", "del", vip.String()) // as after the start of a machine
	}
	return s.start(fx, delay)
}

func (s *script) path(name string) string { return filepath.Join(s.dir, name) }

// poll checks the targets and applies the result. An error shows in the log of BIRD.
func (s *script) poll(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var up [2][]int
	for _, n := range s.targets {
		if s.healthy(ctx, n) {
			up[(n-1)/2] = append(up[(n-1)/2], n)
		}
	}
	changed := !slices.EqualFunc(up[:], s.up[:], slices.Equal[[]int])
	s.up = up
	s.forward()
	if changed {
		_ = s.configure()
	}
}

// healthy reports whether a target accepts connections.
func (s *script) healthy(ctx context.Context, n int) bool {
	bound, cancel := context.WithTimeout(ctx, scriptTimeout)
	defer cancel()
	return s.pod.NS.Do(func() error {
		conn, err := (&net.Dialer{FallbackDelay: -1}).DialContext(bound, "tcp4",
			netip.AddrPortFrom(lab.TargetAddrs(n)[0], lab.HealthPort).String())
		if err == nil {
			conn.Close()
		}
		return err
	}) == nil
}

// forward installs a multipath route to the healthy targets for each VIP.
func (s *script) forward() {
	for i, vip := range vips {
		line := "route replace " + vip.String()
		for _, n := range s.up[i/2] {
			line += fmt.Sprintf(" nexthop via %s dev %s", lab.TargetAddrs(n)[i%2], lab.Internal)
		}
		if len(s.up[i/2]) > 0 {
			_ = s.pod.NS.Batch(line) // an interface may be down
		}
	}
}

// write writes BIRD's configuration: a static route for each VIP with a healthy target.
func (s *script) write() error {
	var b strings.Builder
	fmt.Fprintf(&b, "router id %s;\nlog stderr all;\nprotocol device { scan time 1; }\n", s.addr[0])
	for family, channel := range []string{"ipv4", "ipv6"} {
		fmt.Fprintf(&b, "protocol kernel K%[1]s { %[1]s { export where source = RTS_BGP; }; }\n", channel)
		for _, g := range []lab.GatewayConfig{lab.GatewayA(), lab.GatewayB()} {
			fmt.Fprintf(&b, `protocol bgp {
	interface %q; local %s port %d as %d; neighbor %s port %d as %d;
	direct; strict bind; graceful restart off; hold time %d;
	connect delay time 1; connect retry time 5; error wait time 1, 5;
	%s { import all; export where source = RTS_STATIC; next hop self; };
}
`, lab.External, s.addr[family], lab.BGPPort, lab.PodAS, g.Local[family], lab.BGPPort, g.LocalAS, s.hold, channel)
		}
		fmt.Fprintf(&b, "protocol static V%[1]s {\n\t%[1]s;\n", channel)
		for i, vip := range vips {
			if i%2 == family && len(s.up[i/2]) > 0 && slices.Contains(s.listed, vip.String()) {
				fmt.Fprintf(&b, "\troute %s blackhole;\n", netip.PrefixFrom(vip, vip.BitLen()))
			}
		}
		b.WriteString("}\n")
	}
	return os.WriteFile(s.path("bird.conf"), []byte(b.String()), 0o600)
}

// configure has BIRD read its rewritten configuration.
func (s *script) configure() error {
	if err := s.write(); err != nil {
		return err
	}
	birdc := filepath.Join(filepath.Dir(lab.BIRD()), "birdc")
	out, err := exec.Command(birdc, "-s", s.path("bird.ctl"), "configure").CombinedOutput()
	if err != nil {
		return fmt.Errorf("birdc configure: %w: %s", err, out)
	}
	return nil
}

// eachScript applies an edit to the script of every pod.
func (fx *fixture) eachScript(edit func(*script) error) error {
	var errs []error
	for _, s := range fx.scripts {
		if s != nil {
			s.mu.Lock()
			errs = append(errs, edit(s))
			s.mu.Unlock()
		}
	}
	return errors.Join(errs...)
}

// changeHoldTime edits the hold time of every session.
func (s *script) changeHoldTime() error {
	s.hold++
	return s.configure()
}
