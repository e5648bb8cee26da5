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

// script is the common pattern in a pod: BIRD advertises static routes, the kernel forwards to
// targets by multipath routes, and a loop checks the targets once a second, rewrites both and runs
// birdc configure.
type script struct {
	pod      *lab.Pod
	dns      bool         // the checks are DNS queries
	external []netip.Addr // addresses of the pod toward the gateways
	end      context.CancelFunc
	loop     sync.WaitGroup

	mu        sync.Mutex
	targets   []int        // configured ones
	up        [2][]int     // healthy targets of each stream at the last poll
	listed    []netip.Addr // configured VIPs
	neighbors [][]netip.Addr
	hold      int
}

// newScript returns the script of a pod with everything configured and healthy.
func (fx *fixture) newScript(pod int) *script {
	return &script{
		pod: fx.Pods[pod], dns: fx.scenario.dns, external: lab.PodExternal(pod + 1), targets: []int{1, 2, 3, 4},
		up: [2][]int{{1, 2}, {3, 4}}, listed: vips, hold: 3,
		neighbors: [][]netip.Addr{lab.GatewayA().Local, lab.GatewayB().Local},
	}
}

// start starts BIRD with every VIP, and after a delay the loop.
func (s *script) start(fx *fixture, delay time.Duration) (err error) {
	if err := s.write(); err != nil {
		return err
	}
	if s.pod.Frontend, err = fx.Start(s.pod.NS, "reference", lab.BIRD(), "-f", "-c", s.path("bird.conf"), "-s",
		s.path("bird.ctl")); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.end = cancel
	s.loop.Go(func() {
		for ; sleep(ctx, delay); delay = time.Second {
			s.poll(ctx)
		}
	})
	return nil
}

// restart restarts BIRD and, after a delay, the loop. Nothing forwards until its first round, as
// after the start of a machine.
func (s *script) restart(fx *fixture, delay time.Duration) error {
	s.stop()
	errs := []error{kill(s.pod.Frontend)}
	for _, vip := range vips {
		errs = append(errs, s.pod.NS.IP("route", "del", vip.String()))
	}
	return errors.Join(append(errs, s.start(fx, delay))...)
}

// stop ends the loop.
func (s *script) stop() {
	s.end()
	s.loop.Wait()
}

func (s *script) path(name string) string { return filepath.Join(s.pod.Dir, name) }

// poll checks the targets and applies the result. The next poll follows a failed one.
func (s *script) poll(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.up
	s.up = [2][]int{}
	for _, n := range s.targets {
		if s.healthy(ctx, n) {
			s.up[(n-1)/2] = append(s.up[(n-1)/2], n)
		}
	}
	for i, vip := range vips {
		line := "route replace " + vip.String()
		for _, n := range s.up[i/2] {
			line += fmt.Sprintf(" nexthop via %s dev %s", lab.TargetAddrs(n)[i%2], lab.Internal)
		}
		if len(s.up[i/2]) > 0 {
			_ = s.pod.NS.Batch(line)
		}
	}
	if !slices.EqualFunc(before[:], s.up[:], slices.Equal[[]int]) {
		_ = s.configure()
	}
}

// healthy reports whether a target accepts connections, or answers DNS queries.
func (s *script) healthy(ctx context.Context, n int) bool {
	bound, cancel := context.WithTimeout(ctx, time.Second/2)
	defer cancel()
	if s.dns {
		return resolves(bound, s.pod.NS, lab.TargetAddrs(n)[0])
	}
	address := netip.AddrPortFrom(lab.TargetAddrs(n)[0], lab.HealthPort).String()
	return s.pod.NS.Do(func() error {
		conn, err := new(net.Dialer).DialContext(bound, "tcp", address)
		if err != nil {
			return err
		}
		return conn.Close()
	}) == nil
}

func (s *script) write() error { return os.WriteFile(s.path("bird.conf"), []byte(s.config()), 0o600) }

// config returns BIRD's configuration: a static route for each VIP with a healthy target.
func (s *script) config() string {
	var b strings.Builder
	fmt.Fprintf(&b, "router id %s;\nlog stderr all;\nprotocol device { scan time 1; }\n", s.external[0])
	for family, channel := range []string{"ipv4", "ipv6"} {
		fmt.Fprintf(&b, "protocol kernel K%[1]s { %[1]s { export where source = RTS_BGP; }; }\n", channel)
		for i, neighbor := range s.neighbors {
			fmt.Fprintf(&b, `protocol bgp {
	interface %q; local %s port %d as %d; neighbor %s port %d as %d;
	direct; strict bind; graceful restart off; hold time %d;
	connect delay time 1; connect retry time 5; error wait time 1, 5;
	%s { import all; import limit 1000 action disable; export where source = RTS_STATIC; next hop self; };
}
`, lab.External, s.external[family], lab.BGPPort, lab.PodAS, neighbor[family], lab.BGPPort,
				[]uint32{lab.GatewayAS, lab.GatewayBAS}[i], s.hold, channel)
		}
		fmt.Fprintf(&b, "protocol static V%[1]s {\n\t%[1]s;\n", channel)
		for i, vip := range vips {
			if i%2 == family && len(s.up[i/2]) > 0 && slices.Contains(s.listed, vip) {
				fmt.Fprintf(&b, "\troute %s blackhole;\n", netip.PrefixFrom(vip, vip.BitLen()))
			}
		}
		b.WriteString("}\n")
	}
	return b.String()
}

// configure has BIRD read its rewritten configuration.
func (s *script) configure() error { return errors.Join(s.write(), birdConfigure(s.path("bird.ctl"))) }

// birdConfigure has a BIRD read its configuration.
func birdConfigure(socket string) error {
	birdc := filepath.Join(filepath.Dir(lab.BIRD()), "birdc")
	out, err := exec.Command(birdc, "-s", socket, "configure").CombinedOutput()
	if err != nil {
		return fmt.Errorf("birdc configure: %w: %s", err, out)
	}
	return nil
}

// scripted returns an incident that edits the script of every pod.
func scripted(edit func(*script)) func(context.Context, *fixture) error {
	return func(_ context.Context, fx *fixture) error {
		var errs []error
		for _, s := range fx.scripts {
			s.mu.Lock()
			edit(s)
			errs = append(errs, s.configure())
			s.mu.Unlock()
		}
		return errors.Join(errs...)
	}
}
