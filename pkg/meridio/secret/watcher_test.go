package secret

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/secrettest"
)

const (
	waitTimeout  = time.Minute
	pollInterval = 5 * time.Millisecond

	password = "correct-horse"
	changed  = "battery-staple"
)

// fixture is a watcher and its API server.
type fixture struct {
	t *testing.T
	*secrettest.Server
	dir, account string
	log          *harness.Log
	watcher      *Watcher
	end          func() // stops the watcher
}

func newFixture(t *testing.T) *fixture { return newFixtureAt(t, "127.0.0.1:0") }

func newFixtureAt(t *testing.T, address string) *fixture {
	t.Helper()
	f := &fixture{
		t: t, Server: secrettest.Start(t, address, "token-1", nil),
		dir: t.TempDir(), account: t.TempDir(), log: &harness.Log{},
	}
	f.Mount(f.account, "token-1")
	t.Cleanup(func() {
		for _, value := range []string{password, changed} {
			if text := f.log.String(); strings.Contains(text, value) {
				t.Errorf("a value is in the log:\n%s", text)
			}
		}
		if t.Failed() {
			t.Logf("log:\n%s", f.log)
		}
	})
	return f
}

// start starts a watcher; adapt changes it before.
func (f *fixture) start(want map[string][]string, adapt ...func(*Watcher)) {
	f.t.Helper()
	host, port, err := net.SplitHostPort(f.Address())
	harness.Must(f.t, err)
	f.watcher = New(Options{
		Dir: f.dir, Namespace: "red", Host: host, Port: port, Account: f.account,
		Log: f.log.Logger(),
	})
	f.watcher.minBackoff, f.watcher.maxBackoff = time.Millisecond, 20*time.Millisecond
	for _, a := range adapt {
		a(f.watcher)
	}
	if want != nil {
		f.watcher.Want(want)
	}
	f.end = harness.Run(f.t, f.watcher.Run)
}

// eventually waits until condition returns "", or fails with its text.
func (f *fixture) eventually(condition func() string) {
	f.t.Helper()
	problem := ""
	for end := time.Now().Add(waitTimeout); time.Now().Before(end); time.Sleep(pollInterval) {
		if problem = condition(); problem == "" {
			return
		}
	}
	f.t.Fatal(problem)
}

// content returns the content of a file, "(none)" if it does not exist.
func (f *fixture) content(path string) string {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "(none)"
	}
	harness.Check(f.t, err)
	return string(b)
}

// key waits until the file of a key has the content.
func (f *fixture) key(source, key, content string) {
	f.t.Helper()
	f.eventually(func() string {
		if got := f.content(f.watcher.File(source, key)); got != content {
			return "key " + key + " of " + source + " is " + got + ", want " + content
		}
		return ""
	})
}

// problem waits until the problem of a Secret contains text, or is "".
func (f *fixture) problem(source, text string) {
	f.t.Helper()
	f.eventually(func() string {
		got := f.watcher.Problem(source)
		none := text == "" && got == "" && strings.Contains(f.log.String(), "Secret watched")
		if none || text != "" && strings.Contains(got, text) {
			return ""
		}
		return "problem " + got + ", want " + text
	})
}

var oneKey = map[string][]string{"bgp-auth": {"gw-a"}}

func TestKeyFollowsSecret(t *testing.T) {
	f := newFixture(t)
	f.start(oneKey)
	f.problem("bgp-auth", "Secret red/bgp-auth does not exist")
	f.Put("bgp-auth", map[string]string{"gw-a": password, "other": "not wanted"})
	f.key("bgp-auth", "gw-a", password)
	f.problem("bgp-auth", "")
	path := f.watcher.File("bgp-auth", "gw-a")
	if got := f.watcher.Explain(path); got != "" {
		t.Errorf("explained: %s", got)
	}
	for p, mode := range map[string]fs.FileMode{
		path: 0o600, filepath.Dir(path): fs.ModeDir | 0o700, filepath.Dir(filepath.Dir(path)): fs.ModeDir | 0o700,
	} {
		if info, err := os.Stat(p); err != nil || info.Mode() != mode {
			t.Errorf("%s: %v, %v, want mode %s", p, info, err, mode)
		}
	}
	f.Put("bgp-auth", map[string]string{"gw-a": changed})
	f.key("bgp-auth", "gw-a", changed)
	f.Put("bgp-auth", map[string]string{"gw-b": changed})
	f.key("bgp-auth", "gw-a", "(none)")
	f.problem("bgp-auth", "Secret red/bgp-auth has no key gw-a")
	if got := f.watcher.Explain(path); got != "Secret red/bgp-auth has no key gw-a" {
		t.Errorf("explained: %s", got)
	}
	f.Put("bgp-auth", map[string]string{"gw-a": password})
	f.key("bgp-auth", "gw-a", password)
	f.Remove("bgp-auth")
	f.key("bgp-auth", "gw-a", "(none)")
	f.problem("bgp-auth", "Secret red/bgp-auth does not exist")
	if n, _ := f.watcher.Stats(); n != 0 {
		t.Errorf("%d failures", n)
	}
	if f.Watches() != 1 {
		t.Errorf("%d watches, want 1", f.Watches())
	}
	if names, err := os.ReadDir(filepath.Dir(path)); err != nil || len(names) != 0 {
		t.Errorf("left in the directory: %v, %v", names, err)
	}
}

// TestLegacyServer uses an API server that does not mark the end of the current state.
func TestLegacyServer(t *testing.T) {
	f := newFixture(t)
	f.SetLegacy()
	f.Put("bgp-auth", map[string]string{"gw-a": password})
	const quiet = 300 * time.Millisecond
	both := map[string][]string{"bgp-auth": {"gw-a"}, "gone": {"gw-b"}}
	short := func(w *Watcher) { w.quiet = quiet }
	f.start(nil, short)
	path := f.watcher.File("gone", "gw-b")
	if _, err := store(path, []byte(password)); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	f.watcher.Want(both)
	f.key("bgp-auth", "gw-a", password)
	f.key("gone", "gw-b", "(none)")
	if d := time.Since(begin); d < quiet {
		t.Errorf("the key of an absent Secret was removed after %s, want %s of silence", d, quiet)
	}
	f.problem("gone", "Secret red/gone does not exist")
	f.key("bgp-auth", "gw-a", password) // stays after quietTime
	f.Put("gone", map[string]string{"gw-b": changed})
	f.key("gone", "gw-b", changed)
	if n, _ := f.watcher.Stats(); n != 0 {
		t.Errorf("%d failures", n)
	}
}

// legacy serves watches of an API server that does not mark the end of the current state.
func (f *fixture) legacy(watch func(send func(event string))) {
	f.SetFaulty(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("sendInitialEvents") != "" {
			secrettest.Answer(w, http.StatusUnprocessableEntity, "sendInitialEvents is forbidden")
			return
		}
		secrettest.Flush(w)
		watch(func(event string) {
			_, _ = io.WriteString(w, event)
			secrettest.Flush(w)
		})
	})
}

// A Secret whose state was received does not become absent after quietTime.
func TestLegacyBookmark(t *testing.T) {
	f := newFixture(t)
	const quiet = 50 * time.Millisecond
	secret := func(kind, value string) string {
		return `{"type":"` + kind + `","object":{"kind":"Secret","metadata":{"name":"bgp-auth"},"data":{"gw-a":"` +
			base64.StdEncoding.EncodeToString([]byte(value)) + `"}}}`
	}
	f.legacy(func(send func(string)) {
		send(secret("ADDED", password))
		send(`{"type":"BOOKMARK","object":{"kind":"Secret","metadata":{"name":""}}}`)
		time.Sleep(4 * quiet)
		send(secret("MODIFIED", changed))
	})
	f.start(oneKey, func(w *Watcher) { w.quiet = quiet })
	f.key("bgp-auth", "gw-a", changed)
	if strings.Contains(f.log.String(), "key of Secret removed") {
		t.Error("the key was removed")
	}
}

// A watch that ends after quietTime without an event is not a failure: the Secret is absent.
func TestLegacyWatchOfAbsentSecret(t *testing.T) {
	f := newFixture(t)
	const quiet = 50 * time.Millisecond
	var watches atomic.Int32
	f.legacy(func(func(string)) {
		time.Sleep(10 * quiet)
		watches.Add(1)
	})
	f.start(oneKey, func(w *Watcher) { w.quiet = quiet })
	f.eventually(func() string {
		if n := watches.Load(); n < 2 {
			return fmt.Sprintf("%d watches have ended", n)
		}
		return ""
	})
	f.problem("bgp-auth", "Secret red/bgp-auth does not exist")
	if failures, unknown := f.watcher.Stats(); failures != 0 || unknown != 0 {
		t.Errorf("%d failures, %d unknown Secrets", failures, unknown)
	}
}

// The error for an invalid event does not quote the answer.
func TestMalformedEventIsNotQuoted(t *testing.T) {
	for _, answer := range []string{`{"type":"ADDED","object":8675309`, `{"type":8675309}`, `{"type":"ADDED",8675309}`} {
		_, err := newStream(strings.NewReader(answer)).next()
		if err == nil || strings.Contains(err.Error(), "8675309") || strings.Contains(err.Error(), "'8'") {
			t.Errorf("%s: %v", answer, err)
		}
	}
}

func TestOutageKeepsKeys(t *testing.T) {
	f := newFixture(t)
	f.Put("bgp-auth", map[string]string{"gw-a": password})
	f.Put("other", map[string]string{"gw-b": password})
	want := map[string][]string{"bgp-auth": {"gw-a"}, "other": {"gw-b"}}
	f.start(want)
	f.key("bgp-auth", "gw-a", password)
	f.key("other", "gw-b", password)
	f.Stop()
	f.problem("bgp-auth", "failed to reach the API server")
	f.end()
	f.start(want) // a restart during the outage
	f.problem("bgp-auth", "failed to reach the API server")
	f.problem("other", "failed to reach the API server")
	f.key("bgp-auth", "gw-a", password)
	f.key("other", "gw-b", password)
	f.Put("bgp-auth", map[string]string{"gw-a": changed})
	f.Remove("other")
	f.Restart()
	f.Mount(f.account, "token-1")
	f.key("bgp-auth", "gw-a", changed)
	f.key("other", "gw-b", "(none)")
	if n, _ := f.watcher.Stats(); n == 0 {
		t.Error("no failure counted")
	}
	if n := strings.Count(f.log.String(), "level=WARN msg=\"watch failed, retrying"); n > 4 {
		t.Errorf("%d warnings for an outage of two Secrets and two starts", n)
	}
}

// TestFaultyServer uses faulty API servers, none of which may change the key.
func TestFaultyServer(t *testing.T) {
	stream := func(lines ...string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			for _, l := range lines {
				_, _ = io.WriteString(w, l)
				secrettest.Flush(w)
			}
		}
	}
	reject := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { secrettest.Answer(w, code, "no") }
	}
	secret := `{"kind":"Secret","metadata":{"name":"bgp-auth"},"data":`
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		problem string
	}{
		"unauthorized":   {reject(401), "401 Unauthorized: \"no\"; check the token"},
		"forbidden":      {reject(403), "403 Forbidden: \"no\"; grant the pod's service account the verb watch"},
		"gone":           {reject(410), "410 Gone"},
		"invalid":        {reject(422), "422 Unprocessable Entity"},
		"too many":       {reject(429), "429 Too Many Requests"},
		"internal error": {reject(500), "500 Internal Server Error"},
		"not a Status":   {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(502) }, "502 Bad Gateway"},
		"redirect":       {http.RedirectHandler("/elsewhere", http.StatusFound).ServeHTTP, "302 Found"},
		"empty":          {stream(), "before the current state"},
		"silent":         {silent, "timeout"},
		"silent stream":  {silentStream, "did not end the watch in time"},
		"aborted":        {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "failed to reach"},
		"garbage":        {stream("<html>no</html>"), "what is not an event"},
		"wrong type":     {stream(`["` + password + `"]`), "what is not an event"},
		"cut event":      {stream(`{"type":"DELETED","object":` + secret), "interrupted"},
		"malformed value": {
			stream(`{"type":"ADDED","object":` + secret + `{"gw-a":"` + password + `"}}}`), "malformed object",
		},
		"number as value": {stream(`{"type":"ADDED","object":` + secret + `{"gw-a":17}}}`), "malformed object"},
		"no object":       {stream(`{"type":"DELETED"}`), "malformed object"},
		"unknown type":    {stream(`{"type":"REPLACED","object":{}}`), `unknown type "REPLACED"`},
		"other Secret":    {stream(`{"type":"DELETED","object":{"kind":"Secret","metadata":{"name":"x"}}}`), `"x" instead`},
		"other kind":      {stream(`{"type":"DELETED","object":{"kind":"Pod","metadata":{"name":"bgp-auth"}}}`), `"Pod"`},
		"error": {
			stream(`{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old resource version"}}`),
			`410 Gone: "too old resource version"`,
		},
		"error without reason": {stream(`{"type":"ERROR","object":7}`), "without a reason"},
		"huge event":           {endless(`{"type":"ADDED","object":{"metadata":{"x":"`, "x"), "an event has more than"},
		"huge whitespace":      {endless("", " \n"), "an event has more than"},
		"huge rejection":       {hugeRejection, "500 Internal Server Error"},
		"bookmark of another kind": {
			stream(`{"type":"BOOKMARK","object":{"kind":"Secret","metadata":{"resourceVersion":"7"}}}`),
			"before the current state",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.Put("bgp-auth", map[string]string{"gw-a": password})
			f.start(oneKey, func(w *Watcher) {
				if strings.HasPrefix(name, "silent") {
					w.client.headerTimeout, w.timeout, w.slack = time.Second, time.Second, time.Second
				}
			})
			f.key("bgp-auth", "gw-a", password)
			f.SetFaulty(c.handler)
			f.Cut()
			f.problem("bgp-auth", c.problem)
			f.key("bgp-auth", "gw-a", password)
			f.SetFaulty(nil)
			f.Put("bgp-auth", map[string]string{"gw-a": changed})
			f.key("bgp-auth", "gw-a", changed)
			f.problem("bgp-auth", "")
		})
	}
}

// silent accepts a request without an answer.
func silent(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

// silentStream does not end a watch.
func silentStream(w http.ResponseWriter, r *http.Request) {
	w.WriteHeader(http.StatusOK)
	secrettest.Flush(w)
	<-r.Context().Done()
}

// endless writes begin, and then repeats rest endlessly.
func endless(begin, rest string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, err := io.WriteString(w, begin)
		for chunk := strings.Repeat(rest, 32<<10); err == nil && r.Context().Err() == nil; {
			_, err = io.WriteString(w, chunk)
		}
	}
}

func hugeRejection(w http.ResponseWriter, r *http.Request) {
	w.WriteHeader(http.StatusInternalServerError)
	endless(`{"message":"`, "x")(w, r)
}

func TestTokenRotation(t *testing.T) {
	f := newFixture(t)
	f.Put("bgp-auth", map[string]string{"gw-a": password})
	f.start(oneKey)
	f.key("bgp-auth", "gw-a", password)
	f.SetToken("token-2") // the first one expired
	f.Cut()
	f.problem("bgp-auth", "401 Unauthorized")
	f.key("bgp-auth", "gw-a", password)
	f.Put("bgp-auth", map[string]string{"gw-a": changed})
	f.Mount(f.account, "token-2")
	f.key("bgp-auth", "gw-a", changed)
	for file, problem := range map[string]string{tokenFile: "automountServiceAccountToken", caFile: "no PEM certificate"} {
		before, err := os.ReadFile(filepath.Join(f.account, file))
		harness.Must(t, err)
		if file == tokenFile {
			err = os.Remove(filepath.Join(f.account, file))
		} else {
			err = os.WriteFile(filepath.Join(f.account, file), []byte("no certificate"), 0o600)
		}
		harness.Must(t, err)
		f.Cut()
		f.problem("bgp-auth", problem)
		f.key("bgp-auth", "gw-a", changed)
		harness.Must(t, os.WriteFile(filepath.Join(f.account, file), before, 0o600))
		f.problem("bgp-auth", "")
	}
}

// TestUntrustedServer uses an API server with a certificate of an untrusted CA.
func TestUntrustedServer(t *testing.T) {
	f := newFixture(t)
	f.Put("bgp-auth", map[string]string{"gw-a": password})
	ca, err := os.ReadFile(filepath.Join("testdata", "other-ca.pem"))
	if err == nil {
		err = os.WriteFile(filepath.Join(f.account, caFile), ca, 0o600)
	}
	harness.Must(t, err)
	f.start(oneKey)
	f.problem("bgp-auth", "unknown authority")
	f.key("bgp-auth", "gw-a", "(none)")
	if f.Watches() != 0 {
		t.Error("a token was sent to a server that is not trusted")
	}
	f.Mount(f.account, "token-1") // the kubelet replaces the bundle
	f.key("bgp-auth", "gw-a", password)
}

func TestNoAPIServer(t *testing.T) {
	f := newFixture(t)
	f.start(oneKey, func(w *Watcher) { w.client.host = "" })
	f.problem("bgp-auth", "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are set only in a pod")
}

func TestIPv6(t *testing.T) {
	f := newFixtureAt(t, "[::1]:0")
	f.Put("bgp-auth", map[string]string{"gw-a": password})
	f.start(oneKey)
	f.key("bgp-auth", "gw-a", password)
}

func TestWantChanges(t *testing.T) {
	f := newFixture(t)
	f.Put("a", map[string]string{"1": password, "2": changed, "1.key": "x"})
	f.Put("b", map[string]string{"1": password})
	f.Put("a.1", map[string]string{"key": "y"})
	// An earlier version may have left directories with a different mode, and unrelated files.
	keys := filepath.Join(f.dir, keysDir)
	harness.Must(t, errors.Join(os.MkdirAll(filepath.Join(keys, "a"), 0o755), os.Chmod(keys, 0o755),
		os.Chmod(filepath.Join(keys, "a"), 0o755), os.WriteFile(filepath.Join(keys, "a", "1"), nil, 0o644),
		os.WriteFile(filepath.Join(keys, "stray"), nil, 0o644)))
	f.start(map[string][]string{"a": {"1", "2"}, "b": {"1"}})
	f.key("a", "1", password)
	f.key("a", "2", changed)
	f.key("b", "1", password)
	for _, dir := range []string{keys, filepath.Join(keys, "a")} {
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("mode of %s: %v, %v", dir, info.Mode(), err)
		}
	}
	for _, stray := range []string{"stray", "a/1"} {
		if _, err := os.Stat(filepath.Join(keys, stray)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", stray, err)
		}
	}
	f.end()

	f.start(nil)
	f.end()
	if got := f.content(f.watcher.File("a", "1")); got != password {
		t.Errorf("the key is %s before the first Want", got)
	}
	f.start(nil)
	f.watcher.Want(map[string][]string{"a": {"2"}, "c": {"x"}, "../d": {"x"}, "a.1": {"key"}, "d": {"../x"}, "e": nil})
	valid := map[string][]string{"a": {"2"}, "c": {"x"}, "a.1": {"key"}}
	if got := f.watcher.want.Load(); !reflect.DeepEqual(got, valid) {
		t.Errorf("%v is watched, want %v", got, valid)
	}
	f.key("a", "1", "(none)")
	f.key("b", "1", "(none)")
	f.key("a", "2", changed)
	f.key("a.1", "key", "y")
	f.problem("c", "does not exist")
	f.watcher.Want(map[string][]string{"a": {"1", "1.key", "2"}})
	f.key("a", "1", password)
	f.key("a", "1.key", "x")
	f.key("a", "2", changed)
	f.key("a.1", "key", "(none)")
	if p := f.watcher.Problem("c"); p != "" {
		t.Errorf("problem of a Secret that is wanted no longer: %s", p)
	}
	f.watcher.Want(map[string][]string{})
	f.key("a", "2", "(none)")
	f.eventually(func() string {
		if names, err := os.ReadDir(f.watcher.dir); err != nil || len(names) != 0 {
			return fmt.Sprint(names, " is left")
		}
		return ""
	})
}

// TestEventStorm changes a Secret continuously. The newest key must be written without a pause of
// the events.
func TestEventStorm(t *testing.T) {
	f := newFixture(t)
	f.Put("bgp-auth", map[string]string{"gw-a": password})
	f.start(oneKey)
	f.key("bgp-auth", "gw-a", password)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for n := 0; ; n++ {
			f.Put("bgp-auth", map[string]string{"gw-a": changed, "counter": strings.Repeat("x", n%100)})
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	defer func() { close(stop); <-done }()
	f.key("bgp-auth", "gw-a", changed) // while events arrive
}

// TestDeadConnection uses a network that stops forwarding without an error.
func TestDeadConnection(t *testing.T) {
	f := newFixture(t)
	f.Put("bgp-auth", map[string]string{"gw-a": password})
	network := newNetwork(t, f.Address())
	f.start(oneKey, func(w *Watcher) {
		_, w.client.port, _ = net.SplitHostPort(network.Addr().String())
		w.client.pingAfter, w.client.pingTimeout = 100*time.Millisecond, 200*time.Millisecond
	})
	f.key("bgp-auth", "gw-a", password)
	network.freeze()
	f.Put("bgp-auth", map[string]string{"gw-a": changed})
	f.key("bgp-auth", "gw-a", changed) // over a new connection
	if n, _ := f.watcher.Stats(); n == 0 {
		t.Error("no failure counted")
	}
}

// network forwards connections until freeze; it still forwards new connections.
type network struct {
	net.Listener
	mu     sync.Mutex
	frozen chan struct{}
}

func newNetwork(t *testing.T, to string) *network {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	n := &network{Listener: l, frozen: make(chan struct{})}
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := new(net.Dialer).DialContext(ctx, "tcp", to)
			if err != nil {
				client.Close()
				continue
			}
			n.mu.Lock()
			frozen := n.frozen
			n.mu.Unlock()
			context.AfterFunc(ctx, func() { client.Close(); server.Close() })
			wg.Go(func() { forward(client, server, frozen) })
			wg.Go(func() { forward(server, client, frozen) })
		}
	})
	t.Cleanup(func() { l.Close(); cancel(); wg.Wait() })
	return n
}

// freeze stops forwarding on existing connections.
func (n *network) freeze() {
	n.mu.Lock()
	defer n.mu.Unlock()
	close(n.frozen)
	n.frozen = make(chan struct{})
}

// forward copies data until frozen is closed, and then discards it.
func forward(to io.Writer, from io.Reader, frozen chan struct{}) {
	buffer := make([]byte, 16<<10)
	for {
		n, err := from.Read(buffer)
		select {
		case <-frozen:
		default:
			if n > 0 {
				if _, err := to.Write(buffer[:n]); err != nil {
					return
				}
			}
		}
		if err != nil {
			return
		}
	}
}

// An API server, or its proxy, that ends each watch after the current state is not a failure.
// Watches are opened again with increasing delays.
func TestServerThatEndsEachWatch(t *testing.T) {
	f := newFixture(t)
	var mu sync.Mutex
	var asked []time.Time
	f.SetFaulty(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		asked = append(asked, time.Now())
		mu.Unlock()
		_, _ = io.WriteString(w, `{"type":"ADDED","object":{"kind":"Secret","metadata":{"name":"bgp-auth"},`+
			`"data":{"gw-a":"`+base64.StdEncoding.EncodeToString([]byte(password))+`"}}}`)
	})
	const least = 40 * time.Millisecond
	f.start(oneKey, func(w *Watcher) { w.minBackoff, w.maxBackoff = least, time.Minute })
	f.eventually(func() string {
		mu.Lock()
		defer mu.Unlock()
		if len(asked) < 5 {
			return fmt.Sprintf("%d watches, want 5", len(asked))
		}
		return ""
	})
	for i := range 4 {
		// Jitter reduces a delay by at most a fifth.
		if pause, want := asked[i+1].Sub(asked[i]), least<<i*8/10; pause < want {
			t.Errorf("watch %d began %v after the one before, want %v at least", i+2, pause, want)
		}
	}
	f.key("bgp-auth", "gw-a", password)
	f.problem("bgp-auth", "")
	if failures, unknown := f.watcher.Stats(); failures != 0 || unknown != 0 {
		t.Errorf("%d failures, %d unknown Secrets", failures, unknown)
	}
}

// A long watch resets the back-off of earlier failures.
func TestLongWatchResetsBackoff(t *testing.T) {
	f := newFixture(t)
	f.Put("bgp-auth", map[string]string{"gw-a": password})
	f.SetFaulty(func(w http.ResponseWriter, _ *http.Request) { secrettest.Answer(w, 500, "no") })
	const longest = 200 * time.Millisecond
	f.start(oneKey, func(w *Watcher) { w.minBackoff, w.maxBackoff = time.Microsecond, longest })
	f.eventually(func() string {
		if n, _ := f.watcher.Stats(); n < 20 { // the delay is the longest one
			return fmt.Sprintf("%d failures", n)
		}
		return ""
	})
	f.SetFaulty(nil)
	f.key("bgp-auth", "gw-a", password)
	f.problem("bgp-auth", "")
	time.Sleep(longest + 50*time.Millisecond) // the watch lasts longer than the longest delay
	for range 3 {                             // a loaded machine may miss one
		watches, begin := f.Watches(), time.Now()
		f.Cut()
		f.eventually(func() string {
			if f.Watches() == watches {
				return "no other watch"
			}
			return ""
		})
		if time.Since(begin) < longest*8/10 {
			return
		}
		time.Sleep(longest + 50*time.Millisecond)
	}
	t.Error("the delay after a long watch is that of failures")
}
