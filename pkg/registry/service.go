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
func (s *Service) serve(ctx context.Context, method, stream string, f func(caller) error) error {
	var who caller
	var err error
	if !s.Operator {
		var ok bool
		if who.id, ok = identity.PeerID(ctx); !ok || who.id.IsZero() {
			err = refuse(RefusedIdentity, "the connection has no SPIFFE ID").as(codes.Unauthenticated)
		}
	}
	if err == nil {
		err = f(who)
	}
	var r *refusal
	if !errors.As(err, &r) {
		return err
	}
	s.Registry.mu.Lock()
	s.Registry.refused[r.why]++
	s.Registry.mu.Unlock()
	if r.why == RefusedStopping {
		return err
	}
	s.throttle.Log(s.Log.Warn, who.String(), "refused a call on targets", "peer", who.String(),
		"method", method, "stream", stream, "reason", r.why, "error", r.text)
	return err
}

// Register implements the TargetService.
func (s *Service) Register(
	req *targetv1.RegisterRequest, stream grpc.ServerStreamingServer[targetv1.RegisterResponse],
) error {
	return s.serve(stream.Context(), "Register", req.GetStream(), func(who caller) error {
		if err := s.mayRegister(who, req.GetStream()); err != nil {
			return err
		}
		a, err := parseAnnouncement(req)
		if err != nil {
			return err
		}
		done, err := s.Registry.begin(who)
		if err != nil {
			return err
		}
		defer done()
		c, err := s.Registry.open(who, a)
		if err != nil {
			return err
		}
		defer s.Registry.hangUp(c)
		log := s.Log.With("peer", who.String(), "stream", a.stream, "targets", len(a.targets))
		// Throttled per caller: a caller may register repeatedly.
		s.throttle.Log(log.Info, who.String(), "targets registered", "grace", c.grace)
		err = s.keep(stream.Context(), c, a, stream.Send)
		s.throttle.Log(log.Info, who.String(), "registration ended", "reason", err)
		return err
	})
}

// mayRegister refuses a caller that is not authorized to register targets of the stream.
func (s *Service) mayRegister(who caller, stream string) error {
	if s.Registry.allows(who, stream) {
		return nil
	}
	return refuse(RefusedIdentity, "%s may not register targets of stream %s: "+
		"have it allowed by --target-id of the load balancer", who, targetset.Quote(stream))
}

// keep reports the state of the targets to the caller until the call ends: the complete state in
// the first message, then changes.
func (s *Service) keep(
	ctx context.Context, c *call, a announcement, send func(*targetv1.RegisterResponse) error,
) error {
	var keys []healthcheck.Key
	sent := map[healthcheck.Key]targetv1.State{} // last sent state of each address of the call
	for _, t := range a.targets {
		for _, ip := range t.IPs {
			k := healthcheck.Key{Stream: c.stream, Name: t.Name, Addr: ip}
			keys, sent[k] = append(keys, k), targetv1.State_STATE_UNSPECIFIED
		}
	}
	watch := s.Index.WatchTargets(keys)
	defer watch.Close()
	m := &targetv1.RegisterResponse{Grace: durationpb.New(c.grace)}
	for first := true; ; first = false {
		held, left, taken := s.Registry.holding(c)
		changed, removed := watch.Take()
		add := func(k healthcheck.Key, i *targetv1.TargetInfo) {
			sent[k] = i.GetState()
			m.Targets = append(m.Targets, i)
		}
		filter := s.filter(c.owner)
		for _, v := range changed {
			if _, mine := sent[v.Key]; mine && held[v.Name] != nil {
				add(v.Key, filter.info(v))
			}
		}
		for _, k := range keys {
			_, lost := slices.BinarySearchFunc(removed, k, healthcheck.Key.Compare)
			switch holds := held[k.Name] != nil; {
			case slices.Contains(left, k.Name), holds && lost: // a newer call may hold other lost keys
				if sent[k] != targetv1.State_STATE_GONE {
					add(k, gone(k))
				}
			case first && holds && sent[k] == targetv1.State_STATE_UNSPECIFIED: // not in the index yet
				add(k, filter.info(targetset.View{
					Health: healthcheck.Health{Key: k, Since: time.Now()}, Owner: c.owner.String(),
					Origins: targetset.OriginSet(0).With(targetset.OriginRegistry),
				}))
			}
		}
		if first || len(m.Targets) > 0 {
			if err := send(m); err != nil {
				return err
			}
			m = &targetv1.RegisterResponse{}
		}
		switch {
		case len(held) > 0:
		case taken != "":
			return status.Errorf(codes.Aborted, "another call registered %s", taken)
		default:
			return nil
		}
		if err := s.wait(ctx, watch.Changed(), c.changed); err != nil {
			return err
		}
	}
}

// wait returns nil when a channel holds a token, and an error when the call ends or the registry
// stops.
func (s *Service) wait(ctx context.Context, a, b <-chan struct{}) error {
	select {
	case <-a:
	case <-b:
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	case <-s.Registry.stop:
		return errStopping
	}
	return nil
}

// Deregister implements the TargetService.
func (s *Service) Deregister(
	ctx context.Context, req *targetv1.DeregisterRequest,
) (resp *targetv1.DeregisterResponse, err error) {
	stream := req.GetStream()
	err = s.serve(ctx, "Deregister", stream, func(who caller) error {
		if err := s.mayRegister(who, stream); err != nil {
			return err
		}
		if err := checkCount(len(req.GetNames())); err != nil {
			return err
		}
		requested, err := parseDuration("drain_for", req.GetDrainFor())
		if err != nil {
			return err
		}
		drain, err := s.Registry.deregister(who, stream, req.GetNames(), requested)
		if err == nil {
			resp = &targetv1.DeregisterResponse{DrainFor: durationpb.New(drain)}
		}
		return err
	})
	return resp, err
}
