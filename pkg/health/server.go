package health

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Services of every process.
const (
	// Liveness stays SERVING to the end: the kubelet must not kill a process during its graceful stop.
	Liveness = "Liveness"
	// Readiness is also the state of "".
	Readiness = "Readiness"
)

// VIPPrefix is the prefix of a VIP's service name.
const VIPPrefix = "vip/"

// maxWatches bounds the open Watch calls, which any process in the pod can open.
const maxWatches = 1000

// Condition is a service with its own name.
type Condition struct {
	Name    string
	Serving bool
	// Detail is the reason why the service does not serve; empty while it serves.
	Detail string
}

// definition is a conjunction of conditions.
type definition struct {
	name  string
	parts []string
}

// Server serves the conditions and VIPs of a process. Its methods are safe for concurrent use and
// do not block. Create one with [New].
type Server struct {
	healthv1.UnimplementedHealthServer
	log          *slog.Logger
	onTransition func(service string, serving, known bool)

	changed latest.Value[struct{}] // set after every change, to wake the watches
	watches atomic.Int64           // number of open watches

	vip func(vip.VIP) (serving, known bool)

	mu          sync.Mutex
	loops       []followed
	conditions  map[string]Condition
	order       []string // of conditions, by their first Set
	definitions []definition
	stopping    bool
}

// New returns a server with the single service "", which does not serve yet. log receives a line
// for each change of a condition, but not of a VIP. changed is called in order for every
// condition that starts or stops serving, or is removed and no longer known. It must not block and
// must not call the server.
func New(log *slog.Logger, changed func(service string, serving, known bool)) *Server {
	return &Server{
		log: log, onTransition: changed, conditions: map[string]Condition{},
		vip: func(vip.VIP) (bool, bool) { return false, false },
	}
}

// Register adds the service to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) { healthv1.RegisterHealthServer(r, s) }

// RegisterForContainer adds the service to a gRPC server for a container whose startup and liveness
// probes do not name a service, as in Meridio. On this server "" has the state of [Liveness]. With
// the state of [Readiness], the kubelet would restart a process that waits for a gateway.
func (s *Server) RegisterForContainer(r grpc.ServiceRegistrar) {
	healthv1.RegisterHealthServer(r, containerServer{s})
}

// containerServer replaces the service "".
type containerServer struct{ *Server }

// Check implements grpc.health.v1.
func (s containerServer) Check(ctx context.Context, r *healthv1.HealthCheckRequest) (*healthv1.HealthCheckResponse,
	error,
) {
	return s.Server.Check(ctx, unnamed(r))
}

// Watch implements grpc.health.v1.
func (s containerServer) Watch(r *healthv1.HealthCheckRequest,
	stream grpc.ServerStreamingServer[healthv1.HealthCheckResponse],
) error {
	return s.Server.Watch(unnamed(r), stream)
}

// List implements grpc.health.v1.
func (s containerServer) List(ctx context.Context, r *healthv1.HealthListRequest) (*healthv1.HealthListResponse,
	error,
) {
	list, err := s.Server.List(ctx, r)
	if err == nil {
		list.Statuses[""] = list.Statuses[Liveness]
	}
	return list, err
}

func unnamed(r *healthv1.HealthCheckRequest) *healthv1.HealthCheckRequest {
	return &healthv1.HealthCheckRequest{Service: cmp.Or(r.GetService(), Liveness)}
}

// Define makes name the conjunction of parts, which serves while all parts serve. A part that was
// never set does not serve. A part may be a conjunction that was defined before. Define panics if
// name already is a condition.
func (s *Server) Define(name string, parts ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.conditions[name]; known {
		panic(fmt.Sprintf("health: %s is defined, but was set or defined before", name))
	}
	s.definitions = append(s.definitions, definition{name, slices.Clone(parts)})
	s.recompute()
}

// Set sets whether a condition serves and, if not, why; detail is ignored when it serves. Repeated
// values have no effect. Set panics for the name of a conjunction.
func (s *Server) Set(service string, serving bool, detail string) {
	// A detail that outlives its problem would count as a change.
	if serving {
		detail = ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.defined(service) {
		panic(fmt.Sprintf("health: %s is a conjunction and cannot be set", service))
	}
	// Repeated values must not wake the watches.
	if s.setCondition(Condition{service, serving, detail}) {
		s.recompute()
	}
}

// Report sets a condition, which serves while the problem is "".
func (s *Server) Report(service, problem string) { s.Set(service, problem == "", problem) }

// Reporter returns a function that sets a condition, which serves while the error is nil.
func (s *Server) Reporter(service string) func(error) {
	return func(err error) { s.Set(service, err == nil, logs.Text(err)) }
}

const (
	// HungDecision is the limit for loops that decide about VIPs. After this time BIRD has withdrawn
	// all VIPs (default hold time 3 s), and the lease of readiness has expired.
	HungDecision = 10 * time.Second
	// HungTask is the limit for other loops. It exceeds each bounded step. The longest steps take 10
	// s: an exchange with the kernel, a check of BIRD's configuration, the start of BIRD.
	HungTask = 30 * time.Second
)

// followed is a loop that Liveness depends on.
type followed struct {
	loop  task.Loop
	limit time.Duration
}

// Alive defines [Liveness], which serves while none of the loops among the tasks is overdue. The
// limit is [HungDecision] for the loop that decides about VIPs, if there is one, and [HungTask] for
// the other loops.
func (s *Server) Alive(decision task.Loop, tasks ...task.Task) {
	var loops []followed
	for _, t := range tasks {
		loop, is := t.(task.Loop)
		switch {
		case is && loop == decision:
			loops = append(loops, followed{loop, HungDecision})
		case is:
			loops = append(loops, followed{loop, HungTask})
		}
	}
	// A status may be read before the tasks start.
	s.mu.Lock()
	s.loops = loops
	s.mu.Unlock()
	s.CheckLoops()
}

// CheckLoops updates [Liveness]. Each Check calls it, so that a probe does not depend on another
// goroutine. Additional calls update watches and metrics.
func (s *Server) CheckLoops() {
	s.mu.Lock()
	loops := s.loops
	s.mu.Unlock()
	var hung []string
	for _, f := range loops {
		// A loop that waits for input is not overdue; see task.Pulse.
		if overdue := f.loop.Overdue(); overdue >= f.limit {
			hung = append(hung, fmt.Sprintf("task %s hangs for %v", f.loop, overdue.Round(time.Second)))
		}
	}
	// A program without loops sets Liveness itself.
	if len(loops) > 0 {
		s.Report(Liveness, strings.Join(hung, "; "))
	}
}

// Overdue returns how late the latest of the loops is.
func (s *Server) Overdue() (latest time.Duration) {
	s.mu.Lock()
	loops := s.loops
	s.mu.Unlock()
	for _, f := range loops {
		latest = max(latest, f.loop.Overdue())
	}
	return latest
}

// Remove removes a condition, for example of an address family that left the configuration.
// Conjunctions with this part stop serving.
func (s *Server) Remove(service string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.conditions[service]; !known || s.defined(service) {
		return
	}
	delete(s.conditions, service)
	s.order = slices.DeleteFunc(s.order, func(name string) bool { return name == service })
	s.onTransition(service, false, false)
	s.recompute()
}

// Conditions returns all conditions in the order of their first Set.
func (s *Server) Conditions() []*adminv1.Condition {
	s.CheckLoops()
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*adminv1.Condition, 0, len(s.order))
	for _, name := range s.order {
		c := s.conditions[name]
		list = append(list, &adminv1.Condition{Name: name, Serving: c.Serving, Detail: c.Detail})
	}
	return list
}

// ServeVIPs sets the function that reports whether a VIP serves, which means advertised (frontend)
// or ready (lb). The function is called concurrently and must not block. After a change of its
// results, call [Server.VIPsChanged]. ServeVIPs must be called before the server is registered.
func (s *Server) ServeVIPs(vip func(vip.VIP) (serving, known bool)) { s.vip = vip }

// VIPsChanged wakes every Watch after a change of VIPs.
func (s *Server) VIPsChanged() { s.notify() }

// Shutdown sends NOT_SERVING for every service except [Liveness] and ends every Watch, so that the
// gRPC server can stop gracefully. Later changes are not sent.
func (s *Server) Shutdown() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopping = true
	s.notify()
}

// notify wakes every watch, which reads its state once mu is free.
func (s *Server) notify() { s.changed.Set(struct{}{}) }

func (s *Server) defined(service string) bool {
	return slices.ContainsFunc(s.definitions, func(d definition) bool { return d.name == service })
}

// setCondition stores a condition and reports whether it changed.
func (s *Server) setCondition(c Condition) bool {
	previous, known := s.conditions[c.Name]
	if known && previous == c {
		return false
	}
	if !known {
		s.order = append(s.order, c.Name)
	}
	s.conditions[c.Name] = c
	// A new detail alone is not a transition for logs and metrics.
	if known && previous.Serving == c.Serving {
		s.log.Debug("condition detail changed", "service", c.Name, "detail", c.Detail)
		return true
	}
	level := slog.LevelInfo
	// The first value is the state at the start, and not a loss.
	if known && !c.Serving {
		level = slog.LevelWarn
	}
	s.log.Log(context.Background(), level, "condition changed", "service", c.Name, "serving", c.Serving,
		"detail", c.Detail)
	s.onTransition(c.Name, c.Serving, true)
	return true
}

// recompute updates the conjunctions in order, because one can be a part of a later one.
func (s *Server) recompute() {
	s.notify()
	for _, d := range s.definitions {
		var missing []string
		for _, part := range d.parts {
			switch c, known := s.conditions[part]; {
			case !known:
				missing = append(missing, part+": not reported yet")
			case !c.Serving && c.Detail == "":
				missing = append(missing, part)
			case !c.Serving:
				missing = append(missing, part+": "+c.Detail)
			}
		}
		s.setCondition(Condition{d.name, len(missing) == 0, strings.Join(missing, "; ")})
	}
}

const (
	maxNameBytes = 256                  // of the name of a service in a request
	detailKey    = "vipgate-detail-bin" // trailer of Check: why a service does not serve
	maxDetail    = 1000                 // bytes of the trailer
)

// Check implements grpc.health.v1.
func (s *Server) Check(ctx context.Context, r *healthv1.HealthCheckRequest) (*healthv1.HealthCheckResponse, error) {
	name, err := canonical(r.GetService())
	if err != nil {
		return nil, err
	}
	// A probe must not depend on a goroutine that may hang itself.
	s.CheckLoops()
	s.mu.Lock()
	state, detail := s.state(name), s.conditions[cmp.Or(name, Readiness)].Detail
	s.mu.Unlock()
	if detail != "" {
		// The trailer is optional, so the error is ignored.
		_ = grpc.SetTrailer(ctx, metadata.Pairs(detailKey, detail[:min(len(detail), maxDetail)]))
	}
	if state == healthv1.HealthCheckResponse_SERVICE_UNKNOWN {
		return nil, status.Errorf(codes.NotFound, "unknown service %q", name)
	}
	return &healthv1.HealthCheckResponse{Status: state}, nil
}

// List implements grpc.health.v1. VIPs are not listed.
func (s *Server) List(context.Context, *healthv1.HealthListRequest) (*healthv1.HealthListResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := map[string]*healthv1.HealthCheckResponse{"": {Status: s.state("")}}
	for _, name := range s.order {
		list[name] = &healthv1.HealthCheckResponse{Status: s.state(name)}
	}
	return &healthv1.HealthListResponse{Statuses: list}, nil
}

// Watch implements grpc.health.v1. After [Server.Shutdown] it returns Unavailable.
func (s *Server) Watch(r *healthv1.HealthCheckRequest,
	stream grpc.ServerStreamingServer[healthv1.HealthCheckResponse],
) error {
	name, err := canonical(r.GetService())
	if err != nil {
		return err
	}
	defer s.watches.Add(-1)
	// Each watch holds a goroutine and its stream until the client ends it.
	if s.watches.Add(1) > maxWatches {
		return status.Errorf(codes.ResourceExhausted, "too many open watches: the limit is %d", maxWatches)
	}
	// No status has this value, so the first one is always sent.
	last := healthv1.HealthCheckResponse_ServingStatus(-1)
	for {
		// Get the channel before the read: a change after the read closes it.
		_, changed := s.changed.Get()
		s.mu.Lock()
		state, stopping := s.state(name), s.stopping
		s.mu.Unlock()
		if state != last {
			last = state
			if err := stream.Send(&healthv1.HealthCheckResponse{Status: state}); err != nil {
				return err
			}
		}
		if stopping {
			return status.Error(codes.Unavailable, "the process is stopping")
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		}
	}
}

// canonical returns the canonical name of a service, because VIPs have several spellings.
func canonical(name string) (string, error) {
	if len(name) > maxNameBytes {
		return "", status.Errorf(codes.InvalidArgument, "a service name has at most %d bytes", maxNameBytes)
	}
	if prefix, is := strings.CutPrefix(name, VIPPrefix); is {
		v, err := vip.Parse(prefix)
		if err != nil {
			return "", status.Error(codes.InvalidArgument, err.Error())
		}
		return VIPPrefix + v.String(), nil
	}
	return name, nil
}

// state returns the status of a service by its canonical name.
func (s *Server) state(name string) healthv1.HealthCheckResponse_ServingStatus {
	c, known := s.conditions[cmp.Or(name, Readiness)]
	if prefix, is := strings.CutPrefix(name, VIPPrefix); is {
		// Parsing a canonical name cannot fail.
		v, _ := vip.Parse(prefix)
		c.Serving, known = s.vip(v)
	}
	switch {
	case !known && name != "":
		return healthv1.HealthCheckResponse_SERVICE_UNKNOWN
	// A stopping process must not be restarted, and must not receive traffic.
	case c.Serving && (!s.stopping || name == Liveness):
		return healthv1.HealthCheckResponse_SERVING
	}
	return healthv1.HealthCheckResponse_NOT_SERVING
}
