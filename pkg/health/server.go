package health

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Services that every process has (design section 11).
const (
	// Liveness stays SERVING until the process is gone: a process that stops in
	// order must not be killed for it.
	Liveness = "Liveness"
	// Readiness is what "" answers, too.
	Readiness = "Readiness"
)

// VIPPrefix precedes a VIP in the name of its service.
const VIPPrefix = "vip/"

// maxWatches bounds the Watch calls that are open at a time. Anybody in the pod
// can open them; more than a few are not needed.
const maxWatches = 1000

// Options configure a server.
type Options struct {
	// Log takes a line for each change of a condition, not of a VIP.
	Log *slog.Logger
	// Changed is called with every condition that begins, or ceases, to serve, in
	// order. It must not block and must not call the server. Optional.
	Changed func(service string, serving bool)
}

// Condition is one service with a name of its own.
type Condition struct {
	Name    string
	Serving bool
	// Detail says why it does not serve; empty when it does.
	Detail string
}

// definition is a conjunction.
type definition struct {
	name  string
	parts []string
}

// Server holds the conditions and VIPs of a process and serves them. Its methods
// may be called from any goroutine and do not block. Make one with [New].
type Server struct {
	healthv1.UnimplementedHealthServer
	options Options

	mu          sync.Mutex
	conditions  map[string]Condition
	order       []string // of conditions, as they came
	definitions []definition
	vips        map[vip.VIP]bool
	watches     map[string]map[*watch]struct{} // by canonical name
	open        int                            // watches
	down        bool
	ended       chan struct{} // closed by Shutdown
}

// New returns a server that knows no service but "", which does not serve yet.
func New(o Options) *Server {
	return &Server{
		options: o, conditions: map[string]Condition{}, vips: map[vip.VIP]bool{},
		watches: map[string]map[*watch]struct{}{}, ended: make(chan struct{}),
	}
}

// Register adds the service to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) { healthv1.RegisterHealthServer(r, s) }

// Define makes name the conjunction of parts: it serves while all of them do. A
// part that was never set does not serve. A part may itself be a conjunction if
// it was defined before. Define panics if name already is a condition.
func (s *Server) Define(name string, parts ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.conditions[name]; known {
		panic(fmt.Sprintf("health: %s is defined, but was set or defined before", name))
	}
	s.definitions = append(s.definitions, definition{name, slices.Clone(parts)})
	s.recompute()
}

// Set says whether a condition serves and, if not, why; detail is ignored when
// it serves. Repeating what is known costs nothing. Set panics for the name of a
// conjunction, which has no value of its own.
func (s *Server) Set(service string, serving bool, detail string) {
	if serving {
		detail = ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.defined(service) {
		panic(fmt.Sprintf("health: %s is a conjunction and cannot be set", service))
	}
	if s.put(Condition{service, serving, detail}) {
		s.recompute()
	}
}

// Reporter returns a function that sets a condition, which serves while the error
// is nil.
func (s *Server) Reporter(service string) func(error) {
	return func(err error) {
		detail := ""
		if err != nil {
			detail = err.Error()
		}
		s.Set(service, err == nil, detail)
	}
}

// Remove forgets a condition, such as that of an address family that left the
// configuration. Conjunctions that need it cease to serve.
func (s *Server) Remove(service string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.conditions[service]; !known || s.defined(service) {
		return
	}
	delete(s.conditions, service)
	s.order = slices.DeleteFunc(s.order, func(name string) bool { return name == service })
	s.notify(service)
	s.recompute()
}

// Conditions returns every condition in the order in which they came.
func (s *Server) Conditions() []Condition {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]Condition, 0, len(s.order))
	for _, name := range s.order {
		list = append(list, s.conditions[name])
	}
	return list
}

// SetVIP says whether a VIP serves: it is advertised (frontend), or ready (lb).
func (s *Server) SetVIP(v vip.VIP, serving bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if was, known := s.vips[v]; known && was == serving {
		return
	}
	s.vips[v] = serving
	if s.open > 0 {
		s.notify(VIPPrefix + v.String())
	}
}

// RemoveVIP forgets a VIP.
func (s *Server) RemoveVIP(v vip.VIP) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.vips, v)
	if s.open > 0 {
		s.notify(VIPPrefix + v.String())
	}
}

// Shutdown says for the last time how everything is, that is NOT_SERVING except
// for [Liveness], and ends every Watch, so that the gRPC server can stop in
// order. What is set afterwards changes nothing for readers.
func (s *Server) Shutdown() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down {
		return
	}
	s.down = true
	for name := range s.watches {
		s.notify(name)
	}
	close(s.ended)
}

func (s *Server) defined(service string) bool {
	return slices.ContainsFunc(s.definitions, func(d definition) bool { return d.name == service })
}

// put takes over a condition, notifies the watches, and returns whether
// it was news.
func (s *Server) put(c Condition) bool {
	was, known := s.conditions[c.Name]
	if known && was == c {
		return false
	}
	if !known {
		s.order = append(s.order, c.Name)
	}
	s.conditions[c.Name] = c
	if known && was.Serving == c.Serving {
		s.options.Log.Debug("condition has another reason", "service", c.Name, "detail", c.Detail)
		return true
	}
	level := slog.LevelInfo
	if known && !c.Serving {
		level = slog.LevelWarn
	}
	s.options.Log.Log(context.Background(), level, "condition changed", "service", c.Name, "serving", c.Serving, "detail", c.Detail)
	if s.options.Changed != nil {
		s.options.Changed(c.Name, c.Serving)
	}
	s.notify(c.Name)
	if c.Name == Readiness {
		s.notify("")
	}
	return true
}

// recompute brings the conjunctions up to date, in the order of their
// definition, so that one can be a part of a later one.
func (s *Server) recompute() {
	for _, d := range s.definitions {
		var missing []string
		for _, part := range d.parts {
			switch c, known := s.conditions[part]; {
			case !known:
				missing = append(missing, part+": not known yet")
			case !c.Serving && c.Detail == "":
				missing = append(missing, part)
			case !c.Serving:
				missing = append(missing, part+": "+c.Detail)
			}
		}
		s.put(Condition{d.name, len(missing) == 0, strings.Join(missing, "; ")})
	}
}
