package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// proxy is between the frontend and the readiness socket of the lb. The connection is encrypted,
// so the proxy can only be slow, silent or closed.
type proxy struct {
	path, to string
	wg       sync.WaitGroup

	mu       sync.Mutex
	listener *net.UnixListener
	links    map[*link]bool
	stalled  chan struct{} // closed when bytes may pass; nil when they may
	late     time.Duration
	closed   bool
}

// link is one connection through the proxy.
type link struct {
	born             time.Time
	frontend, server *net.UnixConn
}

func newProxy(path, to string) (*proxy, error) {
	p := &proxy{path: path, to: to, links: map[*link]bool{}}
	return p, p.listen()
}

// listen starts to accept connections.
func (p *proxy) listen() error {
	if err := os.Remove(p.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("proxy: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: p.path, Net: "unix"})
	if err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	p.mu.Lock()
	p.listener = l
	p.mu.Unlock()
	p.wg.Go(func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return // closed
			}
			p.wg.Go(func() { p.serve(conn) })
		}
	})
	return nil
}

// serve carries bytes in both directions until both ends are done.
func (p *proxy) serve(frontend *net.UnixConn) {
	defer frontend.Close()
	server, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: p.to, Net: "unix"})
	if err != nil {
		return // the lb does not listen: the frontend's connection ends
	}
	defer server.Close()
	l := &link{born: time.Now(), frontend: frontend, server: server}
	p.mu.Lock()
	refused := p.closed
	p.links[l] = true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.links, l)
		p.mu.Unlock()
	}()
	if refused {
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.carry(server, frontend)
	}()
	p.carry(frontend, server)
	<-done
}

// carry copies until the source ends, and then closes the destination for writing.
func (p *proxy) carry(to, from *net.UnixConn) {
	buffer := make([]byte, 16<<10)
	for {
		n, err := from.Read(buffer)
		p.wait()
		if n > 0 {
			if _, errWrite := to.Write(buffer[:n]); errWrite != nil {
				// The reader is gone: close the other end.
				from.Close()
				return
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				to.Close()
				return
			}
			_ = to.CloseWrite() // it may have ended, too
			return
		}
	}
}

// wait delays bytes while the proxy is stalled.
func (p *proxy) wait() {
	p.mu.Lock()
	stalled, late := p.stalled, p.late
	p.mu.Unlock()
	if late > 0 {
		time.Sleep(late)
	}
	if stalled != nil {
		<-stalled
	}
}

// delay delays every chunk.
func (p *proxy) delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.late = d
}

// stall blocks all bytes until it is called with false.
func (p *proxy) stall(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case on && p.stalled == nil:
		p.stalled = make(chan struct{})
	case !on && p.stalled != nil:
		close(p.stalled)
		p.stalled = nil
	}
}

// each calls fn for every connection.
func (p *proxy) each(fn func(*link)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		fn(l)
	}
}

// reset ends every connection.
func (p *proxy) reset() {
	p.each(func(l *link) { l.frontend.Close(); l.server.Close() })
}

// halfClose ends one direction of every connection.
func (p *proxy) halfClose(towardFrontend bool) {
	p.each(func(l *link) {
		// A connection that ended has no direction left.
		if towardFrontend {
			_ = l.frontend.CloseWrite()
		} else {
			_ = l.server.CloseWrite()
		}
	})
}

// refuse ends every connection and accepts no new one until it is called with false.
func (p *proxy) refuse(on bool) {
	p.mu.Lock()
	listener := p.listener
	p.closed = on
	p.mu.Unlock()
	if on {
		listener.Close()
		p.reset()
		return
	}
	// The proxy owned this path a moment ago; a failure shows as VIPs that stay withdrawn.
	_ = p.listen()
}

// olderThan counts the connections that were opened before a moment.
func (p *proxy) olderThan(t time.Time) int {
	n := 0
	p.each(func(l *link) {
		if l.born.Before(t) {
			n++
		}
	})
	return n
}

// close ends everything and waits for it.
func (p *proxy) close() {
	p.stall(false)
	p.mu.Lock()
	listener := p.listener
	p.closed = true
	p.mu.Unlock()
	listener.Close()
	p.reset()
	p.wg.Wait()
}
