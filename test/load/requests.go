package load

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/task"
)

// request is sent on every connection; its answer is the last data on the connection.
const request = "GET / HTTP/1.1\r\nHost: vip\r\nConnection: close\r\n\r\n"

// maxLate is the maximum delay of the sending against its schedule, as on a machine that was
// suspended. Later requests are withheld, so that no burst follows.
const maxLate = 500 * time.Millisecond

// maxAnswer bounds the bytes read of an answer's body.
const maxAnswer = 1 << 10

// requests sends at the rate until sending ends.
func (g *Generator) requests(ctx, sending context.Context) {
	interval := time.Second / time.Duration(g.c.Rate)
	// The bound of open requests is the number sent within a timeout and one second.
	most := int(g.c.Timeout/interval) + g.c.Rate
	next := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := 0; ; i++ {
		timer.Reset(time.Until(next))
		select {
		case <-timer.C:
		case <-sending.Done():
			return
		}
		late := time.Since(next) > maxLate
		next = next.Add(interval)
		to := g.c.Requests[i%len(g.c.Requests)]
		g.mu.Lock()
		c := g.phase
		withheld := late || g.busy >= most
		if withheld {
			c.result.Withheld++
		} else {
			c.result.Sent++
			c.open++
			g.busy++
		}
		g.mu.Unlock()
		if !withheld {
			g.work.Go(func() { g.request(ctx, c, to) })
		}
	}
}

// request sends one request and records its outcome.
func (g *Generator) request(ctx context.Context, c *phase, to netip.AddrPort) {
	began := time.Now()
	target, stage, err := g.ask(ctx, to)
	took := time.Since(began)
	if g.c.Observe != nil {
		g.c.Observe(Outcome{To: to, Sent: began, Err: err})
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	c.open--
	g.busy--
	if err != nil {
		c.result.Failed++
		g.fail(c, to, stage, err)
		return
	}
	if c.result.Answered++; took < c.result.Fastest || c.result.Fastest == 0 {
		c.result.Fastest = took
	}
	c.result.ByTarget[target]++
	c.result.Slowest = max(c.result.Slowest, took)
}

// ask sends one request and returns the name of the target that answered, or the stage at which
// it failed.
func (g *Generator) ask(ctx context.Context, to netip.AddrPort) (target, stage string, err error) {
	ctx, cancel := task.WithAwakeTimeout(ctx, g.c.Timeout)
	defer cancel()
	conn, err := g.c.dial(ctx, to)
	if err != nil {
		return "", "connect", err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := io.WriteString(conn, request); err != nil {
		return "", "ask", err
	}
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return "", "answer", err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err != nil {
		return "", "answer", err
	}
	target = strings.TrimSpace(string(body))
	if answer.StatusCode != http.StatusOK || target == "" {
		return "", "answer", fmt.Errorf("status %s, body %q", answer.Status, body)
	}
	return target, "", nil
}
