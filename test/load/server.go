package load

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// maxFrame bounds a line of the echo protocol, in bytes.
const maxFrame = 64

// sendCommand and a time ask for a frame after each such time.
const sendCommand = "send "

// Server is the application: it answers requests with its name, and frames of a
// flow with its name and the frame.
type Server struct {
	name string

	mu        sync.Mutex
	listeners map[*listener]struct{}
	conns     map[*tracked]bool // true for flows
	closed    bool
	failing   bool
	requests  sync.WaitGroup
	flows     sync.WaitGroup
	accepting sync.WaitGroup
}

// NewServer returns a server without listeners. The name may not hold spaces.
func NewServer(name string) *Server {
	return &Server{name: name, listeners: map[*listener]struct{}{}, conns: map[*tracked]bool{}}
}

// ServeRequests answers HTTP requests on a listener, which it closes at the end. Each connection
// has one request. net/http's server is not used, since during a shutdown it drops requests that
// it is reading.
func (s *Server) ServeRequests(l net.Listener) { s.accept(l, false, &s.requests, s.answer) }

// ServeFlows answers frames on a listener, which it closes at the end.
func (s *Server) ServeFlows(l net.Listener) { s.accept(l, true, &s.flows, s.echo) }

// accept serves the connections of a listener until it is closed.
func (s *Server) accept(l net.Listener, flows bool, work *sync.WaitGroup, serve func(net.Conn)) {
	own := s.track(l, flows)
	s.accepting.Go(func() {
		for {
			conn, err := own.accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				work.Go(func() {
					defer conn.Close()
					serve(conn)
				})
			}
		}
	})
}

// Fail makes the server answer every request with status 503, as an application with stale data.
func (s *Server) Fail() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failing = true
}

// status returns the status of answers.
func (s *Server) status() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failing {
		return http.StatusServiceUnavailable
	}
	return http.StatusOK
}

// answer answers one request. If the write fails, the client counts the missing answer.
func (s *Server) answer(conn net.Conn) {
	if conn.SetDeadline(time.Now().Add(MaxTimeout)) != nil {
		return
	}
	r, err := http.ReadRequest(bufio.NewReader(conn))
	if err != nil {
		return
	}
	body := s.name + "\n"
	answer := http.Response{
		StatusCode: s.status(), ProtoMajor: 1, ProtoMinor: 1, Request: r, Close: true,
		Header:        http.Header{"Content-Type": {"text/plain"}},
		ContentLength: int64(len(body)), Body: io.NopCloser(strings.NewReader(body)),
	}
	_ = answer.Write(conn)
}

// echo answers the frames of a flow until either end closes it.
func (s *Server) echo(conn net.Conn) {
	in := bufio.NewReaderSize(conn, maxFrame)
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return
		}
		if pace, found := strings.CutPrefix(string(line), sendCommand); found {
			s.send(conn, strings.TrimSpace(pace))
			return
		}
		if _, err := fmt.Fprintf(conn, "%s %s", s.name, line); err != nil {
			return
		}
	}
}

// send sends frames until either end closes the flow.
func (s *Server) send(conn net.Conn, pace string) {
	every, err := time.ParseDuration(pace)
	if err != nil || every <= 0 {
		return
	}
	ticks := time.NewTicker(every)
	defer ticks.Stop()
	for sequence := 1; ; sequence++ {
		if _, err := fmt.Fprintf(conn, "%s %d\n", s.name, sequence); err != nil {
			return
		}
		<-ticks.C
	}
}

// Connections counts the open connections: of requests, and long-lived flows.
func (s *Server) Connections() (requests, flows int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, flow := range s.conns {
		if flow {
			flows++
		} else {
			requests++
		}
	}
	return requests, flows
}

// Refuse closes the listeners: no new connection is accepted, open connections continue.
func (s *Server) Refuse() error {
	s.mu.Lock()
	open := make([]*listener, 0, len(s.listeners))
	for l := range s.listeners {
		open = append(open, l)
	}
	s.mu.Unlock()
	var errs []error
	for _, l := range open {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

// Shutdown ends gracefully: the server stops accepting, answers the accepted requests, then
// closes the flows with a FIN. When ctx ends first, open connections are aborted, and the error
// reports that. The kernel resets connections that are established but not yet accepted, so a
// caller that must lose none first makes sure that no new ones arrive.
func (s *Server) Shutdown(ctx context.Context) error {
	err := s.Refuse()
	s.accepting.Wait()
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(cut)
		s.hangUp(false)
	})
	s.requests.Wait()
	if !stop() {
		<-cut
		err = errors.Join(err, context.Cause(ctx))
	}
	s.hangUp(false)
	s.flows.Wait()
	if err != nil {
		return fmt.Errorf("shut %s down: %w", s.name, err)
	}
	return nil
}

// Abort ends immediately: every connection is closed with a RST, which reaches the client if the
// network forwards it.
func (s *Server) Abort() error {
	err := s.Refuse()
	s.hangUp(true)
	s.accepting.Wait()
	s.requests.Wait()
	s.flows.Wait()
	return err
}

// hangUp closes every connection, including connections that are accepted later.
func (s *Server) hangUp(reset bool) {
	s.mu.Lock()
	s.closed = true
	open := slices.Collect(maps.Keys(s.conns))
	s.mu.Unlock()
	for _, c := range open {
		if reset {
			_ = c.SetLinger(0)
		}
		_ = c.Close()
	}
}

// listener records the connections that it accepts.
type listener struct {
	net.Listener
	server *Server
	flows  bool
}

func (s *Server) track(l net.Listener, flows bool) *listener {
	t := &listener{Listener: l, server: s, flows: flows}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listeners[t] = struct{}{}
	return t
}

// accept waits for a connection and records it.
func (l *listener) accept() (*tracked, error) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return nil, err
		}
		tcp, ok := conn.(*net.TCPConn)
		if !ok {
			return nil, errors.Join(fmt.Errorf("%T is no TCP connection", conn), conn.Close())
		}
		c := &tracked{TCPConn: tcp, server: l.server}
		l.server.mu.Lock()
		late := l.server.closed
		if !late {
			l.server.conns[c] = l.flows
		}
		l.server.mu.Unlock()
		if !late {
			return c, nil
		}
		_ = tcp.Close()
	}
}

// Close closes the listener. A second call is a no-op.
func (l *listener) Close() error {
	l.server.mu.Lock()
	_, open := l.server.listeners[l]
	delete(l.server.listeners, l)
	l.server.mu.Unlock()
	if !open {
		return nil
	}
	return l.Listener.Close()
}

// tracked is a connection that removes itself from its server when it is closed.
type tracked struct {
	*net.TCPConn
	server *Server
}

// Close closes the connection.
func (c *tracked) Close() error {
	c.server.mu.Lock()
	delete(c.server.conns, c)
	c.server.mu.Unlock()
	return c.TCPConn.Close()
}
