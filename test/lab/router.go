package lab

import (
	"context"
	"embed"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"text/template"
	"time"
)

// Router is a gateway of any kind: a routing daemon that plays the external
// router.
type Router interface {
	// Config returns the configuration with which it was started.
	Config() GatewayConfig
	// Start starts the processes that do not run, with the configuration.
	Start() error
	// Processes returns its processes, including those that ended; a later Start creates new ones.
	Processes() []*Process
	// Reset ends every BGP session with a NOTIFICATION; they come back by themselves.
	Reset(ctx context.Context) error
	// Routes returns the routes learned over BGP, by prefix: of several routes to one prefix, the
	// best one.
	Routes(ctx context.Context) (map[netip.Prefix]Route, error)
	// WantRoutes waits until exactly these prefixes are among its routes.
	WantRoutes(ctx context.Context, prefixes ...string) error
	// Trace returns every update received so far, in order and without gaps. Updates that are lost
	// with the end of the process are missing.
	Trace() ([]RouteUpdate, error)
}

// Kind is the routing daemon of a Router.
type Kind string

// The kinds of gateways.
const (
	KindBIRD  Kind = "BIRD"
	KindFRR   Kind = "FRR"
	KindGoBGP Kind = "GoBGP"
)

// Missing returns the program that this machine lacks for a kind of gateway, or "".
func (k Kind) Missing() string {
	switch k {
	case KindFRR:
		return MissingForFRR()
	case KindGoBGP:
		return MissingForGoBGP()
	default:
		return "" // no lab without BIRD
	}
}

// StartRouter starts a gateway of a kind in a namespace, which is Gateway or the result of
// SecondGateway; Close ends it. All programs that Missing checks must be installed.
func (l *Lab) StartRouter(kind Kind, ns *NetNS, c GatewayConfig) (Router, error) {
	switch kind {
	case KindBIRD:
		g, err := StartGateway(ns, l.Dir, c)
		if err != nil {
			return nil, err
		}
		l.processes = append(l.processes, g.Process)
		return g, nil
	case KindFRR:
		// FRR's daemons run as a separate user, which needs search permission for the directory.
		if err := os.Chmod(l.Dir, 0o711); err != nil {
			return nil, fmt.Errorf("gateway %s: %w", c.Name, err)
		}
		g, err := StartFRR(ns, l.Dir, c)
		if g != nil {
			l.processes = append(l.processes, g.Processes()...)
		}
		if err != nil {
			return nil, err
		}
		return g, nil
	case KindGoBGP:
		g, err := StartGoBGP(ns, l.Dir, c)
		if g != nil {
			l.processes = append(l.processes, g.Processes()...)
		}
		if err != nil {
			return nil, err
		}
		return g, nil
	default:
		return nil, fmt.Errorf("there is no kind %q of gateways", kind)
	}
}

//go:embed gateways/*.tmpl
var gatewayFiles embed.FS

// rendered is the data of the templates.
type rendered struct {
	GatewayConfig
	Trace string // the file to log received updates to; nothing is logged when ""
}

// render fills a template of the folder gateways.
func render(name string, data rendered) (string, error) {
	t, err := template.ParseFS(gatewayFiles, "gateways/"+name)
	if err != nil {
		return "", err
	}
	var text strings.Builder
	if err := t.Execute(&text, data); err != nil {
		return "", err
	}
	return text.String(), nil
}

// writeRendered renders a template into a file that only its owner can read.
func writeRendered(path, name string, data rendered) error {
	text, err := render(name, data)
	if err != nil {
		return err
	}
	return os.WriteFile(path, []byte(text), 0o600)
}

// Hold returns the offered hold time in seconds.
func (c GatewayConfig) Hold() int {
	switch {
	case c.HoldSeconds < 0:
		return 0
	case c.HoldSeconds == 0:
		return 3
	}
	return c.HoldSeconds
}

// Keepalive returns a third of the hold time (RFC 4271, section 10), in seconds.
func (c GatewayConfig) Keepalive() int { return c.Hold() / 3 }

// Listen are the local addresses, each once.
func (c GatewayConfig) Listen() []netip.Addr {
	var listen []netip.Addr
	for _, a := range c.Local {
		if !slices.Contains(listen, a) {
			listen = append(listen, a)
		}
	}
	return listen
}

// Neighbors returns the neighbor names of FRR and GoBGP: the addresses of the peers, or the peer
// group of each range.
func (c GatewayConfig) Neighbors() []string {
	var names []string
	for _, p := range c.Peers {
		switch {
		case len(c.Ranges) == 0:
			names = append(names, p.String())
		case p.Is4():
			names = append(names, "pods4")
		default:
			names = append(names, "pods6")
		}
	}
	return names
}

// Section returns the section of GoBGP's file that describes a peer.
func (c GatewayConfig) Section() string {
	if len(c.Ranges) > 0 {
		return "peer-groups"
	}
	return "neighbors"
}

// Family is the configuration of a gateway for one address family.
type Family struct {
	Name   string // ipv4 or ipv6
	Peers  []string
	Routes []netip.Prefix
}

// Families returns the address families of the sessions.
func (c GatewayConfig) Families() []Family {
	var families []Family
	for _, name := range []string{"ipv4", "ipv6"} {
		f := Family{Name: name}
		for i, p := range c.Peers {
			if p.Is4() == (name == "ipv4") {
				f.Peers = append(f.Peers, c.Neighbors()[i])
			}
		}
		for _, r := range c.Routes {
			if r.Addr().Is4() == (name == "ipv4") {
				f.Routes = append(f.Routes, r)
			}
		}
		if len(f.Peers) > 0 {
			families = append(families, f)
		}
	}
	return families
}

// wantRoutes waits until exactly these prefixes are among a gateway's routes.
func wantRoutes(ctx context.Context, g Router, prefixes []string) error {
	want := slices.Sorted(slices.Values(prefixes))
	return Eventually(ctx, 10*time.Millisecond, func() error {
		routes, err := g.Routes(ctx)
		if err != nil {
			return err
		}
		var got []string
		for p := range routes {
			got = append(got, p.String())
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			return fmt.Errorf("gateway %s holds %v, want %v", g.Config().Name, got, want)
		}
		return nil
	})
}

// running reports whether a process was started and has not ended.
func running(p *Process) bool {
	if p == nil {
		return false
	}
	select {
	case <-p.Done():
		return false
	default:
		return true
	}
}

// Config returns the configuration with which the gateway was started.
func (g *Gateway) Config() GatewayConfig { return g.GatewayConfig }

// Processes returns the gateway's BIRD.
func (g *Gateway) Processes() []*Process { return []*Process{g.Process} }

// Reset restarts every session.
func (g *Gateway) Reset(ctx context.Context) error {
	c, err := g.Control(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.Command(`restart "trench*"`)
	return err
}
