package secret

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/files"
)

// AccountDir is where the kubelet mounts the service account of a pod.
const AccountDir = "/var/run/secrets/kubernetes.io/serviceaccount"

// The files of a service account.
const (
	tokenFile = "token"
	caFile    = "ca.crt"
)

const (
	// maxCredential is the maximum size of a token and of a CA bundle, maxAnswer of a rejection.
	maxCredential = 1 << 20
	maxAnswer     = 64 << 10
	// maxHeader is the maximum size of a response header; the API server sends less than 1 KiB.
	maxHeader = 64 << 10

	dialTimeout = 5 * time.Second
	// headerTimeout exceeds the maximum queue time of the API server's priority and fairness.
	headerTimeout = 60 * time.Second
	// A connection that is idle for pingAfter is probed, and closed if the answer does not arrive
	// within pingTimeout. Both are the values of client-go.
	pingAfter   = 30 * time.Second
	pingTimeout = 15 * time.Second
)

// client sends requests to the API server as the service account of the pod.
type client struct {
	host, port string // address of the API server
	account    string // directory of the service account

	// Shorter in tests.
	headerTimeout, pingAfter, pingTimeout time.Duration

	mu   sync.Mutex
	ca   []byte // CA bundle of http
	http *http.Client
}

// rejection is an error answer of the API server.
type rejection struct {
	code    int
	message string
}

func (r *rejection) Error() string {
	text := fmt.Sprintf("the API server answers %d %s", r.code, http.StatusText(r.code))
	if r.message != "" {
		text += ": " + quote(r.message)
	}
	switch r.code {
	case http.StatusUnauthorized:
		text += "; check the token of the pod's service account"
	case http.StatusForbidden:
		text += "; grant the pod's service account the verb watch on Secrets in its namespace"
	}
	return text
}

// watch opens a watch of the Secret with the given name. With initialEvents, the API server marks
// the end of the current state with a bookmark; a server without this feature refuses the request
// (Invalid). The stream ends with ctx.
func (c *client) watch(
	ctx context.Context, namespace, name string, timeout time.Duration, initialEvents bool,
) (io.ReadCloser, error) {
	query := url.Values{
		"watch":               {"true"},
		"fieldSelector":       {"metadata.name=" + name},
		"allowWatchBookmarks": {"true"},
		"timeoutSeconds":      {strconv.Itoa(int(timeout.Seconds()))},
	}
	if initialEvents {
		query.Set("sendInitialEvents", "true")
		query.Set("resourceVersionMatch", "NotOlderThan")
	}
	path := "/api/v1/namespaces/" + url.PathEscape(namespace) + "/secrets?" + query.Encode()
	response, err := c.get(ctx, path)
	if err != nil {
		return nil, err
	}
	if response.StatusCode == http.StatusOK {
		return response.Body, nil
	}
	defer response.Body.Close()
	r := &rejection{code: response.StatusCode}
	var s status
	// A proxy does not answer with a Status. The code is sufficient then.
	if json.NewDecoder(io.LimitReader(response.Body, maxAnswer)).Decode(&s) == nil {
		r.message = s.Message
	}
	return nil, r
}

// get requests a path of the API server.
func (c *client) get(ctx context.Context, path string) (*http.Response, error) {
	if c.host == "" || c.port == "" {
		return nil, errors.New("the address of the API server is unknown: " +
			"KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are set only in a pod")
	}
	h, err := c.transport()
	if err != nil {
		return nil, err
	}
	// Read the token for each request, because the kubelet replaces it before it expires.
	token, err := c.credential(tokenFile)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+net.JoinHostPort(c.host, c.port)+path, nil)
	if err != nil {
		return nil, fmt.Errorf("failed to address the API server: %w", err)
	}
	request.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	request.Header.Set("Accept", "application/json")
	request.Header.Set("User-Agent", "vipgate-frontend")
	response, err := h.Do(request)
	if e := (*url.Error)(nil); errors.As(err, &e) {
		err = e.Err // without the long URL
	}
	if err != nil {
		return nil, fmt.Errorf("failed to reach the API server at %s: %w", net.JoinHostPort(c.host, c.port), err)
	}
	return response, nil
}

// credential reads a file of the service account.
func (c *client) credential(name string) ([]byte, error) {
	content, err := files.Read(filepath.Join(c.account, name), maxCredential)
	if err != nil {
		return nil, fmt.Errorf("failed to read the pod's service account; "+
			"it must not have automountServiceAccountToken: false: %w", err)
	}
	return content, nil
}

// transport returns an HTTP client that trusts the CA bundle of the service account. It reads the
// bundle for each request. Open streams of a client with an earlier bundle continue.
func (c *client) transport() (*http.Client, error) {
	ca, err := c.credential(caFile)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.http != nil && bytes.Equal(c.ca, ca) {
		return c.http, nil
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("%s contains no PEM certificate", filepath.Join(c.account, caFile))
	}
	if c.http != nil {
		c.http.CloseIdleConnections()
	}
	c.ca, c.http = ca, &http.Client{
		Transport: &http.Transport{
			// Do not use a proxy: only the API server may receive the token.
			DialContext:            (&net.Dialer{Timeout: dialTimeout}).DialContext,
			TLSClientConfig:        &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
			TLSHandshakeTimeout:    dialTimeout,
			ResponseHeaderTimeout:  c.headerTimeout,
			MaxResponseHeaderBytes: maxHeader,
			DisableCompression:     true, // size limits apply to the bytes on the wire
			ForceAttemptHTTP2:      true, // all watches share one connection, which is probed
			HTTP2:                  &http.HTTP2Config{SendPingTimeout: c.pingAfter, PingTimeout: c.pingTimeout},
		},
		// Do not follow redirects, which would send the token to another server.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return c.http, nil
}

// close closes the connections; no stream may be open.
func (c *client) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.http != nil {
		c.http.CloseIdleConnections()
	}
}
