package kubernetes_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/vipgate/vipgate/pkg/meridio/secret"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
)

// watchOnly is the role of Meridio's frontend: its only verb is watch. The role named is the
// narrowest alternative that an operator can grant.
const watchOnly = `
apiVersion: v1
kind: Namespace
metadata: {name: red}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: fes-role, namespace: red}
rules: [{apiGroups: [""], resources: [secrets], verbs: [watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: named, namespace: red}
rules: [{apiGroups: [""], resources: [secrets], resourceNames: [bgp-auth], verbs: [watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: fes-rolebinding, namespace: red}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: fes-role}
subjects: [{kind: ServiceAccount, name: meridio-fes, namespace: red}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: named, namespace: red}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: named}
subjects: [{kind: ServiceAccount, name: named, namespace: red}]
`

// passwords returns the Secret with a value of a key, and another key. It uses data: server-side
// apply keeps omitted keys of stringData.
func passwords(key, value string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {name: bgp-auth, namespace: red}
data: {%s: %s, other: dW51c2Vk}
`, key, base64.StdEncoding.EncodeToString([]byte(value)))
}

// secretFixture is a cluster and a watcher of its Secret bgp-auth.
type secretFixture struct {
	*kubernetes.Cluster
	t            *testing.T
	dir, account string
	watcher      *secret.Watcher
}

func newSecretFixture(t *testing.T, options ...kubernetes.Option) *secretFixture {
	t.Helper()
	f := &secretFixture{Cluster: kubernetes.Start(t, options...), t: t, dir: t.TempDir(), account: t.TempDir()}
	f.Apply(t, watchOnly)
	return f
}

// start starts a watcher with the rights of a service account, through address. end stops it.
func (f *secretFixture) start(account, address string) (end func()) {
	f.t.Helper()
	f.Mount(f.t, f.account, "red", account)
	host, port, err := net.SplitHostPort(address)
	harness.Must(f.t, err)
	f.watcher = secret.New(secret.Options{
		Dir: f.dir, Namespace: "red", Host: host, Port: port, Account: f.account,
		Log: slog.New(slog.NewTextHandler(f.t.Output(), nil)),
	})
	f.watcher.Want(map[string][]string{"bgp-auth": {"gw-a"}})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f.watcher.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
			f.t.Error(err)
		}
	})
	end = sync.OnceFunc(func() { cancel(); wg.Wait() })
	f.t.Cleanup(end)
	return end
}

func (f *secretFixture) content() string {
	b, err := os.ReadFile(f.watcher.File("bgp-auth", "gw-a"))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func (f *secretFixture) key(want string) {
	f.t.Helper()
	await.True(f.t, "the key is "+want, func() bool { return strings.Contains(f.content(), want) })
}

func (f *secretFixture) problem(want string) {
	f.t.Helper()
	await.True(f.t, "the problem is "+want, func() bool { return strings.Contains(f.watcher.Problem("bgp-auth"), want) })
}

func (f *secretFixture) delete() {
	f.t.Helper()
	err := client(f.t, f.Admin()).Secrets("red").Delete(f.t.Context(), "bgp-auth", metav1.DeleteOptions{})
	harness.Must(f.t, err)
}

const none = "no such file"

// TestAPIServerSecretByWatch follows a Secret with only the verb watch, on API servers with and
// without streamed lists and a watch cache, and with a role for one name.
func TestAPIServerSecretByWatch(t *testing.T) {
	for name, c := range map[string]struct {
		account string
		options []kubernetes.Option
	}{
		"role of Meridio":  {"meridio-fes", nil},
		"role for a name":  {"named", nil},
		"no streamed list": {"meridio-fes", []kubernetes.Option{kubernetes.WithArgs("--feature-gates=WatchList=false")}},
		"no watch cache":   {"meridio-fes", []kubernetes.Option{kubernetes.WithArgs("--watch-cache=false")}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newSecretFixture(t, c.options...)
			end := f.start(c.account, f.Address())
			f.problem("Secret red/bgp-auth does not exist")
			f.Apply(t, passwords("gw-a", "FIRST"))
			f.key("FIRST")
			begin := time.Now()
			f.Apply(t, passwords("gw-a", "SECOND"))
			f.key("SECOND")
			t.Logf("%s from the request that changes a key to its file", time.Since(begin))
			f.Apply(t, passwords("gw-b", "FIRST"))
			f.problem("Secret red/bgp-auth has no key gw-a")
			f.key(none)
			f.Apply(t, passwords("gw-a", "FIRST"))
			f.key("FIRST")
			f.delete()
			f.key(none)
			f.Apply(t, passwords("gw-a", "FIRST"))
			f.key("FIRST")
			if n, _ := f.watcher.Stats(); n != 0 {
				t.Errorf("%d failures: %s", n, f.watcher.Problem("bgp-auth"))
			}

			// The Secret is deleted while no watcher runs: the file remains until the next watcher
			// has the state.
			end()
			f.delete()
			f.key("FIRST")
			f.start(c.account, f.Address())
			f.key(none)
		})
	}
}

// TestAPIServerSecretWithoutRole uses a service account without the verb, which it is granted
// later.
func TestAPIServerSecretWithoutRole(t *testing.T) {
	f := newSecretFixture(t)
	f.Apply(t, passwords("gw-a", "FIRST"))
	f.start("stranger", f.Address())
	f.problem(`User \"system:serviceaccount:red:stranger\" cannot watch`)
	f.key(none)
	f.Apply(t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: late, namespace: red}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: fes-role}
subjects: [{kind: ServiceAccount, name: stranger, namespace: red}]
`)
	f.key("FIRST")
}

// TestAPIServerSecretDuringOutage restarts the API server, compacts its history, and cuts the
// network.
func TestAPIServerSecretDuringOutage(t *testing.T) {
	f := newSecretFixture(t)
	f.Apply(t, passwords("gw-a", "FIRST"))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	proxy := f.ProxyOn(t, l)
	f.start("meridio-fes", l.Addr().String())
	f.key("FIRST")
	f.StopServer(t)
	f.problem("failed to watch Secret red/bgp-auth")
	f.key("FIRST")
	f.StartServer(t)
	await.True(t, "the watch is back", func() bool { return f.watcher.Problem("bgp-auth") == "" })
	f.Apply(t, passwords("gw-a", "SECOND"))
	f.key("SECOND")

	proxy.Cut()
	f.problem("failed to watch Secret red/bgp-auth")
	f.Apply(t, passwords("gw-a", "THIRD"))
	f.Compact(t) // a watch that continued from a resource version would get 410 Gone
	f.key("SECOND")
	proxy.Restore()
	f.key("THIRD")

	proxy.Cut()
	f.problem("failed to watch Secret red/bgp-auth")
	f.delete()
	f.key("THIRD")
	proxy.Restore()
	f.key(none)
}

// TestAPIServerSecretTokenRotation uses a token that the API server rejects until the kubelet
// replaces it.
func TestAPIServerSecretTokenRotation(t *testing.T) {
	f := newSecretFixture(t)
	f.Apply(t, passwords("gw-a", "FIRST"))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	proxy := f.ProxyOn(t, l)
	f.start("meridio-fes", l.Addr().String())
	f.key("FIRST")
	harness.Must(t, os.WriteFile(f.account+"/token", []byte("expired"), 0o600))
	proxy.Cut()
	proxy.Restore()
	f.problem("401 Unauthorized")
	f.Apply(t, passwords("gw-a", "SECOND"))
	f.key("FIRST")
	f.Mount(t, f.account, "red", "meridio-fes")
	f.key("SECOND")
}
