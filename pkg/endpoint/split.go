package endpoint

import (
	"bufio"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/identity"
)

const (
	// peekTimeout bounds the wait for the first bytes of a client.
	peekTimeout = 5 * time.Second
	// acceptRetry is the delay between two attempts to accept without free file descriptors.
	acceptRetry = 50 * time.Millisecond
	// http2Preface is the start of every HTTP/2 connection (RFC 9113 section 3.4).
	http2Preface = "PRI "
)

// splitter accepts connections of authorized processes. It passes HTTP/2 connections to gRPC and
// other connections to the pprof server.
type splitter struct {
	net.Listener
	guard *identity.AdminGuard
	log   *slog.Logger
	grpc  chan net.Conn
	http  chan net.Conn
	// open is canceled when accepting ends, with the reason as its cause.
	open context.Context
	end  context.CancelCauseFunc
	wg   sync.WaitGroup
}

func newSplitter(l net.Listener, log *slog.Logger) *splitter {
	s := &splitter{
		Listener: l, guard: identity.NewAdminGuard(log), log: log, grpc: make(chan net.Conn), http: make(chan net.Conn),
	}
	s.open, s.end = context.WithCancelCause(context.Background())
	s.wg.Go(s.run)
	return s
}

func (s *splitter) run() {
	for {
		conn, err := s.Listener.Accept()
		// The error is temporary: the admin socket must survive a shortage of file descriptors.
		if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
			_ = backoff.Sleep(s.open, acceptRetry)
			continue
		}
		if err != nil {
			s.end(err)
			return
		}
		s.wg.Go(func() { s.dispatch(conn) })
	}
}

// dispatch peeks at the first bytes of a connection to select its server.
func (s *splitter) dispatch(conn net.Conn) {
	if err := s.guard.Authorize(conn); err != nil {
		return // Authorize closed the connection and logged the error
	}
	r := bufio.NewReaderSize(conn, 64)
	_ = conn.SetReadDeadline(time.Now().Add(peekTimeout))
	// A deadline in the past interrupts Peek when the splitter closes.
	defer context.AfterFunc(s.open, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })()
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
	case <-s.open.Done():
		_ = conn.Close()
	}
}

// Close stops accepting for both servers.
func (s *splitter) Close() error {
	s.end(net.ErrClosed)
	err := s.Listener.Close()
	s.wg.Wait()
	return err
}

// share is the listener of one server.
type share struct {
	*splitter
	conns <-chan net.Conn
}

// Accept returns the next connection of the server.
func (s share) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.open.Done():
		return nil, context.Cause(s.open)
	}
}

// peekedConn is a connection whose first bytes are already in a buffer.
type peekedConn struct {
	net.Conn
	r *bufio.Reader
}

func (c *peekedConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// socketCredentials identifies the user of a client of the admin socket.
type socketCredentials struct {
	credentials.TransportCredentials
}

// ServerHandshake implements credentials.TransportCredentials.
func (c socketCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	peeked, ok := raw.(*peekedConn)
	if err != nil || !ok {
		return conn, info, err
	}
	user, err := identity.PeerProcess(peeked.Conn)
	if err != nil {
		return nil, nil, err
	}
	return conn, identity.SocketInfo{AuthInfo: info, UID: user.Uid}, nil
}

func newPprofServer(log *slog.Logger) *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	errorLog := slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	return &http.Server{Handler: mux, ReadHeaderTimeout: peekTimeout, ErrorLog: errorLog}
}
