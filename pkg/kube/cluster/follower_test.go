package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/test/harness"
)

func TestConditionKeepsItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		changes := 0
		c := condition{changed: func() { changes++ }}
		begin := time.Now()
		for i, step := range []struct {
			err     error
			want    Failure
			errors  uint64
			changes int
		}{
			{nil, Failure{}, 0, 0},
			{errors.New("a"), Failure{begin.Add(time.Second), "pods: a"}, 1, 1},
			{errors.New("a"), Failure{begin.Add(time.Second), "pods: a"}, 2, 1},
			{errors.New("b"), Failure{begin.Add(time.Second), "pods: b"}, 3, 2},
			{nil, Failure{}, 3, 3},
			{nil, Failure{}, 3, 3},
			{errors.New("a"), Failure{begin.Add(6 * time.Second), "pods: a"}, 4, 4},
		} {
			c.report("pods", step.err)
			if f, n := c.failure(); f != step.want || n != step.errors || changes != step.changes {
				t.Errorf("%d: got %v, %d errors, %d changes, want %+v", i, f, n, changes, step)
			}
			time.Sleep(time.Second)
		}
	})
}

// The state is stale since the oldest persistent failure.
func TestStaleSinceTheOldestFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := New(Options{
			Config: &rest.Config{Host: "http://api"}, Namespace: "ns", Trench: "a", Log: slog.New(slog.DiscardHandler),
		})
		harness.Must(t, err)
		follower := newFollower("pods", func() {}, c.updateState)
		c.followers[c.siblings()] = follower
		conditions := []*condition{&c.probe, &c.missing, &follower.condition}
		for i, first := range conditions {
			for j, second := range conditions {
				if i == j {
					continue
				}
				begin := time.Now()
				first.report("first", errors.New("x"))
				time.Sleep(time.Second)
				second.report("second", errors.New("x"))
				if got := c.State().Load().Stale; got != (Failure{begin, "first: x"}) {
					t.Errorf("%d before %d: %v", i, j, got)
				}
				first.report("first", nil)
				if got := c.State().Load().Stale; got != (Failure{begin.Add(time.Second), "second: x"}) {
					t.Errorf("%d after %d: %v", j, i, got)
				}
				second.report("second", nil)
				if got := c.State().Load().Stale; got != (Failure{}) {
					t.Errorf("without a failure: %v", got)
				}
			}
		}
	})
}

var podResource = schema.GroupResource{Resource: "pods"}

// fakeSource is a source of pods.
type fakeSource struct {
	mu       sync.Mutex
	lists    int
	watches  int
	listErr  error
	watchErr []error // errors of the next watches; the last one repeats
	lateList bool    // the API server does not answer lists
}

func (s *fakeSource) source() source {
	return source{
		example: &corev1.Pod{},
		list: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			if s.lateList {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			s.lists++
			return &corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: "1"}}, s.listErr
		},
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.watches++
			err := s.watchErr[0]
			if len(s.watchErr) > 1 {
				s.watchErr = s.watchErr[1:]
			}
			switch {
			case errors.Is(err, errClosed):
				return watch.NewEmptyWatch(), nil // as client-go does
			case err != nil:
				return nil, err
			}
			return watch.NewStreamWatcher(&idleDecoder{ctx, o.SendInitialEvents != nil},
				apierrors.NewClientErrorReporter(http.StatusInternalServerError, "GET", "")), nil
		},
	}
}

// idleDecoder is the stream of a watch that contains only the bookmark at the end of the initial
// list.
type idleDecoder struct {
	ctx  context.Context
	list bool
}

func (d *idleDecoder) Decode() (watch.EventType, runtime.Object, error) {
	if d.list {
		d.list = false
		end := pod("", "1")
		end.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
		return watch.Bookmark, end, nil
	}
	<-d.ctx.Done()
	return "", nil, d.ctx.Err()
}

func (*idleDecoder) Close() {}

func TestFollowerReportsWatches(t *testing.T) {
	forbidden := apierrors.NewForbidden(podResource, "", errors.New("no watch"))
	for name, c := range map[string]struct {
		watches []error
		failed  bool // the follower has failed at the end
		reports int  // minimum number of errors
		most    int  // maximum number of errors
	}{
		// A successful list does not clear the failure of the watch.
		"lists and no watches": {[]error{forbidden}, true, 5, 1000},
		"refused once":         {[]error{forbidden, nil}, false, 1, 1},
		"connections closed":   {[]error{errClosed}, true, 5, 1000},
		"closed once":          {[]error{errClosed, nil}, false, 1, 1},
		// The reflector lists again, and the cache is not stale.
		"forgotten revision": {[]error{apierrors.NewResourceExpired("too old"), nil}, false, 0, 0},
		"connection refused": {[]error{&net.OpError{Op: "dial", Err: errors.New("refused")}, nil}, false, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &fakeSource{watchErr: c.watches}
				var failures []Failure
				f := newFollower("Pods", func() {}, func() {})
				f.required = true
				f.condition.changed = func() {
					now, _ := f.failure()
					failures = append(failures, now)
				}
				ctx, cancel := context.WithCancel(t.Context())
				f.start(ctx, s.source())
				time.Sleep(time.Minute)
				now, n := f.failure()
				if (now != Failure{}) != c.failed || int(n) < c.reports || int(n) > c.most {
					t.Errorf("failure %v after %d errors, %d lists and %d watches", now, n, s.lists, s.watches)
				}
				if c.failed && len(failures) != 1 {
					t.Errorf("the failure changed: %v", failures)
				}
				if !f.store.isSynced() || s.watches < 1 {
					t.Errorf("synced %v with %d watches", f.store.isSynced(), s.watches)
				}
				cancel()
				f.stop()
			})
		})
	}
}

// A list without an answer times out, and the cache becomes stale.
func TestLateListIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		noStreamedLists := apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "", nil)
		s := &fakeSource{watchErr: []error{noStreamedLists}, lateList: true}
		f := newFollower("Pods", func() {}, func() {})
		f.start(t.Context(), s.source())
		time.Sleep(listTimeout - time.Millisecond)
		if _, n := f.failure(); n != 0 {
			t.Errorf("%d errors before the end of the list", n)
		}
		time.Sleep(time.Second)
		if now, n := f.failure(); n != 1 || !strings.Contains(now.Cause, context.DeadlineExceeded.Error()) {
			t.Errorf("failure %v after %d errors", now, n)
		}
		f.stop()
	})
}

// pipes simulates the network to an API server.
type pipes struct {
	mu    sync.Mutex
	conns chan net.Conn
	hangs bool // the server does not answer on new connections
}

func (p *pipes) dial(context.Context, string, string) (net.Conn, error) {
	client, server := net.Pipe()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hangs {
		go func() { // the kernel of a hanging server still accepts bytes
			buffer := make([]byte, 4096)
			for {
				if _, err := server.Read(buffer); err != nil {
					return
				}
			}
		}()
	} else {
		p.conns <- server
	}
	return client, nil
}

func (p *pipes) Accept() (net.Conn, error) {
	c, ok := <-p.conns
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}

func (p *pipes) Close() error   { close(p.conns); return nil }
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{} }

// One probe detects a server that hangs with open connections. All connections are closed, and new
// ones reach a server that answers.
func TestHungServerIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &pipes{conns: make(chan net.Conn, 10), hangs: true}
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"apiVersion":"vipgate.io/v1alpha1","kind":"Trench","metadata":{"name":"a","namespace":"ns"}}`)
		})}
		go func() { _ = server.Serve(p) }()
		c, err := New(Options{
			Config:    &rest.Config{Host: "http://api", Dial: p.dial},
			Namespace: "ns", Trench: "a", Log: slog.New(slog.DiscardHandler),
		})
		harness.Must(t, err)
		// The connection of a watch, which no request timeout closes.
		watched, err := c.clients.config.Dial(t.Context(), "tcp", "api")
		harness.Must(t, err)
		closed := make(chan time.Time, 1)
		go func() {
			_, _ = watched.Read(make([]byte, 1))
			closed <- time.Now()
		}()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			c.probeServer(ctx)
		}()
		begin := time.Now()
		time.Sleep(probeInterval + probeTimeout + time.Second)
		if f, _ := c.probe.failure(); f.Since.IsZero() {
			t.Error("a hung server is not reported")
		}
		select {
		case at := <-closed:
			if d := at.Sub(begin); d != probeInterval+probeTimeout {
				t.Errorf("closed after %v", d)
			}
		default:
			t.Error("the connections to the hung server stay open")
		}
		p.mu.Lock()
		p.hangs = false
		p.mu.Unlock()
		next, err := c.clients.config.Dial(t.Context(), "tcp", "api")
		harness.Must(t, err)
		go func() {
			_, _ = next.Read(make([]byte, 1))
			closed <- time.Now()
		}()
		time.Sleep(3 * probeInterval)
		if f, n := c.probe.failure(); !f.Since.IsZero() || n != 1 {
			t.Errorf("in sync again: %v after %d errors", f, n)
		}
		if len(closed) > 0 {
			t.Error("a probe that is answered closes connections")
		}
		cancel()
		<-ended
		c.clients.connections.CloseAll()
		harness.Check(t, server.Close())
		synctest.Wait()
	})
}

// A change of an object in the snapshot causes a new snapshot. A change of the Trench, or of a
// cache that is not in force yet, causes a reconciliation.
func TestChangesOfCaches(t *testing.T) {
	c, err := New(Options{
		Config: &rest.Config{Host: "http://api"}, Namespace: "ns", Trench: "a", Log: slog.New(slog.DiscardHandler),
	})
	harness.Must(t, err)
	inForce, next := key{kind: services, namespace: "ns"}, key{kind: services, namespace: "other"}
	c.keys = []key{inForce}
	for _, step := range []struct {
		synced          bool
		key             key
		snapshot, looks int
	}{
		{false, inForce, 0, 1},
		{false, c.siblings(), 0, 1},
		{true, inForce, 1, 0},
		{true, c.siblings(), 1, 0},
		{true, c.own(), 0, 1},
		{true, next, 0, 1},
	} {
		c.synced, c.first = time.Time{}, time.Time{}
		if step.synced {
			c.synced = time.Now()
		}
		c.changed(step.key)
		c.changed(step.key) // conflates
		if len(c.changes) != step.snapshot || len(c.wake) != step.looks || c.first.IsZero() == (step.snapshot > 0) {
			t.Errorf("%+v: %d changes, %d looks, first %v", step, len(c.changes), len(c.wake), c.first)
		}
		for len(c.changes) > 0 {
			<-c.changes
		}
		for len(c.wake) > 0 {
			<-c.wake
		}
	}
}

// The error count does not decrease when a cache is no longer needed.
func TestErrorsOfEndedCaches(t *testing.T) {
	c, err := New(Options{
		Config: &rest.Config{Host: "http://api"}, Namespace: "ns", Trench: "a", Log: slog.New(slog.DiscardHandler),
	})
	harness.Must(t, err)
	for _, k := range []key{c.own(), c.siblings(), {kind: services, namespace: "ns"}, {kind: pods, namespace: "ns"}} {
		f := newFollower(k.String(), func() {}, func() {})
		f.cancel = func() {}
		close(f.done)
		f.report("x", errors.New("x"))
		c.followers[k] = f
	}
	c.stopExcept([]key{{kind: pods, namespace: "ns"}})
	if n := c.Errors(); n != 4 || len(c.followers) != 3 || c.followers[key{kind: services, namespace: "ns"}] != nil {
		t.Errorf("%d errors, %d caches", n, len(c.followers))
	}
}
