package frontend

import (
	"fmt"
	"os"

	"github.com/vipgate/vipgate/pkg/availability"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/readiness"
)

// newWatcher returns the watcher of the load balancer's socket. The watcher tries ReadinessService
// first, and reads the availability of a load balancer without it.
func (p *process) newWatcher(reader string) (*readiness.Watcher, error) {
	if p.Host == "" {
		host, err := os.Hostname()
		if err != nil {
			return nil, fmt.Errorf("failed to read the host name, the identifier of a load balancer of Meridio: %w", err)
		}
		p.Host = host
	}
	p.availability = availability.NewClient(availability.ClientOptions{
		Host: p.Host, Log: p.Log,
		VIPs: p.vips.Get,
	})
	return readiness.NewWatcher(readiness.WatcherOptions{
		Target: p.LBSocket, Credentials: p.Credentials, ConnectionEnd: identity.ConnectionEnd,
		Rotation: func() (uint64, <-chan struct{}) {
			s, changed := p.Identity.Status().Get()
			return s.Rotations, changed
		},
		Fallback: p.availability, Reader: reader, MaxBackoff: p.MaxBackoff, Log: p.Log,
		Consume: func() bool { return p.controller.tryUpdate() },
	}), nil
}

// serviceDetail describes the readiness that a gRPC service of a load balancer supplies.
func serviceDetail(service string) string {
	if service == availability.Service {
		return "load balancer of Meridio: one state for all VIPs, by " + service
	}
	return "load balancer of vipgate: a state for each VIP, by " + service
}
