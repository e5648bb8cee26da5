package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

// StaticGateway is a gateway without BGP: it has static routes to VIPs, guarded by BFD sessions with
// the pods.
type StaticGateway interface {
	// Start starts the processes that do not run, with the configuration.
	Start() error
	// Processes are its processes, also those that ended.
	Processes() []*Process
	// BFD returns whether the BFD session with each peer is up.
	BFD(ctx context.Context) (map[netip.Addr]bool, error)
	// BFDUps returns how often BFD sessions came up since the start of the gateway.
	BFDUps(ctx context.Context) (int, error)
}

// StaticFamily is the configuration of a static gateway for one address family.
type StaticFamily struct {
	Number int // 4 or 6
	VIPs   []netip.Prefix
	Pods   []netip.Addr
}

// StaticFamilies returns the address families of the static routes.
func (c GatewayConfig) StaticFamilies() []StaticFamily {
	var families []StaticFamily
	for _, number := range []int{4, 6} {
		f := StaticFamily{Number: number}
		for _, v := range c.VIPs {
			if v.Addr().Is4() == (number == 4) {
				f.VIPs = append(f.VIPs, v)
			}
		}
		for _, p := range c.Peers {
			if p.Is4() == (number == 4) {
				f.Pods = append(f.Pods, p)
			}
		}
		if len(f.VIPs) > 0 && len(f.Pods) > 0 {
			families = append(families, f)
		}
	}
	return families
}

// StartStatic starts a static gateway of a kind, BIRD or FRR, in a namespace; Close ends it.
// With BIRD the kernel of the namespace follows the BFD sessions. FRR before 8.5 does not
// monitor static routes: only its BFD sessions behave as a gateway's.
func (l *Lab) StartStatic(kind Kind, ns *NetNS, c GatewayConfig) (StaticGateway, error) {
	dir := filepath.Join(l.Dir, c.Name)
	switch kind {
	case KindBIRD:
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("gateway %s: %w", c.Name, err)
		}
		g := &staticBIRD{Gateway{GatewayConfig: c, NS: ns, dir: dir, socket: filepath.Join(dir, "bird.ctl")}}
		err := g.Start()
		l.processes = append(l.processes, g.started()...)
		return g, err
	case KindFRR:
		if err := os.Chmod(l.Dir, 0o711); err != nil { // FRR's daemons run as a separate user
			return nil, fmt.Errorf("gateway %s: %w", c.Name, err)
		}
		c.BFD = true
		g := &staticFRR{FRR{GatewayConfig: c, NS: ns, dir: dir, daemons: map[string]*Process{}}}
		err := g.makeFolder()
		if err == nil {
			err = g.Start()
		}
		l.processes = append(l.processes, g.Processes()...)
		return g, err
	case KindGoBGP:
	}
	return nil, fmt.Errorf("there is no static gateway of kind %q", kind)
}

// staticBIRD is a BIRD with static routes.
type staticBIRD struct{ Gateway }

func (g *staticBIRD) started() []*Process {
	if g.Process == nil {
		return nil
	}
	return []*Process{g.Process}
}

// Start writes the configuration and starts BIRD, unless it runs.
func (g *staticBIRD) Start() error {
	if running(g.Process) {
		return nil
	}
	conf := filepath.Join(g.dir, "bird.conf")
	if err := writeRendered(conf, "bird-static.conf.tmpl", rendered{g.GatewayConfig, "stderr"}); err != nil {
		return fmt.Errorf("gateway %s: %w", g.Name, err)
	}
	var err error
	g.Process, err = StartProcess(g.NS, g.dir, "bird", BIRD(), "-f", "-c", conf, "-s", g.socket)
	return err
}

// BFD reads BIRD's `show bfd sessions`: address, interface, state and times.
func (g *staticBIRD) BFD(ctx context.Context) (map[netip.Addr]bool, error) {
	out, err := g.Command(ctx, "show bfd sessions")
	if err != nil {
		return nil, err
	}
	sessions := map[netip.Addr]bool{}
	for line := range strings.Lines(out) {
		words := strings.Fields(line)
		if len(words) < 3 {
			continue
		}
		if a, err := netip.ParseAddr(words[0]); err == nil {
			sessions[a] = words[2] == "Up"
		}
	}
	return sessions, nil
}

// BFDUps counts the lines of BIRD's log.
func (g *staticBIRD) BFDUps(context.Context) (int, error) {
	return strings.Count(g.Process.Output(), " to Up"), nil
}

// staticFRR is FRR's bfdd.
type staticFRR struct{ FRR }

// Start starts zebra and bfdd, and gives bfdd the configuration.
func (g *staticFRR) Start() error {
	if err := errors.Join(
		writeRendered(filepath.Join(g.dir, "frr.conf"), "frr-static.conf.tmpl", rendered{GatewayConfig: g.GatewayConfig}),
		os.WriteFile(filepath.Join(g.dir, "vtysh.conf"), nil, 0o600),
	); err != nil {
		return fmt.Errorf("gateway %s: %w", g.Name, err)
	}
	for _, name := range []string{"zebra", "bfdd"} {
		if running(g.daemons[name]) {
			continue
		}
		if err := g.runDaemon(name, nil); err != nil {
			return fmt.Errorf("%s of gateway %s: %w", name, g.Name, err)
		}
	}
	return nil
}

// frrPeer is one entry of FRR's `show bfd peers json` and `show bfd peers counters json`.
type frrPeer struct {
	Peer   netip.Addr `json:"peer"`
	Status string     `json:"status"`
	Ups    int        `json:"session-up"`
}

func (g *staticFRR) peers(ctx context.Context, command string) ([]frrPeer, error) {
	out, err := g.vtysh(ctx, "-d", "bfdd", "-c", command)
	if err != nil {
		return nil, err
	}
	var peers []frrPeer
	if err := json.Unmarshal([]byte(out), &peers); err != nil {
		return nil, fmt.Errorf("%s of gateway %s: %w", command, g.Name, err)
	}
	return peers, nil
}

// BFD reads FRR's `show bfd peers json`.
func (g *staticFRR) BFD(ctx context.Context) (map[netip.Addr]bool, error) {
	peers, err := g.peers(ctx, "show bfd peers json")
	sessions := map[netip.Addr]bool{}
	for _, p := range peers {
		sessions[p.Peer] = p.Status == "up"
	}
	return sessions, err
}

// BFDUps adds the counters of the sessions.
func (g *staticFRR) BFDUps(ctx context.Context) (int, error) {
	peers, err := g.peers(ctx, "show bfd peers counters json")
	ups := 0
	for _, p := range peers {
		ups += p.Ups
	}
	return ups, err
}
