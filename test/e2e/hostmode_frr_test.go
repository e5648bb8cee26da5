package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// Users and groups of the processes of a host, those of the images.
const (
	lbUser       = 10001
	frontendUser = 10002
)

const hostFRRTrench = `trench: kubernetes
attractor:
  name: api
  vips: [%[1]s]
  gateways: [{name: gateway-a4, address: %[2]s}]
streams:
  - name: kube-apiserver
    vips: [%[1]s]
    check:
      http: {port: 6443, path: /readyz, status: 200, tls: {serverName: kubernetes, caFile: %[3]s/cert.pem%[4]s}}
      interval: 500ms
      timeout: 500ms
      fall: 2
    targets: [{name: self, ips: [127.0.0.1]}]
`

// hostFRR is a control-plane node that has the VIP of its own HTTPS server, and whose FRR another
// program runs. Its gateway is BIRD.
type hostFRR struct {
	*foreign
	gateway *lab.Gateway
	server  *lab.Process
	lb      *lab.Process
}

func newHostFRR(t *testing.T) *hostFRR {
	t.Helper()
	need(t, lab.KindFRR)
	lab.Need(t, "openssl")
	l, err := lab.New()
	harness.Must(t, err)
	h := &hostFRR{foreign: foreignOf(t, l, frontendUser,
		"--lb-socket=unix://"+filepath.Join(l.Dir, "lb/readiness.sock"), "--identity=peer-credentials",
		"--lb-uid="+strconv.Itoa(lbUser),
	)}
	t.Cleanup(func() { harness.Check(t, l.Close()) })
	harness.Must(t, l.Pod.Addr("lo", "10.77.0.1/29", "fd00:77::1/126"))
	harness.Must(t, os.Chmod(l.Dir, 0o755))
	for dir, user := range map[string]int{"pki": lbUser, "lb": lbUser, "state": frontendUser} {
		harness.Must(t, os.Mkdir(h.path(dir), 0o750))
		harness.Must(t, os.Chown(h.path(dir), user, frontendUser))
	}
	h.gateway, err = l.StartGateway(lab.GatewayA())
	harness.Must(t, err)
	// One certificate is the authority's, the server's and the client's.
	h.host("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
		"-subj", "/CN=kubernetes", "-addext", "subjectAltName=DNS:kubernetes", "-keyout", h.path("pki/key.pem"),
		"-out", h.path("pki/cert.pem"))
	harness.Must(t, os.Chown(h.path("pki/key.pem"), lbUser, lbUser))
	return h
}

// host runs a command on the host, and returns its output.
func (h *hostFRR) host(command string, args ...string) string {
	h.t.Helper()
	out, err := h.Pod.Run(h.t.Context(), command, args...)
	if err != nil {
		h.t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return out
}

// writeTrench writes the trench file, whose check has further fields of TLS.
func (h *hostFRR) writeTrench(tls string) {
	h.t.Helper()
	text := fmt.Sprintf(hostFRRTrench, vipA4, lab.GatewayA4, h.path("pki"), tls)
	harness.Must(h.t, os.WriteFile(h.path("trench.new"), []byte(text), 0o644))
	harness.Must(h.t, os.Rename(h.path("trench.new"), h.path("trench.yaml")))
}

func (h *hostFRR) start(name, command string, args ...string) *lab.Process {
	h.t.Helper()
	p, err := h.Start(h.Pod, name, append([]string{command}, args...)...)
	harness.Must(h.t, err)
	h.t.Cleanup(func() {
		if h.t.Failed() {
			h.t.Logf("== %s\n%s", name, p.Tail(30))
		}
	})
	return p
}

// startServer starts an HTTPS server that requires a client certificate and answers all requests.
func (h *hostFRR) startServer() {
	h.t.Helper()
	h.server = h.start("server", "openssl", "s_server", "-accept", "127.0.0.1:6443", "-www", "-quiet",
		"-cert", h.path("pki/cert.pem"), "-key", h.path("pki/key.pem"),
		"-CAfile", h.path("pki/cert.pem"), "-Verify", "1", "-verify_return_error")
}

// startLB starts lb as a user with NET_ADMIN alone, for the address.
func (h *hostFRR) startLB() {
	h.t.Helper()
	user := strconv.Itoa(lbUser)
	h.lb = h.start("lb", "setpriv", "--reuid="+user, "--regid="+strconv.Itoa(frontendUser), "--clear-groups",
		"--bounding-set=-all,+net_admin", "--inh-caps=-all,+net_admin", "--ambient-caps=-all,+net_admin",
		"--no-new-privs", filepath.Join(binaries, "lb"), "run", "--trench-file="+h.path("trench.yaml"),
		"--socket=unix://"+h.path("lb/readiness.sock"), "--socket-mode=0660",
		"--admin-socket=unix://"+h.path("lb/admin.sock"), "--state-dir="+h.path("lb"), "--dataplane=none",
		"--vip-interface=lo", "--identity=peer-credentials",
		"--frontend-uid="+strconv.Itoa(frontendUser), "--log-format=text")
}

func (h *hostFRR) addresses() string { return h.host("ip", "-o", "address", "show", "dev", "lo") }

// want waits until the gateway has the VIP, or not, and logs the time since the cause.
func (h *hostFRR) want(cause string, is bool) {
	h.t.Helper()
	start, routes := time.Now(), []string(nil)
	if is {
		routes = []string{vipA4}
	}
	if err := h.gateway.WantRoutes(harness.Context(h.t, waitTimeout), routes...); err != nil {
		h.t.Fatalf("%v\n%s", err, h.status(announcerFirst))
	}
	h.t.Logf("%s: VIP at the gateway %t after %v", cause, is, time.Since(start))
	if has := strings.Contains(h.addresses(), " "+vipA4+" "); is && !has {
		h.t.Errorf("the VIP is at the gateway without an address: %s", h.addresses())
	}
}

// A frontend without capabilities announces the VIP of a server on this host to the host's FRR.
func TestHostModeFRR(t *testing.T) {
	t.Parallel()
	h := newHostFRR(t)
	h.writeTrench("")
	h.startSpeaker(h.speakerConfig("frr"))
	h.startServer()
	h.startLB()
	h.frontend(announcerFirst)
	// The session with the gateway is up, and the server refuses checks without a client certificate.
	h.waitStatus("FRR 8", "Established", "0 of 1 VIP advertised", "not ready")
	h.waitCheck("certificate required")
	h.want("repaired", false)
	h.writeTrench(fmt.Sprintf(", certFile: %[1]s/cert.pem, keyFile: %[1]s/key.pem", h.path("pki")))
	h.want("repaired", true)
	h.waitStatus("1 of 1 VIP advertised")

	// Two checks of 500 ms fail.
	harness.Must(t, h.server.Kill())
	h.want("killed server", false)
	h.waitAddress(false)
	h.startServer()
	h.want("repaired", true)
	harness.Must(t, h.server.Signal(unix.SIGSTOP))
	h.want("hung server", false)
	h.waitAddress(false)
	harness.Must(t, h.server.Signal(unix.SIGCONT))
	h.want("repaired", true)

	// A killed lb ends its connection, a hung one its lease. The next lb adopts the address.
	harness.Must(t, h.lb.Signal(unix.SIGSTOP))
	h.want("hung lb", false)
	harness.Must(t, h.lb.Signal(unix.SIGCONT))
	h.want("repaired", true)
	harness.Must(t, h.lb.Kill())
	h.want("killed lb", false)
	if !strings.Contains(h.addresses(), " "+vipA4+" ") {
		t.Error("no address is left of the killed lb")
	}
	h.startLB()
	h.want("repaired", true)
	h.waitStatus("1 of 1 VIP advertised")
	harness.Must(t, lab.Stop(harness.Context(t, waitTimeout), h.lb))
	h.want("repaired", false)
	h.waitAddress(false)
}

// waitCheck waits until the status of lb has a text.
func (h *hostFRR) waitCheck(text string) {
	h.t.Helper()
	harness.Must(h.t, lab.Eventually(harness.Context(h.t, waitTimeout), 50*time.Millisecond, func() error {
		out, _ := h.Pod.Run(h.t.Context(), filepath.Join(binaries, "lb"), "status",
			"--admin-socket=unix://"+h.path("lb/admin.sock"))
		if !strings.Contains(out, text) {
			return fmt.Errorf("status of lb lacks %q:\n%s", text, out)
		}
		return nil
	}))
}

// waitAddress waits until the host has the VIP's address, or not.
func (h *hostFRR) waitAddress(is bool) {
	h.t.Helper()
	harness.Must(h.t, lab.Eventually(harness.Context(h.t, waitTimeout), 50*time.Millisecond, func() error {
		if out := h.addresses(); strings.Contains(out, " "+vipA4+" ") != is {
			return fmt.Errorf("the VIP has an address: %t, want %t: %s", !is, is, out)
		}
		return nil
	}))
}
