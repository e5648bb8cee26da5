package lab

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// GoBGP is a gobgpd that plays the external router. It has no BFD, and it
// leaves the kernel's routes alone.
type GoBGP struct {
	GatewayConfig
	NS      *NetNS
	Process *Process

	dir string
}

// MissingForGoBGP returns the program that this machine lacks for a gobgpd gateway, or "".
func MissingForGoBGP() string {
	for _, program := range []string{"gobgpd", "gobgp"} {
		if _, err := exec.LookPath(program); err != nil {
			return program + " (Debian: apt-get install gobgpd)"
		}
	}
	return ""
}

// StartGoBGP starts gobgpd in a namespace with its files in a folder in dir. If it returns both
// a gateway and an error, gobgpd may run.
func StartGoBGP(ns *NetNS, dir string, c GatewayConfig) (*GoBGP, error) {
	if c.BFD {
		return nil, fmt.Errorf("gateway %s: gobgpd has no BFD", c.Name)
	}
	g := &GoBGP{GatewayConfig: c, NS: ns, dir: filepath.Join(dir, c.Name)}
	if err := os.MkdirAll(g.dir, 0o700); err != nil {
		return nil, fmt.Errorf("gateway %s: %w", c.Name, err)
	}
	return g, g.Start()
}

// Config returns the configuration with which the gateway was started.
func (g *GoBGP) Config() GatewayConfig { return g.GatewayConfig }

// Processes returns the gateway's gobgpd.
func (g *GoBGP) Processes() []*Process {
	if g.Process == nil {
		return nil
	}
	return []*Process{g.Process}
}

// Start writes the configuration and starts gobgpd (again), unless it runs, and
// gives it the routes to send.
func (g *GoBGP) Start() error {
	if running(g.Process) {
		return nil
	}
	if err := g.start(); err != nil {
		return fmt.Errorf("gateway %s: %w", g.Name, err)
	}
	return nil
}

func (g *GoBGP) start() error {
	conf := filepath.Join(g.dir, "gobgpd.toml")
	text, err := g.text("gobgp")
	if err == nil {
		err = os.WriteFile(conf, []byte(text), 0o600)
	}
	if err != nil {
		return err
	}
	// A killed gobgpd does not remove its control socket.
	if err := os.Remove(g.socket()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	g.Process, err = StartProcess(
		g.NS, g.dir, "gobgpd", "gobgpd", "-f", conf, "--api-hosts", "unix://"+g.socket(), "--pprof-disable", "-l", "debug",
	)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	for line := range strings.Lines(text) {
		// The routes are in comments.
		line, isRoute := strings.CutPrefix(line, "# gobgp ")
		if !isRoute {
			continue
		}
		err := Eventually(ctx, 20*time.Millisecond, func() error {
			if !running(g.Process) {
				return fmt.Errorf("gobgpd ended: %s", g.Process.Tail(5))
			}
			_, err := g.Command(ctx, strings.Fields(line)...)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (g *GoBGP) socket() string    { return filepath.Join(g.dir, "gobgp.sock") }
func (g *GoBGP) tracePath() string { return filepath.Join(g.dir, "gobgpd.log") }

// Command runs gobgp, the client of gobgpd.
func (g *GoBGP) Command(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "gobgp", append([]string{"--target", "unix://" + g.socket()}, args...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("gobgp %s on gateway %s: %w: %s%s", strings.Join(args, " "), g.Name, err, stderr.String(),
			out)
	}
	return string(out), nil
}

// Reset ends every session with a NOTIFICATION. gobgpd then refuses them for 30 s.
func (g *GoBGP) Reset(ctx context.Context) error {
	var errs []error
	for _, peer := range g.Peers {
		_, err := g.Command(ctx, "neighbor", peer.String(), "reset")
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// goBGPPath is one path of `gobgp -j global rib`.
type goBGPPath struct {
	Best     bool             `json:"best"`
	Attrs    []goBGPAttribute `json:"attrs"`
	Neighbor string           `json:"neighbor-ip"` // "" for routes that gobgpd itself originates
}

type goBGPPrefix struct {
	Prefix netip.Prefix `json:"prefix"`
}

// goBGPAttribute is a path attribute.
type goBGPAttribute struct {
	Type    int `json:"type"` // its number (RFC 4271, section 5)
	ASPaths []struct {
		ASNs []uint32 `json:"asns"`
	} `json:"as_paths"`
	NextHop     string          `json:"nexthop"`
	Communities []uint32        `json:"communities"`
	Metric      json.RawMessage `json:"metric"`
	// Value is a number or, of the attributes of RFC 4760, a list of prefixes.
	Value json.RawMessage `json:"value"`
}

// Numbers of path attributes: RFC 4271, RFC 1997, RFC 4760.
const (
	attributeASPath      = 2
	attributeNextHop     = 3
	attributeMED         = 4
	attributeLocalPref   = 5
	attributeCommunities = 8
	attributeReach       = 14
	attributeUnreach     = 15

	attributeExtendedCommunities = 16
	attributeLargeCommunities    = 32
)

// Routes returns the routes learned over BGP, by prefix: of several routes to one prefix, the
// best one.
func (g *GoBGP) Routes(ctx context.Context) (map[netip.Prefix]Route, error) {
	routes := map[netip.Prefix]Route{}
	for _, family := range []string{"ipv4", "ipv6"} {
		out, err := g.Command(ctx, "-j", "global", "rib", "-a", family)
		if err != nil {
			return nil, err
		}
		if err := parseGoBGPRoutes(out, routes); err != nil {
			return nil, fmt.Errorf("routes of gateway %s: %w", g.Name, err)
		}
	}
	return routes, nil
}

// parseGoBGPRoutes reads `gobgp -j global rib`.
func parseGoBGPRoutes(out string, routes map[netip.Prefix]Route) error {
	var table map[netip.Prefix][]goBGPPath
	if err := json.Unmarshal([]byte(out), &table); err != nil {
		return err
	}
	for prefix, paths := range table {
		for _, p := range paths {
			if !p.Best || p.Neighbor == "" {
				continue
			}
			r := Route{Prefix: prefix}
			for _, a := range p.Attrs {
				if err := a.addTo(&r); err != nil {
					return err
				}
			}
			routes[prefix] = r
		}
	}
	return nil
}

// addTo adds an attribute to a route.
func (a goBGPAttribute) addTo(r *Route) error {
	switch a.Type {
	case attributeASPath:
		for _, segment := range a.ASPaths {
			for _, as := range segment.ASNs {
				r.ASPath = append(r.ASPath, strconv.FormatUint(uint64(as), 10))
			}
		}
	case attributeNextHop, attributeReach:
		var err error
		if r.NextHop, err = netip.ParseAddr(a.NextHop); err != nil {
			return err
		}
	case attributeLocalPref:
		r.LocalPref = string(a.Value)
	case attributeMED:
		r.MED = cmp.Or(string(a.Metric), string(a.Value))
	case attributeLargeCommunities:
		var large []struct{ ASN, LocalData1, LocalData2 uint32 }
		if err := json.Unmarshal(a.Value, &large); err != nil {
			return fmt.Errorf("large communities: %w", err)
		}
		for _, c := range large {
			r.Communities = append(r.Communities, fmt.Sprintf("(%d,%d,%d)", c.ASN, c.LocalData1, c.LocalData2))
		}
	case attributeExtendedCommunities:
		r.Bandwidth = string(a.Value)
	case attributeCommunities:
		for _, c := range a.Communities {
			r.Communities = append(r.Communities, fmt.Sprintf("(%d,%d)", c>>16, c&0xffff))
		}
	}
	return nil
}

// WantRoutes waits until exactly these prefixes are in the gateway's table.
func (g *GoBGP) WantRoutes(ctx context.Context, prefixes ...string) error {
	return wantRoutes(ctx, g, prefixes)
}

// Trace returns every update that the gateway received so far, in order and without
// gaps. Its times are in whole seconds, up to 1 s too early.
func (g *GoBGP) Trace() ([]RouteUpdate, error) {
	return readTrace(g.Name, g.tracePath(), parseGoBGPTrace)
}

// goBGPLine is a line of gobgpd's log.
type goBGPLine struct {
	Message     string           `json:"msg"`
	Neighbor    string           `json:"Key"`
	Time        time.Time        `json:"time"`
	Attributes  []goBGPAttribute `json:"attributes"`
	Prefixes    []goBGPPrefix    `json:"nlri"`
	Withdrawals []goBGPPrefix    `json:"withdrawals"`
}

// Messages of gobgpd's log.
const (
	goBGPStarted  = "gobgpd started"
	goBGPReceived = "received update"
	goBGPDown     = "Peer Down"
)

// parseGoBGPTrace reads gobgpd's log: one object of JSON a line.
func parseGoBGPTrace(log string) ([]RouteUpdate, error) {
	var trace []RouteUpdate
	held := adjRIBIn{}
	for line := range strings.Lines(log) {
		if !strings.HasSuffix(line, "\n") {
			continue // still being written
		}
		var name struct {
			Message string `json:"msg"`
		}
		if json.Unmarshal([]byte(line), &name) != nil {
			continue // not from its logger
		}
		switch name.Message {
		case goBGPStarted:
			clear(held) // a new process has no routes
		case goBGPReceived, goBGPDown:
			var l goBGPLine
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				return nil, fmt.Errorf("line %q of gobgpd's log: %w", line, err)
			}
			if name.Message == goBGPDown {
				trace = append(trace, held.down(l.Neighbor, l.Time)...)
				continue
			}
			received, err := l.updates(held)
			if err != nil {
				return nil, fmt.Errorf("line %q of gobgpd's log: %w", line, err)
			}
			trace = append(trace, received...)
		}
	}
	return trace, nil
}

// updates returns the updates of an UPDATE message.
func (l goBGPLine) updates(held adjRIBIn) ([]RouteUpdate, error) {
	announced, withdrawn := l.Prefixes, l.Withdrawals
	var r Route
	for _, a := range l.Attributes {
		var more []goBGPPrefix
		if a.Type == attributeReach || a.Type == attributeUnreach {
			// The message that ends an initial transfer has no list.
			if len(a.Value) > 0 {
				if err := json.Unmarshal(a.Value, &more); err != nil {
					return nil, err
				}
			}
		}
		if a.Type == attributeUnreach {
			withdrawn = append(withdrawn, more...)
			continue
		}
		announced = append(announced, more...)
		if err := a.addTo(&r); err != nil {
			return nil, err
		}
	}
	var trace []RouteUpdate
	for _, p := range withdrawn {
		trace = append(trace, held.withdraw(l.Neighbor, l.Time, p.Prefix)...)
	}
	for _, p := range announced {
		u := RouteUpdate{At: l.Time, Prefix: p.Prefix, ASPath: r.ASPath, Communities: r.Communities}
		trace = append(trace, held.announce(l.Neighbor, u))
	}
	return trace, nil
}
