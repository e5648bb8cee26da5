package load

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
)

// maxFrame bounds a line of the echo protocol, in bytes.
const maxFrame = 64

// Server is the application: it answers requests with its name, and frames of a
// flow with its name and the frame.
type Server struct {
	name string
	http *http.Server

	mu        sync.Mutex
	listeners map[*listener]struct{}
	conns     map[net.Conn]bool // true for flows
	closed    bool
	flows     sync.WaitGroup
	serving   sync.WaitGroup
}

// NewServer returns a server without listeners. The name may not hold spaces.
func NewServer(name string) *Server {
	s := &Server{name: name, listeners: map[*listener]struct{}{}, conns: map[net.Conn]bool{}}
	s.http = &http.Server{
		Handler:           http.HandlerFunc(s.answer),
		ReadHeaderTimeout: MaxTimeout,
		// A client that goes away in the middle is the client's matter.
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	return s
}

func (s *Server) answer(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain")
	// What cannot be written, the client misses and counts.
	_, _ = io.WriteString(w, s.name+"\n")
}

// ServeRequests answers HTTP requests on a listener, which it closes at the end.
func (s *Server) ServeRequests(l net.Listener) {
	tracked := s.track(l, false)
	s.serving.Go(func() { _ = s.http.Serve(tracked) }) // always an error: that of its end
}

// ServeFlows answers frames on a listener, which it closes at the end.
func (s *Server) ServeFlows(l net.Listener) {
	tracked := s.track(l, true)
	s.serving.Go(func() {
		for {
			conn, err := tracked.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				s.flows.Go(func() { s.echo(conn) })
			}
		}
	})
}

// echo answers the frames of a flow until either end closes it.
func (s *Server) echo(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReaderSize(conn, maxFrame)
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return
		}
		if _, err := fmt.Fprintf(conn, "%s %s", s.name, line); err != nil {
			return
		}
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

// Refuse closes the listeners: nothing new is accepted, what is open goes on.
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

// Shutdown ends gracefully: nothing new is accepted, requests that were accepted
// are answered, then flows are closed with a FIN. When ctx ends first, what is
// still open is cut off, and the error says so. A connection that the kernel has
// and that was not accepted yet is reset: who wants to lose none sees to it first
// that no new one comes.
func (s *Server) Shutdown(ctx context.Context) error {
	err := s.Refuse()
	s.serving.Wait() // whatever was accepted is known to the HTTP server now
	err = errors.Join(err, s.http.Shutdown(ctx))
	s.end(false)
	if err != nil {
		return fmt.Errorf("shut %s down: %w", s.name, err)
	}
	return nil
}

// Abort ends at once: every connection is closed with a RST, if the network lets
// it out.
func (s *Server) Abort() error {
	err := s.Refuse()
	s.end(true)
	return err
}

// end closes every connection and waits for everything that served.
func (s *Server) end(reset bool) {
	s.mu.Lock()
	s.closed = true
	open := make([]net.Conn, 0, len(s.conns))
	for c := range s.conns {
		open = append(open, c)
	}
	s.mu.Unlock()
	for _, c := range open {
		if t, ok := c.(*tracked); ok && reset {
			_ = t.TCPConn.SetLinger(0)
		}
		_ = c.Close()
	}
	_ = s.http.Close()
	s.serving.Wait()
	s.flows.Wait()
}

// listener notes the connections that it accepts.
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

// Accept waits for a connection and notes it.
func (l *listener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
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

// Close closes the listener; a second time is no error, since the HTTP server
// closes what it serves as well.
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

// tracked is a connection that its server forgets when it is closed.
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
