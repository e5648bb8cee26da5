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
	"golang.org/x/sync/errgroup"
)

// Limits of the listener, which any client with access to the port can use.
const (
	scrapeTimeout  = 10 * time.Second // Prometheus gives up after 10 s by default
	maxScrapes     = 4                // concurrent
	headerTimeout  = 5 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 16 << 10
	// stopTimeout bounds a running scrape after the server's context ended.
	stopTimeout = 500 * time.Millisecond
)

// Server serves /metrics over HTTP. It implements task.Task. Create one with [NewServer].
type Server struct {
	listeners []net.Listener
	gatherer  prometheus.Gatherer
	log       *slog.Logger
	ready     chan struct{}
}

// NewServer returns a server that serves on the listeners while it runs, and then closes them.
func NewServer(listeners []net.Listener, gatherer prometheus.Gatherer, log *slog.Logger) *Server {
	return &Server{listeners: listeners, gatherer: gatherer, log: log, ready: make(chan struct{})}
}

// String implements task.Task.
func (server *Server) String() string { return "metrics " + server.listeners[0].Addr().String() }

// Ready is closed when the server accepts scrapes.
func (server *Server) Ready() <-chan struct{} { return server.ready }

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	mux := http.NewServeMux()
	// The error of a collector affects only its own metrics and is logged.
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.gatherer, promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelWarn), ErrorHandling: promhttp.ContinueOnError,
		MaxRequestsInFlight: maxScrapes, Timeout: scrapeTimeout,
	}))
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: headerTimeout, ReadTimeout: scrapeTimeout, WriteTimeout: 2 * scrapeTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	group, running := errgroup.WithContext(ctx)
	for _, listener := range s.listeners {
		group.Go(func() error {
			if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("failed to serve metrics: %w", err)
			}
			return nil
		})
	}
	close(s.ready)
	group.Go(func() error {
		<-running.Done() // also when a listener failed
		// ctx has usually ended: with it Shutdown would not wait for a running scrape.
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		if err := server.Shutdown(stop); err != nil {
			// An unfinished scrape is closed.
			s.log.Debug("scrape aborted", "error", errors.Join(err, server.Close()))
		}
		return ctx.Err()
	})
	return group.Wait()
}
