package kubernetes

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"sync"
	"testing"
	"time"

	utilexec "k8s.io/client-go/util/exec"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"github.com/vipgate/vipgate/test/harness"
)

// Container is a container of a [Kubelet].
type Container interface {
	// Exec runs a command until it or ctx ends.
	Exec(ctx context.Context, command []string, stdin io.Reader, stdout, stderr io.Writer) error
	// Logs returns the log of the present or the previous run.
	Logs(previous bool) (string, error)
}

// Kubelet serves exec and logs of the pods of a node to the API server, with the protocol code of
// CRI runtimes. It requires the API server's client certificate.
type Kubelet struct {
	find   func(pod, container string) Container
	server *http.Server
	end    context.CancelFunc
	execs  sync.WaitGroup
}

// StartKubelet creates a Node whose kubelet has containers. find returns nil for a container that
// does not exist. The kubelet ends with the test, and its commands with it.
func (c *Cluster) StartKubelet(t testing.TB, node string, find func(pod, container string) Container) {
	t.Helper()
	certificate := template(pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}})
	certificate.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	certificate.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	cert, key, err := c.ca.issue(certificate)
	harness.Must(t, err)
	pair, err := tls.X509KeyPair(cert, key)
	harness.Must(t, err)
	clients := x509.NewCertPool()
	clients.AddCert(c.ca.cert)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)

	ctx, cancel := context.WithCancel(context.Background())
	k := &Kubelet{find: find, end: cancel}
	routes := http.NewServeMux()
	routes.HandleFunc("/exec/{namespace}/{pod}/{container}", k.exec)
	routes.HandleFunc("GET /containerLogs/{namespace}/{pod}/{container}", k.logs)
	k.server = &http.Server{
		Handler: routes, ReadHeaderTimeout: time.Minute, BaseContext: func(net.Listener) context.Context { return ctx },
		// An upgrade needs HTTP/1.1.
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
		TLSConfig: &tls.Config{
			Certificates: []tls.Certificate{pair}, ClientCAs: clients, ClientAuth: tls.RequireAndVerifyClientCert,
			MinVersion: tls.VersionTLS12,
		},
	}
	var serve sync.WaitGroup
	serve.Go(func() {
		if err := k.server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("kubelet %s: %v", node, err)
		}
	})
	t.Cleanup(func() {
		cancel()
		k.execs.Wait()
		harness.Check(t, k.server.Close())
		serve.Wait()
	})
	c.Apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Node
metadata: {name: %s}
status:
  addresses: [{type: InternalIP, address: 127.0.0.1}]
  daemonEndpoints: {kubeletEndpoint: {Port: %d}}
`, node, listener.Addr().(*net.TCPAddr).Port))
}

// exec serves an exec, as the kubelet and a CRI runtime do.
func (k *Kubelet) exec(w http.ResponseWriter, r *http.Request) {
	container := k.find(r.PathValue("pod"), r.PathValue("container"))
	if container == nil {
		http.Error(w, fmt.Sprintf("unable to upgrade connection: container not found (%q)", r.PathValue("container")),
			http.StatusInternalServerError)
		return
	}
	options, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	k.execs.Add(1)
	defer k.execs.Done()
	remotecommand.ServeExec(w, r, executor{container}, "", "", "", r.URL.Query()["command"], options,
		time.Hour, time.Minute, remotecommand.SupportedStreamingProtocols)
}

// logs serves the log of a container.
func (k *Kubelet) logs(w http.ResponseWriter, r *http.Request) {
	container := k.find(r.PathValue("pod"), r.PathValue("container"))
	if container == nil {
		http.Error(w, fmt.Sprintf("container %q is not available", r.PathValue("container")), http.StatusBadRequest)
		return
	}
	text, err := container.Logs(r.FormValue("previous") == "true")
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	_, _ = io.WriteString(w, text) // the client may have gone away
}

// executor runs the commands of an exec in a container.
type executor struct{ container Container }

func (e executor) ExecInContainer(ctx context.Context, _, _, _ string, command []string, in io.Reader,
	out, stderr io.WriteCloser, _ bool, _ <-chan remotecommand.TerminalSize, _ time.Duration,
) error {
	err := e.container.Exec(ctx, command, in, out, stderr)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return utilexec.CodeExitError{Err: exit, Code: exit.ExitCode()}
	}
	return err
}
