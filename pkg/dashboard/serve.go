package dashboard

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/pods"
)

const (
	// minInterval is the time between two snapshots to a page, and maxInterval without a change: a page
	// without a snapshot for some seconds shows that it is old.
	minInterval, maxInterval = 300 * time.Millisecond, time.Second
	// requestTimeout bounds reading a request, writing a snapshot, and the end of the server.
	requestTimeout = 5 * time.Second
	maxPages       = 32
	maxQuery       = 100
)

//go:embed page
var page embed.FS

// policy permits the files of the page only, and no text as HTML.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; " +
	"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// New returns a dashboard of the pods of a source.
func New(source pods.Source) *Dashboard {
	return &Dashboard{source: source, path: "/" + rand.Text() + "/", wake: make(chan struct{}, 1)}
}

// URL returns the address of the page behind a listener.
func (d *Dashboard) URL(listener net.Listener) string {
	return "http://" + listener.Addr().String() + d.path
}

// Serve serves the page to loopback until ctx ends. It closes the listener.
func (d *Dashboard) Serve(ctx context.Context, listener net.Listener) error {
	if address, ok := listener.Addr().(*net.TCPAddr); !ok || !address.IP.IsLoopback() {
		return errors.Join(fmt.Errorf("%s is not a loopback address", listener.Addr()), listener.Close())
	}
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	group.Go(func() { d.collect(ctx) })
	server := &http.Server{
		Handler: d.guard(listener.Addr().String()), ReadHeaderTimeout: requestTimeout, IdleTimeout: time.Minute,
		MaxHeaderBytes: 16 << 10, BaseContext: func(net.Listener) context.Context { return ctx },
	}
	group.Go(func() {
		<-ctx.Done()
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
		defer cancel()
		_ = server.Shutdown(late) // the process ends anyway
	})
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("failed to serve the dashboard on %s: %w", listener.Addr(), err)
	}
	return nil
}

// guard refuses requests without the path, and those that a browser sends for another site whose
// name resolves to the loopback address.
func (d *Dashboard) guard(host string) http.Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err) // the folder is embedded
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /stream", d.stream)
	mux.Handle("GET /", http.FileServerFS(files))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for name, value := range map[string]string{
			"Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
			"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin",
		} {
			w.Header().Set(name, value)
		}
		prefix := r.URL.Path[:min(len(r.URL.Path), len(d.path))]
		if r.Host != host || subtle.ConstantTimeCompare([]byte(prefix), []byte(d.path)) != 1 {
			http.NotFound(w, r)
			return
		}
		http.StripPrefix(strings.TrimSuffix(d.path, "/"), mux).ServeHTTP(w, r)
	})
}

// stream sends snapshots as server-sent events. A slow page misses older ones.
func (d *Dashboard) stream(w http.ResponseWriter, r *http.Request) {
	defer d.readers.Add(-1)
	query := r.URL.Query().Get("q")
	if d.readers.Add(1) > maxPages || len(query) > maxQuery {
		http.Error(w, "too many pages, or too long a filter", http.StatusTooManyRequests)
		return
	}
	latest.Wake(d.wake)
	w.Header().Set("Content-Type", "text/event-stream")
	control := http.NewResponseController(w)
	for prefix := "retry: 1000\n"; ; prefix = "" {
		current, changed := d.state.Get()
		text, err := json.Marshal(current.snapshot(time.Now(), query))
		if err == nil {
			err = control.SetWriteDeadline(time.Now().Add(requestTimeout))
		}
		if err == nil {
			_, err = fmt.Fprintf(w, "%sdata: %s\n\n", prefix, text)
		}
		if err != nil || control.Flush() != nil {
			return // the page is closed
		}
		select {
		case <-r.Context().Done():
			return
		case <-time.After(minInterval):
		}
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		case <-time.After(maxInterval - minInterval):
		}
	}
}
