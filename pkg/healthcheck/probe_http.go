package healthcheck

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// checkAgent is how checks call themselves.
const checkAgent = "vipgate-check"

const (
	// maxHead bounds the head of an answer, with informational ones before it.
	maxHead = 64 << 10
	// maxBody is how much of a body is looked at.
	maxBody = 64 << 10
	// maxChunked is how many bytes may carry a body of maxBody: chunks of one byte
	// take six, and may have extensions.
	maxChunked = 16 * maxBody
)

// httpProber sends HTTP requests. It speaks HTTP/1.1 by itself: a client of package
// net/http is designed for connections that are kept, and has two goroutines for each.
type httpProber struct {
	check   trench.Check
	body    *regexp.Regexp // nil: any
	secured *secured       // nil: plaintext
}

var _ prober = (*httpProber)(nil)

// newHTTPProber returns a prober for a check whose HTTP has a port. It panics if the
// body is no regular expression, which the reader of the trench file has tried.
func newHTTPProber(check trench.Check) *httpProber {
	p := &httpProber{check: check}
	if check.HTTP.Body != "" {
		p.body = regexp.MustCompile(check.HTTP.Body)
	}
	if check.HTTP.TLS.On {
		p.secured = &secured{TLSCheck: check.HTTP.TLS}
	}
	return p
}

// probe implements prober.
func (p *httpProber) probe(ctx context.Context, dial dialFunc, at netip.Addr) outcome {
	port := p.check.HTTP.Port
	var config *tls.Config
	if p.secured != nil {
		var err error
		if config, err = p.secured.config(ctx, at); err != nil {
			return outcome{verdict: unmade, reason: fmt.Sprintf("check not run: %v", err)}
		}
	}
	conn, err := dial(ctx, "tcp", netip.AddrPortFrom(at, port).String())
	if err != nil {
		return failure(&p.check, port, err)
	}
	reset(conn)
	defer conn.Close()
	defer interrupt(ctx, conn)()

	stream := conn
	if config != nil {
		secure := tls.Client(conn, config)
		if err := secure.Handshake(); err != nil {
			return handshakeFailure(&p.check, port, config.ServerName, err)
		}
		stream = secure
	}
	if _, err := io.WriteString(stream, p.request(at)); err != nil {
		return p.broken("no answer", err)
	}
	return p.judge(stream)
}

// interrupt ends what waits for the connection when ctx ends. The returned function
// must be called; it waits until no goroutine touches the connection any more.
func interrupt(ctx context.Context, conn net.Conn) (done func()) {
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		// The only error is that of a connection that is closed.
		_ = conn.SetDeadline(time.Unix(1, 0))
	})
	return func() {
		if !stop() {
			<-ended
		}
	}
}

// request writes what the trench file has bound to visible ASCII.
func (p *httpProber) request(at netip.Addr) string {
	c := p.check.HTTP
	host := c.Host
	if host == "" {
		host = netip.AddrPortFrom(at, c.Port).String()
	}
	return "GET " + c.Path + " HTTP/1.1\r\nHost: " + host + "\r\nUser-Agent: " + checkAgent + "\r\nAccept: */*\r\nConnection: close\r\n\r\n"
}

// judge reads the answer.
func (p *httpProber) judge(stream io.Reader) outcome {
	c := p.check.HTTP
	limited := &io.LimitedReader{R: stream, N: maxHead}
	reader := bufio.NewReader(limited)
	var r *http.Response
	for {
		var err error
		if r, err = http.ReadResponse(reader, nil); err != nil {
			if limited.N == 0 {
				return wrong(c.Port, "the head of the answer is larger than %d KiB", maxHead>>10)
			}
			return p.broken("no answer", err)
		}
		// Informational answers precede the final one (RFC 9110 section 15.2). 101 is
		// final, and was not asked for.
		if r.StatusCode >= 200 || r.StatusCode == http.StatusSwitchingProtocols {
			break
		}
	}
	if !c.Wants(r.StatusCode) {
		return wrong(c.Port, "status %d, wanted %s", r.StatusCode, c.Status)
	}
	if p.body == nil {
		return outcome{verdict: succeeded}
	}
	limited.N = maxChunked
	// It is not closed, which would read it to its end: the connection is reset.
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	switch {
	case err != nil:
		return p.broken("no end of the body", err)
	case !p.body.Match(body):
		return wrong(c.Port, "the body does not match")
	}
	return outcome{verdict: succeeded}
}

// broken is the outcome when the connection did not carry an answer.
func (p *httpProber) broken(missing string, err error) outcome {
	port := p.check.HTTP.Port
	var errno syscall.Errno
	var alert *net.OpError
	switch {
	case timedOut(err):
		return wrong(port, "connected, but %s in %s", missing, p.check.Timeout)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return wrong(port, "closed the connection: %s", missing)
	case errors.As(err, &errno):
		return failure(&p.check, port, err)
	case errors.As(err, &alert): // a certificate that we should have, for one
		return wrong(port, "%s", remark(err.Error()))
	}
	return wrong(port, "the answer is not HTTP/1.1: %s", remark(err.Error()))
}
