package kubernetes

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/test/harness"
)

// chunk is the maximum number of bytes that a proxy delays at a time.
const chunk = 64 << 10

// Proxy is a TCP proxy in front of the API server. It is safe for concurrent use.
type Proxy struct {
	cluster  *Cluster
	listener net.Listener
	ctx      context.Context // ends with the proxy
	wg       sync.WaitGroup

	mu      sync.Mutex
	delay   time.Duration
	changed chan struct{} // closed when delay changes
	cut     bool
	conns   map[net.Conn]struct{} // of both sides
}

// Proxy starts a proxy that ends with the test.
func (c *Cluster) Proxy(t testing.TB) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	return c.ProxyOn(t, l)
}

// ProxyOn is Proxy with a listener, which may belong to another network namespace; it must have a
// loopback address. The proxy closes it.
func (c *Cluster) ProxyOn(t testing.TB, l net.Listener) *Proxy {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p := &Proxy{
		cluster: c, listener: l, ctx: ctx, changed: make(chan struct{}), conns: map[net.Conn]struct{}{},
	}
	p.wg.Go(p.serve)
	t.Cleanup(func() {
		cancel()
		l.Close()
		p.Cut()
		p.wg.Wait()
	})
	return p
}

// Config returns a client configuration with the proxy in place of the API server.
func (p *Proxy) Config(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.Host = "https://" + p.listener.Addr().String()
	return config
}

// Delay delays bytes by d in each direction, including bytes in transit. 0 disables the delay.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
	close(p.changed)
	p.changed = make(chan struct{})
}

// Cut closes all connections, and new ones immediately after accepting them, until Restore.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = true
	for conn := range p.conns {
		conn.Close()
	}
}

// Restore ends Cut.
func (p *Proxy) Restore() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = false
}

// Connections returns the number of open connections of clients.
func (p *Proxy) Connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns) / 2
}

// serve accepts clients until the listener is closed.
func (p *Proxy) serve() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.forward(client) })
	}
}

// forward copies between a client and the API server until either closes.
func (p *Proxy) forward(client net.Conn) {
	defer client.Close()
	server, err := new(net.Dialer).DialContext(p.ctx, "tcp", p.cluster.Address())
	if err != nil {
		return
	}
	defer server.Close()
	if !p.add(client, server) {
		return
	}
	defer p.remove(client, server)
	var wg sync.WaitGroup
	wg.Go(func() { p.copy(server, client) })
	wg.Go(func() { p.copy(client, server) })
	wg.Wait()
}

// add registers a pair of connections, unless the proxy is cut.
func (p *Proxy) add(pair ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut {
		return false
	}
	for _, conn := range pair {
		p.conns[conn] = struct{}{}
	}
	return true
}

func (p *Proxy) remove(pair ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range pair {
		delete(p.conns, conn)
	}
}

// copy copies one direction, and closes both connections at its end.
func (p *Proxy) copy(to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	buffer := make([]byte, chunk)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			if !p.wait(time.Now()) {
				return
			}
			if _, err := to.Write(buffer[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// wait waits until the data that was received at read is due. It returns false when the proxy
// ends.
func (p *Proxy) wait(read time.Time) bool {
	for {
		p.mu.Lock()
		left, changed := time.Until(read.Add(p.delay)), p.changed
		p.mu.Unlock()
		if left <= 0 {
			return true
		}
		timer := time.NewTimer(left)
		select {
		case <-timer.C:
		case <-changed:
		case <-p.ctx.Done():
		}
		timer.Stop()
		if p.ctx.Err() != nil {
			return false
		}
	}
}
