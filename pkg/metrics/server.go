package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Bounds of the listener: anybody who reaches the port can scrape.
const (
	scrapeTimeout  = 10 * time.Second // Prometheus gives up after 10 s by default
	maxScrapes     = 4                // at a time
	headerTimeout  = 5 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 16 << 10
	// stopTimeout is how long a running scrape gets when the server ends.
	stopTimeout = 500 * time.Millisecond
)

// Handler serves what g gathers in the Prometheus text formats. A collector
// that fails costs its own metrics only, and a line in the log.
func Handler(g prometheus.Gatherer, log *slog.Logger) http.Handler {
	return promhttp.HandlerFor(g, promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn), ErrorHandling: promhttp.ContinueOnError,
		MaxRequestsInFlight: maxScrapes, Timeout: scrapeTimeout,
	})
}

// Server serves /metrics over HTTP. It implements task.Task. Make one with
// [Listen].
type Server struct {
	listener net.Listener
	gatherer prometheus.Gatherer
	log      *slog.Logger
	ready    chan struct{}
}

// Listen listens on addr, "host:port", so that a busy port is an error at the
// start. The server answers once it runs, and closes the port when it ends.
func Listen(ctx context.Context, addr string, g prometheus.Gatherer, log *slog.Logger) (*Server, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return &Server{listener: listener, gatherer: g, log: log, ready: make(chan struct{})}, nil
}

// String implements task.Task.
func (s *Server) String() string { return "metrics " + s.listener.Addr().String() }

// Ready is closed when scrapes are answered.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Addr is where it listens.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Close gives up a server that was never run.
func (s *Server) Close() error { return s.listener.Close() }

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", Handler(s.gatherer, s.log))
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: headerTimeout, ReadTimeout: scrapeTimeout, WriteTimeout: 2 * scrapeTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(s.listener) }()
	close(s.ready)
	select {
	case err := <-served:
		return fmt.Errorf("serve scrapes: %w", err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	if err := server.Shutdown(stop); err != nil {
		// A scrape that is still read is cut off.
		s.log.Debug("a scrape was cut off", "error", errors.Join(err, server.Close()))
	}
	<-served
	return ctx.Err()
}
