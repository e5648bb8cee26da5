package cluster

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/test/harness"
)

// noted is an API server that answers all requests with one status, and records the last request.
type noted struct {
	status int
	path   string
	query  map[string]string
	token  string
}

func (n *noted) RoundTrip(r *http.Request) (*http.Response, error) {
	n.path, n.token, n.query = r.URL.Path, r.Header.Get("Authorization"), map[string]string{}
	for name, values := range r.URL.Query() {
		n.query[name] = strings.Join(values, ",")
	}
	return &http.Response{
		StatusCode: n.status, Body: io.NopCloser(strings.NewReader("")), Request: r, Header: http.Header{},
	}, nil
}

// Lists and watches select only the objects of a trench.
func TestSelectedObjects(t *testing.T) {
	server := &noted{status: http.StatusForbidden}
	clients, err := newClients(&rest.Config{Host: "http://api", Transport: server})
	harness.Must(t, err)
	const core, labels, fields = "/api/v1/namespaces/ns/", "labelSelector", "fieldSelector"
	for _, x := range []struct {
		key           key
		path          string
		labels, field string
	}{
		{key{trenches, "ns", "a"}, "/apis/vipgate.io/v1alpha1/namespaces/ns/trenches", "", "metadata.name=a"},
		{key{kind: siblings, namespace: "ns"}, core + "pods", "vipgate.io/trench-pod=a", ""},
		{key{kind: services, namespace: "ns"}, core + "services", "", ""},
		{
			key{kind: endpointSlices, namespace: "ns"},
			"/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices",
			"endpointslice.kubernetes.io/managed-by!=endpointslice-controller.k8s.io", "",
		},
		{key{kind: pods, namespace: "ns"}, core + "pods", "vipgate.io/trench=a", ""},
		{key{secrets, "ns", "gw"}, core + "secrets", "", "metadata.name=gw"},
		{
			key{gateways, "ns", "g"}, "/apis/gateway.networking.k8s.io/v1/namespaces/ns/gateways", "", "metadata.name=g",
		},
		{
			key{kind: gatewayRouters, namespace: "ns"},
			"/apis/meridio-2.nordix.org/v1alpha1/namespaces/ns/gatewayrouters", "", "",
		},
		{key{ownPod, "ns", "p"}, core + "pods", "", "metadata.name=p"},
	} {
		s := clients.source(x.key, "a")
		_, listErr := s.list(t.Context(), metav1.ListOptions{})
		list := *server
		_, watchErr := s.watch(t.Context(), metav1.ListOptions{})
		if listErr == nil || watchErr == nil {
			t.Fatalf("%s: no error of an API server that refuses", x.key)
		}
		for what, n := range map[string]noted{"list": list, "watch": *server} {
			if n.path != x.path || n.query[labels] != x.labels || n.query[fields] != x.field ||
				(n.query["watch"] == "true") != (what == "watch") {
				t.Errorf("%s of %s: %s %v", what, x.key, n.path, n.query)
			}
		}
	}
}

// A token that the API server refuses is read again for the next request.
func TestReplacedToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	write := func(token string) {
		harness.Must(t, os.WriteFile(file, []byte(token), 0o600))
	}
	server := &noted{status: http.StatusUnauthorized}
	write("a")
	clients, err := newClients(&rest.Config{
		Host: "http://api", Transport: server, BearerToken: "a", BearerTokenFile: file,
	})
	harness.Must(t, err)
	for _, token := range []string{"a", "b", "c"} {
		write(token)
		for range 2 { // the first request may detect that the token was replaced
			_ = clients.get(clients.core, "ns", "pods").Do(t.Context()).Error()
		}
		if server.token != "Bearer "+token {
			t.Errorf("token %q, want %s", server.token, token)
		}
	}
}
