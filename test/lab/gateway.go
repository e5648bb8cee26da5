package lab

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// GatewayConfig describes a BIRD gateway.
type GatewayConfig struct {
	Name     string
	RouterID netip.Addr
	LocalAS  uint32
	RemoteAS uint32
	Port     uint16
	Local    []netip.Addr // one session for each, with the peer of the same index
	Peers    []netip.Addr
	// Ranges are subnets of peers whose addresses are not known in advance, one for each local
	// address; Peers then only gives the family of each.
	Ranges []netip.Prefix
	BFD    bool
	// BFDMultiplier is how many packets, 100 ms apart, a peer of BFD may miss; the constant of this
	// name when 0.
	BFDMultiplier int
	Password      string
	// Passive is true when the gateway waits for the peer to connect.
	Passive bool
	// HoldSeconds is the offered hold time: the constant HoldSeconds when 0, none when negative.
	HoldSeconds int
	// Default is true when the gateway sends default routes.
	Default bool
	// Routes are further prefixes that it sends.
	Routes []netip.Prefix
	// VIPs are the VIPs to which a static gateway has routes.
	VIPs []netip.Prefix
	// Text, if set, is the daemon's whole configuration.
	Text string
}

// Gateway is a BIRD that plays the external router.
type Gateway struct {
	GatewayConfig
	NS      *NetNS
	Process *Process
	dir     string
	socket  string
}

// StartGateway starts BIRD in a namespace with its files in dir.
func StartGateway(ns *NetNS, dir string, c GatewayConfig) (*Gateway, error) {
	g := &Gateway{GatewayConfig: c, NS: ns, dir: filepath.Join(dir, c.Name)}
	g.socket = filepath.Join(g.dir, "bird.ctl")
	if err := os.MkdirAll(g.dir, 0o700); err != nil {
		return nil, fmt.Errorf("gateway %s: %w", c.Name, err)
	}
	return g, g.Start()
}

// Start writes the configuration and starts BIRD (again), unless it runs.
func (g *Gateway) Start() error {
	if running(g.Process) {
		return nil
	}
	conf := filepath.Join(g.dir, "bird.conf")
	text, err := g.text("bird")
	if err == nil {
		err = os.WriteFile(conf, []byte(g.traced(text)), 0o600)
	}
	if err != nil {
		return fmt.Errorf("gateway %s: %w", g.Name, err)
	}
	g.Process, err = StartProcess(g.NS, g.dir, "bird", BIRD(), "-f", "-c", conf, "-s", g.socket)
	return err
}

// traced adds the log of received updates to BIRD's configuration.
func (g *Gateway) traced(text string) string {
	return fmt.Sprintf("timeformat log iso long us;\nlog %q { info, trace };\n", g.tracePath()) + strings.NewReplacer(
		"\tgraceful restart off;\n", "\tgraceful restart off;\n\tdebug { states, routes };\n",
		"import all;", "import filter {"+heard+"};", "\timport filter {\n", "\timport filter {"+reading+"\n",
		"import where net ~ VIPS4;", "import filter { if net !~ VIPS4 then reject;"+heard+"};",
		"import where net ~ VIPS6;", "import filter { if net !~ VIPS6 then reject;"+heard+"};",
	).Replace(text)
}

// reading logs a received route in a filter, and heard accepts it.
const (
	reading = ` print "heard ", net, " ", bgp_path, " ", bgp_community, " ", proto;`
	heard   = reading + " accept; "
)

// Socket returns the control socket of the gateway's BIRD.
func (g *Gateway) Socket() string { return g.socket }

// BIRD returns the path of the BIRD daemon, which Debian keeps out of a user's PATH.
func BIRD() string {
	if path, err := exec.LookPath("bird"); err == nil {
		return path
	}
	return "/usr/sbin/bird"
}

// Command sends a command to the gateway's BIRD.
func (g *Gateway) Command(ctx context.Context, line string) (string, error) {
	text, err := command(ctx, g.socket, line)
	if err != nil {
		return "", fmt.Errorf("birdc %s on gateway %s: %w", line, g.Name, err)
	}
	return text, nil
}

// Route is one route in the gateway's table.
type Route struct {
	Prefix      netip.Prefix
	NextHop     netip.Addr
	ASPath      []string
	Communities []string // also large ones, without spaces
	LocalPref   string
	MED         string // "" or "0" without one
	Bandwidth   string // of the link (draft-ietf-idr-link-bandwidth), as the daemon shows it; "" without one
}

// GracefulShutdown reports whether the route carries 65535:0 (RFC 8326).
func (r Route) GracefulShutdown() bool { return slices.Contains(r.Communities, "(65535,0)") }

// Routes returns the routes learned over BGP, by prefix: of several routes to one prefix, the
// best one.
func (g *Gateway) Routes(ctx context.Context) (map[netip.Prefix]Route, error) {
	out, err := g.Command(ctx, learned)
	if err != nil {
		return nil, err
	}
	routes := map[netip.Prefix]Route{}
	parseRoutes(out, routes)
	return routes, nil
}

// parseRoutes reads BIRD's `show route all`, by words: columns differ between
// versions. BIRD names a prefix once and then lists its routes, the best one first.
func parseRoutes(out string, routes map[netip.Prefix]Route) {
	var current netip.Prefix
	lines := bufio.NewScanner(strings.NewReader(out))
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) == 0 {
			continue
		}
		if p, err := netip.ParsePrefix(words[0]); err == nil {
			current = p
			routes[p] = Route{Prefix: p}
			continue
		}
		if len(words) > 1 && strings.HasPrefix(words[1], "[") {
			current = netip.Prefix{} // another route to the same prefix
			continue
		}
		r, known := routes[current]
		if !known {
			continue
		}
		switch {
		case words[0] == "via" && len(words) > 1:
			if a, err := netip.ParseAddr(words[1]); err == nil {
				r.NextHop = a
			}
		case strings.HasSuffix(words[0], "as_path:"):
			r.ASPath = words[1:]
		case strings.HasSuffix(words[0], "large_community:"):
			list := strings.ReplaceAll(strings.Join(words[1:], " "), ", ", ",")
			r.Communities = append(r.Communities, strings.Fields(list)...)
		case strings.HasSuffix(words[0], "ext_community:"):
			r.Bandwidth = strings.Join(words[1:], " ")
		case strings.HasSuffix(words[0], "community:"):
			r.Communities = append(words[1:len(words):len(words)], r.Communities...)
		case strings.HasSuffix(words[0], "med:") && len(words) > 1:
			r.MED = words[1]
		case strings.HasSuffix(words[0], "local_pref:") && len(words) > 1:
			r.LocalPref = words[1]
		}
		routes[current] = r
	}
}

// WantRoutes waits until exactly these prefixes are in the gateway's table.
func (g *Gateway) WantRoutes(ctx context.Context, prefixes ...string) error {
	return wantRoutes(ctx, g, prefixes)
}

// Updates counts the updates of a prefix that the gateway received so far: every announcement,
// including a repeated one, and every end of its route. It returns -1 if the trace cannot be
// read.
func (g *Gateway) Updates(prefix string) int {
	trace, err := g.Trace()
	if err != nil {
		return -1
	}
	n := 0
	for _, u := range trace {
		if u.Prefix.String() == prefix {
			n++
		}
	}
	return n
}
