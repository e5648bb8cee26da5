package registry

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/targetset"
)

// Service serves a registry and an index over gRPC. A process has one Service for each kind of
// caller. Its streams end when the registry stops.
type Service struct {
	targetv1.UnimplementedTargetServiceServer

	Registry *Registry
	Index    *targetset.Index
	// Operator is set on the admin socket: every caller is the operator, who is fully authorized.
	Operator bool
	// Reader reports whether an ID may list and watch every stream. If it is nil, no ID may.
	Reader func(spiffeid.ID) bool
	// Log receives registrations and refusals, rate-limited per caller.
	Log *slog.Logger

	throttle logs.Throttle
}

// MaxCallsPerConnection limits the open calls of a connection. It exceeds the usual quota of a
// caller, because only a refusal by the quota includes a reason.
const MaxCallsPerConnection = 2000

// GRPCOptions returns the options of a grpc.Server that serves targets over TCP. The server detects
// a vanished host within 4 s, an unfinished handshake within 5 s, and a connection without a call
// within 1 min. On a unix socket the kernel reports the end of a peer immediately.
func GRPCOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(1 << 20),
		grpc.MaxHeaderListSize(16 << 10),
		grpc.ConnectionTimeout(5 * time.Second),
		grpc.MaxConcurrentStreams(MaxCallsPerConnection),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionIdle: time.Minute, Time: 2 * time.Second, Timeout: 2 * time.Second,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
	}
}

// serve runs a method for the authenticated caller, and counts and logs refusals.
func (service *Service) serve(ctx context.Context, method, stream string, filter func(caller) error) error {
	var who caller
	var err error
	if !service.Operator {
		var ok bool
		if who.id, ok = identity.PeerID(ctx); !ok || who.id.IsZero() {
			err = refuse(RefusedIdentity, "the connection has no SPIFFE ID").as(codes.Unauthenticated)
		}
	}
	if err == nil {
		err = filter(who)
	}
	var reply *refusal
	if !errors.As(err, &reply) {
		return err
	}
	service.Registry.mu.Lock()
	service.Registry.refused[reply.why]++
	service.Registry.mu.Unlock()
	if reply.why == RefusedStopping {
		return err
	}
	service.throttle.Log(service.Log.Warn, who.String(), "refused a call on targets", "peer", who.String(),
		"method", method, "stream", stream, "reason", reply.why, "error", reply.text)
	return err
}

// Register implements the TargetService.
func (service *Service) Register(
	req *targetv1.RegisterRequest, stream grpc.ServerStreamingServer[targetv1.RegisterResponse],
) error {
	return service.serve(stream.Context(), "Register", req.GetStream(), func(who caller) error {
		if err := service.mayRegister(who, req.GetStream()); err != nil {
			return err
		}
		announcement, err := parseAnnouncement(req)
		if err != nil {
			return err
		}
		done, err := service.Registry.begin(who)
		if err != nil {
			return err
		}
		defer done()
		call, err := service.Registry.open(who, announcement)
		if err != nil {
			return err
		}
		// The end of the call begins the grace period, whatever ended it.
		defer service.Registry.hangUp(call)
		log := service.Log.With("peer", who.String(), "stream", announcement.stream, "targets", len(announcement.targets))
		// Throttled per caller: a caller may register repeatedly.
		service.throttle.Log(log.Info, who.String(), "targets registered", "grace", call.grace)
		err = service.keep(stream.Context(), call, announcement, stream.Send)
		service.throttle.Log(log.Info, who.String(), "registration ended", "reason", err)
		return err
	})
}

// mayRegister refuses a caller that is not authorized to register targets of the stream.
func (service *Service) mayRegister(who caller, stream string) error {
	if service.Registry.allows(who, stream) {
		return nil
	}
	return refuse(RefusedIdentity, "%s may not register targets of stream %s: "+
		"have it allowed by --target-id of the load balancer", who, targetset.Quote(stream))
}

// keep reports the state of the targets to the caller until the call ends: all, then changes.
func (service *Service) keep(
	ctx context.Context, call *call, announcement announcement, send func(*targetv1.RegisterResponse) error,
) error {
	var keys []healthcheck.Key
	sent := map[healthcheck.Key]targetv1.State{} // last sent state of each address of the call
	for _, target := range announcement.targets {
		for _, addr := range target.IPs {
			key := healthcheck.Key{Stream: call.stream, Name: target.Name, Addr: addr}
			keys, sent[key] = append(keys, key), targetv1.State_STATE_UNSPECIFIED
		}
	}
	// Watch before reading what the call holds, so that no change in between is lost.
	watch := service.Index.WatchTargets(keys)
	defer watch.Close()
	message := &targetv1.RegisterResponse{Grace: durationpb.New(call.grace)}
	for first := true; ; first = false {
		held, left, taken := service.Registry.holding(call)
		changed, removed := watch.Take()
		add := func(key healthcheck.Key, info *targetv1.TargetInfo) {
			sent[key] = info.GetState()
			message.Targets = append(message.Targets, info)
		}
		filter := service.filter(call.owner)
		// A changed target may belong to a call that took it over.
		for _, view := range changed {
			if _, mine := sent[view.Key]; mine && held[view.Name] != nil {
				add(view.Key, filter.info(view))
			}
		}
		for _, key := range keys {
			_, lost := slices.BinarySearchFunc(removed, key, healthcheck.Key.Compare)
			switch holds := held[key.Name] != nil; {
			case slices.Contains(left, key.Name), holds && lost: // a newer call may hold other lost keys
				if sent[key] != targetv1.State_STATE_GONE {
					add(key, gone(key))
				}
			case first && holds && sent[key] == targetv1.State_STATE_UNSPECIFIED: // not in the index yet
				add(key, filter.info(targetset.View{
					Health: healthcheck.Health{Key: key, Since: time.Now()}, Owner: call.owner.String(),
					Origins: targetset.OriginSet(0).With(targetset.OriginRegistry),
				}))
			}
		}
		if first || len(message.Targets) > 0 {
			if err := send(message); err != nil {
				return err
			}
			message = &targetv1.RegisterResponse{}
		}
		// The call ends once all its targets left or were taken over.
		switch {
		case len(held) > 0:
		case taken != "":
			return status.Errorf(codes.Aborted, "another call registered %s", taken)
		default:
			return nil
		}
		if err := service.wait(ctx, watch.Changed(), call.changed); err != nil {
			return err
		}
	}
}

// wait returns nil when a channel holds a token, an error when the call ends or the registry stops.
func (service *Service) wait(ctx context.Context, first, second <-chan struct{}) error {
	select {
	case <-first:
	case <-second:
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	case <-service.Registry.stop:
		return errStopping
	}
	return nil
}

// Deregister implements the TargetService.
func (service *Service) Deregister(
	ctx context.Context, req *targetv1.DeregisterRequest,
) (resp *targetv1.DeregisterResponse, err error) {
	stream := req.GetStream()
	err = service.serve(ctx, "Deregister", stream, func(who caller) error {
		if err := service.mayRegister(who, stream); err != nil {
			return err
		}
		if err := checkCount(len(req.GetNames())); err != nil {
			return err
		}
		requested, err := parseDuration("drain_for", req.GetDrainFor())
		if err != nil {
			return err
		}
		drain, err := service.Registry.deregister(who, stream, req.GetNames(), requested)
		if err == nil {
			resp = &targetv1.DeregisterResponse{DrainFor: durationpb.New(drain)}
		}
		return err
	})
	return resp, err
}
