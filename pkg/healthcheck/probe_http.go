package healthcheck

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

const (
	userAgent = "vipgate-check"
	// maxHead bounds the head of an answer, including informational answers before it.
	maxHead = 64 << 10
	// chunkedFactor bounds the bytes that carry a byte of the body: a chunk of one takes six or more.
	chunkedFactor = 16
)

// exchangeHTTP sends an HTTP/1.1 request without the client of package net/http, which is designed
// for persistent connections and runs two goroutines for each.
func (plan *plan) exchangeHTTP(ctx context.Context, conn net.Conn, address netip.Addr) outcome {
	// SetDeadline fails only on a closed connection.
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	host := plan.HTTP.Host
	if host == "" {
		host = netip.AddrPortFrom(address, plan.port).String()
	}
	// The trench file bounds path and host to visible ASCII.
	method := cmp.Or(plan.HTTP.Method, http.MethodGet)
	request := method + " " + plan.HTTP.Path + " HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n" + plan.fields +
		"\r\n"
	if _, err := io.WriteString(conn, request); err != nil {
		return plan.brokenHTTP("no answer", err)
	}
	limited := &io.LimitedReader{R: conn, N: maxHead}
	reader := bufio.NewReader(limited)
	var r *http.Response
	for {
		var err error
		if r, err = http.ReadResponse(reader, &http.Request{Method: method}); err != nil {
			if limited.N == 0 {
				return plan.wrong("the head of the answer is larger than %d KiB", maxHead>>10)
			}
			return plan.brokenHTTP("no answer", err)
		}
		// Informational answers precede the final one (RFC 9110 section 15.2). 101 is final, and unasked.
		if r.StatusCode >= 200 || r.StatusCode == http.StatusSwitchingProtocols {
			break
		}
	}
	if !plan.HTTP.Wants(r.StatusCode) {
		return plan.wrong("status %d, wanted %s", r.StatusCode, plan.HTTP.Status)
	}
	if plan.HTTP.Body == "" {
		return outcome{verdict: succeeded}
	}
	expression, limit := plan.body()
	limited.N = chunkedFactor * int64(limit)
	// The body is not closed, since Close would read it to its end: the connection is reset.
	body, err := io.ReadAll(io.LimitReader(r.Body, int64(limit)))
	if err != nil {
		return plan.brokenHTTP("no end of the body", err)
	}
	if !expression.Match(body) {
		return plan.wrong("the body does not match")
	}
	return outcome{verdict: succeeded}
}

// headerFields returns the configured header fields of requests, and defaults.
func headerFields(check trench.HTTPCheck) string {
	var text strings.Builder
	defaults := []string{"User-Agent: " + userAgent, "Accept: */*"}
	if check.Method == http.MethodPost || check.Method == http.MethodPut {
		defaults = append(defaults, "Content-Length: 0")
	}
	for _, field := range check.Headers {
		name, _, _ := strings.Cut(field, ":")
		defaults = slices.DeleteFunc(defaults, func(initial string) bool {
			initial, _, _ = strings.Cut(initial, ":")
			return strings.EqualFold(initial, name)
		})
	}
	for _, field := range append(defaults, check.Headers[:]...) {
		if field != "" {
			text.WriteString(field + "\r\n")
		}
	}
	return text.String()
}

func (plan *plan) brokenHTTP(missing string, err error) outcome {
	if _, is := errors.AsType[*net.OpError](err); is { // of TLS, such as that a client certificate is required
		return plan.broken(missing, "", err)
	}
	return plan.broken(missing, "the answer is not HTTP/1.1: ", err)
}
