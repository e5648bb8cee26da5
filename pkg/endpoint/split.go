package endpoint

import (
	"bufio"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"sync"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/pkg/identity"
)

// peekTimeout bounds the wait for the first bytes of a client.
const peekTimeout = 5 * time.Second

// acceptRetry is the delay between two attempts to accept without free file descriptors.
const acceptRetry = 50 * time.Millisecond

// http2Preface is the start of every HTTP/2 connection (RFC 9113 section 3.4).
const http2Preface = "PRI "

// splitter accepts connections of authorized processes and passes HTTP/2 connections to gRPC and
// others to the pprof server. It is the listener of gRPC.
type splitter struct {
	net.Listener
	guard  *identity.AdminGuard
	log    *slog.Logger
	grpc   chan net.Conn
	http   chan net.Conn
	closed chan struct{}
	once   sync.Once
	wg     sync.WaitGroup
	err    error // why accepting ended; valid once closed is closed
}

func newSplitter(l net.Listener, log *slog.Logger) *splitter {
	s := &splitter{
		Listener: l, guard: identity.NewAdminGuard(log), log: log,
		grpc: make(chan net.Conn), http: make(chan net.Conn), closed: make(chan struct{}),
	}
	s.wg.Go(s.run)
	return s
}

func (s *splitter) run() {
	for {
		conn, err := s.Listener.Accept()
		if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
			select {
			case <-time.After(acceptRetry):
			case <-s.closed:
			}
			continue
		}
		if err != nil {
			s.end(err)
			return
		}
		s.wg.Go(func() { s.dispatch(conn) })
	}
}

// dispatch reads ahead the first bytes of a connection to select its server.
func (s *splitter) dispatch(conn net.Conn) {
	if err := s.guard.Authorize(conn); err != nil {
		return // it closed the connection and logged the error
	}
	r := bufio.NewReaderSize(conn, 64)
	_ = conn.SetReadDeadline(time.Now().Add(peekTimeout))
	done := make(chan struct{})
	defer close(done)
	s.wg.Go(func() {
		select {
		case <-s.closed:
			_ = conn.SetReadDeadline(time.Unix(1, 0))
		case <-done:
		}
	})
	first, err := r.Peek(len(http2Preface))
	if err != nil {
		s.log.Debug("admin client sent nothing", "error", err)
		_ = conn.Close()
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	to := s.http
	if string(first) == http2Preface {
		to = s.grpc
	}
	select {
	case to <- &peekedConn{Conn: conn, r: r}:
	case <-s.closed:
		_ = conn.Close()
	}
}

func (s *splitter) end(err error) {
	s.once.Do(func() {
		s.err = err
		close(s.closed)
	})
}

// Accept returns the next gRPC connection.
func (s *splitter) Accept() (net.Conn, error) {
	select {
	case c := <-s.grpc:
		return c, nil
	case <-s.closed:
		return nil, s.err
	}
}

// Close ends accepting for both.
func (s *splitter) Close() error {
	s.end(net.ErrClosed)
	err := s.Listener.Close()
	s.wg.Wait()
	return err
}

// peekedConn is a connection whose first bytes were read ahead.
type peekedConn struct {
	net.Conn
	r *bufio.Reader
}

func (c *peekedConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// pprofServer serves net/http/pprof on the other connections of a splitter.
type pprofServer struct {
	*splitter
	server *http.Server
}

func newPprofServer(s *splitter, log *slog.Logger) *pprofServer {
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return &pprofServer{s, &http.Server{
		Handler: mux, ReadHeaderTimeout: peekTimeout,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}}
}

// Accept returns the next connection that is not gRPC.
func (p *pprofServer) Accept() (net.Conn, error) {
	select {
	case c := <-p.http:
		return c, nil
	case <-p.closed:
		return nil, p.err
	}
}

func (p *pprofServer) serve() error {
	if err := p.server.Serve(p); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

func (p *pprofServer) close() { _ = p.server.Close() }
