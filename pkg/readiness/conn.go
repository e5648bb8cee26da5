package readiness

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
)

// Timeouts of a connection: for connect and TLS handshake, for the first message, and for the load
// balancer to read the last report when the watcher stops.
const (
	defaultHandshakeWithin    = 5 * time.Second
	defaultFirstMessageWithin = 10 * time.Second
	lastReportWithin          = 500 * time.Millisecond
)

// watchConn is one connection to the load balancer with one watch. It has a report stream while the
// reconnector selects it.
type watchConn struct {
	w          *Watcher
	generation uint64   // of the frontend's SVID at the start of the attempt
	socket     socketID // the socket file before the attempt
	state      streamState
	cancel     context.CancelCauseFunc

	received chan struct{} // closed at the first message
	synced   chan struct{} // closed at the first synced snapshot
	done     chan struct{} // closed when all goroutines have ended and err is set
	err      error         // explained reason of the end

	reporter chan *reporter // receives the permission to report, once
	retiring context.Context
	retire   context.CancelFunc // cancels retiring: flush pending reports and end the report
	retired  chan struct{}      // closed when the report has ended

	mu            sync.Mutex
	dialErr       error
	handshakeErr  error
	handshakeDone bool // the client's side of the handshake has finished
	expiry        time.Time
}

// open starts a connection, which ends with ctx.
func (w *Watcher) open(ctx context.Context, generation uint64) *watchConn {
	ctx, cancel := context.WithCancelCause(ctx)
	c := &watchConn{
		w: w, generation: generation, cancel: cancel,
		received: make(chan struct{}), synced: make(chan struct{}), done: make(chan struct{}),
		reporter: make(chan *reporter, 1), retired: make(chan struct{}),
	}
	c.socket, _ = statSocket(w.path)
	c.state.service = Service
	c.retiring, c.retire = context.WithCancel(ctx)
	go func() {
		defer close(c.done)
		defer cancel(nil)
		err := c.run(ctx)
		c.err = c.explain(err, context.Cause(ctx))
		w.merger.end(&c.state, time.Now(), c.err)
	}()
	return c
}

// close ends the connection and waits for its goroutines.
func (c *watchConn) close(cause error) {
	c.cancel(cause)
	<-c.done
}

// expires returns the end of the connection's lifetime; zero if it is unlimited.
func (c *watchConn) expires() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.expiry
}

// run connects and receives until the stream ends.
func (c *watchConn) run(ctx context.Context) error {
	conn, err := c.w.client(handshakeRecorder{c.w.opts.Credentials, c}, c.dial)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := readinessv1.NewReadinessServiceClient(conn)

	silence := time.AfterFunc(c.w.handshakeWithin+c.w.firstMessageWithin, func() { c.cancel(errNoFirstMessage) })
	defer silence.Stop()
	stream, err := client.WatchReadiness(ctx, &readinessv1.WatchReadinessRequest{Reader: c.w.opts.Reader})
	if err != nil {
		return err
	}
	var decoder decoder
	var reports sync.WaitGroup
	// Deferred calls run in reverse order: cancel ends the report goroutine before Wait.
	defer reports.Wait()
	defer c.cancel(nil)
	for {
		m, err := stream.Recv()
		at := time.Now()
		switch {
		case err != nil && unimplemented(err) && c.w.opts.Fallback != nil && !isClosed(c.received):
			return c.runFallback(ctx, conn, silence, &reports)
		case err != nil:
			return err
		}
		e, err := decoder.decode(m, at)
		if err == nil {
			err = c.w.merger.merge(&c.state, e, at)
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errProtocol, err)
		}
		c.w.count(func(s *Stats) { s.Messages++ })
		if e.first {
			silence.Stop()
			close(c.received)
			reports.Go(func() { c.runReports(ctx, client, e.watchID) })
		}
		if e.synced && !isClosed(c.synced) {
			close(c.synced)
		}
	}
}

// dialFunc connects to the socket.
type dialFunc = func(ctx context.Context, path string) (net.Conn, error)

// client returns a gRPC client that connects on its first call. It sends neither keepalive pings
// nor, because its flow control windows are fixed, BDP pings: Meridio's load balancer closes
// connections that send pings more often than every 30 s.
func (w *Watcher) client(creds credentials.TransportCredentials, dial dialFunc) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+w.path,
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(dial),
		grpc.WithAuthority("localhost"),
		grpc.WithConnectParams(grpc.ConnectParams{
			// The connection is closed at its first failure, so no attempt waits for the back-off. But
			// gRPC's handshake timeout is the longer of back-off and MinConnectTimeout.
			Backoff:           grpcbackoff.Config{BaseDelay: minBackoff, Multiplier: 1, MaxDelay: minBackoff},
			MinConnectTimeout: w.handshakeWithin,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessageBytes)),
		grpc.WithStaticStreamWindowSize(flowWindow),
		grpc.WithStaticConnWindowSize(flowWindow),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
	)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// dial connects to the socket and records the error, which gRPC returns only as text. It refuses
// to reconnect after a handshake: another process may listen on the socket by then, and a response
// such as Unimplemented applies only to the process that sent it.
func (c *watchConn) dial(ctx context.Context, path string) (net.Conn, error) {
	c.mu.Lock()
	shaken := c.handshakeDone
	c.mu.Unlock()
	if shaken {
		return nil, net.ErrClosed
	}
	conn, err := c.w.dial(ctx, path)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dialErr = err
	return conn, err
}

// handshakeRecorder records the result of the handshake.
type handshakeRecorder struct {
	credentials.TransportCredentials
	c *watchConn
}

func (w handshakeRecorder) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn,
	credentials.AuthInfo, error,
) {
	c, info, err := w.TransportCredentials.ClientHandshake(ctx, authority, conn)
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	w.c.handshakeErr, w.c.handshakeDone = err, err == nil
	if end := w.c.w.opts.ConnectionEnd; err == nil && end != nil {
		w.c.expiry, _ = end(info)
	}
	return c, info, err
}

func (w handshakeRecorder) Clone() credentials.TransportCredentials {
	return handshakeRecorder{w.TransportCredentials.Clone(), w.c}
}

// runReports reports once the reconnector selects this connection, until ctx ends or another
// connection takes over.
func (c *watchConn) runReports(ctx context.Context, client readinessv1.ReadinessServiceClient, watchID string) {
	defer close(c.retired)
	var r *reporter
	select {
	case r = <-c.reporter:
	case <-c.retiring.Done():
		return
	}
	defer c.w.queue.detach(r)
	wait := c.w.newBackoff()
	for {
		began := time.Now()
		err := c.sendReports(ctx, client, watchID, r)
		if err == nil || ctx.Err() != nil {
			return
		}
		if time.Since(began) > wait.Max {
			wait.Reset()
		}
		c.w.count(func(s *Stats) { s.ReportFailures++ })
		after := wait.Next()
		c.w.log.Warn("report stream failed, sending the full report again", "error", err, "retry_after", after)
		if backoff.Sleep(c.retiring, after) != nil || !c.w.queue.resend(r) {
			return
		}
	}
}

// sendReports runs one report stream: the full report, then changes. It returns nil when this
// connection has no more to report.
func (c *watchConn) sendReports(ctx context.Context, client readinessv1.ReadinessServiceClient, watchID string,
	r *reporter,
) error {
	ctx, cancel := context.WithCancel(ctx)
	var stream grpc.ClientStreamingClient[readinessv1.ReportAdvertisementRequest, readinessv1.ReportAdvertisementResponse]
	ended := make(chan error, 1) // final status of the stream
	var receiver sync.WaitGroup
	defer receiver.Wait()
	defer cancel()
	for {
		p, ok, replaced := c.w.queue.take(r)
		if replaced {
			// Another connection reports now. Keep this stream open until its connection is closed, so
			// that the load balancer always sees a reporter.
			<-ctx.Done()
			return nil
		}
		if ok && stream == nil {
			var err error
			if stream, err = client.ReportAdvertisement(ctx); err != nil {
				return err
			}
			receiver.Go(func() { ended <- stream.RecvMsg(new(readinessv1.ReportAdvertisementResponse)) })
		}
		if ok {
			for m := range p.messages(watchID) {
				if stream.Send(m) != nil { // RecvMsg returns the cause
					return cmp.Or(<-ended, errReportEnded)
				}
			}
			c.w.queue.markWritten(r)
			continue
		}
		select {
		case <-r.wake:
		case err := <-ended:
			return cmp.Or(err, errReportEnded)
		case <-c.retiring.Done(): // or the connection ends
			if stream == nil || ctx.Err() != nil {
				return ctx.Err()
			}
			// The response confirms that the load balancer has read all reports.
			if err := stream.CloseSend(); err != nil {
				return err
			}
			select {
			case err := <-ended:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}
