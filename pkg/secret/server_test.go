package secret

import (
	"encoding/json"
	"encoding/pem"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// apiServer speaks the watch protocol of kube-apiserver for Secrets of one namespace, over TLS.
type apiServer struct {
	t   *testing.T
	srv *httptest.Server

	mu      sync.Mutex
	token   string                       // the only one that is accepted
	legacy  bool                         // refuse sendInitialEvents, as before Kubernetes 1.27
	secrets map[string]map[string][]byte // by name
	streams map[chan string]string       // events of open watches, with the name of their Secret
	watches int                          // requests that were accepted
	// faulty, if set, answers instead.
	faulty http.HandlerFunc
}

func newAPIServer(t *testing.T, address string) *apiServer {
	t.Helper()
	s := &apiServer{t: t, token: "token-1", secrets: map[string]map[string][]byte{}, streams: map[chan string]string{}}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	s.start(l)
	t.Cleanup(func() { s.stop() })
	return s
}

// start serves on a listener with a new certificate.
func (s *apiServer) start(l net.Listener) {
	s.srv = httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
	s.srv.Listener.Close()
	s.srv.Listener = l
	s.srv.EnableHTTP2 = true
	s.srv.Config.ErrorLog = nil
	s.srv.StartTLS()
}

// stop ends every connection.
func (s *apiServer) stop() {
	s.cut()
	s.srv.CloseClientConnections()
	s.srv.Close()
}

// restart serves again at the same address.
func (s *apiServer) restart() {
	s.t.Helper()
	l, err := net.Listen("tcp", s.srv.Listener.Addr().String())
	if err != nil {
		s.t.Fatal(err)
	}
	s.start(l)
}

// change changes the server.
func (s *apiServer) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// put creates or replaces a Secret.
func (s *apiServer) put(name string, data map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	kind := typeModified
	if s.secrets[name] == nil {
		kind = typeAdded
	}
	s.secrets[name] = map[string][]byte{}
	for k, v := range data {
		s.secrets[name][k] = []byte(v)
	}
	s.send(kind, name)
}

// remove removes a Secret.
func (s *apiServer) remove(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.send(typeDeleted, name)
	delete(s.secrets, name)
}

// send sends an event to the watches of a Secret; s.mu is held.
func (s *apiServer) send(kind, name string) {
	for c, watched := range s.streams {
		if watched == name {
			c <- s.event(kind, name)
		}
	}
}

// cut ends the watches.
func (s *apiServer) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.streams {
		close(c)
		delete(s.streams, c)
	}
}

func (s *apiServer) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.watches
}

// event returns an event about a Secret as the server writes it.
func (s *apiServer) event(kind, name string) string {
	return line(s.t, kind, map[string]any{
		"kind": "Secret", "apiVersion": "v1", "type": "Opaque",
		"metadata": map[string]any{
			"name": name, "namespace": "red", "resourceVersion": "42",
			"managedFields": []any{map[string]any{"manager": "kubectl", "operation": "Update"}},
		},
		"data": s.secrets[name],
	})
}

func line(t *testing.T, kind string, object any) string {
	b, err := json.Marshal(map[string]any{"type": kind, "object": object})
	if err != nil {
		t.Error(err)
	}
	return string(b) + "\n"
}

// answer writes a Status.
func answer(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{
		"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code,
	})
}

func (s *apiServer) serve(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	faulty, token, legacy := s.faulty, s.token, s.legacy
	s.mu.Unlock()
	if faulty != nil {
		faulty(w, r)
		return
	}
	q := r.URL.Query()
	name, byName := strings.CutPrefix(q.Get("fieldSelector"), "metadata.name=")
	initial := q.Get("sendInitialEvents") == "true"
	switch {
	case r.Header.Get("Authorization") != "Bearer "+token:
		answer(w, http.StatusUnauthorized, "Unauthorized")
		return
	case r.Method != http.MethodGet || r.URL.Path != "/api/v1/namespaces/red/secrets" || q.Get("watch") != "true" || !byName:
		answer(w, http.StatusForbidden, "secrets is forbidden: only watch is granted")
		return
	case initial && (legacy || q.Get("resourceVersionMatch") != "NotOlderThan" || q.Get("allowWatchBookmarks") != "true"):
		answer(w, http.StatusUnprocessableEntity, "sendInitialEvents: Forbidden")
		return
	}
	events := make(chan string, 1000)
	s.mu.Lock()
	s.watches++
	if s.secrets[name] != nil {
		events <- s.event(typeAdded, name)
	}
	if initial {
		events <- endOfState(s.t)
	}
	s.streams[events] = name
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.streams, events)
	}()
	w.WriteHeader(http.StatusOK)
	flush(w)
	for {
		select {
		case e, open := <-events:
			if !open {
				return
			}
			if _, err := w.Write([]byte(e)); err != nil {
				return
			}
			flush(w)
		case <-r.Context().Done():
			return
		}
	}
}

func endOfState(t *testing.T) string {
	return line(t, typeBookmark, map[string]any{
		"kind": "Secret", "apiVersion": "v1", "data": nil,
		"metadata": map[string]any{"resourceVersion": "42", "annotations": map[string]string{initialEventsEnd: "true"}},
	})
}

func flush(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() }

// writeAccount writes the files of a service account for the server.
func (s *apiServer) writeAccount(dir, token string) {
	s.t.Helper()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.srv.Certificate().Raw})
	for name, content := range map[string][]byte{tokenFile: []byte(token + "\n"), caFile: ca} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			s.t.Fatal(err)
		}
	}
}
