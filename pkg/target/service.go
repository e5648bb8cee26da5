package target

import (
	"context"
	"log/slog"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
)

// ServiceOptions say who calls.
type ServiceOptions struct {
	// Peer returns the SPIFFE ID that the transport has authenticated. It is not
	// asked for the operator.
	Peer func(context.Context) (spiffeid.ID, bool)
	// Operator is true on the admin socket, where the caller is the operator, who
	// may do everything.
	Operator bool
	// Reader tells whether an ID may list and watch every stream; nil: none may.
	Reader func(spiffeid.ID) bool
	Log    *slog.Logger
}

// TargetService serves a registry and a roster.
type TargetService struct {
	targetv1.UnimplementedTargetServiceServer

	registry *Registry
	roster   *Roster
	opts     ServiceOptions
}

// NewTargetService returns a service. A process has one for each kind of caller.
func NewTargetService(r *Registry, roster *Roster, o ServiceOptions) *TargetService {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &TargetService{registry: r, roster: roster, opts: o}
}

// GRPCOptions returns the options of a grpc.Server that serves targets on TCP: a
// peer whose host vanished is noticed within 4 s, one that does not finish its
// handshake within 5 s. On a unix socket the kernel tells at once.
func GRPCOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(1 << 20),
		grpc.MaxHeaderListSize(16 << 10),
		grpc.ConnectionTimeout(5 * time.Second),
		grpc.MaxConcurrentStreams(2 * DefaultRegistryQuota),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 2 * time.Second, Timeout: 2 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
	}
}
