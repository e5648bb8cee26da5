package metrics

import (
	"maps"
	"strings"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"
)

// newCalls returns the counters of calls. They have no histogram of the handling time: streams last
// as long as their reader wants, and time-critical operations (decisions, replies of BIRD) have
// their own histograms. Names and help texts are the provider's; a test compares the names with
// names.go.
func newCalls() *grpcprom.ServerMetrics { return grpcprom.NewServerMetrics() }

// ServerOptions returns the options with which a gRPC server counts its calls. All servers of the
// process share the counters.
func (p *process) ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(p.calls.UnaryServerInterceptor()),
		grpc.ChainStreamInterceptor(p.calls.StreamServerInterceptor()),
	}
}

// Serves sets the counters of a server's methods to 0 once its services are registered. Debugging
// services (reflection, channelz) are counted from the first call on: each method takes twenty
// series.
func (p *process) Serves(server reflection.ServiceInfoProvider) {
	p.calls.InitializeMetrics(initialZero{server})
}

// initialZero selects the services whose counters start at 0.
type initialZero struct{ reflection.ServiceInfoProvider }

// GetServiceInfo implements reflection.ServiceInfoProvider.
func (w initialZero) GetServiceInfo() map[string]grpc.ServiceInfo {
	services := maps.Clone(w.ServiceInfoProvider.GetServiceInfo())
	maps.DeleteFunc(services, func(name string, _ grpc.ServiceInfo) bool {
		return !strings.HasPrefix(name, "vipgate.") && !strings.HasPrefix(name, "grpc.health.")
	})
	return services
}
