// Package health serves grpc.health.v1 for a process: one service per condition, conjunctions of
// conditions, and one service per VIP.
//
// A [Server] guarantees:
//   - A conjunction changes together with its parts.
//   - "" has the state of [Readiness], for probes without a service name.
//   - An unknown service is NOT_FOUND for Check and SERVICE_UNKNOWN for Watch, which follows it
//     once it is known.
//   - A slow reader of Watch misses intermediate states, but not the last one, and does not delay
//     the process.
//   - `vip/<prefix>` supports Check and Watch and is not in List, which grpc-go truncates at 100
//     services; a VIP costs one map entry.
package health

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Services of every process.
const (
	// Liveness stays SERVING until the process ends: the kubelet must not kill a process that stops
	// in order.
	Liveness = "Liveness"
	// Readiness is also the state of "".
	Readiness = "Readiness"
)

// VIPPrefix is the prefix of a VIP's service name.
const VIPPrefix = "vip/"

// maxWatches bounds the open Watch calls. Any process in the pod can open them, and few are needed.
const maxWatches = 1000

// Condition is a service with its own name.
type Condition struct {
	Name    string
	Serving bool
	// Detail is why it does not serve; empty when it does.
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
	onTransition func(service string, serving bool)

	changed latest.Value[struct{}] // set after every change, to wake the watches
	watches atomic.Int64           // open ones

	mu          sync.Mutex
	conditions  map[string]Condition
	order       []string // of conditions, by their first Set
	definitions []definition
	vips        map[vip.VIP]bool
	stopping    bool
}

// New returns a server that knows only "", which does not serve yet. log receives a line for each
// change of a condition, not of a VIP. changed is called in order for every condition that starts
// or stops to serve; it must not block and must not call the server.
func New(log *slog.Logger, changed func(service string, serving bool)) *Server {
	return &Server{
		log: log, onTransition: changed, conditions: map[string]Condition{}, vips: map[vip.VIP]bool{},
	}
}

// Register adds the service to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) { healthv1.RegisterHealthServer(r, s) }

// Define makes name the conjunction of parts: it serves while all of them do. A part that was never
// set does not serve. A part may be a conjunction that was defined before. Define panics if name is
// a condition already.
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
	if serving {
		detail = ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.defined(service) {
		panic(fmt.Sprintf("health: %s is a conjunction and cannot be set", service))
	}
	if s.setCondition(Condition{service, serving, detail}) {
		s.recompute()
	}
}

// Reporter returns a function that sets a condition, which serves while the error is nil.
func (s *Server) Reporter(service string) func(error) {
	return func(err error) {
		detail := ""
		if err != nil {
			detail = err.Error()
		}
		s.Set(service, err == nil, detail)
	}
}

// Remove removes a condition, such as that of an address family that left the configuration. Its
// conjunctions stop to serve.
func (s *Server) Remove(service string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.conditions[service]; !known || s.defined(service) {
		return
	}
	delete(s.conditions, service)
	s.order = slices.DeleteFunc(s.order, func(name string) bool { return name == service })
	s.recompute()
}

// Conditions returns all conditions in the order of their first Set.
func (s *Server) Conditions() []Condition {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]Condition, 0, len(s.order))
	for _, name := range s.order {
		list = append(list, s.conditions[name])
	}
	return list
}

// SetVIP sets whether a VIP serves: it is advertised (frontend) or ready (lb).
func (s *Server) SetVIP(v vip.VIP, serving bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if previous, known := s.vips[v]; !known || previous != serving {
		s.vips[v] = serving
		s.notify()
	}
}

// RemoveVIP removes a VIP.
func (s *Server) RemoveVIP(v vip.VIP) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.vips, v)
	s.notify()
}

// Shutdown sends NOT_SERVING for every service except [Liveness] and ends every Watch, so that the
// gRPC server can stop in order. Later changes are not sent.
func (s *Server) Shutdown() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopping = true
	s.notify()
}

// notify wakes every watch, which reads its state once mu is free. The cost is that of the watches
// that wait.
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
	if known && previous.Serving == c.Serving {
		s.log.Debug("condition detail changed", "service", c.Name, "detail", c.Detail)
		return true
	}
	level := slog.LevelInfo
	if known && !c.Serving {
		level = slog.LevelWarn
	}
	s.log.Log(context.Background(), level, "condition changed", "service", c.Name, "serving", c.Serving,
		"detail", c.Detail)
	s.onTransition(c.Name, c.Serving)
	return true
}

// recompute updates the conjunctions in the order of their definition, so that one can be a part of
// a later one, and wakes the watches.
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
