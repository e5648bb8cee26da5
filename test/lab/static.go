package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
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

// StartStatic starts a static gateway of a kind, BIRD or FRR, in a namespace; Close ends it.
// With BIRD the kernel of the namespace follows the BFD sessions. FRR before 8.5 does not
// monitor static routes: only its BFD sessions behave as a gateway's.
func (l *Lab) StartStatic(kind Kind, ns *NetNS, c GatewayConfig) (StaticGateway, error) {
	dir := filepath.Join(l.Dir, c.Name)
	c.BFD = true
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
	text, err := g.text("bird")
	if err == nil {
		text = strings.Replace(text, "protocol bfd {", "protocol bfd { debug { events };", 1)
		err = os.WriteFile(conf, []byte(text), 0o600)
	}
	if err != nil {
		return fmt.Errorf("gateway %s: %w", g.Name, err)
	}
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
	text, err := g.text("frr")
	if err == nil {
		// FRR before 8.5 has no static routes that follow BFD.
		err = g.write(regexp.MustCompile(`(?m)^(ip|ipv6) route .*\n`).ReplaceAllString(text, ""))
	}
	if err != nil {
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
