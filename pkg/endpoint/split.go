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

	"google.golang.org/grpc/credentials"

	"github.com/vipgate/vipgate/pkg/identity"
)

// sniffTimeout is how long a client may take to say what it speaks.
const sniffTimeout = 5 * time.Second

// acceptRetry is the time between two attempts to accept while there are no file
// descriptors.
const acceptRetry = 50 * time.Millisecond

// http2Preface is how every HTTP/2 connection begins (RFC 9113 section 3.4).
const http2Preface = "PRI "

// splitter accepts connections of those who may use the socket, and gives those that
// speak HTTP/2 to gRPC and the others to the pprof server. It is the listener of gRPC.
type splitter struct {
	net.Listener
	credentials credentials.TransportCredentials
	log         *slog.Logger
	grpc        chan net.Conn
	http        chan net.Conn
	closed      chan struct{}
	once        sync.Once
	wg          sync.WaitGroup
	err         error // why accepting ended; valid once closed is closed
}

func newSplitter(l net.Listener, log *slog.Logger) *splitter {
	s := &splitter{
		Listener: l, credentials: identity.AdminCredentials(log), log: log,
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
		s.wg.Go(func() { s.sort(conn) })
	}
}

// sort looks at the first bytes of a connection. Nothing of it is lost.
func (s *splitter) sort(conn net.Conn) {
	if _, _, err := s.credentials.ServerHandshake(conn); err != nil {
		return // it closed the connection and logged why
	}
	r := bufio.NewReaderSize(conn, 64)
	_ = conn.SetReadDeadline(time.Now().Add(sniffTimeout))
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
		s.log.Debug("admin client said nothing", "error", err)
		_ = conn.Close()
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	to := s.http
	if string(first) == http2Preface {
		to = s.grpc
	}
	select {
	case to <- &sniffed{Conn: conn, r: r}:
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

// sniffed is a connection whose first bytes were looked at.
type sniffed struct {
	net.Conn
	r *bufio.Reader
}

func (c *sniffed) Read(p []byte) (int, error) { return c.r.Read(p) }

// pprofServer serves net/http/pprof to the other connections of a splitter.
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
	return &pprofServer{s, &http.Server{Handler: mux, ReadHeaderTimeout: sniffTimeout, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}}
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
