package identitytest

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/test/harness"
)

// WorkloadAPI is a SPIFFE Workload API on its own unix socket. FetchX509SVID follows the standard:
// the security header is required, the first response is immediate, and each change is sent on all
// open streams.
type WorkloadAPI struct {
	workload.UnimplementedSpiffeWorkloadAPIServer

	tb     testing.TB
	path   string
	answer *latest.Value[answer]

	mu      sync.Mutex
	server  *grpc.Server
	done    chan struct{}      // closed when server has ended
	streams *latest.Value[int] // opened since the start
}

// answer is the current response of the API.
type answer struct {
	response *workload.X509SVIDResponse
	err      error
	muted    bool
	late     time.Duration // until err is sent, whatever is set by then
}

// NewWorkloadAPI returns a Workload API that is not started yet and denies every identity. It ends
// with the test.
func NewWorkloadAPI(tb testing.TB) *WorkloadAPI {
	tb.Helper()
	return NewWorkloadAPIAt(tb, filepath.Join(ShortDir(tb), "api.sock"))
}

// NewWorkloadAPIAt is NewWorkloadAPI with its socket at a path in a directory of the caller.
func NewWorkloadAPIAt(tb testing.TB, path string) *WorkloadAPI {
	tb.Helper()
	w := &WorkloadAPI{tb: tb, path: path, answer: latest.New(denied()), streams: latest.New(0)}
	tb.Cleanup(w.Stop)
	return w
}

// Addr returns the value for SPIFFE_ENDPOINT_SOCKET.
func (w *WorkloadAPI) Addr() string { return "unix://" + w.path }

// Start serves on the socket, after Stop with the last answer.
func (w *WorkloadAPI) Start() {
	w.tb.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.server != nil {
		w.tb.Fatal("the Workload API is already started")
	}
	if err := os.Remove(w.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		w.tb.Fatal(err)
	}
	l, err := net.Listen("unix", w.path)
	harness.Must(w.tb, err)
	server, done := grpc.NewServer(), make(chan struct{})
	workload.RegisterSpiffeWorkloadAPIServer(server, w)
	go func() {
		defer close(done)
		if err := server.Serve(l); err != nil {
			w.tb.Errorf("Workload API: %v", err)
		}
	}()
	w.server, w.done = server, done
}

// Stop ends all streams, stops serving and removes the socket. It does nothing when the API is not
// started.
func (w *WorkloadAPI) Stop() {
	w.mu.Lock()
	server, done := w.server, w.done
	w.server = nil
	w.mu.Unlock()
	if server == nil {
		return
	}
	server.Stop()
	<-done
}

// Offer sets the offered SVIDs, the first of which is the default, and the bundle of ca, which
// signed them. Bundles of federated trust domains may be added.
func (w *WorkloadAPI) Offer(ca *CA, svids []*x509svid.SVID, federated ...*x509bundle.Bundle) {
	w.tb.Helper()
	r, err := response(ca, svids, federated)
	harness.Must(w.tb, err)
	w.answer.Set(answer{response: r})
}

func response(ca *CA, svids []*x509svid.SVID, federated []*x509bundle.Bundle) (*workload.X509SVIDResponse, error) {
	r := &workload.X509SVIDResponse{FederatedBundles: make(map[string][]byte)}
	for _, svid := range svids {
		chain, key, err := svid.MarshalRaw()
		if err != nil {
			return nil, err
		}
		r.Svids = append(r.Svids, &workload.X509SVID{
			SpiffeId: svid.ID.String(), X509Svid: chain, X509SvidKey: key, Bundle: der(ca.Bundle()),
		})
	}
	for _, b := range federated {
		r.FederatedBundles[b.TrustDomain().IDString()] = der(b)
	}
	return r, nil
}

func rotated(ca *CA, id spiffeid.ID, ttl time.Duration) (*workload.X509SVIDResponse, error) {
	now := time.Now()
	svid, err := ca.authority.Mint(id, now, now.Add(ttl))
	if err != nil {
		return nil, err
	}
	return response(ca, []*x509svid.SVID{svid}, nil)
}

func der(b *x509bundle.Bundle) []byte {
	var raw []byte
	for _, c := range b.X509Authorities() {
		raw = append(raw, c.Raw...)
	}
	return raw
}

// Deny denies the caller an identity, as SPIRE does without a registration entry. Open streams end.
func (w *WorkloadAPI) Deny() { w.answer.Set(denied()) }

func denied() answer { return answer{err: status.Error(codes.PermissionDenied, "no identity issued")} }

// DenyLate denies each call after a time, as SPIRE's agent does while it cannot find the container
// of the caller. A call that waits is denied even if an SVID is offered by then. Open streams end.
func (w *WorkloadAPI) DenyLate(late time.Duration) {
	a := denied()
	a.late = late
	w.answer.Set(a)
}

// Fail ends all streams with err, such as a gRPC status.
func (w *WorkloadAPI) Fail(err error) { w.answer.Set(answer{err: err}) }

// Garble responds with an unreadable SVID.
func (w *WorkloadAPI) Garble() {
	w.answer.Set(answer{response: &workload.X509SVIDResponse{Svids: []*workload.X509SVID{
		{SpiffeId: "spiffe://example.org/garbled", X509Svid: []byte("no certificate"), X509SvidKey: []byte("no key")},
	}}})
}

// Mute keeps old and new streams open and sends nothing until another answer is set.
func (w *WorkloadAPI) Mute() { w.answer.Set(answer{muted: true}) }

// Rotate offers a new SVID of id, signed by ca and valid for ttl, now and at every interval until
// the returned function is called.
func (w *WorkloadAPI) Rotate(ca *CA, id spiffeid.ID, interval, ttl time.Duration) (stop func()) {
	w.tb.Helper()
	w.Offer(ca, []*x509svid.SVID{ca.SVID(id, ttl)})
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
				r, err := rotated(ca, id, ttl)
				if err != nil {
					w.tb.Errorf("rotation of %s: %v", id, err)
					return
				}
				w.answer.Set(answer{response: r})
			}
		}
	}()
	stop = sync.OnceFunc(func() {
		close(quit)
		<-done
	})
	w.tb.Cleanup(stop)
	return stop
}

// Streams returns how many streams were opened.
func (w *WorkloadAPI) Streams() int { return w.streams.Load() }

// WaitStreams waits until n streams were opened.
func (w *WorkloadAPI) WaitStreams(n int) {
	w.tb.Helper()
	deadline := time.After(waitLimit)
	for {
		opened, changed := w.streams.Get()
		if opened >= n {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			w.tb.Fatalf("%d streams of the Workload API were opened, want %d", opened, n)
		}
	}
}

// FetchX509SVID implements the Workload API.
func (w *WorkloadAPI) FetchX509SVID(_ *workload.X509SVIDRequest,
	stream grpc.ServerStreamingServer[workload.X509SVIDResponse],
) error {
	md, _ := metadata.FromIncomingContext(stream.Context())
	if !slices.Equal(md.Get("workload.spiffe.io"), []string{"true"}) {
		return status.Error(codes.InvalidArgument, "security header missing from request")
	}
	w.mu.Lock()
	w.streams.Set(w.streams.Load() + 1)
	w.mu.Unlock()
	for {
		a, changed := w.answer.Get()
		switch {
		case a.muted:
		case a.err != nil:
			select {
			case <-time.After(a.late):
			case <-stream.Context().Done():
			}
			return a.err
		default:
			if err := stream.Send(a.response); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}
