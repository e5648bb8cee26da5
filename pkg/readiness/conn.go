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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

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
func (watcher *Watcher) open(ctx context.Context, generation uint64) *watchConn {
	ctx, cancel := context.WithCancelCause(ctx)
	opened := &watchConn{
		w: watcher, generation: generation, cancel: cancel,
		received: make(chan struct{}), synced: make(chan struct{}), done: make(chan struct{}),
		reporter: make(chan *reporter, 1), retired: make(chan struct{}),
	}
	opened.socket, _ = statSocket(watcher.path)
	opened.state.service = Service
	opened.retiring, opened.retire = context.WithCancel(ctx)
	go func() {
		defer close(opened.done)
		defer cancel(nil)
		err := opened.run(ctx)
		opened.err = opened.explain(err, context.Cause(ctx))
		watcher.merger.end(&opened.state, time.Now(), opened.err)
	}()
	return opened
}

// close ends the connection and waits for its goroutines.
func (connection *watchConn) close(cause error) {
	connection.cancel(cause)
	<-connection.done
}

// expires returns the end of the connection's lifetime; zero if it is unlimited.
func (connection *watchConn) expires() time.Time {
	connection.mu.Lock()
	defer connection.mu.Unlock()
	return connection.expiry
}

// run connects and receives until the stream ends.
func (connection *watchConn) run(ctx context.Context) error {
	conn, err := connection.w.client(handshakeRecorder{connection.w.opts.Credentials, connection}, connection.dial)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := readinessv1.NewReadinessServiceClient(conn)

	// A hung load balancer answers neither handshake nor call, so no error would end the attempt.
	within := connection.w.handshakeWithin + connection.w.firstMessageWithin
	silence := time.AfterFunc(within, func() { connection.cancel(errNoFirstMessage) })
	defer silence.Stop()
	stream, err := client.WatchReadiness(ctx, &readinessv1.WatchReadinessRequest{Reader: connection.w.opts.Reader})
	if err != nil {
		return err
	}
	var decoder decoder
	var reports sync.WaitGroup
	// Deferred calls run in reverse order: cancel ends the report goroutine before Wait.
	defer reports.Wait()
	defer connection.cancel(nil)
	for {
		message, err := stream.Recv()
		// Read the clock before decoding: the lease counts from the receipt.
		receivedAt := time.Now()
		switch {
		case status.Code(err) == codes.Unimplemented &&
			connection.w.opts.Fallback != nil && !isClosed(connection.received):
			return connection.runFallback(ctx, conn, silence, &reports)
		case err != nil:
			return err
		}
		event, err := decoder.decode(message, receivedAt)
		if err == nil {
			err = connection.w.merger.merge(&connection.state, event, receivedAt)
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errProtocol, err)
		}
		connection.w.count(func(stats *Stats) { stats.Messages++ })
		if event.first {
			// A report names the watch, whose ID is in the first message.
			silence.Stop()
			close(connection.received)
			reports.Go(func() { connection.runReports(ctx, client, event.watchID) })
		}
		if event.synced && !isClosed(connection.synced) {
			close(connection.synced)
		}
	}
}

type dialFunc = func(ctx context.Context, path string) (net.Conn, error)

// client returns a gRPC client that connects on its first call. It sends neither keepalive pings
// nor, because its flow control windows are fixed, BDP pings: Meridio's load balancer closes
// connections that send pings more often than every 30 s.
func (watcher *Watcher) client(creds credentials.TransportCredentials, dial dialFunc) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+watcher.path,
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(dial),
		grpc.WithAuthority("localhost"),
		grpc.WithConnectParams(grpc.ConnectParams{
			// The connection is closed at its first failure, so no attempt waits for the back-off. But
			// gRPC's handshake timeout is the longer of back-off and MinConnectTimeout.
			Backoff:           grpcbackoff.Config{BaseDelay: minBackoff, Multiplier: 1, MaxDelay: minBackoff},
			MinConnectTimeout: watcher.handshakeWithin,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessageBytes)),
		grpc.WithStaticStreamWindowSize(flowWindow),
		grpc.WithStaticConnWindowSize(flowWindow),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
	)
}

func isClosed(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// dial connects to the socket and records the error, which gRPC returns only as text. It refuses
// to reconnect after a handshake: another process may listen on the socket by then, and a response
// such as Unimplemented applies only to the process that sent it.
func (connection *watchConn) dial(ctx context.Context, path string) (net.Conn, error) {
	connection.mu.Lock()
	shaken := connection.handshakeDone
	connection.mu.Unlock()
	if shaken {
		return nil, net.ErrClosed
	}
	conn, err := connection.w.dial(ctx, path)
	connection.mu.Lock()
	defer connection.mu.Unlock()
	connection.dialErr = err
	return conn, err
}

type handshakeRecorder struct {
	credentials.TransportCredentials
	c *watchConn
}

func (recorder handshakeRecorder) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn,
	credentials.AuthInfo, error,
) {
	secured, info, err := recorder.TransportCredentials.ClientHandshake(ctx, authority, conn)
	recorder.c.mu.Lock()
	defer recorder.c.mu.Unlock()
	recorder.c.handshakeErr, recorder.c.handshakeDone = err, err == nil
	if end := recorder.c.w.opts.ConnectionEnd; err == nil && end != nil {
		recorder.c.expiry, _ = end(info)
	}
	return secured, info, err
}

func (recorder handshakeRecorder) Clone() credentials.TransportCredentials {
	return handshakeRecorder{recorder.TransportCredentials.Clone(), recorder.c}
}

// runReports reports once the reconnector selects this connection, until ctx ends or another
// connection takes over.
func (connection *watchConn) runReports(ctx context.Context, client readinessv1.ReadinessServiceClient,
	watchID string,
) {
	defer close(connection.retired)
	var reporter *reporter
	select {
	case reporter = <-connection.reporter:
	case <-connection.retiring.Done():
		return
	}
	defer connection.w.queue.detach(reporter)
	// A failed report stream is opened again without touching the watch, which renews the lease.
	wait := connection.w.newBackoff()
	for {
		began := time.Now()
		err := connection.sendReports(ctx, client, watchID, reporter)
		if err == nil || ctx.Err() != nil {
			return
		}
		// A stream that lasted was accepted: its end is a new failure, not a repeated one.
		if time.Since(began) > wait.Max {
			wait.Reset()
		}
		connection.w.count(func(stats *Stats) { stats.ReportFailures++ })
		after := wait.Next()
		connection.w.log.Warn("report stream failed, sending the full report again", "error", err, "retry_after", after)
		if backoff.Sleep(connection.retiring, after) != nil || !connection.w.queue.resend(reporter) {
			return
		}
	}
}

// sendReports runs one report stream: the full report, then changes. It returns nil when this
// connection has no more to report.
func (connection *watchConn) sendReports(ctx context.Context, client readinessv1.ReadinessServiceClient, watchID string,
	reporter *reporter,
) error {
	ctx, cancel := context.WithCancel(ctx)
	var stream grpc.ClientStreamingClient[readinessv1.ReportAdvertisementRequest, readinessv1.ReportAdvertisementResponse]
	ended := make(chan error, 1) // final status of the stream
	var receiver sync.WaitGroup
	defer receiver.Wait()
	defer cancel()
	for {
		delta, ok, replaced := connection.w.queue.take(reporter)
		if replaced {
			// Another connection reports now. Keep this stream open until its connection is closed, so
			// that the load balancer always sees a reporter.
			<-ctx.Done()
			return nil
		}
		// Without a report no stream is opened, so that a stop need not wait for its confirmation.
		if ok && stream == nil {
			var err error
			if stream, err = client.ReportAdvertisement(ctx); err != nil {
				return err
			}
			// Receive concurrently, so that the end of the stream is noticed while there is nothing to send.
			receiver.Go(func() { ended <- stream.RecvMsg(new(readinessv1.ReportAdvertisementResponse)) })
		}
		if ok {
			for message := range delta.messages(watchID) {
				if stream.Send(message) != nil { // RecvMsg returns the cause
					return cmp.Or(<-ended, errReportEnded)
				}
			}
			connection.w.queue.markWritten(reporter)
			continue
		}
		select {
		case <-reporter.wake:
		case err := <-ended:
			return cmp.Or(err, errReportEnded)
		case <-connection.retiring.Done(): // or the connection ends
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
