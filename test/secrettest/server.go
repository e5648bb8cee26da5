package secrettest

import (
	"encoding/json"
	"encoding/pem"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// Namespace is the namespace of the Secrets.
const Namespace = "red"

// The types of events, and the annotation of the bookmark at the end of the current state.
const (
	Added            = "ADDED"
	Modified         = "MODIFIED"
	Deleted          = "DELETED"
	Bookmark         = "BOOKMARK"
	initialEventsEnd = "k8s.io/initial-events-end"
)

// Server is an API server. It is safe for concurrent use, except for Stop and Restart.
type Server struct {
	t      testing.TB
	listen func(network, address string) (net.Listener, error)
	srv    *httptest.Server

	mu      sync.Mutex
	token   string                       // the only one that is accepted
	legacy  bool                         // refuse sendInitialEvents, as before Kubernetes 1.27
	secrets map[string]map[string][]byte // by name
	streams map[chan string]string       // events of open watches, with the name of their Secret
	watches int                          // requests that were accepted
	faulty  http.HandlerFunc             // if set, it answers instead
}

// Start starts a server that ends with the test and accepts the token. A nil listen is [lab.Listen]
// in the network namespace of the test.
func Start(t testing.TB, address, token string, listen func(network, address string) (net.Listener, error)) *Server {
	t.Helper()
	if listen == nil {
		listen = lab.Listen
	}
	s := &Server{
		t: t, listen: listen, token: token,
		secrets: map[string]map[string][]byte{}, streams: map[chan string]string{},
	}
	s.start(address)
	t.Cleanup(s.Stop)
	return s
}

func (s *Server) start(address string) {
	s.t.Helper()
	l, err := s.listen("tcp", address)
	harness.Must(s.t, err)
	s.srv = httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
	s.srv.Listener.Close()
	s.srv.Listener = l
	s.srv.EnableHTTP2 = true
	// Tests include clients that reject the certificate; their handshake errors are not logged.
	s.srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.srv.StartTLS()
}

// Stop ends every connection, and refuses new ones.
func (s *Server) Stop() {
	s.Cut()
	s.srv.CloseClientConnections()
	s.srv.Close()
}

// Restart serves again at the same address after Stop.
func (s *Server) Restart() {
	s.t.Helper()
	s.start(s.Address())
}

// Address returns the host and port of the server.
func (s *Server) Address() string { return s.srv.Listener.Addr().String() }

// SetToken changes the token that is accepted. Open watches continue, as at the API server.
func (s *Server) SetToken(token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.token = token
}

// SetLegacy refuses watches that ask for the end of the current state.
func (s *Server) SetLegacy() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.legacy = true
}

// SetFaulty lets a handler answer all requests, unless it is nil.
func (s *Server) SetFaulty(h http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faulty = h
}

// Put creates or replaces a Secret.
func (s *Server) Put(name string, data map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	kind := Modified
	if s.secrets[name] == nil {
		kind = Added
	}
	s.secrets[name] = map[string][]byte{}
	for k, v := range data {
		s.secrets[name][k] = []byte(v)
	}
	s.send(kind, name)
}

// Remove removes a Secret.
func (s *Server) Remove(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.send(Deleted, name)
	delete(s.secrets, name)
}

// send sends an event to the watches of a Secret; s.mu is held.
func (s *Server) send(kind, name string) {
	for c, watched := range s.streams {
		if watched == name {
			c <- s.event(kind, name)
		}
	}
}

// Cut ends the watches.
func (s *Server) Cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.streams {
		close(c)
		delete(s.streams, c)
	}
}

// Watches returns how many watches were accepted.
func (s *Server) Watches() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.watches
}

// event returns an event about a Secret as the server writes it.
func (s *Server) event(kind, name string) string {
	return line(s.t, kind, map[string]any{
		"kind": "Secret", "apiVersion": "v1", "type": "Opaque",
		"metadata": map[string]any{
			"name": name, "namespace": Namespace, "resourceVersion": "42",
			"managedFields": []any{map[string]any{"manager": "kubectl", "operation": "Update"}},
		},
		"data": s.secrets[name],
	})
}

func line(t testing.TB, kind string, object any) string {
	b, err := json.Marshal(map[string]any{"type": kind, "object": object})
	harness.Check(t, err)
	return string(b) + "\n"
}

// Answer writes a Status.
func Answer(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{
		"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code,
	})
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
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
		Answer(w, http.StatusUnauthorized, "Unauthorized")
		return
	case r.Method != http.MethodGet || r.URL.Path != "/api/v1/namespaces/"+Namespace+"/secrets" ||
		q.Get("watch") != "true" || !byName:
		Answer(w, http.StatusForbidden, "secrets is forbidden: only watch is granted")
		return
	case initial && (legacy || q.Get("resourceVersionMatch") != "NotOlderThan" || q.Get("allowWatchBookmarks") != "true"):
		Answer(w, http.StatusUnprocessableEntity, "sendInitialEvents: Forbidden")
		return
	}
	events := make(chan string, 1000)
	s.mu.Lock()
	s.watches++
	if s.secrets[name] != nil {
		events <- s.event(Added, name)
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
	Flush(w)
	for {
		select {
		case e, open := <-events:
			if !open {
				return
			}
			if _, err := w.Write([]byte(e)); err != nil {
				return
			}
			Flush(w)
		case <-r.Context().Done():
			return
		}
	}
}

func endOfState(t testing.TB) string {
	return line(t, Bookmark, map[string]any{
		"kind": "Secret", "apiVersion": "v1", "data": nil,
		"metadata": map[string]any{"resourceVersion": "42", "annotations": map[string]string{initialEventsEnd: "true"}},
	})
}

// Flush sends the buffered data.
func Flush(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() }

// Mount writes the files that the kubelet mounts into a pod, ca.crt and token, to a directory.
func (s *Server) Mount(dir, token string) {
	s.t.Helper()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.srv.Certificate().Raw})
	for name, content := range map[string][]byte{"token": []byte(token + "\n"), "ca.crt": ca} {
		path := filepath.Join(dir, name)
		err := os.WriteFile(path+".new", content, 0o600)
		if err == nil {
			err = os.Rename(path+".new", path)
		}
		harness.Must(s.t, err)
	}
}
