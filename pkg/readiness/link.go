package readiness

import (
	"context"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
)

const (
	// defaultHandshakeWithin bounds connecting and the TLS handshake of one attempt.
	defaultHandshakeWithin = 5 * time.Second
	// defaultFirstMessageWithin bounds the wait for the first message of a watch.
	defaultFirstMessageWithin = 10 * time.Second
	// lastReportWithin bounds the wait for the load balancer to have read the
	// last report when the watcher stops.
	lastReportWithin = 500 * time.Millisecond
)

// link is one connection to the load balancer with one watch, and the report
// while the watcher says so.
type link struct {
	w          *Watcher
	generation uint64 // of our SVID when the attempt began
	hearing    hearing
	cancel     context.CancelCauseFunc

	spoke  chan struct{} // closed at the first message
	synced chan struct{} // closed at the first synced snapshot
	done   chan struct{} // closed when everything has ended; err is set then
	err    error         // why it ended, in words

	reporter chan *reporter // receives the leave to report, once
	retire   chan struct{}  // closed: report what is left and end the report
	retired  chan struct{}  // closed when the report has ended

	mu           sync.Mutex
	dialErr      error
	handshakeErr error
	shaken       bool // the handshake is over, as far as we see
	end          time.Time
}

// open starts a link. It ends with ctx.
func (w *Watcher) open(ctx context.Context, generation uint64) *link {
	ctx, cancel := context.WithCancelCause(ctx)
	l := &link{
		w:          w,
		generation: generation,
		cancel:     cancel,
		spoke:      make(chan struct{}),
		synced:     make(chan struct{}),
		done:       make(chan struct{}),
		reporter:   make(chan *reporter, 1),
		retire:     make(chan struct{}),
		retired:    make(chan struct{}),
	}
	go func() {
		defer close(l.done)
		defer cancel(nil)
		err := l.run(ctx)
		switch cause := context.Cause(ctx); cause {
		case errMoved, errStopped:
			l.err = cause
		case errSilent:
			l.err = l.explain(cause)
		default:
			l.err = l.explain(err)
		}
		w.inbox.end(&l.hearing, time.Now(), l.err)
	}()
	return l
}

// close ends the link and waits for it.
func (l *link) close(cause error) {
	l.cancel(cause)
	<-l.done
}

func (l *link) spoken() bool {
	select {
	case <-l.spoke:
		return true
	default:
		return false
	}
}

// half returns how long after now half of the connection's remaining life is
// over; false when the connection has no end.
func (l *link) half(now time.Time) (time.Duration, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end.IsZero() {
		return 0, false
	}
	return l.end.Sub(now) / 2, true
}

// run connects and hears the load balancer out.
func (l *link) run(ctx context.Context) error {
	conn, err := grpc.NewClient("passthrough:///"+l.w.path,
		grpc.WithTransportCredentials(witness{l.w.opts.Credentials, l}),
		grpc.WithContextDialer(l.dial),
		grpc.WithAuthority("localhost"),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: grpcBackoff(l.w.opts.MaxBackoff), MinConnectTimeout: l.w.handshakeWithin}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessageBytes)),
		grpc.WithStaticStreamWindowSize(flowWindow),
		grpc.WithStaticConnWindowSize(flowWindow),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
	)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := readinessv1.NewReadinessServiceClient(conn)

	silence := time.AfterFunc(l.w.handshakeWithin+l.w.firstMessageWithin, func() { l.cancel(errSilent) })
	defer silence.Stop()
	stream, err := client.WatchReadiness(ctx, &readinessv1.WatchReadinessRequest{Reader: l.w.opts.Reader})
	if err != nil {
		return err
	}
	var decoder decoder
	var reports sync.WaitGroup
	defer reports.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for {
		m, err := stream.Recv()
		at := time.Now()
		if err != nil {
			return err
		}
		said, err := decoder.decode(m, at)
		if err == nil {
			err = l.w.inbox.hear(&l.hearing, said, at)
		}
		if err != nil {
			return &brokenError{err}
		}
		l.w.stats.messages.Add(1)
		if said.first {
			silence.Stop()
			close(l.spoke)
			reports.Go(func() { l.report(ctx, client, said.watchID) })
		}
		if said.synced && !isClosed(l.synced) {
			close(l.synced)
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// dialUnix connects to a unix socket.
func dialUnix(ctx context.Context, path string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", path)
}

// dial connects to the socket and keeps the error, which gRPC hands on only as
// a text.
func (l *link) dial(ctx context.Context, path string) (net.Conn, error) {
	conn, err := l.w.dial(ctx, path)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dialErr = err
	return conn, err
}

// witness keeps what the handshake gave.
type witness struct {
	credentials.TransportCredentials
	l *link
}

func (w witness) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, info, err := w.TransportCredentials.ClientHandshake(ctx, authority, conn)
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	w.l.handshakeErr, w.l.shaken = err, err == nil
	if err == nil && w.l.w.opts.ConnectionEnd != nil {
		if end, ok := w.l.w.opts.ConnectionEnd(info); ok {
			w.l.end = end
		}
	}
	return c, info, err
}

func (w witness) Clone() credentials.TransportCredentials {
	return witness{w.TransportCredentials.Clone(), w.l}
}

// report reports whenever the watcher says that this link does, until ctx ends
// or another link takes over.
func (l *link) report(ctx context.Context, client readinessv1.ReadinessServiceClient, watchID string) {
	defer close(l.retired)
	var r *reporter
	select {
	case r = <-l.reporter:
	case <-l.retire:
		return
	case <-ctx.Done():
		return
	}
	defer l.w.outbox.detach(r)
	wait := pause{max: l.w.opts.MaxBackoff}
	for {
		began := time.Now()
		err := l.tell(ctx, client, watchID, r)
		if err == nil || ctx.Err() != nil {
			return
		}
		if time.Since(began) > l.w.opts.MaxBackoff {
			wait.reset()
		}
		l.w.stats.reportFailures.Add(1)
		after := wait.after()
		l.w.log.Warn("the report stream to the load balancer ended, everything is reported anew", "error", err, "retry_after", after)
		select {
		case <-time.After(after):
		case <-l.retire:
			return
		case <-ctx.Done():
			return
		}
		if !l.w.outbox.restart(r) {
			return
		}
	}
}

// tell runs one report stream: everything, then changes. nil means that the
// report of this link is over.
func (l *link) tell(ctx context.Context, client readinessv1.ReadinessServiceClient, watchID string, r *reporter) error {
	ctx, cancel := context.WithCancel(ctx)
	var stream grpc.ClientStreamingClient[readinessv1.ReportAdvertisementRequest, readinessv1.ReportAdvertisementResponse]
	ended := make(chan error, 1) // what the load balancer ended the stream with
	var receiver sync.WaitGroup
	defer receiver.Wait()
	defer cancel()
	for {
		p, ok, left := l.w.outbox.take(r)
		if left {
			// Another link reports. This stream stays open until its link is
			// closed, lest the load balancer believes for a moment that nobody
			// reports.
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
			for _, m := range p.messages(watchID) {
				if stream.Send(m) != nil {
					return over(<-ended)
				}
			}
			l.w.outbox.wrote(r)
			continue
		}
		select {
		case <-r.wake:
		case err := <-ended:
			return over(err)
		case <-ctx.Done():
			return ctx.Err()
		case <-l.retire:
			if stream == nil {
				return nil
			}
			// The answer says that the load balancer has read everything.
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

// over is the error of a report stream that the load balancer ended.
func over(err error) error {
	if err == nil {
		return errEndedReport
	}
	return err
}
