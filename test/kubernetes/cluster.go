package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	// Variable controls whether tests that need an API server run: 0 skips them, and the skip list
	// of `make test` counts them. With any other value, or unset, they run or fail.
	Variable = "VIPGATE_TEST_KUBE"
	// Lacks is their reason in the skip list of `make test`.
	Lacks = "an API server, which make test-kube provides"
	// Prefix is the prefix of the names of tests that call Start, outside of the folder test: `make
	// test-kube` runs these tests of a package, and `make test` the others.
	Prefix = "TestAPIServer"

	// binaryVariable overrides the pinned kube-apiserver.
	binaryVariable = "VIPGATE_KUBE_APISERVER"
	pinned         = "bin/tools"

	// startTimeout bounds the start of a process; on an idle machine it takes seconds.
	startTimeout = 2 * time.Minute
	pollInterval = 20 * time.Millisecond
)

// Cluster is an API server with its etcd. It is safe for concurrent use, except for StopServer,
// StartServer and Compact.
type Cluster struct {
	t        testing.TB
	dir      string // short: paths of unix sockets are limited to 108 bytes
	binary   string
	extra    []string   // arguments of kube-apiserver
	node     netip.Addr // address of the API server for nodes and pods; zero without nodes
	port     int
	bound    int // socket that reserves the port
	ca       *authority
	admin    *rest.Config
	etcd     *process
	server   *process // nil while it is stopped
	services int      // APIServices without custom resources
	resets   int
}

// Option changes how a cluster is started.
type Option func(*Cluster)

// WithArgs adds arguments of kube-apiserver, such as --watch-cache=false.
func WithArgs(args ...string) Option {
	return func(c *Cluster) { c.extra = append(c.extra, args...) }
}

// ForNode lets kubelets and pods use the cluster: the API server listens on every address, its
// certificate contains address and the address of the Service kubernetes, and pods have service
// accounts. The cluster's folder is dir, which must exist and is removed with the test. The caller
// starts the controllers and the kubelets.
func ForNode(dir string, address netip.Addr) Option {
	return func(c *Cluster) { c.dir, c.node = dir, address }
}

// Missing returns an error, with the remedy, for each missing program of a cluster.
func Missing() []error {
	var errs []error
	for _, find := range []func() (string, error){findEtcd, findServer} {
		if _, err := find(); err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// findEtcd returns the path of etcd.
func findEtcd() (string, error) { return find("", "etcd") }

// findServer returns the path of kube-apiserver.
func findServer() (string, error) { return find(os.Getenv(binaryVariable), "kube-apiserver") }

// find returns path, or the path of a pinned program if path is empty.
func find(path, program string) (string, error) {
	if path == "" {
		root, err := repository()
		if err != nil {
			return "", err
		}
		path = filepath.Join(root, pinned, program)
	}
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("missing: %s (make test-kube builds it): %w", program, err)
	}
	return path, nil
}

// repository returns the folder of the module: the test's folder or one of its parents.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("failed to find the repository: %w", err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("failed to find the repository: no go.mod above the test's folder")
		}
		dir = filepath.Dir(dir)
	}
}

// Start starts etcd and kube-apiserver on free ports, with RBAC, and waits until the API server is
// ready and has the namespace default. Both end with the test, unless they are kept for the next
// test of the package: see [Main].
func Start(t testing.TB, options ...Option) *Cluster {
	t.Helper()
	if os.Getenv(Variable) == "0" {
		harness.Must(t, checkName(t.Name()))
		lab.Skip(t, Lacks)
	}
	harness.Must(t, errors.Join(Missing()...))
	if len(options) == 0 {
		return shared.start(t)
	}
	c := &Cluster{t: t, bound: -1}
	t.Cleanup(func() { harness.Check(t, c.end()) })
	for _, o := range options {
		o(c)
	}
	if err := c.create(); err != nil {
		t.Fatalf("failed to start a cluster: %v", err)
	}
	return c
}

// checkName returns an error if `make test-kube` would not run a test that starts a cluster. In
// the folder test it runs all tests of a package.
func checkName(test string) error {
	info, ok := debug.ReadBuildInfo()
	if !ok || strings.Contains(info.Path, "/test/") || strings.HasPrefix(test, Prefix) {
		return nil
	}
	return fmt.Errorf("%s starts an API server: name it %s..., so that make test-kube runs it", test, Prefix)
}

// create starts the cluster. The caller ends it, also after an error.
func (c *Cluster) create() (err error) {
	if c.binary, err = findServer(); err != nil {
		return err
	}
	if err := c.createFolder(); err != nil {
		return err
	}
	if err := c.reservePort(); err != nil {
		return err
	}
	if c.ca, err = newAuthority(c.dir, c.node); err != nil {
		return err
	}
	if c.admin, err = c.user("admin", []string{"system:masters"}); err != nil {
		return err
	}
	if err := c.startEtcd(); err != nil {
		return err
	}
	if err := c.startServer(); err != nil {
		return err
	}
	client := c.etcdClient()
	defer client.CloseIdleConnections()
	services, err := keys(client, apiServices)
	c.services = len(services)
	return err
}

// createFolder creates the cluster's folder.
func (c *Cluster) createFolder() (err error) {
	if c.dir != "" {
		return nil
	}
	if err := removeLeftovers(); err != nil {
		return fmt.Errorf("leftovers of an earlier run: %w", err)
	}
	c.dir, err = os.MkdirTemp(tempDir, fmt.Sprintf("vk-%d-", os.Getpid()))
	return err
}

// end ends the processes and removes the folder.
func (c *Cluster) end() error {
	errs := []error{c.server.kill(), c.etcd.kill()}
	if c.bound >= 0 {
		errs = append(errs, unix.Close(c.bound))
	}
	if c.dir != "" {
		errs = append(errs, os.RemoveAll(c.dir))
	}
	return errors.Join(errs...)
}

// reservePort binds a free port, without listening, until the end of the cluster. kube-apiserver
// shares it (SO_REUSEPORT), so that no other process gets it while the server is stopped.
func (c *Cluster) reservePort() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("failed to reserve a port: %w", err)
	}
	c.bound = fd
	err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1),
		unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	if err != nil {
		return fmt.Errorf("failed to reserve a port: %w", err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		return fmt.Errorf("failed to reserve a port: %w", err)
	}
	c.port = at.(*unix.SockaddrInet4).Port
	return nil
}

// Address returns the host and port of the API server.
func (c *Cluster) Address() string { return "127.0.0.1:" + strconv.Itoa(c.port) }

// serverArgs returns the arguments of kube-apiserver.
func (c *Cluster) serverArgs() []string {
	// The admission plugin ServiceAccount would make Pods wait for a service account, whose
	// controller does not run.
	clients := []string{
		"--bind-address=127.0.0.1", "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
		"--kubelet-certificate-authority=" + c.ca.path("ca.crt"), "--kubelet-client-certificate=" +
			c.ca.path("kubelet-client.crt"), "--kubelet-client-key=" + c.ca.path("kubelet-client.key"),
	}
	if c.node.IsValid() {
		clients = []string{
			"--bind-address=0.0.0.0", "--authorization-mode=Node,RBAC",
			"--kubelet-preferred-address-types=InternalIP",
		}
	}
	return slices.Concat([]string{
		c.binary,
		"--etcd-servers=" + c.etcdURL(),
		"--secure-port=" + strconv.Itoa(c.port), "--permit-port-sharing",
		"--cert-dir=" + c.dir, "--tls-cert-file=" + c.ca.path("server.crt"),
		"--tls-private-key-file=" + c.ca.path("server.key"), "--client-ca-file=" + c.ca.path("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file=" + c.ca.path("sa.key"),
		"--service-account-key-file=" + c.ca.path("sa.key"),
		"--service-cluster-ip-range=10.96.0.0/16,fd00:96::/112",
		// Disables the lookup of the host's address and name.
		"--endpoint-reconciler-type=none", "--advertise-address=192.0.2.1", "--external-hostname=localhost",
		"--allow-privileged", "--enable-priority-and-fairness=false", "--profiling=false", "--v=0",
	}, clients, c.extra)
}

// startServer starts kube-apiserver and waits until it is ready.
func (c *Cluster) startServer() (err error) {
	if c.server, err = startProcess(c.dir, "kube-apiserver", c.serverArgs()...); err != nil {
		return err
	}
	client, err := rest.HTTPClientFor(c.admin)
	if err != nil {
		return fmt.Errorf("client of the API server: %w", err)
	}
	defer client.CloseIdleConnections()
	err = c.server.ready(func(ctx context.Context) error {
		return get(ctx, client, c.admin.Host+"/readyz")
	})
	if err != nil {
		return err
	}
	objects, err := dynamic.NewForConfigAndClient(c.admin, client)
	if err != nil {
		return fmt.Errorf("client of the API server: %w", err)
	}
	namespaces := objects.Resource(schema.GroupVersionResource{Version: "v1", Resource: "namespaces"})
	return c.server.ready(func(ctx context.Context) error {
		_, err := namespaces.Get(ctx, "default", metav1.GetOptions{})
		return err
	})
}

// get requests a URL and returns an error unless the status is 200.
func get(ctx context.Context, client *http.Client, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", url, response.Status)
	}
	return nil
}

// StopServer kills the API server: its connections end, and new connections are refused. etcd
// keeps running.
func (c *Cluster) StopServer(t testing.TB) {
	t.Helper()
	harness.Must(t, c.server.kill())
	c.server = nil
}

// StartServer starts the API server on the same port again and waits until it is ready.
func (c *Cluster) StartServer(t testing.TB) {
	t.Helper()
	if c.server != nil {
		t.Fatal("the API server runs")
	}
	harness.Must(t, c.startServer())
}
