package frontend

import (
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/readiness"
)

// newWatcher returns the watcher of the load balancer's socket.
func (p *process) newWatcher(reader string) *readiness.Watcher {
	return readiness.NewWatcher(readiness.WatcherOptions{
		Target: p.LBSocket, Credentials: p.Credentials, ConnectionEnd: identity.ConnectionEnd,
		Rotation: func() (uint64, <-chan struct{}) {
			s, changed := p.Identity.Status().Get()
			return s.Rotations, changed
		},
		Fallback: p.Fallback, Reader: reader, MaxBackoff: p.MaxBackoff, Log: p.Log,
		Consume: func() bool { return p.controller.tryUpdate() },
	})
}

// sharesState reports whether a gRPC service of a load balancer has one state for all VIPs, as that
// of Meridio 1.x.
func sharesState(service string) bool { return service != "" && service != readiness.Service }

// serviceDetail describes the readiness that a gRPC service of a load balancer supplies.
func serviceDetail(service string) string {
	if sharesState(service) {
		return "load balancer of Meridio: one state for all VIPs, by " + service
	}
	return "load balancer of vipgate: a state for each VIP, by " + service
}
