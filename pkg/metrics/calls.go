package metrics

import (
	"maps"
	"strings"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"
)

// newCalls returns the counters of calls. They have no histogram of the handling
// time: what matters here are streams, which last as long as their reader wants,
// and what has to be quick (decisions, answers of BIRD) has a histogram of its own.
// Names and helps are the provider's; a test compares the names with ours.
func newCalls() *grpcprom.ServerMetrics { return grpcprom.NewServerMetrics() }

// ServerOptions make a gRPC server count its calls. All servers of the process
// share the counters.
func (p *process) ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(p.calls.UnaryServerInterceptor()), grpc.ChainStreamInterceptor(p.calls.StreamServerInterceptor()),
	}
}

// Serves sets the counters of a server's methods to 0, once its services are
// registered. Calls of services for debugging (reflection, channelz) are counted from
// the first call on: each method takes twenty series.
func (p *process) Serves(server reflection.ServiceInfoProvider) {
	p.calls.InitializeMetrics(worthAZero{server})
}

// worthAZero are the services whose absence in the metrics would be a riddle.
type worthAZero struct{ reflection.ServiceInfoProvider }

// GetServiceInfo implements reflection.ServiceInfoProvider.
func (w worthAZero) GetServiceInfo() map[string]grpc.ServiceInfo {
	services := maps.Clone(w.ServiceInfoProvider.GetServiceInfo())
	maps.DeleteFunc(services, func(name string, _ grpc.ServiceInfo) bool {
		return !strings.HasPrefix(name, "vipgate.") && !strings.HasPrefix(name, "grpc.health.")
	})
	return services
}
