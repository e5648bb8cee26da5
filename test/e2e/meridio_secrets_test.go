package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/secrettest"
)

const (
	secretName, secretKey, secretToken = "bgp-auth", "gateway-a-key", "token-of-the-pod"
	firstPassword, secondPassword      = "first-of-the-gateway", "second-of-the-gateway"
)

// secretPod is a pod of Meridio with a service account and an API server. Gateway A has a password
// from a Secret; gateway B has none.
type secretPod struct {
	*meridio
	api     *secrettest.Server
	b       *lab.Gateway
	account string // directory of the service account
}

func newSecretPod(t *testing.T) *secretPod {
	t.Helper()
	s := &secretPod{meridio: newMeridio(t), account: t.TempDir()}
	s.api = secrettest.Start(t, "127.0.0.1:0", secretToken, s.Pod.Listen)
	s.api.Mount(s.account, secretToken)
	s.b = s.second()
	s.restartGateway(firstPassword)
	s.setAttractor(s.attractor)
	return s
}

// attractor adds the Secret of gateway A, and gateway B, to the usual attractor.
func (s *secretPod) attractor(a *nspv1.Attractor) {
	for _, g := range a.GetGateways() {
		g.BgpAuth = &nspv1.Gateway_BgpAuth{KeyName: secretKey, KeySource: secretName}
	}
	addGateway(a, "gateway-b4", lab.GatewayB4.String()).RemoteAsn = lab.GatewayBAS
	addGateway(a, "gateway-b6", lab.GatewayB6.String()).RemoteAsn = lab.GatewayBAS
}

// restartGateway starts gateway A with another password.
func (s *secretPod) restartGateway(password string) {
	s.t.Helper()
	s.must(s.gateway.Process.Kill())
	s.gateway.Password = password
	s.must(s.gateway.Start())
}

// start starts the frontend in a separate mount namespace, with its service account at the
// kubelet's mount path.
func (s *secretPod) start() {
	s.t.Helper()
	host, port, err := net.SplitHostPort(s.api.Address())
	s.must(err)
	s.wrapper = []string{"unshare", "--mount", "sh", "-ec", `
mount -t tmpfs tmpfs /run
mkdir -p /run/secrets/kubernetes.io
ln -s "$0" /run/secrets/kubernetes.io/serviceaccount
exec "$@"`, s.account}
	s.startFrontend("NFE_NAMESPACE="+secrettest.Namespace,
		"KUBERNETES_SERVICE_HOST="+host, "KUBERNETES_SERVICE_PORT="+port)
}

func (s *secretPod) put(password string) {
	s.api.Put(secretName, map[string]string{secretKey: password, "other": "unused"})
}

// TestGatewayPasswordFromSecret follows the password of a gateway: missing, new, changed, refused,
// without an API server, removed. The second gateway never loses its session.
func TestGatewayPasswordFromSecret(t *testing.T) {
	t.Parallel()
	s := newSecretPod(t)
	s.startOldLB()
	s.start()
	s.wantRoutesAt(s.b, every()...)
	s.waitCommand("status", "gateway-a4", "Secret red/bgp-auth does not exist")
	untouched := s.watchB()

	s.put(firstPassword)
	s.wantRoutes(every()...)
	file := filepath.Join(s.pod.BirdDir(), "keys", secretName, secretKey+".key")
	if mode := modeOf(t, file); mode != 0o600 {
		t.Errorf("%s has mode %#o, want 0600", file, mode)
	}

	s.restartGateway(secondPassword)
	s.wantRoutes()
	s.put(secondPassword)
	changed := time.Now()
	s.wantRoutes(every()...)
	t.Logf("routes at the gateway %v after its new password", time.Since(changed))

	s.put(`with a "quote`)
	s.waitCommand("status", "gateway-a4", "contains a quote")
	s.wantRoutes()
	s.put(secondPassword)
	s.wantRoutes(every()...)

	// A restart needs no API server.
	s.api.Stop()
	s.waitMetric("vipgate_frontend_secrets_unknown 1")
	s.wantRoutes(every()...)
	untouched()
	s.stopFrontend()
	s.start()
	s.wantRoutes(every()...)
	s.wantRoutesAt(s.b, every()...)
	untouched = s.watchB()
	s.api.Restart()
	s.waitMetric("vipgate_frontend_secrets_unknown 0")
	s.wantRoutes(every()...)

	s.api.Remove(secretName)
	s.wantRoutes()
	s.waitCommand("status", "gateway-a4", "Secret red/bgp-auth does not exist")
	s.put(secondPassword)
	s.wantRoutes(every()...)
	untouched()

	s.setAttractor(func(a *nspv1.Attractor) {
		s.attractor(a)
		a.Gateways = a.Gateways[2:]
	})
	s.waitFor(func() error {
		if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
			return errors.New("the key of a gateway that is gone is left")
		}
		return nil
	})
	s.wantNoPassword()
}

// watchB returns a function that fails if gateway B has lost a session or received an update since
// the call.
func (s *secretPod) watchB() (untouched func()) {
	s.t.Helper()
	b := s.fixture.in(s.t)
	b.gateway, b.sessionTimes = s.b, nil
	mark, sessions := b.mark(), fmt.Sprint(b.sessions())
	return func() {
		s.t.Helper()
		b.wantNoUpdates(mark, every()...)
		if now := fmt.Sprint(b.sessions()); now != sessions {
			s.t.Errorf("sessions of gateway B were %s and are %s", sessions, now)
		}
	}
}

// waitMetric waits until the metrics of the frontend contain a line.
func (s *secretPod) waitMetric(line string) {
	s.t.Helper()
	s.waitFor(func() error {
		if !strings.Contains(s.get(lab.FrontendMetrics, "/metrics"), "\n"+line+"\n") {
			return errors.New("no metric " + line)
		}
		return nil
	})
}

// wantNoPassword fails if the token, or a password of a removed gateway, is in a file of the pod
// or in an output.
func (s *secretPod) wantNoPassword() {
	s.t.Helper()
	s.waitFor(func() error { // BIRD's configuration is rewritten later
		out, _ := s.run("meridio-frontend", "debug")
		shown := map[string]string{"debug": out, "metrics": s.get(lab.FrontendMetrics, "/metrics")}
		err := filepath.WalkDir(s.Dir, func(path string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err == nil && (path == filepath.Dir(s.gateway.Socket()) || path == filepath.Dir(s.b.Socket())) {
				return fs.SkipDir // the gateways are not checked
			}
			if err == nil && e.Type().IsRegular() {
				b, err := os.ReadFile(path)
				shown[path] = string(b)
				return err
			}
			return err
		})
		if err != nil {
			return err
		}
		if len(shown) < 6 {
			return fmt.Errorf("only %d outputs", len(shown))
		}
		for name, text := range shown {
			for _, secret := range []string{firstPassword, secondPassword, secretToken} {
				if strings.Contains(text, secret) {
					return fmt.Errorf("%s contains %s", name, secret)
				}
			}
		}
		return nil
	})
}
