package identity

import (
	"context"
	"io/fs"
	"net"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"google.golang.org/grpc/credentials"
)

// SetIdleTimeout sets how long a stream of the Workload API may be idle.
func SetIdleTimeout(s *Source, d time.Duration) { s.origin.(*workloadAPI).idleTimeout = d }

// Bind exports bind.
func Bind(ctx context.Context, path string, mode fs.FileMode) (*net.UnixListener, error) {
	return bind(ctx, path, mode)
}

// ManualOrigin is an origin that a test controls.
type ManualOrigin struct{}

func (ManualOrigin) String() string { return "the test" }

func (ManualOrigin) watch(ctx context.Context, _ *Source) error {
	<-ctx.Done()
	return ctx.Err()
}

// NewManualSource returns a source whose only input is Offer and Fail.
func NewManualSource(o Options) *Source { return newSource(ManualOrigin{}, o) }

// Offer passes SVIDs to the source, as an origin does.
func (s *Source) Offer(b x509bundle.Source, svids ...*x509svid.SVID) { s.offer(svids, b) }

// Fail passes an error to the source, as an origin does.
func (s *Source) Fail(err error) { s.fail(err) }

// SetAdminUser sets the user whose processes are accepted in addition to root processes.
func SetAdminUser(a *AdminGuard, uid uint32) { a.uid = uid }

// SetPoll sets how often the files of a source are read.
func SetPoll(s *Source, d time.Duration) {
	switch o := s.origin.(type) {
	case *fileSource:
		o.poll = d
	case *dev:
		o.poll = d
	}
}

// SetHandshakeTimeout sets the limit of a handshake on a server.
func SetHandshakeTimeout(c credentials.TransportCredentials, d time.Duration) {
	c.(*mutual).timeout = d
}

// NewRetry returns the delays between the attempts to reach the Workload API.
func NewRetry() (next func() time.Duration) { return newRetry().Next }
