package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"github.com/vipgate/vipgate/test/load"
)

// Ports of an App.
const (
	RequestPort = 8080 // HTTP, on the VIPs
	FlowPort    = 8007 // the echo protocol of package load, on the VIPs
	HealthPort  = 5000 // accepts connections
)

// pollInterval is the interval at which a condition of another process is checked.
const pollInterval = 10 * time.Millisecond

// App is a target of a topology, with an application in its own namespace that listens on all
// addresses.
type App struct {
	Name    string
	NS      *NetNS
	Addrs   []netip.Addr // its own, one of each family
	Sidecar *Process     // `target run`; nil without one

	backend *NetNS // where its wire ends
	port    string // the name of its port there
	dir     string // of the sidecar

	replaced int // number of replacements

	mu     sync.Mutex
	server *load.Server // nil while it does not serve
	health *Target
}

// Admin returns the admin socket of the sidecar.
func (a *App) Admin() string { return filepath.Join(a.dir, "admin.sock") }

// Start makes the application serve its VIPs, and then report that it is healthy. If it serves
// already, only its health changes.
func (a *App) Start() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.server == nil {
		server := load.NewServer(a.Name)
		for port, serve := range map[uint16]func(net.Listener){
			RequestPort: server.ServeRequests,
			FlowPort:    server.ServeFlows,
		} {
			l, err := a.listen(netip.AddrPortFrom(netip.IPv6Unspecified(), port))
			if err != nil {
				return errors.Join(fmt.Errorf("%s: %w", a.Name, err), server.Abort())
			}
			serve(l)
		}
		a.server = server
	}
	if a.health == nil {
		a.health = NewTarget(a.NS, netip.AddrPortFrom(netip.IPv6Unspecified(), HealthPort))
	}
	return a.health.Up()
}

func (a *App) listen(at netip.AddrPort) (net.Listener, error) {
	// Plain TCP: with MPTCP, a second kind of socket would be between the application and the RST
	// of Kill.
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	return a.NS.listen(c, "tcp", at.String())
}

// Unhealthy makes the health port refuse connections; the application continues to serve.
func (a *App) Unhealthy() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.unhealthy()
}

func (a *App) unhealthy() error {
	if a.health == nil {
		return nil
	}
	return a.health.Down()
}

// Fail makes the application answer every request with an error; its health port still accepts
// connections.
func (a *App) Fail() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.server.Fail()
}

// move moves the application, which does not serve, to another namespace.
func (a *App) move(ns *NetNS) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.NS, a.health = ns, nil
	a.replaced++
}

// Stop ends gracefully: the health service ends first, new connections are refused, accepted
// requests are answered, then flows get a FIN. In a planned change the trench file announced the
// end before, and the drain is over.
func (a *App) Stop(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	err := a.unhealthy()
	if a.server != nil {
		err = errors.Join(err, a.server.Shutdown(ctx))
		a.server = nil
	}
	return err
}

// Abort ends immediately, with a RST for every connection.
func (a *App) Abort() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	err := a.unhealthy()
	if a.server != nil {
		err = errors.Join(err, a.server.Abort())
		a.server = nil
	}
	return err
}

// Kill is the sudden loss of the host: its link goes down before its processes end, so that no peer
// receives a FIN, a RST or an ICMP error.
func (a *App) Kill() error {
	if err := a.backend.IP("link", "set", a.port, "down"); err != nil {
		return fmt.Errorf("kill %s: %w", a.Name, err)
	}
	return a.Abort()
}

// Revive reverts Kill: it sets the link up and starts the application again.
func (a *App) Revive() error {
	if err := a.backend.IP("link", "set", a.port, "up"); err != nil {
		return fmt.Errorf("revive %s: %w", a.Name, err)
	}
	return a.Start()
}
