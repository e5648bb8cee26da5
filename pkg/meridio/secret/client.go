package secret

import (
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
}

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
	response, err := c.get(ctx, "/api/v1/namespaces/"+url.PathEscape(namespace)+"/secrets?"+query.Encode())
	if err != nil {
		return nil, err
	}
	if response.StatusCode == http.StatusOK {
		return response.Body, nil
	}
	defer response.Body.Close()
	rejected := &rejection{code: response.StatusCode}
	var answer status
	// A proxy does not answer with a Status. The code is sufficient then.
	if json.NewDecoder(io.LimitReader(response.Body, maxAnswer)).Decode(&answer) == nil {
		rejected.message = answer.Message
	}
	return nil, rejected
}

func (c *client) get(ctx context.Context, path string) (*http.Response, error) {
	if c.host == "" || c.port == "" {
		return nil, errors.New("the address of the API server is unknown: " +
			"KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are set only in a pod")
	}
	// Read CA bundle and token for each request: the kubelet replaces the token before it expires.
	bundle, err := c.credential(caFile)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(bundle) {
		return nil, fmt.Errorf("%s contains no PEM certificate", filepath.Join(c.account, caFile))
	}
	token, err := c.credential(tokenFile)
	if err != nil {
		return nil, err
	}
	address := net.JoinHostPort(c.host, c.port)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+path, nil)
	if err != nil {
		return nil, fmt.Errorf("failed to address the API server: %w", err)
	}
	request.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	request.Header.Set("Accept", "application/json")
	request.Header.Set("User-Agent", "vipgate-frontend")
	response, err := c.httpClient(roots).Do(request)
	if e := (*url.Error)(nil); errors.As(err, &e) {
		err = e.Err // without the long URL
	}
	if err != nil {
		return nil, fmt.Errorf("failed to reach the API server at %s: %w", address, err)
	}
	return response, nil
}

func (c *client) credential(name string) ([]byte, error) {
	content, err := files.Read(filepath.Join(c.account, name), maxCredential)
	if err != nil {
		return nil, fmt.Errorf("failed to read the pod's service account; "+
			"it must not have automountServiceAccountToken: false: %w", err)
	}
	return content, nil
}

// httpClient returns a client for one request, whose connection ends with the response.
func (c *client) httpClient(roots *x509.CertPool) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			// Do not use a proxy: only the API server may receive the token.
			DialContext:            (&net.Dialer{Timeout: dialTimeout}).DialContext,
			TLSClientConfig:        &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
			TLSHandshakeTimeout:    dialTimeout,
			ResponseHeaderTimeout:  c.headerTimeout,
			MaxResponseHeaderBytes: maxHeader,
			DisableCompression:     true, // size limits apply to the bytes on the wire
			DisableKeepAlives:      true, // a later watch may need another CA bundle
			ForceAttemptHTTP2:      true, // HTTP/2 can probe the connection
			HTTP2:                  &http.HTTP2Config{SendPingTimeout: c.pingAfter, PingTimeout: c.pingTimeout},
		},
		// Do not follow redirects, which would send the token to another server.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
