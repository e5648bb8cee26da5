package lab

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/gatewayconfig"
	"github.com/vipgate/vipgate/pkg/trench"
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

// router returns the configuration as the product renders it.
func (c GatewayConfig) router() gatewayconfig.Router {
	router := gatewayconfig.Router{Name: c.Name, ID: c.RouterID, Routes: c.Routes, VIPs: c.VIPs}
	if c.Default {
		router.Routes = append(gatewayconfig.DefaultRoutes(), c.Routes...)
	}
	hold := time.Duration(max(0, cmp.Or(c.HoldSeconds, HoldSeconds))) * time.Second
	for i, local := range c.Local {
		session := gatewayconfig.Session{
			Gateway: trench.Gateway{
				Name: c.Name, Address: local, LocalASN: int64(c.RemoteAS), RemoteASN: int64(c.LocalAS), LocalPort: int(c.Port),
				RemotePort: int(c.Port), HoldTime: hold,
			},
			Pods: netip.PrefixFrom(c.Peers[i], c.Peers[i].BitLen()), Password: c.Password,
		}
		if len(c.Ranges) > 0 {
			session.Pods = c.Ranges[i]
		}
		if c.BFD {
			session.BFD = &trench.BFD{
				MinTx: 100 * time.Millisecond, MinRx: 100 * time.Millisecond, Multiplier: cmp.Or(c.BFDMultiplier, BFDMultiplier),
			}
		}
		if len(c.VIPs) > 0 {
			session.Protocol = trench.Static
		}
		router.Sessions = append(router.Sessions, session)
	}
	return router
}

// insertions are the lines that a kind of gateway needs to wait for connections.
var insertions = map[string]struct{ after, text string }{
	"bird":  {`(?m)^\tstrict bind;$`, "$0\n\tpassive;"},
	"frr":   {`(?m)^ neighbor (\S+) timers connect 2$`, "$0\n neighbor $1 passive"},
	"gobgp": {`(?m)^    local-address = .*$`, "$0\n    passive-mode = true"},
}

// text returns the configuration of a kind of gateway, or the text that a test sets.
func (c GatewayConfig) text(kind string) (string, error) {
	if c.Text != "" {
		return c.Text, nil
	}
	text, err := c.router().Text(kind)
	if insertion := insertions[kind]; c.Passive {
		text = regexp.MustCompile(insertion.after).ReplaceAllString(text, insertion.text)
	}
	return text, err
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
