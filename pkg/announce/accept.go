package announce

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/vipgate/vipgate/pkg/backoff"
)

// accept waits for a connection of the peer, instead of a dial. The first call opens the listener,
// which stays open until ctx ends.
func (announcer *Announcer) accept(ctx context.Context) (net.Conn, error) {
	if announcer.accepted == nil {
		if err := announcer.listen(ctx); err != nil {
			return nil, fmt.Errorf("cannot accept connections: %w", err)
		}
	}
	select {
	case conn := <-announcer.accepted:
		return conn, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (announcer *Announcer) listen(ctx context.Context) error {
	options := announcer.options
	config := net.ListenConfig{KeepAlive: -1} // BGP has its own KEEPALIVE
	config.SetMultipathTCP(false)             // MPTCP and TCP_MD5SIG exclude each other
	if options.Password != "" {
		config.Control = signWith(options.Password, options.Peer.Addr())
	}
	listener, err := config.Listen(ctx, "tcp", options.Listen.String())
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { listener.Close() }) // ends acceptAll
	announcer.accepted = make(chan net.Conn, 1)
	announcer.accepting.Go(func() { announcer.acceptAll(ctx, listener, announcer.accepted) })
	return nil
}

// acceptAll passes on connections of the peer until ctx ends. A new connection closes the one
// before: the peer lost it, even if no packet said so, and keeps one session.
func (announcer *Announcer) acceptAll(ctx context.Context, listener net.Listener, accepted chan net.Conn) {
	var current net.Conn
	for {
		conn, err := listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			select { // the session closes its own connection, after its last message
			case conn := <-accepted:
				conn.Close()
			default:
			}
			return
		case err != nil: // out of file descriptors
			_ = backoff.Sleep(ctx, minBackoff) // the end of ctx closes the listener
			continue
		}
		from := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		if from.WithZone("") != announcer.options.Peer.Addr().WithZone("") {
			conn.Close()
			continue
		}
		if current != nil {
			current.Close()
		}
		select { // one that waits is closed now
		case <-accepted:
		default:
		}
		current = conn
		accepted <- conn
	}
}
