package secret

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/vipgate/vipgate/test/harness"
)

// FuzzEvents reads a watch from a hostile API server. The resulting file does not depend on the
// split of the bytes, and errors are short.
func FuzzEvents(f *testing.F) {
	const secret = `{"type":"ADDED","object":{"kind":"Secret","metadata":{"name":"bgp-auth"},"data":{"gw-a":"bmV3"}}}`
	for _, seed := range []string{
		secret, secret + "\n" + strings.Replace(secret, "ADDED", "DELETED", 1), strings.Replace(secret, "bmV3", "?", 1),
		`{"type":"BOOKMARK","object":{"kind":"Secret","metadata":{"annotations":{"k8s.io/initial-events-end":"true"}}}}`,
		`{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old"}}`, `{"type":"MODIFIED"}`,
		`[`, `{"type":7}`, secret[:60], "",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, sent []byte) {
		whole, text := applyAll(t, bytes.NewReader(sent))
		cut, _ := applyAll(t, iotest.OneByteReader(bytes.NewReader(sent)))
		if whole != cut {
			t.Errorf("the key is %q, and %q when the bytes come one by one", whole, cut)
		}
		if bound := 2 * len(`\x00`) * maxQuoted; len(text) > bound+200 {
			t.Errorf("the error has %d bytes", len(text))
		}
	})
}

// applyAll applies a stream to a Secret whose key exists. It returns the resulting key, and the
// error at the end of the stream.
func applyAll(t *testing.T, body io.Reader) (key, text string) {
	w := New(Options{Dir: t.TempDir(), Namespace: "red"})
	s := &source{Watcher: w, name: "bgp-auth", keys: []string{"gw-a"}}
	path := w.File("bgp-auth", "gw-a")
	err := os.MkdirAll(filepath.Dir(path), 0o700)
	if err == nil {
		err = os.WriteFile(path, []byte(password), 0o600)
	}
	harness.Must(t, err)
	stream, known := newStream(body), false
	for {
		e, err := stream.next()
		if err == nil {
			var decided bool
			decided, err = s.apply(e, known)
			known = known || decided
		}
		if err != nil {
			b, _ := os.ReadFile(path)
			return string(b), err.Error()
		}
	}
}
