package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// answerTimeout bounds the exchange of one health check.
const answerTimeout = time.Second

// application is the target's end of an HTTP health check. It runs in this process, so that the
// time at which its answer changes is from the same clock as the receiver's times.
type application struct {
	fixture *fixture
	// changed receives the time just before the first answer with a different status was written.
	changed chan time.Time

	answered bool // the last answer; of the goroutine that serves

	mu      sync.Mutex
	healthy bool // the answer from now on
}

// checkInterval returns the time between two checks of the target. It is longer than the time
// for which a change of n VIPs keeps both cores busy: the timeout is as long, and a check that
// is delayed by it would count as failed.
func checkInterval(n int) time.Duration {
	if n > 10_000 {
		return 500 * time.Millisecond
	}
	return 100 * time.Millisecond
}

// httpTrench returns the trench file of the fixture with an HTTP check whose rise and fall are
// 1.
func (fx *fixture) httpTrench() string {
	return fx.trenchWith(fmt.Sprintf(
		"{http: {port: %d}, families: ipv4, interval: %[2]s, timeout: %[2]s, rise: 1, fall: 1}",
		checkPort, checkInterval(len(fx.vips)),
	))
}

// startApplication starts a target that answers health checks with 200.
func (fx *fixture) startApplication() (*application, error) {
	a := &application{fixture: fx, changed: make(chan time.Time, 1), healthy: true, answered: true}
	l, err := fx.Backend.Listen("tcp", netip.AddrPortFrom(lab.Target1v4, checkPort).String())
	if err != nil {
		return nil, fmt.Errorf("target: %w", err)
	}
	var serving sync.WaitGroup
	serving.Go(func() { a.serve(l) })
	fx.ends = append(fx.ends, func() error {
		err := l.Close()
		serving.Wait()
		return err
	})
	return a, nil
}

// serve answers one check after the other until the listener is closed.
func (a *application) serve(l net.Listener) {
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			a.fixture.fail(fmt.Errorf("target: %w", err))
			return
		}
		a.answer(conn)
		_ = conn.Close() // the exchange is over
	}
}

// answer answers a check. A connection that fails is a check that was given up: the next one gets
// the answer.
func (a *application) answer(conn net.Conn) {
	if conn.SetDeadline(time.Now().Add(answerTimeout)) != nil {
		return
	}
	if _, err := http.ReadRequest(bufio.NewReader(conn)); err != nil {
		return
	}
	a.mu.Lock()
	healthy := a.healthy
	a.mu.Unlock()
	status := http.StatusServiceUnavailable
	if healthy {
		status = http.StatusOK
	}
	text := fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
		status, http.StatusText(status))
	at := time.Now()
	if _, err := conn.Write(text); err != nil || healthy == a.answered {
		return
	}
	a.answered = healthy
	select {
	case a.changed <- at:
	default: // turn has stopped waiting for the previous change
	}
}

// turn changes the answer and returns when the first check got the new one.
func (a *application) turn(healthy bool) (time.Time, error) {
	a.mu.Lock()
	a.healthy = healthy
	a.mu.Unlock()
	ctx, cancel := a.fixture.withTimeout()
	defer cancel()
	select {
	case at := <-a.changed:
		return at, nil
	case <-ctx.Done():
		return time.Time{}, a.fixture.explain(ctx, errors.New("no health check came"))
	}
}
