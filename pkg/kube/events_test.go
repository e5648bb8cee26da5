package kube

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"testing"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/test/harness"
)

// repeating is a proxy of the API server that sends all earlier events again after each event of
// a watch. Each event arrives at least twice, also after newer events and the deletion of its
// object.
func (f *fixture) repeating(config *rest.Config) *rest.Config {
	f.t.Helper()
	address, err := url.Parse(config.Host)
	harness.Must(f.t, err)
	transport, err := rest.TransportFor(&rest.Config{TLSClientConfig: config.TLSClientConfig})
	harness.Must(f.t, err)
	proxy := httptest.NewServer(&httputil.ReverseProxy{
		FlushInterval: -1, Transport: transport,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(address)
			r.Out.Header.Set("Accept", "application/json") // one line per event
			r.Out.Header.Set("Accept-Encoding", "identity")
		},
		ModifyResponse: func(r *http.Response) error {
			if r.Request.URL.Query().Get("watch") != "" && r.StatusCode == http.StatusOK {
				r.Body = repeat(r.Body)
			}
			return nil
		},
	})
	f.t.Cleanup(func() {
		proxy.CloseClientConnections()
		proxy.Close()
		utilnet.CloseIdleConnectionsFor(transport)
	})
	config = rest.CopyConfig(config)
	config.Host, config.TLSClientConfig = proxy.URL, rest.TLSClientConfig{}
	return config
}

// repeat returns the events of a watch, each followed by all earlier events.
func repeat(events io.ReadCloser) io.ReadCloser {
	r, w := io.Pipe()
	go func() {
		defer events.Close()
		lines := bufio.NewReader(events)
		var before []byte
		for {
			line, err := lines.ReadBytes('\n')
			if err == nil {
				_, err = w.Write(append(bytes.Clone(line), before...))
			}
			if err != nil {
				w.CloseWithError(err)
				return
			}
			if !bytes.Contains(line, []byte(`"type":"BOOKMARK"`)) {
				before = append(before, line...)
			}
		}
	}()
	return struct {
		io.Reader
		io.Closer
	}{r, closers{r, events}}
}

type closers []io.Closer

func (all closers) Close() error {
	for _, c := range all {
		c.Close()
	}
	return nil
}

func TestAPIServerEventsTwice(t *testing.T) {
	f := newFixture(t)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	f.run(f.repeating(f.ServiceAccount(t, "trench-a", "kube")))
	f.awaitContent(onePod)
	f.addPod("trench-a", "web-2", "10.0.0.2")
	f.awaitContent(twoPods)
	f.patch(podResource, "web-2", `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`, "status")
	f.awaitContent(onePod)
	f.remove(podResource, "web-1", 0)
	f.awaitContent("trench-a.web:")
	// When kube has handled the second change, it has handled the events repeated before the first
	// one.
	f.addPod("trench-a", "web-3", "10.0.0.3")
	f.awaitContent("trench-a.web: web-3=[10.0.0.3]")
	f.addPod("trench-a", "web-4", "10.0.0.4")
	f.awaitContent("trench-a.web: web-3=[10.0.0.3] web-4=[10.0.0.4]")
}
