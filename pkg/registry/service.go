package registry

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/targetset"
)

// ServiceOptions say who calls.
type ServiceOptions struct {
	// Peer returns the SPIFFE ID that the transport has authenticated. It is not
	// asked for the operator.
	Peer func(context.Context) (spiffeid.ID, bool)
	// Operator is true on the admin socket, where the caller is the operator, who
	// may do everything.
	Operator bool
	// Reader reports whether an ID may list and watch every stream; nil: none may.
	Reader func(spiffeid.ID) bool
	// Log gets the refusals, one line a second at most.
	Log *slog.Logger
}

// Service serves a registry and a index. Its streams end with the registry.
type Service struct {
	targetv1.UnimplementedTargetServiceServer

	registry *Registry
	index    *targetset.Index
	opts     ServiceOptions
	quiet    logs.Throttle
}

// NewService returns a service. A process has one for each kind of caller.
func NewService(r *Registry, index *targetset.Index, o ServiceOptions) *Service {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Service{registry: r, index: index, opts: o}
}

// MaxCallsPerConnection is how many calls one connection may have open. The quota of
// a caller refuses with a reason, and is usually lower.
const MaxCallsPerConnection = 2000

// GRPCOptions returns the options of a grpc.Server that serves targets on TCP: a
// peer whose host vanished is noticed within 4 s, one that does not finish its
// handshake within 5 s, one without a call within 1 min. On a unix socket the
// kernel reports the end of a peer at once.
func GRPCOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(1 << 20),
		grpc.MaxHeaderListSize(16 << 10),
		grpc.ConnectionTimeout(5 * time.Second),
		grpc.MaxConcurrentStreams(MaxCallsPerConnection),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: time.Minute, Time: 2 * time.Second, Timeout: 2 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
	}
}

// caller returns who calls.
func (s *Service) caller(ctx context.Context) (caller, error) {
	if s.opts.Operator {
		return caller{}, nil
	}
	id, ok := s.opts.Peer(ctx)
	if !ok || id.IsZero() {
		return caller{}, refuse(RefusedIdentity, codes.Unauthenticated, "the connection has no SPIFFE ID")
	}
	return caller{id}, nil
}

// logRefusal counts and logs a refusal, and hands on every error.
func (s *Service) logRefusal(who caller, method, stream string, err error) error {
	var r *refusal
	if !errors.As(err, &r) {
		return err
	}
	s.registry.mu.Lock()
	s.registry.refused[r.why]++
	s.registry.mu.Unlock()
	if n, ok := s.quiet.Allow(time.Now()); ok && r.why != RefusedStopping {
		s.opts.Log.Warn("refused a call on targets", "peer", who.String(), "method", method, "stream", stream, "reason", string(r.why), "error", r.text, "lines_left_out", n)
	}
	return r.GRPCStatus().Err()
}

// Register implements the Service.
func (s *Service) Register(req *targetv1.RegisterRequest, stream grpc.ServerStreamingServer[targetv1.RegisterResponse]) error {
	who, err := s.caller(stream.Context())
	if err == nil {
		err = s.register(who, req, stream)
	}
	return s.logRefusal(who, "Register", req.GetStream(), err)
}

func (s *Service) register(who caller, req *targetv1.RegisterRequest, stream grpc.ServerStreamingServer[targetv1.RegisterResponse]) error {
	if err := s.mayRegister(who, req.GetStream()); err != nil {
		return err
	}
	a, err := parseAnnouncement(req)
	if err != nil {
		return err
	}
	done, err := s.registry.begin(who)
	if err != nil {
		return err
	}
	defer done()
	c, err := s.registry.open(who, a)
	if err != nil {
		return err
	}
	defer s.registry.hangUp(c)
	s.opts.Log.Info("targets registered", "peer", who.String(), "stream", a.stream, "targets", len(a.targets), "grace", c.grace)
	err = s.keep(stream.Context(), c, a, stream.Send)
	s.opts.Log.Info("registration ended", "peer", who.String(), "stream", a.stream, "targets", len(a.targets), "reason", err)
	return err
}

// mayRegister refuses a caller that no allowance admits to the stream.
func (s *Service) mayRegister(who caller, stream string) error {
	if s.registry.allows(who, stream) {
		return nil
	}
	return refuse(RefusedIdentity, codes.PermissionDenied, "%s may not register targets of stream %s: have it allowed by --target-id of the load balancer", who, targetset.Quote(stream))
}

// keep tells the caller how its targets are until the call is over.
func (s *Service) keep(ctx context.Context, c *call, a announcement, send func(*targetv1.RegisterResponse) error) error {
	k := newKeeping(c, a)
	watch := s.index.WatchTargets(k.keys)
	defer watch.Close()
	first := true
	for {
		held, gone, over := s.registry.holding(c)
		changed, removed := watch.Take()
		infos := k.infos(s.glass(c.owner), first, held, gone, changed, removed)
		if first || len(infos) > 0 {
			m := &targetv1.RegisterResponse{Targets: infos}
			if first {
				m.Grace = durationpb.New(c.grace)
			}
			if err := send(m); err != nil {
				return err
			}
			first = false
		}
		switch over {
		case allLeft:
			return nil
		case allTaken:
			return status.Errorf(codes.Aborted, "another call registered %s", c.taken)
		case stillHolds:
		}
		select {
		case <-watch.Changed():
		case <-c.changed:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-s.registry.stop:
			return errStopping
		}
	}
}

// keeping is what one Register has sent to its caller.
type keeping struct {
	keys    []healthcheck.Key
	started time.Time
	gone    map[healthcheck.Key]struct{} // sent as GONE
}

func newKeeping(c *call, a announcement) *keeping {
	k := &keeping{started: time.Now(), gone: map[healthcheck.Key]struct{}{}}
	for _, t := range a.targets {
		for _, ip := range t.ips {
			k.keys = append(k.keys, healthcheck.Key{Stream: c.stream, Name: t.name, Addr: ip})
		}
	}
	return k
}

// infos are what is to be sent now: everything the first time, then what changed
// of the targets that are still held, and what left.
func (k *keeping) infos(g glass, first bool, held map[string]struct{}, gone []string, changed []targetset.View, removed []healthcheck.Key) []*targetv1.TargetInfo {
	views := make(map[healthcheck.Key]targetset.View, len(changed))
	for _, v := range changed {
		views[v.Key] = v
	}
	lost := make(map[healthcheck.Key]struct{}, len(removed))
	for _, key := range removed {
		lost[key] = struct{}{}
	}
	left := make(map[string]struct{}, len(gone))
	for _, name := range gone {
		left[name] = struct{}{}
	}
	var infos []*targetv1.TargetInfo
	for _, key := range k.keys {
		_, isHeld := held[key.Name]
		_, isLost := lost[key]
		_, hasLeft := left[key.Name]
		_, sentGone := k.gone[key]
		v, known := views[key]
		switch {
		case hasLeft || (isHeld && isLost):
			if !sentGone {
				k.gone[key] = struct{}{}
				infos = append(infos, last(key))
			}
		case isHeld && known:
			delete(k.gone, key)
			infos = append(infos, g.info(v))
		case isHeld && first:
			infos = append(infos, g.info(targetset.View{
				Health: healthcheck.Health{Key: key, State: healthcheck.Starting, Since: k.started}, Checks: healthcheck.Starting,
				Origins: targetset.OriginSet(0).With(targetset.OriginRegistry), Owner: g.who.String(),
			}))
		}
	}
	return infos
}

// Deregister implements the Service.
func (s *Service) Deregister(ctx context.Context, req *targetv1.DeregisterRequest) (*targetv1.DeregisterResponse, error) {
	who, err := s.caller(ctx)
	var length time.Duration
	if err == nil {
		length, err = s.deregister(who, req)
	}
	if err != nil {
		return nil, s.logRefusal(who, "Deregister", req.GetStream(), err)
	}
	return &targetv1.DeregisterResponse{DrainFor: durationpb.New(length)}, nil
}

func (s *Service) deregister(who caller, req *targetv1.DeregisterRequest) (time.Duration, error) {
	if err := s.mayRegister(who, req.GetStream()); err != nil {
		return 0, err
	}
	if err := checkCount(len(req.GetNames())); err != nil {
		return 0, err
	}
	length, asked, err := parseDuration("drain_for", req.GetDrainFor())
	if err != nil {
		return 0, err
	}
	return s.registry.deregister(who, req.GetStream(), req.GetNames(), length, asked)
}
